// Query columns over caches of one byte in rows of tokens: as verify/columns.cuh, but the other operand of a
// product comes from registers, where codes become halves on their way from the stage.
//
//   S^T = K Q^T     each warp widens the keys of its 16 tokens
//   O^T = V^T P^T   each warp widens its kD / 4 dimensions of all values
//
// So each code is widened once, for all queries of the tile, and neither waits for others nor goes through shared memory as a
// half.  A lane has neighbouring bytes where a fragment wants neighbours of 16 bits: dimensions of the keys are permuted, and
// those of the queries to match; of V^T row g is dimension 2 g and row g + 8 dimension 2 g + 1.
//
// Who has all values of a stage in registers leaves it, long before the products end.
//
// Heads of 64 that lie side by side are taken in pairs, whose rows are whole lines of memory: each has half of the columns and
// products of its own, so that nothing of one reaches the other.
//
// Bottleneck: memory up to 32 columns, floor = KV bytes / bandwidth; 64 columns wait for one step after the other.  See
// docs/log/paged_attention/details.md.
#pragma once

#include "attention/cuda/verify/softmax.cuh"

namespace pykv::attention {

template <class Element, int kHeadSize, int kQueryRows, bool kPairs = false>
struct VerifyCodesShape : VerifyColumnsShape<Element, kHeadSize, kQueryRows> {
  using Columns = VerifyColumnsShape<Element, kHeadSize, kQueryRows>;
  static constexpr bool kFolded = kPairs;
  static constexpr bool kWarpgroup = false;                  // tiles lie as for ldmatrix
  static constexpr int kWeightBytes = Columns::kTile * 128;  // a line for each token
  static constexpr int kComputeRegisters = kQueryRows > 32 ? 176 : 160, kCopyRegisters = 256 - kComputeRegisters;
  // More under way is less: it comes from further apart.
  static constexpr int kStages = 32 * 1024 / Columns::kStageBytes;
  static constexpr int kRingBytes = kStages * Columns::kStageBytes;
};

template <class S>
struct VerifyCodes {
  using Softmax = VerifySoftmax<S>;
  using Queries = VerifyQueries<S>;
  using Scratch = typename Queries::Scratch;
  using Scores = typename Softmax::Scores;
  using Tile = typename Softmax::Tile;
  using Element = typename S::Element;
  using Mma = typename S::Mma;
  static constexpr int kD = S::kD, kTile = S::kTile;
  static constexpr int kColumns = Queries::kColumns, kHeads = Queries::kHeads, kOwn = Queries::kOwn;
  static constexpr int kMine = Softmax::kMine, kParts = Softmax::kParts;
  using KeyCodes = uint32_t[kD / 32][4];
  using Keys = uint32_t[kD / 16][4];
  using Values = uint32_t[kTile / 16][kParts][4];
  static constexpr int kValueTokens = 32 / kParts, kLoads = kTile / kValueTokens;  // with 16 dimensions for each part
  using ValueCodes = uint32_t[kLoads][4];
  static constexpr bool kValuesEarly = kColumns <= 32;  // while scores are under way: else there are no registers
  // Of weights and values, while the next tile is waited for and its keys are widened, if a head has few columns: 32 gain nothing,
  // and for 64 there are no registers.
  static constexpr bool kLateProducts = kOwn <= 16;
  struct LateValues {
    Values values;  // of the tile before
  };
  struct NoValues {};
  struct State : Softmax::State, std::conditional_t<kLateProducts, LateValues, NoValues> {};

  const Problem& p;
  Scratch& scratch;
  Softmax softmax;
  const int lane = threadIdx.x % 32, warp = warp_of_group<S>();
  const int thread = threadIdx.x % kThreads;  // of those who compute
  // Of a stage what this lane reads first, and where it stores weights.
  uint32_t keys_at = keep(swizzled<S::kRowBytes>(warp * 16 + lane % 16, lane / 16));
  uint32_t values_at =
      keep(S::kTileBytes + swizzled<S::kRowBytes>(lane % kValueTokens, value_chunk(lane / kValueTokens)));
  uint32_t weights_at = keep(softmax.weights_place(own_weights()));

  // Of this thread's group.
  __device__ uint32_t own_weights() const {
    return softmax.queries.address + S::kQueryBytes + Queries::group() * S::kWeightBytes;
  }

  // Of this warp's 16 dimensions of a part.
  __device__ int value_chunk(int part) const { return kHeads == 1 ? warp * kParts + part : part * 4 + warp; }

  // Keeps the compiler from finding it out anew for each tile.
  static __device__ uint32_t keep(uint32_t x) {
    asm volatile("" : "+r"(x));
    return x;
  }

  __device__ VerifyCodes(const Problem& p, const CacheCopies&, Scratch& scratch, uint32_t query_address)
      : p(p), scratch(scratch), softmax(p, scratch, query_address) {}

  __device__ void read_keys(uint32_t stage, KeyCodes& codes) const {
    const uint32_t row0 = stage + keys_at;
#pragma unroll
    for (int i = 0; i < kD / 32; ++i) ldmatrix_x4(codes[i], row0 ^ i * 32);
  }

  // Dimensions 16 k ... 16 k + 15.
  static __device__ void widen_keys(const KeyCodes& codes, int k, uint32_t (&keys)[4]) {
    Element::widen(codes[k / 2][k % 2 * 2], keys[0], keys[2]);
    Element::widen(codes[k / 2][k % 2 * 2 + 1], keys[1], keys[3]);
  }

  // leave(): this thread reads nothing more of the stage.
  __device__ void read_values(uint32_t stage, ValueCodes& codes, auto&& leave) const {
    const uint32_t row0 = stage + values_at;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) ldmatrix_x4_trans(codes[i], row0 + i * kValueTokens * S::kRowBytes);
    leave();
  }

  // [token 2c: d, d + 1; token 2c + 1: d, d + 1] to [d: two tokens; d + 1: two tokens]
  static __device__ void widen_values(const ValueCodes& codes, Values& values) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        auto& a = kParts == 2 ? values[i][j] : values[2 * i + j][0];
        Element::widen(__byte_perm(codes[i][2 * j], 0, 0x3120), a[0], a[1]);
        Element::widen(__byte_perm(codes[i][2 * j + 1], 0, 0x3120), a[2], a[3]);
      }
    }
  }

  // Weights of the segment's tile before this one are nothing yet, and so are its values.
  __device__ void begin_segment(const Unit& u, State& state) {
    if constexpr (kLateProducts) {
#pragma unroll
      for (int i = 0; i < S::kWeightBytes / 16 / kThreads; ++i)
        store_shared(own_weights() + (i * kThreads + thread) * 16, {0, 0, 0, 0});
#pragma unroll
      for (auto& of_tokens : state.values) {
#pragma unroll
        for (auto& part : of_tokens) {
#pragma unroll
          for (uint32_t& pair : part) pair = 0;
        }
      }
    }
    softmax.begin_segment(u, state);
  }

  // Of weights that all have stored.
  __device__ void begin_products(State& state, const Values& values) const {
    const uint64_t weights = wgmma_matrix(own_weights(), 1024);
    Softmax::begin_products(state, [&](int t, int i) {
      const uint64_t own = wgmma_further(weights, t * 16 * 128 + (kHeads == 1 ? 0 : i * kOwn * 2));
      Wgmma<Mma, kOwn>::template rs<kAcross>(state.o[i], values[t][i], own, 1);
    });
  }

  __device__ void before_tile(State& state) const {
    if constexpr (kLateProducts) begin_products(state, state.values);
  }

  __device__ void compute(const Tile& tile, State& state, auto&& leave) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (!kLateProducts && tile.is_empty()) return leave();  // else it is zeros, and hidden
    const uint64_t query = wgmma_matrix(softmax.queries.address, 1024);
    KeyCodes key_codes;
    ValueCodes value_codes;
    Scores s;
    const bool whole = TileLoader<S>::is_whole(tile.slot.valid);
    read_keys(tile.stage, key_codes);
    Keys keys;
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) widen_keys(key_codes, k, keys[k]);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      auto& scores = reinterpret_cast<float (&)[kOwn / 2]>(s[kHeads == 1 ? 0 : k / 4 * kOwn / 2]);
      Wgmma<Mma, kOwn>::template rs<kAlong>(scores, keys[k], wgmma_further(query, k / 4 * kOwn * 128 + k % 4 * 32),
                                            kHeads == 1 ? k > 0 : k % 4 > 0);
    }
    wgmma_commit();
    if constexpr (kValuesEarly) read_values(tile.stage, value_codes, leave);
    softmax.end_products(state);
    wgmma_pin(s);

    softmax.adjust_scores(tile, state, s, whole);
    softmax.store_weights(softmax.weigh(s, state, own_weights()), weights_at);
    if constexpr (!kValuesEarly) read_values(tile.stage, value_codes, leave);  // weights have left their registers
    if constexpr (kLateProducts) {
      widen_values(value_codes, state.values);
      softmax.share_weights();
    } else {
      Values values;
      widen_values(value_codes, values);
      softmax.share_weights();
      begin_products(state, values);
      softmax.end_products(state);
    }
#endif
  }

  template <class Pieces>
  __device__ void end_segment(const Unit& u, const State& state, const Pieces& pieces) const {
    pieces.open();
    softmax.show_weights(state);
    if constexpr (Pieces::kInStages && kHeads == 1) {
#pragma unroll
      for (int i = 0; i < kMine; ++i) {
#pragma unroll
        for (int k = 0; k < kParts; ++k) {
          const int d = value_chunk(k) * 16 + lane / 4 * 2;
          pieces.leave_sums(Softmax::column(i), d,
                            float2{state.o[k][Softmax::place_of(i, 0)], state.o[k][Softmax::place_of(i, 1)]});
        }
      }
      Queries::sync();
      return softmax.leave_all_stats(u, pieces);
    }
    Queries::sync();
    if (thread < kColumns) {
      const Row row = softmax.queries.row_of_column(u, thread);
      const float sum = softmax.sum_of_weights(thread);
      const int kv_head = Queries::kv_head_of(u, thread);
      float factor = kHeads == 1 ? 1 : p.a.v_scale[kv_head];  // of a piece
      if (row.valid && u.slot >= 0) {
        pieces.leave_stats(u, Queries::row_index(p, thread), {softmax.maximum_of(thread), sum});
      } else if (row.valid) {
        factor = finish_row(p, row, kv_head, softmax.maximum_of(thread), sum);
      }
      scratch.of_warps[0][thread] = factor;
    }
    Queries::sync();
    // Two lanes trade pairs of neighbouring dimensions: the even one takes four of the first of two columns, the odd one four of
    // the other.
    const bool odd = lane / 4 % 2 == 1;
#pragma unroll
    for (int i = 0; i < kMine; i += 2) {
      const int c = Softmax::column(i) + odd;
      const Row row = softmax.queries.row_of_column(u, c);
      const float factor = scratch.of_warps[0][c];
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        if (!Softmax::has(k, i)) continue;
        const int d = value_chunk(k) % (kD / kHeads / 16) * 16 + lane / 8 * 4, own = i % (kMine / kHeads);
        const float (&o)[kOwn / 2] = state.o[k];
        float4 x;
        trade(odd, o[Softmax::place_of(own, 0)], o[Softmax::place_of(own + 1, 0)], x.x, x.z);
        trade(odd, o[Softmax::place_of(own, 1)], o[Softmax::place_of(own + 1, 1)], x.y, x.w);
        if (!row.valid) continue;
        if (u.slot >= 0) {
          pieces.leave_sums(u, Queries::row_index(p, c), d, {x.x * factor, x.y * factor, x.z * factor, x.w * factor});
        } else {
          store_output<S>(p, row, d, {x.x * factor, x.y * factor, x.z * factor, x.w * factor});
        }
      }
    }
  }

  // Of two columns, from the even lane of a pair and from the odd one.
  static __device__ void trade(bool odd, float first, float second, float& from_even, float& from_odd) {
    const float own = odd ? second : first, got = __shfl_xor_sync(~0u, odd ? first : second, 4);
    from_even = odd ? got : own;
    from_odd = odd ? own : got;
  }

  __device__ void take_tile(const Tile& tile, State& state, auto&& leave, const auto& pieces) const {
    compute(tile, state, leave);
    if (!tile.ends) return;
    if constexpr (kLateProducts) {
      before_tile(state);
      softmax.end_products(state);
    }
    end_segment(tile.slot.unit, state, pieces);
  }
};

}  // namespace pykv::attention
