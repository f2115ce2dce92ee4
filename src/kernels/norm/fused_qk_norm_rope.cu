// x <- R_T(rotated(x * (r * weight))) for each query and key head x,  r = 1 / sqrt(sum(x^2) / head_size + epsilon), all in
// fp32 and rounded once.
//
// Memory-bound: the floor is each byte of queries and keys moved once in and once out.  A head belongs to a power of two of
// neighbouring lanes of one warp.  A lane's items are pairs of vectors of kSize elements that are rotated with one another
// (both halves in NeoX style, neighbours in GPT-J style), then vectors that are not rotated; the first stays in registers,
// others are read again, from the cache.  Which lane adds what follows from the sizes and the alignment of the heads alone.
// A warp takes several heads of a token, one or a few at a time, so that angles and weights are fetched once for all of
// them, and has the next ones on their way meanwhile.
#include <algorithm>

#include "cuda/dependent.cuh"
#include "cuda/device.h"
#include "cuda/divider.cuh"
#include "cuda/reduce.cuh"
#include "cuda/rotation.cuh"
#include "cuda/streaming.cuh"
#include "norm/fused_qk_norm_rope.h"

namespace pykv {
namespace {

constexpr int kThreads = 128;

// What lanes hold of heads.  kPlain: a lane has one item, and weights are aligned and of the heads' dtype.
template <class T, int kSize, bool kNeox, bool kPlain>
struct Items {
  using V = Vec<T, kSize>;
  struct Item {
    V low, high;
  };
  using W = std::conditional_t<kPlain, V, Vec<float, kSize>>;
  struct Weights {
    W low, high;
  };
  struct Place {
    int low, high;
    bool is_pair;  // is rotated; else there is no high one
  };
  int half, pairs;  // elements of half the rotary dimension; items that are rotated

  __device__ Place place_of(int item) const {
    if (item >= pairs) return {(item + pairs) * kSize, 0, false};
    return kNeox ? Place{item * kSize, half + item * kSize, true}
                 : Place{2 * item * kSize, (2 * item + 1) * kSize, true};
  }
  __device__ static void prefetch(const T* head, const Place& at) {
    pykv::prefetch(head + at.low);
    if (at.is_pair) pykv::prefetch(head + at.high);
  }
  __device__ static Item load(const T* head, const Place& at) {
    Item v{load_vec<V>(head + at.low), {}};
    if (at.is_pair) v.high = load_vec<V>(head + at.high);
    return v;
  }
  __device__ static float sum_of_squares(const Item& item) {
    const auto low = to_floats(item.low), high = to_floats(item.high);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum = fmaf(high[i], high[i], fmaf(low[i], low[i], sum));
    return sum;
  }
  // Where they are not plain, of any alignment and dtype: few, and the same for all heads.
  __device__ static W weights_at(const RowWeights& weights, int at) {
    if constexpr (kPlain) {
      return load_vec<V>(static_cast<const T*>(weights.data) + at);
    } else {
      auto w = filled<float, kSize>(1.0f);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (weights.data && weights.is_float32) w[i] = static_cast<const float*>(weights.data)[at + i];
        if (weights.data && !weights.is_float32) w[i] = to_float(static_cast<const T*>(weights.data)[at + i]);
      }
      return w;
    }
  }
  __device__ static Weights weights_of(const RowWeights& weights, const Place& at) {
    Weights w{weights_at(weights, at.low), {}};
    if (at.is_pair) w.high = weights_at(weights, at.high);
    return w;
  }
  __device__ static void finish(T* head, const Place& at, const Item& given, float r, const Weights& w,
                                const Angles<kSize>& angles, bool streamed) {
    auto x = to_floats(given.low), y = to_floats(given.high);
    const auto wx = to_floats(w.low), wy = to_floats(w.high);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      x[i] *= r * wx[i];
      y[i] *= r * wy[i];
    }
    if (at.is_pair) {
      rotate<kNeox>(x, y, angles);
      store_vec(head + at.high, round_to<T>(y), streamed);
    }
    store_vec(head + at.low, round_to<T>(x), streamed);
  }
};

// A head belongs to `lanes` lanes; a warp takes `steps` times as many heads as that leaves room for.
template <class T, int kSize, bool kNeox, bool kPlain>
__global__ __launch_bounds__(kThreads, 4) void qk_norm_rope_kernel(const __grid_constant__ QkNormRopeArgs args,
                                                                   Divider by_parts, Divider by_seq, int lanes,
                                                                   int steps, bool streamed, float inverse_size,
                                                                   Reporter report) {
  using Item = typename Items<T, kSize, kNeox, kPlain>::Item;
  const Rotation& rotation = args.rotation;
  const auto num_queries = static_cast<int>(rotation.query.num_heads);
  const auto heads = static_cast<int>(num_queries + rotation.key.num_heads);
  const int half = static_cast<int>(rotation.rotary_dim) / 2;
  const Items<T, kSize, kNeox, kPlain> of{half, half / kSize};
  const int items = static_cast<int>(args.head_size) / kSize - of.pairs;
  const int lane = threadIdx.x & (lanes - 1), together = 32 / lanes;
  uint32_t part;
  const uint32_t token = by_parts(blockIdx.x * (kThreads / 32) + threadIdx.x / 32, part);
  const bool exists = token < rotation.num_tokens;
  uint32_t s;
  const uint32_t b = by_seq(token, s);
  const int end = exists ? min(heads, (static_cast<int>(part) + 1) * together * steps) : 0;
  int h = static_cast<int>(part) * together * steps + static_cast<int>(threadIdx.x) % 32 / lanes;

  T* const queries = static_cast<T*>(rotation.query.data) + b * rotation.query.batch + s * rotation.query.token;
  T* const keys = static_cast<T*>(rotation.key.data) + b * rotation.key.batch + s * rotation.key.token -
                  num_queries * rotation.key.head;
  const auto head_at = [&](int h) {
    const bool is_key = h >= num_queries;
    return (is_key ? keys : queries) + h * (is_key ? rotation.key.head : rotation.query.head);
  };
  const auto own = of.place_of(lane);
  constexpr int kAhead = 3;  // steps
  const auto prefetch = [&](int h) {
    if (lane < items && h < end) of.prefetch(head_at(h), own);
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) prefetch(h + i * together);
  const int64_t position_at = exists ? b * rotation.position_batch + s * rotation.position_token : 0;
  if (comes_early() && exists && threadIdx.x % 32 < lanes && lane < of.pairs)
    prefetch_angles(rotation, position_at, lane * kSize);
  begin_dependent();
  if (!exists) return;

  PositionLoad position_load(rotation.positions, position_at);
  T* head = head_at(h);
  Item next{};
  if (lane < items && h < end) next = of.load(head, own);
  const auto weights_of = [&](bool is_key, const auto& place) {
    return of.weights_of(is_key ? args.key_weight : args.query_weight, place);
  };
  bool is_key = h >= num_queries;
  typename Items<T, kSize, kNeox, kPlain>::Weights weights{};
  if (lane < items) weights = weights_of(is_key, own);
  const int64_t position = position_load.wait(rotation.positions.is_int64);
  if (position < 0 || position >= rotation.max_position) {  // the same for the whole warp
    if (part == 0 && threadIdx.x % 32 == 0) report(position, rotation.max_position);
    return;
  }
  const auto angles_of = [&](int item) {
    return item < of.pairs ? load_angles<kSize>(rotation, position, item * kSize) : Angles<kSize>{};
  };
  const auto angles = angles_of(lane);

  for (int step = 0; step < steps; ++step) {
    const bool there = h < end;  // lanes without a head stay: their warp adds with all lanes
    T* const here = head;
    const Item first = next;
    if (lane < items && is_key != (h >= num_queries)) {
      is_key = !is_key;
      weights = weights_of(is_key, own);
    }
    prefetch(h + kAhead * together);
    h += together;
    head = head_at(h);
    if (lane < items && h < end) next = of.load(head, own);
    float sum = of.sum_of_squares(first);
    if (!kPlain && items > lanes && there) {
      for (int item = lane + lanes; item < items; item += lanes)
        sum += of.sum_of_squares(of.load(here, of.place_of(item)));
    }
    for (int distance = lanes / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
    const float r = rsqrtf(fmaf(sum, inverse_size, args.epsilon));
    if (!there) continue;
    if (lane < items) of.finish(here, own, first, r, weights, angles, streamed);
    if (!kPlain && items > lanes) {
      for (int item = lane + lanes; item < items; item += lanes) {
        const auto at = of.place_of(item);
        of.finish(here, at, of.load(here, at), r, weights_of(is_key, at), angles_of(item), streamed);
      }
    }
  }
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
  // As many steps as leave every SM enough warps, and as many in each part.  A head's result does not depend on it.
  const int64_t together = 32 / lanes, all_steps = (heads - 1) / together + 1;
  const int64_t warps = int64_t{num_sms(launch.device)} * 48;
  const int64_t most_steps = std::clamp<int64_t>(rotation.num_tokens * all_steps / warps, 1, all_steps);
  const int64_t parts = (all_steps - 1) / most_steps + 1, steps = (all_steps - 1) / parts + 1;
  const auto blocks = static_cast<unsigned>((rotation.num_tokens * parts - 1) / (kThreads / 32) + 1);
  const auto fits = [](const RowWeights& w) {
    return w.data && (sizeof(T) == 4 || !w.is_float32) && is_aligned(kSize * sizeof(T), w.data);
  };
  const bool plain = kSize > 1 && items <= lanes && fits(args.query_weight) && fits(args.key_weight);
  dispatch_bool(rotation.is_neox, [&]<bool kNeox>() {
    const auto start = [&](auto kernel) {
      launch_dependent(kernel, blocks, kThreads, launch, "fused_qk_norm_rope", args, Divider(parts),
                       Divider(rotation.seq), lanes, static_cast<int>(steps),
                       is_streamed(rotation.num_tokens * heads * args.head_size * int64_t{sizeof(T)}),
                       1.0f / static_cast<float>(args.head_size), launch.reporter(rotation.report));
    };
    if constexpr (kSize > 1) {
      if (plain) return start(qk_norm_rope_kernel<T, kSize, kNeox, true>);
    }
    start(qk_norm_rope_kernel<T, kSize, kNeox, false>);
  });
}

}  // namespace

void fused_qk_norm_rope_cuda(const QkNormRopeArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  dispatch<half, bf16, float>(rotation.dtype, [&]<class T>() {
    constexpr int kWide = kPackSize<T>;
    const bool wide = args.head_size % kWide == 0 && rotation.rotary_dim / 2 % kWide == 0 &&
                      angles_fit(rotation, kWide) && heads_fit(rotation.query, sizeof(T), kWide) &&
                      heads_fit(rotation.key, sizeof(T), kWide);
    wide ? run<T, kWide>(args, launch) : run<T, 1>(args, launch);
  });
}

}  // namespace pykv
