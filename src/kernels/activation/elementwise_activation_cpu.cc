// out = R_T(activation(input)), in fp32.
//
// Work is handed out in pieces of rows, so that one long row keeps all threads busy.
#include <algorithm>
#include <cmath>

#include "activation/activations_cpu.h"
#include "activation/elementwise_activation.h"
#include "cpu/parallel.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kPiece = 8192;  // elements of a row in one piece

template <class Activation>
void run(const ElementwiseActivationArgs& args, Activation activation) {
  const int64_t pieces = (args.width + kPiece - 1) / kPiece;
  const int64_t grain = std::max<int64_t>(1, 2 * kPiece / args.width);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    parallel_for(args.num_rows * pieces, grain, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t row = piece / pieces, first = piece % pieces * kPiece;
        const T* input = static_cast<const T*>(args.input) + args.input_rows.offset(row) + first;
        T* out = static_cast<T*>(args.out) + args.out_rows.offset(row) + first;
        const int64_t n = std::min(kPiece, args.width - first);
        int64_t i = 0;
        for (; i + kWidth <= n; i += kWidth) store(out + i, activation(load(input + i)));
        if (i < n) store(out + i, activation(load(input + i, n - i)), n - i);
      }
    });
  });
}

float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

// e^x - 1 for x <= 0: below -1/2 the difference itself, above it Taylor's series to x^8 / 8!, where the difference would
// cancel.
Floats expm1(Floats x) {
  Floats p = x * 2.48015873e-5f + 1.98412698e-4f;
  p = p * x + 1.38888889e-3f;
  p = p * x + 8.33333333e-3f;
  p = p * x + 4.16666667e-2f;
  p = p * x + 1.66666667e-1f;
  p = p * x + 0.5f;
  return x < -0.5f ? exp(x) - 1.0f : p * x * x + x;
}

}  // namespace

void gelu_tanh_cpu(const ElementwiseActivationArgs& args, const Launch&) {
  run(args, [](Floats x) { return gelu_tanh(x); });
}

void gelu_quick_cpu(const ElementwiseActivationArgs& args, const Launch&) {
  run(args, [](Floats x) { return x / (1.0f + exp(-1.702f * x)); });
}

void relu2_cpu(const ElementwiseActivationArgs& args, const Launch&) {
  run(args, [](Floats x) { return x <= 0.0f ? Floats{} : x * x; });  // NaN stays
}

void xielu_cpu(const ElementwiseActivationArgs& args, const Launch&) {
  const float beta = args.beta, eps = args.eps;
  const float alpha_p = softplus(args.alpha_p), alpha_n = beta + softplus(args.alpha_n), slope = beta - alpha_n;
  run(args, [=](Floats x) {
    const Floats most = eps < x ? splat(eps) : x;  // in this order NaN stays
    return x > 0.0f ? x * (alpha_p * x + beta) : alpha_n * expm1(most) + slope * x;
  });
}

}  // namespace pykv::PYKV_ISA
