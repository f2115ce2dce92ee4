// Twin of fp4_mm.cu: codes times their scales are exact in bf16.
#include "gemm/fp4_mm.h"
#include "gemm/row_products_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

template <class Way_>
struct Product {
  using Way = Way_;
  using Element = typename Way::Element;
  static constexpr bool kScaled = false;

  const Fp4MmArgs& args;
  const int64_t m = args.m, n = args.n, k = args.k;

  void unpack_a(int64_t row, int64_t block, Element* to, int64_t stride) const {
    unpack(args.a + row * args.a_stride, args.a_step, args.a_scales, row, block, to, stride);
  }
  Floats unpack_b(int64_t row, int64_t block, Element* to, int64_t stride) const {
    unpack(args.b + row * args.b_stride, args.b_step, args.b_scales, row, block, to, stride);
    return Floats{};
  }

  void ask_b(int64_t row, int64_t block) const {
    __builtin_prefetch(args.b + row * args.b_stride + block * (kBlock / 2) * args.b_step, 0, 2);
  }

  struct OfColumns {};
  OfColumns of_columns(int64_t, int) const { return {}; }
  void store(int64_t row, int64_t column, int count, Floats sums, OfColumns) const {
    const float alpha = args.alpha;
    dispatch<float, f16, bf16>(args.out_dtype, [&]<class T>() {
      store_columns(static_cast<T*>(args.out) + row * args.out_stride + column, alpha * sums, count);
    });
  }

 private:
  void unpack(const uint8_t* codes, int64_t step, const uint8_t* scales, int64_t row, int64_t block, Element* to,
              int64_t stride) const {
    constexpr int kBytes = kBlock / 2, kGroup = 16;
    static constexpr float kE2M1[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                        -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    const int64_t count = std::min<int64_t>(kBytes, k / 2 - block * kBytes);
    const uint8_t* from = codes + block * kBytes * step;
    uint8_t own[kBytes];
    if (step != 1 || count < kBytes) {
      for (int64_t i = 0; i < kBytes; ++i) own[i] = i < count ? from[i * step] : uint8_t{0};
      from = own;
    }
    float of_group[kBlock / kGroup] = {};
    for (int i = 0; i < count * 2 / kGroup; ++i)
      of_group[i] = to_float(e4m3{scales[args.scale_at(row, block * (kBlock / kGroup) + i)]});
    if constexpr (__is_same(Element, float)) {
#if defined(__AVX512F__)
      for (int i = 0; i < kBlock; i += 32) {  // of two groups the even ones, then the odd ones
        const Words codes_of_2 = widen(load_raw<Bytes>(from + i / 2));
        const Words second = {0, 0, 0, 0, 0, 0, 0, 0, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u};
        const Floats scale = select(second, splat(of_group[i / kGroup + 1]), splat(of_group[i / kGroup]));
        for (const Words index : {codes_of_2, codes_of_2 >> 4}) {  // by four bits
          pykv::PYKV_ISA::store(
              to, _mm512_maskz_permutexvar_ps(0xffff, __builtin_bit_cast(__m512i, index), load(kE2M1)) * scale);
          to += stride;
        }
      }
#else
      for (int i = 0; i < kBlock; i += kWidth, to += stride)
        for (int j = i; j < i + kWidth; ++j) to[j - i] = kE2M1[from[j / 2] >> j % 2 * 4 & 15] * of_group[j / kGroup];
#endif
    } else {
#if defined(__AVX512BF16__)
      for (int i = 0; i < kBlock / Way::kStep; ++i, to += stride) {
        // Two groups: 16 numbers each that a code may be, and codes, one in each half of a lane.
        const Floats first = load(kE2M1) * of_group[2 * i], second = load(kE2M1) * of_group[2 * i + 1];
        const __m512bh table = _mm512_cvtne2ps_pbh(second, first);
        const Words bytes = widen(load_raw<Bytes>(from + 16 * i));
        const Words upper = {0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16};
        const Words index = ((bytes | bytes << 12) & 0x000f000f) | upper * 0x00010001;
        const __m512i some =
            _mm512_permutexvar_epi16(__builtin_bit_cast(__m512i, index), __builtin_bit_cast(__m512i, table));
        __builtin_memcpy(to, &some, sizeof(some));
      }
#endif
    }
  }
};

}  // namespace

void fp4_mm_cpu(const Fp4MmArgs& args, const Launch&) {
  in_quickest_way([&]<class Way>() { RowProducts(Product<Way>{args}).run(); });
}

}  // namespace pykv::PYKV_ISA
