// x <- R_T(rotated(x * (r * weight))) for each query and key head x,  r = 1 / sqrt(sum(x^2) / head_size + epsilon), all in
// fp32 and rounded once.
//
// Memory-bound: the floor is each byte of queries and keys moved once in and once out.  A head belongs to a power of two of
// neighbouring lanes of one warp.  A lane's items are pairs of vectors of kSize elements that are rotated with one another
// (both halves in NeoX style, neighbours in GPT-J style), then vectors that are not rotated; the first stays in registers,
// others are read again, from the cache.  Which lane adds what follows from the sizes and the alignment of the heads alone.
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/reduce.cuh"
#include "cuda/rotation.cuh"
#include "norm/fused_qk_norm_rope.h"

namespace pykv {
namespace {

constexpr int kThreads = 128;

template <class T, int kSize, bool kNeox>
struct Head {
  using V = Vec<T, kSize>;
  struct Item {
    V low, high;
  };
  T* data;
  RowWeights weights;
  int half, pairs;  // elements of half the rotary dimension; items that are rotated

  __device__ int low(int item) const {
    return item < pairs ? (kNeox ? item : 2 * item) * kSize : (item + pairs) * kSize;
  }
  __device__ int high(int item) const { return kNeox ? half + item * kSize : (2 * item + 1) * kSize; }

  __device__ Item load(int item) const {
    Item v{load_vec<V>(data + low(item)), {}};
    if (item < pairs) v.high = load_vec<V>(data + high(item));
    return v;
  }
  __device__ static float sum_of_squares(const Item& item) {
    const auto low = to_floats(item.low), high = to_floats(item.high);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum = fmaf(high[i], high[i], fmaf(low[i], low[i], sum));
    return sum;
  }
  __device__ Vec<float, kSize> normed(const V& v, int at, float r) const {
    auto y = to_floats(v);
    const auto scale = [&](const auto& w) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) y[i] *= r * w[i];
    };
    if (!weights.data) {
      scale(filled<float, kSize>(1.0f));
    } else if (weights.is_float32) {
      Vec<float, kSize> w;  // of any alignment: few, and the same for all heads
#pragma unroll
      for (int i = 0; i < kSize; ++i) w[i] = static_cast<const float*>(weights.data)[at + i];
      scale(w);
    } else {
      Vec<float, kSize> w;
#pragma unroll
      for (int i = 0; i < kSize; ++i) w[i] = to_float(static_cast<const T*>(weights.data)[at + i]);
      scale(w);
    }
    return y;
  }
  __device__ void finish(int item, const Item& given, float r, const Rotation& rotation, int64_t position) const {
    auto x = normed(given.low, low(item), r);
    if (item < pairs) {
      auto y = normed(given.high, high(item), r);
      rotate<kNeox>(x, y, load_angles<kSize>(rotation, position, item * kSize));
      store_vec(data + high(item), round_to<T>(y));
    }
    store_vec(data + low(item), round_to<T>(x));
  }
};

template <class T, int kSize, bool kNeox>
__global__ __launch_bounds__(kThreads) void qk_norm_rope_kernel(const __grid_constant__ QkNormRopeArgs args,
                                                                Divider by_heads, int lanes, float inverse_size,
                                                                Reporter report) {
  using H = Head<T, kSize, kNeox>;
  const Rotation& rotation = args.rotation;
  const int lane = threadIdx.x % lanes, heads_of_block = kThreads / lanes;
  const int64_t index = int64_t{blockIdx.x} * heads_of_block + threadIdx.x / lanes;
  const int64_t heads = rotation.query.num_heads + rotation.key.num_heads;
  bool there = index < rotation.num_tokens * heads;  // lanes without a head stay: their warp adds with all lanes
  uint32_t h;
  const int64_t token = by_heads(static_cast<uint32_t>(there ? index : 0), h);
  const int64_t b = token / rotation.seq, s = token % rotation.seq;
  const bool is_key = h >= rotation.query.num_heads;
  const RotaryHeads& of = is_key ? rotation.key : rotation.query;
  const int half = static_cast<int>(rotation.rotary_dim) / 2;
  begin_dependent();

  const int64_t position = rotation.position(b, s);
  if (there && (position < 0 || position >= rotation.max_position)) {
    if (lane == 0) report(position, rotation.max_position);
    there = false;
  }
  const int64_t in_group = is_key ? h - rotation.query.num_heads : h;
  const H head{static_cast<T*>(of.data) + b * of.batch + s * of.token + in_group * of.head,
               is_key ? args.key_weight : args.query_weight, half, half / kSize};
  const int items = there ? static_cast<int>(args.head_size) / kSize - head.pairs : 0;
  typename H::Item first{};
  if (lane < items) first = head.load(lane);
  float sum = H::sum_of_squares(first);
  for (int item = lane + lanes; item < items; item += lanes) sum += H::sum_of_squares(head.load(item));
  const float r = rsqrtf(fmaf(warp_reduce(sum, lanes, Sum()), inverse_size, args.epsilon));
  if (lane < items) head.finish(lane, first, r, rotation, position);
  for (int item = lane + lanes; item < items; item += lanes) head.finish(item, head.load(item), r, rotation, position);
}

template <class T, int kSize>
void run(const QkNormRopeArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  const int64_t heads = rotation.query.num_heads + rotation.key.num_heads;
  if (args.head_size > INT32_MAX || rotation.num_tokens > INT32_MAX / heads)
    fail(PYKV_NOT_IMPLEMENTED, "qkv: too large, more than 2^31 - 1 heads of all tokens, or elements in one");
  const int64_t items = args.head_size / kSize - rotation.rotary_dim / 2 / kSize;
  int lanes = 1;
  while (lanes < 32 && lanes < items) lanes *= 2;
  const int64_t heads_of_block = kThreads / lanes;
  const auto blocks = static_cast<unsigned>((rotation.num_tokens * heads + heads_of_block - 1) / heads_of_block);
  dispatch_bool(rotation.is_neox, [&]<bool kNeox>() {
    launch_dependent(qk_norm_rope_kernel<T, kSize, kNeox>, blocks, kThreads, launch, "fused_qk_norm_rope", args,
                     Divider(heads), lanes, 1.0f / static_cast<float>(args.head_size),
                     launch.reporter(rotation.report));
  });
}

}  // namespace

void fused_qk_norm_rope_cuda(const QkNormRopeArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  dispatch<half, bf16, float>(rotation.dtype, [&]<class T>() {
    constexpr int kWide = 4;
    const bool wide = args.head_size % kWide == 0 && rotation.rotary_dim / 2 % kWide == 0 &&
                      angles_fit(rotation, kWide) && heads_fit(rotation.query, sizeof(T), kWide) &&
                      heads_fit(rotation.key, sizeof(T), kWide);
    wide ? run<T, kWide>(args, launch) : run<T, 1>(args, launch);
  });
}

}  // namespace pykv
