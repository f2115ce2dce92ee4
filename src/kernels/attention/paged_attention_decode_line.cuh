// Decoding proper on the line: the kernel, its shared memory, and its launch.
#pragma once

#include "attention/paged_attention_decode.cuh"
#include "attention/paged_attention_decode_suits.cuh"

namespace pykv::attention {

template <class S>
constexpr int shared_queries_bytes() {
  if constexpr (S::kSharedQueries) {
    return S::kHeads * static_cast<int>(sizeof(SharedQueries<S>));
  } else {
    return 0;
  }
}

template <class S>
constexpr int decode_shared_bytes() {
  return S::kWarps * (S::kRingBytes + kPartsOfWarp<S> * static_cast<int>(sizeof(PartOf<S>))) +
         static_cast<int>(sizeof(ColumnStats<S>) + sizeof(LineShare)) + shared_queries_bytes<S>() +
         (S::kInvariant ? ChunkColumns<S>::kLeftBytes : 0);
}

template <class S>
__device__ void run_decode_line(const Problem& p, const CacheCopies& copies, char* memory) {
  auto* stats = reinterpret_cast<ColumnStats<S>*>(memory + S::kWarps * S::kRingBytes);
  auto* all_parts = reinterpret_cast<PartOf<S>*>(stats + 1);
  auto* parts = all_parts + threadIdx.x / 32 * kPartsOfWarp<S>;
  auto* share = reinterpret_cast<LineShare*>(all_parts + S::kWarps * kPartsOfWarp<S>);
  auto* left = reinterpret_cast<float*>(share + 1);
  auto* queries = reinterpret_cast<SharedQueries<S>*>(share + 1);
  if constexpr (S::kInvariant) {
    DecodeKernel<S> kernel{{{{{{{{{p, copies}}}}}}}, *share}, parts, memory, *stats, left, queries};
    kernel.run();
  } else {
    DecodeKernel<S> kernel{{{{{{{{p, copies}}}}}}, *share}, parts, memory, *stats, left, queries};
    kernel.run();
  }
}

template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, S::kBlocksPerSm)
    paged_attention_decode_kernel(const __grid_constant__ Problem p, const __grid_constant__ CacheCopies copies) {
  if constexpr (S::kManyTokens) {
    if (!takes_call(p)) return leave_call();
  }
  extern __shared__ __align__(1024) char memory[];
  run_decode_line<S>(p, copies, memory);
}

template <class S>
Tiling decode_tiling(const Problem& p) {
  Tiling tiling = few_rows_tiling(p.a.head_size);
  // Of a piece there are more than workspaces are made for, but fewer blocks.
  static_assert(S::kHeads * S::kColumns <= 16 || S::kHeads * S::kColumns * S::kBlocksPerSm <= 16 * 3);
  tiling.rows = std::max(tiling.rows, S::kHeads * S::kColumns);
  tiling.tile_rows = S::kColumns;
  return tiling;
}

// Of a call that suits.  False if the device has too little shared memory.
template <class S>
bool launch_decode_kernel(Problem p, const Launch& launch) {
  static PerDevice resident;
  p.ticket = next_ticket();
  constexpr KernelId kId = S::kManyTokens  ? KernelId::kTokensLine
                           : S::kInvariant ? KernelId::kInvariantLine
                           : S::kByToken   ? KernelId::kSmallPagesLine
                           : S::kFolded    ? KernelId::kFoldedLine
                                           : KernelId::kDecodeLine;
  const int grid =
      launch_main({kId, S::kD, S::kColumns}, paged_attention_decode_kernel<S>, S::kWarps * 32, decode_shared_bytes<S>(),
                  S::kUnitTokens, decode_tiling<S>(p), p, launch, resident, copies_of<S>(p));
  return grid > 0;
}

// The same with KV heads in pairs, if Line takes them so, they are pairs, and blocks have room for them; else one by one.
template <class Line, class Single>
bool launch_decode_line(const Problem& p, const Launch& launch) {
  if constexpr (Line::kHidesKeys && !Line::kPackedV) {
    if (p.sees_all()) return launch_decode_line<SeesAll<Line>, SeesAll<Single>>(p, launch);
  }
  if constexpr (Line::kHeads > 1) {
    const bool done = p.a.num_kv_heads % Line::kHeads == 0 && launch_decode_kernel<Line>(p, launch);
    return done || launch_decode_kernel<Single>(p, launch);
  } else {
    return launch_decode_kernel<Line>(p, launch);
  }
}

}  // namespace pykv::attention
