// Query columns over caches of one byte in rows of tokens: as paged_attention_warpgroup_columns.cuh, but the other operand of a
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
// Bottleneck: memory up to 32 columns, floor = KV bytes / bandwidth; 64 columns wait for instructions.  See
// docs/kernels/paged_attention.md.
#pragma once

#include "attention/paged_attention_warpgroup_columns.cuh"

namespace pykv::attention {

template <KvFormat kFormat, int kHeadSize, int kQueryRows>
struct WarpgroupCodesShape : WarpgroupColumnsShape<Element8<kFormat>, kHeadSize, kQueryRows> {
  using Columns = WarpgroupColumnsShape<Element8<kFormat>, kHeadSize, kQueryRows>;
  static constexpr bool kWarpgroup = false;                  // tiles lie as for ldmatrix
  static constexpr int kWeightBytes = Columns::kTile * 128;  // a line for each token
  static constexpr int kComputeRegisters = kQueryRows > 32 ? 192 : 160, kCopyRegisters = 256 - kComputeRegisters;
  // More under way is less: it comes from further apart.
  static constexpr int kStages = (kQueryRows > 32 ? 64 : 32) * 1024 / Columns::kStageBytes;
  static constexpr int kRingBytes = kStages * Columns::kStageBytes;
};

template <class S>
struct WarpgroupCodes : WarpgroupColumns<S> {
  using Base = WarpgroupColumns<S>;
  using Base::column;
  using Base::kColumns;
  using Base::kD;
  using Base::kMine;
  using Base::kParts;
  using Base::kTile;
  using Base::lane;
  using Base::p;
  using Base::place_of;
  using Base::queries;
  using Base::scratch;
  using Base::sync;
  using Base::thread;
  using Base::warp;
  using typename Base::Mma;
  using typename Base::Scores;
  using typename Base::State;
  using typename Base::TileSlot;
  using Element = typename S::Element;
  using Keys = uint32_t[kD / 16][4];
  using Values = uint32_t[kTile / 16][kParts][4];
  static constexpr int kValueTokens = 32 / kParts, kLoads = kTile / kValueTokens;  // with 16 dimensions for each part
  using ValueCodes = uint32_t[kLoads][4];
  static constexpr bool kCodesEarly = kColumns <= 32;  // while scores are under way: else there are no registers

  static __device__ WarpgroupCodes make(const Problem& p, const CacheCopies& copies, typename Base::Scratch& scratch,
                                        uint32_t queries) {
    return {Base::make(p, copies, scratch, queries)};
  }

  __device__ void read_keys(uint32_t stage, Keys& keys) const {
    const uint32_t row0 = stage + swizzled<S::kRowBytes>(warp * 16 + lane % 16, lane / 16);
#pragma unroll
    for (int k = 0; k < kD / 16; k += 2) {
      uint32_t x[4];
      ldmatrix_x4(x, row0 ^ k * 16);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        Element::widen(x[2 * j], keys[k + j][0], keys[k + j][2]);
        Element::widen(x[2 * j + 1], keys[k + j][1], keys[k + j][3]);
      }
    }
  }

  __device__ void read_values(uint32_t stage, ValueCodes& codes) const {
    const uint32_t row0 =
        stage + S::kTileBytes + swizzled<S::kRowBytes>(lane % kValueTokens, warp * kParts + lane / kValueTokens);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) ldmatrix_x4_trans(codes[i], row0 + i * kValueTokens * S::kRowBytes);
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

  // leave(): nobody of this warp reads the stage any more.
  __device__ void compute(uint32_t stage, const TileSlot& slot, State& state, auto&& leave) const {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if ((slot.valid[0] | slot.valid[1]) == 0) return leave();
    const uint32_t weights = queries + S::kQueryBytes;
    Keys keys;
    ValueCodes codes;
    Values values;
    Scores s;
    read_keys(stage, keys);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < kD / 16; ++k) {
      Wgmma<Mma, kColumns>::template rs<kAlong>(
          s, keys[k], wgmma_matrix(queries + k / 4 * kColumns * 128 + k % 4 * 32, 1024), k > 0);
    }
    wgmma_commit();
    if constexpr (kCodesEarly) {
      read_values(stage, codes);
      leave();
    }
    wgmma_wait<0>();
    wgmma_pin(s);

    this->adjust_scores(slot, state, s);
    this->weigh(s, weights, state);
    if constexpr (!kCodesEarly) {
      read_values(stage, codes);
      leave();
    }
    widen_values(codes, values);
    this->share_weights();

    wgmma_pin(state.o);
    wgmma_begin();
#pragma unroll
    for (int t = 0; t < kTile / 16; ++t) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        Wgmma<Mma, kColumns>::template rs<kAcross>(state.o[i], values[t][i], wgmma_matrix(weights + t * 16 * 128, 1024),
                                                   1);
      }
    }
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_pin(state.o);
#endif
  }

  // A lane has two neighbouring dimensions of its columns, which eight lanes make 32 or 64 bytes of a row.
  __device__ void end_segment(const Unit& u, const State& state) const {
    this->show_weights(state);
    sync();
    if (thread < kColumns) {
      const Row row = row_of(p, u, thread);
      const float sum = this->sum_of_weights(thread);
      float factor = 1;
      if (row.valid && u.slot >= 0) {
        p.partial_stats[static_cast<int64_t>(u.slot) * p.rows + thread] = {scratch.maximum[thread], sum};
      } else if (row.valid) {
        factor = finish_row(p, row, u.kv_head, scratch.maximum[thread], sum);
      }
      scratch.scales[thread] = factor;
    }
    sync();
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
      const int r = column(i);
      const Row row = row_of(p, u, r);
      if (r >= p.tile_tokens * p.tile_heads || !row.valid) continue;
      const float factor = scratch.scales[r];
#pragma unroll
      for (int k = 0; k < kParts; ++k) {
        const int d = (warp * kParts + k) * 16 + lane / 4 * 2;
        const float2 x = {state.o[k][place_of(i, 0)] * factor, state.o[k][place_of(i, 1)] * factor};
        if (u.slot >= 0) {
          const int64_t at = static_cast<int64_t>(u.slot) * p.rows + r;
          *reinterpret_cast<float2*>(p.partial + at * p.pitch + d) = x;
        } else if (d < p.a.head_size) {
          store_pair(row, d, x);
        }
      }
    }
  }

  __device__ void store_pair(const Row& row, int d, float2 x) const {
    const bool wide = p.a.dtype == DType::kBFloat16;
    *reinterpret_cast<uint32_t*>(output_row<uint16_t>(p, row) + d) =
        wide ? pack_pair<bf16>(x.x, x.y) : pack_pair<half>(x.x, x.y);
  }

  __device__ void take_tile(uint32_t stage, char*, const TileSlot& slot, State& state, auto&& leave) const {
    compute(stage, slot, state, leave);
    if (slot.unit.ends) end_segment(slot.unit, state);
  }
};

template <KvFormat kFormat>
bool launch_warpgroups_of_codes(const Problem& p, RowClass rows, const Launch& launch) {
  bool done = false;
  dispatch_bool(p.a.head_size <= 64, [&]<bool kSmall> {
    const auto launch_rows = [&]<int kRows> {
      using S = WarpgroupCodesShape<kFormat, kSmall ? 64 : 128, kRows>;
      return launch_warpgroup_kernel<S, WarpgroupCodes<S>>(p, rows, launch);
    };
    done = rows == RowClass::kFew    ? launch_rows.template operator()<16>()
           : rows == RowClass::kSome ? launch_rows.template operator()<32>()
                                     : launch_rows.template operator()<64>();
  });
  return done;
}

}  // namespace pykv::attention
