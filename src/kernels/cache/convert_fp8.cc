#include "cache/convert_fp8.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "core/call.h"
#include "pykv/cache.h"

namespace pykv {
namespace {

struct Axis {
  int64_t size, input, output;
};

bool same_shape(const Tensor& a, const Tensor& b) {
  bool same = a.ndim() == b.ndim();
  for (int i = 0; same && i < a.ndim(); ++i) same = a.size(i) == b.size(i);
  return same;
}

// Elements that lie side by side from each index of the first dimension on; -1 if they do not.
int64_t block_of(const Tensor& t) {
  int64_t compact = 1;
  for (int i = t.ndim() - 1; i > 0; --i) {
    if (t.size(i) != 1 && t.stride(i) != compact) return -1;
    compact *= t.size(i);
  }
  return compact;
}

// Arrays of other shapes are blocks of elements side by side, as many in both.
int equal_blocks(const Tensor& input, const Tensor& output, Axis (&axes)[Tensor::kMaxRank]) {
  const int64_t block = block_of(input);
  if (input.ndim() == 0 || output.ndim() == 0 || input.size(0) != output.size(0) || block < 0 ||
      block != block_of(output))
    input.fail(
        PYKV_VALUE_ERROR,
        "must have the shape of output, %s, or as many contiguous blocks (all but the first dimension) of as many "
        "elements, got %s",
        output.shape_string().c_str(), input.shape_string().c_str());
  axes[0] = {input.size(0), input.stride(0), output.stride(0)};
  axes[1] = {block, 1, 1};
  return 2;
}

// Dimensions in the order in which they lie in the output, merged where they touch in both arrays.
void set_axes(const Tensor& input, const Tensor& output, ConvertFp8Args& args) {
  Axis axes[Tensor::kMaxRank];
  int rank = 0;
  if (same_shape(input, output)) {
    for (int i = 0; i < input.ndim(); ++i)
      if (input.size(i) != 1) axes[rank++] = {input.size(i), input.stride(i), output.stride(i)};
  } else {
    rank = equal_blocks(input, output, axes);
  }
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
    Tensor from = call.read("input", input);
    required("kv_dtype", kv_dtype);
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
    set_axes(from, to, args);
    if (to.numel() == 0) return;
    call.run(stream, args, convert_fp8_cpu, PYKV_CUDA(convert_fp8_cuda));
  });
}
