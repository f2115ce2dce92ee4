// result = R_T( R_T(activation(gate)) * up ), the activation in fp32.
//
// Work is handed out in pieces of rows, so that one long row keeps all threads busy.  Bound by memory for rows that
// come from there, else by the exponential.
#include <algorithm>

#include "activation/gated_activation.h"
#include "cpu/parallel.h"
#include "cpu/simd.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kPiece = 4096;  // elements of a row in one piece

// R_T(v) as floats.
template <class T>
Floats rounded(Floats v) {
  T stored[kWidth];
  store(stored, v);
  return load(stored);
}
template <>
Floats rounded<float>(Floats v) {
  return v;
}
template <>
Floats rounded<bf16>(Floats v) {  // without the way through memory
  return widen_bf16<Floats>(narrow_bf16<Floats, Words>(v));
}

template <class T, class Activation>
void gate_piece(T* result, const T* gate, const T* up, int64_t n, Activation activation) {
  const auto gate_vector = [&](int64_t i, int64_t count) {
    store(result + i, rounded<T>(activation(load(gate + i, count))) * load(up + i, count), count);
  };
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) gate_vector(i, kWidth);
  if (i < n) gate_vector(i, n - i);
}

template <class Activation>
void run(const GatedActivationArgs& args, Activation activation) {
  const int64_t pieces = (args.width + kPiece - 1) / kPiece;
  const int64_t grain = std::max<int64_t>(1, 2 * kPiece / args.width);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    parallel_for(args.num_rows * pieces, grain, [&](int64_t begin, int64_t end) {
      for (int64_t piece = begin; piece < end; ++piece) {
        const int64_t row = piece / pieces, first = piece % pieces * kPiece;
        const T* gate = static_cast<const T*>(args.input) + args.input_rows.offset(row) + first;
        T* result = static_cast<T*>(args.result) + args.result_rows.offset(row) + first;
        gate_piece(result, gate, gate + args.width, std::min(kPiece, args.width - first), activation);
      }
    });
  });
}

}  // namespace

void silu_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run(args, [](Floats x) { return x / (1.0f + exp(-x)); });
}

void gelu_tanh_and_mul_cpu(const GatedActivationArgs& args, const Launch&) {
  run(args, [](Floats x) { return x / (1.0f + exp(-1.5957691216057308f * (x + 0.044715f * x * x * x))); });
}

}  // namespace pykv::PYKV_ISA
