// Twin of fused_qk_norm_rope.cu: each head is read once for its norm, and again, from the cache, to be normed and turned.
#include "cpu/rotation.h"
#include "norm/fused_qk_norm_rope.h"
#include "norm/row_norm_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

// Elements of the heads of a token, normed; those of the next one are asked for meanwhile.
template <class T>
struct Normed {
  const T *token, *ahead;
  int64_t stride;
  Weights<T> weights;
  const float* inverses;
  Pair<T> at(int64_t i, int64_t count) const { return weights(i, count); }
  Pair<T> operator()(int64_t h, int64_t i, int64_t count, Pair<T> weight) const {
    prefetch_pair<2>(ahead + h * stride + i);
    return load_pair<T>(token + h * stride + i, count) * (weight * inverses[h]);
  }
};

// The squares of a head, added up in lanes as row_sum does it.
template <class T>
Floats squares_of(const T* head, int64_t n) {
  const auto square = [=](int64_t i, int64_t count) {
    const Pair<T> v = load_pair<T>(head + i, count);
    return v * v;
  };
  Pair<T> sums[kSums] = {0.0f, 0.0f};
  int64_t i = 0;
  for (; i + kSums * kPair <= n; i += kSums * kPair)
    for (int k = 0; k < kSums; ++k) sums[k] = sums[k] + square(i + k * kPair, int64_t{kPair});
  for (; i < n; i += kPair) sums[0] = sums[0] + square(i, std::min<int64_t>(n - i, kPair));
  const Pair<T> all = sums[0] + sums[1];
  return all.x + all.y;
}

// What heads are normed by: the lanes of so many heads as a vector has are added up, and the roots taken, at once.
template <class T>
[[gnu::flatten]] void find_inverses(float* inverses, const T* head, const RotaryHeads& heads, int64_t n,
                                    float epsilon) {
  for (int64_t first = 0; first < heads.num_heads; first += kWidth) {
    const int64_t some = std::min<int64_t>(heads.num_heads - first, kWidth);
    Floats lanes[kWidth] = {};
    for (int64_t h = 0; h < some; ++h, head += heads.head) lanes[h] = squares_of(head, n);
    const Floats squares = reduce_each(lanes, [](Floats a, Floats b) { return a + b; });
    store(inverses + first, 1.0f / sqrt(squares / static_cast<float>(n) + epsilon));
  }
}

// The heads of token t: first what all are normed by.  The processor's own prefetching stops where a token ends: those of
// the next one are prefetched.
template <class T>
[[gnu::flatten]] void norm_and_rotate(const TokenRotator<T>& rotator, const RotaryHeads& heads, int64_t t, int64_t next,
                                      const RowWeights& weights, const QkNormRopeArgs& args, float* inverses) {
  const int64_t n = args.head_size, stride = heads.head, num_heads = heads.num_heads;
  T* const token = rotator.heads_of(heads, t);
  find_inverses(inverses, token, heads, n, plain(args.epsilon));
  const Normed<T> normed{token, rotator.heads_of(heads, next), stride, Weights<T>(weights, 1.0f), inverses};
  rotator.rotate_all(token, stride, num_heads, normed);
  each_pair(args.rotation.rotary_dim, n, [=](int64_t i, int64_t count) {
    const Pair<T> weight = normed.at(i, count);
    for (int64_t h = 0; h < num_heads; ++h) store_pair(token + h * stride + i, normed(h, i, count, weight), count);
  });
}

}  // namespace

void fused_qk_norm_rope_cpu(const QkNormRopeArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  const Reporter report = launch.reporter(rotation.report);
  constexpr int64_t kElementsWorthAThread = 16384;
  const int64_t heads = rotation.query.num_heads + rotation.key.num_heads;
  const int64_t grain = std::max<int64_t>(1, kElementsWorthAThread / (heads * args.head_size));
  dispatch<float, f16, bf16>(rotation.dtype, [&]<class T>() {
    parallel_for(rotation.num_tokens, grain, [&](int64_t begin, int64_t end) {
      std::vector<float> inverses(heads + kWidth);
      TokenRotator<T> rotator(rotation, report);
      for (int64_t t = begin; t < end; ++t) {
        if (!rotator.take_angles(rotator.position(t))) continue;
        const int64_t next = std::min(t + 1, end - 1);
        norm_and_rotate(rotator, rotation.query, t, next, args.query_weight, args, inverses.data());
        norm_and_rotate(rotator, rotation.key, t, next, args.key_weight, args, inverses.data());
      }
    });
  });
}

}  // namespace pykv::PYKV_ISA
