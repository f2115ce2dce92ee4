// Rows of pairs times the weights of their experts, packed ones or plain ones: the idea behind pykv_fused_moe_gemm, twice in
// a layer.
#pragma once

#include "core/call.h"
#include "gemm/packed_gemm.h"
#include "moe/expert_gemm.h"

namespace pykv {

struct ExpertProduct {
  bool is_packed;
  PackedGemmArgs packed;
  ExpertGemmArgs plain;

  int64_t n() const { return is_packed ? packed.weight.n : plain.n; }

  // Sets the map, but what it says of the weights, and where rows are.
  void set_rows(const TileMap& tiles, int64_t num_rows, const void* x, int64_t x_stride, void* out, int64_t out_stride);
};

// Arrays of one weight for each expert, and what arguments are called.
struct ExpertWeights {
  const char *name, *format_name, *bias_name;
  const DLTensor* array;
  const char* format;
  const DLTensor* bias;  // may be null
};

// The arrays, checked: weights [experts, n, k], or packed ones.  Dims that are not bound are bound.
ExpertProduct product_args(Call& call, const Tensor& x, const ExpertWeights& weights, Dim& experts, Dim& n, Dim& k);

void expert_product_cpu(const ExpertProduct& product, const Launch& launch);
void expert_product_cuda(const ExpertProduct& product, const Launch& launch);

}  // namespace pykv
