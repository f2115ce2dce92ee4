// What the blocks of a row, which are a cluster, tell each other: numbers, or a list of entries.
//
// These are sent, and a barrier of the block that gets them counts their bytes.  A barrier of the cluster is for what a block
// looks up in others: its release takes as long as a fence of the whole device, and its acquire empties the L1.
#pragma once

#include "cuda/cluster.cuh"
#include "cuda/cp_async.cuh"
#include "sampling/logit_order.h"

namespace pykv {

constexpr int kPortableBlocks = 8, kMostBlocks = 16;  // that share a row, powers of 2

// Four words that lie at `shared`, aligned, in block `rank`.
__device__ inline uint4 load_from_block(const uint32_t* shared, int rank) {
  uint4 words{};
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(cluster_address(shared_address(shared), rank))
               : "memory");
#endif
  return words;
}

__device__ inline void cluster_barrier() {
  cluster_announce_all();
  cluster_wait();
}

struct ExchangeMemory {
  alignas(8) uint64_t numbers[2][kMostBlocks];
  uint64_t barriers[3];  // of both, and of a list
};

// All threads of all blocks call its functions together.
class RowExchange {
 public:
  // The blocks wait for each other later, when they have long come.
  __device__ RowExchange(ExchangeMemory& memory, int rank, int blocks) : memory_(memory), rank_(rank), blocks_(blocks) {
    if (blocks == 1) return;
    if (threadIdx.x == 0)
      for (uint64_t& barrier : memory.barriers) cluster_open(shared_address(&barrier));
    cluster_announce();
  }
  // Before the first exchange.
  __device__ void wait_for_blocks() const {
    if (blocks_ > 1) cluster_wait();
  }

  __device__ int rank() const { return alone_ ? 0 : rank_; }
  __device__ int blocks() const { return alone_ ? 1 : blocks_; }
  // Whether this block goes on without the others.
  __device__ void set_alone(bool alone) { alone_ = alone; }

  // Gives a lane the number of the block that it is called after, or `otherwise`.  A block gives the same one in all threads.
  __device__ uint64_t number_of_lane(uint64_t number, uint64_t otherwise) {
    const int thread = threadIdx.x, lane = thread % 32, which = uses_ % 2, parity = uses_ / 2 % 2;
    ++uses_;  // numbers of the next exchange may come while some threads still read those of this one
    const uint32_t barrier = shared_address(&memory_.barriers[which]);
    __syncthreads();  // but those of the next but one may not
    if (thread == 0) cluster_expect(barrier, blocks_ * sizeof(uint64_t));
    if (thread < blocks_) send(&memory_.numbers[which][rank_], number, thread, barrier);
    cluster_receive(barrier, parity);
    return lane < blocks_ ? memory_.numbers[which][lane] : otherwise;
  }

  // Gives all blocks the number of the first one.
  __device__ uint64_t number_of_first(uint64_t number) {
    return blocks_ == 1 ? number : __shfl_sync(0xffffffffu, number_of_lane(number, 0), 0);
  }

  // Where this block's `n` entries come in the list of all blocks, and how many those are.
  struct ListPlace {
    int before, total;
  };
  __device__ ListPlace place_of_list(int n) {
    uint32_t key = 0;
    return place_of_list(n, key);
  }
  // The same; `key` becomes the largest one of all blocks.
  __device__ ListPlace place_of_list(int n, uint32_t& key) {
    if (blocks_ == 1) return {0, n};
    const uint64_t of_lane = number_of_lane(uint64_t{key} << 32 | static_cast<uint32_t>(n), 0);
    key = __reduce_max_sync(0xffffffffu, static_cast<uint32_t>(of_lane >> 32));
    const uint32_t size = static_cast<uint32_t>(of_lane);
    return {static_cast<int>(__reduce_add_sync(0xffffffffu, static_cast<int>(threadIdx.x) % 32 < rank_ ? size : 0)),
            static_cast<int>(__reduce_add_sync(0xffffffffu, size))};
  }

  // Appends the entries of all blocks to those of the first one, which has room.  Other blocks may end before it has them.
  __device__ void append_to_first(Entry* entries, int n, ListPlace place) {
    if (blocks_ == 1) return;
    const uint32_t barrier = shared_address(&memory_.barriers[2]);
    if (rank_ != 0) {
      for (int i = threadIdx.x; i < n; i += static_cast<int>(blockDim.x))
        send(entries + place.before + i, entries[i], 0, barrier);
    } else {
      if (threadIdx.x == 0) cluster_expect(barrier, (place.total - n) * sizeof(Entry));
      cluster_receive(barrier, lists_ % 2);
    }
    ++lists_;
  }

 private:
  // To where `to` and its barrier lie in another block.
  static __device__ void send(const uint64_t* to, uint64_t x, int rank, uint32_t barrier) {
    cluster_send(cluster_address(shared_address(to), rank),
                 float2{__uint_as_float(static_cast<uint32_t>(x)), __uint_as_float(static_cast<uint32_t>(x >> 32))},
                 cluster_address(barrier, rank));
  }

  ExchangeMemory& memory_;
  int rank_, blocks_, uses_ = 0, lists_ = 0;
  bool alone_ = false;
};

}  // namespace pykv
