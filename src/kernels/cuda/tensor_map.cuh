// Copies of boxes of an array of bytes to shared memory by one thread (sm_90), as wgmma wants them (cuda/wgmma.cuh).
#pragma once

#include <cuda.h>

#include "cuda/launch.h"

namespace pykv {

// cuTensorMapEncodeTiled; null if the driver lacks it.
inline decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &result) !=
            cudaSuccess ||
        result != cudaDriverEntryPointSuccess) {
      cudaGetLastError();
      function = nullptr;
    }
    return reinterpret_cast<Encode>(function);
  }();
  return encode;
}

// make_tensor_map() of any number of dimensions.
inline bool encode_tensor_map(CUtensorMap& map, const void* data, int rank, const int64_t* sizes,
                              const int64_t* strides, const int* box) {
  const auto encode = tensor_map_encoder();
  if (!encode) return false;
  constexpr int kMost = 5;
  cuuint64_t all[kMost], steps[kMost];
  cuuint32_t boxes[kMost] = {128}, ones[kMost];
  for (int i = 0; i < rank; ++i) {
    all[i] = static_cast<cuuint64_t>(sizes[i]);
    ones[i] = 1;
    if (i == 0) continue;
    steps[i - 1] = static_cast<cuuint64_t>(strides[i - 1]);
    boxes[i] = static_cast<cuuint32_t>(box[i - 1]);
  }
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, static_cast<cuuint32_t>(rank), const_cast<void*>(data), all, steps,
                boxes, ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Describes an array of bytes of kRank dimensions, the first of which lies side by side, of which boxes are copied, 128 bytes wide
// and so many lines as the numbers of `box` multiply to; what lies outside is zero.  strides: bytes, of the second dimension on.
// False if the driver does not take it: addresses and strides must be multiples of 16.
template <int kRank>
bool make_tensor_map(CUtensorMap& map, const void* data, const int64_t (&sizes)[kRank],
                     const int64_t (&strides)[kRank - 1], const int (&box)[kRank - 1]) {
  return encode_tensor_map(map, data, kRank, sizes, strides, box);
}

// Copies the box that begins at `at`; the barrier counts its bytes, those outside the array, too.
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, const int (&at)[2], uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
          "r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(at[0]), "r"(at[1]), "r"(barrier)
      : "memory");
}
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, const int (&at)[3], uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(barrier)
      : "memory");
}
__device__ inline void copy_box(uint32_t to, const CUtensorMap& map, const int (&at)[5], uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5, "
      "%6}], [%7];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(barrier)
      : "memory");
}

// Copies a box from shared memory, but not what lies outside, in a group of such copies that this commits.
__device__ inline void store_box(const CUtensorMap& map, const int (&at)[2], uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3]; cp.async.bulk.commit_group;" ::"l"(
          reinterpret_cast<uint64_t>(&map)),
      "r"(at[0]), "r"(at[1]), "r"(from)
      : "memory");
}

// The same to every block of the cluster that `blocks` has a bit for, to the same place there, where its own barrier counts.
__device__ inline void copy_box_to_all(uint32_t to, const CUtensorMap& map, const int (&at)[2], uint32_t barrier,
                                       int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3}], [%4], %5;" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(at[0]), "r"(at[1]), "r"(barrier), "h"(static_cast<uint16_t>(blocks))
      : "memory");
}
__device__ inline void copy_box_to_all(uint32_t to, const CUtensorMap& map, const int (&at)[3], uint32_t barrier,
                                       int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(barrier),
      "h"(static_cast<uint16_t>(blocks))
      : "memory");
}

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

}  // namespace pykv
