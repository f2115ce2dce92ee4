// One query token of each sequence: from a Step to its instance.
#pragma once

#include "attention/cuda/decode/either.cuh"
#include "attention/cuda/decode/invariant_cluster.cuh"
#include "attention/cuda/decode/shape.cuh"

namespace pykv::attention {

// Two KV heads as one, of up to 64 dimensions each.
template <class Element, int kQueries>
void launch_folded(const Problem& p, const Step& s, const Launch& launch) {
  using Line = SeesAll<Folded<DecodeShape<Element, 128, false, kQueries, false>>>;
  using Single = SeesAll<Folded<DecodeShape<Element, 128, false, kQueries, false, true>>>;
  if constexpr (kQueries == 8) {
    using Usual = Folded<ClusterShape<Element, 128, kQueries, false, false>>;
    using Wide = Folded<ClusterShape<Element, 128, kQueries, true, false>>;
    if (s.instance.kernel == KernelId::kFoldedEither) return launch_either<Usual, Wide, Line>(p, s, launch);
  }
  launch_lines<Line, Single>(p, s, launch);
}

// Few sequences over rows of tokens, by clusters or by a kernel that can be these.
template <class Element, int kD, int kQueries>
void launch_decode_clusters(const Problem& p, const Step& s, const Launch& launch) {
  using Usual = ClusterShape<Element, kD, kQueries, false, false>;
  if constexpr (kQueries <= 8) {
    if (s.instance.kernel == KernelId::kWindowCluster) return launch_clusters<Windowed<Usual>>(p, s, launch);
  }
  if constexpr (kQueries <= 8 && kD >= 128) {
    using Line = DecodeShape<Element, kD, false, kQueries, false>;
    // Of one byte of heads of 256 more warps would have a tile less each under way.
    using Wide = ClusterShape<Element, kD, kQueries, kD == 128 || !Line::kNarrow, false>;
    if (s.instance.kernel == KernelId::kDecodeEither) {
      if constexpr (Line::kHeads > 1) {
        using Single = DecodeShape<Element, kD, false, kQueries, false, true>;
        if (s.instance.single) return launch_either<Usual, Wide, Single>(p, s, launch);
      }
      return launch_either<Usual, Wide, Line>(p, s, launch);
    }
  }
  if constexpr (kD == 128 && kQueries <= 8) {
    if (s.instance.wide) return launch_clusters<ClusterShape<Element, kD, kQueries, true, false>>(p, s, launch);
  }
  launch_clusters<Usual>(p, s, launch);
}

// With batch_invariant, up to eight heads in a group.
template <class Element, int kD>
void launch_decode_invariant(const Problem& p, const Step& s, const Launch& launch) {
  using Line = DecodeShape<Element, kD, false, 8, true>;
  if (s.instance.kernel == KernelId::kInvariantLine) return launch_line<Line>(p, s, launch);
  launch_invariant_clusters<ClusterShape<Element, kD, 8, false, true>>(p, s, launch);
}

template <class Element, int kD, bool kPackedV, int kQueries>
void launch_decode_shape(const Problem& p, const Step& s, const Launch& launch) {
  if constexpr (kIsCommon<Element> && !kPackedV) {
    if constexpr (kQueries == 8) {
      if (p.a.batch_invariant) return launch_decode_invariant<Element, kD>(p, s, launch);
    }
    if (s.instance.kernel != KernelId::kDecodeLine) return launch_decode_clusters<Element, kD, kQueries>(p, s, launch);
  } else if constexpr (!kPackedV && has_cluster(kKindOf<Element>, kD, kQueries)) {
    if (s.instance.kernel == KernelId::kDecodeCluster)
      return launch_clusters<ClusterShape<Element, kD, kQueries, false, false>>(p, s, launch);
  }
  using Line = DecodeShape<Element, kD, kPackedV, kQueries, false>;
  using Single = DecodeShape<Element, kD, kPackedV, kQueries, false, true>;
  launch_lines<Line, Single>(p, s, launch);
}

template <class Element>
void launch_decode(const Problem& p, const Step& s, const Launch& launch) {
  const Instance& of = s.instance;
  if constexpr (kIsCommon<Element>) {
    if (of.folded)
      return of.rows > 8 ? launch_folded<Element, 16>(p, s, launch) : launch_folded<Element, 8>(p, s, launch);
    if (of.packed) {
      return of.head_size > 64 ? launch_decode_shape<Element, 128, true, 8>(p, s, launch)
                               : launch_decode_shape<Element, 64, true, 8>(p, s, launch);
    }
  }
  if (of.head_size > 128) return launch_decode_shape<Element, 256, false, 8>(p, s, launch);
  dispatch_bool(of.head_size > 64, [&]<bool kLarge> {
    dispatch_bool(of.rows > 8, [&]<bool kMany> {
      launch_decode_shape<Element, kLarge ? 128 : 64, false, kMany ? 16 : 8>(p, s, launch);
    });
  });
}

}  // namespace pykv::attention
