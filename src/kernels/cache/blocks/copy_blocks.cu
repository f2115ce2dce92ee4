// to[b'] = from[b] for each pair (b, b') and each array.
//
// A block of threads copies 16 KB of one pair of one array: memory-bound, each byte is read and written once.  Arrays, and
// pairs that lie on the host, travel in the kernel's parameters: nothing is allocated or copied beforehand, so a graph
// capture holds all it needs.  Pairs on the device are read, and checked, by the kernel.
//
// Launches of one call that copy other pairs or arrays of one kind need not wait for each other: the first one waits for what
// came before and lets the next one start after that, the others wait at their end, so that none leaves before those before.
#include <algorithm>

#include "cache/blocks/copy_blocks.h"
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/vec.cuh"

namespace pykv {
namespace {

constexpr int kThreads = 256, kVectorsPerThread = 4;
constexpr int kMaxArrays = 64, kFewPairs = 128, kManyPairs = 1024;  // 3 and 17 KB of parameters, which may take 32

struct Layout {
  int64_t stride;
  int64_t vectors;              // of a block
  Divider piece, size0, size1;  // vectors of a piece, pieces of the inner dimensions
  int64_t strides[3];
  bool contiguous;
  bool is_first;  // of the launches that need not wait for each other
};

struct Arrays {
  BlockArray array[kMaxArrays];
};

template <int kCount>
struct HostPairs {  // known before the wait
  static constexpr bool kKnown = true;
  BlockPair pair[kCount];
  __device__ bool get(uint32_t i, BlockPair& p) const {
    p = pair[i];
    return true;
  }
};

struct DevicePairs {
  static constexpr bool kKnown = false;
  Index from, to;
  int64_t first, num_blocks;
  Reporter report;
  __device__ bool get(uint32_t i, BlockPair& p) const {
    p = {from[first + i], to[first + i]};
    const bool from_inside = p.from >= 0 && p.from < num_blocks, to_inside = p.to >= 0 && p.to < num_blocks;
    if (!from_inside || !to_inside) report(from_inside ? p.to : p.from, num_blocks);
    return from_inside && to_inside && p.from != p.to;
  }
};

template <class Vector>
__device__ __forceinline__ int64_t offset_of(const Layout& layout, int64_t vector) {
  if (layout.contiguous) return vector * static_cast<int64_t>(sizeof(Vector));
  uint32_t in_piece, i0, i1;
  const uint32_t i2 = layout.size1(layout.size0(layout.piece(static_cast<uint32_t>(vector), in_piece), i0), i1);
  return in_piece * sizeof(Vector) + i0 * layout.strides[0] + i1 * layout.strides[1] + i2 * layout.strides[2];
}

// Grid: pieces of 4 * 256 vectors x pairs x arrays.
template <class Vector, class Pairs>
__global__ void __launch_bounds__(kThreads)
    copy_blocks_kernel(const __grid_constant__ Layout layout, const __grid_constant__ Arrays arrays,
                       const __grid_constant__ Pairs pairs) {
  const auto leave = [&] {
    if (!layout.is_first) wait_for_previous_kernel();
  };
  if (layout.is_first && !Pairs::kKnown) wait_for_previous_kernel();
  BlockPair pair;
  if (!pairs.get(blockIdx.y, pair)) return leave();
  const char* from = arrays.array[blockIdx.z].from + pair.from * layout.stride;
  char* to = arrays.array[blockIdx.z].to + pair.to * layout.stride;
  const bool early = comes_early() && blockIdx.z == 0 && uint64_t{blockIdx.y} * gridDim.x < 1024;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kVectorsPerThread) + threadIdx.x;
  Vector v[kVectorsPerThread];
  int64_t offset[kVectorsPerThread];
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i) {
    const int64_t vector = first + i * kThreads;
    offset[i] = vector < layout.vectors ? offset_of<Vector>(layout, vector) : -1;
    if (Pairs::kKnown && layout.is_first && early && vector < layout.vectors) prefetch(from + offset[i]);
  }
  if (layout.is_first && Pairs::kKnown) wait_for_previous_kernel();
  let_next_kernel_start();
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i)
    if (first + i * kThreads < layout.vectors) v[i] = *reinterpret_cast<const Vector*>(from + offset[i]);
#pragma unroll
  for (int i = 0; i < kVectorsPerThread; ++i)
    if (first + i * kThreads < layout.vectors) *reinterpret_cast<Vector*>(to + offset[i]) = v[i];
  leave();
}

// The largest power of two up to 16 that divides all addresses and distances.
int64_t vector_bytes(const CopyBlocksArgs& args) {
  uint64_t bits = 16 | args.shape.stride | args.shape.piece;
  for (int64_t stride : args.shape.strides) bits |= stride;
  for (int64_t i = 0; i < args.num_arrays; ++i)
    bits |= reinterpret_cast<uintptr_t>(args.arrays[i].from) | reinterpret_cast<uintptr_t>(args.arrays[i].to);
  return static_cast<int64_t>(bits & -bits);
}

template <class Vector, class Pairs>
void launch_pairs(const CopyBlocksArgs& args, const Pairs& pairs, int64_t num_pairs, bool is_first,
                  const Launch& launch) {
  const BlockShape& s = args.shape;
  const int64_t pieces = s.num_pieces(), in_piece = s.piece / static_cast<int64_t>(sizeof(Vector));
  Layout layout{s.stride, pieces * in_piece, in_piece, s.sizes[0], s.sizes[1], {}, pieces == 1, is_first};
  std::copy_n(s.strides, 3, layout.strides);
  const int64_t grid = (layout.vectors + kThreads * kVectorsPerThread - 1) / (kThreads * kVectorsPerThread);
  if (grid >= int64_t{1} << 31 || (pieces > 1 && layout.vectors >= int64_t{1} << 31))
    fail(PYKV_NOT_IMPLEMENTED, "a block of %lld bytes is too large", static_cast<long long>(pieces * s.piece));
  for (int64_t first = 0; first < args.num_arrays; first += kMaxArrays) {
    const int64_t n = std::min<int64_t>(args.num_arrays - first, kMaxArrays);
    Arrays arrays{};
    std::copy_n(args.arrays + first, n, arrays.array);
    launch_dependent(copy_blocks_kernel<Vector, Pairs>, dim3(grid, num_pairs, n), kThreads, launch, "copy_blocks",
                     layout, arrays, pairs);
    layout.is_first = false;
  }
}

template <class Vector>
void launch_all(const CopyBlocksArgs& args, const Launch& launch) {
  if (!args.pairs) {
    constexpr int64_t kMaxGrid = 65535;
    for (int64_t first = 0; first < args.num_pairs; first += kMaxGrid)
      launch_pairs<Vector>(args, DevicePairs{args.from, args.to, first, args.num_blocks, launch.reporter(args.report)},
                           std::min(args.num_pairs - first, kMaxGrid), first == 0, launch);
    return;
  }
  for (int64_t part = 0, first = 0; part < args.num_parts; ++part) {
    bool is_first = true;
    while (first < args.part_ends[part]) {
      const auto launch_some = [&]<int kCount> {
        const int64_t n = std::min<int64_t>(args.part_ends[part] - first, kCount);
        HostPairs<kCount> pairs;
        std::copy_n(args.pairs + first, n, pairs.pair);
        launch_pairs<Vector>(args, pairs, n, is_first, launch);
        is_first = false;
        first += n;
      };
      if (args.part_ends[part] - first <= kFewPairs) {
        launch_some.template operator()<kFewPairs>();
      } else {
        launch_some.template operator()<kManyPairs>();
      }
    }
  }
}

}  // namespace

void copy_blocks_cuda(const CopyBlocksArgs& args, const Launch& launch) {
  switch (vector_bytes(args)) {
    case 16:
      return launch_all<uint4>(args, launch);
    case 8:
      return launch_all<uint2>(args, launch);
    case 4:
      return launch_all<uint32_t>(args, launch);
    case 2:
      return launch_all<uint16_t>(args, launch);
    default:
      return launch_all<uint8_t>(args, launch);
  }
}

}  // namespace pykv
