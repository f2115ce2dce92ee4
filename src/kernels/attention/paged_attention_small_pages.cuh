// Decoding over pages that are no whole groups of eight tokens, such as those of one: each token's page is looked up, by the lane
// of its place in a tile.  Short calls take clusters of paged_attention_tokens.cuh; here is the line.
#pragma once

#include "attention/paged_attention_decode_line.cuh"

namespace pykv::attention {

template <class Shape>
struct SmallPages : Shape {
  static constexpr bool kByToken = true;
};

// Heads up to 128 in rows of tokens, up to eight in a group.
template <class Element, int kD>
void launch_small_pages(const Problem& p, const Step& s, const Launch& launch) {
  using Line = SmallPages<DecodeShape<Element, kD, false, 8, false>>;
  using Single = SmallPages<DecodeShape<Element, kD, false, 8, false, false, true>>;
  launch_lines<Line, Single>(p, s, launch);
}

}  // namespace pykv::attention
