// One row, shared by the blocks of a cluster, in vectors of 16 bytes.
#pragma once

#include <algorithm>
#include <atomic>

#include "cuda/clusters_at_once.cuh"
#include "cuda/dependent_shared.cuh"
#include "cuda/vec.cuh"
#include "sampling/row_exchange.cuh"
#include "sampling/select.cuh"

namespace pykv {

// A block's columns begin to end - 1 of a row.  Vectors are aligned whatever the row's own alignment: the first one may begin
// before its columns.
template <class T>
struct RowSlice {
  const T* row;
  int begin, end;
  int first_vector;  // the column of its first element
  int width;         // columns of each block but the last ones, which may have less

  static constexpr int kSize = kPackSize<T>;

  __device__ RowSlice(const T* row_, int size, int rank, int blocks) : row(row_) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(T) % kSize);
    // Borders between blocks are borders between four vectors.
    const int vectors = (size + shift + kSize - 1) / kSize;
    const int each = ((vectors + blocks - 1) / blocks + 3) & ~3;
    width = each * kSize;
    first_vector = rank * width - shift;
    begin = max(first_vector, 0);
    end = max(begin, static_cast<int>(min(int64_t{rank + 1} * width - shift, int64_t{size})));
  }

  // Brings what each thread reads first into L2.
  __device__ void prefetch_first() const {
    const int at = first_vector + static_cast<int>(threadIdx.x) * kSize;
    if (at < end) prefetch(row + max(at, 0));
  }

  // The same for all, up to 128 bytes a thread.
  __device__ void prefetch_lines() const {
    const int at = begin + static_cast<int>(threadIdx.x) * static_cast<int>(128 / sizeof(T));
    if (at < end) prefetch(row + at);
  }

  // The vector that begins with column `at`; what lies outside is -infinity.
  __device__ Pack<T> load(int at) const {
    if (at >= end || at + kSize <= begin) return filled<T, kSize>(-__int_as_float(0x7f800000));
    if (at >= begin && at <= end - kSize) return load_vec_in_order<Pack<T>>(row + at);
    // An element at a time moves up from below, which is little code.
    uint32_t words[4] = {};
    const T nothing = from_float<T>(-__int_as_float(0x7f800000));
#pragma unroll 1
    for (int i = 0; i < kSize; ++i) {
      const T x = at + i >= begin && at + i < end ? row[at + i] : nothing;
      if constexpr (sizeof(T) == 4) {
        words[0] = words[1];
        words[1] = words[2];
        words[2] = words[3];
        words[3] = __float_as_uint(to_float(x));
      } else {
        uint16_t bits;
        __builtin_memcpy(&bits, &x, sizeof bits);
#pragma unroll
        for (int w = 0; w < 3; ++w) words[w] = __funnelshift_r(words[w], words[w + 1], 16);
        words[3] = words[3] >> 16 | uint32_t{bits} << 16;
      }
    }
    Pack<T> v;
    __builtin_memcpy(&v, words, sizeof v);
    return v;
  }
};

// Whether the blocks of all rows find room at once, each on a multiprocessor of its own.
template <auto kKernel>
bool has_room_for(int64_t rows, int blocks, const Launch& launch) {
  if (blocks == 1) return rows <= num_sms(launch.device);
  constexpr int kSharedBytes = 160 << 10;
  return rows <= clusters_at_once<kKernel>(launch, blocks, kSelectThreads, kSharedBytes);
}

// How many blocks share a row, a power of 2: as many as there is room for at once, each with some work.
template <auto kKernel>
int blocks_for_row(int64_t rows, int64_t cols, const Launch& launch) {
  constexpr int64_t kLeastColumns = 4096, kFewRows = 2;
  if (!overlaps_kernels(launch.device)) return 1;  // clusters came with the same chips
  int64_t blocks = rows <= kFewRows && has_room_for<kKernel>(rows, kMostBlocks, launch) ? kMostBlocks : kPortableBlocks;
  const int64_t room =
      num_sms(launch.device);  // of clusters that want two blocks on one, an H100 takes 62, and the others after them
  while (blocks > 1 && (blocks * rows > room || cols / blocks < kLeastColumns)) blocks /= 2;
  return static_cast<int>(blocks);
}

// Launches clusters of `blocks` blocks, one for each row.
template <auto kKernel, class... Parameters>
void launch_rows(int64_t rows, int blocks, int threads, int shared_bytes, const Launch& launch, const char* op,
                 const Parameters&... parameters) {
  if (rows * blocks > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 rows are supported");
  // What is more than 48 KiB together with the kernel's own has to be asked for, once on each device.
  constexpr int kWithoutAsking = 24 << 10, kDevices = 64;
  static std::atomic<int> allowed[kDevices];
  if (shared_bytes > kWithoutAsking &&
      (launch.device >= kDevices || allowed[launch.device].load(std::memory_order_relaxed) < shared_bytes)) {
    cuda_check(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), op);
    if (launch.device < kDevices) allowed[launch.device].store(shared_bytes, std::memory_order_relaxed);
  }
  launch_clusters(kKernel, dim3(static_cast<unsigned>(rows * blocks)), dim3(static_cast<unsigned>(threads)),
                  static_cast<unsigned>(blocks), static_cast<size_t>(shared_bytes), launch, op, parameters...);
}

}  // namespace pykv
