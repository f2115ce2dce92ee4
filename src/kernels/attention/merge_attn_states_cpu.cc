// The merge of merge_attn_states.h, one row of a token and head after the other.  Bound by memory: three rows moved.
#include <algorithm>
#include <cmath>

#include "attention/merge_attn_states.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {
namespace {

struct Weights {
  float prefix, suffix, lse;
};

Weights weigh(const MergeAttnStatesArgs& a, int64_t token, int64_t head) {
  const float s = a.suffix_lse.at(token, head);
  if (token >= a.context_tokens) return {0.0f, 1.0f, s};
  const auto seen = [](float lse) { return std::isinf(lse) ? -INFINITY : lse; };
  const float p = seen(a.prefix_lse.at(token, head)), top = std::fmax(p, seen(s));
  if (top == -INFINITY) return {1.0f, 0.0f, top};
  const float pe = std::exp(p - top), se = std::exp(seen(s) - top), total = pe + se;
  return {pe / total, se / total, top + std::log(total)};
}

template <class T, class Out>
void merge_row(const MergeAttnStatesArgs& a, int64_t token, int64_t head) {
  const Weights w = weigh(a, token, head);
  const float scale = a.quantised ? 1.0f / a.output_scale[0] : 1.0f;
  const T* prefix = a.prefix.row<const T>(token, head);
  const T* suffix = a.suffix.row<const T>(token, head);
  Out* out = a.output.row<Out>(token, head);
  for (int d = 0; d < a.head_size; d += kWidth) {
    const int64_t left = a.head_size - d;
    Floats v;
    if (w.prefix == 0) {
      v = load(suffix + d, left) * w.suffix;
    } else if (w.suffix == 0) {
      v = load(prefix + d, left) * w.prefix;
    } else {
      v = load(prefix + d, left) * w.prefix + load(suffix + d, left) * w.suffix;
    }
    store(out + d, v * scale, left);
  }
  if (a.output_lse.data) a.output_lse.at(token, head) = w.lse;
}

}  // namespace

void merge_attn_states_cpu(const MergeAttnStatesArgs& args, const Launch&) {
  constexpr int64_t kPiece = 8192;  // elements, at least, for a thread at a time
  dispatch<float, f16, bf16>(args.dtype, [&]<class T> {
    parallel_for(args.num_tokens * args.num_heads, std::max<int64_t>(1, kPiece / args.head_size),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     const int64_t token = row / args.num_heads, head = row % args.num_heads;
                     if (args.quantised) {
                       merge_row<T, e4m3>(args, token, head);
                     } else {
                       merge_row<T, T>(args, token, head);
                     }
                   }
                 });
  });
}

}  // namespace pykv::PYKV_ISA
