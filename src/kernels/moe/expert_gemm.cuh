// What both kernels of expert_gemm know.
#pragma once

#include "activation/activations.cuh"
#include "cuda/cp_async.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/load_shared.cuh"
#include "cuda/mma.cuh"
#include "cuda/pairs.cuh"
#include "gemm/tile_map.cuh"
#include "moe/expert_gemm.h"

namespace pykv {

constexpr int kExpertGemmSegments = 8;  // the columns are summed in so many parts, and these then in their order
constexpr int kExpertGemmColumns = 32;  // of a stage: parts are whole ones

struct ExpertGemmProblem {
  ExpertGemmArgs a;
  TileRows rows;
  Divider tiles_by;
  bool whole_vectors;  // eight neighbours can be copied at once
  ExpertGemmFusion fusion;

  ExpertGemmProblem(const ExpertGemmArgs& args, const ExpertGemmFusion& fused, int pairs)
      : a(args), rows(args.map, pairs), tiles_by(args.map.num_blocks * (args.map.block_size / pairs)), fusion(fused) {
    const auto is_whole = [](const void* data, int64_t stride, int count) {
      return reinterpret_cast<uintptr_t>(data) % (2 * count) == 0 && stride % count == 0;
    };
    whole_vectors = args.k % 8 == 0 && is_whole(args.weights, args.weight_row_stride, 8) &&
                    is_whole(args.weights, args.weight_stride, 8) && is_whole(args.x, args.x_stride, 8);
  }

  // Columns of out.
  PYKV_HOST_DEVICE int64_t width() const { return fusion.silu_and_mul ? a.n / 2 : a.n; }

  // The row of the weight that is number `at` of a tile, -1: there is none.  Half of a tile are gates where these are wanted.
  __device__ int64_t weight_row(int64_t tile, int at, int rows_of_tile) const {
    const int each = fusion.silu_and_mul ? rows_of_tile / 2 : rows_of_tile;
    const int64_t column = tile * each + at % each;
    return column < width() ? at / each * width() + column : -1;
  }

  // Blocks for tiles of so many rows of the weight.
  dim3 blocks(int rows_of_tile) const {
    const int64_t each = fusion.silu_and_mul ? rows_of_tile / 2 : rows_of_tile;
    const int64_t count = (width() + each - 1) / each * tiles_by.d;
    if (count > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "x: more than 2^31 tiles are not supported");
    return dim3(static_cast<unsigned>(count));
  }
};

// R_T(R_T(silu(gate)) * up), as silu_and_mul has it.
template <class T>
__device__ T silu_times(float gate, float up) {
  return from_float<T>(to_float(from_float<T>(silu(gate))) * (up + 0.0f));
}

// Eight columns of a row from `column` on, to 16 bytes of shared memory; zeros where there are none.
template <class T>
__device__ void copy_columns(const ExpertGemmProblem& p, uint32_t to, const T* row, int64_t column, bool once) {
  if (p.whole_vectors) {
    const bool inside = row && column < p.a.k;
    const void* from = inside ? row + column : p.a.weights;
    if (once)
      cp_async_16_once(to, from, inside);
    else
      cp_async_16(to, from, inside);
    return;
  }
  uint32_t bits[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    bits[i] = row && column + i < p.a.k ? reinterpret_cast<const unsigned short*>(row)[column + i] : 0;
  store_shared(to, make_uint4(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16,
                              bits[6] | bits[7] << 16));
}

// On Hopper's asynchronous matrix units.  False if the GPU has none, or they cannot copy these arrays, whatever the number of
// pairs.
template <class T>
bool expert_gemm_warpgroup(const ExpertGemmArgs& args, const ExpertGemmFusion& fusion, const Launch& launch);

}  // namespace pykv
