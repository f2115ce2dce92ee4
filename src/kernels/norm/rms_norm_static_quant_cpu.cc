// Twin of rms_norm_static_quant.cu.
#include "cpu/encode.h"
#include "cpu/quantise.h"
#include "norm/rms_norm_static_quant.h"
#include "norm/row_norm_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T>
struct Codes {
  using Element = e4m3;
  using Kept = T;
  static constexpr bool kByLargest = false;
  const Encoder<T, e4m3, TimesInverse>& encoder;
  e4m3* out;
  Weights<T> weights;

  Codes(const Encoder<T, e4m3, TimesInverse>& encoder, const RmsNormStaticQuantArgs& args, int64_t row)
      : encoder(encoder), out(row_at<e4m3>(args.out, args.out_rows, row)), weights(args.weights, 1.0f) {}
  Pair<T> scaled(int64_t i, Pair<T> v, int64_t count) const { return v * weights(i, count); }
  void encode(e4m3* to, const T* from, int64_t n, bool past) const { encoder(to, from, n, past); }
};

}  // namespace

void rms_norm_static_quant_cpu(const RmsNormStaticQuantArgs& args, const Launch&) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    const Encoder<T, e4m3, TimesInverse> encoder(args.scale, args.num_rows * args.hidden_size);
    const auto codes = [&](int64_t row) { return Codes<T>(encoder, args, row); };
    if (args.residual) {
      norm_rows<WithResidual<T, true>>(args, codes);
    } else {
      norm_rows<Input<T>>(args, codes);
    }
  });
}

}  // namespace pykv::PYKV_ISA
