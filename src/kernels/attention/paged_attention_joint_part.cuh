// One part of paged_attention_joint.cuh: what eight warps make of 128 keys together.
#pragma once

#include "attention/paged_attention_exact_exchange.cuh"

namespace pykv::attention {

// kDeep: one block for each SM, else two.
template <class Element, bool kDeepRings>
struct JointShape : Shape<Element, 128, false, RowClass::kFew> {
  using Few = Shape<Element, 128, false, RowClass::kFew>;
  static constexpr bool kInvariant = true, kDeep = kDeepRings, kTwins = false, kSpans = false;
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
struct JointPart : ExactExchange<S, kChunkTokens / kPartTokens> {
  using Sums = ExactExchange<S, kChunkTokens / kPartTokens>;
  using Base = DecodeLoader<S>;
  using Base::lane;
  using Base::warp;
  using Sums::kv_head;
  using typename Base::State;
  using Mma = typename S::Mma;
  static constexpr int kTile = S::kTile, kTiles = S::kWarps;
  static constexpr int kJoined = S::kNarrow ? 2 : 1;  // tiles that the running maximum takes at once
  static constexpr float kLag = 8;
  static_assert(kTiles * kTile == kPartTokens && S::kD == 16 * S::kWarps && S::kColumns == 8);

  JointMemory<S>& memory;

  // Of this warp, in a part.
  struct Tile {
    typename Base::Pages pages;
    int first_token;
    uint32_t valid;  // bits of places with a key
  };

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
          factor[e] = power_of_2(maximum[e] - (now == -INFINITY ? 0.f : now));
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
      const float a = power_of_2(fmaf(s[0][0][2 * h], scale[0], -base[0]));
      const float b = power_of_2(fmaf(s[0][0][2 * h + 1], scale[1], -base[1]));
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
};

}  // namespace pykv::attention
