// Decoding for few sequences, or many short ones, with batch_invariant: the eight warps of a block take a part
// (paged_attention_exact.cuh) together, so that a part, 128 keys from first to last, takes an eighth of one warp's time.
//
// A part has eight tiles of 16 keys.  Scores of a tile need nothing of the others: each warp has one.  Weights need the
// running maximum, which follows the tiles from first to last: all warps see the maxima of all tiles and find out alike.
// Sums of values are made from the first tile to the last, but each for itself: each warp has 16 dimensions of all tiles.
// So every sum has the terms and the order that one warp would have given it, and nobody adds up what warps found.
//
// While a part's values are multiplied, the next part's scores are there already: one barrier for a part.
//
// Floor: KV bytes / bandwidth + the chain length -> page -> tile -> exchange.
#pragma once

#include "attention/paged_attention_joint_part.cuh"
#include "cuda/device.h"

namespace pykv::attention {

template <class S>
struct JointKernel : JointPart<S> {
  using Sums = typename JointPart<S>::Sums;
  using Base = DecodeLoader<S>;
  using Base::copies;
  using Base::lane;
  using Base::p;
  using Base::warp;
  using Sums::cluster;
  using Sums::kParts;
  using Sums::kQuads;
  using Sums::kv_head;
  using Sums::rank;
  using Sums::sequence;
  using typename Base::FirstLoads;
  using typename Base::Pages;
  using typename Base::PageWords;
  using typename Base::State;
  using typename JointPart<S>::Tile;
  using typename Sums::Exchange;
  static constexpr int kTile = S::kTile, kAhead = S::kAhead, kMostParts = 2;
  static_assert(kMostParts < kParts);

  char* rings;  // keys of `kAhead` parts, values of one more
  char* exchanged;
  uint64_t* barrier;  // counts what others send

  // ---- who takes what -----------------------------------------------------------------------------------------------

  int rounds = 0;      // of a chunk for each block; none in clusters, whose blocks have kMostParts at the most
  int tail_parts = 0;  // what is left, of all blocks: a part for each in turn
  int parts = 0;       // of this block

  __device__ void share(int len) {
    const int all = (len + kPartTokens - 1) / kPartTokens, chunks = (all + kParts - 1) / kParts;
    rounds = p.by_cluster.quotient(chunks);
    tail_parts = max(0, all - rounds * cluster * kParts);
    parts = rounds * kParts + p.by_cluster.quotient(max(0, tail_parts - rank + cluster - 1));
    if (rounds > 0 && (rounds - 1) * cluster + rank == chunks - 1) parts -= chunks * kParts - all;
  }

  // Of this block's j-th part, if there were so many rounds; what lies past the end does not exist.
  __device__ int first_token(int rounds, int j) const {
    const int part = j < rounds * kParts ? (j / kParts * cluster + rank) * kParts + j % kParts
                                         : rounds * kParts * cluster + (j - rounds * kParts) * cluster + rank;
    return part * kPartTokens;
  }

  // ---- copies -------------------------------------------------------------------------------------------------------

  static constexpr uint32_t kAll = (1u << kTile) - 1;
  static constexpr int kAtOnce = Base::kAtOnce, kGuessed = 4;  // parts

  // Lane: of the part lane / 2 after the j-th, eight tokens.
  __device__ int token_to_look_up(int rounds, int j) const {
    return first_token(rounds, j + lane / 2) + warp * kTile + lane % 2 * kGroupTokens;
  }
  __device__ int look_up_parts(int rounds, int j, int end) const {
    const int token = token_to_look_up(rounds, j);
    return token < end ? this->look_up(sequence, token) : -1;
  }

  // In a round for the first lanes, in the tail for the next.
  __device__ FirstLoads find_first_loads() const {
    const int token = token_to_look_up(lane < 2 * kGuessed, lane < 2 * kGuessed ? 0 : -kGuessed);
    return Base::find_first_loads(sequence, token, lane < 4 * kGuessed && token < p.a.max_seq_len);
  }

  __device__ Tile tile_of(int j, int ids, int place, int len) const {
    Tile tile{Base::pages_of(ids, place), first_token(rounds, j) + warp * kTile, kAll};
    bool whole = tile.first_token + kTile <= len;
    for (const int id : tile.pages.id)
      whole = whole && static_cast<uint32_t>(id) < static_cast<uint32_t>(p.a.num_blocks);
    if (!whole) {
      tile.valid = this->valid_places({sequence, len, kv_head, tile.first_token, 0, 0, 0, true, false, false, false},
                                      tile.pages);
    }
    return tile;
  }

  // Starts the copies of a tile's keys or values; zeros come for tokens that are not there.
  template <bool kValues>
  __device__ void start_rows(uint32_t to, const Tile& tile) const {
    constexpr int kChunks = Base::kChunks, kRows = 32 / kChunks;  // rows of a step of the warp
    const int chunk = lane % kChunks, r0 = lane / kChunks;
    const int64_t block = kValues ? copies.value_block : copies.key_block;
    const int64_t token = kValues ? copies.value_token : copies.key_token;
    const char* const data = static_cast<const char*>(kValues ? p.a.value.data : p.a.key.data);
    const char* from =
        data + times(kValues ? copies.value_head : copies.key_head, kv_head) + times(token, r0) + chunk * 16;
    const int o = p.block_size.remainder(tile.first_token);
    const int later = o + kGroupTokens == p.a.block_size ? 0 : o + kGroupTokens;
    const char* const first = from + times(block, tile.pages.id[0]) + times(token, o);
    const char* const second = from + times(block, tile.pages.id[1]) + times(token, later);
    const int64_t step = kRows * token;
    if (tile.valid == kAll && copies.head_bytes == S::kRowBytes) {
#pragma unroll
      for (int i = 0; i < kTile / kRows; ++i) {
        constexpr int kHalf = kGroupTokens / kRows;
        const char* row = i < kHalf ? first + i * step : second + (i - kHalf) * step;
        cp_async_16_once(to + swizzled<S::kRowBytes>(r0 + i * kRows, chunk), row);
      }
      return;
    }
    const bool in_head = chunk * 16 < copies.head_bytes;
#pragma unroll 1
    for (int r = r0; r < kTile; r += kRows) {
      const bool read = in_head && (tile.valid >> r & 1);
      const char* row = (r < kGroupTokens ? first : second) + times(token, r % kGroupTokens - r0 % kGroupTokens);
      cp_async_16_once(to + swizzled<S::kRowBytes>(r, chunk), read ? row : data, read);
    }
  }

  // ---- the loop -----------------------------------------------------------------------------------------------------

  __device__ void run() {
    if (cluster > 1) {
      if (threadIdx.x == 0) cluster_open(shared_address(barrier));
      cluster_announce();  // others may send
    }
    // What can be found out before the kernel before has ended, is, so that loads come right after it.
    auto queries = this->find_queries(sequence, kv_head);
    this->have_queries_ready(queries);
    const FirstLoads first = find_first_loads();
    if (blockIdx.x < p.early_blocks) {
      const int guess = this->early_length(sequence);
      share(static_cast<int>(clamp(guess, 0, p.a.max_seq_len)));
      this->foresee(sequence, kv_head, guess, first_token(rounds, 0) + warp * kTile);
    }
    wait_for_previous_kernel();
    const PageWords pages = this->ask_for_pages(first);
    const int len = this->length(first);
    State state;
    this->fetch_queries(queries, state);
    int ids = pages.id(), later_ids = -1;  // of the first parts; of later ones
    share(len);

    const uint32_t keys = shared_address(rings) + warp * S::kTileBytes, values = keys + kAhead * S::kRowsBytes;
    const auto slot = [](int j, int slots) { return j % slots * S::kRowsBytes; };
    Tile tiles[kAhead + 1];  // of parts i, i + 1, ...
    int ids_at = rounds > 0 ? 0 : kGuessed;
    static_assert(kAhead <= kGuessed);

    PartsOfChunk chunk;
    ExactQuad kept = ExactQuad::empty();
    typename Base::Scores s;
    bool rose = false;
    // In iteration i the copies of keys of part i + kAhead start, and of values of the one before.  One body for all iterations:
    // fetching instructions counts.  Values of the first part would come late if one part were under way.
    constexpr int kValuesLate = S::kDeep ? 0 : 1;
#pragma unroll 1
    for (int i = -kAhead;; ++i) {
      if (i == 0) {
        this->settle(kv_head, state);
        if (cluster > 1) {
          this->await_cluster(barrier, false, tail_parts);  // the first tile is still on its way
        }
        if (cluster <= 2 || len <= 2048) let_next_kernel_start();
      }
      if (i >= 0) {
        cp_async_wait<kAhead - 1>();  // keys of part i, values of the one before
        if (i < parts) {
          __syncwarp();
          this->score(keys + slot(i, kAhead), tiles[0], len, i % 2, state, s);
        }
        __syncthreads();  // of the one before nobody needs the values any more
      }
      const int next = i + kAhead;
      tiles[kAhead].valid = 0;
      if (next > kValuesLate && next <= parts) {
        start_rows<true>(values + slot(next - 1, kAhead + 1), tiles[kAhead - 1]);
      }
      if (next < parts) {
        if (next == kAhead || (next > 0 && next % kAtOnce == 0)) {
          ids = later_ids;
          ids_at = 0;
        }
        if (next == 0 ? parts > kAhead : next % kAtOnce == kAtOnce / 2) {
          later_ids = look_up_parts(rounds, next == 0 ? 0 : next + kAtOnce / 2, len);
        }
        tiles[kAhead] = tile_of(next, ids, next % kAtOnce + ids_at, len);
        start_rows<false>(keys + slot(next, kAhead), tiles[kAhead]);
        if (kValuesLate > 0 && next == 0) start_rows<true>(values, tiles[kAhead]);
      }
      cp_async_commit();
      if (i >= 0) {
        bool rises = false;
        if (i < parts) rises = this->weigh(i % 2, state, s);
        if (i > 0) end_part(i - 1, values + slot(i - 1, kAhead + 1) - warp * S::kTileBytes, rose, chunk, kept);
        if (i >= parts) break;
        rose = rises;
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) tiles[k] = tiles[k + 1];
    }
    finish(kept, len);
    if (rank == 0 && kv_head == 0 && threadIdx.x == 0) report_sequence(p, load_sequence(p, sequence));
  }

  __device__ void end_part(int j, uint32_t values, bool rose, PartsOfChunk& chunk, ExactQuad& kept) const {
    float o[4];
    this->add_values(values, j % 2, rose, o);
    const float4 sum = this->turn(o);
    const float2 found = this->stats(j % 2, rose);
    if (j >= rounds * kParts) {
      if (has_item()) {
        this->send_leaf(exchange(), (j - rounds * kParts) * cluster + rank, item(), found, sum);
      }
      return;
    }
    chunk.add(found, sum);
    if (j % kParts == kParts - 1 || j == parts - 1) {
      kept.add(chunk.o, chunk.sum, chunk.maximum);
      chunk = {};
    }
  }

  // ---- the end ------------------------------------------------------------------------------------------------------

  __device__ Exchange exchange() const { return this->exchange_at(exchanged, barrier, tail_parts); }

  // The lane's four columns of a query.
  __device__ int item() const { return lane / 4 * kQuads + warp * 4 + lane % 4; }
  __device__ bool has_item() const { return lane / 4 < p.group; }

  __device__ void finish(const ExactQuad& kept, int len) const {
    if (cluster == 1) {
      if (has_item()) this->store(kept, item(), len);
      return;
    }
    this->add_up_leaves(exchange(), tail_parts, len);
  }
};

template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, S::kBlocksPerSm)
    paged_attention_joint_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies) {
  extern __shared__ __align__(1024) char rings[];
  auto* memory = reinterpret_cast<JointMemory<S>*>(rings + S::kRingsBytes);
  auto* exchanged = reinterpret_cast<char*>(memory + 1);
  const int room = p.exchange_bytes;
  JointKernel<S> kernel{
      {{{{{{{{{{p, copies}}}}}}}}}, *memory}, rings, exchanged, reinterpret_cast<uint64_t*>(exchanged + room)};
  kernel.run();
}

// Room for what the blocks send each.
template <class S>
int joint_exchange_bytes(int group, int blocks) {
  using Kernel = JointKernel<S>;
  if (blocks == 1) return 0;
  const int each = (group * Kernel::kQuads + blocks - 1) / blocks;
  return Kernel::leaf_places(Kernel::kMostParts * blocks, each) * Kernel::kLeafBytes;
}

template <class S>
int joint_bytes(int group, int blocks) {
  return S::kRingsBytes + static_cast<int>(sizeof(JointMemory<S>)) + joint_exchange_bytes<S>(group, blocks) +
         (blocks > 1 ? 16 : 0);
}

// By clusters of so many blocks, one for each KV head of a sequence.
template <class S>
bool launch_joint(Problem p, int blocks, const Launch& launch) {
  const int64_t grid = p.a.num_seqs * p.a.num_kv_heads * blocks;
  if (grid >= int64_t{1} << 31) return false;
  const auto kernel = paged_attention_joint_kernel<S>;
  static PerDevice allowed;
  allow_shared_memory(kernel, static_cast<int>(shared_memory_limit(launch.device)), allowed, p.a.op, launch);
  set_cluster(p, blocks, p.group, S::kD, launch.device);
  p.exchange_bytes = joint_exchange_bytes<S>(p.group, blocks);
  launch_after(kernel, dim3(static_cast<unsigned>(grid)), dim3(S::kWarps * 32), blocks, joint_bytes<S>(p.group, blocks),
               launch, p.a.op, p, cache_copies<S>(p.a));
  return true;
}

// False if the call had better go another way.  The host knows no lengths: hence the limits (in tokens) of what the tables
// have room for.
template <class Element>
bool launch_joint_way(const Problem& p, const Launch& launch) {
  using Deep = JointShape<Element, true>;
  using Shallow = JointShape<Element, false>;
  constexpr int kMost = 8;
  // Elements that are to be widened leave no time for barriers.
  constexpr int64_t kMostOfMany = Shallow::kNarrow ? 256 : 2048;
  const int64_t heads = p.a.num_seqs * p.a.num_kv_heads;
  if (joint_bytes<Deep>(8, kMost) > static_cast<int>(shared_memory_limit(launch.device))) return false;
  static PerDevice resident[kMost + 1];
  const auto fit = [&](int blocks) {
    return heads <= resident[blocks].get(launch.device, [&] {
      return count_resident_clusters(reinterpret_cast<const void*>(paged_attention_joint_kernel<Deep>), blocks,
                                     Deep::kWarps * 32, joint_bytes<Deep>(8, blocks), launch);
    });
  };
  for (int blocks = kMost; blocks > 0; --blocks) {
    if (!fit(blocks)) continue;
    // Where more parts come, each warp had better take its own.
    constexpr int kMostOfBlock = JointKernel<Deep>::kMostParts * kPartTokens;
    return p.a.max_seq_len <= kMostOfBlock * blocks && launch_joint<Deep>(p, blocks, launch);
  }
  return p.a.max_seq_len <= kMostOfMany && launch_joint<Shallow>(p, 1, launch);
}

}  // namespace pykv::attention
