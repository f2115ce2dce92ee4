// Rotation of the heads of tokens: x' = x * cos - y * sin,  y' = y * cos + x * sin  for the pairs of each head.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/rotation.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

// How a vector of pairs is turned: in fp32, rounded when it is stored.
struct TurnInFloat {
  static Floats angles(Floats v) { return v; }
  void operator()(Floats& x, Floats& y, Floats c, Floats s) const {
    const Floats given = x;
    x = given * c - y * s;
    y = y * c + given * s;
  }
};

// Or in the arithmetic of T: cosines, sines, each product and each sum are rounded to it.
template <class T>
struct TurnIn {
  static Floats angles(Floats v) { return rounded(v); }
  void operator()(Floats& x, Floats& y, Floats c, Floats s) const {
    const Floats given = x;
    x = rounded(given * c) - rounded(y * s);
    y = rounded(y * c) + rounded(given * s);
  }

 private:
  static Floats rounded(Floats v) {
    if constexpr (std::is_same_v<T, bf16>) {  // the upper halves of floats: they need not be packed and unpacked
      const Words bits = __builtin_bit_cast(Words, v);
      const Words even = (bits + ((bits >> 16 & 1u) + 0x7fffu)) & 0xffff0000u;
      return v == v ? __builtin_bit_cast(Floats, even) : v;
    } else {
      T elements[kWidth];
      store(elements, v);
      return load(elements);
    }
  }
};

// Rotates one token after another: widens its cosines and sines once, for all of its heads.
template <class T, class Turn = TurnInFloat>
class TokenRotator {
 public:
  TokenRotator(const Rotation& rotation, const Reporter& report)
      : rotation_(rotation),
        report_(report),
        half_(rotation.rotary_dim / 2),
        angles_(2 * ((half_ + kWidth - 1) / kWidth * kWidth)),
        cosines_(angles_.data()),
        sines_(cosines_ + angles_.size() / 2) {}

  void operator()(int64_t t) {
    const int64_t b = t / rotation_.seq, s = t % rotation_.seq;
    if (!take_angles(rotation_.position(b, s))) return;
    rotate(rotation_.query, b, s);
    rotate(rotation_.key, b, s);
  }

  // Whether the position lies in the cache; reported otherwise.
  bool is_inside(int64_t position) const {
    const bool inside = position >= 0 && position < rotation_.max_position;
    if (!inside) report_(position, rotation_.max_position);
    return inside;
  }

  // The angles of a position, if there are any.
  bool take_angles(int64_t position) {
    if (!is_inside(position)) return false;
    widen(cosines_, position * rotation_.cache_stride, 1.0f);
    widen(sines_, position * rotation_.cache_stride + half_, rotation_.inverse ? -1.0f : 1.0f);
    return true;
  }

  // The angles of several positions inside the cache, one for each frequency: position_of(i).
  template <class PositionOf>
  void gather_angles(PositionOf position_of) {
    dispatch<float, f16, bf16>(rotation_.cache_dtype, [&]<class C>() {
      for (int64_t i = 0; i < half_; ++i) {
        const C* row = static_cast<const C*>(rotation_.cos_sin_cache) + position_of(i) * rotation_.cache_stride;
        cosines_[i] = to_float(row[i]);
        sines_[i] = rotation_.inverse ? -to_float(row[half_ + i]) : to_float(row[half_ + i]);
      }
    });
  }

  // The heads of token (b, s), by the angles that were taken.
  void rotate(const RotaryHeads& heads, int64_t b, int64_t s) const {
    T* const token = static_cast<T*>(heads.data) + b * heads.batch + s * heads.token;
    for (int64_t h = 0; h < heads.num_heads; ++h) {
      if (rotation_.is_neox) {
        rotate_neox(token + h * heads.head);
      } else {
        rotate_gptj(token + h * heads.head);
      }
    }
  }

 private:
  using Lanes = int32_t __attribute__((vector_size(4 * kWidth)));

  // Lane i of the result is lane first + 2 i of a and b laid side by side.
  static Floats every_other(Floats a, Floats b, int first) {
    Lanes lanes;
    for (int i = 0; i < kWidth; ++i) lanes[i] = first + 2 * i;
    return __builtin_shuffle(a, b, lanes);
  }
  // Lanes of a and b in turn, from lane `first` on.
  static Floats interleaved(Floats a, Floats b, int first) {
    Lanes lanes;
    for (int i = 0; i < kWidth; ++i) lanes[i] = first + i / 2 + i % 2 * kWidth;
    return __builtin_shuffle(a, b, lanes);
  }

  // Half a row of the cache as floats, padded with zeros to whole vectors.
  void widen(float* to, int64_t first, float sign) const {
    dispatch<float, f16, bf16>(rotation_.cache_dtype, [&]<class C>() {
      const C* row = static_cast<const C*>(rotation_.cos_sin_cache) + first;
      for (int64_t i = 0; i < half_; i += kWidth) store(to + i, Turn::angles(sign * load(row + i, half_ - i)));
    });
  }

  void rotate_neox(T* head) const {
    const auto rotate_vector = [&](int64_t i, int64_t count) {
      Floats x = load(head + i, count), y = load(head + half_ + i, count);
      Turn()(x, y, load(cosines_ + i), load(sines_ + i));
      store(head + i, x, count);
      store(head + half_ + i, y, count);
    };
    int64_t i = 0;
    for (; i + kWidth <= half_; i += kWidth) rotate_vector(i, kWidth);
    if (i < half_) rotate_vector(i, half_ - i);
  }

  // kWidth pairs side by side in memory, from frequency i on.
  void rotate_pairs(T* pairs, int64_t i) const {
    const Floats a = load(pairs), b = load(pairs + kWidth);
    Floats x = every_other(a, b, 0), y = every_other(a, b, 1);
    Turn()(x, y, load(cosines_ + i), load(sines_ + i));
    store(pairs, interleaved(x, y, 0));
    store(pairs + kWidth, interleaved(x, y, kWidth / 2));
  }

  void rotate_gptj(T* head) const {
    int64_t i = 0;
    for (; i + kWidth <= half_; i += kWidth) rotate_pairs(head + 2 * i, i);
    if (i == half_) return;
    T last[2 * kWidth] = {};
    std::copy(head + 2 * i, head + 2 * half_, last);
    rotate_pairs(last, i);
    std::copy(last, last + 2 * (half_ - i), head + 2 * i);
  }

  const Rotation& rotation_;
  const Reporter report_;
  const int64_t half_;
  std::vector<float> angles_;
  float *const cosines_, *const sines_;
};

}  // namespace pykv::PYKV_ISA
