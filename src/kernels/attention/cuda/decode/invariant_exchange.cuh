// Clusters of blocks with batch_invariant: how the blocks of a KV head of a sequence add up what they found.
//
// Each block finishes some of the columns, and all send it what they have of these: records of chunks that they added up, or
// leaves, which are chunks (merge/exact.cuh).  A barrier counts the bytes as they arrive.
#pragma once

#include "attention/cuda/decode/spans.cuh"
#include "attention/cuda/merge/exact_lanes.cuh"
#include "cuda/cluster.cuh"

namespace pykv::attention {

template <class S>
struct InvariantExchange {
  static constexpr int kQuads = S::kD / 4, kParts = kChunkTokens / kPartTokens;
  static constexpr int kRecordBytes = sizeof(ExactQuad), kLeafBytes = sizeof(float4) + sizeof(float2);

  const Problem& p;
  ClusterSpans<S> block{p};
  ColumnResults<S> results{p};
  const int cluster = p.cluster;
  const int sequence = block.place / p.a.num_kv_heads, kv_head = block.place - sequence * p.a.num_kv_heads;
  const int items = p.group * kQuads, each = p.block_items;  // four columns of a query each: of all blocks, of one

  // What a block finds in its shared memory once all have sent: records [block][item]; or leaves [leaf][item], and their
  // maxima and sums.
  struct Exchange {
    ExactQuad* records;
    float4* leaves;
    float2* leaf_stats;
    uint64_t* barrier;
  };

  // Neighbouring lanes read what one item has of several blocks or chunks: these begin in different banks.
  static constexpr int leaf_places(int leaves, int each) { return leaves * (each + 1); }
  __device__ int leaf_at(int leaf, int i) const { return leaf * (each + 1) + i; }
  __device__ int record_at(int block, int i) const { return block * (each + 1) + i; }

  __device__ Exchange exchange_at(char* at, uint64_t* barrier, int leaves) const {
    auto* sums = reinterpret_cast<float4*>(at);
    return {reinterpret_cast<ExactQuad*>(at), sums, reinterpret_cast<float2*>(sums + leaf_places(leaves, each)),
            barrier};
  }

  // Says how much is to come; then all blocks are there.
  __device__ void await_cluster(uint64_t* barrier, bool records, int leaves) const {
    const int own = max(min(items - block.rank * each, each), 0);
    __syncwarp();  // else racecheck (CUDA 13.0) takes two steps of the one thread for a race
    if (threadIdx.x == 0) {
      cluster_expect(shared_address(barrier), own * (records ? cluster * kRecordBytes : leaves * kLeafBytes));
    }
    cluster_wait();
  }

  __device__ void send_leaf(const Exchange& to, int leaf, int item, float2 found, float4 sum) const {
    if (cluster == 1) {
      to.leaves[leaf_at(leaf, item)] = sum;
      to.leaf_stats[leaf_at(leaf, item)] = found;
      return;
    }
    const int receiver = p.by_block_items.quotient(item), at = leaf_at(leaf, item - receiver * each);
    const uint32_t counter = cluster_address(shared_address(to.barrier), receiver);
    cluster_send(cluster_address(shared_address(to.leaves + at), receiver), sum, counter);
    cluster_send(cluster_address(shared_address(to.leaf_stats + at), receiver), found, counter);
  }

  __device__ void send_record(const Exchange& to, int item, const ExactQuad& sum) const {
    const int receiver = p.by_block_items.quotient(item);
    const uint32_t at =
        cluster_address(shared_address(to.records + record_at(block.rank, item - receiver * each)), receiver);
    const uint32_t counter = cluster_address(shared_address(to.barrier), receiver);
    const auto* words = reinterpret_cast<const float4*>(&sum);
#pragma unroll
    for (int i = 0; i < kRecordBytes / 16; ++i) cluster_send(at + i * 16, words[i], counter);
  }

  __device__ void add_up_records(const Exchange& from, int records, int len) const {
    add_up_all<ExactQuad>(from, records, len, [&](int u, int i) { return from.records[record_at(u, i)]; });
  }

  __device__ void add_up_leaves(const Exchange& from, int leaves, int len) const {
    add_up_all<PartsOfChunk>(from, leaves, len, [&](int leaf, int i) {
      const float2 stats = from.leaf_stats[leaf_at(leaf, i)];
      return stats.y == 0 ? PartsOfChunk{} : PartsOfChunk{stats.x, stats.y, from.leaves[leaf_at(leaf, i)]};
    });
  }

  // For the result, or for what the clusters of all spans add up together.
  template <class Term>
  __device__ void add_up_all(const Exchange& from, int terms, int len, auto&& term_at) const {
    if constexpr (S::kSpans) {
      if (block.spans() > 1) return join_spans<Term>(from, terms, len, term_at);
    }
    add_up<Term>(from, terms, len, term_at);
  }

  // Of neighbouring lanes that share the terms of four columns.
  __device__ int lanes_shift(int terms) const {
    int shift = 0;
    while (shift < 4 && 1 << shift < terms && each << (shift + 1) <= blockDim.x) ++shift;
    return shift;
  }

  // Once all are there.
  template <class Term>
  __device__ void add_up(const Exchange& from, int terms, int len, auto&& term_at) const {
    const int shift = lanes_shift(terms);
    const int lanes = 1 << shift, mine = threadIdx.x & (lanes - 1);
    if (cluster == 1) {
      __syncthreads();
    } else {
      cluster_receive(shared_address(from.barrier));
    }
#pragma unroll 1
    for (int first = 0; first < each; first += blockDim.x >> shift) {
      const int i = first + (threadIdx.x >> shift), x = block.rank * each + i, end = i < each && x < items ? terms : 0;
      MergedQuad sum;
      Term term;
#pragma unroll 1
      for (int u = mine; u < end; u += lanes) {
        term = term_at(u, i);
        sum.see(term);
      }
#pragma unroll 1
      for (int m = 1; m < lanes; m *= 2) sum.agree(m);
#pragma unroll 1
      for (int u = mine; u < end; u += lanes) {
        if (terms > lanes) term = term_at(u, i);
        sum.add(term);
      }
#pragma unroll 1
      for (int m = 1; m < lanes; m *= 2) sum.add_lane(m);
      if (i < each && x < items && mine == 0) store(sum, x, len);
    }
  }

  // The same of a cluster that has a span of the keys: sums that its block leaves for the last of all clusters'.
  template <class Term>
  __device__ void join_spans(const Exchange& from, int terms, int len, auto&& term_at) const {
    const int shift = lanes_shift(terms);
    const int lanes = 1 << shift, mine = threadIdx.x & (lanes - 1), own = max(min(items - block.rank * each, each), 0);
    cluster_receive(shared_address(from.barrier));
#pragma unroll 1
    for (int first = 0; first < each; first += blockDim.x >> shift) {
      const int i = first + (threadIdx.x >> shift), x = block.rank * each + i;
      ExactQuad sum = ExactQuad::empty();
#pragma unroll 1
      for (int u = mine; i < own && u < terms; u += lanes) {
        const Term term = term_at(u, i);
        if constexpr (std::is_same_v<Term, ExactQuad>) {
          sum.add(term);
        } else {
          sum.add(term.o, term.sum, term.maximum);
        }
      }
      __syncwarp();
#pragma unroll 1
      for (int m = 1; m < lanes; m *= 2) sum.add(sum.of_lane(m));
      if (i < own && mine == 0) ExactQuad::at(p, blockIdx.x, x / kQuads, x % kQuads) = sum;
    }
    block.pieces().template join<ExactQuad>(kQuads, block.rank * each, own,
                                            [&](int item, const ExactQuad& sum) { store(sum, item, len); });
  }

  __device__ void store(const auto& sum, int item, int len) const {
    const Row row = results.row_of_column(sequence, len, kv_head, item / kQuads);
    store_output<S>(p, row, item % kQuads * 4, sum.finish(p, row, kv_head));
  }
};

}  // namespace pykv::attention
