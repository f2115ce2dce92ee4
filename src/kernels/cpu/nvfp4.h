// Blocks of nvfp4 (core/nvfp4.h) on the CPU: sixteen elements to eight bytes and a scale, and back.
//
// For a global scale, the value of a code depends on the byte of its block's scale alone, and there are 256 of these: AVX-512
// looks 16-bit results up in a table of 16 for each.  The other way, the code is a staircase over the bits of a 16-bit
// element; blocks whose scales differ by a power of two have it shifted by as many binades, so that eight tables do, made
// as cpu/encode.h does it: (bits + d) >> kPart is the code, with a d for each quarter of a binade.  No division, no
// conversion, no product: a sixth of the instructions.
#pragma once

#include "core/nvfp4.h"
#include "cpu/encode.h"
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

// Where the scales of a head's blocks are, one after another: without the divisions of each.
class Nvfp4Scales {
 public:
  Nvfp4Scales(const Nvfp4Page& places, int64_t token, int64_t head, int32_t block)
      : quarter_(places.quarter),
        column_(block % quarter_),
        next_row_(places.scales_token - 4 * (quarter_ - 1)),
        at_(places.scale_at(token, head, block)) {}

  // The place of this block's; goes on to the next.
  int64_t next() {
    const int64_t at = at_;
    const bool ends = ++column_ == quarter_;
    at_ += ends ? next_row_ : 4;
    column_ = ends ? 0 : column_;
    return at;
  }

 private:
  int32_t quarter_, column_;
  int64_t next_row_, at_;
};

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

// Sixteen elements times r, as codes.
template <class T>
inline void store_e2m1(uint8_t* codes, const T* from, float r) {
  uint8_t bytes[kNvfp4Block];
  for (int i = 0; i < kNvfp4Block; i += kWidth) {
    const Floats x = load(from + i);
    const Words signs = __builtin_bit_cast(Words, x) >> 28 & 8u;  // the product of 0 and infinity has any sign
    const Bytes some = narrow_to_bytes(narrow_e2m1_magnitude<Floats, Words>(x * r) | signs);
    __builtin_memcpy(bytes + i, &some, sizeof some);
  }
  for (int i = 0; i < 2; ++i) {
    uint64_t eight;
    __builtin_memcpy(&eight, bytes + 8 * i, 8);
    const uint32_t packed = pack_nibbles(eight);
    __builtin_memcpy(codes + 4 * i, &packed, 4);
  }
}

// Neighbouring elements of a head of a token, its blocks [block, block + num_blocks), to their places in a page.  The
// scales of as many blocks as a vector has lanes are worked out at once.
template <class T>
inline void store_nvfp4(uint8_t* page, const Nvfp4Page& places, int64_t token, int64_t head, int32_t block,
                        int32_t num_blocks, const T* elements, float global) {
  for (int32_t first = 0; first < num_blocks; first += kWidth) {
    const int32_t n = num_blocks - first < kWidth ? num_blocks - first : kWidth;
    float largest[kWidth] = {}, reciprocals[kWidth];
    for (int32_t b = 0; b < n; ++b) {
      const T* from = elements + (first + b) * kNvfp4Block;
      Floats most{};
      for (int i = 0; i < kNvfp4Block; i += kWidth) {
        const Floats x = load(from + i);
        most = max(x < 0.0f ? -x : x, most);  // NaN is not counted
      }
      largest[b] = max(most);
    }
    const Floats a = load(largest);
    const Words magnitudes = narrow_e4m3<Floats, Words>(a / splat(kNvfp4Largest * global)) & 0x7fu;
    const Words rounded = magnitudes | (__builtin_signbit(global) ? 0x80u : 0u);  // that of a NaN is the processor's
    const Words scales = a == 0.0f ? Words{} : rounded;
    const Floats r = 1.0f / (widen_e4m3<Floats>(scales) * global);
    store(reciprocals, (scales & 0x7fu) == 0u ? Floats{} : r);
    const Bytes bytes = narrow_to_bytes(scales);
    for (int32_t b = 0; b < n; ++b) {
      const int32_t i = first + b;
      store_e2m1(page + places.codes_at(token, head, (block + i) * kNvfp4Block), elements + i * kNvfp4Block,
                 reciprocals[b]);
      page[places.scale_at(token, head, block + i)] = bytes[b];
    }
  }
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
class Nvfp4Encoder {
 public:
  Nvfp4Encoder(float global, int64_t) : global_(global) {}

  // Elements of heads [head, end) of a token, head_stride apart: as many blocks of each, from `block` on.
  void operator()(uint8_t* page, const Nvfp4Page& places, int64_t token, int64_t head, int64_t end, int32_t block,
                  int32_t num_blocks, const T* elements, int64_t head_stride) const {
    for (; head < end; ++head, elements += head_stride)
      store_nvfp4(page, places, token, head, block, num_blocks, elements, global_);
  }

 private:
  float global_;
};

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
class Nvfp4Encoder<T> {
 public:
  Nvfp4Encoder(float global, int64_t elements)
      : global_(global), scale_of_(kNvfp4Largest * global, elements), tables_(elements >= kWorthTables && build()) {}

  void operator()(uint8_t* page, const Nvfp4Page& places, int64_t token, int64_t head, int64_t end, int32_t block,
                  int32_t num_blocks, const T* elements, int64_t head_stride) const {
    if (!tables_) {
      for (; head < end; ++head, elements += head_stride)
        store_nvfp4(page, places, token, head, block, num_blocks, elements, global_);
      return;
    }
    if (num_blocks == 0) return;  // a part of nothing
    const int64_t heads_at_once = num_blocks < kAtOnce ? kAtOnce / num_blocks : 1;
    for (; head < end; head += heads_at_once, elements += heads_at_once * head_stride) {
      const int64_t heads = end - head < heads_at_once ? end - head : heads_at_once;
      for (int32_t i = 0; i < num_blocks; i += kAtOnce)
        write(page, places, token, head, heads, block + i, num_blocks - i < kAtOnce ? num_blocks - i : kAtOnce,
              elements + i * kNvfp4Block, head_stride);
    }
  }

 private:
  static constexpr int64_t kWorthTables = 1 << 14;
  static constexpr int32_t kAtOnce = 32;  // blocks
  static constexpr int kMantissa = __is_same(T, bf16) ? 7 : 10, kPart = kMantissa - 2;
  static constexpr int16_t kInfinity = ((1 << (15 - kMantissa)) - 1) << kMantissa;
  static constexpr int kOne = 0x38;    // the scale 1; the next seven have the other mantissas
  static constexpr int kNoStairs = 8;  // all zeros
  static constexpr int kSlow = 9;      // elements are not normal numbers there

  static uint32_t code_of(uint32_t bits, float r) {
    return narrow_e2m1_magnitude<float, uint32_t>(to_float(T{static_cast<uint16_t>(bits)}) * r);
  }

  // The staircase of a scale; gives the bits that it counts from, -1 if there is none.
  static int build_stairs(uint16_t* d, float r) {
    int steps[8];  // the least bits with that code
    for (int code = 1; code < 8; ++code) {
      int low = 0, high = kInfinity;
      while (low < high) {
        const int middle = (low + high) / 2;
        if (code_of(static_cast<uint32_t>(middle), r) >= static_cast<uint32_t>(code)) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      steps[code] = low;
    }
    const int base = (steps[1] >> kPart << kPart) - (1 << kPart);
    if (base < 1 << kMantissa || steps[7] >= kInfinity) return -1;
    for (int part = 0, code = 0; part < 32; ++part) {
      const int end = base + ((part + 1) << kPart);
      const bool steps_here = code < 7 && steps[code + 1] < end;
      // without a step the sum stays below the next multiple of 2^kPart
      const int carry = steps_here ? end - steps[code + 1] : 0;
      d[part] = static_cast<uint16_t>(((code - part) << kPart) + carry);
      code += steps_here;
    }
    return base;
  }

  bool build() {
    if (!(global_ > 0x1p-60f && global_ < 0x1p60f)) return false;
    for (int i = 0; i < 32; ++i) stairs_[kNoStairs][i] = static_cast<uint16_t>(-(i << kPart));
    int bases[8];
    for (int m = 0; m < 8; ++m)
      bases[m] = build_stairs(stairs_[m], 1.0f / (to_float(e4m3{static_cast<uint8_t>(kOne + m)}) * global_));
    for (int scale = 1; scale < 128; ++scale) {
      // the mantissa and the exponent of the scale, subnormal or not
      int mantissa = scale & 7, exponent = scale >> 3;
      if (exponent == 0) {
        exponent = 1;
        while (mantissa < 8) mantissa *= 2, --exponent;
        mantissa -= 8;
      }
      const int base = bases[mantissa] + (exponent - (kOne >> 3)) * (1 << kMantissa);
      const bool normal = bases[mantissa] >= 0 && base >= 1 << kMantissa && base + (24 << kPart) < kInfinity;
      places_[scale] = {static_cast<uint16_t>(base), static_cast<uint16_t>(normal ? mantissa : kSlow)};
    }
    places_[0] = {0, kNoStairs};
    return true;
  }

  // Of a few heads a few blocks each, kAtOnce in all: first all scales, then all codes.
  void write(uint8_t* page, const Nvfp4Page& places, int64_t token, int64_t head, int64_t heads, int32_t block,
             int32_t num_blocks, const T* elements, int64_t head_stride) const {
    T largest[kAtOnce];
    e4m3 scales[kAtOnce];
    T* next = largest;
    for (int64_t h = 0; h < heads; ++h)
      for (int32_t b = 0; b < num_blocks; ++b)
        *next++ = largest_magnitude(elements + h * head_stride + b * kNvfp4Block);
    while (next < largest + kAtOnce) *next++ = T{};
    scale_of_(scales, largest, kAtOnce);
    const e4m3* scale = scales;
    for (int64_t h = 0; h < heads; ++h, elements += head_stride) {
      uint8_t* codes = page + places.codes_at(token, head + h, block * kNvfp4Block);
      for (int32_t b = 0; b < num_blocks; ++b)
        encode(codes + b * (kNvfp4Block / 2), elements + b * kNvfp4Block, scale[b]);
      Nvfp4Scales at(places, token, head + h, block);
      for (int32_t b = 0; b < num_blocks; ++b) page[at.next()] = (scale++)->bits;
    }
  }

  static T largest_magnitude(const T* from) {
    const __m128i infinity = _mm_set1_epi16(kInfinity), sign = _mm_set1_epi16(-0x8000);
    const auto counted = [&](const T* eight) {  // NaN is not
      const __m128i magnitudes = _mm_andnot_si128(sign, load_raw<__m128i>(eight));
      return _mm_andnot_si128(_mm_cmpgt_epi16(magnitudes, infinity), magnitudes);
    };
    const __m128i most = _mm_max_epi16(counted(from), counted(from + 8)), ones = _mm_set1_epi16(-1);
    return {static_cast<uint16_t>(~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(most, ones))))};
  }

  void encode(uint8_t* codes, const T* from, e4m3 scale) const {
    const auto& [base, stairs] = places_[scale.bits];
    if (stairs == kSlow) return store_e2m1(codes, from, 1.0f / (to_float(scale) * global_));
    const __m256i bits = load_raw<__m256i>(from);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff));
    const __mmask16 number = _mm256_cmple_epi16_mask(magnitude, _mm256_set1_epi16(kInfinity));
    const __m256i above = _mm256_maskz_subs_epu16(number, magnitude, _mm256_set1_epi16(static_cast<int16_t>(base)));
    const __m256i within = _mm256_min_epu16(above, _mm256_set1_epi16((32 << kPart) - 1));
    const __m256i d = _mm256_permutex2var_epi16(load_raw<__m256i>(stairs_[stairs]), _mm256_srli_epi16(within, kPart),
                                                load_raw<__m256i>(stairs_[stairs] + 16));
    const __m256i magnitudes = _mm256_srli_epi16(_mm256_add_epi16(within, d), kPart);
    // magnitude | sign: 0xf8 is a | b & c
    const __m256i sixteen =
        _mm256_ternarylogic_epi32(magnitudes, _mm256_srli_epi16(bits, 12), _mm256_set1_epi16(8), 0xf8);
    const __m256i pairs = _mm256_madd_epi16(sixteen, _mm256_set1_epi32(16 << 16 | 1));
    const __m128i packed = _mm256_maskz_cvtepi32_epi8(0xff, pairs);
    __builtin_memcpy(codes, &packed, kNvfp4Block / 2);
  }

  struct Place {
    uint16_t base, stairs;
  };

  float global_;
  Encoder<T, e4m3> scale_of_;
  Place places_[128];
  alignas(64) uint16_t stairs_[9][32];
  bool tables_;
};

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
