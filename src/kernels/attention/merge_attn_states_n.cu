// The merge of merge_attn_states_n.h.
//
// Memory-bound: the floor is each byte of the parts and of the output moved once.  A row (token, head) belongs to some
// neighbouring lanes of one warp, a power of two, each with packs of 16 bytes.  Such a group loads kAhead parts before it
// uses any, the first ones even before the lse.  A lane weighs the part of its own number; the group trades weights.
// Where there are many parts, several groups share a row, and the first adds up what they have through shared memory.  How
// many depends on the number of parts alone: the bits of a row do not depend on the batch.
// All threads of a row read the lse before one of them writes the merged one: output_lse may be one of the inputs.
#include <algorithm>

#include "attention/merge_attn_states.cuh"
#include "attention/merge_attn_states_n.h"
#include "cuda/divider.cuh"
#include "cuda/launch.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;
constexpr int kAhead = 4;

// The lse of one row, as the lanes of a group know them.
class Weights {
 public:
  __device__ Weights(const MergeAttnStatesNArgs& a, uint32_t token, uint32_t head, int lane, int lanes)
      : lses_(&a.lses.first.at(token, head)), stride_(a.lses.part), parts_(a.num_parts), lanes_(lanes) {
    own_ = lane < parts_ ? lse(lane) : -INFINITY;
    float top = own_;
    for (int p = lane + lanes; p < parts_; p += lanes) top = fmaxf(top, lse(p));
    for (int m = 1; m < lanes; m *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    base_ = top == -INFINITY ? 0.0f : top;
    own_ = expf(own_ - base_);
    total_ = own_;
    for (int p = lane + lanes; p < parts_; p += lanes) total_ += expf(lse(p) - base_);
    for (int m = 1; m < lanes; m *= 2) total_ += __shfl_xor_sync(~0u, total_, m);
  }

  // exp(lse - largest lse); 0 beyond the last part.  All lanes of the warp must ask.
  __device__ float operator()(int part) const {
    if (parts_ > lanes_) return part < parts_ ? expf(lse(part) - base_) : 0.0f;
    const float weight = __shfl_sync(~0u, own_, part, lanes_);
    return part < parts_ ? weight : 0.0f;
  }
  __device__ float total() const { return total_; }
  __device__ float merged_lse() const { return base_ + logf(total_); }  // log 0 = -inf

 private:
  __device__ float lse(int part) const {
    const float x = lses_[part * stride_];
    return x == INFINITY ? -INFINITY : x;
  }

  const float* lses_;
  int64_t stride_;
  int parts_, lanes_;
  float own_, base_, total_;
};

// Lanes of a group: 1 << lanes_log2; groups of a row: 1 << groups_log2.  kSize: elements of an access.
template <class T, class Out, int kSize>
__global__ __launch_bounds__(kThreads, 4) void merge_n_kernel(const __grid_constant__ MergeAttnStatesNArgs a,
                                                              Divider by_head, int lanes_log2, int groups_log2) {
  using V = Vec<T, kSize>;
  __shared__ float shared_sums[kSize][kThreads];
  const int lanes = 1 << lanes_log2, groups = 1 << groups_log2, parts = a.num_parts;
  const int lane = threadIdx.x & (lanes - 1), group = threadIdx.x >> lanes_log2 & (groups - 1);
  const int64_t row = (int64_t{blockIdx.x} * kThreads + threadIdx.x) >> (lanes_log2 + groups_log2);
  const bool there = row < a.num_tokens * a.num_heads;
  uint32_t head = 0;
  const uint32_t token = there ? by_head(static_cast<uint32_t>(row), head) : 0;
  const T* const mine = a.outputs.row<const T>(group, token, head) + lane * kSize;
  const int64_t step = a.outputs.part << groups_log2;  // from one part of this group to its next

  const auto load = [&](V(&x)[kAhead], int first, int d0) {
    const bool in_head = there && d0 + lane * kSize < a.head_size;
    const T* from = mine + d0 + (first >> groups_log2) * step;
#pragma unroll
    for (int k = 0; k < kAhead; ++k, from += step) {
      if (in_head && first + group + (k << groups_log2) < parts) x[k] = load_vec_in_order<V>(from);
    }
  };
  V x[kAhead];
  load(x, 0, 0);
  const Weights weights(a, token, head, lane, lanes);

  const bool quantised = a.output_dtype == DType::kFloat8E4M3;
  const float scale = quantised ? 1.0f / a.output_scale[0] : 1.0f, factor = 1.0f / weights.total();
  for (int d0 = 0; d0 < a.head_size; d0 += kSize << lanes_log2) {
    Vec<float, kSize> sum;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] = -0.0f;  // what leaves a zero of either sign as it is
    for (int first = 0; first < parts; first += kAhead << groups_log2) {
      if (first + d0 > 0) load(x, first, d0);
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const float weight = weights(first + group + (k << groups_log2));
        if (weight == 0.0f) continue;  // such a part may hold anything
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum[i] = fmaf(to_float(x[k][i]), weight, sum[i]);
      }
    }
    if (groups > 1) {
      __syncthreads();  // what was there is read
#pragma unroll
      for (int i = 0; i < kSize; ++i) shared_sums[i][threadIdx.x] = sum[i];
      __syncthreads();
      for (int g = 1; group == 0 && g < groups; ++g) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum[i] += shared_sums[i][threadIdx.x + (g << lanes_log2)];
      }
    }
    if (!there || d0 + lane * kSize >= a.head_size || group > 0) continue;
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum[i] = weights.total() == 0.0f ? 0.0f : sum[i] * factor;
    store_row_part(a.output.row<Out>(token, head) + d0 + lane * kSize, sum, scale);
  }

  if (!a.output_lse.data) return;
  __syncthreads();  // every thread has read the lse of its row
  if (there && lane == 0 && group == 0) a.output_lse.at(token, head) = weights.merged_lse();
}

template <class T, class Out, int kSize>
void run(const MergeAttnStatesNArgs& args, cudaStream_t stream) {
  int lanes_log2 = 0, groups_log2 = 0;
  while (lanes_log2 < 5 && (kSize << lanes_log2) < args.head_size) ++lanes_log2;
  while ((kThreads >> (lanes_log2 + groups_log2)) > 1 && (int64_t{4 * kAhead} << groups_log2) <= args.num_parts) {
    ++groups_log2;  // each has two rounds of loads at least
  }
  const int64_t rows = args.num_tokens * args.num_heads, rows_of_block = kThreads >> (lanes_log2 + groups_log2);
  if (rows > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 rows (tokens x heads) are supported");
  merge_n_kernel<T, Out, kSize>
      <<<static_cast<unsigned>((rows + rows_of_block - 1) / rows_of_block), kThreads, 0, stream>>>(
          args, Divider(args.num_heads), lanes_log2, groups_log2);
}

// Whether all rows consist of whole, aligned packs.
template <class T, class Out>
bool in_packs(const MergeAttnStatesNArgs& a) {
  constexpr int64_t kSize = kPackSize<T>, kIn = sizeof(T), kOut = sizeof(Out);
  const PartialOutput& from = a.outputs.first;
  return a.head_size % kSize == 0 &&
         is_aligned(kAccessBytes, from.data, {from.token * kIn, from.head * kIn, a.outputs.part * kIn}) &&
         is_aligned(kSize * kOut, a.output.data, {a.output.token * kOut, a.output.head * kOut});
}

}  // namespace

void merge_attn_states_n_cuda(const MergeAttnStatesNArgs& args, const Launch& launch) {
  dispatch_merge<float, half, bf16, uint8_t>(args, [&]<class T, class Out> {
    if (in_packs<T, Out>(args)) {
      run<T, Out, kPackSize<T>>(args, stream_of(launch));
    } else {
      run<T, Out, 1>(args, stream_of(launch));
    }
  });
  check_launch("merge_attn_states_n");
}

}  // namespace pykv
