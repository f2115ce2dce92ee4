// Decoding proper on the line: the kernel, its shared memory, and its launch.
#pragma once

#include "attention/paged_attention_decode.cuh"
#include "attention/paged_attention_launch.cuh"

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
void launch_line(const Problem& p, const Step& s, const Launch& launch) {
  static_assert(decode_shared_bytes<S>() == S::kSizes.shared_bytes());
  launch_step<paged_attention_decode_kernel<S>>(p, s, s.shared_bytes, launch, copies_of<S>(p));
}

// KV heads in pairs, if Line takes them so, or one by one; and with or without what windows need.
template <class Line, class Single>
void launch_lines(const Problem& p, const Step& s, const Launch& launch) {
  if constexpr (Line::kHidesKeys && !Line::kPackedV) {
    if (s.instance.sees_all) return launch_lines<SeesAll<Line>, SeesAll<Single>>(p, s, launch);
  }
  if constexpr (Line::kHeads > 1) {
    if (s.instance.single) return launch_line<Single>(p, s, launch);
  }
  launch_line<Line>(p, s, launch);
}

}  // namespace pykv::attention
