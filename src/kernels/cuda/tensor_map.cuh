// Copies of rectangles of a matrix of bytes to shared memory by one thread (sm_90), as wgmma wants them (cuda/wgmma.cuh).
#pragma once

#include <cuda.h>

#include "cuda/launch.h"

namespace pykv {

// Describes matrices, `group_stride` bytes apart, of lines of `width` bytes, `stride` bytes apart, of which rectangles of 128 bytes
// and `box_lines` lines are copied; what lies outside is zero.  False if the driver does not take it: addresses and strides must
// be multiples of 16.
inline bool make_tensor_map(CUtensorMap& map, const void* data, int64_t width, int64_t lines, int64_t groups,
                            int64_t stride, int64_t group_stride, int box_lines) {
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
  if (!encode) return false;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(width), static_cast<cuuint64_t>(lines),
                               static_cast<cuuint64_t>(groups)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(stride), static_cast<cuuint64_t>(group_stride)};
  const cuuint32_t box[3] = {128, static_cast<cuuint32_t>(box_lines), 1}, steps[3] = {1, 1, 1};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(data), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Copies the rectangle that begins at byte `column` of `line`; the barrier counts its bytes, those outside the matrix, too.
__device__ inline void copy_rectangle(uint32_t to, const CUtensorMap& map, int column, int line, int group,
                                      uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(line), "r"(group), "r"(barrier)
      : "memory");
}

// The same to every block of the cluster that `blocks` has a bit for, to the same place there, where its own barrier counts.
__device__ inline void copy_rectangle_to_all(uint32_t to, const CUtensorMap& map, int column, int line, int group,
                                             uint32_t barrier, int blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, "
      "{%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(column), "r"(line), "r"(group), "r"(barrier),
      "h"(static_cast<uint16_t>(blocks))
      : "memory");
}

__device__ inline void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(reinterpret_cast<uint64_t>(&map)) : "memory");
}

}  // namespace pykv
