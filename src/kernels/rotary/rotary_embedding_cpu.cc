// x' = x * cos - y * sin,  y' = y * cos + x * sin  for the pairs of each head, in fp32, rounded once.
//
// A token is one thread's: it widens the token's cosines and sines once and rotates all heads with them.
#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "rotary/rotary_embedding.h"

namespace pykv::PYKV_ISA {
namespace {

using Lanes = int32_t __attribute__((vector_size(4 * kWidth)));

// Lane i of the result is lane first + step * i of a and b laid side by side.
Floats strided(Floats a, Floats b, int first, int step) {
  Lanes lanes;
  for (int i = 0; i < kWidth; ++i) lanes[i] = first + step * i;
  return __builtin_shuffle(a, b, lanes);
}
// Lanes of a and b in turn, from lane `first` on.
Floats interleaved(Floats a, Floats b, int first) {
  Lanes lanes;
  for (int i = 0; i < kWidth; ++i) lanes[i] = first + i / 2 + i % 2 * kWidth;
  return __builtin_shuffle(a, b, lanes);
}

template <class T>
void rotate_neox(T* head, const float* cosines, const float* sines, int64_t half) {
  const auto rotate_vector = [&](int64_t i, int64_t count) {
    const Floats x = load(head + i, count), y = load(head + half + i, count);
    const Floats c = load(cosines + i), s = load(sines + i);
    store(head + i, x * c - y * s, count);
    store(head + half + i, y * c + x * s, count);
  };
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) rotate_vector(i, kWidth);
  if (i < half) rotate_vector(i, half - i);
}

// kWidth pairs side by side in memory.
template <class T>
void rotate_pairs(T* pairs, const float* cosines, const float* sines) {
  const Floats a = load(pairs), b = load(pairs + kWidth);
  const Floats x = strided(a, b, 0, 2), y = strided(a, b, 1, 2);
  const Floats c = load(cosines), s = load(sines);
  const Floats u = x * c - y * s, v = y * c + x * s;
  store(pairs, interleaved(u, v, 0));
  store(pairs + kWidth, interleaved(u, v, kWidth / 2));
}

template <class T>
void rotate_gptj(T* head, const float* cosines, const float* sines, int64_t half) {
  int64_t i = 0;
  for (; i + kWidth <= half; i += kWidth) rotate_pairs(head + 2 * i, cosines + i, sines + i);
  if (i == half) return;
  T last[2 * kWidth] = {};
  std::copy(head + 2 * i, head + 2 * half, last);
  rotate_pairs(last, cosines + i, sines + i);
  std::copy(last, last + 2 * (half - i), head + 2 * i);
}

// Floats of n elements, padded with zeros to whole vectors.
void widen_row(float* to, const void* from, DType dtype, int64_t first, int64_t n, float sign) {
  dispatch<float, f16, bf16>(dtype, [&]<class C>() {
    const C* row = static_cast<const C*>(from) + first;
    for (int64_t i = 0; i < n; i += kWidth) store(to + i, sign * load(row + i, n - i));
  });
}

template <class T>
void rotate_tokens(const RotaryEmbeddingArgs& args, const Reporter& report, int64_t begin, int64_t end) {
  const int64_t half = args.rotary_dim / 2, padded = (half + kWidth - 1) / kWidth * kWidth;
  std::vector<float> angles(2 * padded);
  float *const cosines = angles.data(), *const sines = cosines + padded;
  for (int64_t t = begin; t < end; ++t) {
    const int64_t b = t / args.seq, s = t % args.seq;
    const int64_t position = args.position(b, s);
    if (position < 0 || position >= args.max_position) {
      report(position, args.max_position);
      continue;
    }
    widen_row(cosines, args.cos_sin_cache, args.cache_dtype, position * args.cache_stride, half, 1.0f);
    widen_row(sines, args.cos_sin_cache, args.cache_dtype, position * args.cache_stride + half, half,
              args.inverse ? -1.0f : 1.0f);
    for (const RotaryHeads& heads : {args.query, args.key}) {
      T* const token = static_cast<T*>(heads.data) + b * heads.batch + s * heads.token;
      for (int64_t h = 0; h < heads.num_heads; ++h) {
        if (args.is_neox) {
          rotate_neox(token + h * heads.head, cosines, sines, half);
        } else {
          rotate_gptj(token + h * heads.head, cosines, sines, half);
        }
      }
    }
  }
}

}  // namespace

void rotary_embedding_cpu(const RotaryEmbeddingArgs& args, const Launch& launch) {
  const Reporter report = launch.reporter("rotary_embedding: positions");
  constexpr int64_t kElementsWorthAThread = 32768;
  const int64_t elements = (args.query.num_heads + args.key.num_heads) * args.rotary_dim;
  const int64_t grain = std::max<int64_t>(1, kElementsWorthAThread / elements);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    parallel_for(args.num_tokens, grain,
                 [&](int64_t begin, int64_t end) { rotate_tokens<T>(args, report, begin, end); });
  });
}

}  // namespace pykv::PYKV_ISA
