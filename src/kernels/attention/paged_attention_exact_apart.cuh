// Decoding of one long sequence with batch_invariant by more blocks for a KV head than a cluster has: each leaves the sums of its
// chunks in the workspace, and the last of them adds up.  No block waits for another.
#pragma once

#include "attention/paged_attention_exact_exchange.cuh"
#include "attention/paged_attention_launch.cuh"
#include "attention/paged_attention_pieces.cuh"

namespace pykv::attention {

template <class S>
struct ExactApart : ExactExchange<S, 1> {
  using Sums = ExactExchange<S, 1>;
  using Sums::cluster;
  using Sums::items;
  using Sums::kQuads;
  using Sums::lane;
  using Sums::p;
  using Sums::warp;

  // Are the blocks more than a cluster has?
  __device__ bool is_apart() const { return cluster > kMostBlocks; }

  __device__ void leave_record(int item, const ExactQuad& sum) const {
    (&ExactQuad::at(p, blockIdx.x, 0, 0))[item] = sum;
  }

  // When all threads have left theirs.  The last block has `room` bytes for as many records as may be at a time.
  __device__ void join(char* memory, int room, int len) const {
    const int first = blockIdx.x - this->rank;
    __syncthreads();
    if (threadIdx.x == 0) hand_over_pieces(p, blockIdx.x, -1, p.ticket);
    __syncthreads();
    const auto slot_of = [first](int b) { return first + b; };
    if (!are_there(p, cluster, slot_of)) return;

    // The lanes of a half of each warp, if there are so many, have an item each.
    const int shift = 2 * items <= blockDim.x, width = 32 >> shift;
    const int item = warp * width + lane % width, mine = lane / width;
    const auto* records = reinterpret_cast<const ExactQuad*>(memory);
    const int at_once = room / (items * Sums::kRecordBytes), words = items * (Sums::kRecordBytes / 16);
    ExactQuad sum = ExactQuad::empty();
#pragma unroll 1
    for (int begin = 0; begin < cluster; begin += at_once) {
      const int count = min(at_once, cluster - begin);
      __syncthreads();  // of those before nobody needs any
#pragma unroll 4
      for (int b = 0; b < count; ++b) {
        const char* from = reinterpret_cast<const char*>(&ExactQuad::at(p, first + begin + b, 0, 0));
        const uint32_t to = shared_address(memory) + b * words * 16;
        for (int x = threadIdx.x; x < words; x += blockDim.x) cp_async_16(to + x * 16, from + x * 16, true);
      }
      cp_async_commit();
      cp_async_wait<0>();
      __syncthreads();
#pragma unroll 1
      for (int b = mine; item < items && b < count; b += 1 << shift) sum.add(records[b * items + item]);
    }
    if (shift > 0) sum.add(sum.of_lane(width));
    if (item < items && mine == 0) this->store(sum, item, len);
    forget(p, cluster, slot_of);
  }
};

}  // namespace pykv::attention
