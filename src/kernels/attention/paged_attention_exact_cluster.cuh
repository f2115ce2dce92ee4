// Decoding for few sequences with batch_invariant, by clusters of blocks as in paged_attention_cluster.cuh.
//
// In a long round each warp of the cluster takes a chunk (paged_attention_exact.cuh), as long as there are chunks for all.
// Then four warps, a team, take one as they do on the line, in rounds for all teams of the cluster.  What is left, the tail,
// is a part or none for each warp, spread over the blocks; its sums go as they are to the blocks that finish the columns.
//
// Blocks that are no cluster may share a KV head, too (paged_attention_exact_apart.cuh).
//
// Chain: length, pages and queries at once -> tiles -> sums -> one exchange -> output.
#pragma once

#include "attention/paged_attention_exact_apart.cuh"

namespace pykv::attention {

template <class S>
struct ExactClusterKernel : ExactApart<S> {
  using Sums = ExactExchange<S>;
  using Base = DecodeLoader<S>;
  using Base::kGroups;
  using Base::lane;
  using Base::p;
  using Base::warp;
  using Sums::cluster;
  using Sums::each;
  using Sums::items;
  using Sums::kPartBytes;
  using Sums::kParts;
  using Sums::kQuads;
  using Sums::kRecordBytes;
  using Sums::kv_head;
  using Sums::rank;
  using Sums::sequence;
  using typename Base::State;
  using typename Sums::Exchange;
  static constexpr int kD = S::kD, kTile = S::kTile, kStages = S::kStages;
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

  // ---- who takes what -----------------------------------------------------------------------------------------------

  int long_rounds = 0;      // of chunks for all warps
  int rounds = 0;           // of chunks for all teams
  int tail_parts = 0;       // of all blocks
  bool takes_tail = false;  // this warp

  static constexpr int kBarrierBytes = 16;  // aligned
  static_assert(kParts == kTeamWarps);

  __device__ bool is_linked() const { return cluster > 1 && !this->is_apart(); }
  __device__ bool has_rounds() const { return long_rounds + rounds > 0; }

  __device__ void share(int len) {
    const int parts = (len + kPartTokens - 1) / kPartTokens, chunks = (parts + kParts - 1) / kParts;
    rounds = p.by_round.quotient(chunks);
    long_rounds = rounds / kTeamWarps;
    rounds %= kTeamWarps;
    const int left = max(0, parts - long_rounds * warps * cluster * kParts);
    const auto has_room = [&](bool records) {
      const int room = p.exchange_bytes - (records && cluster > 1 ? cluster * each * kRecordBytes : 0);
      return tail_parts * each * kPartBytes <= room;
    };
    tail_parts = left;
    if (left <= warps * cluster && has_room(long_rounds > 0)) {
      rounds = 0;
    } else {
      tail_parts = max(0, left - rounds * teams * cluster * kParts);
      if (tail_parts > 0 && !has_room(true)) {
        ++rounds;
        tail_parts = 0;
      }
    }
    takes_tail = warp * cluster + rank < tail_parts;
  }

  // The i-th tile of this warp if there were so many rounds; what lies past the end does not exist.
  __device__ int first_token(int long_rounds, int rounds, int i) const {
    int run = i / kPartTiles;
    const int in_part = i % kPartTiles * kTile;
    if (run < long_rounds * kParts) {
      return ((run / kParts * warps + warp) * cluster + rank) * kChunkTokens + run % kParts * kPartTokens + in_part;
    }
    run -= long_rounds * kParts;
    const int before = long_rounds * warps * cluster * kChunkTokens + in_part;
    if (run < rounds) {
      return before + ((run * teams + team) * cluster + rank) * kChunkTokens + warp % kTeamWarps * kPartTokens;
    }
    return before + rounds * teams * cluster * kChunkTokens + (warp * cluster + rank) * kPartTokens;
  }

  // Lane: of the tile lane % 16 / kGroups after the i-th, eight tokens.
  __device__ int look_up_tiles(int long_rounds, int rounds, int i, int end) const {
    const int token = first_token(long_rounds, rounds, i + lane % 16 / kGroups) + lane % kGroups * kGroupTokens;
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

  // Of the parts of a chunk that a warp has for itself.
  struct Chunk {
    float o[Base::kQueryTiles][kD / 16][4];
    float maximum[Base::kQueryTiles][2], sum[Base::kQueryTiles][2];
  };

  static __device__ void clear_chunk(Chunk& chunk) {
#pragma unroll
    for (int i = 0; i < Base::kQueryTiles; ++i) {
      for (int e = 0; e < 2; ++e) {
        chunk.maximum[i][e] = -INFINITY;
        chunk.sum[i][e] = 0;
      }
#pragma unroll
      for (auto& o : chunk.o[i]) {
        for (float& x : o) x = 0;
      }
    }
  }

  // The chunk's sums, where those of a part lay.
  __device__ void take_chunk(Chunk& chunk, State& state) const {
#pragma unroll
    for (int i = 0; i < Base::kQueryTiles; ++i) {
      for (int e = 0; e < 2; ++e) {
        state.maximum[i][e] = chunk.maximum[i][e];
        state.sum[i][e] = lane / 4 == 0 ? chunk.sum[i][e] : 0.f;  // of all lanes
      }
#pragma unroll
      for (int n = 0; n < kD / 16; ++n) {
        for (int h = 0; h < 4; ++h) state.o[i][n][h] = chunk.o[i][n][h];
      }
    }
    clear_chunk(chunk);
  }

  // As PartsOfChunk does it.
  __device__ void end_part(State& state, Chunk& chunk) const {
#pragma unroll
    for (int i = 0; i < Base::kQueryTiles; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float sum = state.sum[i][e];
        for (int m = 4; m < 32; m *= 2) sum += __shfl_xor_sync(~0u, sum, m);
        const float top = fmaxf(chunk.maximum[i][e], state.maximum[i][e]), base = top == -INFINITY ? 0.f : top;
        const float old = power_of_2(chunk.maximum[i][e] - base), weight = power_of_2(state.maximum[i][e] - base);
        chunk.maximum[i][e] = top;
        chunk.sum[i][e] = fmaf(sum, weight, chunk.sum[i][e] * old);
#pragma unroll
        for (int n = 0; n < kD / 16; ++n) {
          for (int h = e; h < 4; h += 2) {
            chunk.o[i][n][h] = fmaf(state.o[i][n][h], weight, chunk.o[i][n][h] * old);
          }
        }
      }
    }
    this->clear_sums(state);
  }

  // A team adds up what its warps found, a part of a chunk each or a chunk, through the stage that they are done with.
  __device__ void end_chunk(State& state, int stage, bool whole, Kept& kept) const {
    const int first = team * kTeamWarps;
    float* left = reinterpret_cast<float*>(rings + first * S::kRingBytes + stage * S::kStageBytes);
    leave(state, left + (warp - first) * kRing, stats_of(warp));
    sync_team();
    for_each_kept(kept, [&](ExactQuad& x, int column, int d) {
      PartsOfChunk sum;
#pragma unroll 1
      for (int w = 0; w < kTeamWarps; ++w) {
        sum.add(stats_of(first + w)[column], left_at(left + w * kRing, column, d));
        if (!whole && w < kTeamWarps - 1) continue;
        x.add(sum.o, sum.sum, sum.maximum);
        sum = {};
      }
    });
    sync_team();  // the stage is free
    this->clear_sums(state);
  }

  // ---- the loop -----------------------------------------------------------------------------------------------------

  __device__ void run() {
    if (is_linked()) {
      if (threadIdx.x == 0) cluster_open(shared_address(barrier()));
      cluster_announce();  // others may send
    }
    if (blockIdx.x < p.early_blocks) {
      const int guess = this->early_length(sequence);
      share(static_cast<int>(clamp(guess, 0, p.a.max_seq_len)));
      this->foresee(sequence, kv_head, guess, first_token(long_rounds, rounds, 0));
    }
    wait_for_previous_kernel();
    // Pages of the first tiles, in a round for the first lanes, in a tail for the others; later, of the next part.
    const int most = static_cast<int>(p.a.max_seq_len);
    int ids = look_up_tiles(0, lane / 16 == 0, 0, most), long_ids = look_up_tiles(1, 0, 0, most), later_ids = -1;
    const int len = this->length(sequence);
    State state;
    this->fetch_queries(sequence, kv_head, state);
    share(len);
    int ids_at = long_rounds + rounds > 0 ? 0 : 16 / kGroups;
    if (long_rounds > 0) ids = long_ids;
    const int tiles = (long_rounds * kParts + rounds + takes_tail) * kPartTiles;
    Chunk chunk;
    clear_chunk(chunk);
    Kept kept;
    kept.near.clear();
    for (ExactQuad& x : kept.far) x.clear();

    const uint32_t stage0 = shared_address(rings + warp * S::kRingBytes);
    uint32_t valid[kStages];  // of tiles i to i + stages - 1
    int at = 0, free = 0;     // the stages of the first and the last of these
    int token = 0;            // the last one's first
    const auto after = [](int stage) { return stage + 1 == kStages ? 0 : stage + 1; };
#pragma unroll 1
    for (int i = 1 - kStages;; ++i) {
      const int next = i + kStages - 1;
      TilePart part{sequence, len, kv_head, 0, 0, 0, true, false, false, false};
      if (next < tiles) {
        token += kTile;
        if (next % kPartTiles == 0) {
          token = first_token(long_rounds, rounds, next);
          if (next > 0) {
            ids = later_ids;
            ids_at = 0;
          }
          later_ids = look_up_tiles(long_rounds, rounds, next + kPartTiles, len);
        }
        part.first_token = token;
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
        if (is_linked()) {
          this->await_cluster(barrier(), has_rounds(), tail_parts);  // the first tile is still on its way
        }
        if (cluster <= 2 || len <= 2048) let_next_kernel_start();
      }
      if (i >= tiles) break;
      if (!state.plain) part.first_token = first_token(long_rounds, rounds, i);
      part.valid = valid[0];
      cp_async_wait<kStages - 1>();
      __syncwarp();  // the tile is there
      this->attend(rings + warp * S::kRingBytes, at * S::kStageBytes, part, state);
      __syncwarp();  // its stage is free
      if ((i + 1) % kPartTiles == 0) {
        const int run = i / kPartTiles;
        const bool whole = run < long_rounds * kParts;
        if (whole) end_part(state, chunk);
        if (whole ? run % kParts == kParts - 1 : run < long_rounds * kParts + rounds) {
          if (whole) take_chunk(chunk, state);
          end_chunk(state, at, whole, kept);
        }
      }
      at = after(at);
    }
    finish(state, kept, len);
    if (rank == 0 && kv_head == 0 && threadIdx.x == 0) report_sequence(p, load_sequence(p, sequence));
  }

  // ---- the end ------------------------------------------------------------------------------------------------------

  // It counts what others send.
  __device__ uint64_t* barrier() const { return reinterpret_cast<uint64_t*>(stats + warps * S::kColumns); }

  __device__ void finish(const State& state, Kept& kept, int len) const {
    Exchange to = this->exchange_at(reinterpret_cast<char*>(barrier()) + kBarrierBytes, barrier(),
                                    has_rounds() && cluster > 1, tail_parts);
    if (cluster == 1) to.records = reinterpret_cast<ExactQuad*>(rings);  // [team][item]
    if (takes_tail) send_part(state, to);
    if (has_rounds() || this->is_apart()) send_records(to, kept);
    if (this->is_apart()) return this->join(rings, warps * S::kRingBytes, len);
    this->add_up(to, !has_rounds() ? 0 : cluster == 1 ? teams : cluster, tail_parts, len);
  }

  // This warp's part of the tail.
  __device__ void send_part(const State& state, const Exchange& to) const {
    float* left = reinterpret_cast<float*>(rings + warp * S::kRingBytes);
    leave(state, left, stats_of(warp));
    __syncwarp();
    const int part = warp * cluster + rank;
#pragma unroll 1
    for (int item = lane; item < items; item += 32) {
      const float2 found = stats_of(warp)[item / kQuads];
      const float4 sum = left_at(left, item / kQuads, item % kQuads * 4);
      if (cluster == 1) {
        to.parts[part * each + item] = sum;
        to.part_stats[part * each + item] = found;
      } else {
        Sums::send_part(to, part, item, found, sum);
      }
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
      if (this->is_apart()) {
        this->leave_record(item, sum);
      } else {
        this->send_record(to, item, sum);
      }
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
    paged_attention_exact_cluster_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies,
                                         uint64_t ticket) {
  extern __shared__ __align__(1024) char memory[];
  ExactClusterKernel<S> kernel{
      {{{{{{{p, copies}}}}}}, ticket}, memory, reinterpret_cast<float2*>(memory + blockDim.x / 32 * S::kRingBytes)};
  kernel.run();
}

// One long sequence, by more blocks for a KV head than a cluster has.  False if the call had better go another way: the host
// knows no length, hence the limit (in tokens) of what the table has room for.
template <class S>
bool launch_apart(Problem p, int64_t least_tokens, const Launch& launch) {
  constexpr int kLeast = 9, kMost = 32;  // blocks
  const int blocks = std::min(kMost, num_sms(launch.device) / p.a.num_kv_heads);
  const int bytes = S::kWarps * S::kRingBytes + exact_stats_bytes<S>(S::kWarps);
  if (p.a.num_seqs > 1 || p.a.max_seq_len < least_tokens || blocks < kLeast ||
      bytes > static_cast<int>(shared_memory_limit(launch.device))) {
    return false;
  }
  const auto kernel = paged_attention_exact_cluster_kernel<S>;
  static PerDevice allowed;
  allow_shared_memory(kernel, static_cast<int>(shared_memory_limit(launch.device)), allowed, p.a.op, launch);
  set_tiling(p, few_rows_tiling(p.a.head_size), 1, launch.device);  // where the records go
  set_cluster(p, blocks, S::kD, launch.device);
  p.by_round = Divider(blocks * S::kWarps / ExactClusterKernel<S>::kTeamWarps);
  p.exchange_bytes = 0;  // whole chunks only
  launch_after(kernel, dim3(static_cast<unsigned>(p.a.num_kv_heads * blocks)), dim3(S::kWarps * 32), 1, bytes, launch,
               p.a.op, p, cache_copies<S>(p.a), next_ticket());
  return true;
}

}  // namespace pykv::attention
