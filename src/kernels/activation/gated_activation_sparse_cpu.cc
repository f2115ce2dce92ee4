// out = R_T( R_T(gelu(max(gate - cut, 0))) * up ),  cut = mean(gate) + deviations * std(gate) of each row, in fp32.
//
// A row is one thread's: passes for the mean and the deviation, then one for the product, which finds the gate in the
// cache and prefetches the next row.  What does not stick out, as almost everywhere, needs no exponential.
#include <algorithm>
#include <cmath>

#include "activation/activations_cpu.h"
#include "activation/gated_activation_sparse.h"
#include "cpu/parallel.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kSums = 2;  // independent additions of pairs in flight; their order is the same for every row

// The sum of term(x) over n elements; what lies behind the last counts 0.
template <class T, class Term>
float sum_of(const T* row, int64_t n, Term term) {
  Pair<T> sums[kSums] = {0.0f, 0.0f};
  int64_t i = 0;
  for (; i + kSums * kPair <= n; i += kSums * kPair)
    for (int k = 0; k < kSums; ++k) sums[k] = sums[k] + term(load_pair<T>(row + i + k * kPair));
  for (; i < n; i += kPair) sums[0] = sums[0] + first_of(term(load_pair<T>(row + i, n - i)), n - i);
  return sum(sums[0] + sums[1]);
}

template <class T>
float cut_of(const T* gate, int64_t n, float deviations) {
  const float mean = sum_of(gate, n, [](Pair<T> x) { return x; }) / static_cast<float>(n);
  const float squares = sum_of(gate, n, [=](Pair<T> x) { return (x - mean) * (x - mean); });
  return mean + std::sqrt(squares / static_cast<float>(n)) * deviations;
}

// What follows is of numbers `over` the cut, gate - cut: R_T(gelu) of those above 0 or NaN, 0 for the others, times up.
#if defined(__AVX512F__)
// Those few are brought together first, so that the exponential is not worked out for the others beside them.
template <class T, class Gelu>
[[gnu::flatten]] void activate(T* to, const T* gate, const T* up, int64_t ahead, float cut, int64_t n, bool past,
                               Gelu gelu) {
  constexpr int64_t kSome = 1024;
  alignas(64) float found[kSome + kPair];
  __mmask16 places[kSome / kWidth];
  for (int64_t first = 0; first < n; first += kSome) {
    const int64_t size = std::min(n - first, kSome);
    int64_t count = 0;
    const auto find = [&](Floats over, __mmask16* place) {
      *place = _mm512_cmp_ps_mask(over, Floats{}, _CMP_NLE_UQ);
      store(found + count, _mm512_maskz_compress_ps(*place, over));
      count += __builtin_popcount(*place);
    };
    for (int64_t i = 0; i < size; i += kPair) {
      prefetch_pair(gate + first + i + ahead);
      const Pair<T> over = load_pair<T>(gate + first + i, size - i) - cut;
      find(over.x, places + i / kWidth);
      find(over.y, places + i / kWidth + 1);
    }
    store(found + count, Floats{});
    store(found + count + kWidth, Floats{});
    for (int64_t i = 0; i < count; i += kPair) {
      const Pair<T> activated = rounded(gelu(Pair<T>{load(found + i), load(found + i + kWidth)}));
      store(found + i, activated.x);
      store(found + i + kWidth, activated.y);
    }
    count = 0;
    const auto put_back = [&](__mmask16 place) {
      const Floats activated = _mm512_maskz_expand_ps(place, load(found + count));
      count += __builtin_popcount(place);
      return activated;
    };
    for (int64_t i = 0; i < size; i += kPair) {
      prefetch_pair(up + first + i + ahead);
      const Floats x = put_back(places[i / kWidth]), y = put_back(places[i / kWidth + 1]);
      store_pair(to + first + i, Pair<T>{x, y} * load_pair<T>(up + first + i, size - i), size - i, past);
    }
  }
}
#else
// Whether a number of them is above 0, or NaN.
bool any_positive(Floats x) {
  const Words found = __builtin_bit_cast(Words, ~(x <= 0.0f));
  uint32_t any = 0;
  for (int i = 0; i < kWidth; ++i) any |= found[i];
  return any != 0;
}

template <class T, class Gelu>
void activate(T* to, const T* gate, const T* up, int64_t ahead, float cut, int64_t n, bool past, Gelu gelu) {
  each_pair(0, n, [=](int64_t i, int64_t count) {
    prefetch_pair(gate + i + ahead);
    prefetch_pair(up + i + ahead);
    const Pair<T> over = load_pair<T>(gate + i, count) - cut, factor = load_pair<T>(up + i, count);
    Pair<T> activated = 0.0f;
    if (any_positive(over.x) || any_positive(over.y))
      activated = rounded(gelu(each(over, [](Floats x) { return x < 0.0f ? Floats{} : x; })));
    store_pair(to + i, activated * factor, count, past);
  });
}
#endif

template <class T, class Gelu>
void activate_row(LineWriter& writer, T* out, const T* gate, const T* up, int64_t ahead, float cut, int64_t n,
                  bool streamed, Gelu activation) {
  write_pairs(writer, out, n, streamed, [&](T* to, int64_t first, int64_t size, bool past) {
    activate(to, gate + first, up + first, ahead, cut, size, past, activation);
  });
}

}  // namespace

void gated_activation_sparse_cpu(const GatedActivationSparseArgs& args, const Launch&) {
  constexpr int64_t kElementsWorthAThread = 8192;
  const int64_t n = args.width;
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    const bool streamed = args.num_rows * n * static_cast<int64_t>(sizeof(T)) > kWorthStreaming;
    parallel_for(args.num_rows, std::max<int64_t>(1, kElementsWorthAThread / n), [&](int64_t begin, int64_t end) {
      LineWriter writer(streamed);
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(args.input) + args.input_rows.offset(row);
        T* out = static_cast<T*>(args.out) + args.out_rows.offset(row);
        const int64_t ahead = args.input_rows.offset(std::min(row + 1, end - 1)) - args.input_rows.offset(row);
        const float cut = cut_of(gate, n, plain(args.deviations));
        if (args.tanh) {
          activate_row(writer, out, gate, gate + n, ahead, cut, n, streamed, [](auto x) { return quick_gelu_tanh(x); });
        } else {
          activate_row(writer, out, gate, gate + n, ahead, cut, n, streamed, [](auto x) { return gelu_above_zero(x); });
        }
      }
      if (streamed) finish_streaming();
    });
  });
}

}  // namespace pykv::PYKV_ISA
