// The merge of merge_attn_states.h.  Bound by memory: a few tokens at a time, first the weights of all their rows, many at
// once and from whole lines of lse, then the rows in the order of memory, each part read once, past the caches if there is
// much to write.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention/merge_attn_states.h"
#include "cpu/parallel.h"
#include "cpu/prefetch.h"
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
      const Floats lse = load(weights + p * rows_), weight = exp(lse - base);
      // no weight of what has seen something is zero: NaN in its output must come out
      store(weights + p * rows_, lse == -infinity ? Floats{} : max(splat(0x1p-126f), weight));
      total += weight;
    }
    const Floats factor = total == 0.0f ? Floats{} : scale_ / total;
    for (int64_t p = 0; p < a_.num_parts; ++p) store(weights + p * rows_, load(weights + p * rows_) * factor);
    const Words nothing_seen = __builtin_bit_cast(Words, total == 0.0f);  // not so where an lse is NaN
    if (a_.copies_empty) store(weights, nothing_seen ? splat(scale_) : load(weights));
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

// Two vectors of floats, the even and the odd elements of one vector of bf16: a shift and a mask widen it, and the way back
// needs no narrowing.
inline void add_weighted(Floats* sums, const bf16* from, float weight) {
  const Words both = load_raw<Words>(from);
  sums[0] += __builtin_bit_cast(Floats, both << 16) * weight;
  sums[1] += __builtin_bit_cast(Floats, both & 0xffff0000u) * weight;
}
// NaN outlives this rounding where its lower half is zero, as that of bf16 is.
inline Words rounded_up_half(Floats v) {
  const Words bits = __builtin_bit_cast(Words, v);
  return bits + ((bits >> 16 & 1u) + 0x7fffu);
}
inline void store_both(bf16* to, const Floats* sums) {
  const Words both = rounded_up_half(sums[0]) >> 16 | (rounded_up_half(sums[1]) & 0xffff0000u);
  __builtin_memcpy(to, &both, sizeof both);
}

// Elements [d, d + count) of a row, at most kVectors vectors of them.
template <bool kWhole, class T, class Out>
void merge_elements(const MergeAttnStatesArgs& a, int64_t token, int64_t head, const float* weights, int64_t stride,
                    int64_t d, int64_t count, Out* out) {
  constexpr bool kBoth = kWhole && std::is_same_v<T, bf16> && std::is_same_v<Out, bf16>;
  Floats sums[kVectors];
  for (Floats& x : sums) x = splat(-0.0f);  // what leaves a zero of either sign as it is
  bool any = false;
  for (int64_t p = 0; p < a.num_parts; ++p) {
    float weight = weights[p * stride];
    if (weight == 0) continue;
    if (kBoth && weight != weight) weight = __builtin_nanf("");
    any = true;
    const T* row = a.part<T>(p, token, head) + d;
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (kBoth) {
        if (v % 2 == 0) add_weighted(sums + v, row + v * kWidth, weight);
      } else if (kWhole) {
        sums[v] += load(row + v * kWidth) * weight;
      } else if (v * kWidth < count) {
        sums[v] += load(row + v * kWidth, count - v * kWidth) * weight;
      }
    }
  }
  if (!any) std::fill_n(sums, kVectors, Floats{});
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kBoth) {
      if (v % 2 == 0) store_both(out + v * kWidth, sums + v);
    } else if (kWhole) {
      store(out + v * kWidth, sums[v]);
    } else if (v * kWidth < count) {
      store(out + v * kWidth, sums[v], count - v * kWidth);
    }
  }
}

// Elements [from, from + n) of a row.
template <class T, class Out>
void merge_row(const MergeAttnStatesArgs& a, int64_t token, int64_t head, const float* weights, int64_t stride,
               int64_t from, int64_t n, Out* out) {
  constexpr int64_t kAtOnce = kVectors * kWidth;
  int64_t d = 0;
  for (; d + kAtOnce <= n; d += kAtOnce)
    merge_elements<true, T>(a, token, head, weights, stride, from + d, kAtOnce, out + d);
  if (d < n) merge_elements<false, T>(a, token, head, weights, stride, from + d, n - d, out + d);
}

template <class T, class Out>
void merge_tokens(const MergeAttnStatesArgs& a, const Weights& weights, int64_t first, int64_t count,
                  LineWriter& written) {
  // heads that are neighbours are written together, as many as a piece holds: what has just been stored is slow to read
  const int64_t in_piece = LineWriter::kPieceBytes / static_cast<int64_t>(sizeof(Out)) / a.head_size;
  const int64_t at_once = a.output.head == a.head_size ? std::max<int64_t>(1, in_piece) : 1;
  constexpr int64_t bytes = sizeof(T);
  for (int64_t t = 0; t < count; ++t) {
    const int64_t next = first + t + 1;
    for (int64_t h = 0; h < a.num_heads; h += at_once) {
      const int64_t heads = std::min(at_once, a.num_heads - h), size = a.head_size;
      written.fill(a.output.row<Out>(first + t, h), heads * size, [&](Out* out, int64_t from, int64_t n) {
        for (int64_t i = 0; i < heads; ++i) {
          for (int64_t p = 0; p < a.num_parts && next < a.num_tokens; ++p)
            prefetch_bytes(a.part<T>(p, next, h + i) + (heads == 1 ? from : 0), (heads == 1 ? n : size) * bytes);
          merge_row<T>(a, first + t, h + i, weights((h + i) * count + t), weights.stride(), heads == 1 ? from : 0,
                       heads == 1 ? n : size, out + i * size);
        }
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
