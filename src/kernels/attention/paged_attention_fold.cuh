// Two KV heads of up to 64 dimensions that lie side by side, taken as one of up to 128, where one alone would fill half a tile.
//
// In decoding proper their queries are the columns of one tile, and each is zero in the other head's dimensions: scores are right,
// and of the sums a column's own head is half, the rest is left out.  So there are half as many tiles, whose rows are longer pieces
// of memory, and for elements that are to be widened half the softmax of a byte.  The products are twice as many, for which there
// is time.
//
// Zero times what is no number is none, either: sums that are not finite are made again head by head (DecodeLoader::separate).
//
// With several tokens over elements of one byte each head has products of its own, without zeros:
// paged_attention_warpgroup_codes.cuh.
#pragma once

#include <algorithm>

#include "attention/paged_attention_problem.cuh"

namespace pykv::attention {

template <class Shape>
struct Folded : Shape {
  static constexpr bool kFolded = true;
};

// The same call with half as many heads.  Its head size stays that of a head.
inline Problem fold(Problem p) {
  p.a.num_kv_heads /= 2;
  p.a.key.head *= 2;
  p.a.value.head *= 2;
  p.group *= 2;
  p.min_rows *= 2;
  p.max_rows = std::min(p.max_rows, 1 << 29) * 2;
  return p;
}

}  // namespace pykv::attention
