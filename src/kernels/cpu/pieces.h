// Pieces of 16 bytes, and matrices of smaller elements in them, turned in registers: what lies row by row becomes neighbours
// of a column, in whole lines.
#pragma once

#include <utility>

#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

template <class Stored>
struct VectorOf {
  typedef Stored Type __attribute__((vector_size(16)));
};
template <class Stored>
using Vector = typename VectorOf<Stored>::Type;

// a[kFrom], b[kFrom], a[kFrom + 1], b[kFrom + 1], ...
template <int kFrom, class V, int... kLane>
inline V interleave(V a, V b, std::integer_sequence<int, kLane...>) {
  return __builtin_shufflevector(a, b, (kFrom + kLane / 2 + kLane % 2 * static_cast<int>(sizeof...(kLane)))...);
}

// A square, turned: log2(n) rounds of interleaving row i with row i + n / 2 turn n rows into n columns.  Unrolled, so that rows
// stay in registers.
template <class Stored>
inline void transpose(Vector<Stored> (&v)[16 / sizeof(Stored)]) {
  constexpr int n = 16 / sizeof(Stored);
  constexpr auto lanes = std::make_integer_sequence<int, n>();
#pragma GCC unroll 16
  for (int round = 1; round < n; round *= 2) {
    Vector<Stored> next[n];
#pragma GCC unroll 16
    for (int i = 0; i < n / 2; ++i) {
      next[2 * i] = interleave<0>(v[i], v[i + n / 2], lanes);
      next[2 * i + 1] = interleave<n / 2>(v[i], v[i + n / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) v[i] = next[i];
  }
}

// Sixteen bytes of each of four rows, which lie `row` apart: four bytes of each column.
inline constexpr int kFourColumns = 16;
inline void turn_four(uint8_t* to, const uint8_t* from, int64_t row) {
  using Piece = Vector<uint8_t>;
  constexpr auto lanes = std::make_integer_sequence<int, kFourColumns>();
  constexpr int kHalf = kFourColumns / 2;
  Piece v[4];
  for (int i = 0; i < 4; ++i) v[i] = load_raw<Piece>(from + i * row);
  const Piece even[2] = {interleave<0>(v[0], v[2], lanes), interleave<kHalf>(v[0], v[2], lanes)};
  const Piece odd[2] = {interleave<0>(v[1], v[3], lanes), interleave<kHalf>(v[1], v[3], lanes)};
  for (int i = 0; i < 2; ++i) {
    const Piece both[2] = {interleave<0>(even[i], odd[i], lanes), interleave<kHalf>(even[i], odd[i], lanes)};
    __builtin_memcpy(to + i * static_cast<int>(sizeof both), both, sizeof both);
  }
}

#if defined(__AVX512BW__)
// Four squares side by side, 128 bits of each vector one of them, with so many rows as elements of Stored are in these.
template <class Stored>
inline void transpose(__m512i (&v)[16 / sizeof(Stored)]) {
  constexpr int n = 16 / sizeof(Stored);
  const auto pair = [](__m512i a, __m512i b, bool low) {
    if constexpr (sizeof(Stored) == 1)
      return low ? _mm512_maskz_unpacklo_epi8(~__mmask64{}, a, b) : _mm512_maskz_unpackhi_epi8(~__mmask64{}, a, b);
    if constexpr (sizeof(Stored) == 2)
      return low ? _mm512_maskz_unpacklo_epi16(~__mmask32{}, a, b) : _mm512_maskz_unpackhi_epi16(~__mmask32{}, a, b);
    return low ? _mm512_maskz_unpacklo_epi32(0xffff, a, b) : _mm512_maskz_unpackhi_epi32(0xffff, a, b);
  };
  for (int round = 1; round < n; round *= 2) {
    __m512i next[n];
    for (int i = 0; i < n / 2; ++i) {
      next[2 * i] = pair(v[i], v[i + n / 2], true);
      next[2 * i + 1] = pair(v[i], v[i + n / 2], false);
    }
    for (int i = 0; i < n; ++i) v[i] = next[i];
  }
}

// Pieces 0 and 2 of a, then of b; or the odd ones.
inline __m512i every_other_piece(__m512i a, __m512i b, bool odd) {
  return odd ? _mm512_maskz_shuffle_i32x4(0xffff, a, b, 0xdd) : _mm512_maskz_shuffle_i32x4(0xffff, a, b, 0x88);
}

// Four times four pieces: piece g of each of the vectors to vector g.
inline void transpose_pieces(__m512i (&v)[4]) {
  const __m512i even[2] = {every_other_piece(v[0], v[1], false), every_other_piece(v[2], v[3], false)};
  const __m512i odd[2] = {every_other_piece(v[0], v[1], true), every_other_piece(v[2], v[3], true)};
  v[0] = every_other_piece(even[0], even[1], false), v[2] = every_other_piece(even[0], even[1], true);
  v[1] = every_other_piece(odd[0], odd[1], false), v[3] = every_other_piece(odd[0], odd[1], true);
}
#endif

}  // namespace pykv::PYKV_ISA
