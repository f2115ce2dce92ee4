// Short calls over rows of tokens: of decoding with a long window, with several query tokens for each sequence, as
// in speculative decoding, or with pages that are no groups of eight: the clusters of decode/cluster.cuh, whose columns are
// query tokens times heads, up to 16 of them (of size 256: 8).  As many again are another cluster's, beside it; what a sequence
// has beyond that, where it has more tokens than the mean, these clusters do afterwards.  Elements of one byte, which mma.sync has
// to widen for few rows at a time, may have up to four such tiles, unless warpgroups take the call.
//
// In tables with room for long sequences one kernel is these clusters or the line, as the lengths say.
//
// Chain: lengths and pages at once -> queries, tiles -> sums -> one exchange -> output, for each tile of queries.
#pragma once

#include "attention/cuda/decode/either.cuh"

namespace pykv::attention {

template <class S>
struct TokensKernel {
  using State = typename ColumnQueries<S>::State;

  const Problem& p;
  ClusterKernel<S> cluster;
  const int sequence = cluster.sequence, kv_head = cluster.kv_head;

  // has_task: there is such a sequence.  False if the line should take the call.
  __device__ bool run(bool has_task) {
    cluster.open_exchange();
    if (has_task && blockIdx.x < p.early_blocks) {
      if (p.a.cu_query_lens.data) prefetch(words_at(p.a.cu_query_lens, sequence));
      const int early_len = cluster.loader.table.early_length(sequence);
      const int len = static_cast<int>(clamp(early_len, 0, p.a.max_seq_len));
      if (!p.sees_all()) cluster.look_from(len - p.tile_tokens);
      cluster.loader.table.foresee(sequence, kv_head, early_len, cluster.first_token(0));
    }
    const int guessed_begin = cluster.begin;
    if (!p.mixed) wait_for_previous_kernel();
    // Where the first keys are, if all is as it was a moment before.
    int ids = has_task ? cluster.look_up_tiles(0) : -1;
    const RawSequence raw = load_sequence(p, sequence);
    const Sequence seq = clamp_sequence(p, raw);
    // Mostly of one tile of queries, which needs no division.
    const bool is_one = seq.query_len <= p.tile_tokens;
    const int token_tiles = is_one ? 1 : (seq.query_len + p.tile_tokens - 1) / p.tile_tokens;
    if (!takes_call(p)) {
      cluster.close_exchange();
      return false;
    }
    int tiles = takes(p, seq) ? token_tiles * p.head_tiles : 0;
    const int way = p.by_ways.remainder(cluster.block.place);
    // Only one tile's piece has a place.
    cluster.block.use_spans(tiles > p.ways ? 0 : seq.len);
    if (cluster.block.is_left_out()) tiles = 0;
    if (cluster.block.rank == 0 && kv_head == 0 && way == 0 && cluster.block.is_first() && threadIdx.x == 0)
      report_sequence(p, raw);
    if (way >= tiles && p.cluster > 1) cluster_wait();
    int parity = 0;
    State state;
#pragma unroll 1
    for (int i = way; i < tiles; i += p.ways) {
      if (i > way) exchange_again();
      Unit u = first_unit(sequence, seq, kv_head);
      u.query_tile = p.head_tiles == 1 ? i : i / p.head_tiles;
      u.head_tile = i - u.query_tile * p.head_tiles;
      const int first = seq.context() + u.query_tile * p.tile_tokens;
      const int last = min(first + p.tile_tokens, seq.len) - 1;
      const int end = static_cast<int>(clamp(int64_t{last_seen(p, last)} + 1, 0, seq.len));
      cluster.look_from(first);
      if (i > way || cluster.begin != guessed_begin) ids = cluster.look_up_tiles(0);
      cluster.queries.fetch_queries(u, state);
      cluster.attend_keys(ids, end, state, [&] {
        cluster.queries.settle(kv_head, state);
        if (p.cluster > 1) cluster_wait();  // all blocks are there; the first tile is still on its way
        if (i + p.ways >= tiles && (p.cluster <= 2 || end - cluster.begin <= 2048)) let_next_kernel_start();
      });
      cluster.finish(state, parity, [&](int column) { return row_of(p, u, column); });
      parity ^= 1;
    }
    return true;
  }

  // When all blocks have read what others sent, and all warps of this one what they share.
  __device__ void exchange_again() const {
    __syncthreads();
    if (p.cluster == 1) return;
    if (threadIdx.x == 0) cluster.expect_sums();
    __syncwarp();
    cluster_announce_all();
  }
};

template <class S>
__device__ TokensKernel<S> tokens_kernel(const Problem& p, const CacheCopies& copies, char* memory) {
  return {p, {p, copies, memory, *reinterpret_cast<Exchange<S>*>(memory + blockDim.x / 32 * S::kRingBytes)}};
}

template <class S>
struct TokensBlock {
  static constexpr int kThreadsOfBlock = S::kWarps * 32, kBlocksOfSm = 1;

  static __device__ void run(const Problem& p, const CacheCopies& copies, char* memory) {
    tokens_kernel<S>(p, copies, memory).run(true);
    end_after_prefill(p);
  }
};

template <class S>
void launch_tokens_clusters(const Problem& p, const Step& s, const Launch& launch) {
  static_assert(cluster_shared_bytes<S>(S::kWarps) == S::kSizes.shared_bytes(S::kWarps));
  static_assert(cluster_shared_bytes<S>(S::kWarps) <= 227 << 10);  // what Hopper has
  if constexpr (kMaySpan<S>) {
    if (s.spans > 1) return launch_tokens_clusters<Spanned<S>>(p, s, launch);
  }
  const int most_bytes = device_info(launch.device).shared_of_block;
  launch_step<paged_attention_kernel<TokensBlock<S>>>(p, s, most_bytes, launch, copies_of<S>(p));
}

// In tables with room for long sequences: clusters or the line, as decode/either.cuh has it for one token.
template <class S, class Line>
struct TokensEitherBlock {
  static constexpr int kThreadsOfBlock = S::kWarps * 32, kBlocksOfSm = 1;

  static __device__ void run(const Problem& p, const CacheCopies& copies, char* memory) {
    TokensKernel<S> clusters = tokens_kernel<S>(p, copies, memory);
    if (!clusters.run(clusters.sequence < p.a.num_seqs)) run_decode_line<Line>(p, copies, memory);
  }
};

// Small pages: heads up to 128 in rows of tokens, up to eight in a group on the line.
template <class Element, int kD, int kColumns>
void launch_small_pages(const Problem& p, const Step& s, const Launch& launch) {
  if constexpr (kD > 64 || kColumns > 8) {
    using Cluster = ClusterShape<Element, kD, kColumns, false, false, true>;
    if (s.instance.kernel == KernelId::kSmallPagesCluster)
      return launch_tokens_clusters<SmallPages<Cluster>>(p, s, launch);
  }
  if constexpr (kColumns == 8) {
    using Line = SmallPages<DecodeShape<Element, kD, false, 8, false>>;
    using Single = SmallPages<DecodeShape<Element, kD, false, 8, false, true>>;
    return launch_lines<Line, Single>(p, s, launch);
  }
  fail_without_instance(p, s);
}

template <class Element, int kD, int kColumns>
void launch_whole_pages(const Problem& p, const Step& s, const Launch& launch) {
  using Cluster = ClusterShape<Element, kD, kColumns, false, false, true>;
  if constexpr (has_either(kKindOf<Element>, kD, kColumns)) {
    using Line = LineOfClusters<DecodeShape<Element, kD, false, kColumns, false, true, true>, Cluster>;
    if (s.instance.kernel == KernelId::kTokensEither)
      return launch_clusters_or_line<TokensEitherBlock<Cluster, Line>, Cluster, Line>(p, s, launch);
  }
  launch_tokens_clusters<Cluster>(p, s, launch);
}

template <class Element, int kD, int kColumns>
void launch_tokens(const Problem& p, const Step& s, const Launch& launch) {
  const KernelId kernel = s.instance.kernel;
  if constexpr (kIsCommon<Element> && kD <= 128) {
    if (kernel == KernelId::kSmallPagesLine || kernel == KernelId::kSmallPagesCluster)
      return launch_small_pages<Element, kD, kColumns>(p, s, launch);
  }
  if constexpr (kD == 128 && kKindOf<Element> != CacheKind::k16Bits) {
    using Line = DecodeShape<Element, 128, false, kColumns, false, false, true>;
    using Single = DecodeShape<Element, 128, false, kColumns, false, true, true>;
    if (kernel == KernelId::kTokensLine) return launch_lines<Line, Single>(p, s, launch);
  }
  if constexpr (kIsCommon<Element> && (kD > 64 || kColumns > 8)) {
    launch_whole_pages<Element, kD, kColumns>(p, s, launch);
  } else {
    fail_without_instance(p, s);
  }
}

template <class Element>
void launch_tokens(const Problem& p, const Step& s, const Launch& launch) {
  const Instance& of = s.instance;
  if (of.head_size > 128) return launch_tokens<Element, 256, 8>(p, s, launch);
  dispatch_bool(of.head_size > 64, [&]<bool kLarge> {
    constexpr int kD = kLarge ? 128 : 64;
    if (of.rows > 8) return launch_tokens<Element, kD, 16>(p, s, launch);
    launch_tokens<Element, kD, 8>(p, s, launch);
  });
}

}  // namespace pykv::attention
