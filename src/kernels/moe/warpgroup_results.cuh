// What expert_gemm_warpgroup.cu does with results: they lie in shared memory before they are written.
#pragma once

#include "moe/warpgroup_ring.cuh"

namespace pykv {
namespace expert_gemm {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || !defined(__CUDA_ARCH__)

// Results of a tile in shared memory, rounded, by warpgroup and pair: rows of the weight in the order of the tile, eight of which
// are a chunk.  `full` and `empty` are barriers, where there are threads that do nothing but write.
template <class S>
struct Results {
  uint32_t data, full, empty;

  __device__ uint32_t chunk(int group, int pair, int chunk) const {
    return data + group * S::kResultBytes + pair * S::kResultPitch + ((chunk ^ pair % 8) << 4);
  }
};

// Writes what a warpgroup has left, by 128 threads.  rows: of out, of each pair; -1: none.
template <class S>
__device__ void write_results(const Operands& o, const Results<S>& results, int group, uint32_t row_tile,
                              const int32_t* rows) {
  using T = typename S::T;
  constexpr int kAtOnce = S::kWriters == 0 ? 4 : 1;  // threads that do nothing else have few registers
  const ExpertGemmArgs& a = o.p.a;
  const bool gated = o.p.fusion.silu_and_mul;
  const int each = gated ? 2 : 1, chunks = S::kColumns / 8 / each;  // chunks that make one; of results of a pair
  const int thread = threadIdx.x % 128, chunk = thread % chunks;
  const int64_t column = (int64_t{row_tile} * S::kGroups + group) * chunks * 8 + chunk * 8, width = o.p.width();
  if (column >= width) return;
  const bool whole = o.whole_results && column + 8 <= width;
#pragma unroll kAtOnce
  for (int pair = thread / chunks; pair < S::kPairs; pair += 128 / chunks) {
    const int32_t row = rows[pair];
    if (row < 0) continue;
    uint4 eight = load_shared_16(results.chunk(group, pair, chunk * each));
    if (gated) {
      const uint4 up = load_shared_16(results.chunk(group, pair, chunk * each + 1));
      const auto activated = [](uint32_t g, uint32_t u) {
        const float2 gates = unpack_pair<T>(g), ups = unpack_pair<T>(u);
        return pack_pair<T>(to_float(silu_times<T>(gates.x, ups.x)), to_float(silu_times<T>(gates.y, ups.y)));
      };
      eight = make_uint4(activated(eight.x, up.x), activated(eight.y, up.y), activated(eight.z, up.z),
                         activated(eight.w, up.w));
    }
    T* const to = static_cast<T*>(a.out) + row * a.out_stride + column;
    if (whole) {
      *reinterpret_cast<uint4*>(to) = eight;
    } else {
      const T* const values = reinterpret_cast<const T*>(&eight);
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (column + i < width) to[i] = values[i];
    }
  }
}

// A warpgroup that writes all results.  It looks up where while these are worked out.
template <class S>
__device__ void write_all(const Operands& o, const Results<S>& results, int32_t* rows) {
  constexpr int kBarrier = 1;
  const Tiles<S> tiles(o);
  uint32_t parity = 0;
#pragma unroll 1
  for (uint32_t index = tiles.first(); index < tiles.count; index += tiles.step) {
    uint32_t row_tile, pair_tile;
    tiles.place(index, row_tile, pair_tile);
    if (tiles.expert(pair_tile) < 0) continue;
    named_barrier_sync(kBarrier, S::kWriters);  // nobody needs those of the tile before
#pragma unroll 1
    for (int i = threadIdx.x % 128; i < S::kPairs; i += S::kWriters) rows[i] = tiles.row(pair_tile, i);
    named_barrier_sync(kBarrier, S::kWriters);
    mbarrier_wait(results.full, parity);
    parity ^= 1;
#pragma unroll 1
    for (int group = 0; group < S::kGroups; ++group) write_results(o, results, group, row_tile, rows);
    mbarrier_arrive(results.empty);
  }
}

#endif

}  // namespace expert_gemm
}  // namespace pykv
