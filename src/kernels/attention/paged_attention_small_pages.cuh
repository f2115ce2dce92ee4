// Decoding over pages that are no whole groups of eight tokens, such as those of one: each token's page is looked up, by the lane
// of its place in a tile.  Short calls take clusters of paged_attention_tokens.cuh; here is the line.
#pragma once

#include "attention/paged_attention_decode_line.cuh"

namespace pykv::attention {

template <class Shape>
struct SmallPages : Shape {
  static constexpr bool kByToken = true;
};

template <class Element, int kD>
bool launch_small_pages(const Problem& p, const Launch& launch) {
  using Line = SmallPages<DecodeShape<Element, kD, false, 8, false>>;
  using Single = SmallPages<DecodeShape<Element, kD, false, 8, false, false, true>>;
  return suits_decode<Line>(p) && launch_decode_line<Line, Single>(p, launch);
}

// Heads up to 128 in rows of tokens, up to eight in a group.
template <class Element>
bool launch_small_pages(const Problem& p, const Launch& launch) {
  if (p.a.batch_invariant || p.a.head_size > 128) return false;
  return p.a.head_size <= 64 ? launch_small_pages<Element, 64>(p, launch) : launch_small_pages<Element, 128>(p, launch);
}

}  // namespace pykv::attention
