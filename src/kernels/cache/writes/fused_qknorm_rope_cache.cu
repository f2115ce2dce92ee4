// out <- R_T(x * r * (weight + bias)) for each query and key head x,  r = 1 / sqrt(sum(x^2) / head_dim + epsilon), in fp32;
// value heads are copied.
//
// Memory-bound: the floor is each byte of qkv moved once in and once out.  A head belongs to a power of two of neighbouring
// lanes of one warp.  A lane's first vector stays in registers, others are read again, from the cache.
#include "cache/writes/fused_qknorm_rope_cache.h"
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/vec.cuh"

namespace pykv {
namespace {

constexpr int kThreads = 256;

// Weights of any dtype, plus the bias.
template <int kSize>
__device__ Vec<float, kSize> load_weights(const void* weight, DType dtype, int at, float bias) {
  const auto load = [&]<class W>() { return to_floats(load_vec<Vec<W, kSize>>(static_cast<const W*>(weight) + at)); };
  auto w = dtype == DType::kFloat16    ? load.template operator()<half>()
           : dtype == DType::kBFloat16 ? load.template operator()<bf16>()
                                       : load.template operator()<float>();
#pragma unroll
  for (int i = 0; i < kSize; ++i) w[i] += bias;
  return w;
}

template <class T, int kSize>
__global__ __launch_bounds__(kThreads) void norm_heads_kernel(const __grid_constant__ NormHeadsArgs args,
                                                              Divider by_heads, int lane_bits, float inverse_size) {
  using V = Vec<T, kSize>;
  const int lanes = 1 << lane_bits, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int vectors = static_cast<int>(args.head_dim) / kSize;
  uint32_t h;
  const uint32_t token = by_heads((blockIdx.x * kThreads + threadIdx.x) >> lane_bits, h);
  const bool there = token < args.num_tokens;  // threads without a head stay: their warp adds with all lanes
  const T* head = static_cast<const T*>(args.qkv) + (there ? token * args.qkv_token + h * args.head_dim : 0);
  T* out = args.template out_of<T>(token, h);
  const void* weight = args.weight_of(h);
  const bool has_first = there && lane < vectors;
  if (comes_early() && has_first) prefetch(head + lane * kSize);
  have_ready(out);
  begin_dependent();

  V first{};
  if (has_first) first = load_vec<V>(head + lane * kSize);
  float sum = 0.0f;
  const auto add_squares = [&](const V& v) {
    const auto x = to_floats(v);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum = fmaf(x[i], x[i], sum);
  };
  add_squares(first);
  for (int k = lane + lanes; there && k < vectors; k += lanes) add_squares(load_vec<V>(head + k * kSize));
  for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  const float r = rsqrtf(fmaf(sum, inverse_size, args.epsilon));
  const auto finish = [&](int k, const V& v) {
    if (!weight) return store_vec(out + k * kSize, v);
    auto x = to_floats(v);
    const auto w = load_weights<kSize>(weight, args.weight_dtype, k * kSize, args.weight_bias);
#pragma unroll
    for (int i = 0; i < kSize; ++i) x[i] = x[i] * r * w[i];
    store_vec(out + k * kSize, round_to<T>(x));
  };
  if (has_first) finish(lane, first);
  for (int k = lane + lanes; there && k < vectors; k += lanes) finish(k, load_vec<V>(head + k * kSize));
}

template <class T, int kSize>
void run(const NormHeadsArgs& args, const Launch& launch) {
  int lane_bits = 0;
  while (lane_bits < 5 && (kSize << lane_bits) < args.head_dim) ++lane_bits;
  const int64_t heads = args.num_heads();
  if (args.head_dim > INT32_MAX || args.num_tokens > INT32_MAX / heads >> lane_bits)
    fail(PYKV_NOT_IMPLEMENTED, "qkv: too large, more than 2^31 - 1 vectors of all tokens, or elements in a head");
  const int64_t threads = args.num_tokens * heads << lane_bits;
  launch_dependent(norm_heads_kernel<T, kSize>, static_cast<unsigned>((threads - 1) / kThreads + 1), kThreads, launch,
                   "fused_qknorm_rope_cache", args, Divider(heads), lane_bits,
                   1.0f / static_cast<float>(args.head_dim));
}

}  // namespace

void norm_heads_cuda(const NormHeadsArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    constexpr int64_t kWide = kPackSize<T>, kSize = sizeof(T);
    const auto aligned = [&](const HeadsOut& out) {
      return is_aligned(kAccessBytes, out.data, {out.token * kSize, out.head * kSize});
    };
    const bool wide = args.head_dim % kWide == 0 && is_aligned(kAccessBytes, args.qkv, {args.qkv_token * kSize}) &&
                      aligned(args.q) && aligned(args.k) && aligned(args.v) &&
                      is_aligned(kAccessBytes, args.q_weight) && is_aligned(kAccessBytes, args.k_weight);
    wide ? run<T, kWide>(args, launch) : run<T, 1>(args, launch);
  });
}

}  // namespace pykv
