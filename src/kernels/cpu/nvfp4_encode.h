// Blocks of nvfp4 (core/nvfp4.h) on the CPU: sixteen elements to eight bytes and a scale.
//
// The code is a staircase over the bits of a 16-bit element; blocks whose scales differ by a power of two have it shifted by as
// many binades, so that eight tables do, made as cpu/encode.h does it: (bits + d) >> kPart is the code, with a d for each quarter
// of a binade.  No division, no conversion, no product.  32 blocks at a time: their largest by folding vectors, their scales and
// what these stand for in the tables in one vector, then their codes, two blocks a vector, a line of 128 at once.  Zen 5 takes 17
// cycles for 32 elements.
#pragma once

#include <utility>

#include "cpu/encode.h"
#include "cpu/nvfp4_scales.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {

// The lower halves of eight bytes as four bytes.
inline uint32_t pack_nibbles(uint64_t bytes) {
  bytes = (bytes | bytes >> 4) & 0x00ff00ff00ff00ffu;
  bytes = (bytes | bytes >> 8) & 0x0000ffff0000ffffu;
  return static_cast<uint32_t>(bytes | bytes >> 16);
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

// Blocks below one global scale; of so many elements in all, for few are not worth tables.
template <class T>
class Nvfp4Encoder {
 public:
  // What one thread has begun.
  struct Begun {
    explicit Begun(LineWriter&) {}
    void finish() {}
  };

  Nvfp4Encoder(float global, int64_t) : global_(global) {}

  // Elements of heads [head, end) of a token, head_stride apart: as many blocks of each, from `block` on.  They are read,
  // and all is in its place, when what is begun has been finished.
  void operator()(Begun&, uint8_t* page, const Nvfp4Page& places, int64_t token, int64_t head, int64_t end,
                  int32_t block, int32_t num_blocks, const T* elements, int64_t head_stride) const {
    for (; head < end; ++head, elements += head_stride)
      store_nvfp4(page, places, token, head, block, num_blocks, elements, global_);
  }

 private:
  float global_;
};

#if defined(__AVX512BW__)
template <class T>
  requires(sizeof(T) == 2)
class Nvfp4Encoder<T> {
  static constexpr int64_t kWorthTables = 1 << 14;
  static constexpr int kBlocks = 8, kGroups = 4;  // blocks whose codes fill a line, and so many lines at once
  static constexpr int kCodeBytes = kBlocks * kNvfp4Block / 2;
  static constexpr int kMantissa = __is_same(T, bf16) ? 7 : 10, kPart = kMantissa - 2;
  static constexpr int16_t kInfinity = ((1 << (15 - kMantissa)) - 1) << kMantissa;
  static constexpr int kOne = 0x38;    // the scale 1; the next seven have the other mantissas
  static constexpr int kNoStairs = 8;  // all zeros
  static constexpr int kSlow = 9;      // elements are not normal numbers there

  // Neighbouring blocks of a head: elements, codes, and scales, which are at those places.
  struct Group {
    const T* from;
    uint8_t *to, *scales;
    int64_t places[kBlocks];
    int32_t count;
  };

  // Groups that are encoded together, by one encoder.
  struct Batch {
    const Nvfp4Encoder* by;
    int n = 0;
    Group groups[kGroups];
    const T* from[kGroups];
    T padded[kGroups][kBlocks * kNvfp4Block];
    e4m3 scales[kGroups * kBlocks];
    uint32_t bases[kGroups * kBlocks];  // each twice
    uint16_t tables[kGroups * kBlocks];
    bool slow;
  };

 public:
  // What one thread has begun: codes of a batch are made when the next one's scales are, or they would wait for their own.
  class Begun {
   public:
    explicit Begun(LineWriter& out) : out_(out) {}
    Begun(const Begun&) = delete;
    Begun& operator=(const Begun&) = delete;
    ~Begun() { finish(); }

    void finish() {
      advance();
      advance();
    }

   private:
    friend Nvfp4Encoder;

    // Where a group of that encoder's is to be put.
    Group& add(const Nvfp4Encoder* by) {
      if (now_->n == kGroups || (now_->n > 0 && now_->by != by)) advance();
      now_->by = by;
      return now_->groups[now_->n++];
    }
    void advance() {
      if (now_->n > 0) now_->by->find_scales(*now_);
      if (before_->n > 0) before_->by->write(out_, *before_);
      before_->n = 0;
      std::swap(now_, before_);
    }

    LineWriter& out_;
    Batch batches_[2];
    Batch *now_ = batches_, *before_ = batches_ + 1;
  };

  Nvfp4Encoder(float global, int64_t elements)
      : global_(global), scale_of_(kNvfp4Largest * global, elements), tables_(elements >= kWorthTables && build()) {}

  void operator()(Begun& begun, uint8_t* page, const Nvfp4Page& places, int64_t token, int64_t head, int64_t end,
                  int32_t block, int32_t num_blocks, const T* elements, int64_t head_stride) const {
    if (!tables_) {
      for (; head < end; ++head, elements += head_stride)
        store_nvfp4(page, places, token, head, block, num_blocks, elements, global_);
      return;
    }
    for (int32_t first = 0; first < num_blocks; first += kBlocks) {
      Nvfp4Scales at(places, token, 0, block + first);
      int64_t scales[kBlocks];
      for (int64_t& place : scales) place = at.next();
      for (int64_t h = head; h < end; ++h) {
        Group& group = begun.add(this);
        group.from = elements + (h - head) * head_stride + first * kNvfp4Block;
        group.to = page + places.codes_at(token, h, (block + first) * kNvfp4Block);
        group.scales = page + h * places.scales_head;
        __builtin_memcpy(group.places, scales, sizeof scales);
        group.count = num_blocks - first < kBlocks ? num_blocks - first : kBlocks;
      }
    }
  }

 private:
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
      bases_[scale] = static_cast<uint16_t>(base);
      tables_of_[scale] = static_cast<uint16_t>(normal ? mantissa : kSlow);
    }
    bases_[0] = 0, tables_of_[0] = kNoStairs;
    return true;
  }

  void find_scales(Batch& batch) const {
    for (int g = 0; g < kGroups; ++g) {
      const Group& group = batch.groups[g < batch.n ? g : 0];
      batch.from[g] = group.from;
      if (group.count == kBlocks) continue;
      T(&padded)[kBlocks * kNvfp4Block] = batch.padded[g];
      __builtin_memset(padded, 0, sizeof padded);
      __builtin_memcpy(padded, group.from, static_cast<size_t>(group.count) * kNvfp4Block * sizeof(T));
      batch.from[g] = padded;
    }
    T largest[kGroups * kBlocks];
    _mm512_storeu_si512(largest, largest_magnitudes(batch.from));
    scale_of_(batch.scales, largest, kGroups * kBlocks);
    const __m512i scales = _mm512_cvtepu8_epi16(load_raw<__m256i>(batch.scales)), base = look_up(bases_, scales),
                  table = look_up(tables_of_, scales);
    batch.slow = _mm512_cmpeq_epi16_mask(table, _mm512_set1_epi16(kSlow)) != 0;
    _mm512_storeu_si512(batch.tables, table);
    uint16_t once[kGroups * kBlocks];
    _mm512_storeu_si512(once, base);
    for (int i = 0; i < kGroups * kBlocks; i += kWidth) {
      const Words one = widen(load_raw<Halfwords>(once + i));
      store_raw(batch.bases + i, one | one << 16, false);
    }
  }

  void write(LineWriter& out, const Batch& batch) const {
    alignas(64) uint8_t codes[kGroups][kCodeBytes];
    encode(codes, batch);
    const Group* groups = batch.groups;
    bool touch = true;
    int64_t bytes = 0;
    for (int g = 0; g < batch.n; ++g) {
      const Group& group = groups[g];
      touch = touch && group.to == groups[0].to + g * kCodeBytes && (g == 0 || groups[g - 1].count == kBlocks);
      bytes += group.count * (kNvfp4Block / 2);
      uint64_t scales;
      __builtin_memcpy(&scales, batch.scales + g * kBlocks, sizeof scales);
      uint8_t* const to = group.scales;
      if (group.count == kBlocks) {
        for (int b = 0; b < kBlocks; ++b) to[group.places[b]] = static_cast<uint8_t>(scales >> 8 * b);
      } else {
        for (int b = 0; b < group.count; ++b) to[group.places[b]] = static_cast<uint8_t>(scales >> 8 * b);
      }
    }
    if (touch) return out.put(groups[0].to, codes, bytes);
    for (int g = 0; g < batch.n; ++g) out.put(groups[g].to, codes[g], groups[g].count * (kNvfp4Block / 2));
  }

  // Of each block, in the order of groups.  Four times blocks are folded and others brought into the place: by eights of
  // elements as they are loaded, the last time where they are.
  static __m512i largest_magnitudes(const T* const (&from)[kGroups]) {
    // twice the magnitude and so much more wraps around for NaN alone, to less than all numbers have
    const __m512i more = _mm512_set1_epi16(static_cast<int16_t>(0xffff - 2 * kInfinity));
    const auto rank = [&](__m512i v) { return _mm512_add_epi16(_mm512_add_epi16(v, v), more); };
    __m512i of_group[kGroups], halves[2];
    for (int g = 0; g < kGroups; ++g) {
      __m512i four[2];  // 128 bits of blocks 0, 2, 1 and 3
      for (int i = 0; i < 2; ++i) {
        const T* at = from[g] + 4 * kNvfp4Block * i;
        const __m512i x = _mm512_mask_loadu_epi64(_mm512_loadu_si512(at), 0xcc, at + 24);
        const __m512i y = _mm512_mask_loadu_epi64(_mm512_loadu_si512(at + 8), 0xcc, at + 32);
        four[i] = _mm512_max_epu16(rank(x), rank(y));
      }
      of_group[g] = _mm512_max_epu16(_mm512_maskz_unpacklo_epi64(0xff, four[0], four[1]),
                                     _mm512_maskz_unpackhi_epi64(0xff, four[0], four[1]));
    }
    for (int i = 0; i < 2; ++i) {
      const __m512 a = _mm512_castsi512_ps(of_group[2 * i]), b = _mm512_castsi512_ps(of_group[2 * i + 1]);
      const __m512i even = _mm512_castps_si512(_mm512_maskz_shuffle_ps(0xffff, a, b, 0x88));
      halves[i] = _mm512_max_epu16(even, _mm512_castps_si512(_mm512_maskz_shuffle_ps(0xffff, a, b, 0xdd)));
    }
    const __m512i lower = _mm512_max_epu16(halves[0], _mm512_maskz_srli_epi32(0xffff, halves[0], 16));
    const __m512i upper = _mm512_max_epu16(halves[1], _mm512_maskz_slli_epi32(0xffff, halves[1], 16));
    const __m512i all = _mm512_mask_blend_epi16(0xaaaaaaaa, lower, upper);
    static constexpr Order kOrder;
    const __m512i ranks = _mm512_maskz_permutexvar_epi16(~__mmask32{}, load_raw<__m512i>(kOrder.lanes), all);
    return _mm512_srli_epi16(_mm512_subs_epu16(ranks, more), 1);
  }

  // Where each block's largest is after that.
  struct Order {
    uint16_t lanes[kGroups * kBlocks];
    constexpr Order() : lanes() {
      for (int g = 0; g < kGroups; ++g) {
        for (int b = 0; b < kBlocks; ++b) {
          const int piece = (b & 1) * 2 + (b >> 1 & 1);  // 0, 2, 1, 3
          lanes[g * kBlocks + b] = static_cast<uint16_t>(2 * (4 * piece + (g & 1) * 2 + (b >> 2)) + (g >> 1));
        }
      }
    }
  };

  // What a table says of 32 scales.
  static __m512i look_up(const uint16_t (&table)[128], __m512i scales) {
    const auto part = [&](int first) { return load_raw<__m512i>(table + first); };
    const __m512i small = _mm512_permutex2var_epi16(part(0), scales, part(32));
    const __m512i large = _mm512_permutex2var_epi16(part(64), scales, part(96));
    return _mm512_mask_blend_epi16(_mm512_test_epi16_mask(scales, _mm512_set1_epi16(0x40)), small, large);
  }

  void encode(uint8_t (&codes)[kGroups][kCodeBytes], const Batch& batch) const {
    if (batch.slow) {
      for (int i = 0; i < kGroups * kBlocks; ++i) {
        const float scale = to_float(batch.scales[i]), r = scale == 0.0f ? 0.0f : 1.0f / (scale * global_);
        store_e2m1(codes[0] + i * (kNvfp4Block / 2), batch.from[i / kBlocks] + i % kBlocks * kNvfp4Block, r);
      }
      return;
    }
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    for (int g = 0; g < kGroups; ++g) {
      __m512i v[kBlocks / 2];  // bytes in 32 bits
      for (int i = 0; i < kBlocks / 2; ++i) {
        const int b = g * kBlocks + 2 * i;
        v[i] = encode_two(batch.from[g] + 2 * kNvfp4Block * i, batch.bases + b, stairs_[batch.tables[b]],
                          stairs_[batch.tables[b + 1]]);
      }
      const __m512i bytes = _mm512_packus_epi16(_mm512_packus_epi32(v[0], v[1]), _mm512_packus_epi32(v[2], v[3]));
      _mm512_store_si512(codes[g], _mm512_maskz_permutexvar_epi32(0xffff, order, bytes));
    }
  }

  static __m512i encode_two(const T* from, const uint32_t* bases, const uint16_t* stairs, const uint16_t* others) {
    const __m512i bits = _mm512_loadu_si512(from), magnitude = _mm512_and_si512(bits, _mm512_set1_epi16(0x7fff));
    const __mmask32 number = _mm512_cmple_epu16_mask(magnitude, _mm512_set1_epi16(kInfinity));
    const __m512i base =
        _mm512_mask_set1_epi32(_mm512_set1_epi32(static_cast<int>(bases[0])), 0xff00, static_cast<int>(bases[1]));
    const __m512i above = _mm512_maskz_subs_epu16(number, magnitude, base);
    const __m512i within = _mm512_min_epu16(above, _mm512_set1_epi16((32 << kPart) - 1));
    const __m512i place = _mm512_mask_add_epi16(_mm512_srli_epi16(within, kPart), 0xffff0000,
                                                _mm512_srli_epi16(within, kPart), _mm512_set1_epi16(32));
    const __m512i d = _mm512_permutex2var_epi16(load_raw<__m512i>(stairs), place, load_raw<__m512i>(others));
    const __m512i magnitudes = _mm512_srli_epi16(_mm512_add_epi16(within, d), kPart);
    // magnitude | sign: 0xf8 is a | b & c
    const __m512i codes =
        _mm512_ternarylogic_epi32(magnitudes, _mm512_srli_epi16(bits, 12), _mm512_set1_epi16(8), 0xf8);
    return _mm512_madd_epi16(codes, _mm512_set1_epi32(16 << 16 | 1));
  }

  float global_;
  Encoder<T, e4m3> scale_of_;
  uint16_t bases_[128], tables_of_[128];
  alignas(64) uint16_t stairs_[9][32];
  bool tables_;
};
#endif

}  // namespace pykv::PYKV_ISA
