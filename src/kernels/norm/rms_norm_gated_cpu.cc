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

// Where a group begins: its row, and its first element there.
template <class T>
struct Group {
  T* input;
  const T* gate;
  T* out;
  int64_t begin;

  Group(const RmsNormGatedArgs& args, int64_t group) {
    const int64_t row = group / args.groups;
    begin = group % args.groups * args.hidden_size;
    input = row_at<T>(args.input, args.input_rows, row) + begin;
    gate = args.gate ? row_at<T>(args.gate, args.gate_rows, row) + begin : nullptr;
    out = row_at<T>(args.out, args.out_rows, row) + begin;
  }
};

template <class T>
struct PlainInput : Group<T> {
  static constexpr bool kKeeps = false;
  PlainInput(const RmsNormGatedArgs& args, int64_t group, float*) : Group<T>(args, group) {}
  Pair<T> first(int64_t i, int64_t count) const { return load_pair<T>(this->input + i, count); }
  Pair<T> again(int64_t i, int64_t count) const { return first(i, count); }
  void prefetch_at(int64_t i) const {
    prefetch_pair(this->input + i);
    if (this->gate) prefetch_pair(this->gate + i);
  }
};

// Is worked out once, and kept.
template <class T, Gate kGate>
struct GatedInput : PlainInput<T> {
  static constexpr bool kKeeps = true;
  float* kept;

  GatedInput(const RmsNormGatedArgs& args, int64_t group, float* kept) : PlainInput<T>(args, group, kept), kept(kept) {}
  Pair<T> first(int64_t i, int64_t count) const {
    const Pair<T> v = gated<kGate>(load_pair<T>(this->input + i, count), load_pair<T>(this->gate + i, count));
    store(kept + i, v.x);
    store(kept + i + kWidth, v.y);
    return v;
  }
  Pair<T> again(int64_t i, int64_t) const { return {load(kept + i), load(kept + i + kWidth)}; }
};

template <class T, Gate kGate>
struct Grouped : Group<T> {
  using Element = T;
  static constexpr bool kByLargest = false;
  Weights<T> weights;

  Grouped(const RmsNormGatedArgs& args, int64_t group) : Group<T>(args, group), weights(args.weights, 1.0f) {}
  Pair<T> scaled(int64_t i, Pair<T> v, int64_t count) const {
    v = v * weights(this->begin + i, count);
    if constexpr (kGate != Gate::kNone) v = gated<kGate>(v, load_pair<T>(this->gate + i, count));
    return v;
  }
  void store(T* to, Pair<T> v, int64_t count, bool past) const { store_pair(to, v, count, past); }
};

template <class T, Gate kBefore, Gate kAfter>
void run(const RmsNormGatedArgs& args) {
  const auto grouped = [&](int64_t group) { return Grouped<T, kAfter>(args, group); };
  if constexpr (kBefore == Gate::kNone) {
    norm_rows<PlainInput<T>>(args, grouped);
  } else {
    norm_rows<GatedInput<T, kBefore>>(args, grouped);
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
