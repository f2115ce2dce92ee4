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
  TileEncoder<T, ByLargest, 448> of_rows;
  TileEncoder<T, TimesInverse, 448> of_groups;
  Encoder<T, e4m3, ByLargest> at_bound;

  explicit Encoders(const RmsNormDynamicQuantArgs& args) : Encoders(args, args.num_rows * args.hidden_size) {}

 private:
  Encoders(const RmsNormDynamicQuantArgs& args, int64_t elements)
      : of_rows(args.int8 || !args.per_token ? 0 : elements),
        of_groups(args.int8 || args.per_token ? 0 : elements),
        at_bound(args.scale_of(args.bound(), args.bound()),
                 args.int8 || !args.per_token || !args.bounded ? 0 : elements) {}
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
  Pair<T> scaled(int64_t i, Pair<T> v, int64_t count) const { return v * weights(i, count); }
  // Of the largest of groups their scales.
  void make_scales(float* of, int64_t groups) const {
    for (int64_t g = 0; g < groups; ++g) of[g] = args.scale_of(of[g], bound);
    for (int64_t g = 0; g < groups; ++g) scales[g * args.scale_group] = of[g];
  }

  // A group, `most` its largest, NaN where it has any.  E4M3 of a row divides, all else multiplies with the scale's inverse.
  [[gnu::always_inline]] void encode(Code* to, const T* from, int64_t n, float scale, float most, bool past) const {
    if constexpr (kInt8) {
      if (most < __builtin_inff()) {
        multiply(reinterpret_cast<InsideInt8*>(to), from, n, 1.0f / scale, past);
      } else {
        multiply(to, from, n, 1.0f / scale, past);
      }
    } else {
      const bool inside = most < bound && most > 0x1p-8f && most < 0x1p80f;  // above the smallest scale
      if (!args.per_token) {
        if (inside && encoders.of_groups.divide(to, from, n, most, past)) return;
        if (inside) {
          multiply(reinterpret_cast<InsideE4M3*>(to), from, n, 1.0f / scale, past);
        } else {
          multiply(to, from, n, 1.0f / scale, past);
        }
        return;
      }
      if (inside && encoders.of_rows.divide(to, from, n, most, past)) return;
      if (most >= bound && encoders.at_bound.tables()) return encoders.at_bound(to, from, n, past);
      if (inside) {
        divide(reinterpret_cast<InsideE4M3*>(to), from, n, Divisor(scale, most), past);
      } else {
        divide(to, from, n, Divisor(scale, most), past);
      }
    }
  }

 private:
  template <class Result>
  [[gnu::noinline]] static void multiply(Result* to, const T* from, int64_t n, float factor, bool past) {
    each_pair(0, n, [=](int64_t i, int64_t count) {
      store_quantised(to + i, load_pair<T>(from + i, count) * factor, count, past);
    });
  }
  template <class Result>
  [[gnu::noinline]] static void divide(Result* to, const T* from, int64_t n, const Divisor& by, bool past) {
    each_pair(0, n, [=](int64_t i, int64_t count) {
      store_quantised(to + i, load_pair<T>(from + i, count) / by, count, past);
    });
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
      run<T, WithResidual<T, true>>(args);
    } else {
      run<T, Input<T>>(args);
    }
  });
}

}  // namespace pykv::PYKV_ISA
