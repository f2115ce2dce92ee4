// Twin of fp4_mm.cu.
#include "gemm/float_rows_cpu.h"
#include "gemm/fp4_mm.h"

namespace pykv::PYKV_ISA {

void fp4_mm_cpu(const Fp4MmArgs& args, const Launch&) {
  static constexpr float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                      -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  const auto unpack = [&](const uint8_t* codes, int64_t step, const uint8_t* scales, int64_t row, float* to) {
    for (int64_t group = 0; group < args.k / 16; ++group) {
      const float scale = to_float(e4m3{scales[args.scale_at(row, group)]});
      for (int i = 0; i < 8; ++i) {
        const uint8_t pair = codes[(group * 8 + i) * step];
        to[group * 16 + 2 * i] = kE2M1[pair & 15] * scale;
        to[group * 16 + 2 * i + 1] = kE2M1[pair >> 4] * scale;
      }
    }
  };
  const float alpha = args.alpha;
  multiply_floats(
      args.m, args.n, args.k,
      [&](int64_t row, float* to) { unpack(args.a + row * args.a_stride, args.a_step, args.a_scales, row, to); },
      [&](int64_t row, float* to) { unpack(args.b + row * args.b_stride, args.b_step, args.b_scales, row, to); },
      [&](int64_t row, int64_t column, float sum) {
        dispatch<float, f16, bf16>(args.out_dtype, [&]<class T>() {
          static_cast<T*>(args.out)[row * args.out_stride + column] = from_float<T>(alpha * sum);
        });
      });
}

}  // namespace pykv::PYKV_ISA
