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
  bool divide(e4m3*, const T*, int64_t, float, bool = false) const { return false; }
  bool divide_by_power_of_two(e4m3*, const T*, int64_t, float) const { return false; }
  bool divide_pairs_by_powers(e4m3*, const T*, int64_t, const uint32_t*, int64_t) const { return false; }
  template <bool>
  bool divide_tiles(e4m3*, const T*, int64_t, int64_t, const float*, int64_t) const {
    return false;
  }
};

#if defined(__AVX512BW__)
template <class Rule, int kLargest>
class TileEncoder<bf16, Rule, kLargest> {
 public:
  // For that many elements in all: few are not worth tables.
  explicit TileEncoder(int64_t elements) : tables_(elements >= kWorthTables ? &tables() : nullptr) {}

  // n codes by the scale `largest` / kLargest, `largest` a bf16 that no finite element exceeds and none is infinite; false
  // where tables cannot do it.  Inlined, since many tiles are small.
  [[gnu::always_inline]] bool divide(e4m3* to, const bf16* from, int64_t n, float largest, bool past = false) const {
    if (!(tables_ && largest > kLeast && largest < kMost)) return false;
    const uint32_t bits = __builtin_bit_cast(uint32_t, largest);
    tables_->encoders[bits >> 16 & 127].scaled(to, from, n, static_cast<int>(bits >> 23) - 127, past);
    return true;
  }
  bool divide_by_power_of_two(e4m3* to, const bf16* from, int64_t n, float scale) const {
    if (!(tables_ && scale > kLeast && scale < kMost)) return false;
    tables_->one.scaled(to, from, n, static_cast<int>(__builtin_bit_cast(uint32_t, scale) >> 23) - 127);
    return true;
  }
  // Of so many neighbouring tiles of kPair elements, which are finite, by scales with these exponents, as e8m0 has them.
  bool divide_pairs_by_powers(e4m3* to, const bf16* from, int64_t count, const uint32_t* exponents,
                              int64_t ahead) const {
    bool inside = tables_ != nullptr;
    for (int64_t i = 0; i < count; ++i) inside &= exponents[i] - 48u <= 158u;
    if (!inside) return false;
    tables_->one.scaled_pairs(to, from, count, exponents, ahead);
    return true;
  }
  // Of `count` neighbouring tiles of n elements, a multiple of 64, which are finite: by scales as `divide` has them, or (kPowers)
  // by powers of two.  Where codes are normal they take one line of tables each, and all of these lines are a quarter of a
  // first-level cache.
  template <bool kPowers>
  bool divide_tiles(e4m3* to, const bf16* from, int64_t n, int64_t count, const float* by, int64_t ahead) const {
    bool inside = tables_ && n % (2 * kPair) == 0;
    for (int64_t g = 0; g < count; ++g) inside &= by[g] > kLeast && by[g] < kMost;
    if (!inside) return false;
    for (int64_t g = 0; g < count; ++g, to += n, from += n) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, by[g]), mantissa = bits >> 16 & 127;
      const OfScale& encoder = kPowers ? tables_->one : tables_->encoders[mantissa];
      const int power = static_cast<int>(bits >> 23) - 127,
                least = (kPowers ? encoder.least_normal() : tables_->least) + power * 128;
      const auto all = [](int x) { return _mm512_set1_epi16(static_cast<int16_t>(x)); };
      const __m512i steps = kPowers ? encoder.normal() : load_raw<__m512i>(tables_->normal[mantissa]),
                    normal = _mm512_sub_epi16(steps, all(power * 128)), from_here = all(least > 0 ? least : 0);
      prefetch_bytes(from + ahead, n * static_cast<int64_t>(sizeof(bf16)));
      for (int64_t i = 0; i < n; i += 2 * kPair)
        if (!OfScale::store_normal(to + i, from + i, from_here, normal))
          encoder.scaled(to + i, from + i, 2 * kPair, power);
    }
    return true;
  }

 private:
  using OfScale = Encoder<bf16, e4m3, Rule>;
  static constexpr int64_t kWorthTables = 1 << 18;
  static constexpr float kLeast = 0x1p-80f, kMost = 0x1p80f;

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
