// nvfp4: four-bit floats (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) in blocks of 16, each with a scale of its
// own (e4m3), below a global scale g (float32, the k_scale, v_scale or scale of an op).
//
// Value: e2m1 * block scale * g.  Storing 16 elements x, all in float32:
//
//   a            = the largest |x|; NaN is not counted
//   block scale  = e4m3(a / (6 g)), to nearest even and at most 448, with the sign of g, NaN too; 0 if a is 0
//   r            = 1 / (block scale * g); 0 if the block scale is 0
//   code         = the sign of x, and e2m1(|x| r): to nearest, ties to the even code, at most 6; NaN becomes 0
//
// So infinities become the block's largest value, a block below g / 170 in magnitude becomes zeros, and one above 2688 g
// saturates.  Element 2j is the low half of byte j of its head's codes, element 2j + 1 the high half.
//
// "nvfp4_4over6" stores the same, but for blocks that e4m3(a / (4 g)) as block scale leads closer to: the sum of the squares
// of e2m1 * block scale * g - x is less.  Its largest elements become 4, where 6 has no neighbour nearer than that.
//
// A page (a block of the cache, one of K and V) is
//
//   [ codes: head_size / 2 bytes a token and head | scales: S = head_size / 16 bytes a token and head ]
//
// with tokens and heads of both parts in one order, NHD or HND.  Of keys, and of MLA's entries, scale s of token t lies at column s of
// row t.  Of values the scales of four neighbouring tokens of a head are swizzled, as tensor cores of later chips want them: scale s
// of token t lies at column (s % (S / 4)) * 4 + t % 4 of row (t / 4) * 4 + s / (S / 4).
#pragma once

#include <cstdint>

#include "core/launch.h"

namespace pykv {

inline constexpr int kNvfp4Block = 16;         // elements that share a scale
inline constexpr int kNvfp4HeadMultiple = 64;  // S must be a multiple of 4, of keys too
inline constexpr int kNvfp4TokenGroup = 4;     // and so must the tokens of a page
inline constexpr float kNvfp4Largest = 6.0f;
inline constexpr float kNvfp4Second = 4.0f;  // the largest magnitude but that one

// Bytes of `elements`, codes and scales.
constexpr int64_t nvfp4_bytes(int64_t elements) { return elements / 2 + elements / kNvfp4Block; }

// Where a page keeps things: distances in bytes from its beginning.  Inlined by force: the CPU twins compile it for
// several instruction sets, and it must not become a symbol that they share.
struct Nvfp4Page {
  int64_t codes_token, codes_head;
  int64_t scales, scales_token, scales_head;  // the first one, and from row to row
  int32_t quarter;                            // S / 4 where scales are swizzled, else 0

  // The codes of elements `first` (a multiple of 16) and following.
  PYKV_HOST_DEVICE __attribute__((always_inline)) constexpr int64_t codes_at(int64_t token, int64_t head,
                                                                             int64_t first) const {
    return token * codes_token + head * codes_head + first / 2;
  }
  // The scale of block `s` of a head.
  PYKV_HOST_DEVICE __attribute__((always_inline)) constexpr int64_t scale_at(int64_t token, int64_t head,
                                                                             int32_t s) const {
    if (quarter == 0) return scales + token * scales_token + head * scales_head + s;
    const int32_t row = (s >= quarter) + (s >= 2 * quarter) + (s >= 3 * quarter);  // s / quarter, without a division
    return scales + (token / 4 * 4 + row) * scales_token + head * scales_head + (s - row * quarter) * 4 + token % 4;
  }
};

// For head sizes that are a multiple of 64 and block sizes that are a multiple of 4.
constexpr Nvfp4Page nvfp4_page(int64_t block_size, int64_t heads, int64_t head_size, bool heads_first, bool swizzled) {
  const int64_t codes = head_size / 2, scales = head_size / kNvfp4Block, at = block_size * heads * codes;
  const int32_t quarter = swizzled ? static_cast<int32_t>(scales / 4) : 0;
  return heads_first ? Nvfp4Page{codes, block_size * codes, at, scales, block_size * scales, quarter}
                     : Nvfp4Page{heads * codes, codes, at, heads * scales, scales, quarter};
}
static_assert(nvfp4_page(16, 8, 128, false, true).scale_at(6, 1, 3) == 16 * 8 * 64 + (4 + 1) * 64 + 8 + 4 + 2);
static_assert(nvfp4_page(16, 8, 128, false, false).scale_at(6, 1, 3) == 16 * 8 * 64 + 6 * 64 + 8 + 3);
static_assert(nvfp4_page(16, 8, 128, true, true).codes_at(6, 1, 32) == 64 * (16 + 6) + 16);

}  // namespace pykv
