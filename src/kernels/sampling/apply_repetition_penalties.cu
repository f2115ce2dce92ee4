// A thread looks at sixteen flags of each mask; only where one is set does it read and write the logits of that pack.  Most are
// 0, so the floor is the read of both masks.
#include "cuda/dependent.cuh"
#include "cuda/vec.cuh"
#include "sampling/apply_repetition_penalties.h"

namespace pykv {
namespace {

constexpr int kThreads = 256, kFlags = 16;  // of a thread
constexpr uint32_t kFewBlocks = 128;

template <class T, bool kAligned>
__global__ __launch_bounds__(kThreads) void apply_repetition_penalties_kernel(
    const __grid_constant__ RepetitionPenaltiesArgs args, uint32_t blocks_per_row) {
  const int64_t row = blockIdx.x / blocks_per_row;
  const int64_t first = (int64_t{blockIdx.x % blocks_per_row} * kThreads + threadIdx.x) * kFlags;
  const uint8_t* prompt = args.prompt_mask + row * args.prompt_stride + first;
  const uint8_t* output = args.output_mask + row * args.output_stride + first;
  T* logits = static_cast<T*>(args.logits) + row * args.logit_stride + first;
  if (comes_early() && first < args.num_cols) {
    prefetch(prompt);
    prefetch(output);
    if (gridDim.x <= kFewBlocks) prefetch(logits);  // what is not needed costs less than waiting twice
  }
  begin_dependent();
  if (first >= args.num_cols) return;
  const int count = static_cast<int>(min(args.num_cols - first, int64_t{kFlags}));
  uint8_t flags[kFlags];
  if (kAligned && count == kFlags) {
    const uint4 a = *reinterpret_cast<const uint4*>(prompt), b = *reinterpret_cast<const uint4*>(output);
    const uint4 either{a.x | b.x, a.y | b.y, a.z | b.z, a.w | b.w};
    if ((either.x | either.y | either.z | either.w) == 0) return;
    __builtin_memcpy(flags, &either, sizeof flags);
  } else {
#pragma unroll
    for (int i = 0; i < kFlags; ++i) flags[i] = i < count ? prompt[i] | output[i] : 0;
  }
  const int64_t at = row * args.penalty_stride;
  // All loads are on their way before the first one is waited for.
  T raw[kFlags];
#pragma unroll
  for (int i = 0; i < kFlags; ++i)
    if (flags[i]) raw[i] = logits[i];
  const float penalty = args.penalty_dtype == DType::kFloat32 ? static_cast<const float*>(args.penalties)[at]
                                                              : to_float(static_cast<const T*>(args.penalties)[at]);
#pragma unroll
  for (int i = 0; i < kFlags; ++i)
    if (flags[i]) {
      const float x = to_float(raw[i]);
      logits[i] = from_float<T>(x > 0.0f ? __fdiv_rn(x, penalty) : x * penalty);
    }
}

}  // namespace

void apply_repetition_penalties_cuda(const RepetitionPenaltiesArgs& args, const Launch& launch) {
  constexpr int64_t kEach = kThreads * kFlags;
  const int64_t per_row = (args.num_cols + kEach - 1) / kEach, blocks = per_row * args.num_rows;
  if (blocks > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^43 logits are supported");
  const bool aligned =
      is_aligned(16, args.prompt_mask, {args.prompt_stride}) && is_aligned(16, args.output_mask, {args.output_stride});
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    dispatch_bool(aligned, [&]<bool kAligned>() {
      launch_dependent(apply_repetition_penalties_kernel<T, kAligned>, static_cast<unsigned>(blocks), kThreads, launch,
                       "apply_repetition_penalties_", args, static_cast<uint32_t>(per_row));
    });
  });
}

}  // namespace pykv
