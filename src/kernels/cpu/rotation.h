// Rotation of the heads of tokens: x' = x * cos - y * sin,  y' = y * cos + x * sin  for the pairs of each head.
#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/rotation.h"
#include "cpu/pairs.h"

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
      return __builtin_bit_cast(Floats, (bits + ((bits >> 16 & 1u) + 0x7fffu)) & 0xffff0000u);
    } else {
      T elements[kWidth];
      store(elements, v);
      return load(elements);
    }
  }
};

// Pairs turned so, by angles in their order.
template <class Turn, class T>
inline void turn(Turn by, Pair<T>& x, Pair<T>& y, Pair<T> c, Pair<T> s) {
  by(x.x, y.x, c.x, s.x);
  by(x.y, y.y, c.y, s.y);
}

// The elements of a head, as they are.
template <class T>
struct Elements {
  const T* head;
  Pair<T> operator()(int64_t i, int64_t count) const { return load_pair<T>(head + i, count); }
};

// Rotates one token after another: brings its cosines and sines into the order of pairs once, for all of its heads.
template <class T, class Turn = TurnInFloat>
class TokenRotator {
 public:
  TokenRotator(const Rotation& rotation, const Reporter& report)
      : rotation_(rotation),
        report_(report),
        half_(rotation.rotary_dim / 2),
        angles_(2 * ((half_ + kPair - 1) / kPair * kPair)),
        cosines_(angles_.data()),
        sines_(cosines_ + angles_.size() / 2) {}

  void operator()(int64_t t) {
    if (!take_angles(position(t))) return;
    rotate(rotation_.query, t);
    rotate(rotation_.key, t);
  }

  int64_t position(int64_t t) const { return rotation_.position(t / rotation_.seq, t % rotation_.seq); }
  T* heads_of(const RotaryHeads& heads, int64_t t) const {
    return static_cast<T*>(heads.data) + t / rotation_.seq * heads.batch + t % rotation_.seq * heads.token;
  }

  // Asks for the heads of a token, if there is such a token.
  template <int kLevel = 2>
  void prefetch(int64_t t) const {
    if (t >= rotation_.num_tokens) return;
    const int64_t size = 2 * half_;
    for (const RotaryHeads* heads : {&rotation_.query, &rotation_.key}) {
      const T* head = heads_of(*heads, t);
      const bool touch = heads->head == size;
      const int64_t bytes = (touch ? heads->num_heads : 1) * size * static_cast<int64_t>(sizeof(T));
      for (int64_t h = 0; h < heads->num_heads; h += touch ? heads->num_heads : 1)
        prefetch_bytes<kLevel>(head + h * heads->head, bytes);
    }
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
    dispatch<float, f16, bf16>(rotation_.cache_dtype, [&]<class C>() {
      const C* row = static_cast<const C*>(rotation_.cos_sin_cache) + position * rotation_.cache_stride;
      keep_angles(row, row + rotation_.sines);
    });
    return true;
  }

  // The angles of several positions inside the cache, of which frequency i has that of axes[i].
  template <size_t kCount>
  void gather_angles(const int64_t (&positions)[kCount], const uint8_t* axes) {
    dispatch<float, f16, bf16>(rotation_.cache_dtype, [&]<class C>() {
      const C* rows[kCount];
      for (size_t k = 0; k < kCount; ++k)
        rows[k] = static_cast<const C*>(rotation_.cos_sin_cache) + positions[k] * rotation_.cache_stride;
      gathered_.resize(2 * half_);
      for (int64_t i = 0; i < half_; ++i) {
        const C* row = rows[axes[i]];
        gathered_[i] = to_float(row[i]);
        gathered_[half_ + i] = to_float(row[rotation_.sines + i]);
      }
    });
    keep_angles(gathered_.data(), gathered_.data() + half_);
  }

  // The heads of token t, by the angles that were taken.  Flattened: a head alone is not worth a call.
  [[gnu::flatten]] void rotate(const RotaryHeads& heads, int64_t t) const {
    T* head = heads_of(heads, t);
    for (int64_t h = 0; h < heads.num_heads; ++h, head += heads.head) rotate(head, Elements<T>{head});
  }

  // What load(i, count) gives of the elements of a head, turned, to `head`; past the caches, where lines_are_whole.
  template <bool kPast = false, class Load>
  void rotate(T* head, const Load& load) const {
    if (rotation_.is_neox) {
      rotate_neox<kPast>(head, load);
    } else {
      rotate_gptj<kPast>(head, load);
    }
  }

  // Heads that lie `stride` apart, by frequencies rather than one after the other, so that angles stay in registers: what
  // source(h, i, count, common) gives of the elements of head h, turned, with what source.at(i, count) gives for all heads.
  template <class Source>
  void rotate_all(T* heads, int64_t stride, int64_t num_heads, const Source& source) const {
    if (rotation_.is_neox) {
      each_pair(0, half_, [=, half = half_, cosines = cosines_, sines = sines_](int64_t i, int64_t count) {
        const Pair<T> c{PYKV_ISA::load(cosines + i), PYKV_ISA::load(cosines + i + kWidth)};
        const Pair<T> s{PYKV_ISA::load(sines + i), PYKV_ISA::load(sines + i + kWidth)};
        const auto of_x = source.at(i, count), of_y = source.at(half + i, count);
        T* head = heads;
        for (int64_t h = 0; h < num_heads; ++h, head += stride) {
          Pair<T> x = source(h, i, count, of_x), y = source(h, half + i, count, of_y);
          turn(Turn(), x, y, c, s);
          store_pair(head + i, x, count);
          store_pair(head + half + i, y, count);
        }
      });
    } else {
      each_pair(0, 2 * half_, [=, cosines = cosines_, sines = sines_](int64_t i, int64_t count) {
        const Floats c = PYKV_ISA::load(cosines + i / 2), s = PYKV_ISA::load(sines + i / 2);
        const auto common = source.at(i, count);
        T* head = heads;
        for (int64_t h = 0; h < num_heads; ++h, head += stride)
          store_pair(head + i, turned_neighbours(source(h, i, count, common), c, s), count);
      });
    }
  }

  bool lines_are_whole(const T* head) const {
    return half_ * static_cast<int64_t>(sizeof(T)) % kLine == 0 && half_ % kPair == 0 &&
           (reinterpret_cast<uintptr_t>(head) & (kLine - 1)) == 0;
  }

 private:
  // Neighbouring pairs (GPT-J) of alternating elements fall apart into what is turned.
  static constexpr bool kApart = kAlternating<T>;

  // Half a row of the cache each, padded with zeros to whole pairs: in the order of T where halves of a head are turned, as
  // in memory where neighbours are.
  template <class C>
  void keep_angles(const C* cosines, const C* sines) {
    const float sign = rotation_.inverse ? -1.0f : 1.0f;
    const auto keep = [this](float* to, const C* from, float sign) {
      each_pair(0, half_, [=, neox = rotation_.is_neox](int64_t i, int64_t count) {
        Floats x, y;
        if (neox) {
          const Pair<T> v = load_pair<T>(from + i, count);
          x = v.x, y = v.y;
        } else {
          const Pair<float> v = load_pair<float>(from + i, count);
          x = v.x, y = v.y;
        }
        store(to + i, Turn::angles(plain(sign * x)));
        store(to + i + kWidth, Turn::angles(plain(sign * y)));
      });
    };
    keep(cosines_, cosines, 1.0f);
    keep(sines_, sines, sign);
  }

  template <bool kPast, class Load>
  void rotate_neox(T* head, const Load& load) const {
    each_pair(0, half_, [=, half = half_, cosines = cosines_, sines = sines_](int64_t i, int64_t count) {
      Pair<T> x = load(i, count), y = load(half + i, count);
      turn(Turn(), x, y, {PYKV_ISA::load(cosines + i), PYKV_ISA::load(cosines + i + kWidth)},
           {PYKV_ISA::load(sines + i), PYKV_ISA::load(sines + i + kWidth)});
      store_pair(head + i, x, count, kPast);
      store_pair(head + half + i, y, count, kPast);
    });
  }

  template <bool kPast, class Load>
  void rotate_gptj(T* head, const Load& load) const {
    each_pair(0, 2 * half_, [=, cosines = cosines_, sines = sines_](int64_t i, int64_t count) {
      const Floats c = PYKV_ISA::load(cosines + i / 2), s = PYKV_ISA::load(sines + i / 2);
      store_pair(head + i, turned_neighbours(load(i, count), c, s), count, kPast);
    });
  }

  static Pair<T> turned_neighbours(Pair<T> v, Floats c, Floats s) {
    Floats x = v.x, y = v.y;
    if constexpr (!kApart) x = every_other(v.x, v.y, 0), y = every_other(v.x, v.y, 1);
    Turn()(x, y, c, s);
    return kApart ? Pair<T>{x, y} : Pair<T>{in_turn(x, y, 0), in_turn(x, y, kWidth / 2)};
  }

  const Rotation& rotation_;
  const Reporter report_;
  const int64_t half_;
  std::vector<float> angles_, gathered_;
  float *const cosines_, *const sines_;
};

}  // namespace pykv::PYKV_ISA
