// Blocks of nvfp4 (core/nvfp4.h) on the CPU: sixteen elements to eight bytes and a scale, and back.
#pragma once

#include "core/nvfp4.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

// The lower halves of eight bytes as four bytes, and back.
inline uint32_t pack_nibbles(uint64_t bytes) {
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffu;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
  return static_cast<uint32_t>(bytes | bytes >> 16);
}
inline uint64_t unpack_nibbles(uint32_t packed) {
  uint64_t bytes = packed;
  bytes = (bytes | bytes << 16) & 0x0000ffff0000ffffu;
  bytes = (bytes | bytes << 8) & 0x00ff00ff00ff00ffu;
  return (bytes | bytes << 4) & 0x0f0f0f0f0f0f0f0fu;
}

// kWidth codes, each in the lower half of a byte, as floats.
inline Floats load_e2m1(const uint8_t* codes) {
#if defined(__AVX512F__)
  const Floats values = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  const __m512i places = __builtin_bit_cast(__m512i, widen(load_raw<Bytes>(codes)));
  return _mm512_maskz_permutexvar_ps(0xffff, places, values);
#elif defined(__AVX2__)
  const Floats values = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  const Words places = widen(load_raw<Bytes>(codes));
  const Floats magnitudes = _mm256_permutevar8x32_ps(values, __builtin_bit_cast(__m256i, places));  // by three bits
  return __builtin_bit_cast(Floats, __builtin_bit_cast(Words, magnitudes) | (places & 8u) << 28);
#else
  return widen_e2m1<Floats>(widen(load_raw<Bytes>(codes)));
#endif
}

// Sixteen elements.
template <class T>
inline void store_nvfp4(uint8_t* codes, uint8_t* scale, const T* from, float global) {
  constexpr int kVectors = kNvfp4Block / kWidth;
  Floats x[kVectors], most{};
  for (int i = 0; i < kVectors; ++i) {
    x[i] = load(from + i * kWidth);
    most = max(x[i] < 0.0f ? -x[i] : x[i], most);  // NaN is not counted
  }
  const float a = max(most);
  const e4m3 block = a == 0.0f ? e4m3{0} : from_float<e4m3>(a / (kNvfp4Largest * global));
  const float r = (block.bits & 0x7f) == 0 ? 0.0f : 1.0f / (to_float(block) * global);
  uint8_t bytes[kNvfp4Block];
  for (int i = 0; i < kVectors; ++i) {
    const Words signs = __builtin_bit_cast(Words, x[i]) >> 28 & 8u;  // the product of 0 and infinity has any sign
    const Bytes some = narrow_to_bytes(narrow_e2m1_magnitude<Floats, Words>(x[i] * r) | signs);
    __builtin_memcpy(bytes + i * kWidth, &some, sizeof some);
  }
  for (int i = 0; i < 2; ++i) {
    uint64_t eight;
    __builtin_memcpy(&eight, bytes + 8 * i, 8);
    const uint32_t packed = pack_nibbles(eight);
    __builtin_memcpy(codes + 4 * i, &packed, 4);
  }
  *scale = block.bits;
}

// Sixteen codes times the scale of their block, which is exact, times `global`, rounded to T.
template <class T>
inline void load_nvfp4(T* to, const uint8_t* codes, uint8_t scale, float global) {
  const float block = to_float(e4m3{scale});
  uint8_t bytes[kNvfp4Block];
  for (int i = 0; i < 2; ++i) {
    uint32_t packed;
    __builtin_memcpy(&packed, codes + 4 * i, 4);
    const uint64_t eight = unpack_nibbles(packed);
    __builtin_memcpy(bytes + 8 * i, &eight, 8);
  }
  for (int i = 0; i < kNvfp4Block; i += kWidth) store(to + i, load_e2m1(bytes + i) * block * global);
}

// A head of a token: `size` elements that lie `stride` apart, to their places in a page.
template <class T>
inline void store_nvfp4_row(uint8_t* page, const Nvfp4Page& places, int64_t token, int64_t head, const T* from,
                            int64_t stride, int64_t size, float global) {
  for (int64_t first = 0; first < size; first += kNvfp4Block, from += kNvfp4Block * stride) {
    T together[kNvfp4Block];
    if (stride != 1)
      for (int i = 0; i < kNvfp4Block; ++i) together[i] = from[i * stride];
    store_nvfp4(page + places.codes_at(token, head, first),
                page + places.scale_at(token, head, static_cast<int32_t>(first / kNvfp4Block)),
                stride == 1 ? from : together, global);
  }
}

// The other way round.
template <class T>
inline void load_nvfp4_row(T* to, int64_t stride, const uint8_t* page, const Nvfp4Page& places, int64_t token,
                           int64_t head, int64_t size, float global) {
  for (int64_t first = 0; first < size; first += kNvfp4Block, to += kNvfp4Block * stride) {
    T together[kNvfp4Block];
    load_nvfp4(stride == 1 ? to : together, page + places.codes_at(token, head, first),
               page[places.scale_at(token, head, static_cast<int32_t>(first / kNvfp4Block))], global);
    if (stride != 1)
      for (int i = 0; i < kNvfp4Block; ++i) to[i * stride] = together[i];
  }
}

}  // namespace pykv::PYKV_ISA
