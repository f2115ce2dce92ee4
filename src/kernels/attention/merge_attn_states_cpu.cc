// The merge of merge_attn_states.h, one row of a token and head after the other.  Bound by memory: each row of the parts
// is read once and added up in registers.
#include <algorithm>

#include "attention/merge_attn_states.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kVectors = 8;  // of a row at a time

// Adds the parts' elements d .. d + kVectors * kWidth - 1, each part times exp(lse - base), up in acc; gives the weights'
// sum.
template <bool kWhole, class T>
float add_parts(const MergeAttnStatesArgs& a, int64_t token, int64_t head, float base, int d, Floats* acc) {
  Floats sums[kVectors];
  for (Floats& x : sums) x = splat(-0.0f);  // what leaves a zero of either sign as it is
  float total = 0;
  for (int64_t first = 0; first < a.num_parts; first += kWidth) {
    const int count = static_cast<int>(std::min<int64_t>(kWidth, a.num_parts - first));
    Floats weights = splat(-INFINITY);
    for (int i = 0; i < count; ++i) weights[i] = seen(a.lse(first + i, token, head));
    weights = exp(weights - base);
    for (int i = 0; i < count; ++i) {
      const float weight = weights[i];
      total += weight;
      if (weight == 0) continue;
      const T* row = a.part<T>(first + i, token, head) + d;
      for (int v = 0; v < kVectors; ++v) {
        if (kWhole) {
          sums[v] += load(row + v * kWidth) * weight;
        } else if (d + v * kWidth < a.head_size) {
          sums[v] += load(row + v * kWidth, a.head_size - d - v * kWidth) * weight;
        }
      }
    }
  }
  std::copy_n(sums, kVectors, acc);
  return total;
}

template <class T, class Out>
void merge_row(const MergeAttnStatesArgs& a, int64_t token, int64_t head) {
  const float scale = a.output_dtype == DType::kFloat8E4M3 ? 1.0f / a.output_scale : 1.0f;
  Out* out = a.output.row<Out>(token, head);
  const auto copy = [&](int64_t part, float lse) {
    const T* row = a.part<T>(part, token, head);
    for (int d = 0; d < a.head_size; d += kWidth)
      store(out + d, load(row + d, a.head_size - d) * scale, a.head_size - d);
    if (a.output_lse.data) a.output_lse.at(token, head) = lse;
  };
  if (token >= a.context_tokens) return copy(1, a.lse(1, token, head));
  float top = -INFINITY;
  for (int64_t p = 0; p < a.num_parts; ++p) top = std::fmax(top, seen(a.lse(p, token, head)));
  if (top == -INFINITY && a.copies_empty) return copy(0, top);
  const float base = top == -INFINITY ? 0.0f : top;
  float total = 0;
  for (int d = 0; d < a.head_size; d += kVectors * kWidth) {
    const bool whole = d + kVectors * kWidth <= a.head_size;
    Floats acc[kVectors];
    total =
        whole ? add_parts<true, T>(a, token, head, base, d, acc) : add_parts<false, T>(a, token, head, base, d, acc);
    const Floats factor = splat(1.0f / total * scale);
    for (int v = 0; v < kVectors && d + v * kWidth < a.head_size; ++v)
      store(out + d + v * kWidth, total == 0 ? Floats{} : acc[v] * factor, a.head_size - d - v * kWidth);
  }
  if (a.output_lse.data) a.output_lse.at(token, head) = base + std::log(total);  // log 0 = -inf
}

}  // namespace

void merge_attn_states_cpu(const MergeAttnStatesArgs& args, const Launch&) {
  constexpr int64_t kPiece = 8192;  // elements, at least, for a thread at a time
  const int64_t elements = args.head_size * std::max<int64_t>(1, args.num_parts);
  dispatch_merge<float, f16, bf16, e4m3>(args, [&]<class T, class Out> {
    parallel_for(args.num_tokens * args.num_heads, std::max<int64_t>(1, kPiece / elements),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row)
                     merge_row<T, Out>(args, row / args.num_heads, row % args.num_heads);
                 });
  });
}

}  // namespace pykv::PYKV_ISA
