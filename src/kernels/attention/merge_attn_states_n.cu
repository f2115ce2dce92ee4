// The merge of merge_attn_states_n.h.
//
// Memory-bound: the floor is each byte of the parts and of the output moved once.  A row (token, head) belongs to some
// neighbouring lanes of one warp, a power of two, each with packs of 16 bytes.  Each such group takes kRows rows and loads
// kAhead parts of each before it uses any, the first ones even before the lse.  Where there are many parts, several groups
// share their rows, and the first adds up what they have through shared memory.  How many depends on the number of parts
// alone: the bits of a row do not depend on the batch.
// All threads of a row read the lse before one of them writes the merged one: output_lse may be one of the inputs.
#include <algorithm>

#include "attention/merge_attn_states.cuh"
#include "attention/merge_attn_states_n.h"
#include "cuda/divider.cuh"
#include "cuda/launch.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 1;
constexpr int kAhead = 4;

struct Softmax {
  float base, total;  // the largest lse, or 0 where nothing was seen; sum of exp(lse - base)
};

// The lanes of a group, each with its share of the parts.
__device__ Softmax weigh(const MergeAttnStatesNArgs& a, uint32_t token, uint32_t head, int lane, int lanes) {
  float top = -INFINITY, total = 0;
  for (int64_t p = lane; p < a.num_parts; p += lanes) top = fmaxf(top, a.lses.at(p, token, head));
  for (int m = 1; m < lanes; m *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
  const float base = top == -INFINITY ? 0.0f : top;
  for (int64_t p = lane; p < a.num_parts; p += lanes) total += expf(a.lses.at(p, token, head) - base);
  for (int m = 1; m < lanes; m *= 2) total += __shfl_xor_sync(~0u, total, m);
  return {base, total};
}

// Lanes of a group: 1 << lanes_log2; groups of a row: 1 << groups_log2.  kSize: elements of an access.
template <class T, class Out, int kSize>
__global__ __launch_bounds__(kThreads, 4) void merge_n_kernel(const __grid_constant__ MergeAttnStatesNArgs a,
                                                              Divider by_head, int lanes_log2, int groups_log2) {
  using V = Vec<T, kSize>;
  __shared__ float shared_sums[kSize][kThreads];
  const int lanes = 1 << lanes_log2, groups = 1 << groups_log2;
  const int lane = threadIdx.x & (lanes - 1), group = threadIdx.x >> lanes_log2 & (groups - 1);
  const int rows_log2 = lanes_log2 + groups_log2, rows = kThreads >> rows_log2;

  uint32_t token[kRows], head[kRows];
  bool there[kRows];
  Softmax softmax[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = (int64_t{blockIdx.x} * kRows + r) * rows + (threadIdx.x >> rows_log2);
    there[r] = row < a.num_tokens * a.num_heads;
    token[r] = head[r] = 0;
    if (there[r]) token[r] = by_head(static_cast<uint32_t>(row), head[r]);
    softmax[r] = {0.0f, 0.0f};  // of no parts at all
  }

  const bool quantised = a.output_dtype == DType::kFloat8E4M3;
  const float scale = quantised ? 1.0f / a.output_scale[0] : 1.0f;
  for (int d0 = 0; d0 < a.head_size; d0 += kSize << lanes_log2) {
    const int d = d0 + lane * kSize;
    Vec<float, kSize> sums[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) sums[r][i] = -0.0f;  // what leaves a zero of either sign as it is
    }
    for (int64_t first = group; first < a.num_parts; first += int64_t{kAhead} << groups_log2) {
      V x[kRows][kAhead];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const int64_t p = first + (k << groups_log2);
          if (there[r] && d < a.head_size && p < a.num_parts)
            x[r][k] = load_vec_streamed<V>(a.outputs.row<const T>(p, token[r], head[r]) + d);
        }
      }
      if (d0 == 0 && first == group) {
#pragma unroll
        for (int r = 0; r < kRows; ++r) softmax[r] = weigh(a, token[r], head[r], lane, lanes);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int k = 0; k < kAhead; ++k) {
          const int64_t p = first + (k << groups_log2);
          if (p >= a.num_parts) continue;
          const float weight = expf(a.lses.at(p, token[r], head[r]) - softmax[r].base);
          if (weight == 0.0f) continue;  // such a part may hold anything
#pragma unroll
          for (int i = 0; i < kSize; ++i) sums[r][i] = fmaf(to_float(x[r][k][i]), weight, sums[r][i]);
        }
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (groups > 1) {
        __syncthreads();  // what was there is read
#pragma unroll
        for (int i = 0; i < kSize; ++i) shared_sums[i][threadIdx.x] = sums[r][i];
        __syncthreads();
        for (int g = 1; group == 0 && g < groups; ++g) {
#pragma unroll
          for (int i = 0; i < kSize; ++i) sums[r][i] += shared_sums[i][threadIdx.x + (g << lanes_log2)];
        }
      }
      if (!there[r] || d >= a.head_size || group > 0) continue;
      const float total = softmax[r].total, factor = 1.0f / total;
#pragma unroll
      for (int i = 0; i < kSize; ++i) sums[r][i] = total == 0.0f ? 0.0f : sums[r][i] * factor;
      store_row_part(a.output.row<Out>(token[r], head[r]) + d, sums[r], scale);
    }
  }

  if (!a.output_lse.data) return;
  __syncthreads();  // every thread has read the lse of its rows
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (there[r] && lane == 0 && group == 0)
      a.output_lse.at(token[r], head[r]) = softmax[r].base + logf(softmax[r].total);  // log 0 = -inf
  }
}

template <class T, class Out, int kSize>
void run(const MergeAttnStatesNArgs& args, cudaStream_t stream) {
  int lanes_log2 = 0, groups_log2 = 0;
  while (lanes_log2 < 5 && (kSize << lanes_log2) < args.head_size) ++lanes_log2;
  while ((kThreads >> (lanes_log2 + groups_log2)) > 1 && (int64_t{4 * kAhead} << groups_log2) <= args.num_parts) {
    ++groups_log2;  // each has two rounds of loads at least
  }
  const int64_t rows = args.num_tokens * args.num_heads,
                rows_of_block = int64_t{kThreads >> (lanes_log2 + groups_log2)} * kRows;
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
