// Decoding for few sequences with batch_invariant, by clusters of blocks as in paged_attention_cluster.cuh.
//
// Four warps, a team, take a chunk (paged_attention_exact.cuh) as they do on the line.  The teams of a cluster take one each
// in a round, as long as there are chunks for all.  What is left, the tail, is a part or none for each warp, spread over
// the blocks; its sums go as they are to the blocks that finish the columns.
//
// Chain: length, pages and queries at once -> tiles -> sums -> one exchange -> output.
#pragma once

#include "attention/paged_attention_decode.cuh"
#include "cuda/cluster.cuh"

namespace pykv::attention {

template <class S>
struct ExactClusterKernel : DecodeLoader<S> {
  using Base = DecodeLoader<S>;
  using Base::kGroups;
  using Base::lane;
  using Base::p;
  using Base::warp;
  using typename Base::State;
  static constexpr int kD = S::kD, kTile = S::kTile, kStages = S::kStages, kQuads = kD / 4;
  static constexpr int kTeamWarps = 4, kPartTiles = kPartTokens / kTile;
  static constexpr int kLeaf = S::kColumns * kD * 4;  // bytes of a warp's sums
  static constexpr int kRing = S::kRingBytes / 4;
  static_assert(kPartTokens == 16 * kGroupTokens);  // half a warp looks up a part
  static_assert(kLeaf <= S::kStageBytes && !S::kRaw);

  // Four columns of a query each, a team's threads in turn: the first in registers.
  static constexpr int kKept = (S::kColumns * kQuads + kThreads - 1) / kThreads;
  struct Kept {
    ExactQuad near, far[kKept > 1 ? kKept - 1 : 1];
  };

  char* rings;    // all warps' stages
  float2* stats;  // [warp][column]: maximum and sum
  const int warps = blockDim.x / 32, teams = warps / kTeamWarps, team = warp / kTeamWarps;
  const int cluster = p.cluster, task = p.by_cluster.quotient(blockIdx.x), rank = p.by_cluster.remainder(blockIdx.x);
  const int sequence = task / p.a.num_kv_heads, kv_head = task - sequence * p.a.num_kv_heads;
  const int items = p.group * kQuads, each = p.block_items;  // of all blocks, of one

  // ---- who takes what -----------------------------------------------------------------------------------------------

  int rounds = 0;           // of chunks for all teams
  int tail_parts = 0;       // of all blocks
  bool takes_tail = false;  // this warp

  static constexpr int kBarrierBytes = 16;  // aligned
  static constexpr int kRecordBytes = sizeof(ExactQuad);
  static constexpr int kPartBytes = sizeof(float4) + sizeof(float2);

  __device__ void share(int len) {
    constexpr int kParts = kChunkTokens / kPartTokens;
    const int parts = (len + kPartTokens - 1) / kPartTokens, chunks = (parts + kParts - 1) / kParts;
    rounds = p.by_round.quotient(chunks);
    tail_parts = max(0, parts - rounds * teams * cluster * kParts);
    const int room = p.exchange_bytes - (rounds > 0 && cluster > 1 ? cluster * each * kRecordBytes : 0);
    if (tail_parts * each * kPartBytes > room) {
      ++rounds;
      tail_parts = 0;
    }
    takes_tail = warp * cluster + rank < tail_parts;
  }

  // The i-th tile of this warp if there were so many rounds; what lies past the end does not exist.
  __device__ int first_token(int rounds, int i) const {
    const int run = i / kPartTiles;
    if (run < rounds) {
      return ((run * teams + team) * cluster + rank) * kChunkTokens + warp % kTeamWarps * kPartTokens +
             i % kPartTiles * kTile;
    }
    return rounds * teams * cluster * kChunkTokens + (warp * cluster + rank) * kPartTokens + i % kPartTiles * kTile;
  }

  // Lane: of the tile lane % 16 / kGroups after the i-th, eight tokens.
  __device__ int look_up_tiles(int rounds, int i, int end) const {
    const int token = first_token(rounds, i + lane % 16 / kGroups) + lane % kGroups * kGroupTokens;
    return token < end ? this->look_up(sequence, token) : -1;
  }

  // ---- sums ---------------------------------------------------------------------------------------------------------

  __device__ void sync_team() const {
    const auto sync = [](auto barrier) {  // a number that the compiler knows: else it would take all of them
      asm volatile("bar.sync %0, %1;" ::"n"(decltype(barrier)::value), "n"(kThreads) : "memory");
    };
    if (team == 0) {
      sync(std::integral_constant<int, 1>());
    } else if (S::kWarps > 4 && team == 1) {
      sync(std::integral_constant<int, 2>());
    } else if (S::kWarps > 8) {
      sync(std::integral_constant<int, 3>());
    }
  }

  __device__ float2 (&stats_of(int w) const)[S::kColumns] {
    return *reinterpret_cast<float2(*)[S::kColumns]>(stats + w * S::kColumns);
  }

  // body(kept, column, d): what this thread keeps of four columns of a query.
  __device__ void for_each_kept(Kept& kept, auto&& body) const {
    const auto visit = [&](int j, ExactQuad& x) {
      const int item = threadIdx.x % kThreads + j * kThreads;
      if (item < items) body(x, item / kQuads, item % kQuads * 4);
    };
    visit(0, kept.near);
#pragma unroll 1
    for (int j = 1; j < kKept && j * kThreads < items; ++j) visit(j, kept.far[hidden(j - 1)]);
  }

  // A warp's sums, each lane's in four neighbouring places.
  __device__ void leave(const State& state, float* to, float2 (&stats)[S::kColumns]) const {
#pragma unroll
    for (int i = 0; i < Base::kQueryTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int column = i * 8 + lane % 4 * 2 + e;
        float sum = state.sum[i][e];
        for (int m = 4; m < 32; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
        if (lane / 4 == 0 && column < p.group) stats[column] = {state.maximum[i][e], sum};
      }
#pragma unroll
      for (int n = 0; n < kD / 16; ++n) {
        const float (&x)[4] = state.o[i][n];
        reinterpret_cast<float4*>(to)[(i * (kD / 16) + n) * 32 + (lane ^ n % 8)] = {x[0], x[1], x[2], x[3]};
      }
    }
  }

  // From there, four columns of a query.
  static __device__ float4 left_at(const float* from, int column, int d) {
    const int n = d / 16;
    float x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int h = S::kPermutedOutput ? k % 2 : d / 8 % 2, row = S::kPermutedOutput ? (d % 16 + k) / 2 : d % 8 + k;
      const int of = row * 4 + column / 2 % 4;  // the lane
      x[k] = from[((column / 8 * (kD / 16) + n) * 32 + (of ^ n % 8)) * 4 + 2 * h + column % 2];
    }
    return {x[0], x[1], x[2], x[3]};
  }

  // A team adds up what its warps found in a chunk, through the stage that they are done with.
  __device__ void end_chunk(State& state, int stage, Kept& kept) const {
    const int first = team * kTeamWarps;
    float* left = reinterpret_cast<float*>(rings + first * S::kRingBytes + stage * S::kStageBytes);
    leave(state, left + (warp - first) * kRing, stats_of(warp));
    sync_team();
    for_each_kept(kept, [&](ExactQuad& x, int column, int d) {
      PartsOfChunk sum;
#pragma unroll
      for (int w = 0; w < kTeamWarps; ++w) {
        sum.add(stats_of(first + w)[column], left_at(left + w * kRing, column, d));
      }
      x.add(sum.o, sum.sum, sum.maximum);
    });
    sync_team();  // the stage is free
    this->clear_sums(state);
  }

  // Where a warp leaves its part of the tail.
  __device__ float* part_left(int w) const { return reinterpret_cast<float*>(rings + w * S::kRingBytes); }

  // ---- the loop -----------------------------------------------------------------------------------------------------

  __device__ void run() {
    if (cluster > 1) {
      if (threadIdx.x == 0) cluster_open(shared_address(barrier()));
      cluster_announce();  // others may send
    }
    if (blockIdx.x < p.early_blocks) {
      const int guess = this->early_length(sequence);
      share(static_cast<int>(clamp(guess, 0, p.a.max_seq_len)));
      this->foresee(sequence, kv_head, guess, first_token(rounds, 0));
    }
    wait_for_previous_kernel();
    // Pages of the first tiles, in a round for the first lanes, in a tail for the others; later, of the next part.
    int ids = look_up_tiles(lane / 16 == 0, 0, static_cast<int>(p.a.max_seq_len)), later_ids = -1;
    const int len = this->length(sequence);
    State state;
    this->fetch_queries(sequence, kv_head, state);
    share(len);
    int ids_at = rounds > 0 ? 0 : 16 / kGroups;
    const int tiles = (rounds + takes_tail) * kPartTiles;
    Kept kept;
    kept.near.clear();
    for (ExactQuad& x : kept.far) x.clear();

    const uint32_t stage0 = shared_address(rings + warp * S::kRingBytes);
    uint32_t valid[kStages];  // of tiles i to i + stages - 1
    int at = 0, free = 0;     // the stages of the first and the last of these
    const auto after = [](int stage) { return stage + 1 == kStages ? 0 : stage + 1; };
#pragma unroll 1
    for (int i = 1 - kStages;; ++i) {
      const int next = i + kStages - 1;
      TilePart part{sequence, len, kv_head, 0, 0, 0, true, false, false, false};
      if (next < tiles) {
        if (next % kPartTiles == 0) {
          if (next > 0) {
            ids = later_ids;
            ids_at = 0;
          }
          later_ids = look_up_tiles(rounds, next + kPartTiles, len);
        }
        part.first_token = first_token(rounds, next);
        if (part.first_token < len) {
          part.valid =
              Base::start(stage0 + free * S::kStageBytes, part, Base::pages_of(ids, next % kPartTiles + ids_at));
        }
      }
      cp_async_commit();
      free = after(free);
#pragma unroll
      for (int k = 0; k + 1 < kStages; ++k) valid[k] = valid[k + 1];
      valid[kStages - 1] = part.valid;
      if (i < 0) continue;
      if (i == 0) {
        this->settle(kv_head, state);
        if (cluster > 1) {
          if (threadIdx.x == 0) cluster_expect(shared_address(barrier()), expected_bytes());
          cluster_wait();  // all blocks are there; the first tile is still on its way
        }
        if (cluster <= 2 || len <= 2048) let_next_kernel_start();
      }
      if (i >= tiles) break;
      if (!state.plain) part.first_token = first_token(rounds, i);
      part.valid = valid[0];
      cp_async_wait<kStages - 1>();
      __syncwarp();  // the tile is there
      this->attend(rings + warp * S::kRingBytes, at * S::kStageBytes, part, state);
      __syncwarp();  // its stage is free
      if ((i + 1) % kPartTiles == 0 && i < rounds * kPartTiles) end_chunk(state, at, kept);
      at = after(at);
    }
    if (takes_tail) leave(state, part_left(warp), stats_of(warp));
    finish(kept, len);
    if (rank == 0 && kv_head == 0 && threadIdx.x == 0) report_sequence(p, load_sequence(p, sequence));
  }

  // ---- the end ------------------------------------------------------------------------------------------------------

  // What a block finds in its shared memory once all have sent: records [block or, if there is but one, team][item], the
  // parts of the tail [part][item], and their maxima and sums.
  struct Exchange {
    ExactQuad* records;
    float4* parts;
    float2* part_stats;
  };

  // It counts what others send.
  __device__ uint64_t* barrier() const { return reinterpret_cast<uint64_t*>(stats + warps * S::kColumns); }

  __device__ int expected_bytes() const {
    const int own = max(min(items - rank * each, each), 0);
    return own * (tail_parts * kPartBytes + (rounds > 0 ? cluster * kRecordBytes : 0));
  }

  __device__ Exchange exchange() const {
    char* at = reinterpret_cast<char*>(barrier()) + kBarrierBytes;
    Exchange x;
    x.records = reinterpret_cast<ExactQuad*>(cluster == 1 ? rings : at);
    x.parts = reinterpret_cast<float4*>(at + (rounds > 0 && cluster > 1 ? cluster * each * kRecordBytes : 0));
    x.part_stats = reinterpret_cast<float2*>(x.parts + tail_parts * each);
    return x;
  }

  __device__ void finish(Kept& kept, int len) const {
    const Exchange to = exchange();
    if (tail_parts > 0) {
      __syncthreads();
      send_parts(to);
    }
    if (rounds > 0) send_records(to, kept);
    if (cluster == 1) {
      __syncthreads();
    } else {
      cluster_receive(shared_address(barrier()));
    }
    add_up(to, len);
  }

  __device__ void send_parts(const Exchange& to) const {
    const int parts = p.by_cluster.quotient(max(tail_parts - rank, 0) + cluster - 1);  // of this block
#pragma unroll 1
    for (int x = threadIdx.x; x < parts * items; x += blockDim.x) {
      const int w = p.by_tile_heads.quotient(x / kQuads), column = x / kQuads - w * p.group, item = x - w * items;
      const float2 found = stats_of(w)[column];
      const float4 sum = left_at(part_left(w), column, x % kQuads * 4);
      const int block = p.by_block_items.quotient(item), at = (w * cluster + rank) * each + item - block * each;
      if (cluster == 1) {
        to.parts[at] = sum;
        to.part_stats[at] = found;
        continue;
      }
      const uint32_t counter = cluster_address(shared_address(barrier()), block);
      cluster_send(cluster_address(shared_address(to.parts + at), block), sum, counter);
      cluster_send(cluster_address(shared_address(to.part_stats + at), block), found, counter);
    }
  }

  __device__ void send_records(const Exchange& to, Kept& kept) const {
    auto* staged = reinterpret_cast<ExactQuad*>(rings);  // [team][item]
    __syncthreads();                                     // nobody needs the stages
    for_each_kept(kept,
                  [&](const ExactQuad& x, int column, int d) { staged[team * items + column * kQuads + d / 4] = x; });
    __syncthreads();
    if (cluster == 1) return;
#pragma unroll 1
    for (int item = threadIdx.x; item < items; item += blockDim.x) {
      ExactQuad sum = staged[item];
      for (int t = 1; t < teams; ++t) sum.add(staged[t * items + item]);
      const int block = p.by_block_items.quotient(item);
      const uint32_t at = cluster_address(shared_address(to.records + rank * each + item - block * each), block);
      const uint32_t counter = cluster_address(shared_address(barrier()), block);
      const auto* words = reinterpret_cast<const float4*>(&sum);
#pragma unroll
      for (int i = 0; i < kRecordBytes / 16; ++i) cluster_send(at + i * 16, words[i], counter);
    }
  }

  // Neighbouring lanes share the chunks and records of four columns.
  __device__ void add_up(const Exchange& from, int len) const {
    constexpr int kParts = kChunkTokens / kPartTokens;
    const int chunks = (tail_parts + kParts - 1) / kParts, records = rounds == 0 ? 0 : cluster == 1 ? teams : cluster;
    int shift = 0;
    while (shift < 3 && 1 << shift < chunks + records) ++shift;
    const int lanes = 1 << shift, mine = threadIdx.x & (lanes - 1);
#pragma unroll 1
    for (int first = 0; first < each; first += blockDim.x >> shift) {
      const int i = first + (threadIdx.x >> shift), x = rank * each + i;
      const bool exists = i < each && x < items;
      ExactQuad sum = ExactQuad::empty();
#pragma unroll 1
      for (int u = mine; exists && u < chunks + records; u += lanes) {
        if (u < chunks) {
          PartsOfChunk chunk;
#pragma unroll
          for (int j = 0; j < kParts; ++j) {
            const int part = u * kParts + j;
            if (part < tail_parts) chunk.add(from.part_stats[part * each + i], from.parts[part * each + i]);
          }
          sum.add(chunk.o, chunk.sum, chunk.maximum);
        } else {
          sum.add(from.records[(u - chunks) * each + i]);
        }
      }
#pragma unroll 1
      for (int m = 1; m < lanes; m *= 2) sum.add(sum.of_lane(m));
      if (!exists || mine != 0) continue;
      const Row row = this->row_of_column(sequence, len, kv_head, x / kQuads);
      store_output<S>(p, row, x % kQuads * 4, sum.finish(p, row, kv_head));
    }
  }
};

// What the shared memory holds beside the stages: the tail's statistics, and a barrier.
template <class S>
constexpr int exact_stats_bytes(int warps) {
  using Kernel = ExactClusterKernel<S>;
  return warps * S::kColumns * static_cast<int>(sizeof(float2)) + Kernel::kBarrierBytes;
}

// Of the exchange, as much as there may be of use and room for a block; -1: not enough.
template <class S>
int exact_exchange_bytes(int group, int blocks, int warps, int device) {
  using Kernel = ExactClusterKernel<S>;
  if (blocks * warps == Kernel::kTeamWarps) return 0;  // whole chunks only
  const int each = (group * Kernel::kQuads + blocks - 1) / blocks;
  const int records = blocks == 1 ? 0 : blocks * each * Kernel::kRecordBytes;
  const int room = static_cast<int>(shared_memory_limit(device)) - warps * S::kRingBytes - exact_stats_bytes<S>(warps);
  if (records > room) return -1;
  return std::min(room, records + warps * blocks * each * Kernel::kPartBytes);
}

template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    paged_attention_exact_cluster_kernel(const __grid_constant__ Problem p,
                                         const __grid_constant__ CacheCopies copies) {
  extern __shared__ __align__(1024) char memory[];
  ExactClusterKernel<S> kernel{
      {{{{p, copies}}}}, memory, reinterpret_cast<float2*>(memory + blockDim.x / 32 * S::kRingBytes)};
  kernel.run();
}

}  // namespace pykv::attention
