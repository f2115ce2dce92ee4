// Decoding proper: which kernel takes a call.
#pragma once

#include "attention/paged_attention_either.cuh"
#include "attention/paged_attention_fold.cuh"

namespace pykv::attention {

// Whether four warps together can take the calls of a line.
template <class Line>
constexpr bool kMayPreferWarpgroups = !Line::kInvariant && !Line::kPackedV && !Line::kNvfp4;

// Whether two KV heads may be taken as one.
template <class Line>
constexpr bool kMayFold = kMayPreferWarpgroups<Line> && !kIsRare<typename Line::Element> && Line::kD == 64;

// Two KV heads as one in clusters.  False if the call is not for them.
template <class Element, int kQueries>
bool launch_folded_cluster(const Problem& p, const Launch& launch) {
  using Cluster = Folded<ClusterShape<Element, 128, kQueries, false, false>>;
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

// ... in clusters or on the line.
template <class Element>
bool launch_folded_either(const Problem& given, const Launch& launch) {
  if (given.a.head_size <= 32 || given.group > 4 || !can_fold(given)) return false;
  using Usual = Folded<ClusterShape<Element, 128, 8, false, false>>;
  using Wide = Folded<ClusterShape<Element, 128, 8, true, false>>;
  return launch_either<Usual, Wide, Folded<DecodeShape<Element, 128, false, 8, false>>>(fold(given), launch);
}

// ... on the line.
template <class Element, int kQueries>
bool launch_folded_line(const Problem& p, const Launch& launch) {
  using Line = Folded<DecodeShape<Element, 128, false, kQueries, false>>;
  using Single = Folded<DecodeShape<Element, 128, false, kQueries, false, false, true>>;
  constexpr int64_t kMany = 1024;  // keys; the ends of fewer are dearer
  return suits_decode<Line>(p) && most_keys<Line>(p) >= kMany && launch_decode_line<Line, Single>(p, launch);
}

template <class Element>
bool launch_folded_line(const Problem& given, const Launch& launch) {
  if (given.a.head_size <= 32 || given.group > 8 || !can_fold(given)) return false;
  const Problem p = fold(given);
  return p.group > 8 ? launch_folded_line<Element, 16>(p, launch) : launch_folded_line<Element, 8>(p, launch);
}

// Four warps together are quicker for many heads in a group and, over elements of one byte, for sizes of heads between those of
// tiles, and for pairs of heads of 64 that have nine to sixteen columns.
template <class Line, int kQueries>
bool prefers_warpgroups(const Problem& p, int device) {
  constexpr bool kMany = kQueries == 16;
  if constexpr (Line::kNarrow) {
    const bool wanted = Line::kD == 64    ? kQueries == 8 && p.group > 4 && can_pair_codes(p)
                        : Line::kD == 128 ? kMany || p.a.head_size < Line::kD
                                          : false;
    return wanted && fills_warpgroups(p, device);
  } else {
    constexpr bool kMaySuit = Line::kD == 128 ? kMany : Line::kD == 64 && kQueries == 8;
    const bool wanted = kMany || (p.group > 4 && fills_warpgroups(p, device));
    return kMaySuit && wanted && p.sees_all() && may_use_warpgroups(p.a, RowClass::kFew, device);
  }
}

// Few sequences over rows of tokens, by clusters or by a kernel that can be these.
template <class Element, int kD, int kQueries, bool kForAnyBatch>
bool launch_decode_clusters(Problem p, const Launch& launch) {
  using Line = DecodeShape<Element, kD, false, kQueries, kForAnyBatch>;
  if constexpr (!kForAnyBatch || kQueries == 8) {  // the records of more queries find no room
    using Usual = ClusterShape<Element, kD, kQueries, false, kForAnyBatch>;
    ClusterSize size = cluster_size<Usual>(p, launch);
    if (kForAnyBatch && size.blocks == 0) {  // the line comes after them, and the device says which takes the call
      p.lengths = Lengths::kForClusters;
      size = cluster_size<Usual>(p, launch);
    }
    if constexpr (!kForAnyBatch && !kIsRare<Element>) {
      using Hiding = Windowed<Usual>;
      if (has_short_window(p)) return launch_cluster_kernel<Hiding>(p, cluster_size<Hiding>(p, launch), launch);
    }
    if (p.sees_all()) {  // else clusters of paged_attention_tokens.cuh may take it
      if constexpr (kMayFold<Line>) {
        if (launch_folded_either<Element>(p, launch) || launch_folded_cluster<Element>(p, launch)) return true;
      }
      if constexpr (!kForAnyBatch && !kIsRare<Element> && kQueries <= 8 && kD >= 128) {
        // Of one byte of heads of 256 more warps would have a tile less each under way.
        using Wide = ClusterShape<Element, kD, kQueries, kD == 128 || !Line::kNarrow, false>;
        if (size.spans == 1 && launch_either<Usual, Wide, Line>(p, launch)) return true;
        if constexpr (Line::kHeads > 1 && Line::kNarrow) {  // nvfp4 is taken head by head there
          using Single = DecodeShape<Element, kD, false, kQueries, false, false, true>;
          const bool is_odd = p.a.num_kv_heads % Line::kHeads != 0;
          if (is_odd && size.spans == 1 && launch_either<Usual, Wide, Single>(p, launch)) return true;
        }
      }
      if constexpr (kD == 128 && kQueries <= 8) {
        using Wide = ClusterShape<Element, kD, kQueries, true, kForAnyBatch>;
        const ClusterSize wide = wide_size<Wide>(p, size, launch);
        if (wide.blocks > 0 && launch_cluster_kernel<Wide>(p, wide, launch)) return true;
      }
      if (launch_cluster_kernel<Usual>(p, size, launch)) return true;
    }
  }
  return false;
}

// Decoding proper in one way or the other.
template <class Element, int kD, bool kPackedV, int kQueries, bool kForAnyBatch>
bool launch_decode_way(const Problem& p, const Launch& launch) {
  using Line = DecodeShape<Element, kD, kPackedV, kQueries, kForAnyBatch>;
  if (!suits_decode<Line>(p)) return false;
  if constexpr (!kPackedV) {
    const bool may_be_short = p.lengths == Lengths::kAny;
    if (may_be_short && launch_decode_clusters<Element, kD, kQueries, kForAnyBatch>(p, launch)) return true;
  }
  if (kMayPreferWarpgroups<Line> && prefers_warpgroups<Line, kQueries>(p, launch.device)) return false;
  if constexpr (kMayFold<Line> && kQueries == 8) {
    if (launch_folded_line<Element>(p, launch)) return true;
  }
  if constexpr (kForAnyBatch && kQueries == 8 && Line::kNarrow && Line::kBlocksPerSm == 3) {
    // Long sequences keep more bytes under way, if their elements are widened quickly.  So do four short segments for each SM,
    // of which two blocks have two whole ones each, where three would cut them.
    constexpr int64_t kShort = 1024;  // tokens
    constexpr bool kIsQuick = !std::is_same_v<Element, Element8<KvFormat::kInt8>>;
    const int64_t segments = p.a.num_seqs * p.a.num_kv_heads, sms = num_sms(launch.device);
    using Deep = DecodeShape<Element, kD, kPackedV, kQueries, true, true>;
    if ((kIsQuick && p.a.max_seq_len > kShort) || (segments > 3 * sms && segments <= 4 * sms)) {
      return launch_decode_kernel<Deep>(p, launch);
    }
  }
  using Single = DecodeShape<Element, kD, kPackedV, kQueries, kForAnyBatch, false, true>;
  return launch_decode_line<Line, Single>(p, launch);
}

template <class Element, int kD, bool kPackedV, int kQueries>
bool launch_decode_shape(const Problem& p, const Launch& launch) {
  if constexpr (!std::is_same_v<Element, ElementNvfp4>) {
    if (p.a.batch_invariant) return launch_decode_way<Element, kD, kPackedV, kQueries, true>(p, launch);
  }
  return !p.a.batch_invariant && launch_decode_way<Element, kD, kPackedV, kQueries, false>(p, launch);
}

template <class Element>
bool launch_decode(const Problem& p, const Launch& launch) {
  bool done = false;
  dispatch_bool(p.a.value.dim != 1, [&]<bool kPackedV> {
    if constexpr (kPackedV && std::is_same_v<Element, ElementNvfp4>) {
      return;  // there is no such layout
    } else if (p.a.head_size > 128) {
      done = launch_decode_shape<Element, 256, kPackedV, 8>(p, launch);
    } else {
      dispatch_bool(p.a.head_size > 64, [&]<bool kLarge> {
        constexpr int kD = kLarge ? 128 : 64;
        done = p.group <= 8 ? launch_decode_shape<Element, kD, kPackedV, 8>(p, launch)
                            : launch_decode_shape<Element, kD, kPackedV, 16>(p, launch);
      });
    }
  });
  return done;
}

}  // namespace pykv::attention
