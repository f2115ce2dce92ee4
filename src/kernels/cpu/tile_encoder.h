// Codes of tiles that have scales of their own: the largest magnitude in it through a constant, or a power of two.
//
// Such scales differ by a power of two where magnitudes do, so that the tables of cpu/encode.h for the 128 magnitudes of a
// binade of bf16 are those for all.
#pragma once

#include <vector>

#include "cpu/encode.h"
#include "cpu/prefetch.h"

namespace pykv::PYKV_ISA {

template <class T, class Rule, int kLargest>
class TileEncoder {
 public:
  explicit TileEncoder(int64_t) {}
  bool divides(float) const { return false; }
  bool divide(e4m3*, const T*, int64_t, float, bool = false) const { return false; }
  bool divide_by_power_of_two(e4m3*, const T*, int64_t, float) const { return false; }
  bool divide_pairs_by_powers(e4m3*, const T*, int64_t, const uint32_t*, int64_t, bool) const { return false; }
  template <bool>
  bool divide_tiles(e4m3*, const T*, int64_t, int64_t, const float*, int64_t, bool) const {
    return false;
  }
};

#if defined(__AVX512BW__)
template <class Rule, int kLargest>
class TileEncoder<bf16, Rule, kLargest> {
 public:
  // For that many elements in all: few are not worth tables.
  explicit TileEncoder(int64_t elements) : tables_(elements >= kWorthTables ? &tables() : nullptr) {}

  // Whether `divide` does it by this largest magnitude.
  bool divides(float largest) const { return tables_ && largest > kLeast && largest < kMost; }

  // n codes by the scale `largest` / kLargest, `largest` a bf16 that no finite element exceeds and none is infinite; false
  // where tables cannot do it.  Inlined, since many tiles are small.
  [[gnu::always_inline]] bool divide(e4m3* to, const bf16* from, int64_t n, float largest, bool past = false) const {
    if (!divides(largest)) return false;
    const uint32_t bits = __builtin_bit_cast(uint32_t, largest), mantissa = bits >> 16 & 127;
    const int shift = (static_cast<int>(bits >> 23) - 127) * kBinade, least = tables_->least + shift;
    const int64_t whole = n / (2 * kPair) * (2 * kPair);
    const OfScale& encoder = tables_->encoders[mantissa];
    encode(to, from, whole, encoder, load_raw<__m512i>(tables_->normal[mantissa]), static_cast<uint16_t>(shift),
           static_cast<uint16_t>(least > 0 ? least : 0), past, [](const bf16*) {});
    if (whole < n) encoder.scaled(to + whole, from + whole, n - whole, shift / kBinade, past);
    return true;
  }
  bool divide_by_power_of_two(e4m3* to, const bf16* from, int64_t n, float scale) const {
    if (!(tables_ && scale > kLeast && scale < kMost)) return false;
    tables_->one.scaled(to, from, n, static_cast<int>(__builtin_bit_cast(uint32_t, scale) >> 23) - 127);
    return true;
  }
  // Of so many neighbouring tiles of kPair elements, which are finite, by scales with these exponents, as e8m0 has them.
  bool divide_pairs_by_powers(e4m3* to, const bf16* from, int64_t count, const uint32_t* exponents, int64_t ahead,
                              bool past) const {
    bool inside = tables_ != nullptr;
    for (int64_t i = 0; i < count; ++i) inside &= exponents[i] - 48u <= 158u;
    if (!inside) return false;
    tables_->one.scaled_pairs(to, from, count, exponents, ahead, past);
    return true;
  }
  // Of `count` neighbouring tiles of n elements, a multiple of 64, which are finite: by scales as `divide` has them, or (kPowers)
  // by powers of two.  Where codes are normal they take one line of tables each, and all of these lines are a quarter of a
  // first-level cache.
  template <bool kPowers>
  bool divide_tiles(e4m3* to, const bf16* from, int64_t n, int64_t count, const float* by, int64_t ahead,
                    bool past) const {
    const Words bits = load_raw<Words>(by), exponent = bits >> 23;
    const __mmask16 these = _bzhi_u32(0xffff, static_cast<uint32_t>(count));
    const __mmask16 least_so = _mm512_cmp_ps_mask(load(by), splat(kLeast), _CMP_GT_OQ);
    const __mmask16 inside = _mm512_mask_cmp_ps_mask(least_so, load(by), splat(kMost), _CMP_LT_OQ);
    if (!tables_ || n % (2 * kPair) != 0 || (these & ~inside) != 0) return false;
    const Words shift = (exponent - 127u) * uint32_t{kBinade};
    const Words from_here = shift + static_cast<uint32_t>(kPowers ? tables_->one.least_normal() : tables_->least);
    uint16_t shifts[kWidth], least[kWidth];
    uint32_t mantissas[kWidth];
    store_raw(shifts, narrow_to_halfwords(shift), false);
    store_raw(least, narrow_to_halfwords(from_here < 0x8000u ? from_here : Words{}), false);
    store_raw(mantissas, bits >> 16 & 127u, false);
    for (int64_t g = 0; g < count; ++g, to += n, from += n) {
      const OfScale& encoder = kPowers ? tables_->one : tables_->encoders[mantissas[g]];
      encode(to, from, n, encoder, kPowers ? encoder.normal() : load_raw<__m512i>(tables_->normal[mantissas[g]]),
             shifts[g], least[g], past, [=](const bf16* at) { prefetch_bytes(at + ahead, 2 * kPair * sizeof(bf16)); });
    }
    return true;
  }

 private:
  using OfScale = Encoder<bf16, e4m3, Rule>;
  static constexpr int64_t kWorthTables = 1 << 18;
  static constexpr float kLeast = 0x1p-80f, kMost = 0x1p80f;
  static constexpr int kBinade = 128;  // bits of bf16

  // n codes, a multiple of 64, of numbers in the encoder's binade times 2^(shift / kBinade); from the bits `least` on they are
  // normal.  ask(at) before each 64.
  template <class Ask>
  [[gnu::always_inline]] static void encode(e4m3* to, const bf16* from, int64_t n, const OfScale& encoder,
                                            __m512i steps, uint16_t shift, uint16_t least, bool past, Ask ask) {
    const auto all = [](uint16_t x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); };
    const __m512i normal = _mm512_sub_epi16(steps, all(shift)), here = all(least);
    for (int64_t i = 0; i < n; i += 2 * kPair) {
      ask(from + i);
      if (!OfScale::store_normal(to + i, from + i, here, normal, past))
        encode_rare(to + i, from + i, encoder, shift, past);
    }
  }
  // 64 codes that are not all normal; out of line, so that what they need is not made for all others.
  [[gnu::noinline, gnu::cold]] static void encode_rare(e4m3* to, const bf16* from, const OfScale& encoder,
                                                       uint16_t shift, bool past) {
    encoder.scaled(to, from, 2 * kPair, static_cast<int16_t>(shift) / kBinade, past);
  }

  struct Tables {
    OfScale one{1.0f, kWorthTables};
    std::vector<OfScale> encoders;
    alignas(64) uint16_t normal[128][kPair];
    int least = 0;  // of all encoders
    Tables() {
      for (uint32_t i = 0; i < 128; ++i) {
        encoders.emplace_back(to_float(bf16{static_cast<uint16_t>(0x3f80 + i)}) / kLargest, kWorthTables);
        store_raw(normal[i], encoders[i].normal(), false);
        least = std::max(least, encoders[i].least_normal());
      }
    }
  };
  // Made once, in a third of a millisecond.
  static const Tables& tables() {
    static const Tables tables;
    return tables;
  }

  const Tables* tables_;
};
#endif

}  // namespace pykv::PYKV_ISA
