// Pages of nvfp4 (core/nvfp4.h) as rows that the loops of CPU attention can work on.
//
// Code times block scale is exact in bf16 and in float; the scale of the head is left to the softmax and to the end of a
// row.  Bound by arithmetic: some ten instructions for sixteen elements.
#pragma once

#include <array>

#include "attention/cpu/tile.h"
#include "cpu/nvfp4_decode.h"

namespace pykv::PYKV_ISA::attention {

// A byte with the codes of two elements.
struct Nvfp4 {
  uint8_t bits;
};

// A float that the type holds exactly.
inline void store_exact(float* to, Floats v) { store(to, v); }
inline void store_exact(bf16* to, Floats v) {
  const Halfwords halves = narrow_to_halfwords(__builtin_bit_cast(Words, v) >> 16);
  __builtin_memcpy(to, &halves, sizeof(halves));
}

// One side's pages, for one KV head.
class Nvfp4Rows {
 public:
  Nvfp4Rows(const Nvfp4Page& page, int kv_head, int size) : page_(page), head_(kv_head), size_(size) {
    for (int s = 0; s < size / kNvfp4Block; ++s)
      scale_offsets_[s] = page.scale_at(0, kv_head, s) - page.scale_at(0, kv_head, 0);
  }

  template <class Wide>
  void widen(const uint8_t* page, int slot, Wide* to) const {
    const uint8_t* scales = page + page_.scale_at(slot, head_, 0);
    const uint8_t* codes = page + page_.codes_at(slot, head_, 0);
    for (int s = 0; s < size_ / kNvfp4Block; ++s, codes += kNvfp4Block / 2) {
      const float scale = scale_of_[scales[scale_offsets_[s]]];
      const Half packed = load_raw<Half>(codes);
      const Half low = packed & 15, high = packed >> 4;
      const Block apart = __builtin_shufflevector(low, high, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
      uint8_t bytes[kNvfp4Block];
      __builtin_memcpy(bytes, &apart, sizeof bytes);
      for (int i = 0; i < kNvfp4Block; i += kWidth) store_exact(to + s * kNvfp4Block + i, load_e2m1(bytes + i) * scale);
    }
  }

 private:
  using Half = uint8_t __attribute__((vector_size(kNvfp4Block / 2)));
  using Block = uint8_t __attribute__((vector_size(kNvfp4Block)));
  static constexpr int kMaxBlocks = 1024 / kNvfp4Block;

  static const float* all_scales() {
    static const auto values = [] {
      std::array<float, 256> v;
      for (int i = 0; i < 256; ++i) v[i] = to_float(e4m3{static_cast<uint8_t>(i)});
      return v;
    }();
    return values.data();
  }

  const float* const scale_of_ = all_scales();  // of each code: a vector's worth of them lie too far apart to be loaded
  const Nvfp4Page& page_;
  int head_, size_;
  int64_t scale_offsets_[kMaxBlocks];
};

}  // namespace pykv::PYKV_ISA::attention
