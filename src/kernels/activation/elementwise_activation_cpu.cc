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

constexpr int64_t kPiece = 2048;  // elements of a row in one piece

template <class Activation>
void run(const ElementwiseActivationArgs& args, Activation activation) {
  const int64_t pieces = (args.width + kPiece - 1) / kPiece;
  const int64_t grain = std::max<int64_t>(1, 8 * kPiece / args.width);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    const bool streamed =
        args.out != args.input && args.num_rows * args.width * static_cast<int64_t>(sizeof(T)) > kWorthStreaming;
    const auto input_at = [&](int64_t piece) {
      return static_cast<const T*>(args.input) + args.input_rows.offset(piece / pieces) + piece % pieces * kPiece;
    };
    parallel_for(args.num_rows * pieces, grain, [&](int64_t begin, int64_t end) {
      LineWriter writer(streamed);
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t row = piece / pieces, start = piece % pieces * kPiece;
        if (!args.mask.has(row)) continue;
        const T *input = input_at(piece), *next = input_at(std::min(piece + 1, end - 1));
        T* out = static_cast<T*>(args.out) + args.out_rows.offset(row) + start;
        write_pairs(writer, out, std::min(kPiece, args.width - start), streamed,
                    [&](T* to, int64_t first, int64_t size, bool past) {
                      each_pair(0, size, [=](int64_t i, int64_t count) {
                        prefetch_pair(next + first + i);
                        store_pair(to + i, activation(load_pair<T>(input + first + i, count)), count, past);
                      });
                    });
      }
      if (streamed) finish_streaming();
    });
  });
}

float softplus(float x) { return std::max(x, 0.0f) + std::log1p(std::exp(-std::fabs(x))); }

// e^x - 1 for x <= 0: below -1/2 the difference itself, above it Taylor's series to x^8 / 8!, where the difference would
// cancel.  For 16-bit T within 4e-6: the power's parts less 1.
template <class T>
Floats expm1(Floats x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2) {
    const QuickPower power(greater(x, splat(-87.0f)) * 1.44269504f);
    return power.s * power.g + (power.s - 1.0f);
  }
#endif
  Floats p = x * 2.48015873e-5f + 1.98412698e-4f;
  p = p * x + 1.38888889e-3f;
  p = p * x + 8.33333333e-3f;
  p = p * x + 4.16666667e-2f;
  p = p * x + 1.66666667e-1f;
  p = p * x + 0.5f;
  return x < -0.5f ? exp(x) - 1.0f : p * x * x + x;
}

}  // namespace

void silu_cpu(const ElementwiseActivationArgs& args, const Launch&) {
  run(args, [](auto x) { return exact_silu(x); });
}

void gelu_cpu(const ElementwiseActivationArgs& args, const Launch&) {
  run(args, [](auto x) { return gelu(x); });
}

void gelu_tanh_cpu(const ElementwiseActivationArgs& args, const Launch&) {
  run(args, [](auto x) { return quick_gelu_tanh(x); });
}

void gelu_quick_cpu(const ElementwiseActivationArgs& args, const Launch&) {
  run(args, [](auto x) { return times_sigmoid(x, 1.702f * x); });
}

void relu2_cpu(const ElementwiseActivationArgs& args, const Launch&) {
  run(args, [](auto x) {
    return each(x, [](Floats v) { return v <= 0.0f ? Floats{} : v * v; });  // NaN stays
  });
}

void relu_squared_cpu(const ElementwiseActivationArgs& args, const Launch&) {
  run(args, [](auto x) {
    return each(x, [](Floats v) { return v > 0.0f ? v * v : Floats{}; });  // NaN gives 0
  });
}

void xielu_cpu(const ElementwiseActivationArgs& args, const Launch&) {
  const float beta = plain(args.beta), eps = plain(args.eps);
  const float alpha_p = softplus(plain(args.alpha_p)), alpha_n = beta + softplus(plain(args.alpha_n));
  const float slope = beta - alpha_n;
  run(args, [=]<class T>(Pair<T> x) {
    return each(x, [=](Floats v) {
      const Floats most = eps < v ? splat(eps) : v;  // in this order NaN stays
      return v > 0.0f ? v * (alpha_p * v + beta) : alpha_n * expm1<T>(most) + slope * v;
    });
  });
}

}  // namespace pykv::PYKV_ISA
