// Blocks of nvfp4 (core/nvfp4.h) on the CPU: eight bytes and a scale to sixteen elements.
//
// For a global scale, the value of a code depends on the byte of its block's scale alone, and there are 256 of these: AVX-512
// looks 16-bit results up in a table of 16 for each.
#pragma once

#include "cpu/nvfp4_scales.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {

// Four bytes as the lower halves of eight.
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

// Blocks below one global scale; of so many elements in all, for few are not worth tables.
template <class T>
class Nvfp4Decoder {
 public:
  Nvfp4Decoder(float global, int64_t) : global_(global) {}
  void operator()(T* to, const uint8_t* codes, uint8_t scale) const { load_nvfp4(to, codes, scale, global_); }

 private:
  float global_;
};

#if defined(__AVX512BW__)
template <class T>
  requires(sizeof(T) == 2)
class Nvfp4Decoder<T> {
 public:
  Nvfp4Decoder(float global, int64_t elements) : global_(global), tables_(elements >= kWorthTables) {
    uint8_t codes[kNvfp4Block / 2];
    for (int i = 0; i < kNvfp4Block; i += 2) codes[i / 2] = static_cast<uint8_t>(i | (i + 1) << 4);
    for (int scale = 0; tables_ && scale < 256; ++scale)
      load_nvfp4(values_[scale], codes, static_cast<uint8_t>(scale), global_);
  }

  void operator()(T* to, const uint8_t* codes, uint8_t scale) const {
    if (!tables_) return load_nvfp4(to, codes, scale, global_);
    uint64_t eight;
    __builtin_memcpy(&eight, codes, sizeof eight);
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(eight)));
    // the lower half of a byte to the lowest four bits of a lane, its upper half to those of the next: no others count
    const __m256i places = _mm256_or_si256(bytes, _mm256_slli_epi32(bytes, 12));
    const __m256i sixteen = _mm256_permutexvar_epi16(places, load_raw<__m256i>(values_[scale]));
    __builtin_memcpy(to, &sixteen, sizeof sixteen);
  }

 private:
  static constexpr int64_t kWorthTables = 1 << 14;

  float global_;
  bool tables_;
  alignas(64) T values_[256][kNvfp4Block];
};
#endif

// A head of a token back to elements that lie `stride` apart.
template <class T>
inline void load_nvfp4_row(const Nvfp4Decoder<T>& decode, T* to, int64_t stride, const uint8_t* page,
                           const Nvfp4Page& places, int64_t token, int64_t head, int64_t size) {
  const uint8_t* codes = page + places.codes_at(token, head, 0);
  Nvfp4Scales at(places, token, head, 0);
  for (int64_t i = 0; i < size; i += kNvfp4Block, codes += kNvfp4Block / 2) {
    if (stride == 1) {
      decode(to + i, codes, page[at.next()]);
    } else {
      T together[kNvfp4Block];
      decode(together, codes, page[at.next()]);
      for (int j = 0; j < kNvfp4Block; ++j) to[(i + j) * stride] = together[j];
    }
  }
}

}  // namespace pykv::PYKV_ISA
