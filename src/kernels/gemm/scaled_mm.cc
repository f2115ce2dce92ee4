#include "gemm/scaled_mm.h"

#include <cinttypes>

#include "core/call.h"
#include "pykv/gemm.h"

namespace pykv {
namespace {

// Scales that are one for all, or one for each of `count`.
bool is_vector(const Tensor& t, int64_t count) {
  if (t.numel() != 1 && t.numel() != count) return false;
  int long_axes = 0;
  for (int i = 0; i < t.ndim(); ++i) long_axes += t.size(i) != 1;
  return long_axes <= 1;
}

int64_t stride_of_vector(const Tensor& t) {
  for (int i = 0; i < t.ndim(); ++i)
    if (t.size(i) != 1) return t.stride(i);
  return 0;
}

class Product {
 public:
  ScaledMmArgs args{};
  Dim m{"num_rows"}, n{"n"}, k{"k"};

  Product(Call& call, DLTensor* out, const DLTensor* a, const DLTensor* b, std::initializer_list<DType> types)
      : call_(call), a_(call.read("a", a)), b_(call.read("b", b)), out_(call.write("out", out)) {
    a_.dtype(types).shape(m, k);
    args.is_int8 = a_.type() == DType::kInt8;
    if (args.is_int8) {
      b_.like(a_);
    } else {
      b_.dtype({DType::kFloat8E4M3, DType::kUInt8});
    }
    b_.shape(k, n);
    out_.dtype(kFloats).shape(m, n).contiguous_rows().no_overlap_within();
    args.out_dtype = out_.type();
    args.a = static_cast<const uint8_t*>(a_.data());
    args.b = static_cast<const uint8_t*>(b_.data());
    args.out = out_.data();
    args.m = m;
    args.n = n;
    args.k = k;
    args.a_stride = a_.stride(0);
    args.a_along_k = a_.stride(1);
    args.b_along_k = b_.stride(0);
    args.b_along_n = b_.stride(1);
    args.out_stride = out_.stride(0);
  }

  void scales(const DLTensor* of_a, const DLTensor* of_b) {
    Tensor a = read_scales(call_, "a_scales", of_a, args.a_on_host),
           b = read_scales(call_, "b_scales", of_b, args.b_on_host);
    // Few rows, columns or blocks may have scales of blocks that look like those of rows; exponents are always of blocks.
    const auto are_exponents = [](const Tensor& t) {
      return t.ndim() == 2 && (t.type() == DType::kUInt8 || t.type() == DType::kInt32);
    };
    if (is_vector(a, m) && is_vector(b, n) && !are_exponents(a) && !are_exponents(b)) {
      a.dtype({DType::kFloat32});
      b.dtype({DType::kFloat32});
      args.a_scales = {a.data(), stride_of_vector(a), 0, false, 0};
      args.b_scales = {b.data(), stride_of_vector(b), 0, false, 0};
      return;
    }
    if (a.ndim() != 2 || b.ndim() != 2) {
      const bool of_rows = !is_vector(a, m);
      (of_rows ? a : b)
          .fail(PYKV_VALUE_ERROR,
                "must have 1 or %s = %" PRId64
                " elements, or both scales be those of blocks of 128, [num_rows, blocks of "
                "k] and [blocks of k, blocks of n], got shape %s",
                of_rows ? "num_rows" : "n", of_rows ? int64_t{m} : int64_t{n},
                (of_rows ? a : b).shape_string().c_str());
    }
    // Those of blocks have to be where the call is.
    if (args.a_on_host) call_.read("a_scales", of_a);
    if (args.b_on_host) call_.read("b_scales", of_b);
    Dim k_blocks{"blocks of k", args.blocks()},
        n_blocks{"blocks of n", (n + ScaledMmArgs::kBlock - 1) / ScaledMmArgs::kBlock};
    b.dtype({DType::kFloat32, DType::kUInt8}).shape(k_blocks, n_blocks);
    args.in_blocks = true;
    args.a_scales = scales_of_rows(a, nullptr, m, args.blocks());
    args.b_scales = {b.data(), b.stride(1), b.stride(0), b.type() == DType::kUInt8, 0};
  }

  void bias(const DLTensor* bias) {
    if (bias) args.bias = of_columns("bias", bias).like(out_).contiguous_rows().data();
  }

  // Zero points: those of columns, and of rows.
  void zero_points(const DLTensor* azp_adj, const DLTensor* azp) {
    const Tensor adj = of_columns("azp_adj", azp_adj).dtype({DType::kInt32});
    args.azp_adj = static_cast<const int32_t*>(adj.data());
    args.azp_adj_stride = adj.stride(adj.ndim() - 1);
    if (!azp) return;
    Tensor rows = call_.read("azp", azp).dtype({DType::kInt32}).rank_between(1, 2).dim(0, m);
    if (rows.numel() != m)
      rows.fail(PYKV_VALUE_ERROR, "must have num_rows = %" PRId64 " elements, got shape %s", int64_t{m},
                rows.shape_string().c_str());
    args.azp = static_cast<const int32_t*>(rows.data());
    args.azp_stride = rows.stride(0);
  }

  // [n] or [1, n].
  Tensor of_columns(const char* name, const DLTensor* given) {
    Tensor t = call_.read(name, given).rank_between(1, 2);
    Dim one{"1", 1};
    if (t.ndim() == 2) t.dim(0, one);
    return t.dim(t.ndim() - 1, n);
  }

  void run(void* stream) {
    if (args.m == 0 || args.n == 0) return;
    call_.run(stream, args, scaled_mm_cpu, PYKV_CUDA(scaled_mm_cuda));
  }

 private:
  Call& call_;
  Tensor a_, b_, out_;
};

}  // namespace

Tensor read_scales(Call& call, const char* name, const DLTensor* given, bool& on_host) {
  const Tensor t = call.anywhere(name, given);
  on_host = call.on_cuda() && t.device().device_type == kDLCPU && t.numel() == 1 && t.type() == DType::kFloat32;
  if (!on_host) return call.read(name, given);
  check_number(t);
  return t;
}

MmScales scales_of_rows(Tensor& given, Dim* groups, Dim& rows, int64_t blocks) {
  const bool in_words = given.dtype({DType::kFloat32, DType::kUInt8, DType::kInt32}).type() == DType::kInt32;
  Dim of_k = in_words ? Dim{"words of four blocks of k", (blocks + 3) / 4} : Dim{"blocks of k", blocks};
  given.rank(groups ? 3 : 2).dim(-2, rows).dim(-1, of_k);
  if (groups) given.dim(0, *groups);
  const int64_t each = in_words ? 4 : 1;
  return {given.data(),
          given.stride(-2) * each,
          given.stride(-1) * each,
          given.type() != DType::kFloat32,
          groups ? given.stride(0) * each : 0,
          in_words};
}

}  // namespace pykv

using namespace pykv;

pykv_status pykv_cutlass_scaled_mm(DLTensor* out, const DLTensor* a, const DLTensor* b, const DLTensor* a_scales,
                                   const DLTensor* b_scales, const DLTensor* bias, void* stream) {
  return guarded("cutlass_scaled_mm", [&](Call& call) {
    Product product(call, out, a, b, {DType::kFloat8E4M3, DType::kInt8, DType::kUInt8});
    product.scales(a_scales, b_scales);
    product.bias(bias);
    product.run(stream);
  });
}

pykv_status pykv_cutlass_scaled_mm_azp(DLTensor* out, const DLTensor* a, const DLTensor* b, const DLTensor* a_scales,
                                       const DLTensor* b_scales, const DLTensor* azp_adj, const DLTensor* azp,
                                       const DLTensor* bias, void* stream) {
  return guarded("cutlass_scaled_mm_azp", [&](Call& call) {
    Product product(call, out, a, b, {DType::kInt8});
    product.scales(a_scales, b_scales);
    if (product.args.in_blocks)
      fail(PYKV_VALUE_ERROR, "a_scales: must be one, or one for each row: with zero points there are no blocks");
    product.zero_points(azp_adj, azp);
    product.bias(bias);
    product.run(stream);
  });
}
