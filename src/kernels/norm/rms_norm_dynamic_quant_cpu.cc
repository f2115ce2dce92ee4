// Twin of rms_norm_dynamic_quant.cu.
#include "cpu/quantise.h"
#include "cpu/tile_encoder.h"
#include "norm/rms_norm_dynamic_quant.h"
#include "norm/row_norm_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

// Of the scales that most groups have.
template <class T>
struct Encoders {
  TileEncoder<T, ByLargest, 448> of_largest;
  Encoder<T, e4m3, ByLargest> at_bound;

  explicit Encoders(const RmsNormDynamicQuantArgs& args) : Encoders(args, args.num_rows * args.hidden_size) {}

 private:
  Encoders(const RmsNormDynamicQuantArgs& args, int64_t elements)
      : of_largest(args.int8 ? 0 : elements),
        at_bound(args.scale_of(args.bound(), args.bound()), args.int8 || !args.bounded ? 0 : elements) {}
};

template <class T, class Code>
struct Codes {
  using Element = Code;
  using Kept = T;
  static constexpr bool kByLargest = true;
  static constexpr bool kInt8 = std::is_same_v<Code, int8_t>;

  const RmsNormDynamicQuantArgs& args;
  const Encoders<T>& encoders;
  Code* out;
  Weights<T> weights;
  float* scales;  // of the row
  float bound;

  Codes(const RmsNormDynamicQuantArgs& args, const Encoders<T>& encoders, int64_t row)
      : args(args),
        encoders(encoders),
        out(row_at<Code>(args.out, args.out_rows, row)),
        weights(args.weights, 1.0f),
        scales(args.scales + row * args.scale_row),
        bound(args.bound()) {}
  int64_t group_size() const { return args.group_size; }
  Pair<T> scaled(int64_t i, Pair<T> v, int64_t count) const { return rounded(v) * weights(i, count); }
  void scale_by(int64_t group, float most) const { scales[group * args.scale_group] = args.scale_of(most, bound); }

  // The group's.  E4M3 divides, int8 multiplies with the scale's inverse.
  void encode(Code* to, const T* from, int64_t n, int64_t group, float most, bool past) const {
    const float scale = scales[group * args.scale_group];
    if constexpr (kInt8) {
      each_pair(0, n, [=, inverse = 1.0f / scale](int64_t i, int64_t count) {
        store_quantised(to + i, load_pair<T>(from + i, count) * inverse, count, past);
      });
    } else {
      if (most >= bound && encoders.at_bound.tables()) return encoders.at_bound(to, from, n, past);
      if (scale == most / 448.0f && encoders.of_largest.divide(to, from, n, most, past)) return;
      each_pair(0, n, [=, by = Divisor(scale, most)](int64_t i, int64_t count) {
        store_quantised(to + i, load_pair<T>(from + i, count) / by, count, past);
      });
    }
  }
};

template <class T, class Source>
void run(const RmsNormDynamicQuantArgs& args) {
  const Encoders<T> encoders(args);
  if (args.int8) {
    norm_rows<Source>(args, [&](int64_t row) { return Codes<T, int8_t>(args, encoders, row); });
  } else {
    norm_rows<Source>(args, [&](int64_t row) { return Codes<T, e4m3>(args, encoders, row); });
  }
}

}  // namespace

void rms_norm_dynamic_quant_cpu(const RmsNormDynamicQuantArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    if (args.residual) {
      run<T, WithResidual<T, T, false>>(args);
    } else {
      run<T, Input<T>>(args);
    }
  });
}

}  // namespace pykv::PYKV_ISA
