// What a block of expert_gemm_warpgroup.cu computes, and the ring in shared memory that its warps share.
#pragma once

#include "cuda/mbarrier.cuh"
#include "cuda/tensor_map.cuh"
#include "cuda/turn.cuh"
#include "moe/expert_gemm.cuh"
#include "moe/expert_tiles.cuh"

namespace pykv {
namespace expert_gemm {

inline constexpr int kUnit = 64, kLine = 2 * kUnit;  // columns of a stage; their bytes
inline constexpr uint32_t kBand = 8;

// kGroups warpgroups multiply kHalves times 64 rows of the weight each with kPairs pairs.
template <class T_, int kPairs_, int kGroups_, int kHalves_, int kStages_, int kPerSm_>
struct WarpgroupShape {
  using T = T_;
  static constexpr int kPairs = kPairs_, kGroups = kGroups_, kHalves = kHalves_, kStages = kStages_;
  static constexpr int kPerSm = kPerSm_;                                         // blocks of a multiprocessor
  static constexpr int kRows = 64 * kGroups * kHalves, kColumns = 64 * kHalves;  // of the weight; of a warpgroup
  static constexpr bool kIsLarge = kPairs > 64;
  static constexpr int kReaders = 128 * kGroups, kFillers = kIsLarge ? 128 : 32, kWriters = kIsLarge ? 128 : 0;
  static constexpr int kThreads = kReaders + kFillers + kWriters;
  static constexpr int kWeightBytes = kRows * kLine, kStageBytes = kWeightBytes + kPairs * kLine;
  static constexpr int kResultPitch = 2 * kColumns, kResultBytes = kPairs * kResultPitch;  // of a pair; of a warpgroup
  static constexpr int kSharedBytes = 1024 + kStages * kStageBytes + kGroups * kResultBytes;  // aligned by the kernel
  static_assert(kSharedBytes <= 226 << 10 && (kIsLarge || kPairs <= 128));
};

using Problem = ExpertGemmProblem;

struct Operands {
  CUtensorMap weight;
  Problem p;
  TileGrid grid;
  int units;           // of 64 columns
  uint32_t x_chunks;   // of eight columns, from a row of x to the next
  bool whole_results;  // eight can be written at once
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

template <class S>
struct Ring {
  uint32_t data, full_at, empty_at;  // addresses in shared memory

  __device__ uint32_t weight(int stage) const { return data + stage * S::kStageBytes; }
  __device__ uint32_t x(int stage) const { return weight(stage) + S::kWeightBytes; }
  __device__ uint32_t full(int stage) const { return full_at + stage * 8; }
  __device__ uint32_t empty(int stage) const { return empty_at + stage * 8; }
};

template <class S>
struct Tiles : ExpertTiles<S::kPairs> {
  __device__ explicit Tiles(const Operands& o) : ExpertTiles<S::kPairs>(o.p.a.map, o.p.rows, o.grid, o.p.a.num_rows) {}
};

#endif

}  // namespace expert_gemm
}  // namespace pykv
