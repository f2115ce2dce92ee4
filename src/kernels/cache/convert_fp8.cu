// output = fp8(input / scale), or T(input * scale).
//
// Memory-bound: a thread takes kVectorsPerThread vectors of 16 bytes of the wider side (one element where strides or
// addresses do not allow that), all loads under way before the first is used.  Contiguous arrays are one axis by then.
#include "cache/convert_fp8.h"
#include "cache/dequantise.cuh"
#include "cache/mover.cuh"
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"

namespace pykv {
namespace {

constexpr int kThreads = 256, kVectorsPerThread = 4, kAxes = ConvertFp8Args::kAxes;

struct ConvertPlan {
  const char* input;
  char* output;
  Divider sizes[kAxes - 1];                             // of axes 1, 2 and 3, in vectors
  int64_t input_strides[kAxes], output_strides[kAxes];  // bytes; of axis 3 from one vector to the next
  uint32_t num_vectors;
};

template <class T, KvFormat kFormat, int kSize>
struct ToFp8 {
  using Loaded = Vec<T, kSize>;
  Quotient quotient;
  __device__ explicit ToFp8(float scale) : quotient(scale) {}
  __device__ auto operator()(const Loaded& v) const { return Mover<T, kFormat, kSize>::convert(v, quotient); }
};

template <class T, KvFormat kFormat, int kSize>
struct FromFp8 {
  using Loaded = Vec<uint8_t, kSize>;
  float scale;
  __device__ explicit FromFp8(float s) : scale(s) {}
  __device__ auto operator()(const Loaded& v) const { return dequantise<T, kFormat>(v, scale); }
};

template <class Convert>
__global__ void __launch_bounds__(kThreads)
    convert_fp8_kernel(const __grid_constant__ ConvertPlan plan, const __grid_constant__ Scale scale) {
  using Loaded = typename Convert::Loaded;
  begin_dependent();
  const uint32_t first = blockIdx.x * (kThreads * kVectorsPerThread) + threadIdx.x;
  Loaded loaded[kVectorsPerThread];
  char* places[kVectorsPerThread];
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const uint32_t n = first + i * kThreads;
    places[i] = nullptr;
    if (n >= plan.num_vectors) continue;
    uint32_t b, c, d;
    const uint32_t a = plan.sizes[0](plan.sizes[1](plan.sizes[2](n, d), c), b);
    const int64_t *in = plan.input_strides, *out = plan.output_strides;
    loaded[i] = load_vec<Loaded>(plan.input + a * in[0] + b * in[1] + c * in[2] + d * in[3]);
    places[i] = plan.output + a * out[0] + b * out[1] + c * out[2] + d * out[3];
  }
  const Convert convert(scale[0]);
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i)
    if (places[i]) store_vec(places[i], convert(loaded[i]));
}

template <class Convert>
void launch_kernel(const ConvertFp8Args& args, int64_t size, int64_t in_bytes, int64_t out_bytes,
                   const Launch& launch) {
  ConvertPlan plan{};
  plan.input = static_cast<const char*>(args.input);
  plan.output = static_cast<char*>(args.output);
  int64_t total = 1;
  for (int axis = 0; axis < kAxes; ++axis) {
    const int64_t step = axis == kAxes - 1 ? size : 1, count = args.sizes[axis] / step;
    total *= count;
    if (total >= int64_t{1} << 31)
      fail(PYKV_NOT_IMPLEMENTED, "input: 2^31 vectors of %lld elements in one call are not supported",
           static_cast<long long>(size));
    if (axis > 0) plan.sizes[axis - 1] = Divider(count);
    plan.input_strides[axis] = args.input_strides[axis] * step * in_bytes;
    plan.output_strides[axis] = args.output_strides[axis] * step * out_bytes;
  }
  plan.num_vectors = static_cast<uint32_t>(total);
  constexpr int64_t kTile = kThreads * kVectorsPerThread;
  launch_dependent(convert_fp8_kernel<Convert>, static_cast<uint32_t>((total + kTile - 1) / kTile), kThreads, launch,
                   "convert_fp8", plan, args.scale);
}

bool aligned(const void* data, const int64_t (&strides)[kAxes], const int64_t (&sizes)[kAxes], int64_t item,
             int64_t bytes) {
  for (int axis = 0; axis < kAxes - 1; ++axis)
    if (sizes[axis] > 1 && !is_aligned(bytes, nullptr, {strides[axis] * item})) return false;
  return strides[kAxes - 1] == 1 && is_aligned(bytes, data);
}

template <class T, KvFormat kFormat>
void convert(const ConvertFp8Args& args, const Launch& launch) {
  constexpr int64_t kItem = sizeof(T);
  constexpr int kSize = 16 / sizeof(T);
  const int64_t in = args.to_fp8 ? kItem : 1, out = args.to_fp8 ? 1 : kItem;
  const bool wide = args.sizes[kAxes - 1] % kSize == 0 &&
                    aligned(args.input, args.input_strides, args.sizes, in, kSize * in) &&
                    aligned(args.output, args.output_strides, args.sizes, out, kSize * out);
  if (args.to_fp8)
    return wide ? launch_kernel<ToFp8<T, kFormat, kSize>>(args, kSize, in, out, launch)
                : launch_kernel<ToFp8<T, kFormat, 1>>(args, 1, in, out, launch);
  return wide ? launch_kernel<FromFp8<T, kFormat, kSize>>(args, kSize, in, out, launch)
              : launch_kernel<FromFp8<T, kFormat, 1>>(args, 1, in, out, launch);
}

}  // namespace

void convert_fp8_cuda(const ConvertFp8Args& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T> {
    return args.format == KvFormat::kE4M3 ? convert<T, KvFormat::kE4M3>(args, launch)
                                          : convert<T, KvFormat::kE5M2>(args, launch);
  });
}

}  // namespace pykv
