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

#include "attention/paged_attention_exact_exchange.cuh"
#include "cuda/device.h"

namespace pykv::attention {

// kDeep: one block for each SM, else two.
template <class Element, bool kDeepRings>
struct JointShape : Shape<Element, 128, false, RowClass::kFew> {
  using Few = Shape<Element, 128, false, RowClass::kFew>;
  static constexpr bool kInvariant = true, kDeep = kDeepRings, kTwins = false;
  static constexpr int kWarps = 8, kColumns = 8, kTile = 16;
  static constexpr int kTileBytes = kTile * Few::kRowBytes, kStageBytes = 2 * kTileBytes;
  static constexpr int kAhead = (kDeep ? 2 : 1) * (Few::kNarrow ? 2 : 1);  // parts whose keys are on their way
  static constexpr int kBlocksPerSm = kDeep ? 1 : 2;
  static constexpr int kRowsBytes = kWarps * kTileBytes;  // keys of a part, or values
  static constexpr int kRingsBytes = (2 * kAhead + 1) * kRowsBytes;
};

// What the warps leave for each other, of a part and of the one before.
template <class S>
struct JointMemory {
  using Weights = std::conditional_t<S::kNarrow || std::is_same_v<typename S::Mma, half>, uint2, uint4>;
  Weights weights[2][S::kWarps][32];         // [tile][lane]: fragments of P^T
  float sums[2][S::kWarps][S::kColumns][8];  // [tile][query][row of the MMA]: of weights
  float turned[S::kWarps][S::kColumns][16];  // each warp's own
  float tops[2][S::kWarps][S::kColumns];     // [tile][query]: greatest logits
  float factors[2][S::kWarps][S::kColumns];  // [tile][query]: for the sums before this tile; [0]: the part's maximum
};

template <class S>
struct JointKernel : ExactExchange<S> {
  using Sums = ExactExchange<S>;
  using Base = DecodeLoader<S>;
  using Base::copies;
  using Base::lane;
  using Base::p;
  using Base::warp;
  using Sums::cluster;
  using Sums::each;
  using Sums::kParts;
  using Sums::kQuads;
  using Sums::kv_head;
  using Sums::rank;
  using Sums::sequence;
  using typename Base::Pages;
  using typename Base::State;
  using typename Sums::Exchange;
  using Mma = typename S::Mma;
  static constexpr int kD = S::kD, kTile = S::kTile, kAhead = S::kAhead, kTiles = S::kWarps;
  static constexpr int kJoined = S::kNarrow ? 2 : 1;  // tiles that the running maximum takes at once
  static constexpr float kLag = 8;
  static_assert(kTiles * kTile == kPartTokens && kD == 16 * S::kWarps && S::kColumns == 8);

  char* rings;  // keys of `kAhead` parts, values of one more
  JointMemory<S>& memory;
  char* exchanged;
  uint64_t* barrier;  // counts what others send

  // ---- who takes what -----------------------------------------------------------------------------------------------

  int rounds = 0;      // of a chunk for each block
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

  // Of this warp, in a part.
  struct Tile {
    Pages pages;
    int first_token;
    uint32_t valid;  // bits of places with a key
  };

  // Lane: of the part lane / 2 after the j-th, eight tokens.
  __device__ int look_up_parts(int rounds, int j, int end) const {
    const int token = first_token(rounds, j + lane / 2) + warp * kTile + lane % 2 * kGroupTokens;
    return token < end ? this->look_up(sequence, token) : -1;
  }

  __device__ Tile tile_of(int j, int ids, int place, int len) const {
    Tile tile{Base::pages_of(ids, place), first_token(rounds, j) + warp * kTile, kAll};
    bool whole = tile.first_token + kTile <= len;
    for (const int id : tile.pages.id)
      whole = whole && static_cast<uint32_t>(id) < static_cast<uint32_t>(p.a.num_blocks);
    if (!whole) {
      tile.valid =
          this->valid_places({sequence, len, kv_head, tile.first_token, 0, 0, true, false, false, false}, tile.pages);
    }
    return tile;
  }

  // Starts the copies of a tile's keys or values; zeros come for tokens that are not there.
  template <bool kValues>
  __device__ void start_rows(uint32_t to, const Tile& tile) const {
    constexpr int kChunks = Base::kChunks, kRows = 32 / kChunks;  // rows of a step of the warp
    const int chunk = lane % kChunks, r0 = lane / kChunks;
    const auto times = [](int64_t stride, int n) {  // both fit in 32 bits
      return static_cast<uint64_t>(static_cast<uint32_t>(stride)) * static_cast<uint32_t>(n);
    };
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

  // ---- one part -----------------------------------------------------------------------------------------------------

  // Scores of this warp's tile, as logits (or what becomes logits by the lane's factors), and the greatest of them.
  __device__ void score(uint32_t keys, const Tile& tile, int len, int buffer, const State& state,
                        typename Base::Scores& s) const {
    this->scores(keys, state, s);
    if (!state.plain) [[unlikely]]
      this->to_logits(kv_head, tile.first_token, len, state, s);
    float top[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (!(tile.valid >> (h * 8 + lane / 4) & 1)) s[0][0][2 * h + e] = -INFINITY;
      }
      top[e] = fmaxf(fmaxf(-INFINITY, s[0][0][e]), s[0][0][2 + e]) * (state.plain ? state.scale[0][e] : 1.f);
      for (int m = 4; m < 32; m *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], m));
    }
    if (lane < 4) *reinterpret_cast<float2*>(&memory.tops[buffer][warp][lane * 2]) = {top[0], top[1]};
  }

  // Weights of this warp's tile, by the running maximum that one warp would have had there.  Does that rise after the first
  // tiles?
  __device__ bool weigh(int buffer, const State& state, const typename Base::Scores& s) const {
    const int c = lane % 4;
    const float2 found = *reinterpret_cast<const float2*>(&memory.tops[buffer][lane / 4][c * 2]);
    const float tops[2] = {found.x, found.y};
    const auto top_of = [&](int t, int e) {
      float x = __shfl_sync(~0u, tops[e], t * 4 + c);
      if constexpr (kJoined == 2) x = fmaxf(x, __shfl_sync(~0u, tops[e], t * 4 + 4 + c));
      return x;
    };
    float maximum[2], base[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) base[e] = maximum[e] = ceilf(top_of(0, e));
    const bool rises = __any_sync(~0u, tops[0] > maximum[0] + kLag || tops[1] > maximum[1] + kLag);
    if (rises) [[unlikely]] {
      maximum[0] = maximum[1] = -INFINITY;
#pragma unroll 1
      for (int t = 0; t < kTiles; t += kJoined) {
        float factor[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float top = top_of(t, e), now = top > maximum[e] + kLag ? ceilf(top) : maximum[e];
          factor[e] = exp2_fast(maximum[e] - (now == -INFINITY ? 0.f : now));
          maximum[e] = now;
          if (t == warp / kJoined * kJoined) base[e] = now;
        }
        if (t > 0 && warp == 0 && lane < 4) {
          *reinterpret_cast<float2*>(&memory.factors[buffer][t][c * 2]) = {factor[0], factor[1]};
        }
      }
    }
    if (warp == 0 && lane < 4) {
      *reinterpret_cast<float2*>(&memory.factors[buffer][0][c * 2]) = {maximum[0], maximum[1]};
    }

    float before[2];
    uint32_t weights[Base::kTerms][2];
#pragma unroll
    for (int e = 0; e < 2; ++e) base[e] = base[e] == -INFINITY ? 0.f : base[e];
    const float scale[2] = {state.plain ? state.scale[0][0] : 1.f, state.plain ? state.scale[0][1] : 1.f};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float a = exp2_fast(fmaf(s[0][0][2 * h], scale[0], -base[0]));
      const float b = exp2_fast(fmaf(s[0][0][2 * h + 1], scale[1], -base[1]));
      if (h == 0) {
        before[0] = a;
        before[1] = b;
      } else {
        memory.sums[buffer][warp][c * 2][lane / 4] = before[0] + a;
        memory.sums[buffer][warp][c * 2 + 1][lane / 4] = before[1] + b;
      }
      const uint32_t pair = pack_pair<Mma>(a, b);
      weights[0][h] = Base::transpose(pair);
      if constexpr (Base::kTerms == 2) {
        const float2 rounded = unpack_pair<Mma>(pair);
        weights[1][h] = Base::transpose(pack_pair<Mma>(a - rounded.x, b - rounded.y));
      }
    }
    if constexpr (Base::kTerms == 2) {
      memory.weights[buffer][warp][lane] = {weights[0][0], weights[0][1], weights[1][0], weights[1][1]};
    } else {
      memory.weights[buffer][warp][lane] = {weights[0][0], weights[0][1]};
    }
    return rises;
  }

  // This warp's 16 dimensions of the sums of a part's values.
  __device__ void add_values(uint32_t values, int buffer, bool rises, float (&o)[4]) const {
    for (float& x : o) x = 0;
    const auto multiply = [&](int t, const uint32_t (&a)[4]) {
      const auto w = memory.weights[buffer][t][lane];
      mma_16x8x16<Mma>(o, a, w.x, w.y);
      if constexpr (Base::kTerms == 2) mma_16x8x16<Mma>(o, a, w.z, w.w);
    };
#pragma unroll
    for (int t = 0; t < kTiles; t += kJoined) {
      if (rises && t > 0) [[unlikely]] {
        const float2 f = *reinterpret_cast<const float2*>(&memory.factors[buffer][t][lane % 4 * 2]);
        o[0] *= f.x;
        o[1] *= f.y;
        o[2] *= f.x;
        o[3] *= f.y;
      }
      uint32_t x[4];
      if constexpr (S::kNarrow) {  // [token 2c: d, d + 1; token 2c + 1: d, d + 1] to [d: two tokens; d + 1: two tokens]
        ldmatrix_x4_trans(x, values + (t + lane / 16) * S::kTileBytes + swizzled<S::kRowBytes>(lane % 16, warp));
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          uint32_t a[4];
          S::Element::widen(__byte_perm(x[2 * j], 0, 0x3120), a[0], a[1]);
          S::Element::widen(__byte_perm(x[2 * j + 1], 0, 0x3120), a[2], a[3]);
          multiply(t + j, a);
        }
      } else {
        const int row = lane / 16 * 8 + lane % 8;
        ldmatrix_x4_trans(x, values + t * S::kTileBytes + swizzled<S::kRowBytes>(row, warp * 2 + lane / 8 % 2));
        multiply(t, x);
      }
    }
  }

  // The lane's part of the same: query lane / 4, dimensions 16 * warp + lane % 4 * 4 and on.
  __device__ float4 turn(const float (&o)[4]) const {
    float (&to)[S::kColumns][16] = memory.turned[warp];
    const int c = lane % 4, r = lane / 4;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      float* row = to[c * 2 + e];
      if constexpr (S::kPermutedOutput) {
        *reinterpret_cast<float2*>(row + (r / 2 ^ c) * 4 + r % 2 * 2) = {o[e], o[2 + e]};
      } else {
        row[(r / 4 ^ c) * 4 + r % 4] = o[e];
        row[((2 + r / 4) ^ c) * 4 + r % 4] = o[2 + e];
      }
    }
    __syncwarp();
    return *reinterpret_cast<const float4*>(&to[lane / 4][(lane % 4 ^ lane / 8) * 4]);
  }

  // Maximum and sum of the weights of query lane / 4.
  __device__ float2 stats(int buffer, bool rises) const {
    const int q = lane / 4, c = lane % 4;
    float2 sum{0, 0};
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (rises && t > 0 && t % kJoined == 0) [[unlikely]] {
        const float f = memory.factors[buffer][t][q];
        sum = {sum.x * f, sum.y * f};
      }
      const float2 x = *reinterpret_cast<const float2*>(&memory.sums[buffer][t][q][c * 2]);
      sum = {sum.x + x.x, sum.y + x.y};
    }
    float x = sum.x + sum.y;
    x += __shfl_xor_sync(~0u, x, 1);
    x += __shfl_xor_sync(~0u, x, 2);
    return {memory.factors[buffer][0][q], x};
  }

  // ---- the loop -----------------------------------------------------------------------------------------------------

  __device__ void run() {
    if (cluster > 1) {
      if (threadIdx.x == 0) cluster_open(shared_address(barrier));
      cluster_announce();  // others may send
    }
    if (blockIdx.x < p.early_blocks) {
      const int guess = this->early_length(sequence);
      share(static_cast<int>(clamp(guess, 0, p.a.max_seq_len)));
      this->foresee(sequence, kv_head, guess, first_token(rounds, 0) + warp * kTile);
    }
    wait_for_previous_kernel();
    // Pages of the first parts, in a round for the first lanes, in the tail for the next.
    int ids = -1, later_ids = -1;
    if (lane < 4 * kGuessed) {
      ids = look_up_parts(lane < 2 * kGuessed, lane < 2 * kGuessed ? 0 : -kGuessed, static_cast<int>(p.a.max_seq_len));
    }
    const int len = this->length(sequence);
    State state;
    this->fetch_queries(sequence, kv_head, state);
    share(len);

    const uint32_t keys = shared_address(rings) + warp * S::kTileBytes, values = keys + kAhead * S::kRowsBytes;
    const auto slot = [](int j, int slots) { return j % slots * S::kRowsBytes; };
    Tile tiles[kAhead + 1];  // of parts i, i + 1, ...
    static_assert(kAhead <= kGuessed);
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      tiles[j].valid = 0;
      if (j < parts) {
        tiles[j] = tile_of(j, ids, (rounds > 0 ? 0 : kGuessed) + j, len);
        if (j > 1) start_rows<true>(values + slot(j - 1, kAhead + 1), tiles[max(j - 1, 0)]);
        start_rows<false>(keys + slot(j, kAhead), tiles[j]);
        if (j == 0) start_rows<true>(values, tiles[0]);
      } else if (j > 1 && j == parts) {
        start_rows<true>(values + slot(j - 1, kAhead + 1), tiles[max(j - 1, 0)]);
      }
      cp_async_commit();
    }
    if (parts > kAhead) ids = look_up_parts(rounds, 0, len);

    PartsOfChunk chunk;
    ExactQuad kept = ExactQuad::empty();
    typename Base::Scores s;
    bool rose = false;
#pragma unroll 1
    for (int i = 0;; ++i) {
      if (i == 0) {
        this->settle(kv_head, state);
        if (cluster > 1) {
          if (threadIdx.x == 0) cluster_expect(shared_address(barrier), this->expected_bytes(rounds > 0, tail_parts));
          cluster_wait();  // all blocks are there; the first tile is still on its way
        }
        if (cluster <= 2 || len <= 2048) let_next_kernel_start();
      }
      cp_async_wait<kAhead - 1>();  // keys of part i, values of the one before
      if (i < parts) {
        __syncwarp();
        score(keys + slot(i, kAhead), tiles[0], len, i % 2, state, s);
      }
      __syncthreads();  // of the one before nobody needs the values any more
      const int next = i + kAhead;
      tiles[kAhead].valid = 0;
      if (next > 1 && next <= parts) start_rows<true>(values + slot(next - 1, kAhead + 1), tiles[kAhead - 1]);
      if (next < parts) {
        if (next % kAtOnce == 0) ids = later_ids;
        if (next % kAtOnce == kAtOnce / 2) later_ids = look_up_parts(rounds, next + kAtOnce / 2, len);
        tiles[kAhead] = tile_of(next, ids, next % kAtOnce, len);
        start_rows<false>(keys + slot(next, kAhead), tiles[kAhead]);
      }
      cp_async_commit();
      bool rises = false;
      if (i < parts) rises = weigh(i % 2, state, s);
      if (i > 0) end_part(i - 1, values + slot(i - 1, kAhead + 1) - warp * S::kTileBytes, rose, chunk, kept);
      if (i >= parts) break;
      rose = rises;
#pragma unroll
      for (int k = 0; k < kAhead; ++k) tiles[k] = tiles[k + 1];
    }
    finish(kept, len);
    if (rank == 0 && kv_head == 0 && threadIdx.x == 0) report_sequence(p, load_sequence(p, sequence));
  }

  __device__ void end_part(int j, uint32_t values, bool rose, PartsOfChunk& chunk, ExactQuad& kept) const {
    float o[4];
    add_values(values, j % 2, rose, o);
    const float4 sum = turn(o);
    const float2 found = stats(j % 2, rose);
    if (j >= rounds * kParts) {
      if (has_item()) {
        this->send_part(exchange(), (j - rounds * kParts) * cluster + rank, item(), found, sum);
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

  __device__ Exchange exchange() const { return this->exchange_at(exchanged, barrier, rounds > 0, tail_parts); }

  // The lane's four columns of a query.
  __device__ int item() const { return lane / 4 * kQuads + warp * 4 + lane % 4; }
  __device__ bool has_item() const { return lane / 4 < p.group; }

  __device__ void finish(const ExactQuad& kept, int len) const {
    if (cluster == 1) {
      if (has_item()) this->store(kept, item(), len);
      return;
    }
    if (rounds > 0 && has_item()) this->send_record(exchange(), item(), kept);
    this->add_up(exchange(), rounds > 0 ? cluster : 0, tail_parts, len);
  }
};

template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, S::kBlocksPerSm)
    paged_attention_joint_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies) {
  extern __shared__ __align__(1024) char rings[];
  auto* memory = reinterpret_cast<JointMemory<S>*>(rings + S::kRingsBytes);
  auto* exchanged = reinterpret_cast<char*>(memory + 1);
  const int room = p.exchange_bytes;
  JointKernel<S> kernel{{{{{{p, copies}}}}}, rings, *memory, exchanged, reinterpret_cast<uint64_t*>(exchanged + room)};
  kernel.run();
}

// Room for what the blocks send each.
template <class S>
int joint_exchange_bytes(int group, int blocks) {
  using Kernel = JointKernel<S>;
  if (blocks == 1) return 0;
  const int each = (group * Kernel::kQuads + blocks - 1) / blocks;
  return blocks * each * Kernel::kRecordBytes + Kernel::kParts * (blocks - 1) * each * Kernel::kPartBytes;
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
  p.cluster = blocks;
  p.by_cluster = Divider(blocks);
  const bool early = overlaps_kernels(launch.device) && (blocks <= 2 || p.a.max_seq_len <= 2048);
  p.early_blocks = early ? 4 * num_sms(launch.device) : 0;
  p.block_items = (p.group * JointKernel<S>::kQuads + blocks - 1) / blocks;
  p.by_block_items = Divider(p.block_items);
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
  constexpr int64_t kMostOfMany = 2048;
  const int64_t heads = p.a.num_seqs * p.a.num_kv_heads;
  if (joint_bytes<Deep>(8, kMost) > static_cast<int>(shared_memory_limit(launch.device))) return false;
  static PerDevice resident[kMost + 1];
  const auto fit = [&](int blocks) {
    return heads <= resident[blocks].get(launch.device, [&] {
      return std::max(1, count_resident_clusters(reinterpret_cast<const void*>(paged_attention_joint_kernel<Deep>),
                                                 blocks, Deep::kWarps * 32, joint_bytes<Deep>(8, blocks), launch));
    });
  };
  for (int blocks = kMost; blocks > 0; --blocks) {
    if (!fit(blocks)) continue;
    constexpr int kMostOfBlock = 256;  // where more parts come, each warp had better take its own
    return p.a.max_seq_len <= kMostOfBlock * blocks && launch_joint<Deep>(p, blocks, launch);
  }
  // Elements of one byte, which are to be widened, leave no time for barriers where there are many keys.
  const bool few = !Shallow::kNarrow || heads * p.a.max_seq_len <= kMostOfMany * 4 * num_sms(launch.device);
  return few && p.a.max_seq_len <= kMostOfMany && launch_joint<Shallow>(p, 1, launch);
}

}  // namespace pykv::attention
