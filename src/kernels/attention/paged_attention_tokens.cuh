// Short calls of decoding with a window or block sparsity, or with several query tokens for each sequence, as in speculative
// decoding: the clusters of paged_attention_cluster.cuh, whose columns are query tokens times heads.  What does not fit these is
// done after the others by the same cluster; of elements that the other kernels have to widen for few rows at a time that is
// quicker, and takes groups of up to 64 heads, too.
//
// Chain: lengths and pages at once -> queries, tiles -> sums -> one exchange -> output, for each tile of queries.
#pragma once

#include "attention/paged_attention_cluster.cuh"

namespace pykv::attention {

template <class S>
struct TokensKernel : ClusterKernel<S> {
  using Cluster = ClusterKernel<S>;
  using Base = DecodeLoader<S>;
  using Base::p;
  using Cluster::begin;
  using Cluster::first_seen;
  using Cluster::kTile;
  using Cluster::kv_head;
  using Cluster::rank;
  using Cluster::seen_len;
  using Cluster::sequence;
  using typename Base::State;

  __device__ void run() {
    this->open_exchange();
    const bool sees_all = p.window == kNoWindow && !p.sparse;
    if (blockIdx.x < p.early_blocks) {
      const int guess = this->early_length(sequence);
      const int len = static_cast<int>(clamp(guess, 0, p.a.max_seq_len));
      if (!sees_all) look_from(len, len - p.tile_tokens);
      this->foresee(sequence, kv_head, guess, this->first_token(0));
    }
    wait_for_previous_kernel();
    int ids = sees_all ? this->look_up_tiles(0) : -1;  // else where to look is known with the length
    const RawSequence raw = load_sequence(p, sequence);
    const Sequence seq = clamp_sequence(p, raw);
    const int tiles =
        takes(p, seq) ? (seq.query_len + p.tile_tokens - 1) / p.tile_tokens * p.head_tiles : 0;  // of queries
    if (tiles == 0 && p.cluster > 1) cluster_wait();
    State state;
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      Unit u{};
      u.sequence = sequence;
      u.sequence_len = seq.len;
      u.query_begin = seq.query_begin;
      u.query_len = seq.query_len;
      u.kv_head = kv_head;
      u.query_tile = i / p.head_tiles;
      u.head_tile = i - u.query_tile * p.head_tiles;
      if (i > 0) exchange_again();
      const int first = seq.context() + u.query_tile * p.tile_tokens;
      const int last = min(first + p.tile_tokens, seq.len) - 1;
      const int end = static_cast<int>(clamp(int64_t{last_seen(p, last)} + 1, 0, seq.len));
      look_from(seq.len, first);
      if (i > 0 || !sees_all) ids = this->look_up_tiles(0);
      this->fetch_queries(u, state);
      this->attend_keys(ids, end, state, [&] {
        this->settle(kv_head, state);
        if (p.cluster > 1) cluster_wait();  // all blocks are there; the first tile is still on its way
        if (i == tiles - 1 && (p.cluster <= 2 || end - begin <= 2048)) let_next_kernel_start();
      });
      this->finish(state, i % 2, [&](int column) { return row_of(p, u, column); });
    }
    if (rank == 0 && kv_head == 0 && threadIdx.x == 0) report_sequence(p, raw);
  }

  // From the first key that the tile's first query sees, at this position.
  __device__ void look_from(int len, int position) {
    first_seen = max(0, attention::first_seen(p, position));
    begin = first_seen & -kTile;
    seen_len = len;
  }

  // When all blocks have read what others sent.
  __device__ void exchange_again() const {
    __syncthreads();
    if (p.cluster == 1) return;
    if (threadIdx.x == 0) this->expect_sums();
    __syncwarp();
    cluster_announce_all();
  }
};

template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    paged_attention_tokens_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies) {
  extern __shared__ __align__(1024) char memory[];
  TokensKernel<S> kernel{
      {{{{{{p, copies}}}}}, memory, *reinterpret_cast<Exchange<S>*>(memory + blockDim.x / 32 * S::kRingBytes)}};
  kernel.run();
}

// False if the call had better go another way.
template <class S>
bool launch_tokens_kernel(Problem p, const Launch& launch) {
  constexpr int64_t kMostTiles = S::kNarrow ? 4 : 1;  // of queries
  // A guess: all have as many tokens.  One that had far more would keep its cluster busy when the others had finished.
  if (p.a.num_tokens % p.a.num_seqs != 0) return false;
  const int64_t tokens = p.a.num_tokens / p.a.num_seqs;
  if (!suits_loader<S>(p) || p.a.batch_invariant || !suits_sparsity<S>(p) || p.min_rows > 0) return false;
  set_rows(p, S::kColumns);
  p.tile_tokens = static_cast<int>(std::min<int64_t>(p.tile_tokens, tokens));
  if ((tokens + p.tile_tokens - 1) / p.tile_tokens * p.head_tiles > kMostTiles) return false;
  return launch_cluster_kernel<S>(p, cluster_size<S>(p, launch), launch);
}

// Of elements that are to be widened: on the line, with the queries of a sequence as up to eight columns.  Sixteen would take
// longer than tiles of 16 rows (paged_attention_mma.cuh).
template <class Element, bool kPackedV>
bool launch_tokens_line(const Problem& p, const Launch& launch) {
  using S = DecodeShape<Element, 128, kPackedV, 8, false, false, true, true>;
  const int64_t tokens = (p.a.num_tokens + p.a.num_seqs - 1) / p.a.num_seqs;
  if (tokens * p.group > S::kColumns || !suits_tokens<S>(p)) return false;
  using Pairs = DecodeShape<Element, 128, kPackedV, 8, false, false, false, true>;
  if constexpr (Pairs::kHeads > 1) {
    if (p.a.num_kv_heads % Pairs::kHeads == 0 && launch_decode_kernel<Pairs>(p, launch)) return true;
  }
  return launch_decode_kernel<S>(p, launch);
}

template <class Element>
bool launch_tokens(const Problem& p, const Launch& launch) {
  bool done = false;
  dispatch_bool(p.a.value.dim != 1, [&]<bool kPackedV> {
    if constexpr (kPackedV && std::is_same_v<Element, ElementNvfp4>) {
      return;  // there is no such layout
    } else if (p.a.head_size > 128) {
      done = launch_tokens_kernel<ClusterShape<Element, 256, kPackedV, 8, false, false, true>>(p, launch);
    } else {
      dispatch_bool(p.a.head_size > 64, [&]<bool kLarge> {
        constexpr int kD = kLarge ? 128 : 64;
        if constexpr (kLarge) {
          if (p.a.num_tokens / p.a.num_seqs * p.group <= 8) {
            done = launch_tokens_kernel<ClusterShape<Element, kD, kPackedV, 8, false, false, true>>(p, launch);
          }
        }
        done = done || launch_tokens_kernel<ClusterShape<Element, kD, kPackedV, 16, false, false, true>>(p, launch);
        if constexpr (kLarge && Element::kBytes == 1) done = done || launch_tokens_line<Element, kPackedV>(p, launch);
      });
    }
  });
  return done;
}

}  // namespace pykv::attention
