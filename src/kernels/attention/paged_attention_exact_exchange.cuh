// Clusters of blocks with batch_invariant: how the blocks of a KV head of a sequence add up what they found.
//
// Each block finishes some of the columns, and all send it what they have of these: records of chunks that they added up, and
// sums of parts (paged_attention_exact.cuh) whose chunk others have parts of, too.  A barrier counts the bytes as they arrive.
#pragma once

#include "attention/paged_attention_decode_load.cuh"
#include "cuda/cluster.cuh"

namespace pykv::attention {

template <class S>
struct ExactExchange : DecodeLoader<S> {
  using Base = DecodeLoader<S>;
  using Base::p;
  static constexpr int kQuads = S::kD / 4, kParts = kChunkTokens / kPartTokens;
  static constexpr int kRecordBytes = sizeof(ExactQuad), kPartBytes = sizeof(float4) + sizeof(float2);

  const int cluster = p.cluster, task = p.by_cluster.quotient(blockIdx.x), rank = p.by_cluster.remainder(blockIdx.x);
  const int sequence = task / p.a.num_kv_heads, kv_head = task - sequence * p.a.num_kv_heads;
  const int items = p.group * kQuads, each = p.block_items;  // four columns of a query each: of all blocks, of one

  // What a block finds in its shared memory once all have sent: records [block][item], parts [part][item], and their
  // maxima and sums.
  struct Exchange {
    ExactQuad* records;
    float4* parts;
    float2* part_stats;
    uint64_t* barrier;
  };

  __device__ Exchange exchange_at(char* at, uint64_t* barrier, bool records, int parts) const {
    Exchange x;
    x.records = reinterpret_cast<ExactQuad*>(at);
    x.parts = reinterpret_cast<float4*>(at + (records ? cluster * each * kRecordBytes : 0));
    x.part_stats = reinterpret_cast<float2*>(x.parts + parts * each);
    x.barrier = barrier;
    return x;
  }

  __device__ int expected_bytes(bool records, int parts) const {
    const int own = max(min(items - rank * each, each), 0);
    return own * (parts * kPartBytes + (records ? cluster * kRecordBytes : 0));
  }

  // Says how much is to come; then all blocks are there.
  __device__ void await_cluster(uint64_t* barrier, bool records, int parts) const {
    __syncwarp();  // else racecheck (CUDA 13.0) takes two steps of the one thread for a race
    if (threadIdx.x == 0) cluster_expect(shared_address(barrier), expected_bytes(records, parts));
    cluster_wait();
  }

  __device__ void send_part(const Exchange& to, int part, int item, float2 found, float4 sum) const {
    const int block = p.by_block_items.quotient(item), at = part * each + item - block * each;
    const uint32_t counter = cluster_address(shared_address(to.barrier), block);
    cluster_send(cluster_address(shared_address(to.parts + at), block), sum, counter);
    cluster_send(cluster_address(shared_address(to.part_stats + at), block), found, counter);
  }

  __device__ void send_record(const Exchange& to, int item, const ExactQuad& sum) const {
    const int block = p.by_block_items.quotient(item);
    const uint32_t at = cluster_address(shared_address(to.records + rank * each + item - block * each), block);
    const uint32_t counter = cluster_address(shared_address(to.barrier), block);
    const auto* words = reinterpret_cast<const float4*>(&sum);
#pragma unroll
    for (int i = 0; i < kRecordBytes / 16; ++i) cluster_send(at + i * 16, words[i], counter);
  }

  // Neighbouring lanes share the chunks and records of four columns, once these are there.
  __device__ void add_up(const Exchange& from, int records, int parts, int len) const {
    const int chunks = (parts + kParts - 1) / kParts, all = chunks + records;
    const int shift = all > 4 ? 3 : all > 2 ? 2 : all > 1, lanes = 1 << shift, mine = threadIdx.x & (lanes - 1);
    if (cluster == 1) {
      __syncthreads();
    } else {
      cluster_receive(shared_address(from.barrier));
    }
#pragma unroll 1
    for (int first = 0; first < each; first += blockDim.x >> shift) {
      const int i = first + (threadIdx.x >> shift), x = rank * each + i;
      const bool exists = i < each && x < items;
      ExactQuad sum = ExactQuad::empty();
#pragma unroll 1
      for (int u = mine; exists && u < all; u += lanes) {
        if (u < chunks) {
          float2 stats[kParts];
          float4 sums[kParts];
#pragma unroll
          for (int j = 0; j < kParts; ++j) {
            const int part = u * kParts + j;
            stats[j] = {-INFINITY, 0};
            sums[j] = {0, 0, 0, 0};
            if (part < parts) {
              stats[j] = from.part_stats[part * each + i];
              sums[j] = from.parts[part * each + i];
            }
          }
          const PartsOfChunk chunk = add_parts(stats, sums);
          sum.add(chunk.o, chunk.sum, chunk.maximum);
        } else {
          sum.add(from.records[(u - chunks) * each + i]);
        }
      }
#pragma unroll 1
      for (int m = 1; m < lanes; m *= 2) sum.add(sum.of_lane(m));
      if (exists && mine == 0) store(sum, x, len);
    }
  }

  __device__ void store(const ExactQuad& sum, int item, int len) const {
    const Row row = this->row_of_column(sequence, len, kv_head, item / kQuads);
    store_output<S>(p, row, item % kQuads * 4, sum.finish(p, row, kv_head));
  }
};

}  // namespace pykv::attention
