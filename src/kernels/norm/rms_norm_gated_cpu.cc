// Twin of rms_norm_gated.cu.
#include "cpu/sigmoid.h"
#include "norm/rms_norm_gated.h"
#include "norm/row_norm_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

enum class Gate { kNone, kSilu, kSigmoid };

// x * silu(gate), or x * sigmoid(gate).
template <Gate kGate, class T>
Pair<T> gated(Pair<T> x, Pair<T> gate) {
  return x * (kGate == Gate::kSigmoid ? logistic(gate) : silu(gate));
}

template <class T>
const T* gate_of(const RmsNormGatedArgs& args, int64_t row) {
  return args.gate ? row_at<T>(args.gate, args.gate_rows, row) : nullptr;
}

template <class T>
struct PlainInput : Input<T> {
  const T* gate;
  PlainInput(const RmsNormGatedArgs& args, int64_t row, float* values)
      : Input<T>(args, row, values), gate(gate_of<T>(args, row)) {}
  void prefetch_at(int64_t i) const {
    Input<T>::prefetch_at(i);
    if (gate) prefetch_pair(gate + i);
  }
};

// Is worked out once, and kept.
template <class T, Gate kGate>
struct GatedInput : PlainInput<T> {
  static constexpr bool kKeeps = true;
  float* kept;

  GatedInput(const RmsNormGatedArgs& args, int64_t row, float* kept) : PlainInput<T>(args, row, kept), kept(kept) {}
  Pair<T> first(int64_t i, int64_t count) const {
    const Pair<T> v = gated<kGate>(load_pair<T>(this->input + i, count), load_pair<T>(this->gate + i, count));
    store_pair(kept + i, v, count);
    return v;
  }
  Pair<T> again(int64_t i, int64_t count) const { return load_pair<T>(kept + i, count); }
};

template <class T, Gate kGate>
struct Gated {
  using Element = T;
  static constexpr bool kByLargest = false;
  T* out;
  const T* gate;
  Weights<T> weights;

  Gated(const RmsNormGatedArgs& args, int64_t row)
      : out(row_at<T>(args.out, args.out_rows, row)), gate(gate_of<T>(args, row)), weights(args.weights, 1.0f) {}
  Pair<T> scaled(int64_t i, Pair<T> v, int64_t count) const {
    v = v * weights(i, count);
    if constexpr (kGate != Gate::kNone) v = gated<kGate>(v, load_pair<T>(gate + i, count));
    return v;
  }
};

template <class T, Gate kBefore, Gate kAfter>
void run(const RmsNormGatedArgs& args) {
  const auto result = [&](int64_t row) { return Gated<T, kAfter>(args, row); };
  if constexpr (kBefore == Gate::kNone) {
    norm_rows<PlainInput<T>>(args, result);
  } else {
    norm_rows<GatedInput<T, kBefore>>(args, result);
  }
}

template <class T, Gate kGate>
void run_gate(const RmsNormGatedArgs& args) {
  if (args.gate_first) {
    run<T, kGate, Gate::kNone>(args);
  } else {
    run<T, Gate::kNone, kGate>(args);
  }
}

}  // namespace

void rms_norm_gated_cpu(const RmsNormGatedArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    if (!args.gate) {
      run<T, Gate::kNone, Gate::kNone>(args);
    } else if (args.sigmoid) {
      run_gate<T, Gate::kSigmoid>(args);
    } else {
      run_gate<T, Gate::kSilu>(args);
    }
  });
}

}  // namespace pykv::PYKV_ISA
