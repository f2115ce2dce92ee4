// out[p] = w[e] x[p / top_k] + bias[e], times a factor: rows of pairs with the weights of their experts, numbers of 16 bits.
//
// The order of all additions is one of the number of columns alone, so that a row of out has the same bits whatever the others
// are.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "gemm/tile_map.h"

namespace pykv {

struct ExpertGemmArgs {
  DType dtype;          // of all: float16 or bfloat16
  const void* weights;  // [map.num_weights, n, k]
  int64_t n, k;
  int64_t weight_stride, weight_row_stride;  // elements
  const void* x;
  void* out;
  const void* bias;  // [map.num_weights, n]; null: none
  int64_t num_rows;  // of out
  int64_t x_stride, out_stride;
  TileMap map;
};

PYKV_CPU_TWIN_OF_PRODUCTS(expert_gemm_cpu, ExpertGemmArgs)
void expert_gemm_cuda(const ExpertGemmArgs& args, const Launch& launch);

// What follows it in a layer, in the same kernel.
struct ExpertGemmFusion {
  bool silu_and_mul;  // of the n results of a pair, bit by bit as it gives them: out has n / 2 columns
  bool
      map_is_old;  // the kernel before this one has waited for the map: weights can be brought to the L2 before it ends
};
void expert_gemm_fused_cuda(const ExpertGemmArgs& args, const ExpertGemmFusion& fusion, const Launch& launch);

}  // namespace pykv
