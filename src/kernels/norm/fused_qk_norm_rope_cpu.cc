// Twin of fused_qk_norm_rope.cu: the heads of a token are normed into floats, which are rotated and rounded back.
#include "cpu/rotation.h"
#include "norm/fused_qk_norm_rope.h"
#include "norm/row_norm_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T>
T* head_at(const RotaryHeads& heads, int64_t b, int64_t s, int64_t h) {
  return static_cast<T*>(heads.data) + b * heads.batch + s * heads.token + h * heads.head;
}

template <class T>
void norm_heads(const RotaryHeads& heads, int64_t b, int64_t s, const RowWeights& given, const QkNormRopeArgs& args,
                float* out) {
  const Weights<T> weights(given, 1.0f);
  const int64_t n = args.head_size;
  for (int64_t h = 0; h < heads.num_heads; ++h, out += n) {
    const T* x = head_at<T>(heads, b, s, h);
    const float squares = row_sum(n, [&](int64_t i, int64_t count) {
      const Pair<T> v = load_pair<T>(x + i, count);
      return v * v;
    });
    const Pair<T> r = 1.0f / std::sqrt(squares / static_cast<float>(n) + args.epsilon);
    each_pair(0, n, [&](int64_t i, int64_t count) {
      store_pair(out + i, load_pair<T>(x + i, count) * (r * weights(i, count)), count);
    });
  }
}

template <class T>
void round_heads(const RotaryHeads& heads, int64_t b, int64_t s, const float* normed, int64_t n) {
  for (int64_t h = 0; h < heads.num_heads; ++h, normed += n) {
    T* out = head_at<T>(heads, b, s, h);
    each_pair(0, n, [&](int64_t i, int64_t count) { store_pair(out + i, load_pair<T>(normed + i, count), count); });
  }
}

}  // namespace

void fused_qk_norm_rope_cpu(const QkNormRopeArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  const Reporter report = launch.reporter(rotation.report);
  constexpr int64_t kElementsWorthAThread = 16384;
  const int64_t n = args.head_size, heads = rotation.query.num_heads + rotation.key.num_heads;
  const int64_t grain = std::max<int64_t>(1, kElementsWorthAThread / (heads * n));
  dispatch<float, f16, bf16>(rotation.dtype, [&]<class T>() {
    parallel_for(rotation.num_tokens, grain, [&](int64_t begin, int64_t end) {
      std::vector<float> normed(heads * n);
      Rotation of_floats = rotation;  // the heads of one token
      of_floats.query = {normed.data(), 0, 0, n, heads};
      of_floats.key = {};
      TokenRotator<float> rotator(of_floats, report);
      for (int64_t t = begin; t < end; ++t) {
        const int64_t b = t / rotation.seq, s = t % rotation.seq;
        if (!rotator.take_angles(rotation.position(b, s))) continue;
        norm_heads<T>(rotation.query, b, s, args.query_weight, args, normed.data());
        float* keys = normed.data() + rotation.query.num_heads * n;
        norm_heads<T>(rotation.key, b, s, args.key_weight, args, keys);
        rotator.rotate(of_floats.query, 0, 0);
        round_heads<T>(rotation.query, b, s, normed.data(), n);
        round_heads<T>(rotation.key, b, s, keys, n);
      }
    });
  });
}

}  // namespace pykv::PYKV_ISA
