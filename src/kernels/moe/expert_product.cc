#include "moe/expert_product.h"

#include <cinttypes>

namespace pykv {

ExpertProduct product_args(Call& call, const Tensor& x, const ExpertWeights& from, Dim& experts, Dim& n, Dim& k) {
  ExpertProduct product{};
  product.is_packed = *required(from.format_name, from.format) != 0;
  Tensor array = call.read(from.name, from.array);
  TileMap map{};
  if (product.is_packed) {
    PackedWeight& weight = product.packed.weight = parse_format(from.format, from.format_name);
    const int64_t bytes = place_sections(weight, array.data());
    Dim size{"bytes of the format", bytes};
    array.dtype({DType::kUInt8}).shape(experts, size).contiguous_rows();
    map.weight_stride = array.stride(0);
    if (reinterpret_cast<uintptr_t>(array.data()) % 16 != 0 || map.weight_stride % 16 != 0)
      array.fail(PYKV_VALUE_ERROR, "must be aligned to 16 bytes, and so must the weights in it");
    if (experts > 1 && map.weight_stride < bytes)
      array.fail(PYKV_VALUE_ERROR, "the weights must lie one behind another, not backwards or in one place");
    const auto check = [&](const char* what, int64_t is, Dim& wanted) {
      if (!wanted.bound()) wanted.bind(is);
      if (is != wanted)
        fail(PYKV_VALUE_ERROR, "%s: %s must equal %s = %" PRId64 ", got %" PRId64, from.format_name, what,
             wanted.name(), static_cast<int64_t>(wanted), is);
    };
    check("n", weight.n, n);
    check("k", weight.k, k);
  } else {
    array.like(x).shape(experts, n, k).contiguous_rows();
    product.plain.weights = array.data();
    product.plain.weight_stride = array.stride(0);
    product.plain.weight_row_stride = array.stride(1);
    product.plain.n = n;
    product.plain.k = k;
  }
  const void* bias = nullptr;
  if (from.bias) {
    const Tensor b = call.read(from.bias_name, from.bias).like(x).shape(experts, n).contiguous_rows();
    bias = b.data();
    map.bias_stride = b.stride(0);
  }
  map.num_weights = experts;
  product.plain.bias = product.packed.bias = bias;
  product.plain.dtype = product.packed.dtype = x.type();
  product.plain.map = product.packed.map = map;
  return product;
}

void ExpertProduct::set_rows(const TileMap& tiles, int64_t num_rows, const void* x, int64_t x_stride, void* out,
                             int64_t out_stride) {
  const auto set = [&](auto& args) {
    const TileMap own = args.map;
    args.map = tiles;
    args.map.num_weights = own.num_weights;
    args.map.weight_stride = own.weight_stride;
    args.map.bias_stride = own.bias_stride;
    args.num_rows = num_rows;
    args.x = x;
    args.x_stride = x_stride;
    args.out = out;
    args.out_stride = out_stride;
  };
  set(plain);
  set(packed);
}

void expert_product_cpu(const ExpertProduct& product, const Launch& launch) {
  if (product.n() == 0) return;
  if (product.is_packed)
    packed_gemm_cpu(product.packed, launch);
  else
    expert_gemm_cpu(product.plain, launch);
}

#if defined(PYKV_WITH_CUDA)
void expert_product_cuda(const ExpertProduct& product, const Launch& launch) {
  if (product.n() == 0) return;
  if (product.is_packed)
    packed_gemm_cuda(product.packed, launch);
  else
    expert_gemm_cuda(product.plain, launch);
}
#endif

}  // namespace pykv
