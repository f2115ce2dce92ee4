// Twin of rms_norm_gated.cu.
#include "norm/rms_norm_gated.h"
#include "norm/row_norm_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

// x * silu(gate), or x * sigmoid(gate).
Floats gated(Floats x, Floats gate, bool sigmoid) {
  const Floats s = 1.0f / (1.0f + exp(-gate));
  return x * (sigmoid ? s : gate * s);
}

// Where a group begins: its row, and its first element there.
template <class T>
struct Group {
  T* input;
  const T* gate;
  T* out;
  int64_t first;

  Group(const RmsNormGatedArgs& args, int64_t group) {
    const int64_t row = group / args.groups;
    first = group % args.groups * args.hidden_size;
    input = row_at<T>(args.input, args.input_rows, row) + first;
    gate = args.gate ? row_at<T>(args.gate, args.gate_rows, row) + first : nullptr;
    out = row_at<T>(args.out, args.out_rows, row) + first;
  }
};

template <class T, bool kGated>
struct GatedInput : Group<T> {
  bool sigmoid;

  GatedInput(const RmsNormGatedArgs& args, int64_t group) : Group<T>(args, group), sigmoid(args.sigmoid) {}
  Floats value(int64_t i, int64_t count) const {
    const Floats x = load(this->input + i, count);
    return kGated ? gated(x, load(this->gate + i, count), sigmoid) : x;
  }
  void keep(int64_t, Floats, int64_t) const {}
};

template <class T, bool kGated>
struct Grouped : Group<T> {
  using Element = T;
  static constexpr bool kByLargest = false;
  Weights<T> weights;
  bool sigmoid;

  Grouped(const RmsNormGatedArgs& args, int64_t group)
      : Group<T>(args, group), weights(args.weights, 1.0f), sigmoid(args.sigmoid) {}
  int64_t group_size(int64_t n) const { return n; }
  Floats scaled(int64_t i, Floats v, int64_t count) const {
    v = v * weights(this->first + i, count);
    return kGated ? gated(v, load(this->gate + i, count), sigmoid) : v;
  }
  void store(T* to, Floats v, int64_t count) const { PYKV_ISA::store(to, v, count); }
};

}  // namespace

void rms_norm_gated_cpu(const RmsNormGatedArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    if (!args.gate) {
      norm_rows<GatedInput<T, false>, Grouped<T, false>>(args);
    } else if (args.gate_first) {
      norm_rows<GatedInput<T, true>, Grouped<T, false>>(args);
    } else {
      norm_rows<GatedInput<T, false>, Grouped<T, true>>(args);
    }
  });
}

}  // namespace pykv::PYKV_ISA
