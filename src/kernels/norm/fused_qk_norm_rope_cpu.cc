// Twin of fused_qk_norm_rope.cu: each head is read once for its norm, and again, from the cache, to be normed and turned.
#include "cpu/rotation.h"
#include "norm/fused_qk_norm_rope.h"
#include "norm/row_norm_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

// Elements of a head, normed.
template <class T>
struct Normed {
  const T* head;
  Weights<T> weights;
  float inverse;
  Pair<T> operator()(int64_t i, int64_t count) const {
    return load_pair<T>(head + i, count) * (weights(i, count) * inverse);
  }
};

template <class T>
float inverse_of(const T* head, int64_t n, float epsilon) {
  const float squares = row_sum(n, [=](int64_t i, int64_t count) {
    const Pair<T> v = load_pair<T>(head + i, count);
    return v * v;
  });
  return 1.0f / std::sqrt(squares / static_cast<float>(n) + epsilon);
}

template <class T>
T* heads_of(const RotaryHeads& heads, const Rotation& rotation, int64_t t) {
  return static_cast<T*>(heads.data) + t / rotation.seq * heads.batch + t % rotation.seq * heads.token;
}

// The heads of token t: first what all are normed by, so that the roots of one are worked out while others are added up.
// Then, since the processor's own prefetching stops where a token ends, those of the next one are prefetched.
template <class T>
[[gnu::flatten]] void norm_and_rotate(const TokenRotator<T>& rotator, const RotaryHeads& heads, int64_t t, int64_t next,
                                      const RowWeights& weights, const QkNormRopeArgs& args, float* inverses) {
  const int64_t n = args.head_size, rotated = args.rotation.rotary_dim;
  T* const token = heads_of<T>(heads, args.rotation, t);
  const T* const ahead = heads_of<T>(heads, args.rotation, next);
  for (int64_t h = 0; h < heads.num_heads; ++h)
    inverses[h] = inverse_of(token + h * heads.head, n, plain(args.epsilon));
  for (int64_t h = 0; h < heads.num_heads; ++h) {
    T* const head = token + h * heads.head;
    for (int64_t i = 0; i < n; i += kPair) prefetch_pair(ahead + h * heads.head + i);
    const Normed<T> normed{head, Weights<T>(weights, 1.0f), inverses[h]};
    rotator.rotate(head, normed);
    each_pair(rotated, n, [=](int64_t i, int64_t count) { store_pair(head + i, normed(i, count), count); });
  }
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
      std::vector<float> inverses(heads);
      TokenRotator<T> rotator(rotation, report);
      for (int64_t t = begin; t < end; ++t) {
        if (!rotator.take_angles(rotation.position(t / rotation.seq, t % rotation.seq))) continue;
        const int64_t next = std::min(t + 1, end - 1);
        norm_and_rotate(rotator, rotation.query, t, next, args.query_weight, args, inverses.data());
        norm_and_rotate(rotator, rotation.key, t, next, args.key_weight, args, inverses.data());
      }
    });
  });
}

}  // namespace pykv::PYKV_ISA
