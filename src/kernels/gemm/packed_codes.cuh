// Codes of a packed weight on CUDA: words (gemm/packed_weight.h) to fragments of mma.m16n8k16, and factors of groups.
#pragma once

#include "cuda/load_shared.cuh"
#include "cuda/mma.cuh"
#include "cuda/pairs.cuh"
#include "gemm/packed_weight.h"

namespace pykv {

template <class T>
inline constexpr bool kIsHalf = kDTypeOf<T> == DType::kFloat16;

// a - b in each half of a word, exact here.
template <class T>
__device__ uint32_t subtract_pairs(uint32_t a, uint32_t b) {
  return as_word(__hsub2(as_pair<T>(a), as_pair<T>(b)));
}

// a b + c, rounded once.
template <class T>
__device__ uint32_t fma_pairs(uint32_t a, uint32_t b, uint32_t c) {
  return as_word(__hfma2(as_pair<T>(a), as_pair<T>(b), as_pair<T>(c)));
}

// The first or second half of a word in both: as the compiler knows it, it is no instruction of its own.
__device__ inline uint32_t twice(uint32_t pair, int half) {
  uint16_t first, second;
  uint32_t result;
  asm("mov.b32 {%0, %1}, %2;" : "=h"(first), "=h"(second) : "r"(pair));
  asm("mov.b32 %0, {%1, %1};" : "=r"(result) : "h"(half == 0 ? first : second));
  return result;
}

// (x & mask) | bits in one instruction, which the compiler does not find for two constants.
__device__ inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
  return result;
}

// __byte_perm without care for the upper bits of what selects, which the caller knows to be 0.
__device__ inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

// fragment() gives the first operand of step j.  kUnit multiplies all scales.
template <class T, CodeKind kKind>
struct Codes;

template <class T>
struct Codes<T, CodeKind::kUint4> {
  static constexpr int kPlanes = 1;
  static constexpr float kUnit = 1.0f;

  __device__ static void fragment(uint32_t (&a)[4], const uint4 (&words)[1], int j, const uint32_t*) {
    const uint32_t w = reinterpret_cast<const uint32_t (&)[4]>(words[0])[j];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = i % 2, shift = kIsHalf<T> && row ? 4 * (i - 1) : 4 * i;
      a[i] = subtract_pairs<T>(and_or(w >> shift, 15 * one(row), base(row)), base(row) + 8 * one(row));
    }
  }

  // Without moving those of rows 8 + g: what they stand for is kOfSecond times what is given.
  static constexpr float kOfSecond = kIsHalf<T> ? 1.0f : 4.0f;
  __device__ static void fragment_in_place(uint32_t (&a)[4], const uint4 (&words)[1], int j) {
    fragment_less(a, words, j, {zero_of(0, 8), zero_of(1, 8)});
  }
  // ... less zeros, by zero_of().
  __device__ static void fragment_less(uint32_t (&a)[4], const uint4 (&words)[1], int j, const uint32_t (&zeros)[2]) {
    const uint32_t w = reinterpret_cast<const uint32_t (&)[4]>(words[0])[j];
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      const uint32_t v = w >> 4 * i;
      a[i] = subtract_pairs<T>(and_or(v, 0x000f000fu, base(0)), zeros[0]);
      if constexpr (kIsHalf<T>) {
        a[i + 1] = subtract_pairs<T>(and_or(v, 0x00f000f0u, base(1)), zeros[1]);
      } else {  // as the bits of a number near the smallest, times 2^127
        a[i + 1] = fma_pairs<T>(v & 0x00f000f0u, 0x7f007f00u, zeros[1]);
      }
    }
  }
  // A zero point of up to 64 as fragment_less() wants it for row g or 8 + g.
  __device__ static uint32_t zero_of(int row, uint32_t zero) {
    if (kIsHalf<T> || row == 0) return base(row) + zero * one(row);
    const float quarter = -0.25f * static_cast<float>(zero);
    return pack_pair<T>(quarter, quarter);
  }

 private:
  // What codes of rows g and 8 + g are the lower bits of, as pairs: 128 or 1024, whose neighbours differ by one, or 64.
  __device__ static constexpr uint32_t base(int row) {
    return !kIsHalf<T> ? 0x43004300u : row == 0 ? 0x64006400u : 0x54005400u;
  }
  __device__ static constexpr uint32_t one(int row) { return kIsHalf<T> && row == 1 ? 0x00100010u : 0x00010001u; }
};

// Codes of four bits by few instructions on integers, of which an SM does half as many as of others: a byte, as the bits of a number of T,
// is so many times the smallest of T, and so are its low four bits.  Multiplied by a large number, less another.
template <class T>
struct CodesOfBytes {
  // What the numbers of rows g and 8 + g are to be multiplied by.
  __device__ static constexpr float unit(int row) { return (kIsHalf<T> ? 512.0f : 64.0f) / (row == 0 ? 1.0f : 16.0f); }

  // bytes: of two neighbours, as 16 bits each: the codes of rows g and 8 + g, of which 8 is subtracted.
  __device__ static void fragment(uint32_t& first, uint32_t& second, uint32_t bytes) {
    const uint32_t low = bytes & 0x000f000fu;
    first = fma_pairs<T>(low, kLarge, kIsHalf<T> ? 0xa400a400u : 0xbe00be00u);
    second =
        fma_pairs<T>(bytes, kLarge, fma_pairs<T>(low, kLarge | 0x80008000u, kIsHalf<T> ? 0xb400b400u : 0xc000c000u));
  }
  // ... of which zero points are subtracted: zeros are added, of each row as a pair.
  __device__ static void fragment_less(uint32_t& first, uint32_t& second, uint32_t bytes, const uint32_t (&zeros)[2]) {
    first = fma_pairs<T>(bytes & 0x000f000fu, kLarge, zeros[0]);
    second = fma_pairs<T>(bytes & 0x00f000f0u, kLarge, zeros[1]);
  }

 private:
  // 2^15, 2^127: one of the smallest becomes 2^-9, 2^-6.
  static constexpr uint32_t kLarge = kIsHalf<T> ? 0x78007800u : 0x7f007f00u;
};

template <class T>
struct Codes<T, CodeKind::kTable16> {
  static constexpr int kPlanes = 1;
  static constexpr float kUnit = 1.0f;

  // pairs: what any two codes stand for, [second * 16 + first]
  __device__ static void fragment(uint32_t (&a)[4], const uint4 (&words)[1], int j, const uint32_t* pairs) {
    const uint32_t w = reinterpret_cast<const uint32_t (&)[4]>(words[0])[j];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t codes = w >> 4 * i & 0x000f000fu;
      a[i] = pairs[(codes | codes >> 12) & 0xffu];
    }
  }

  // The same from registers.  low, high: the bytes of entries
  __device__ static void fragment_of(uint32_t (&a)[4], const uint4 (&words)[1], int j, const uint32_t (&low)[4],
                                     const uint32_t (&high)[4]) {
    uint32_t lows[2], highs[2];
    bytes_of(lows, words, j, low);
    bytes_of(highs, words, j, high);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      a[2 * h] = __byte_perm(lows[h], highs[h], 0x6240);
      a[2 * h + 1] = __byte_perm(lows[h], highs[h], 0x7351);
    }
  }
  // One of 16 bytes for each code, as kUint8 has them.
  __device__ static void bytes_of(uint32_t (&to)[2], const uint4 (&words)[1], int j, const uint32_t (&bytes)[4]) {
    const uint32_t w = __byte_perm(reinterpret_cast<const uint32_t (&)[4]>(words[0])[j], 0, 0x3120);
    const uint32_t of_eight = w & 0x77777777u, upper = and_or(w >> 1, 0x44444444u, 0x32103210u);
#pragma unroll
    for (int h = 0; h < 2; ++h)
      to[h] = permute(permute(bytes[0], bytes[1], of_eight >> 16 * h), permute(bytes[2], bytes[3], of_eight >> 16 * h),
                      upper >> 16 * h);
  }

  // Where the table is E2M1's, times scales of rows g and 8 + g, as pairs: exact, for a code has two bits that count, a scale of
  // e4m3 four.  A code is a sign and the bits of a small number, 2^-126 of what it stands for, or of float16 2^-14.
  __device__ static void fragment_scaled(uint32_t (&a)[4], const uint4 (&words)[1], int j,
                                         const uint32_t (&scales)[2]) {
    constexpr int kTo = kIsHalf<T> ? 9 : 6;
    constexpr uint32_t kMagnitude = 0x00070007u << kTo, kUnits = kIsHalf<T> ? 0x74007400u : 0x7e807e80u;
    const uint32_t w = reinterpret_cast<const uint32_t (&)[4]>(words[0])[j];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t sign = w << (12 - 4 * i) & 0x80008000u;
      const uint32_t magnitude = 4 * i > kTo ? w >> (4 * i - kTo) : w << (kTo - 4 * i);
      a[i] = multiply_pairs<T>(multiply_pairs<T>(and_or(magnitude, kMagnitude, sign), kUnits), scales[i % 2]);
    }
  }
};

template <class T>
struct Codes<T, CodeKind::kUint8> {
  static constexpr int kPlanes = 2;
  static constexpr float kUnit = 1.0f;
  static constexpr uint32_t kMiddle = kIsHalf<T> ? 0x64806480u : 0xc000c000u;  // a zero point of 128

  __device__ static void fragment(uint32_t (&a)[4], const uint4 (&words)[2], int j, const uint32_t*) {
    fragment_less(a, words, j, {kMiddle, kMiddle});
  }
  // Less zeros, of rows g and 8 + g, by zero_of().
  __device__ static void fragment_less(uint32_t (&a)[4], const uint4 (&words)[2], int j, const uint32_t (&zeros)[2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t w = reinterpret_cast<const uint32_t (&)[4]>(words[i >> 1])[j];
      const int half_row = i & 1;
      if constexpr (kIsHalf<T>) {
        a[i] = subtract_pairs<T>(__byte_perm(w, 0x64646464u, half_row ? 0x4341 : 0x4240), zeros[half_row]);
      } else {  // as the bits of a number near the smallest: 2^-133 of itself; times 2^127, less zero / 64, times 64
        const uint32_t octets = half_row ? __byte_perm(w, 0, 0x4341) : w & 0x00ff00ffu;
        a[i] = multiply_pairs<T>(fma_pairs<T>(octets, 0x7f007f00u, zeros[half_row]), 0x42804280u);
      }
    }
  }
  __device__ static uint32_t zero_of(float zero) {
    const float v = kIsHalf<T> ? 1024.0f + zero : zero * -0x1p-6f;
    return pack_pair<T>(v, v);
  }
};

template <class T>
struct Codes<T, CodeKind::kE4M3> {
  static constexpr int kPlanes = 2;
  static constexpr float kUnit =
      kIsHalf<T> ? 256.0f : 1.0f;  // with its exponent in the place of an f16's it is 2^-8 of itself

  __device__ static void fragment(uint32_t (&a)[4], const uint4 (&words)[2], int j, const uint32_t*) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t w = reinterpret_cast<const uint32_t (&)[4]>(words[i >> 1])[j] >> 8 * (i & 1);
      const uint32_t sign = (w & 0x00800080u) << 8, magnitude = w & 0x007f007fu;
      if constexpr (kIsHalf<T>) {
        a[i] = sign | magnitude << 7;
      } else {  // 2^-120 of itself: products of that would be too small for floats
        a[i] = multiply_pairs<T>(sign | magnitude << 4, 0x7b807b80u);
      }
    }
  }
};

// Scales and minima of the four rows (r, half) of a lane in 32, as they are stored: what is loaded early costs no wait.
struct RawFactors {
  uint32_t scale[4] = {}, minimum[4] = {}, super[2] = {}, low[2] = {};
};

__device__ inline void load_four(uint32_t (&into)[4], const uint8_t* from, int64_t at, int bytes) {
  from += at * bytes;
  if (bytes == 1) {
    into[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if (bytes == 2) {
    const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
    into[0] = two.x;
    into[1] = two.y;
  } else {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(from));
    into[0] = four.x;
    into[1] = four.y;
    into[2] = four.z;
    into[3] = four.w;
  }
}

__device__ inline void load_super(uint32_t (&into)[2], const uint8_t* from, int64_t at) {
  const uint2 two = __ldg(reinterpret_cast<const uint2*>(from + at * 2));
  into[0] = two.x;
  into[1] = two.y;
}

// The same from shared memory; `at`: the place of the first of the four, a multiple of four.
__device__ inline void load_four_shared(uint32_t (&into)[4], uint32_t from, int at, int bytes) {
  from += at * bytes;
  if (bytes == 1) {
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(into[0]) : "r"(from) : "memory");
  } else if (bytes == 2) {
    const uint2 two = load_shared_8(from);
    into[0] = two.x;
    into[1] = two.y;
  } else {
    const uint4 four = load_shared_16(from);
    into[0] = four.x;
    into[1] = four.y;
    into[2] = four.z;
    into[3] = four.w;
  }
}

__device__ inline void load_super_shared(uint32_t (&into)[2], uint32_t from, int at) {
  const uint2 two = load_shared_8(from + at * 2);
  into[0] = two.x;
  into[1] = two.y;
}

// shift: bytes from w to the weight that is meant; at: the place of the first of the four among the factors of all groups
__device__ inline void load_factors_of_group(RawFactors& raw, const PackedWeight& w, int64_t at, int64_t shift) {
  load_four(raw.scale, w.scales + shift, at, bytes_of(w.scales_kind));
  if (w.minima) load_four(raw.minimum, w.minima + shift, at, bytes_of(w.minima_kind));
}
// ... among those of 256 columns
__device__ inline void load_factors_of_block(RawFactors& raw, const PackedWeight& w, int64_t at, int64_t shift) {
  if (w.supers) load_super(raw.super, w.supers + shift, at);
  if (w.lows) load_super(raw.low, w.lows + shift, at);
}

__device__ inline float half_of(const uint32_t (&words)[2], int i) {
  const float2 pair = unpack_pair<half>(words[i >> 1]);
  return i & 1 ? pair.y : pair.x;
}
__device__ inline float e4m3_to_float(uint32_t code) {  // no NaN
  return __half2float(__ushort_as_half(static_cast<unsigned short>((code & 0x80u) << 8 | (code & 0x7fu) << 7))) *
         256.0f;
}

// The scales of the first kRows rows of several groups.  What kind they are is asked once for all: each time is a chain of branches.
template <int kCount, int kRows>
__device__ void scales_of(float (&scales)[kCount][kRows], const RawFactors (&raw)[kCount], ScaleKind kind) {
  const auto each = [&](auto scale_of) {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int i = 0; i < kRows; ++i) scales[n][i] = scale_of(raw[n], i, raw[n].scale[0] >> 8 * i & 0xffu);
  };
  switch (kind) {
    case ScaleKind::kF16:
      return each([](const RawFactors& r, int i, uint32_t) { return half_of({r.scale[0], r.scale[1]}, i); });
    case ScaleKind::kBF16:
      return each([](const RawFactors& r, int i, uint32_t) {
        const uint32_t pair = r.scale[i >> 1];
        return __uint_as_float(i & 1 ? pair & 0xffff0000u : pair << 16);
      });
    case ScaleKind::kF32:
      return each([](const RawFactors& r, int i, uint32_t) { return __uint_as_float(r.scale[i]); });
    case ScaleKind::kE4M3:
      return each([](const RawFactors&, int, uint32_t octet) { return e4m3_to_float(octet); });
    case ScaleKind::kE8M0:
      return each(
          [](const RawFactors&, int, uint32_t octet) { return __uint_as_float(octet ? octet << 23 : 0x00400000u); });
    case ScaleKind::kF16U8:
      return each(
          [](const RawFactors& r, int i, uint32_t octet) { return half_of(r.super, i) * static_cast<float>(octet); });
    default:
      return each([](const RawFactors& r, int i, uint32_t octet) {
        return half_of(r.super, i) * static_cast<float>(static_cast<int8_t>(octet));
      });
  }
}

// scales: with the global one; offset: what the codes have been given too little
template <int kCount, int kRows>
__device__ void minima_of(float (&minima)[kCount][kRows], const RawFactors (&raw)[kCount], MinimumKind kind,
                          float offset, const float (&scales)[kCount][kRows]) {
  const auto each = [&](auto minimum_of) {
#pragma unroll
    for (int n = 0; n < kCount; ++n)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
        minima[n][i] = minimum_of(raw[n], i, scales[n][i], static_cast<float>(raw[n].minimum[0] >> 8 * i & 0xffu));
  };
  switch (kind) {
    case MinimumKind::kZero:
      return each([&](const RawFactors&, int, float scale, float octet) { return scale * (offset - octet); });
    case MinimumKind::kF16:
      return each([&](const RawFactors& r, int i, float scale, float) {
        return fmaf(scale, offset, half_of({r.minimum[0], r.minimum[1]}, i));
      });
    case MinimumKind::kF32:
      return each([&](const RawFactors& r, int i, float scale, float) {
        return fmaf(scale, offset, __uint_as_float(r.minimum[i]));
      });
    default:
      return each([&](const RawFactors& r, int i, float scale, float octet) {
        return fmaf(scale, offset, -half_of(r.low, i) * octet);
      });
  }
}

// What codes stand for, in registers, where that is a table.
template <class T, CodeKind kKind>
struct EntriesOf {
  __device__ explicit EntriesOf(const float*) {}
  __device__ bool are_octets() const { return true; }
  __device__ float unit() const { return 1.0f; }
};
template <class T>
struct EntriesOf<T, CodeKind::kTable16> {
  uint32_t low[4], high[4];  // the bytes of entries
  uint32_t octets[4];        // if all are integers or eighths, as most are: that and 128

  __device__ explicit EntriesOf(const float* numbers) {
    float v[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) v[i] = __ldg(numbers + i);
    bool are_integers = true, are_eighths = true;
#pragma unroll
    for (float x : v) {
      are_integers &= is_octet(x);
      are_eighths &= is_octet(8.0f * x);
    }
    are_octets_ = are_integers || are_eighths;
    eighths_ = !are_integers && are_eighths;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t first = pack_pair<T>(v[4 * i], v[4 * i + 1]), second = pack_pair<T>(v[4 * i + 2], v[4 * i + 3]);
      low[i] = __byte_perm(first, second, 0x6420);
      high[i] = __byte_perm(first, second, 0x7531);
      octets[i] = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        octets[i] |=
            (static_cast<uint32_t>(static_cast<int>(eighths_ ? 8.0f * v[4 * i + e] : v[4 * i + e]) + 128) & 255u)
            << 8 * e;
    }
  }
  __device__ bool are_octets() const { return are_octets_; }
  // What integers are to be multiplied by.
  __device__ float unit() const { return eighths_ ? 0.125f : 1.0f; }

 private:
  bool are_octets_, eighths_;
  __device__ static bool is_octet(float x) { return x == rintf(x) && fabsf(x) <= 127.0f; }
};

// Whether Hopper multiplies codes by the scales of their groups as it decodes them (Folding below): those of GGUF, and what is like
// them; of groups of any size int4 with scales of float16, for x of bfloat16, of which that is one instruction for two codes.  Others
// without minima are as quick without that, and exact; so is int4 of experts (has_map) for x of float16.
template <class T>
bool is_folded(const PackedWeight& w, bool has_map) {
  const bool is_wide = w.scales_kind != ScaleKind::kF16 && !has_supers(w.scales_kind);
  if (w.codes_kind == CodeKind::kTable16) return !is_wide;
  if (!is_integer(w.codes_kind)) return false;
  if (w.minima_kind == MinimumKind::kZero) return false;  // s z is often larger than w, and would be rounded
  if (w.minima_kind != MinimumKind::kNone) return true;
  const bool is_uint4 = w.codes_kind == CodeKind::kUint4;
  if (is_wide || (is_uint4 && has_map && kIsHalf<T>)) return false;
  const bool is_small = w.groups() > 1 && (w.group_size == 16 || w.group_size == 32);
  return is_small || (is_uint4 && !kIsHalf<T> && w.scales_kind == ScaleKind::kF16);
}

// How: scales of float16; any without minima, and entries of a table that are no integers; any with minima; the bytes of Q3_K and
// Q6_K (and for a table, of any sign); those of Q2_K, Q4_K and Q5_K.
enum class Fold { kHalf, kAny, kMinima, kBytes, kBytesMinima };
PYKV_HOST_DEVICE constexpr bool has_minima(Fold fold) { return fold == Fold::kMinima || fold == Fold::kBytesMinima; }
PYKV_HOST_DEVICE constexpr bool is_of_bytes(Fold fold) { return fold == Fold::kBytes || fold == Fold::kBytesMinima; }
// Whether scales of two levels are bytes, and minima, as those of GGUF are.  steps: of 16 columns of a group.
PYKV_HOST_DEVICE inline bool are_bytes(const PackedWeight& w, int steps) {
  if (w.minima_kind == MinimumKind::kNone)
    return w.codes_kind == CodeKind::kTable16 ? has_supers(w.scales_kind) && steps <= 2
                                              : w.scales_kind == ScaleKind::kF16I8 && steps == 1;
  return w.minima_kind == MinimumKind::kF16U8 && w.scales_kind == ScaleKind::kF16U8 &&
         (steps == 2 || (steps == 1 && w.codes_kind == CodeKind::kUint4));
}

inline bool is_q4_k(const PackedWeight& w) {
  return w.codes_kind == CodeKind::kUint4 && w.group_size == 32 && w.minima_kind == MinimumKind::kF16U8 &&
         w.scales_kind == ScaleKind::kF16U8;
}

// Calls with.template operator()<fold>().
template <CodeKind kKind, class With>
__device__ __forceinline__ void dispatch_fold(const PackedWeight& w, int steps, bool are_octets, With with) {
  constexpr bool kIsTable = kKind == CodeKind::kTable16;
  if (w.minima_kind != MinimumKind::kNone) {
    if constexpr (!kIsTable) {
      if (are_bytes(w, steps)) return with.template operator()<Fold::kBytesMinima>();
      with.template operator()<Fold::kMinima>();
    }
  } else if (are_octets && are_bytes(w, steps)) {
    with.template operator()<Fold::kBytes>();
  } else if (are_octets && w.scales_kind == ScaleKind::kF16 && steps >= 2) {
    with.template operator()<Fold::kHalf>();
  } else {  // which may have more exponents than kHalf has room for
    with.template operator()<Fold::kAny>();
  }
}

// Scales of two rows from shared memory: those of a group at `at`, those of 256 columns at `supers`.
template <Fold kFold, bool kAnySign>
__device__ float2 load_two_scales(uint32_t at, uint32_t supers, ScaleKind kind) {
  if constexpr (kFold == Fold::kHalf) return unpack_pair<half>(load_shared_4(at));
  if constexpr (kFold == Fold::kBytes && kAnySign) {
    const uint32_t sign = kind == ScaleKind::kF16I8 ? 0x8080u : 0u, octets = load_shared_2(at) ^ sign;
    const float less = static_cast<float>(sign & 0xffu);
    const float2 of_256 = unpack_pair<half>(load_shared_4(supers));
    return make_float2(of_256.x * (static_cast<float>(octets & 0xffu) - less),
                       of_256.y * (static_cast<float>(octets >> 8) - less));
  }
  if (kFold == Fold::kBytes || kFold == Fold::kBytesMinima || has_supers(kind)) {
    const uint32_t octets = load_shared_2(at);
    const float2 of_256 = unpack_pair<half>(load_shared_4(supers));
    if (kFold == Fold::kBytes || (kFold != Fold::kBytesMinima && kind == ScaleKind::kF16I8))
      return make_float2(of_256.x * static_cast<float>(static_cast<int8_t>(octets)),
                         of_256.y * static_cast<float>(static_cast<int8_t>(octets >> 8)));
    return make_float2(of_256.x * static_cast<float>(octets & 0xffu), of_256.y * static_cast<float>(octets >> 8));
  }
  const int bytes = bytes_of(kind);
  if (bytes == 2) {
    const uint32_t pair = load_shared_4(at);
    const float2 halves = unpack_pair<half>(pair), others = unpack_pair<bf16>(pair);
    return kind == ScaleKind::kF16 ? halves : others;
  }
  if (bytes == 4) return load_shared_float2(at);
  const uint32_t octets = load_shared_2(at);
  if (kind == ScaleKind::kE4M3) return make_float2(e4m3_to_float(octets & 0xffu), e4m3_to_float(octets >> 8));
  const auto power = [](uint32_t octet) { return __uint_as_float(octet ? octet << 23 : 0x00400000u); };
  return make_float2(power(octets & 0xffu), power(octets >> 8));
}

// What is added to them; offset: what codes have lost.
template <Fold kFold>
__device__ float2 load_two_minima(uint32_t at, uint32_t lows, MinimumKind kind, float offset, float2 scales) {
  if (kFold != Fold::kBytesMinima && kind == MinimumKind::kNone) return make_float2(0.0f, 0.0f);
  float2 v;
  if (kFold == Fold::kBytesMinima || kind == MinimumKind::kF16U8) {
    const uint32_t octets = load_shared_2(at);
    const float2 of_256 = unpack_pair<half>(load_shared_4(lows));
    v = make_float2(-of_256.x * static_cast<float>(octets & 0xffu), -of_256.y * static_cast<float>(octets >> 8));
  } else if (kind == MinimumKind::kF16) {
    v = unpack_pair<half>(load_shared_4(at));
  } else {
    v = load_shared_float2(at);
  }
  return make_float2(fmaf(scales.x, offset, v.x), fmaf(scales.y, offset, v.y));
}

// Where factors of a group of two rows lie in shared memory; supers, lows: those of 256 columns.
struct FactorPlaces {
  uint32_t scales, supers, minima, lows;
};

// The power of two not above a number, and its inverse; of 0 both are finite.
__device__ inline float power_below(float x) { return __uint_as_float(__float_as_uint(x) & 0x7f800000u); }
__device__ inline float inverse_of_power(float power) { return __uint_as_float(0x7f000000u - __float_as_uint(power)); }

// Codes of integers that are multiplied by the scale of their group as they are decoded: sums of any groups are one.  w = (c - kMiddle) s,
// rounded to 16 bits; with minima: and m, which has what c lost in it, for so it is much less: s, m and w are rounded.  float16 has few
// exponents: there a row has a power of two for each 128 columns, not above the largest s or m.
template <class T, CodeKind kKind, Fold kFold, bool kAnySign = false>
struct Folding {
  static constexpr bool kAdds = has_minima(kFold);
  static constexpr bool kIsNarrow = kKind == CodeKind::kUint4;
  // Codes become numbers first.
  static constexpr bool kIsExact = kAdds || kFold == Fold::kAny || (kIsHalf<T> && is_of_bytes(kFold));
  // What sums are to be multiplied by: a code, as the bits of a number, is so many times the smallest of T, and a scale times the
  // inverse of that would be too large.
  static constexpr float kUnit = kIsExact ? 1.0f : kIsHalf<T> ? 0x1p10f : 0x1p32f;

  // s and m of a group for rows g and 8 + g.
  struct Factors {
    float2 scale, minimum;

    __device__ Factors(const PackedWeight& w, float global, const FactorPlaces& at)
        : scale(load_two_scales<kFold, kAnySign>(at.scales, at.supers, w.scales_kind)), minimum{} {
      scale = make_float2(scale.x * global, scale.y * global);
      if (kAdds) minimum = load_two_minima<kFold>(at.minima, at.lows, w.minima_kind, w.offset, scale);
    }
    __device__ float2 largest() const {
      return make_float2(fmaxf(fabsf(scale.x), fabsf(minimum.x)), fmaxf(fabsf(scale.y), fabsf(minimum.y)));
    }
    // In units of what weights have in common: as fragment() wants them.
    __device__ uint32_t scales(float2 units) const {
      return pack_pair<T>(scale.x * (of_scale(0) * units.x), scale.y * (of_scale(1) * units.y));
    }
    __device__ uint32_t minima(float2 units) const { return pack_pair<T>(minimum.x * units.x, minimum.y * units.y); }
    // Either of them.
    __device__ uint32_t one(bool is_minimum, float2 units) const {
      const float x = is_minimum ? minimum.x : scale.x * of_scale(0),
                  y = is_minimum ? minimum.y : scale.y * of_scale(1);
      return pack_pair<T>(x * units.x, y * units.y);
    }
  };
  // Of bytes and float16, what factors of 256 columns have in common: they are at most 255 times that.
  __device__ static float2 units_of_256(uint32_t supers, uint32_t lows, float global) {
    const float2 s = unpack_pair<half>(load_shared_4(supers));
    const float2 m = has_minima(kFold) ? unpack_pair<half>(load_shared_4(lows)) : make_float2(0.0f, 0.0f);
    return make_float2(2.0f * power_below(fmaxf(fabsf(s.x * global), fabsf(m.x))),
                       2.0f * power_below(fmaxf(fabsf(s.y * global), fabsf(m.y))));
  }

  // What s of row g or 8 + g is to be multiplied by.
  __device__ static constexpr float of_scale(int row) {
    if (kIsExact) return kIsHalf<T> ? 1.0f : !kIsNarrow ? 64.0f : row ? Codes<T, CodeKind::kUint4>::kOfSecond : 1.0f;
    return (kIsHalf<T> ? 0x1p14f : 0x1p101f) / (kIsNarrow && row ? 16.0f : 1.0f);
  }
  // What is added where there are no minima, by scales().
  __device__ static uint32_t middle(uint32_t scales) {
    // -8, -128 (or of codes in bits 4 to 7 of a byte) times the smallest
    constexpr uint32_t kOfRows = kIsNarrow ? 0x80808008u : 0x80808080u;
    if constexpr (kIsExact) return 0;
    return multiply_pairs<T>(scales, kOfRows);
  }
  __device__ static void fragment(uint32_t (&a)[4], const uint4 (&words)[kIsNarrow ? 1 : 2], int j, uint32_t scales,
                                  uint32_t minima, const EntriesOf<T, kKind>& = EntriesOf<T, kKind>(nullptr)) {
    if constexpr (kIsExact && kIsNarrow) Codes<T, kKind>::fragment_in_place(a, words, j);
    const auto scaled = [&](uint32_t v, uint32_t s, uint32_t m) {
      return kIsExact && !kAdds ? multiply_pairs<T>(v, s) : fma_pairs<T>(v, s, m);
    };
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t s = twice(scales, i % 2), m = twice(minima, i % 2);
      if constexpr (kIsExact && kIsNarrow) {
        a[i] = scaled(a[i], s, m);
      } else if constexpr (kIsNarrow) {
        const uint32_t w = reinterpret_cast<const uint32_t (&)[4]>(words[0])[j];
        const uint32_t v = i < 2 ? w : w >> 8;
        a[i] = fma_pairs<T>(v & (i % 2 ? 0x00f000f0u : 0x000f000fu), s, m);
      } else {
        const uint32_t w = reinterpret_cast<const uint32_t (&)[4]>(words[i >> 1])[j];
        if constexpr (kIsExact && kIsHalf<T>) {
          const uint32_t octets = __byte_perm(w, 0x64646464u, i % 2 ? 0x4341 : 0x4240);
          a[i] = scaled(subtract_pairs<T>(octets, 0x64806480u), s, m);
        } else {
          const uint32_t octets = i % 2 ? __byte_perm(w, 0, 0x4341) : w & 0x00ff00ffu;
          a[i] = scaled(kIsExact ? fma_pairs<T>(octets, 0x7f007f00u, 0xc000c000u) : octets, s, m);
        }
      }
    }
  }
};

// Entries of a table that are integers: those of kUint8, by their codes.
template <class T, Fold kFold>
struct Folding<T, CodeKind::kTable16, kFold, false> : Folding<T, CodeKind::kUint8, kFold, true> {
  using Octets = Folding<T, CodeKind::kUint8, kFold, true>;
  __device__ static void fragment(uint32_t (&a)[4], const uint4 (&words)[1], int j, uint32_t scales, uint32_t minima,
                                  const EntriesOf<T, CodeKind::kTable16>& entries) {
    uint32_t octets[2];
    Codes<T, CodeKind::kTable16>::bytes_of(octets, words, j, entries.octets);
    const uint4 of_step[2] = {make_uint4(octets[0], 0, 0, 0), make_uint4(octets[1], 0, 0, 0)};
    Octets::fragment(a, of_step, 0, scales, minima);
  }
};

// Any entries: w = s c, where s and w are rounded.
template <class T>
struct Folding<T, CodeKind::kTable16, Fold::kAny, false> {
  static constexpr bool kAdds = false;
  static constexpr float kUnit = 1.0f;
  struct Factors {
    float2 scale;

    __device__ Factors(const PackedWeight& w, float global, const FactorPlaces& at)
        : scale(load_two_scales<Fold::kAny, false>(at.scales, at.supers, w.scales_kind)) {
      scale = make_float2(scale.x * global, scale.y * global);
    }
    __device__ float2 largest() const { return make_float2(fabsf(scale.x), fabsf(scale.y)); }
    __device__ uint32_t scales(float2 units) const { return pack_pair<T>(scale.x * units.x, scale.y * units.y); }
    __device__ uint32_t minima(float2) const { return 0; }
  };
  __device__ static uint32_t middle(uint32_t) { return 0; }
  __device__ static float2 units_of_256(uint32_t supers, uint32_t lows, float global) {
    return Folding<T, CodeKind::kUint8, Fold::kAny>::units_of_256(supers, lows, global);
  }
  __device__ static void fragment(uint32_t (&a)[4], const uint4 (&words)[1], int j, uint32_t scales, uint32_t,
                                  const EntriesOf<T, CodeKind::kTable16>& entries) {
    Codes<T, CodeKind::kTable16>::fragment_of(a, words, j, entries.low, entries.high);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = multiply_pairs<T>(a[i], twice(scales, i % 2));
  }
};

// The same of one group.
template <int kRows>
__device__ void scales_of(float (&scales)[kRows], const RawFactors& raw, ScaleKind kind) {
  scales_of(reinterpret_cast<float (&)[1][kRows]>(scales), reinterpret_cast<const RawFactors(&)[1]>(raw), kind);
}
template <int kRows>
__device__ void minima_of(float (&minima)[kRows], const RawFactors& raw, MinimumKind kind, float offset,
                          const float (&scales)[kRows]) {
  minima_of(reinterpret_cast<float (&)[1][kRows]>(minima), reinterpret_cast<const RawFactors(&)[1]>(raw), kind, offset,
            reinterpret_cast<const float (&)[1][kRows]>(scales));
}

}  // namespace pykv
