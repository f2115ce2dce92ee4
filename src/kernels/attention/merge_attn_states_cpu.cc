// The merge of merge_attn_states.h.  Bound by memory: a few tokens at a time, first the weights of all their rows, many at
// once and from whole lines of lse, then the rows in the order of memory, each part read once, past the caches if there is
// much to write.
#include <algorithm>
#include <vector>

#include "attention/merge_attn_states.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kVectors = 8;          // of a row at a time
constexpr int64_t kMostTokens = 16;  // at a time: a line of lse

// What is read once of every row of some tokens: the weights of its parts, all factors within.  Row (t, h) has number
// h * count + t.
class Weights {
 public:
  explicit Weights(const MergeAttnStatesArgs& args, int64_t most_tokens)
      : a_(args),
        scale_(args.output_dtype == DType::kFloat8E4M3 ? 1.0f / args.output_scale : 1.0f),
        rows_((most_tokens * args.num_heads + kWidth - 1) / kWidth * kWidth),
        weights_(static_cast<size_t>(rows_ * args.num_parts)) {}

  // Of tokens [first, first + count), with their lse, which may take the place of those that are read.
  void compute(int64_t first, int64_t count) {
    for (int64_t row = 0; row < count * a_.num_heads; row += kWidth) {
      const int lanes = static_cast<int>(std::min<int64_t>(kWidth, count * a_.num_heads - row));
      compute_some(first, count, row, lanes);
    }
  }

  // Of a row: its part p has weights(row)[p * stride()].
  const float* operator()(int64_t row) const { return weights_.data() + row; }
  int64_t stride() const { return rows_; }

 private:
  Floats load_lse(int64_t part, int64_t first, int64_t count, int64_t row, int lanes) const {
    const int64_t h = row / count, t = row % count;
    const Lse& lses = a_.lses[part == 1];
    if (t + kWidth <= count && lses.token == 1) {
      const Floats all = load(&lses.at(first + t, h) + (part == 1 ? 0 : part * a_.lse_part));
      return all == __builtin_inff() ? splat(-__builtin_inff()) : all;
    }
    float some[kWidth];
    std::fill_n(some, kWidth, -__builtin_inff());
    for (int i = 0; i < lanes; ++i) some[i] = seen(a_.lse(part, first + (row + i) % count, (row + i) / count));
    return load(some);
  }

  void compute_some(int64_t first, int64_t count, int64_t row, int lanes) {
    const float infinity = __builtin_inff();
    float* const weights = weights_.data() + row;
    Floats top = splat(-infinity);
    for (int64_t p = 0; p < a_.num_parts; ++p) {
      const Floats lse = load_lse(p, first, count, row, lanes);
      store(weights + p * rows_, lse);
      top = max(lse, top);  // NaN is not counted
    }
    const Words empty = __builtin_bit_cast(Words, top == -infinity);
    const Floats base = empty ? Floats{} : top;
    Floats total{};
    for (int64_t p = 0; p < a_.num_parts; ++p) {
      const Floats weight = exp(load(weights + p * rows_) - base);
      store(weights + p * rows_, weight);
      total += weight;
    }
    const Floats factor = total == 0.0f ? Floats{} : scale_ / total;
    for (int64_t p = 0; p < a_.num_parts; ++p) store(weights + p * rows_, load(weights + p * rows_) * factor);
    if (a_.copies_empty) store(weights, empty ? splat(scale_) : load(weights));
    float lse[kWidth];
    store(lse, base + log(total));  // log 0 = -inf
    for (int i = 0; i < lanes; ++i) {
      const int64_t t = first + (row + i) % count, h = (row + i) / count;
      if (t >= a_.context_tokens) {  // a copy of the second part
        for (int64_t p = 0; p < a_.num_parts; ++p) weights[p * rows_ + i] = p == 1 ? scale_ : 0.0f;
        lse[i] = a_.lse(1, t, h);
      }
      if (a_.output_lse.data) a_.output_lse.at(t, h) = lse[i];
    }
  }

  const MergeAttnStatesArgs& a_;
  const float scale_;
  const int64_t rows_;  // whole vectors
  std::vector<float> weights_;
};

// Elements [d, d + count) of a row, at most kVectors vectors of them.
template <bool kWhole, class T, class Out>
void merge_elements(const MergeAttnStatesArgs& a, int64_t token, int64_t head, const float* weights, int64_t stride,
                    int64_t d, int64_t count, Out* out) {
  Floats sums[kVectors];
  for (Floats& x : sums) x = splat(-0.0f);  // what leaves a zero of either sign as it is
  bool any = false;
  for (int64_t p = 0; p < a.num_parts; ++p) {
    const float weight = weights[p * stride];
    if (weight == 0) continue;
    any = true;
    const T* row = a.part<T>(p, token, head) + d;
    for (int v = 0; v < kVectors; ++v) {
      if (kWhole) {
        sums[v] += load(row + v * kWidth) * weight;
      } else if (v * kWidth < count) {
        sums[v] += load(row + v * kWidth, count - v * kWidth) * weight;
      }
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    const Floats sum = any ? sums[v] : Floats{};
    if (kWhole) {
      store(out + v * kWidth, sum);
    } else if (v * kWidth < count) {
      store(out + v * kWidth, sum, count - v * kWidth);
    }
  }
}

template <class T, class Out>
void merge_tokens(const MergeAttnStatesArgs& a, const Weights& weights, int64_t first, int64_t count,
                  LineWriter& written) {
  constexpr int64_t kPiece = kVectors * kWidth;
  for (int64_t t = 0; t < count; ++t) {
    for (int64_t h = 0; h < a.num_heads; ++h) {
      written.fill(a.output.row<Out>(first + t, h), a.head_size, [&](Out* out, int64_t from, int64_t n) {
        int64_t d = 0;
        for (; d + kPiece <= n; d += kPiece)
          merge_elements<true, T>(a, first + t, h, weights(h * count + t), weights.stride(), from + d, kPiece, out + d);
        if (d < n)
          merge_elements<false, T>(a, first + t, h, weights(h * count + t), weights.stride(), from + d, n - d, out + d);
      });
    }
  }
}

}  // namespace

void merge_attn_states_cpu(const MergeAttnStatesArgs& args, const Launch&) {
  constexpr int64_t kPiece = 8192;  // elements, at least, for a thread at a time
  const int64_t at_once = std::clamp<int64_t>(args.num_tokens / 16, 1, kMostTokens);
  const int64_t groups = (args.num_tokens + at_once - 1) / at_once;
  const int64_t token_elements = static_cast<int64_t>(args.num_heads) * args.head_size;
  const bool in_place = args.output.data == args.outputs[0].data || args.output.data == args.outputs[1].data;
  dispatch_merge<float, f16, bf16, e4m3>(args, [&]<class T, class Out> {
    const bool streamed =
        !in_place && args.num_tokens * token_elements * static_cast<int64_t>(sizeof(Out)) > kWorthStreaming;
    const int64_t group_elements = std::max<int64_t>(1, token_elements * args.num_parts * at_once);
    parallel_for(groups, std::max<int64_t>(1, kPiece / group_elements), [&](int64_t begin, int64_t end) {
      LineWriter written(streamed);
      Weights weights(args, at_once);
      for (int64_t group = begin; group < end; ++group) {
        const int64_t first = group * at_once, count = std::min(at_once, args.num_tokens - first);
        weights.compute(first, count);
        merge_tokens<T, Out>(args, weights, first, count, written);
      }
    });
  });
}

}  // namespace pykv::PYKV_ISA
