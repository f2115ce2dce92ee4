// out = x w^T + bias with a packed weight.  The idea behind pykv_packed_gemm.
//
// Codes go through the multiplication as they are: small numbers, exact in 16 bits.  Sums over a group of columns are fp32, and
// only they are scaled.  Minima and zero points multiply the sums of x over the group, which are as exact.
//
// The order of all additions is one of the weight's shape alone, so that a row of out has the same bits however many rows
// there are.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "gemm/packed_weight.h"
#include "gemm/tile_map.h"

namespace pykv {

struct PackedGemmArgs {
  DType dtype;  // of x and out
  PackedWeight weight;
  const void* x;
  void* out;
  const void* bias;  // [n]; null: none
  int64_t num_rows;  // of out
  int64_t x_stride, out_stride;
  int64_t x_step = 1;  // from an element of a row to the next
  TileMap map;         // of several weights of one format, which begin at weight.data + i * map.weight_stride
};

PYKV_CPU_TWIN_OF_PRODUCTS(packed_gemm_cpu, PackedGemmArgs)
void packed_gemm_cuda(const PackedGemmArgs& args, const Launch& launch);

}  // namespace pykv
