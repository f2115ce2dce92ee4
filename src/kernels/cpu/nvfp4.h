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

// A head of a token to its places in a page; block_at(b): the sixteen elements of block b, as neighbours.  The scales of
// as many blocks as a vector has lanes are worked out at once.
template <class BlockAt>
inline void store_nvfp4(uint8_t* page, const Nvfp4Page& places, int64_t token, int64_t head, int32_t num_blocks,
                        float global, BlockAt&& block_at) {
  for (int32_t first = 0; first < num_blocks; first += kWidth) {
    const int32_t n = num_blocks - first < kWidth ? num_blocks - first : kWidth;
    float largest[kWidth] = {}, reciprocals[kWidth];
    for (int32_t b = 0; b < n; ++b) {
      const auto* from = block_at(first + b);
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
      const int64_t block = first + b;
      store_e2m1(page + places.codes_at(token, head, block * kNvfp4Block), block_at(first + b), reciprocals[b]);
      page[places.scale_at(token, head, first + b)] = bytes[b];
    }
  }
}

// The same for `size` elements that lie `stride` apart.
template <class T>
inline void store_nvfp4_row(uint8_t* page, const Nvfp4Page& places, int64_t token, int64_t head, const T* from,
                            int64_t stride, int64_t size, float global) {
  T together[kNvfp4Block];
  store_nvfp4(page, places, token, head, static_cast<int32_t>(size / kNvfp4Block), global, [&](int64_t b) {
    const T* block = from + b * kNvfp4Block * stride;
    if (stride == 1) return block;
    for (int i = 0; i < kNvfp4Block; ++i) together[i] = block[i * stride];
    return static_cast<const T*>(together);
  });
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

// A head of a token back to elements that lie `stride` apart.
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
