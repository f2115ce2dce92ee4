// The small floating types on the CPU: storage structs and their conversions, correctly rounded.
//
// Each conversion is written once for "a float or a vector of floats" (F) and the integers of the same width (U):
// GCC's vector extensions give comparisons and ?: the same spelling for both.  Stores round to nearest even and keep
// NaN.  The one-byte types saturate: infinities and everything too large become the largest finite value; NaN becomes
// 0x7F (E4M3) or 0x7E (E5M2) with its sign.  Four-bit floats and int8 saturate too, but have no NaN: it becomes 0.
#pragma once

#include <cstdint>

#include "core/dispatch.h"

#if defined(__F16C__)
#include <immintrin.h>
#endif

#ifndef PYKV_ISA
#error "cpu/float16.h belongs into *_cpu.cc, which is compiled once for each instruction set with -DPYKV_ISA=..."
#endif

namespace pykv::PYKV_ISA {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
struct e4m3 {
  uint8_t bits;
};
struct e5m2 {
  uint8_t bits;
};
struct i8 {
  int8_t bits;
};

// A constant in every lane (or the constant itself).
template <class U>
constexpr U all(uint32_t value) {
  return U{} + value;
}

// Floats of `kMantissa` bits and `kBias`, subnormals included, from their magnitude without the sign.
// Adding the implicit one and subtracting it again turns a subnormal into a float without a multiplication of
// float subnormals, which a process may have switched off.
template <int kMantissa, int kBias, class F, class U>
inline F widen_finite(U magnitude) {
  const U normal = (magnitude << (23 - kMantissa)) + ((127u - kBias) << 23);
  const F subnormal = __builtin_bit_cast(F, normal + (1u << 23)) - __builtin_bit_cast(float, (128u - kBias) << 23);
  return __builtin_bit_cast(F, magnitude < (1u << kMantissa) ? __builtin_bit_cast(U, subnormal) : normal);
}

// The magnitude bits of a float that is finite and not too large, rounded to `kMantissa` bits and `kBias`; above the
// `kBits` of the result there is rubbish.
//
// The adder rounds for us: 2^(e + kDrop), where e is the float's exponent, or the least normal one if that is larger, has
// the wanted unit in the last place, so that the sum's lowest bits are the rounded significand.  The exponent is added to
// them as an integer; what both have too much, from the beginning.
template <int kMantissa, int kBias, int kBits, class F, class U>
inline U narrow_finite(U magnitude) {
  constexpr int kDrop = 23 - kMantissa;
  constexpr uint32_t kLeastNormal = (128u - kBias) << 23;
  constexpr uint32_t kTooMuch = ((128u - kBias) << kMantissa) & ((1u << kBits) - 1u);
  const U power = magnitude & 0x7f800000u;
  const U from = power > kLeastNormal ? power : all<U>(kLeastNormal);
  const U unit = from + ((static_cast<uint32_t>(kDrop) << 23) + ((1u << kBits) - kTooMuch));
  const F sum = __builtin_bit_cast(F, magnitude) + __builtin_bit_cast(F, unit);
  return __builtin_bit_cast(U, sum) + (from >> kDrop);
}

template <class F, class U>
inline F widen_bf16(U bits) {
  return __builtin_bit_cast(F, bits << 16);
}

template <class F, class U>
inline U narrow_bf16(F value) {
  const U bits = __builtin_bit_cast(U, value);
  const U rounded = (bits + (((bits >> 16) & 1u) + 0x7fffu)) >> 16;
  return (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : rounded;
}

template <class F, class U>
inline F widen_f16(U bits) {
  const U magnitude = bits & 0x7fffu;
  const U finite = __builtin_bit_cast(U, widen_finite<10, 15, F>(magnitude));
  const U special = (magnitude << 13) | 0x7f800000u;
  return __builtin_bit_cast(F, (magnitude >= 0x7c00u ? special : finite) | ((bits & 0x8000u) << 16));
}

template <class F, class U>
inline U narrow_f16(F value) {
  const U bits = __builtin_bit_cast(U, value);
  const U magnitude = bits & 0x7fffffffu;
  U result = narrow_finite<10, 15, 16, F>(magnitude) & 0xffffu;
  result = magnitude >= 0x47800000u ? all<U>(0x7c00u) : result;  // 65536; from 65520 the rounding itself gives infinity
  result = magnitude > 0x7f800000u ? ((magnitude >> 13) & 0x3ffu) | 0x7e00u : result;
  return result | ((bits >> 16) & 0x8000u);
}

template <class F, class U>
inline F widen_e4m3(U bits) {
  const U magnitude = bits & 0x7fu;
  const U finite = __builtin_bit_cast(U, widen_finite<3, 7, F>(magnitude));
  return __builtin_bit_cast(F, (magnitude == 0x7fu ? all<U>(0x7fc00000u) : finite) | ((bits & 0x80u) << 24));
}

template <class F, class U>
inline U narrow_e4m3(F value) {
  const U bits = __builtin_bit_cast(U, value);
  const U magnitude = bits & 0x7fffffffu;
  const U clamped = magnitude > 0x43e00000u ? all<U>(0x43e00000u) : magnitude;  // 448
  const U finite = narrow_finite<3, 7, 8, F>(clamped);
  return (magnitude > 0x7f800000u ? all<U>(0x7fu) : finite) | ((bits >> 24) & 0x80u);
}

template <class F, class U>
inline F widen_e5m2(U bits) {
  return widen_f16<F>(bits << 8);
}

template <class F, class U>
inline U narrow_e5m2(F value) {
  const U bits = __builtin_bit_cast(U, value);
  const U magnitude = bits & 0x7fffffffu;
  const U clamped = magnitude > 0x47600000u ? all<U>(0x47600000u) : magnitude;  // 57344
  const U finite = narrow_finite<2, 15, 8, F>(clamped);
  return (magnitude > 0x7f800000u ? all<U>(0x7eu) : finite) | ((bits >> 24) & 0x80u);
}

// A four-bit float, in the lowest bits; its magnitude alone for a value of any sign.
template <class F, class U>
inline F widen_e2m1(U bits) {
  return __builtin_bit_cast(F, __builtin_bit_cast(U, widen_finite<1, 1, F>(bits & 7u)) | ((bits & 8u) << 28));
}

// The code is the least of three lines, rounded by adding a large number, in whose lowest bits it then is: 2 y below 2,
// y + 2 below 4 and y / 2 + 4 from there.
template <class F, class U>
inline U narrow_e2m1_magnitude(F value) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  const F magnitude = __builtin_bit_cast(F, __builtin_bit_cast(U, value) & 0x7fffffffu);
  const F clamped = magnitude > 6.0f ? F{} + 6.0f : magnitude;
  const F y = clamped == clamped ? clamped : F{};
  const F low = y * 2.0f + kRound, middle = y + (kRound + 2.0f), high = y * 0.5f + (kRound + 4.0f);
  const F lower = low < middle ? low : middle;
  return __builtin_bit_cast(U, lower < high ? lower : high) & 7u;
}

// An integer as its lowest eight bits.
template <class F, class U>
inline U narrow_i8(F value) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, which then lies in the low bits
  const F number = value == value ? value : F{};
  const F low = number < -128.0f ? F{} - 128.0f : number;
  const F clamped = low > 127.0f ? F{} + 127.0f : low;
  return __builtin_bit_cast(U, clamped + kRound);
}

// One value at a time.
inline float to_float(float v) { return v; }
inline float to_float(bf16 v) { return widen_bf16<float>(uint32_t{v.bits}); }
inline float to_float(e4m3 v) { return widen_e4m3<float>(uint32_t{v.bits}); }
inline float to_float(e5m2 v) { return widen_e5m2<float>(uint32_t{v.bits}); }
inline float to_float(i8 v) { return v.bits; }
inline float to_float(f16 v) {
#if defined(__F16C__)
  return _cvtsh_ss(v.bits);
#else
  return widen_f16<float>(uint32_t{v.bits});
#endif
}

template <class T>
T from_float(float v);
template <>
inline float from_float<float>(float v) {
  return v;
}
template <>
inline f16 from_float<f16>(float v) {
#if defined(__F16C__)
  return {_cvtss_sh(v, _MM_FROUND_TO_NEAREST_INT)};
#else
  return {static_cast<uint16_t>(narrow_f16<float, uint32_t>(v))};
#endif
}
template <>
inline bf16 from_float<bf16>(float v) {
  return {static_cast<uint16_t>(narrow_bf16<float, uint32_t>(v))};
}
template <>
inline e4m3 from_float<e4m3>(float v) {
  return {static_cast<uint8_t>(narrow_e4m3<float, uint32_t>(v))};
}
template <>
inline e5m2 from_float<e5m2>(float v) {
  return {static_cast<uint8_t>(narrow_e5m2<float, uint32_t>(v))};
}
template <>
inline i8 from_float<i8>(float v) {
  return {static_cast<int8_t>(narrow_i8<float, uint32_t>(v))};
}

}  // namespace pykv::PYKV_ISA

namespace pykv {

template <>
inline constexpr DType kDTypeOf<PYKV_ISA::f16> = DType::kFloat16;
template <>
inline constexpr DType kDTypeOf<PYKV_ISA::bf16> = DType::kBFloat16;
template <>
inline constexpr DType kDTypeOf<PYKV_ISA::e4m3> = DType::kFloat8E4M3;
template <>
inline constexpr DType kDTypeOf<PYKV_ISA::e5m2> = DType::kFloat8E5M2;
template <>
inline constexpr DType kDTypeOf<PYKV_ISA::i8> = DType::kInt8;

}  // namespace pykv
