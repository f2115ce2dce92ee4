// Short calls with 17 to 64 query rows on Hopper, where caches are rows of tokens: a cluster of blocks takes one KV head of a
// sequence, each block a part of the keys, in the way of verify/kernel.cuh, and each finishes some of the rows.
// There is no place to find on a line, and no second kernel.  Clusters beside each other may share the keys of few KV heads
// (decode/spans.cuh): each has a stretch of them here.
//
// A block has an SM for itself, and in it two groups of four warps compute, for a tile each: of clusters of twice as many blocks
// with one group a quarter would find no room.  Where there are more KV heads than SMs, two such blocks without a cluster do.
//
// Sums travel by copies from shared memory to that of the block that finishes their row, whose barrier counts them as they
// arrive: stores of 16 bytes (`st.async`) arrive at 8 bytes a cycle.
//
// Chain: lengths -> pages -> tiles -> one exchange -> output, for each query tile of the sequence, of which there is mostly one.
//
// Bottleneck: what is executed once, at the start and at the end, for its instructions come from the L2: 10 us with 32 rows, of
// which the floor has 4; and with 64 rows over elements of one byte one step after the other.  See
// docs/log/paged_attention/details.md.
#pragma once

#include "attention/cuda/verify/exchange.cuh"

namespace pykv::attention {

// kAlone: without a cluster, and with one group.
template <class Shape, bool kAlone>
struct VerifyClusterShape : Shape {
  static constexpr bool kSpans = false;
  static constexpr int kBlocksOfCluster = kAlone ? 1 : kMostBlocks;  // at most
  static constexpr int kGroups = kAlone ? 1 : 2, kBlock = (kGroups + 1) * kThreads, kBlocksPerSm = kAlone ? 2 : 1;
  static constexpr int kComputeRegisters = kAlone ? Shape::kComputeRegisters : 200;
  static constexpr int kCopyRegisters = kAlone ? Shape::kCopyRegisters : 96;
  static constexpr int kStages = kAlone && Shape::kD == 128 ? 2 : kMostClusterStages;
  static constexpr int kRingBytes = kStages * Shape::kStageBytes;
  static_assert(kStages % kGroups == 0);  // so that a group waits at the barriers of its own stages, each time
};

template <class S, class Softmax>
struct VerifyClusterKernel {
  using Place = ClusterPlace<S::kSpans>;
  using Pieces = ClusterPieces<S>;

  const Problem& p;
  VerifyKernel<S, Softmax, ClusterWalker<S::kSpans>> block;
  RowExchange<S>& exchange;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ void run() {
    const bool is_first = threadIdx.x == 0;
    if (is_first) {
      block.open_barriers();
      if (p.cluster > 1) {
        mbarrier_init(shared_address(&exchange.room), p.cluster);
        cluster_open(shared_address(&exchange.arrived));
      }
    }
    if (p.cluster > 1) cluster_announce();  // others may send
    if (blockIdx.x < p.early_blocks && block.brings_tiles()) foresee();
    wait_for_previous_kernel();
    RawSequence raw;
    const Place at(p, [&](int sequence) {
      raw = load_sequence(p, sequence);
      return clamp_sequence(p, raw);
    });
    if (!takes_call(p) || at.is_left_out()) {
      if (p.cluster > 1) cluster_wait();
      return;
    }
    const Pieces pieces{p, exchange, reinterpret_cast<RowSums<S>*>(block.ring), at};
    if (is_first) {
      if (p.cluster > 1 && takes(p, at.seq)) pieces.expect(at.seq.query_len, 0);
      if (at.rank == 0 && at.kv_head == 0 && at.span == 0) report_sequence(p, raw);
    }
    if (!block.brings_tiles())
      block.prefetch_rows(at.unit(), Pieces::ComputingThreads::thread(), S::kGroups * kThreads);
    __syncthreads();  // the barriers are open
    if (block.brings_tiles()) {
      give_registers<S::kCopyRegisters>();
      block.bring_tiles(at);
      let_next_kernel_start();
      if (p.cluster > 1) cluster_wait();
    } else {
      take_registers<S::kComputeRegisters>();
      if (p.cluster > 1) cluster_wait();
      block.compute_tiles(pieces);
    }
  }

  // While the kernel before still runs, the copying warps bring their first tokens into the L2, if lengths are what they are now.
  __device__ void foresee() const {
    const Place at(p, [&](int sequence) {
      const int len = __ldcg(words_at(p.a.seq_lens, sequence));
      return Sequence{static_cast<int>(clamp(len, 0, p.a.max_seq_len)), 0, p.tile_tokens};
    });
    const TileLoader<S>& tiles = block.tiles;
    const int token = at.keys(p, Extent(p, at.seq), 0).first_token + block.member / 2;
    if (token >= at.seq.len || at.is_left_out()) return;
    const auto [words, step] = place_in_table(p, at.sequence, token);
    const int id = __ldcg(words);
    if (static_cast<uint32_t>(id) >= static_cast<uint32_t>(p.a.num_blocks)) return;
    const char* row = block.lane % 2 ? tiles.value_row(id, token, at.kv_head) : tiles.key_row(id, token, at.kv_head);
    for (int i = 0; i < tiles.copies.head_bytes; i += 128) prefetch(row + i);
  }
#endif
};

template <class S, class Softmax>
struct VerifyClusterMemory : VerifyMemory<S, Softmax, ClusterWalker<S::kSpans>> {
  using Base = VerifyMemory<S, Softmax, ClusterWalker<S::kSpans>>;
  static_assert(S::kGroups * S::kRows * static_cast<int>(sizeof(RowSums<S>)) <= Base::kBytesBefore);
  RowExchange<S> exchange;
};

template <class S, class Softmax>
struct VerifyClusterBlock {
  static constexpr int kThreadsOfBlock = S::kBlock, kBlocksOfSm = S::kBlocksPerSm;

  static __device__ void run(const Problem& p, const CacheCopies& copies, char* memory) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using Memory = VerifyClusterMemory<S, Softmax>;
    auto& shared = *reinterpret_cast<Memory*>(memory + Memory::kBytesBefore);
    VerifyClusterKernel<S, Softmax>{p, shared.kernel(p, copies, memory), shared.exchange}.run();
#endif
  }
};

template <class S, class Softmax>
void launch_verify_cluster(const Problem& p, const Step& s, const Launch& launch) {
  constexpr int kBytes = verify_shared_bytes<S, VerifyClusterMemory<S, Softmax>>();
  constexpr VerifySizes kSizes = verify_sizes(S::kNarrow, S::kD, S::kRows, false);
  static_assert(kBytes == (S::kGroups == 1 ? kSizes.alone_bytes : kSizes.cluster_bytes));
  static_assert(S::kBlock == (S::kGroups + 1) * kThreads && S::kUnitTokens == kVerifyTile);
  launch_step<paged_attention_kernel<VerifyClusterBlock<S, Softmax>>>(p, s, kBytes, launch, copies_of<S>(p));
}

}  // namespace pykv::attention
