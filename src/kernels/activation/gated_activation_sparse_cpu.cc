// out = R_T( R_T(gelu(max(gate - cut, 0))) * up ),  cut = mean(gate) + deviations * std(gate) of each row, in fp32.
//
// A row is one thread's: passes for the mean and the deviation, then one for the product, which finds the gate in the
// cache.  Where nothing of a vector sticks out, as almost everywhere, zeros need no exponential.
#include <algorithm>
#include <cmath>

#include "activation/activations_cpu.h"
#include "activation/gated_activation_sparse.h"
#include "cpu/parallel.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kSums = 4;  // independent additions in flight; their order is the same for every row

// The sum of term(x) over n elements; what lies behind the last is taken for `neutral`, whose term is 0.
template <class T, class Term>
float sum_of(const T* row, int64_t n, float neutral, Term term) {
  Floats sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kWidth <= n; i += kSums * kWidth)
    for (int k = 0; k < kSums; ++k) sums[k] += term(load(row + i + k * kWidth));
  for (; i < n; i += kWidth) {
    Floats x = load(row + i, n - i);
    for (int64_t k = n - i; k < kWidth; ++k) x[k] = neutral;
    sums[0] += term(x);
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

template <class T>
float cut_of(const T* gate, int64_t n, float deviations) {
  const float mean = sum_of(gate, n, 0.0f, [](Floats x) { return x; }) / static_cast<float>(n);
  const float squares = sum_of(gate, n, mean, [=](Floats x) { return (x - mean) * (x - mean); });
  return mean + std::sqrt(squares / static_cast<float>(n)) * deviations;
}

bool any(Words lanes) {
  uint32_t found = 0;
  for (int i = 0; i < kWidth; ++i) found |= lanes[i];
  return found != 0;
}

template <class T, class Gelu>
void activate_row(T* out, const T* gate, const T* up, float cut, int64_t n, Gelu activation) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const Floats over = load(gate + i, n - i) - cut, factor = load(up + i, n - i);
    Floats activated{};
    if (any(__builtin_bit_cast(Words, ~(over <= 0.0f)))) {  // NaN, too
      T rounded[kWidth];
      store(rounded, activation(over < 0.0f ? Floats{} : over));
      activated = load(rounded);
    }
    store(out + i, activated * factor, n - i);
  }
}

}  // namespace

void gated_activation_sparse_cpu(const GatedActivationSparseArgs& args, const Launch&) {
  constexpr int64_t kElementsWorthAThread = 8192;
  const int64_t n = args.width;
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    parallel_for(args.num_rows, std::max<int64_t>(1, kElementsWorthAThread / n), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const T* gate = static_cast<const T*>(args.input) + args.input_rows.offset(row);
        T* out = static_cast<T*>(args.out) + args.out_rows.offset(row);
        const float cut = cut_of(gate, n, args.deviations);
        if (args.tanh) {
          activate_row(out, gate, gate + n, cut, n, [](Floats x) { return gelu_tanh(x); });
        } else {
          activate_row(out, gate, gate + n, cut, n, [](Floats x) { return gelu(x); });
        }
      }
    });
  });
}

}  // namespace pykv::PYKV_ISA
