// to[b'] = from[b] for each pair (b, b') and each array, one side on the host or on another device.
//
// Bound by the link, some 50 GB/s on PCIe 5: what counts is to keep enough of it in flight, and to issue tens of
// thousands of pieces in little host time.
//
// - Blocks that follow each other on both sides are one run.  Few long runs go to the copy engines, which leave the SMs
//   alone; so does all that a kernel cannot reach: pageable memory, other devices.
// - Many short runs go to a kernel that reads and writes pinned memory itself, because each run would cost the copy
//   engine's queue some microseconds on either side.  A few blocks of threads fill the link (32 * 256 threads * 64 bytes
//   in flight) and leave nearly all SMs to the kernels of other streams.  Arrays and pairs travel in its parameters, a
//   thousand and more at a time: eight launches in a row lose 1 to 2 % where one ends and the next begins.
//
// What that is of an H200's link (54.8 GB/s out, 55.4 in, as one large copy), for scattered runs of so many bytes in each of 32
// arrays, by the kernel and by two-dimensional copies, whose rows are the arrays:
//
//           32 KB        64 KB        128 KB       320 KB       1 MB
//   out     94 %, 70 %   96 %, 86 %   96 %, 90 %   96 %, 97 %   96 %, 100 %
//   in      92 %, 66 %   93 %, 91 %   92 %, 96 %   92 %, 98 %   92 %, 100 %
//
// So 95 % of the way out are there from runs of 64 KB on, 95 % of the way in from 128 KB, by copies.  Accesses of SMs to the host
// get no more from the link: by 4 blocks of threads (on the way in 16) or by 132, in whatever order, with hints to L2 (of 256
// bytes) or past it, or as bulk copies of 4 to 32 KB through shared memory, up to 192 KB under way in each of 1 to 16 blocks
// (94.9 % out, 92.7 % in).  The copy engines want 0.3 us more for each row, be it from one stream or from four.  Both at once,
// a tenth to a fifth of the blocks of 32 KB by copies, make 93.9 % of the way in, in 0.3 ms of the host where the kernel alone
// takes 0.02, and nothing of the way out; more by copies makes less.  A batch of copies in one driver call makes 46 to 86 %, in
// 14 to 46 ms of the host.  Two-dimensional copies are left out all the same: the driver refuses one whose rows are allocations
// of their own, as the arrays of layers mostly are.
#include <algorithm>
#include <vector>

#include "cache/blocks/swap_blocks.h"
#include "cuda/divider.cuh"
#include "cuda/launch.h"
#include "cuda/pinned.h"

namespace pykv {
namespace {

constexpr int kThreads = 256, kVectorsPerThread = 4, kBlocks = 32;
constexpr int kMaxArrays = 64, kFewPairs = 128, kManyPairs = 1408;  // 3 KB of parameters, or 24 of the 32 there may be

// The copy engines: runs at least this long, and so few that issuing them takes some hundred microseconds.
constexpr int64_t kLongRun = 1 << 20, kMostRuns = 128;

template <int kMaxPairs>
struct Work {
  BlockArray arrays[kMaxArrays];
  BlockPair pairs[kMaxPairs];
  int64_t block_bytes;
  uint32_t num_vectors;        // of all pairs and arrays
  Divider in_block, of_pairs;  // vectors of a block, number of pairs
};

// Vectors are numbered through all arrays, pairs and blocks; each block of threads takes 1024 in a row at a time.
template <class Vector, int kMaxPairs>
__global__ void __launch_bounds__(kThreads) swap_blocks_kernel(const __grid_constant__ Work<kMaxPairs> work) {
  constexpr uint32_t kTile = kThreads * kVectorsPerThread;
  for (uint32_t first = blockIdx.x * kTile; first < work.num_vectors; first += gridDim.x * kTile) {
    Vector v[kVectorsPerThread];
    char* to[kVectorsPerThread];
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i) {
      const uint32_t n = first + i * kThreads + threadIdx.x;
      if (n >= work.num_vectors) continue;
      uint32_t vector, p;
      const uint32_t array = work.of_pairs(work.in_block(n, vector), p);
      const BlockPair pair = work.pairs[p];
      const int64_t offset = vector * int64_t{sizeof(Vector)};
      v[i] = *reinterpret_cast<const Vector*>(work.arrays[array].from + pair.from * work.block_bytes + offset);
      to[i] = work.arrays[array].to + pair.to * work.block_bytes + offset;
    }
#pragma unroll
    for (int i = 0; i < kVectorsPerThread; ++i)
      if (first + i * kThreads + threadIdx.x < work.num_vectors) *reinterpret_cast<Vector*>(to[i]) = v[i];
  }
}

template <class Vector, int kMaxPairs>
void launch_all(const SwapBlocksArgs& args, const std::vector<BlockArray>& arrays, const Launch& launch) {
  constexpr uint32_t kTile = kThreads * kVectorsPerThread;
  constexpr int64_t kMostVectors = int64_t{1} << 30;  // of a launch: numbers stay below 2^31
  const int64_t in_block = args.block_bytes / static_cast<int64_t>(sizeof(Vector));
  const int64_t pairs_at_once = std::clamp<int64_t>(kMostVectors / in_block, 1, kMaxPairs);
  const int64_t arrays_at_once = std::clamp<int64_t>(kMostVectors / (in_block * pairs_at_once), 1, kMaxArrays);
  Work<kMaxPairs> work;
  work.block_bytes = args.block_bytes;
  work.in_block = Divider(in_block);
  for (int64_t part = 0, first = 0; part < args.num_parts; ++part) {
    for (int64_t n; first < args.part_ends[part]; first += n) {
      n = std::min(args.part_ends[part] - first, pairs_at_once);
      std::copy_n(args.pairs + first, n, work.pairs);
      work.of_pairs = Divider(n);
      for (int64_t array = 0; array < args.num_arrays; array += arrays_at_once) {
        const int64_t m = std::min(args.num_arrays - array, arrays_at_once);
        std::copy_n(arrays.begin() + array, m, work.arrays);
        work.num_vectors = static_cast<uint32_t>(m * n * in_block);
        const uint32_t grid = std::min<uint32_t>((work.num_vectors + kTile - 1) / kTile, kBlocks);
        swap_blocks_kernel<Vector, kMaxPairs><<<grid, kThreads, 0, stream_of(launch)>>>(work);
        check_launch("swap_blocks");
      }
    }
  }
}

void copy_by_kernel(const SwapBlocksArgs& args, const std::vector<BlockArray>& arrays, const Launch& launch) {
  uint64_t bits = 16 | args.block_bytes;
  for (const BlockArray& a : arrays) bits |= reinterpret_cast<uintptr_t>(a.from) | reinterpret_cast<uintptr_t>(a.to);
  const auto launch_with = [&]<class Vector> {
    return args.num_pairs <= kFewPairs ? launch_all<Vector, kFewPairs>(args, arrays, launch)
                                       : launch_all<Vector, kManyPairs>(args, arrays, launch);
  };
  switch (bits & -bits) {  // the largest power of two that divides all addresses
    case 16:
      return launch_with.operator()<uint4>();
    case 8:
      return launch_with.operator()<uint2>();
    case 4:
      return launch_with.operator()<uint32_t>();
    case 2:
      return launch_with.operator()<uint16_t>();
    default:
      return launch_with.operator()<uint8_t>();
  }
}

struct Run {
  BlockPair first;
  int64_t length;
};

std::vector<Run> runs_of(const SwapBlocksArgs& args) {
  std::vector<Run> runs;
  for (int64_t i = 0; i < args.num_pairs; ++i) {
    const BlockPair& p = args.pairs[i];
    if (!runs.empty() && p.from == runs.back().first.from + runs.back().length &&
        p.to == runs.back().first.to + runs.back().length)
      ++runs.back().length;
    else
      runs.push_back({p, 1});
  }
  return runs;
}

void copy_runs(const SwapBlocksArgs& args, const std::vector<Run>& runs, const Launch& launch) {
  const bool peers = args.from_device >= 0 && args.to_device >= 0;
  const auto kind = args.to_device >= 0 ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
  for (int64_t i = 0; i < args.num_arrays; ++i)
    for (const Run& run : runs) {
      const char* from = args.arrays[i].from + run.first.from * args.block_bytes;
      char* to = args.arrays[i].to + run.first.to * args.block_bytes;
      const size_t bytes = static_cast<size_t>(run.length * args.block_bytes);
      if (peers)
        cuda_check(cudaMemcpyPeerAsync(to, args.to_device, from, args.from_device, bytes, stream_of(launch)),
                   "cudaMemcpyPeerAsync");
      else
        cuda_check(cudaMemcpyAsync(to, from, bytes, kind, stream_of(launch)), "cudaMemcpyAsync");
    }
}

// The arrays by addresses of the device; none if one of them is not pinned.
std::vector<BlockArray> pinned_arrays(const SwapBlocksArgs& args) {
  int64_t from_blocks = 0, to_blocks = 0;
  for (int64_t i = 0; i < args.num_pairs; ++i) {
    from_blocks = std::max(from_blocks, args.pairs[i].from + 1);
    to_blocks = std::max(to_blocks, args.pairs[i].to + 1);
  }
  std::vector<BlockArray> arrays(args.arrays, args.arrays + args.num_arrays);
  for (BlockArray& a : arrays) {
    if (args.from_device < 0) a.from = on_device(a.from, from_blocks * args.block_bytes);
    if (args.to_device < 0) a.to = on_device(a.to, to_blocks * args.block_bytes);
    if (!a.from || !a.to) return {};
  }
  return arrays;
}

}  // namespace

void swap_blocks_cuda(const SwapBlocksArgs& args, const Launch& launch) {
  const std::vector<Run> runs = runs_of(args);
  const int64_t num_runs = static_cast<int64_t>(runs.size());
  const bool long_runs =
      args.num_pairs * args.block_bytes >= num_runs * kLongRun && num_runs * args.num_arrays <= kMostRuns;
  // blocks of a GB and more are beyond the kernel's numbers, and good for the copy engines anyway
  const bool reachable = (args.from_device < 0 || args.to_device < 0) && args.block_bytes < int64_t{1} << 30;
  if (reachable && !long_runs)
    if (const std::vector<BlockArray> arrays = pinned_arrays(args); !arrays.empty())
      return copy_by_kernel(args, arrays, launch);
  copy_runs(args, runs, launch);
}

}  // namespace pykv
