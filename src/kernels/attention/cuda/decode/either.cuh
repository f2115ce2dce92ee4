// Decoding of few sequences whose block tables have room for long ones (problem.cuh): one kernel that can be
// clusters (decode/cluster.cuh) or the line (decode/line.cuh).  Of several query tokens, or many heads in a
// group, the same is in decode/tokens.cuh.
//
// A cluster's blocks go as far as the lengths, then all take the same way.  The line is that of as many blocks, which may
// be some more than clusters need.
#pragma once

#include "attention/cuda/decode/cluster.cuh"
#include "attention/cuda/decode/line.cuh"

namespace pykv::attention {

// The line of calls that see all keys, for blocks that are those of a cluster.
template <class Line, class Cluster>
struct LineOfClusters : SeesAll<Line> {
  static constexpr LineSizes kSizes = line_of_clusters(Line::kSizes, Cluster::kSizes);
  static constexpr int kHeads = kSizes.heads, kWarps = kSizes.warps, kUnitTokens = kSizes.unit_tokens();
  static constexpr int kBlocksPerSm = kSizes.blocks_of_sm, kLead = kSizes.lead;
  static constexpr int kStages = kSizes.stages, kRingBytes = kStages * Line::kStageBytes;
  static constexpr bool kLate = kSizes.late;
};

// False if the line should take the call.
template <class S>
__device__ bool run_clusters(ClusterKernel<S>& clusters) {
  const Problem& p = clusters.p;
  const int num_seqs = static_cast<int>(p.a.num_seqs);
  return clusters.run(clusters.sequence < num_seqs, [&] {
    return suits_clusters(p.balance, num_seqs, [&](int s) { return clusters.loader.table.length(s); });
  });
}

template <class S, class Line>
struct EitherBlock {
  static constexpr int kThreadsOfBlock = S::kWarps * 32, kBlocksOfSm = 1;

  static __device__ void run(const Problem& p, const CacheCopies& copies, char* memory) {
    ClusterKernel<S> clusters{p, copies, memory, *reinterpret_cast<Exchange<S>*>(memory + S::kWarps * S::kRingBytes)};
    if (!run_clusters(clusters)) run_decode_line<Line>(p, copies, memory);
  }
};

// Blocks that can be clusters of S or the line.
template <class Block, class S, class Line>
void launch_clusters_or_line(const Problem& p, const Step& s, const Launch& launch) {
  static_assert(S::kWarps == Line::kWarps && !S::kInvariant);
  static_assert(cluster_shared_bytes<S>(S::kWarps) == S::kSizes.shared_bytes(S::kWarps));
  static_assert(decode_shared_bytes<Line>() == Line::kSizes.shared_bytes());
  launch_step<paged_attention_kernel<Block>>(p, s, s.shared_bytes, launch, copies_of<S>(p));
}

// By blocks as the line has them, if an SM has one; else by those of clusters, of twelve warps where elements are to be
// widened.
template <class Usual, class Wide, class Line>
void launch_either(const Problem& p, const Step& s, const Launch& launch) {
  if constexpr (Line::kWarps == Wide::kWarps && Line::kBlocksPerSm == 1) {
    using Same = SeesAll<Line>;
    launch_clusters_or_line<EitherBlock<Wide, Same>, Wide, Same>(p, s, launch);
  } else {
    using Cluster = std::conditional_t<Line::kNarrow, Wide, Usual>;
    using Other = LineOfClusters<Line, Cluster>;
    launch_clusters_or_line<EitherBlock<Cluster, Other>, Cluster, Other>(p, s, launch);
  }
}

}  // namespace pykv::attention
