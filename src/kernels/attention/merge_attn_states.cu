// The merge of merge_attn_states.h.
//
// Memory-bound: the floor is each byte of prefix, suffix and output moved once.  A row (token, head) belongs to some
// neighbouring lanes of one warp, a power of two, each with packs of 16 bytes; each group of lanes takes kRows rows and
// loads the first packs of all before it uses any, so that enough bytes are under way.  All lanes of a row read both lse
// in the same warp before one of them writes the merged one: output_lse may be one of the inputs.
#include <algorithm>

#include "attention/merge_attn_states.cuh"
#include "attention/merge_attn_states.h"
#include "cuda/divider.cuh"
#include "cuda/launch.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;
constexpr int kRows = 2;

struct Weights {
  float prefix, suffix, lse;
};

__device__ Weights weigh(float p, float s, bool has_context) {
  if (!has_context) return {0.0f, 1.0f, s};
  if (isinf(p)) p = -INFINITY;
  if (isinf(s)) s = -INFINITY;
  const float top = fmaxf(p, s);
  if (top == -INFINITY) return {1.0f, 0.0f, top};
  const float pe = expf(p - top), se = expf(s - top), total = pe + se;
  return {pe / total, se / total, top + logf(total)};
}

// kSize: elements of an access.  Lanes of a row: 1 << lanes_log2.
template <class T, class Out, int kSize>
__global__ __launch_bounds__(kThreads) void merge_kernel(const __grid_constant__ MergeAttnStatesArgs a, Divider by_head,
                                                         int lanes_log2) {
  using V = Vec<T, kSize>;
  const int lane = threadIdx.x & ((1 << lanes_log2) - 1);
  const int groups = kThreads >> lanes_log2;
  const int64_t num_rows = a.num_tokens * a.num_heads;
  const int64_t first = int64_t{blockIdx.x} * (groups * kRows) + (threadIdx.x >> lanes_log2);

  uint32_t token[kRows], head[kRows];
  bool there[kRows], has_context[kRows];
  V prefix[kRows], suffix[kRows];
  float p[kRows], s[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const int64_t row = first + r * groups;
    there[r] = row < num_rows;
    if (!there[r]) continue;
    token[r] = by_head(static_cast<uint32_t>(row), head[r]);
    has_context[r] = token[r] < a.context_tokens;
    p[r] = has_context[r] ? a.prefix_lse.at(token[r], head[r]) : 0.0f;
    s[r] = a.suffix_lse.at(token[r], head[r]);
    if (lane * kSize < a.head_size) {
      if (has_context[r]) prefix[r] = load_vec_in_order<V>(a.prefix.row<const T>(token[r], head[r]) + lane * kSize);
      suffix[r] = load_vec_in_order<V>(a.suffix.row<const T>(token[r], head[r]) + lane * kSize);
    }
  }

  const float scale = a.quantised ? 1.0f / a.output_scale[0] : 1.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (!there[r]) continue;
    const Weights w = weigh(p[r], s[r], has_context[r]);
    p[r] = w.lse;
    for (int d = lane * kSize; d < a.head_size; d += kSize << lanes_log2) {
      if (d != lane * kSize) {
        if (has_context[r]) prefix[r] = load_vec_in_order<V>(a.prefix.row<const T>(token[r], head[r]) + d);
        suffix[r] = load_vec_in_order<V>(a.suffix.row<const T>(token[r], head[r]) + d);
      }
      Vec<float, kSize> v;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float x = to_float(prefix[r][i]), y = to_float(suffix[r][i]);
        v[i] = w.prefix == 0.0f ? y * w.suffix : w.suffix == 0.0f ? x * w.prefix : fmaf(x, w.prefix, y * w.suffix);
      }
      store_row_part(a.output.row<Out>(token[r], head[r]) + d, v, scale);
    }
  }

  if (!a.output_lse.data) return;
  __syncwarp();  // every lane has read the lse of its rows
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    if (there[r] && lane == 0) a.output_lse.at(token[r], head[r]) = p[r];
}

template <class T, class Out, int kSize>
void run(const MergeAttnStatesArgs& args, cudaStream_t stream) {
  int lanes_log2 = 0;
  while (lanes_log2 < 5 && (kSize << lanes_log2) < args.head_size) ++lanes_log2;
  const int64_t rows = args.num_tokens * args.num_heads, rows_of_block = int64_t{kThreads >> lanes_log2} * kRows;
  if (rows > INT32_MAX) fail(PYKV_NOT_IMPLEMENTED, "at most 2^31 - 1 rows (tokens x heads) are supported");
  merge_kernel<T, Out, kSize>
      <<<static_cast<unsigned>((rows + rows_of_block - 1) / rows_of_block), kThreads, 0, stream>>>(
          args, Divider(args.num_heads), lanes_log2);
}

// Whether all rows consist of whole, aligned packs.
template <class T, class Out>
bool in_packs(const MergeAttnStatesArgs& a) {
  constexpr int64_t kSize = kPackSize<T>, kIn = sizeof(T), kOut = sizeof(Out);
  return a.head_size % kSize == 0 &&
         is_aligned(kAccessBytes, a.prefix.data, {a.prefix.token * kIn, a.prefix.head * kIn}) &&
         is_aligned(kAccessBytes, a.suffix.data, {a.suffix.token * kIn, a.suffix.head * kIn}) &&
         is_aligned(kSize * kOut, a.output.data, {a.output.token * kOut, a.output.head * kOut});
}

template <class T, class Out>
void choose_width(const MergeAttnStatesArgs& args, cudaStream_t stream) {
  if (in_packs<T, Out>(args)) {
    run<T, Out, kPackSize<T>>(args, stream);
  } else {
    run<T, Out, 1>(args, stream);
  }
}

}  // namespace

void merge_attn_states_cuda(const MergeAttnStatesArgs& args, const Launch& launch) {
  dispatch<float, half, bf16>(args.dtype, [&]<class T> {
    if (args.quantised) {
      choose_width<T, uint8_t>(args, stream_of(launch));
    } else {
      choose_width<T, T>(args, stream_of(launch));
    }
  });
  check_launch("merge_attn_states");
}

}  // namespace pykv
