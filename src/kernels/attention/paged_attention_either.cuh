// Decoding of few sequences whose block tables have room for long ones (paged_attention_balance.cuh): one kernel that can be
// clusters (paged_attention_cluster.cuh) or the line (paged_attention_decode.cuh).  Of several query tokens, or many heads in a
// group, the same is in paged_attention_tokens.cuh.
//
// A cluster's blocks go as far as the lengths, then all take the same way.  The line is that of as many blocks, which may
// be some more than clusters need.
#pragma once

#include "attention/paged_attention_cluster_launch.cuh"
#include "attention/paged_attention_decode_line.cuh"

namespace pykv::attention {

// The line of calls that see all keys, for blocks that are those of a cluster.
template <class Line, class Cluster>
struct LineOfClusters : SeesAll<Line> {
  static constexpr int kHeads = 1, kWarps = Cluster::kWarps, kUnitTokens = kWarps * Line::kTile, kBlocksPerSm = 1;
  static constexpr int kLead = Line::kRaw && Line::kColumns <= 8 ? 2 : 4;  // measured on an H100
  static constexpr int kStages = Cluster::kStages, kRingBytes = kStages * Line::kStageBytes;
  static constexpr bool kSharedQueries = Cluster::kSharedQueries;
  static constexpr bool kLate = Line::kLate && Line::kStages == kStages;  // with as much under way
};

template <class S>
struct EitherKernel : ClusterKernel<S> {
  using Base = ClusterKernel<S>;
  using Base::p;

  // False if the line should take the call.
  __device__ bool run() {
    const int num_seqs = static_cast<int>(p.a.num_seqs);
    return Base::run(this->sequence < num_seqs, [this, num_seqs] {
      return p.balance.suits_clusters(num_seqs, [this](int s) { return this->length(s); });
    });
  }
};

template <class S, class Line>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    paged_attention_either_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies) {
  extern __shared__ __align__(1024) char memory[];
  EitherKernel<S> clusters{
      {{{{{{{{p, copies}}}}}}}, memory, *reinterpret_cast<Exchange<S>*>(memory + S::kWarps * S::kRingBytes)}};
  if (!clusters.run()) run_decode_line<Line>(p, copies, memory);
}

// How many clusters of kKernel run at once.
template <auto kKernel>
int resident_clusters(const ClusterSize& size, int shared_bytes, const Launch& launch) {
  static PerDevice resident[kMostBlocks + 1];
  return resident[size.blocks].get(launch.device, [&] {
    return count_resident_clusters(reinterpret_cast<const void*>(kKernel), size.blocks, size.warps * 32, shared_bytes,
                                   launch);
  });
}

// Launches a kernel that can be clusters of S, of so many queries each, or the line; decide: says when it is which, for a grid
// of so many blocks.  False if not all clusters would run at once.
template <auto kKernel, class S, class Line>
bool launch_clusters_or_line(Problem p, const ClusterSize& size, int queries, const Launch& launch, auto&& decide) {
  static_assert(S::kWarps == Line::kWarps && !S::kInvariant);
  constexpr int kBytes = std::max(cluster_shared_bytes<S>(S::kWarps), decode_shared_bytes<Line>());
  const int clusters = resident_clusters<kKernel>(size, kBytes, launch);
  if (p.a.num_seqs * p.a.num_kv_heads > clusters) return false;
  const int grid = clusters * size.blocks, tile_tokens = p.tile_tokens;
  set_places(p, Line::kUnitTokens);
  set_line(p, decode_tiling<Line>(p), grid);
  if (S::kManyTokens) p.tile_tokens = tile_tokens;
  set_cluster(p, size.blocks, queries, DecodeLoader<S>::kQuads * 4, launch.device);
  if (overlaps_kernels(launch.device)) p.early_blocks = grid;  // its lengths may be short
  decide(p, grid);
  p.ticket = next_ticket();
  constexpr KernelId kId = S::kManyTokens ? KernelId::kTokensEither
                           : S::kFolded   ? KernelId::kFoldedEither
                                          : KernelId::kDecodeEither;
  launch_after({kId, S::kD, S::kColumns}, kKernel, dim3(grid), dim3(S::kWarps * 32), size.blocks, kBytes, launch,
               p.a.op, p, copies_of<S>(p));
  return true;
}

// False if the call had better go another way.
template <class S, class Line>
bool launch_either_kernel(const Problem& p, const Launch& launch) {
  constexpr int64_t kAlike = 2048;  // tokens; where no table has room for a page more, clusters lose little
  if (p.a.num_seqs <= 1 || p.a.max_seq_len < kAlike + p.a.block_size || p.a.num_kv_heads % Line::kHeads != 0) {
    return false;
  }
  Problem in_short_table = p;  // the size of clusters is made for these
  in_short_table.a.max_seq_len = std::min<int64_t>(p.a.max_seq_len, kMostOfFew);
  const ClusterSize size = cluster_size<S>(in_short_table, launch);
  if (size.warps != S::kWarps || size.blocks == 0) return false;
  // What a block reads with twice its part of the bandwidth or less, when the others have finished; the line begins and ends later
  // by 5 us and more.  Measured on an H200.
  constexpr int kSlackBytes = S::kNarrow ? 3 << 18 : 1 << 19;
  return launch_clusters_or_line<paged_attention_either_kernel<S, Line>, S, Line>(
      p, size, p.group, launch, [&](Problem& of_grid, int grid) {
        of_grid.balance = Balance::of(p.a.num_kv_heads, static_cast<float>(size.blocks), grid, 1,
                                      kSlackBytes / (2 * S::kD * S::kBytes));
      });
}

// By blocks as the line has them, if an SM has one; else by those of clusters, of twelve warps where elements are to be
// widened.
template <class Usual, class Wide, class Line>
bool launch_either(const Problem& p, const Launch& launch) {
  if constexpr (Line::kWarps == Wide::kWarps && Line::kBlocksPerSm == 1) {
    return launch_either_kernel<Wide, SeesAll<Line>>(p, launch);
  } else {
    using Cluster = std::conditional_t<Line::kNarrow, Wide, Usual>;
    return launch_either_kernel<Cluster, LineOfClusters<Line, Cluster>>(p, launch);
  }
}

}  // namespace pykv::attention
