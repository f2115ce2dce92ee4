#include "gemm/packed_gemm.h"

#include <cinttypes>
#include <cstring>

#include "core/call.h"
#include "pykv/gemm.h"

namespace pykv {
namespace {

Gate gate_of(const char* activation) {
  constexpr const char* kNames[] = {"", "silu", "gelu", "gelu_tanh"};
  for (int i = 0; i < 4; ++i)
    if (std::strcmp(activation, kNames[i]) == 0) return static_cast<Gate>(i);
  fail(PYKV_VALUE_ERROR, "activation: must be \"\", silu, gelu or gelu_tanh, got \"%s\"", activation);
}

// One for all, or one for each of `count`.
const float* scales_of(Call& call, const char* name, const DLTensor* given, const Dim& count, int64_t& stride) {
  if (!given) return nullptr;
  Tensor scales = call.read(name, given).dtype({DType::kFloat32});
  int long_axes = 0;
  for (int i = 0; i < scales.ndim(); ++i)
    if (scales.size(i) != 1) {
      stride = scales.stride(i);
      ++long_axes;
    }
  if (long_axes > 1 || (scales.numel() != 1 && scales.numel() != count))
    scales.fail(PYKV_VALUE_ERROR, "must have 1 or %s = %" PRId64 " elements in a line, got shape %s", count.name(),
                static_cast<int64_t>(count), scales.shape_string().c_str());
  return static_cast<const float*>(scales.data());
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_packed_gemm(DLTensor* out, const DLTensor* x, const DLTensor* weight, const char* format,
                             const DLTensor* bias, const DLTensor* token_scales, const DLTensor* channel_scales,
                             const char* activation, const DLTensor* residual, const DLTensor* out_scale,
                             void* stream) {
  return guarded("packed_gemm", [&](Call& call) {
    PackedGemmArgs args{};
    args.weight = parse_format(required("format", format));
    Dim num_rows{"num_rows"}, n{"n of the format", args.weight.n}, k{"k of the format", args.weight.k};
    const Tensor from = call.read("x", x).dtype({DType::kFloat16, DType::kBFloat16}).shape(num_rows, k);
    Epilogue& last = args.epilogue;
    last.gate = gate_of(required("activation", activation));
    Dim width{last.gate == Gate::kNone ? n.name() : "half of n of the format",
              last.gate == Gate::kNone ? args.weight.n : args.weight.n / 2};
    if (last.gate != Gate::kNone && args.weight.n % 2 != 0)
      fail(PYKV_VALUE_ERROR, "activation: wants a weight of an even number of rows, got %" PRId64, args.weight.n);
    Tensor to = call.write("out", out).shape(num_rows, width).contiguous_rows().no_overlap_within();
    if (out_scale) {
      to.dtype({DType::kFloat8E4M3, DType::kUInt8, DType::kInt8});
      last.out_scale = call.parameter("out_scale", out_scale);
      last.has_codes = true;
      last.codes = to.type() == DType::kInt8 ? QuantCode::kInt8 : QuantCode::kE4M3;
    } else {
      to.like(from);
    }
    last.token_scales = scales_of(call, "token_scales", token_scales, num_rows, last.token_stride);
    last.channel_scales = scales_of(call, "channel_scales", channel_scales, n, last.channel_stride);
    if (residual) {
      const Tensor added = call.read("residual", residual).like(from).shape(num_rows, width).contiguous_rows();
      last.residual = added.data();
      last.residual_stride = added.stride(0);
    }
    last.any = last.gate != Gate::kNone || last.has_codes || token_scales || channel_scales || residual;
    const Tensor packed = call.read("weight", weight).dtype({DType::kUInt8}).rank(1).contiguous();
    const int64_t bytes = place_sections(args.weight, packed.data());
    if (packed.numel() != bytes)
      packed.fail(PYKV_VALUE_ERROR, "must have the %lld bytes of its format, got shape %s",
                  static_cast<long long>(bytes), packed.shape_string().c_str());
    if (reinterpret_cast<uintptr_t>(packed.data()) % 16 != 0)
      packed.fail(PYKV_VALUE_ERROR, "must be aligned to 16 bytes");
    if (bias) args.bias = call.read("bias", bias).like(from).shape(n).contiguous_rows().data();
    args.dtype = from.type();
    args.x = from.data();
    args.out = to.data();
    args.num_rows = num_rows;
    args.x_stride = from.stride(0);
    args.x_step = from.stride(1);
    args.out_stride = to.stride(0);
    if (args.num_rows == 0 || args.weight.n == 0) return;
    call.run(stream, args, packed_gemm_cpu, PYKV_CUDA(packed_gemm_cuda));
  });
}
