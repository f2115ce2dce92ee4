// Decoding for few sequences: how many blocks take a KV head of a sequence, and their launch; with batch_invariant, too.
#pragma once

#include <algorithm>

#include "attention/paged_attention_cluster.cuh"
#include "attention/paged_attention_exact_cluster.cuh"
#include "cuda/device.h"

namespace pykv::attention {

template <class S>  // paged_attention_tokens.cuh
__global__ void paged_attention_tokens_kernel(const __grid_constant__ Problem p,
                                              const __grid_constant__ CacheCopies copies,
                                              const __grid_constant__ LeftPieces left);

template <class S>
constexpr Instance cluster_instance() {
  const KernelId id = S::kInvariant     ? (S::kSpans ? KernelId::kInvariantSpans : KernelId::kInvariantCluster)
                      : !S::kManyTokens ? (S::kSpans       ? KernelId::kDecodeSpans
                                           : S::kFolded    ? KernelId::kFoldedCluster
                                           : S::kHidesKeys ? KernelId::kWindowCluster
                                                           : KernelId::kDecodeCluster)
                      : S::kSpans       ? KernelId::kTokensSpans
                      : S::kByToken     ? KernelId::kSmallPagesCluster
                                        : KernelId::kTokensCluster;
  return {id, S::kD, S::kColumns};
}

template <class S>
auto cluster_kernel() {
  if constexpr (S::kInvariant) {
    return &paged_attention_exact_cluster_kernel<S>;
  } else if constexpr (S::kManyTokens) {
    return &paged_attention_tokens_kernel<S>;
  } else {
    return &paged_attention_cluster_kernel<S>;
  }
}

// Shared memory of a block; 0: it does not suffice.
template <class S>
int cluster_bytes(int group, int blocks, int warps, int device) {
  int bytes = cluster_shared_bytes<S>(warps);
  if constexpr (S::kInvariant) {
    const int exchange = exact_exchange_bytes<S>(group, blocks, warps, device);
    bytes = exchange < 0 ? 0 : warps * S::kRingBytes + exact_stats_bytes<S>(warps) + exchange;
  }
  return bytes <= static_cast<int>(shared_memory_limit(device)) ? bytes : 0;
}

// Keys that a query may see, at most, and as many as fill tiles and blocks.
template <class S>
int64_t most_keys(const Problem& p) {
  int64_t most = std::min<int64_t>(p.a.max_seq_len, int64_t{p.window} + S::kTile);
  if (p.lengths == Lengths::kForClusters) most = std::min(most, kMostOfFew);  // where none is much longer than others
  return most;
}

// How many blocks take a KV head of a sequence, or a span of its keys, and their warps; no blocks: better leave it to the line.
struct ClusterSize {
  int blocks, warps;
  int spans = 1;
};

// Whether other clusters may share their keys.  Of more columns warpgroups' do.  What one token sees through a window is too little
// (kMostWindow).
template <class S>
constexpr bool kMaySpan = S::kColumns <= 16 && (S::kManyTokens || !S::kHidesKeys);

// How many clusters of so many blocks take a KV head of up to `most` keys, if `room` of them run at once.
template <class S>
int spans_for(int64_t most, int blocks, int64_t room, int64_t heads, int device) {
  const int64_t clusters = std::min<int64_t>(room, num_sms(device) / blocks);
  const int spans = static_cast<int>(std::min<int64_t>(clusters / heads, kMostSpans));
  if (spans < kFewestSpans) return 1;
  return most > keys_alone<S>(spans, heads, blocks * S::kWarps * S::kTile, device) ? spans : 1;
}

// One block for each SM where keys are few, even where two would find room, for then the next kernel's come up beside it, or two of
// half the size where there are more sequences than that.  Blocks of other sequences do not help with a long one, hence the limits
// (in tokens), for nobody knows the lengths here.  Half of the SMs draw the whole bandwidth; fewer blocks than that may lose more than
// they save, which is some microseconds.
template <class S>
ClusterSize cluster_size(const Problem& p, const Launch& launch) {
  constexpr int64_t kMostOfMany = 2048;
  constexpr int64_t kFewKeys = 1536;  // of an SM: of more, two of its blocks are quicker, if clusters are small
  const int64_t heads = p.a.num_seqs * p.a.num_kv_heads * p.ways, most = most_keys<S>(p);
  const int sms = num_sms(launch.device);
  const auto kernel = reinterpret_cast<const void*>(cluster_kernel<S>());
  static PerDevice resident[S::kColumns + 1][kMostBlocks + 1];
  const int group = S::kInvariant ? p.group : 0;  // else the room does not depend on it
  const auto room = [&](int blocks) {             // for so many clusters at once
    const int clusters = resident[group][blocks].get(launch.device, [&] {
      const int bytes = cluster_bytes<S>(group, blocks, S::kWarps, launch.device);
      return bytes == 0 ? 0 : count_resident_clusters(kernel, blocks, S::kWarps * 32, bytes, launch);
    });
    const bool may_double = !S::kRaw && blocks <= 2 && heads * most > kFewKeys * sms;  // nvfp4 waits for instructions
    return may_double ? clusters : std::min(clusters, sms / blocks);
  };
  for (int blocks = kMostBlocks; blocks > 0; --blocks) {
    if (heads > room(blocks)) continue;
    const bool may_span = kMaySpan<S> && blocks == kMostBlocks && p.lengths == Lengths::kAny;
    const int spans = may_span ? spans_for<S>(most, blocks, room(blocks), heads, launch.device) : 1;
    // nvfp4 keeps its SMs busy: of long sequences four of half the size are quicker, on all SMs.
    if constexpr (S::kRaw) {
      constexpr int kHalfBlocks = kMostBlocks / 2;
      const bool may_halve = may_span && spans == 1 && most > 2 * kMostOfFew;
      const int halves = may_halve ? spans_for<S>(most, kHalfBlocks, room(kHalfBlocks), heads, launch.device) : 1;
      if (halves > 1) return {kHalfBlocks, S::kWarps, halves};
    }
    if (p.a.num_seqs > 1 && most > kMostOfFew && spans == 1) return {0, 0};
    constexpr int64_t kMostElements = 1 << 23;  // of a block's keys, times the blocks that are missing
    const int64_t missing = sms * 4 / 9 - heads * blocks * spans;
    if (missing > 0 && most / (blocks * spans) * S::kD * missing > kMostElements) return {0, 0};
    return {blocks, S::kWarps, spans};
  }
  if (p.a.num_seqs > 1 && most > kMostOfFew) return {0, 0};
  constexpr int kHalf = S::kInvariant ? 4 : S::kWarps / 2;
  // Of elements that are to be widened, chunks for more than two blocks of an SM are better shared out evenly.
  constexpr bool kByTwo = S::kInvariant && S::kNarrow && S::kD == 128;
  // A tile for each warp is enough for windows and one byte that find room at once, of which the line has nothing else to begin, and
  // for nvfp4, whose line has units of eight tiles.
  const bool is_one_wave = (S::kNarrow || !p.sees_all()) && heads <= 2 * sms;
  const bool suits = most <= kMostOfMany && most >= (is_one_wave || S::kRaw ? 1 : 2) * kHalf * S::kTile &&
                     (!kByTwo || heads <= 2 * sms) && cluster_bytes<S>(group, 1, kHalf, launch.device) > 0;
  return {suits ? 1 : 0, kHalf};
}

// Whether it should be one of the wide shape, S, instead: twelve warps where elements are to be widened and keys are so many
// that 64 SMs are busier with that than with waiting, or where teams of four then take fewer rounds of a chunk each; or blocks
// of three or four warps where there are more than two for each SM: of three if all of them find room at once.
template <class S>
ClusterSize wide_size(const Problem& p, const ClusterSize& usual, const Launch& launch) {
  constexpr int64_t kMany = S::kInvariant ? 4096 : 2048;  // keys of a block
  const int64_t heads = p.a.num_seqs * p.a.num_kv_heads, sms = num_sms(launch.device);
  if (usual.warps == S::kUsualWarps) {
    const auto wide = [&] { return cluster_size<S>(p, launch); };
    if constexpr (S::kInvariant) {
      constexpr int64_t kTeamWarps = ExactClusterKernel<S>::kTeamWarps;  // so many rounds make a long one
      const auto rounds = [&](const ClusterSize& size) {
        const int64_t together =
            std::max<int64_t>(1, size.blocks * size.warps / kTeamWarps) * size.spans * kChunkTokens;
        return (most_keys<S>(p) + together - 1) / together;
      };
      if (rounds(usual) < kTeamWarps && rounds(wide()) < rounds(usual)) return wide();
    }
    return S::kScaled && most_keys<S>(p) > kMany * usual.blocks * usual.spans ? wide() : ClusterSize{0, 0};
  }
  if (usual.blocks == 0 || heads <= 2 * sms) return {0, 0};
  return {1, !S::kInvariant && heads > 3 * sms && heads <= 4 * sms ? 3 : 4};
}

template <class S>
bool launch_cluster_kernel(Problem p, const ClusterSize& size, const Launch& launch) {
  const int64_t clusters = p.a.num_seqs * p.a.num_kv_heads * p.ways * size.spans, blocks = clusters * size.blocks;
  if (blocks == 0 || blocks >= int64_t{1} << 31) return false;
  if constexpr (kMaySpan<S> && !S::kSpans) {
    if (size.spans > 1) return launch_cluster_kernel<Spanned<S>>(p, size, launch);
  }
  const int bytes = cluster_bytes<S>(p.group, size.blocks, size.warps, launch.device);
  if (bytes == 0) return false;
  const auto kernel = cluster_kernel<S>();
  static PerDevice allowed;
  allow_shared_memory(kernel, static_cast<int>(shared_memory_limit(launch.device)), allowed, p.a.op, launch);
  set_cluster(p, size.blocks, S::kManyTokens ? p.tile_tokens * p.tile_heads : p.group, DecodeLoader<S>::kQuads * 4,
              launch.device);
  LineOf line{};
  if (p.lengths != Lengths::kAny) {
    line = line_of(p, launch.device);
    set_balance(p, line, 1, launch.device);
  }
  if constexpr (S::kInvariant) {
    p.by_round = Divider(size.blocks * size.warps / ExactClusterKernel<S>::kTeamWarps);
    p.exchange_bytes = exact_exchange_bytes<S>(p.group, size.blocks, size.warps, launch.device);
  }
  if constexpr (S::kSpans) {
    set_spans(p, size.spans, static_cast<int>(clusters), S::kColumns, DecodeLoader<S>::kQuads * 4);
    p.keys_alone = keys_alone<S>(size.spans, clusters / size.spans, size.blocks * size.warps * S::kTile, launch.device);
    if (overlaps_kernels(launch.device)) p.early_blocks = static_cast<unsigned>(blocks);  // the sequence may be short
  }
  return launch_with_line(p, line, launch, [&](const LeftPieces& left) {
    const dim3 grid(static_cast<unsigned>(blocks)), block(size.warps * 32);
    if constexpr (S::kManyTokens) {
      launch_after(cluster_instance<S>(), kernel, grid, block, size.blocks, bytes, launch, p.a.op, p, copies_of<S>(p),
                   left);
    } else {
      launch_after(cluster_instance<S>(), kernel, grid, block, size.blocks, bytes, launch, p.a.op, p, copies_of<S>(p));
    }
  });
}

}  // namespace pykv::attention
