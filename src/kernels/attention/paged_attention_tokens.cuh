// Short calls over rows of tokens: of decoding with a long window, with several query tokens for each sequence, as
// in speculative decoding, with more than 16 heads in a group, or with pages that are no groups of eight: the clusters of
// paged_attention_cluster.cuh, whose columns are query tokens times heads, up to 32 of them (of size 256: 16).  As many again are
// another cluster's, beside it; what a sequence has beyond that, where it has more tokens than the mean, these clusters do
// afterwards.  Where blocks have no room for so many columns, and elements are of one byte, which mma.sync has to widen for few
// rows at a time, half as many are done up to four times, unless warpgroups take the call.
//
// Caches of e5m2 and int8 have the line alone.
//
// In tables with room for long sequences a kernel of up to 16 columns is these clusters or the line, as the lengths say.
//
// Chain: lengths and pages at once -> queries, tiles -> sums -> one exchange -> output, for each tile of queries.
#pragma once

#include "attention/paged_attention_cluster_launch.cuh"
#include "attention/paged_attention_combine.cuh"
#include "attention/paged_attention_either.cuh"
#include "attention/paged_attention_small_pages.cuh"

namespace pykv::attention {

template <class S>
struct TokensKernel : ClusterKernel<S> {
  using Cluster = ClusterKernel<S>;
  using Base = DecodeLoader<S>;
  using Base::p;
  using Cluster::begin;
  using Cluster::kv_head;
  using Cluster::place;
  using Cluster::rank;
  using Cluster::sequence;
  using typename Base::State;
  // Whether where keys begin is guessed; not where it would drive sums out of registers.
  static constexpr bool kGuesses = !(S::kSharedQueries && S::kNarrow);

  // has_task: there is such a sequence.  False if the line should take the call, or has taken it.
  __device__ bool run(bool has_task) {
    this->open_exchange();
    if (has_task && blockIdx.x < p.early_blocks) {
      if (kGuesses && p.a.cu_query_lens.data) prefetch(words_at(p.a.cu_query_lens, sequence));
      const int early_len = this->early_length(sequence);
      const int len = static_cast<int>(clamp(early_len, 0, p.a.max_seq_len));
      if (!p.sees_all()) this->look_from(len - p.tile_tokens);
      this->foresee(sequence, kv_head, early_len, this->first_token(0));
    }
    const int guessed_begin = begin;
    wait_for_previous_kernel();
    // Where the first keys are, if all is as it was a moment before.
    int ids = has_task && (kGuesses || p.sees_all()) ? this->look_up_tiles(0) : -1;
    const RawSequence raw = load_sequence(p, sequence);
    Sequence seq = clamp_sequence(p, raw);
    // Mostly of one tile of queries, which needs no division.
    const bool is_one = kGuesses && seq.query_len <= p.tile_tokens;
    const int token_tiles = is_one ? 1 : (seq.query_len + p.tile_tokens - 1) / p.tile_tokens;
    if (!takes_call(p)) {
      this->close_exchange();
      return false;
    }
    int tiles = takes(p, seq) ? token_tiles * p.head_tiles : 0;
    const int way = p.by_ways.remainder(place);
    // Only one tile's piece has a place.
    this->use_spans(tiles > p.ways ? 0 : seq.len);
    if (this->is_left_out()) tiles = 0;
    if (rank == 0 && kv_head == 0 && way == 0 && this->is_first() && threadIdx.x == 0) report_sequence(p, raw);
    if (way >= tiles && p.cluster > 1) cluster_wait();
    int parity = 0;
    State state;
    if constexpr (S::kSharedQueries) state.shared = &this->exchange;
#pragma unroll 1
    for (int i = way; i < tiles; i += p.ways) {
      if (i > way) {
        seq = kept(seq);
        exchange_again();
      }
      Unit u = first_unit(sequence, seq, kv_head);
      u.query_tile = kGuesses && p.head_tiles == 1 ? i : i / p.head_tiles;
      u.head_tile = i - u.query_tile * p.head_tiles;
      keep(u);
      const int first = seq.context() + u.query_tile * p.tile_tokens;
      const int last = min(first + p.tile_tokens, seq.len) - 1;
      const int end = static_cast<int>(clamp(int64_t{last_seen(p, last)} + 1, 0, seq.len));
      this->look_from(first);
      if (i > way || !(kGuesses ? begin == guessed_begin : p.sees_all())) ids = this->look_up_tiles(0);
      this->fetch_queries(u, state);
      this->attend_keys(ids, end, state, [&] {
        this->settle(kv_head, state);
        if (p.cluster > 1) cluster_wait();  // all blocks are there; the first tile is still on its way
        if (i + p.ways >= tiles && (p.cluster <= 2 || end - begin <= 2048)) let_next_kernel_start();
      });
      this->finish(state, parity, [&](int column) { return row_of(p, kept(u), column); });
      parity ^= 1;
    }
    return true;
  }

  // With kSharedQueries a query tile waits in shared memory while its keys are attended, for sums need the registers.
  __device__ void keep(const Unit& u) const {
    if constexpr (S::kSharedQueries) {
      if (threadIdx.x == 0) this->exchange.unit = u;  // seen by all from settle() on
    }
  }
  __device__ const Unit& kept(const Unit& u) const {
    if constexpr (S::kSharedQueries) return this->exchange.unit;
    return u;
  }
  __device__ Sequence kept(const Sequence& seq) const {
    if constexpr (S::kSharedQueries) {
      const Unit& u = this->exchange.unit;
      return {u.sequence_len, u.query_begin, u.query_len};
    } else {
      return seq;
    }
  }

  // When all blocks have read what others sent, and all warps of this one what they share.
  __device__ void exchange_again() const {
    __syncthreads();
    if (p.cluster == 1) return;
    if (threadIdx.x == 0) this->expect_sums();
    __syncwarp();
    cluster_announce_all();
  }
};

template <class S>
__device__ TokensKernel<S> tokens_kernel(const Problem& p, const CacheCopies& copies, char* memory) {
  return {{{{{{{{{p, copies}}}}}}}, memory, *reinterpret_cast<Exchange<S>*>(memory + blockDim.x / 32 * S::kRingBytes)}};
}

template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    paged_attention_tokens_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies,
                                  const __grid_constant__ LeftPieces left) {
  extern __shared__ __align__(1024) char memory[];
  if (!tokens_kernel<S>(p, copies, memory).run(true) && !S::kSpans) combine_left_pieces(left, memory);
}

// In tables with room for long sequences: clusters or the line, as paged_attention_either.cuh has it for one token.
template <class S, class Line>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    paged_attention_tokens_either_kernel(const __grid_constant__ Problem p,
                                         const __grid_constant__ CacheCopies copies) {
  extern __shared__ __align__(1024) char memory[];
  TokensKernel<S> clusters = tokens_kernel<S>(p, copies, memory);
  if (!clusters.run(clusters.sequence < p.a.num_seqs)) run_decode_line<Line>(p, copies, memory);
}

// Completes `p` but for its clusters, and gives the size of these; no blocks: the call had better go another way.
template <class S>
ClusterSize tokens_size(Problem& p, const Launch& launch) {
  static_assert(cluster_shared_bytes<S>(S::kWarps) <= 227 << 10);  // what Hopper has
  constexpr ClusterSize kNone{0, 0};
  // Of queries: more take longer than the line, unless that widens elements for few rows at a time.
  constexpr int64_t kMostTiles = S::kSharedQueries ? 2 : S::kNarrow ? 4 : 1;
  // A guess: all have as many tokens.  One that had far more would keep its cluster busy when the others had finished.
  if (p.a.num_tokens % p.a.num_seqs != 0) return kNone;
  const int64_t tokens = p.a.num_tokens / p.a.num_seqs;
  if (!suits_loader<S>(p) || p.a.batch_invariant || p.sparse || p.min_rows > 0) return kNone;
  set_rows(p, S::kColumns);
  p.tile_tokens = static_cast<int>(std::min<int64_t>(p.tile_tokens, tokens));
  const int64_t tiles = (tokens + p.tile_tokens - 1) / p.tile_tokens * p.head_tiles;
  if (tiles > kMostTiles || (tiles > 1 && most_keys<S>(p) > kMostOfFew)) return kNone;
  // Clusters beside each other read the same keys at about the same time, so that only one reads them from memory.
  const auto size_for = [&](int64_t ways) {
    p.ways = static_cast<int>(ways);
    p.by_ways = Divider(ways);
    return cluster_size<S>(p, launch);
  };
  ClusterSize size = size_for(tiles);
  if ((tiles > 1 || S::kColumns > 16) && size.warps < S::kWarps) {
    // Blocks of half the size, or tiles one after the other, take longer than the line of warpgroups.
    if (p.sees_all() && may_use_warpgroups(p.a, RowClass::kMore, launch.device)) return kNone;
    if (tiles > 1) size = size_for(1);
  }
  constexpr bool kTwoFit = 2 * (cluster_shared_bytes<S>(S::kWarps / 2) + 1024) <= 228 << 10;
  if (!kTwoFit && size.warps < S::kWarps) return kNone;  // blocks of half the size, of which an SM should have two
  return size;
}

// False if the call had better go another way.
template <class S>
bool launch_tokens_kernel(Problem p, const Launch& launch) {
  const ClusterSize size = tokens_size<S>(p, launch);
  return size.blocks > 0 && launch_cluster_kernel<S>(p, size, launch);
}

// Of calls for which the device chooses between clusters and the line.  False if the call had better go another way.
template <class S, class Line>
bool launch_tokens_either(Problem p, const Launch& launch) {
  if (p.lengths != Lengths::kForClusters || !suits_tokens<Line>(p)) return false;
  const ClusterSize size = tokens_size<S>(p, launch);
  if (size.blocks == 0 || size.warps != S::kWarps || p.ways > 1) return false;
  return launch_clusters_or_line<paged_attention_tokens_either_kernel<S, Line>, S, Line>(
      p, size, p.tile_tokens * p.tile_heads, launch,
      [&](Problem& of_grid, int) { set_balance(of_grid, LineOf::kDecoding, 1, launch.device); });
}

// Of elements that are to be widened: on the line, with the queries of a sequence as up to 16 columns; of nvfp4 up to twice, for
// else a warp would leave halves of its tiles in shared memory, but not of few KV heads, for one block adds up what all leave.
template <class Element, int kColumns>
bool launch_tokens_line(const Problem& p, const Launch& launch) {
  using Line = DecodeShape<Element, 128, false, kColumns, false, false, false, true>;
  using Single = DecodeShape<Element, 128, false, kColumns, false, false, true, true>;
  const bool are_many = p.a.num_seqs * p.a.num_kv_heads >= num_sms(launch.device) / 8;
  const int most_tiles = Line::kRaw && kColumns == 16 && are_many ? 2 : 1;
  const int64_t tokens = (p.a.num_tokens + p.a.num_seqs - 1) / p.a.num_seqs;
  return tokens * p.group <= most_tiles * kColumns && suits_tokens<Line>(p) &&
         launch_decode_line<Line, Single>(p, launch);
}

// Of columns that one kernel takes as clusters and as the line.  Sixteen of 16-bit elements are quicker by the line of warpgroups, if
// it is a line.
template <class Element, int kD, int kColumns>
constexpr bool kHasEither = std::is_same_v<Element, ElementNvfp4> ? kD == 128 && kColumns <= 16
                            : kD == 128 ? kColumns == 8 || (kColumns == 16 && Element::kBytes == 1)
                            : kD == 256 ? kColumns == 8
                                        : kColumns == 16;

template <class Element>
bool launch_tokens(const Problem& p, const Launch& launch) {
  if (p.a.value.dim != 1) return false;
  constexpr bool kNvfp4 = std::is_same_v<Element, ElementNvfp4>;
  constexpr bool kMayBeSmall = !kNvfp4;                             // the pages
  const int64_t columns = p.a.num_tokens / p.a.num_seqs * p.group;  // a sequence's, if all have as many tokens
  const auto launch_columns = [&]<int kD, int kColumns> {
    if constexpr (kIsRare<Element>) {
      return false;
    } else {
      if (p.lengths == Lengths::kForLine) return false;
      using Cluster = ClusterShape<Element, kD, kColumns, false, false, true>;
      if constexpr (kHasEither<Element, kD, kColumns>) {
        using Line = DecodeShape<Element, kD, false, kColumns, false, false, true, true>;
        if (launch_tokens_either<Cluster, LineOfClusters<Line, Cluster>>(p, launch)) return true;
      }
      if constexpr (kMayBeSmall && kColumns <= 16) {
        if (p.a.block_size % kGroupTokens != 0) return launch_tokens_kernel<SmallPages<Cluster>>(p, launch);
      }
      return launch_tokens_kernel<Cluster>(p, launch);
    }
  };
  bool done = false;
  if (p.a.head_size > 128) {
    constexpr bool kSixteen = !kNvfp4;  // which would spill
    if constexpr (kSixteen) done = columns > 8 && launch_columns.template operator()<256, 16>();
    done = done || launch_columns.template operator()<256, 8>();
  } else if (p.a.head_size > 64) {
    done = columns <= 8 ? launch_columns.template operator()<128, 8>()
                        : (columns > 16 && launch_columns.template operator()<128, 32>()) ||
                              launch_columns.template operator()<128, 16>();
    if constexpr (Element::kBytes == 1 || kNvfp4) {
      done = done || (p.lengths != Lengths::kForClusters && !fills_warpgroups(p, launch.device) &&
                      (launch_tokens_line<Element, 8>(p, launch) || launch_tokens_line<Element, 16>(p, launch)));
    }
  } else {
    done =
        (columns > 16 && launch_columns.template operator()<64, 32>()) || launch_columns.template operator()<64, 16>();
  }
  if constexpr (kMayBeSmall) {
    done = done || (p.lengths == Lengths::kAny && launch_small_pages<Element>(p, launch));
  }
  return done;
}

}  // namespace pykv::attention
