// Sizes of the kernels of verify/, and who waits for whom in them.
#pragma once

#include "attention/cuda/tile_shape.cuh"

namespace pykv::attention {

// Named barriers: of the copying warps, of each group that computes (this and the next), and of all groups.
constexpr int kCopyBarrier = 1, kGroupBarrier = 2, kAllGroupsBarrier = 4;

// Whose group of so many a thread belongs to, if it computes: the copying warps come after the first.
__device__ inline int computing_group(int groups) { return groups == 1 ? 0 : threadIdx.x / (2 * kThreads); }

template <class Element, int kHeadSize>
struct VerifyShape : Shape<Element, kHeadSize, false, RowClass::kMore> {
  static constexpr bool kWarpgroup = true, kReadOnce = true;
  static constexpr int kStages = 3, kSlots = kStages + 2;
  static constexpr int kRingBytes = kStages * Shape<Element, kHeadSize, false, RowClass::kMore>::kStageBytes;
  static constexpr int kBlock = 2 * kThreads, kCopyWarps = 4;  // beside the four that compute
  static constexpr int kComputeRegisters = 192, kCopyRegisters = 64;
  static constexpr bool kQueryColumns = false;  // of the products: verify/columns.cuh
  static constexpr int kWeightBytes = 0;        // that have a place of their own
};

template <class Element, int kHeadSize, int kQueryRows>
struct VerifyColumnsShape : VerifyShape<Element, kHeadSize> {
  static constexpr bool kQueryColumns = true;
  static constexpr int kRows = kQueryRows;
  static constexpr int kComputeRegisters = 160, kCopyRegisters = 96;
  static constexpr int kQueryBytes = kRows * kHeadSize * 2;
};

// A tile whose copies have come.
template <int kTokens>
struct ArrivedTile {
  uint32_t stage;  // shared address
  char* memory;    // the same
  const Slot<kTokens>& slot;
  int first_token;
  bool ends;  // this block's part of the segment

  __device__ bool is_empty() const { return (slot.valid[0] | slot.valid[1]) == 0; }
};

}  // namespace pykv::attention
