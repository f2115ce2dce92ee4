#include "cache/convert_fp8.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/call.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

// Dimensions in the order in which they lie in the output, merged where they touch in both arrays.
void set_axes(const Tensor& input, const Tensor& output, ConvertFp8Args& args) {
  struct Axis {
    int64_t size, input, output;
  };
  Axis axes[Tensor::kMaxRank];
  int rank = 0;
  for (int i = 0; i < input.ndim(); ++i)
    if (input.size(i) != 1) axes[rank++] = {input.size(i), input.stride(i), output.stride(i)};
  std::stable_sort(axes, axes + rank,
                   [](const Axis& a, const Axis& b) { return std::abs(a.output) > std::abs(b.output); });
  int used = 0;  // axes[0 .. used): merged
  for (int i = 0; i < rank; ++i) {
    const Axis& inner = axes[i];
    if (used > 0 && axes[used - 1].input == inner.size * inner.input &&
        axes[used - 1].output == inner.size * inner.output) {
      axes[used - 1] = {axes[used - 1].size * inner.size, inner.input, inner.output};
    } else {
      axes[used++] = inner;
    }
  }
  constexpr int kAxes = ConvertFp8Args::kAxes;
  if (used > kAxes) input.fail(PYKV_NOT_IMPLEMENTED, "at most 4 dimensions with independent strides are supported");
  for (int i = 0; i < kAxes; ++i) {
    const int at = i - (kAxes - used);
    const Axis axis = at < 0 ? Axis{1, 1, 1} : axes[at];
    args.sizes[i] = axis.size;
    args.input_strides[i] = axis.input;
    args.output_strides[i] = axis.output;
  }
}

bool is_float(const Tensor& t) { return size_of(t.type()) > 1; }

}  // namespace
}  // namespace pykv

pykv_status pykv_convert_fp8(DLTensor* output, const DLTensor* input, const DLTensor* scale, const char* kv_dtype,
                             void* stream) {
  using namespace pykv;
  return guarded("convert_fp8", [&](Call& call) {
    Tensor to = call.write("output", output).no_overlap_within();
    Tensor from = call.read("input", input).same_shape(to);
    const auto named = [&](const char* name) { return std::strcmp(kv_dtype, name) == 0; };
    if (!named("fp8") && !named("fp8_e4m3") && !named("fp8_e5m2"))
      fail(PYKV_VALUE_ERROR, "kv_dtype: must be 'fp8', 'fp8_e4m3' or 'fp8_e5m2', got '%s'", kv_dtype);

    ConvertFp8Args args{};
    args.to_fp8 = is_float(from);
    Tensor& codes = args.to_fp8 ? to : from;
    Tensor& values = (args.to_fp8 ? from : to).dtype(kFloats);
    args.format = kv_format(kv_dtype, codes, values.type());
    args.dtype = values.type();
    call.scale(args.scale, "scale", scale, 1);
    args.input = from.data();
    args.output = to.data();
    if (to.numel() == 0) return;
    set_axes(from, to, args);
    call.run(stream, args, convert_fp8_cpu, PYKV_CUDA(convert_fp8_cuda));
  });
}
