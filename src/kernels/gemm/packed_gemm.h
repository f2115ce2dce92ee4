// out = x w^T with a packed weight, and what is done to it before it is rounded.  The idea behind pykv_packed_gemm.
//
// Codes go through the multiplication as they are: small numbers, exact in 16 bits.  Sums over a group of columns are fp32, and
// only they are scaled.  Minima and zero points multiply the sums of x over the group, which are as exact.
//
// The order of all additions is one of the weight's shape alone, so that a row of out has the same bits however many rows
// there are.
#pragma once

#include "core/args.h"
#include "core/codes.h"
#include "cpu/isa.h"
#include "gemm/packed_weight.h"
#include "gemm/tile_map.h"

namespace pykv {

constexpr int kMostSegments = 4;  // of the columns on a GPU, whose sums are added in order

// g(a) b of neighbours, rows 2 i and 2 i + 1 of the weight.
enum class Gate : uint8_t { kNone, kSilu, kGelu, kGeluTanh };

// What is done to sums besides the bias, in fp32: gate(token_scale (channel_scale sum) + bias) + residual.  Not with a map.
struct Epilogue {
  bool any = false;
  Gate gate = Gate::kNone;
  bool has_codes = false;  // out: codes of the nearest to result / out_scale
  QuantCode codes = QuantCode::kE4M3;
  Parameter out_scale{};
  const float* token_scales = nullptr;  // null: 1
  const float* channel_scales = nullptr;
  const void* residual = nullptr;                // dtype of x; null: 0
  int64_t token_stride = 0, channel_stride = 0;  // elements; 0: one for all
  int64_t residual_stride = 0;
};

struct PackedGemmArgs {
  DType dtype;  // of x and out
  PackedWeight weight;
  const void* x;
  void* out;
  const void* bias;  // [n]; null: none
  int64_t num_rows;  // of out
  int64_t x_stride, out_stride;
  int64_t x_step = 1;  // from an element of a row to the next
  Epilogue epilogue;
  TileMap map;  // of several weights of one format, which begin at weight.data + i * map.weight_stride
};

PYKV_CPU_TWIN_OF_PRODUCTS(packed_gemm_cpu, PackedGemmArgs)
void packed_gemm_cuda(const PackedGemmArgs& args, const Launch& launch);

}  // namespace pykv
