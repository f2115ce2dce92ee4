// A thread has one vector of 16 bytes of a row; one that nothing changes is neither read nor written.
#include "cuda/dependent.cuh"
#include "cuda/vec.cuh"
#include "sampling/finish_logits.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ __launch_bounds__(kThreads) void finish_logits_kernel(const __grid_constant__ FinishLogitsArgs args,
                                                                 uint32_t blocks_per_row, bool aligned, bool computes) {
  constexpr int kSize = kPackSize<T>;
  begin_dependent();
  const int64_t row = blockIdx.x / blocks_per_row;
  const int64_t first = (int64_t{blockIdx.x % blocks_per_row} * kThreads + threadIdx.x) * kSize;
  if (first >= args.num_cols) return;
  const int count = static_cast<int>(min(args.num_cols - first, int64_t{kSize}));
  bool all_are_tokens = true;
#pragma unroll
  for (int i = 0; i < kSize; ++i) all_are_tokens &= i >= count || args.is_token(first + i);
  if (all_are_tokens && !computes) return;
  T* logits = static_cast<T*>(args.logits) + row * args.logit_stride + first;
  const bool whole = aligned && count == kSize;
  const Pack<T> raw = whole ? load_vec<Pack<T>>(logits) : load_some<Pack<T>>(logits, count);
  Vec<float, kSize> x = to_floats(raw);
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (args.soft_cap != 0.0f) x[i] = args.soft_cap * tanhf(x[i] / args.soft_cap);
    x[i] = args.is_token(first + i) ? x[i] * args.scale : -INFINITY;
  }
  const Pack<T> rounded = round_to<T>(x);
  if (whole) {
    store_vec(logits, rounded);
  } else {
    store_some(logits, rounded, count);
  }
}

}  // namespace

void finish_logits_cuda(const FinishLogitsArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    constexpr int64_t kEach = int64_t{kThreads} * kPackSize<T>;
    const int64_t per_row = (args.num_cols + kEach - 1) / kEach;
    if (per_row > INT32_MAX / args.num_rows)
      fail(PYKV_NOT_IMPLEMENTED, "logits: more than 2^31 blocks of %lld elements are not supported",
           static_cast<long long>(kEach));
    const bool aligned = is_aligned(16, args.logits, {args.logit_stride * static_cast<int64_t>(sizeof(T))});
    launch_dependent(finish_logits_kernel<T>, static_cast<unsigned>(per_row * args.num_rows), kThreads, launch,
                     "finish_logits_", args, static_cast<uint32_t>(per_row), aligned, args.computes());
  });
}

}  // namespace pykv
