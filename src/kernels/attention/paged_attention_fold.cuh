// Two KV heads that lie side by side, taken as one of twice the size, where one alone would fill half a tile.
//
// Their queries are the columns of one tile, and each is zero in the other head's dimensions: scores are right, and of the sums
// a column's own head is half, the rest is left out.  So there are half as many tiles, whose rows are longer pieces of memory,
// and for elements that are to be widened half the softmax of a byte.  The products are twice as many, for which there is time.
//
// Zero times what is no number is none, either: sums that are not finite are made again head by head (DecodeLoader::separate).
#pragma once

#include "attention/paged_attention_cluster.cuh"

namespace pykv::attention {

template <class Shape>
struct Folded : Shape {
  static constexpr bool kFolded = true;
};

// Do they lie so, in rows of tokens, and are they enough for clusters on half the device?
inline bool can_fold(const Problem& p) {
  const PagedAttentionArgs& a = p.a;
  constexpr int64_t kEnough = 16;
  const bool in_rows = a.value.dim == 1 && a.key.chunk >= a.head_size;
  return in_rows && a.key.head == a.head_size && a.value.head == a.head_size && a.num_kv_heads % 2 == 0 &&
         a.num_seqs * a.num_kv_heads >= kEnough && !p.sparse;
}

// The same call with half as many heads.  Its head size stays that of a head.
inline Problem fold(Problem p) {
  p.a.num_kv_heads /= 2;
  p.a.key.head *= 2;
  p.a.value.head *= 2;
  p.group *= 2;
  return p;
}

// In clusters of paged_attention_cluster.cuh.  False if the call is not for them.
template <class Element, int kQueries>
bool launch_folded_cluster(const Problem& p, const Launch& launch) {
  using Cluster = Folded<ClusterShape<Element, 128, false, kQueries, false, false>>;
  constexpr int64_t kFew = 2048;  // keys, for which 16 columns are no quicker than 8 of a head each
  if (kQueries > 8 && most_keys<Cluster>(p) <= kFew) return false;
  return launch_cluster_kernel<Cluster>(p, cluster_size<Cluster>(p, launch), launch);
}

template <class Element>
bool launch_folded_cluster(const Problem& given, const Launch& launch) {
  if (given.a.head_size <= 32 || given.group > 8 || !can_fold(given)) return false;
  const Problem p = fold(given);
  return p.group > 8 ? launch_folded_cluster<Element, 16>(p, launch) : launch_folded_cluster<Element, 8>(p, launch);
}

// On the line, as heads of up to kD: 128 or, of elements of 16 bits, 256.
template <class Element, int kD, int kQueries>
bool launch_folded_line(const Problem& p, const Launch& launch) {
  using Line = Folded<DecodeShape<Element, kD, false, kQueries, false>>;
  constexpr int64_t kMany = 1024;  // keys; the ends of fewer are dearer
  if (!suits_decode<Line>(p) || most_keys<Line>(p) < kMany) return false;
  return launch_decode_line<Line, Folded<DecodeShape<Element, kD, false, kQueries, false, false, true>>>(p, launch);
}

template <class Element, int kD>
bool launch_folded_line(const Problem& given, const Launch& launch) {
  const int size = given.a.head_size;
  if (size <= kD / 4 || size > kD / 2 || size == 128 || given.group > 8 || !can_fold(given)) return false;
  const Problem p = fold(given);
  if constexpr (kD == 128) {
    if (p.group > 8) return launch_folded_line<Element, kD, 16>(p, launch);
  }
  return launch_folded_line<Element, kD, 8>(p, launch);
}

}  // namespace pykv::attention
