// Codes of tiles that have scales of their own: the largest magnitude in it through a constant, or a power of two.
//
// Such scales differ by a power of two where magnitudes do, so that the tables of cpu/encode.h for the 128 magnitudes of a
// binade of bf16 are those for all.
#pragma once

#include <vector>

#include "cpu/encode.h"

namespace pykv::PYKV_ISA {

template <class T, class Rule, int kLargest>
class TileEncoder {
 public:
  explicit TileEncoder(int64_t) {}
  bool divide(e4m3*, const T*, int64_t, float, bool = false) const { return false; }
  bool divide_by_power_of_two(e4m3*, const T*, int64_t, float) const { return false; }
  bool divide_pairs_by_powers(e4m3*, const T*, int64_t, const uint32_t*) const { return false; }
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
    return tables_->encoders[bits >> 16 & 127].scaled(to, from, n, static_cast<int>(bits >> 23) - 127, past);
  }
  bool divide_by_power_of_two(e4m3* to, const bf16* from, int64_t n, float scale) const {
    if (!(tables_ && scale > kLeast && scale < kMost)) return false;
    return tables_->one.scaled(to, from, n, static_cast<int>(__builtin_bit_cast(uint32_t, scale) >> 23) - 127);
  }
  // Of so many neighbouring tiles of kPair elements, which are finite, by scales with these exponents, as e8m0 has them.
  bool divide_pairs_by_powers(e4m3* to, const bf16* from, int64_t count, const uint32_t* exponents) const {
    if (!tables_) return false;
    for (int64_t i = 0; i < count; ++i)
      if (exponents[i] - 48u > 158u) return false;
    tables_->one.scaled_pairs(to, from, count, exponents);
    return true;
  }

 private:
  using OfScale = Encoder<bf16, e4m3, Rule>;
  static constexpr int64_t kWorthTables = 1 << 18;
  static constexpr float kLeast = 0x1p-80f, kMost = 0x1p80f;

  struct Tables {
    OfScale one{1.0f, kWorthTables};
    std::vector<OfScale> encoders;
    Tables() {
      for (uint32_t i = 0; i < 128; ++i)
        encoders.emplace_back(to_float(bf16{static_cast<uint16_t>(0x3f80 + i)}) / kLargest, kWorthTables);
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
