// result = R_T( R_T(activation(gate)) * up ), the activation in fp32.
//
// Work is handed out in pieces of rows, so that one long row keeps all threads busy.  Bound by memory for rows that
// come from there, else by the exponential.
#include <algorithm>

#include "activation/activations_cpu.h"
#include "activation/gated_activation.h"
#include "cpu/parallel.h"
#include "cpu/quantise.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kPiece = 4096;  // elements of a row in one piece

// From the first and the second half of 2 * kWidth numbers to those in even and those in odd places.
void take_apart(Floats& x, Floats& y) {
  Words even;
  for (int i = 0; i < kWidth; ++i) even[i] = 2 * i;
  const Floats first = __builtin_shuffle(x, y, even);
  y = __builtin_shuffle(x, y, even + 1);
  x = first;
}

// What becomes of the products: numbers of T ...
template <class T>
struct Rounded {
  using Element = T;
  explicit Rounded(const GatedActivationArgs&) {}
  void operator()(T* to, Floats products, int64_t count) const { store(to, products, count); }
};

// ... or the codes of R_T(product) * (1 / scale).
template <class T, class Code>
struct Quantised {
  using Element = Code;
  float inverse;
  explicit Quantised(const GatedActivationArgs& args) : inverse(1.0f / args.scale) {}
  void operator()(Code* to, Floats products, int64_t count) const {
    store_quantised(to, rounded<T>(products) * inverse, count);
  }
};
template <class T>
using InE4M3 = Quantised<T, e4m3>;
template <class T>
using InInt8 = Quantised<T, int8_t>;

// One piece: op(gate, up) for floats.
template <bool kInterleaved, class T, class Op, class Result>
void gate_piece(typename Result::Element* result, const T* gate, const T* up, int64_t n, Op op, Result store_result) {
  const auto gate_vector = [&](int64_t i, int64_t count) {
    if constexpr (kInterleaved) {
      const int64_t left = 2 * count - kWidth;
      Floats a = load(gate + 2 * i, 2 * count), b = left > 0 ? load(gate + 2 * i + kWidth, left) : Floats{};
      take_apart(a, b);
      store_result(result + i, op(a, b), count);
    } else {
      store_result(result + i, op(load(gate + i, count), load(up + i, count)), count);
    }
  };
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) gate_vector(i, kWidth);
  if (i < n) gate_vector(i, n - i);
}

// make_op.operator()<T>() gives the op for arrays of T.
template <bool kInterleaved = false, template <class> class Result = Rounded, class MakeOp>
void run(const GatedActivationArgs& args, MakeOp make_op) {
  const int64_t pieces = (args.width + kPiece - 1) / kPiece;
  const int64_t grain = std::max<int64_t>(1, 2 * kPiece / args.width);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    const auto op = make_op.template operator()<T>();
    const Result<T> store_result(args);
    parallel_for(args.num_rows * pieces, grain, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t row = piece / pieces, first = piece % pieces * kPiece;
        const T* input = static_cast<const T*>(args.input) + args.input_rows.offset(row);
        const T* gate = input + args.gate + (kInterleaved ? 2 * first : first);
        auto* result = static_cast<typename Result<T>::Element*>(args.result) + args.result_rows.offset(row) + first;
        gate_piece<kInterleaved>(result, gate, input + args.up + first, std::min(kPiece, args.width - first), op,
                                 store_result);
      }
    });
  });
}

// R_T(activation(gate)) * up
template <template <class> class Result = Rounded, class Activation>
void run_activation(const GatedActivationArgs& args, Activation activation) {
  run<false, Result>(args,
                     [=]<class T>() { return [=](Floats a, Floats b) { return rounded<T>(activation(a)) * b; }; });
}

// NaN gives the limit.
Floats at_most(Floats x, float limit) { return min(x, splat(limit)); }
Floats within(Floats x, float limit) { return max(at_most(x, limit), splat(-limit)); }

}  // namespace

void silu_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run_activation(args, [](Floats x) { return silu(x); });
}

void silu_and_mul_quant_cpu(const GatedActivationArgs& args, const Launch&) {
  const auto activation = [](Floats x) { return silu(x); };
  if (args.result_dtype == DType::kInt8) {
    run_activation<InInt8>(args, activation);
  } else {
    run_activation<InE4M3>(args, activation);
  }
}

void gelu_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run_activation(args, [](Floats x) { return gelu(x); });
}

void gelu_tanh_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run_activation(args, [](Floats x) { return gelu_tanh(x); });
}

void fatrelu_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run_activation(args, [threshold = args.limit](Floats x) { return x > threshold ? x : Floats{}; });
}

void silu_and_mul_with_clamp_cpu(const GatedActivationArgs& args, const Launch&) {
  run(args, [&]<class T>() {
    // min(x, limit), rounded to T, is min(x, limit rounded to T)
    const float limit = to_float(from_float<T>(args.limit));
    return [=](Floats a, Floats b) { return rounded<T>(silu(at_most(a, limit))) * within(b, limit); };
  });
}

void swigluoai_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run<true>(args, [&]<class T>() {
    return [alpha = args.alpha, limit = args.limit](Floats a, Floats b) {
      const Floats gate = at_most(a, limit);
      return (within(b, limit) + 1.0f) * gate / (1.0f + exp(-alpha * gate));
    };
  });
}

void swiglustep_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run(args, [&]<class T>() {
    return [limit = args.limit](Floats a, Floats b) { return at_most(silu(a), limit) * within(b, limit); };
  });
}

}  // namespace pykv::PYKV_ISA
