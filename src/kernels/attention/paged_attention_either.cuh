// Few sequences whose block tables have room for long ones: nobody but the device knows whether clusters suit the call
// (paged_attention_cluster.cuh), which are quick where sequences are much alike or short, or the line
// (paged_attention_decode.cuh), on which all blocks share a long one.  So one kernel can be either.
//
// A cluster's blocks go as far as the lengths, then all take the same way.  The line is that of as many blocks, which may
// be some more than clusters need.
#pragma once

#include "attention/paged_attention_cluster.cuh"

namespace pykv::attention {

// When clusters take the call: its longest sequence has at most `share` of all tokens, and `slack` more.
struct Balance {
  static constexpr int kUnit = 128;  // tokens
  float share, slack;                // of a unit

  // The mean, if all blocks had as much.  What the longest sequence has above that, a block reads with twice its part of
  // the bandwidth or less, when the others have finished; the line begins and ends later, by 5 us and more.  Measured on
  // an H200.
  template <class S>
  static Balance of(const Problem& p, int blocks, int grid) {
    constexpr float kBytes = S::kNarrow ? 3 << 18 : 1 << 19, kUnitBytes = 2 * kUnit * S::kD * S::kBytes;
    const float alike = static_cast<float>(p.a.num_kv_heads) / static_cast<float>(grid);
    return {static_cast<float>(blocks) * alike, static_cast<float>(blocks) * (kBytes / kUnitBytes)};
  }

  __device__ bool suits_clusters(int longest, int all) const {
    return static_cast<float>(longest) <= share * static_cast<float>(all) + slack;
  }
};

// The line of calls that see all keys, for blocks that are those of a cluster.
template <class Line, class Cluster>
struct LineOfClusters : SeesAll<Line> {
  static constexpr int kHeads = 1, kWarps = Cluster::kWarps, kUnitTokens = kWarps * Line::kTile, kBlocksPerSm = 1;
  static constexpr int kStages = Cluster::kStages, kRingBytes = Cluster::kRingBytes;
  static_assert(!Line::kRaw && !Line::kSharedQueries && Line::kStageBytes == Cluster::kStageBytes);
  static_assert(!Line::kLate || Line::kStages == kStages);
};

template <class S>
struct EitherKernel : ClusterKernel<S> {
  using Base = ClusterKernel<S>;
  using Base::lane;
  using Base::p;

  const Balance balance;

  // By all lanes of a warp, of all warps alike.
  __device__ bool suits_clusters() const {
    const int num_seqs = static_cast<int>(p.a.num_seqs);
    int longest = 0, all = 0;
#pragma unroll 1
    for (int s = lane; s < num_seqs; s += 32) {
      const int units = (this->length(s) + Balance::kUnit - 1) / Balance::kUnit;
      longest = max(longest, units);
      all += units;
    }
    return balance.suits_clusters(__reduce_max_sync(~0u, longest), __reduce_add_sync(~0u, all));
  }

  // False if the line should take the call.
  __device__ bool run() const {
    return Base::run(this->sequence < p.a.num_seqs, [this] { return suits_clusters(); });
  }
};

template <class S, class Line>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    paged_attention_either_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies,
                                  uint64_t ticket, Balance balance) {
  extern __shared__ __align__(1024) char memory[];
  const EitherKernel<S> clusters{
      {{{{{{{p, copies}}}}}}, memory, *reinterpret_cast<Exchange<S>*>(memory + S::kWarps * S::kRingBytes)}, balance};
  if (!clusters.run()) run_decode_line<Line>(p, copies, ticket, memory);
}

// False if the call had better go another way.
template <class S, class Line>
bool launch_either_kernel(const Problem& given, const Launch& launch) {
  static_assert(S::kWarps == Line::kWarps && !S::kInvariant);
  constexpr int64_t kAlike = 2048;  // tokens; where no table has room for a page more, clusters lose little
  constexpr int kBytes = std::max(cluster_shared_bytes<S>(S::kWarps), decode_shared_bytes<Line>());
  if (given.a.num_seqs <= 1 || given.a.max_seq_len < kAlike + given.a.block_size ||
      given.a.num_kv_heads % Line::kHeads != 0 || kBytes > static_cast<int>(shared_memory_limit(launch.device))) {
    return false;
  }
  const auto kernel = paged_attention_either_kernel<S, Line>;
  Problem p = given;
  p.a.max_seq_len = std::min<int64_t>(p.a.max_seq_len, kMostOfFew);  // the size of clusters is made for short tables
  const ClusterSize size = cluster_size<S>(p, launch);
  p.a.max_seq_len = given.a.max_seq_len;
  if (size.warps != S::kWarps || size.blocks == 0) return false;
  static PerDevice resident[kMostBlocks + 1];
  const int clusters = resident[size.blocks].get(launch.device, [&] {
    return count_resident_clusters(reinterpret_cast<const void*>(kernel), size.blocks, S::kWarps * 32, kBytes, launch);
  });
  if (p.a.num_seqs * p.a.num_kv_heads > clusters) return false;
  const int grid = clusters * size.blocks;
  set_cluster(p, size.blocks, p.group, EitherKernel<S>::kQuads * 4, launch.device);
  if (overlaps_kernels(launch.device)) p.early_blocks = grid;  // its lengths may be short
  set_places(p, Line::kUnitTokens);
  set_line(p, decode_tiling<Line>(p), grid);
  launch_after(kernel, dim3(grid), dim3(S::kWarps * 32), size.blocks, kBytes, launch, p.a.op, p, copies_of<S>(p),
               next_ticket(), Balance::of<S>(p, size.blocks, grid));
  return true;
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
