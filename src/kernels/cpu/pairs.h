// Two vectors of floats at a time, in the order that T's memory gives for nothing.
//
// Two vectors of bf16 fill one of memory.  Its even elements are floats after a shift, its odd ones after a mask: half of
// what widening neighbours costs, and the way back needs no narrowing either.  Elementwise arithmetic never sees the
// order; whoever mixes arrays of several dtypes loads all of them in the order of one T, which is part of a pair's type.
#pragma once

#include "cpu/prefetch.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {

inline constexpr int kPair = 2 * kWidth;

template <class T>
inline constexpr bool kAlternating = __is_same(T, bf16);

inline Floats abs(Floats v) { return __builtin_bit_cast(Floats, __builtin_bit_cast(Words, v) & 0x7fffffffu); }

// The machine's own; GCC makes comparisons and selections of a > b ? a : b when b is a constant.  NaN in `a` gives `b`.
inline Floats greater(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(0xffff, a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return max(a, b);
#endif
}
inline Floats lesser(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(0xffff, a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#else
  return min(a, b);
#endif
}

// NaN as arithmetic makes it: others, floats from anywhere, could be rounded to something else.
inline Floats plain(Floats v) { return v == v ? v : splat(__builtin_nanf("")); }
inline float plain(float v) { return v == v ? v : __builtin_nanf(""); }

// kPair floats: even and odd elements (kAlternating<T>), or the first and the second half.
template <class T>
struct Pair {
  Floats x, y;

  Pair() = default;
  Pair(Floats x, Floats y) : x(x), y(y) {}
  Pair(float v) : x(splat(v)), y(splat(v)) {}

  friend Pair operator-(Pair a) { return {-a.x, -a.y}; }
  friend Pair operator+(Pair a, Pair b) { return {a.x + b.x, a.y + b.y}; }
  friend Pair operator-(Pair a, Pair b) { return {a.x - b.x, a.y - b.y}; }
  friend Pair operator*(Pair a, Pair b) { return {a.x * b.x, a.y * b.y}; }
  friend Pair operator/(Pair a, Pair b) { return {a.x / b.x, a.y / b.y}; }
  friend Pair max(Pair a, Pair b) { return {greater(a.x, b.x), greater(a.y, b.y)}; }
  friend Pair min(Pair a, Pair b) { return {lesser(a.x, b.x), lesser(a.y, b.y)}; }
  friend Pair plain(Pair a) { return {PYKV_ISA::plain(a.x), PYKV_ISA::plain(a.y)}; }
  friend Pair abs(Pair a) { return {PYKV_ISA::abs(a.x), PYKV_ISA::abs(a.y)}; }
};

// f of each of the vectors.
template <class T, class F>
inline Pair<T> each(Pair<T> a, F f) {
  return {f(a.x), f(a.y)};
}
template <class T, class F>
inline Pair<T> each(Pair<T> a, Pair<T> b, F f) {
  return {f(a.x, b.x), f(a.y, b.y)};
}

template <class T>
inline float sum(Pair<T> v) {
  return sum(v.x + v.y);
}
template <class T>
inline float max(Pair<T> v) {
  return max(max(v.x, v.y));
}

// Lane i is lane first + 2 i of a and b side by side.
template <class V>
inline V every_other(V a, V b, uint32_t first) {
  Words lanes;
  for (uint32_t i = 0; i < kWidth; ++i) lanes[i] = first + 2 * i;
  return shuffle(a, b, lanes);
}
// Lanes of a and b in turn, from lane `first` on.
template <class V>
inline V in_turn(V a, V b, uint32_t first) {
  Words lanes;
  for (uint32_t i = 0; i < kWidth; ++i) lanes[i] = first + i / 2 + i % 2 * kWidth;
  return shuffle(a, b, lanes);
}

// One step of reduce for two vectors: their lanes that are kApart from each other, combined, half of the result each.
template <int kApart, class V, class Combine>
inline V combined_halves(V a, V b, Combine combine) {
  Words own, other;
  for (uint32_t i = 0; i < kWidth; ++i) {
    own[i] = i & kApart ? kWidth + i : i;
    other[i] = own[i] ^ kApart;
  }
  const V x = shuffle(a, b, own), y = shuffle(a, b, other);
  return combine(x, y);
}
// Lane i is what reduce makes of v[i]: for as many vectors as one has lanes, in the same order.
template <int kApart = kWidth / 2, class V, class Combine>
inline V reduce_each(V* v, Combine combine) {
  if constexpr (kApart == 0) return v[0];
  for (int i = 0; i < kApart; ++i) v[i] = combined_halves<kApart>(v[i], v[i + kApart], combine);
  return reduce_each<kApart / 2>(v, combine);
}

// From neighbours to the order of T, and back.
template <class T>
inline Pair<T> in_order(Floats first, Floats second) {
  if constexpr (kAlternating<T>) return {every_other(first, second, 0), every_other(first, second, 1)};
  return {first, second};
}
template <class T>
inline Pair<float> in_memory_order(Pair<T> v) {
  if constexpr (kAlternating<T>) return {in_turn(v.x, v.y, 0), in_turn(v.x, v.y, kWidth / 2)};
  return {v.x, v.y};
}

// kPair elements, in the order of T.
template <class T, class E>
inline Pair<T> load_pair(const E* from) {
  if constexpr (kAlternating<T> && __is_same(E, bf16)) {
    const Words both = load_raw<Words>(from);
    return {__builtin_bit_cast(Floats, both << 16), __builtin_bit_cast(Floats, both & 0xffff0000u)};
  } else {
    return in_order<T>(load(from), load(from + kWidth));
  }
}

// kPair numbers rounded to 16-bit T, in memory's order.
using PairHalfwords = uint16_t __attribute__((vector_size(2 * kPair)));

// NaN must be that of a bf16 or of arithmetic, whose upper half is not all ones: see plain.
inline PairHalfwords packed(Pair<bf16> v) {
  const Words even = __builtin_bit_cast(Words, v.x), odd = __builtin_bit_cast(Words, v.y);
  // Upper and lower halves of all.  One more where the lower one, with the upper one's last bit for ties, is above the
  // middle.
#if defined(__AVX512BW__)
  constexpr __mmask32 kOdd = 0xaaaaaaaa;
  const __m512i upper =
      _mm512_mask_blend_epi16(kOdd, __builtin_bit_cast(__m512i, even >> 16), __builtin_bit_cast(__m512i, odd));
  const __m512i lower =
      _mm512_mask_blend_epi16(kOdd, __builtin_bit_cast(__m512i, even), __builtin_bit_cast(__m512i, odd << 16));
  // a | b & c
  const __m512i decides = _mm512_ternarylogic_epi32(lower, upper, _mm512_set1_epi16(1), 0xf8);
  const __mmask32 more = _mm512_cmpgt_epu16_mask(decides, _mm512_set1_epi16(-0x8000));
  return __builtin_bit_cast(PairHalfwords, _mm512_mask_add_epi16(upper, more, upper, _mm512_set1_epi16(1)));
#else
  const auto upper = __builtin_bit_cast(PairHalfwords, even >> 16 | (odd & 0xffff0000u));
  const auto lower = __builtin_bit_cast(PairHalfwords, (even & 0xffffu) | odd << 16);
  const auto more = (lower | (upper & 1)) > 0x8000;  // true is -1
  return upper - __builtin_bit_cast(PairHalfwords, more);
#endif
}
#if defined(__AVX512F__)
inline PairHalfwords packed(Pair<f16> v) {
  const auto halves = [](Floats v) {
    return _mm512_maskz_cvtps_ph(0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  };
  const __m512i both = _mm512_castsi256_si512(halves(v.x));
  return __builtin_bit_cast(PairHalfwords, _mm512_maskz_inserti64x4(0xff, both, halves(v.y), 1));
}
#endif

// A vector to memory; `past` the caches, then aligned to itself.
template <class V>
inline void store_raw(void* to, V v, [[maybe_unused]] bool past) {
#if defined(__AVX512F__)
  if constexpr (sizeof(V) == 64)
    if (past) return _mm512_stream_si512(static_cast<__m512i*>(to), __builtin_bit_cast(__m512i, v));
#endif
#if defined(__AVX2__)
  if constexpr (sizeof(V) == 32)
    if (past) return _mm256_stream_si256(static_cast<__m256i*>(to), __builtin_bit_cast(__m256i, v));
#endif
#if defined(__x86_64__)
  if constexpr (sizeof(V) == 16)
    if (past) return _mm_stream_si128(static_cast<__m128i*>(to), __builtin_bit_cast(__m128i, v));
#endif
  __builtin_memcpy(to, &v, sizeof(v));
}

#if defined(__AVX512BW__)
// The first `count` of 32 one-byte codes.
template <class Code>
inline void store_codes(Code* to, __m256i codes, int64_t count, bool past) {
  if (count >= kPair) return store_raw(to, codes, past);
  _mm256_mask_storeu_epi8(to, _bzhi_u32(~uint32_t{}, static_cast<uint32_t>(count)), codes);
}
#endif

template <class T, class E>
inline void store_whole_pair(E* to, Pair<T> v, bool past = false) {
  if constexpr (kAlternating<T> && __is_same(E, bf16)) {
    store_raw(to, packed(v), past);
  } else {
    const Pair<float> neighbours = in_memory_order(v);
    if constexpr (__is_same(E, float)) {
      store_raw(to, neighbours.x, past);
      store_raw(to + kWidth, neighbours.y, past);
    } else {
      static_assert(sizeof(E) == 2);
      E both[kPair];
      store(both, neighbours.x);
      store(both + kWidth, neighbours.y);
      store_raw(to, load_raw<Halfwords>(both), past);
      store_raw(to + kWidth, load_raw<Halfwords>(both + kWidth), past);
    }
  }
}

// The first `count` elements of an array of kPair, and back; the others are zero, their memory is not touched.
template <class E>
inline void load_first(E (&to)[kPair], const E* from, int64_t count) {
#if defined(__AVX512BW__)
  int64_t bytes = count * static_cast<int64_t>(sizeof(E));
  for (size_t at = 0; at < sizeof to; at += 64, bytes -= 64) {
    const __mmask64 inside = _bzhi_u64(~uint64_t{}, static_cast<uint32_t>(bytes > 0 ? bytes : 0));
    _mm512_storeu_si512(reinterpret_cast<char*>(to) + at,
                        _mm512_maskz_loadu_epi8(inside, reinterpret_cast<const char*>(from) + at));
  }
#else
  __builtin_memset(to, 0, sizeof to);
  __builtin_memcpy(to, from, static_cast<size_t>(count) * sizeof(E));
#endif
}
template <class E>
inline void store_first(E* to, const E (&from)[kPair], int64_t count) {
#if defined(__AVX512BW__)
  int64_t bytes = count * static_cast<int64_t>(sizeof(E));
  for (size_t at = 0; at < sizeof from; at += 64, bytes -= 64) {
    const __mmask64 inside = _bzhi_u64(~uint64_t{}, static_cast<uint32_t>(bytes > 0 ? bytes : 0));
    _mm512_mask_storeu_epi8(reinterpret_cast<char*>(to) + at, inside,
                            _mm512_loadu_si512(reinterpret_cast<const char*>(from) + at));
  }
#else
  __builtin_memcpy(to, from, static_cast<size_t>(count) * sizeof(E));
#endif
}

template <class T, class E>
inline Pair<T> load_pair(const E* from, int64_t count) {
  static_assert(sizeof(E) > 1);
  if (count >= kPair) return load_pair<T>(from);
  E padded[kPair];
  load_first(padded, from, count);
  return load_pair<T>(padded);
}
template <class T, class E>
inline void store_pair(E* to, Pair<T> v, int64_t count, bool past = false) {
  if (count >= kPair) return store_whole_pair(to, v, past);
  E padded[kPair];
  store_whole_pair(padded, v);
  store_first(to, padded, count);
}

template <int kLevel = 1, class E>
inline void prefetch_pair(const E* from) {
  for (int64_t at = 0; at < kPair * static_cast<int64_t>(sizeof(E)); at += 64)
    prefetch<kLevel>(reinterpret_cast<const char*>(from) + at);
}

// v in the first `count` elements, 0 in the others.
template <class T>
inline Pair<T> first_of(Pair<T> v, int64_t count) {
  if (count >= kPair) return v;
  float ones[kPair] = {};
  for (int64_t i = 0; i < count; ++i) ones[i] = 1.0f;
  const Pair<T> wanted = load_pair<T>(static_cast<const float*>(ones));
  return each(v, wanted, [](Floats a, Floats b) { return b > 0.0f ? a : Floats{}; });
}

// R_T(v) as floats, of NaN as packed has it.
template <class T>
inline Pair<T> rounded(Pair<T> v) {
  return each(v, [](Floats a) {
    if constexpr (__is_same(T, bf16)) {
      const Words bits = __builtin_bit_cast(Words, a);
      return __builtin_bit_cast(Floats, (bits + ((bits >> 16 & 1u) + 0x7fffu)) & 0xffff0000u);
    }
#if defined(__AVX512F__)
    if constexpr (__is_same(T, f16))
      return Floats(_mm512_maskz_cvtph_ps(
          0xffff, _mm512_maskz_cvtps_ph(0xffff, a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)));
#endif
    return rounded<T>(a);
  });
}

// next(state, i, count) becomes the state, for pairs that cover elements begin ... end; only the last may count less than
// kPair of them.  Flattened, since calls would hand pairs over in memory; `next` is a copy, so that what it has taken by
// value stays in registers, where stores to anywhere cannot have changed it.
template <class State, class Next>
[[gnu::flatten]] inline State fold_pairs(int64_t begin, int64_t end, State state, const Next next) {
  int64_t i = begin;
  for (; i + kPair <= end; i += kPair) state = next(state, i, int64_t{kPair});
  if (i < end) state = next(state, i, end - i);
  return state;
}
template <class Body>
[[gnu::flatten]] inline void each_pair(int64_t begin, int64_t end, const Body body) {
  int64_t i = begin;
  for (; i + kPair <= end; i += kPair) body(i, int64_t{kPair});
  if (i < end) body(i, end - i);
}

// n elements that fill(To* to, int64_t first, int64_t count, bool past) works out in pairs.  Where they are streamed, stores of
// whole lines go past the caches at once, between the arithmetic; what neighbours share a line with, by way of the writer.
template <class To, class Fill>
inline void write_pairs(LineWriter& writer, To* to, int64_t n, bool streamed, Fill&& fill) {
  constexpr int64_t kSize = sizeof(To), kStep = kPair > kLine / kSize ? kPair : kLine / kSize;
  if (!streamed) return fill(to, int64_t{0}, n, false);
  const int64_t before = (-reinterpret_cast<intptr_t>(to) & (kLine - 1)) / kSize, head = before < n ? before : n;
  const int64_t whole = (n - head) / kStep * kStep, tail = head + whole;
  const auto by_writer = [&](int64_t begin, int64_t end) {
    writer.fill(to + begin, end - begin,
                [&](To* at, int64_t first, int64_t count) { fill(at, begin + first, count, false); });
  };
  if (head > 0) by_writer(0, head);
  if (whole > 0) fill(to + head, head, whole, true);
  if (tail < n) by_writer(tail, n);
}

// n elements that convert(To* to, const From* from, int64_t count, bool past) makes of as many; what lies `ahead` of these is
// asked for meanwhile.
template <class Convert, class To, class From>
inline void write_converted(LineWriter& writer, const Convert& convert, To* to, const From* from, int64_t n,
                            int64_t ahead) {
  constexpr int64_t kSome = 1024 / (sizeof(To) < sizeof(From) ? sizeof(From) : sizeof(To));
  const auto fill = [&](To* at, int64_t first, int64_t count, bool past) {
    for (int64_t i = first, end = first + count; i < end; i += kSome, at += kSome) {
      const int64_t some = end - i < kSome ? end - i : kSome;
      prefetch_bytes(from + i + ahead, some * static_cast<int64_t>(sizeof(From)));
      convert(at, from + i, some, past);
    }
  };
  if constexpr (Convert::kStreams) {
    write_pairs(writer, to, n, writer.streamed(), fill);
  } else {
    writer.fill(to, n, [&](To* at, int64_t first, int64_t count) { fill(at, first, count, false); });
  }
}

// n elements that fill(T* to, int64_t first, int64_t count) works out and then(to, const T* from, int64_t count) makes others of,
// some at a time: a processor does not look so far ahead that it could begin enough pairs before the first one has gone
// through both steps.
template <class T, class To, class Fill, class Then>
inline void in_two_steps(To* to, int64_t n, const Fill& fill, const Then& then) {
  constexpr int64_t kSome = 1024;
  alignas(64) T buffer[kSome];
  for (int64_t first = 0; first < n; first += kSome) {
    const int64_t count = n - first < kSome ? n - first : kSome;
    fill(buffer, first, count);
    then(to + first, static_cast<const T*>(buffer), count);
  }
}

}  // namespace pykv::PYKV_ISA
