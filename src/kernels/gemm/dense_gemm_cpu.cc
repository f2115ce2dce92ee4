// Twin of dense_gemm.cu.
#include "gemm/dense_gemm.h"
#include "gemm/row_products_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

template <class A, class B, class Way_>
struct Product {
  using Way = Way_;
  using Element = typename Way::Element;
  static constexpr bool kScaled = false;

  const DenseGemmArgs& args;
  const int64_t m = args.m, n = args.n, k = args.k;

  void unpack_a(int64_t row, int64_t block, Element* to, int64_t stride) const {
    unpack(static_cast<const A*>(args.a) + row * args.a_stride, args.a_step, block, to, stride);
  }
  Floats unpack_b(int64_t row, int64_t block, Element* to, int64_t stride) const {
    unpack(static_cast<const B*>(args.b) + row * args.b_stride, args.b_step, block, to, stride);
    return Floats{};
  }

  void ask_b(int64_t row, int64_t block) const {
    const B* const from = static_cast<const B*>(args.b) + row * args.b_stride + block * kBlock * args.b_step;
    for (int i = 0; i < kBlock; i += 64 / sizeof(B)) __builtin_prefetch(from + i, 0, 2);
  }

  struct OfColumns {};
  OfColumns of_columns(int64_t, int) const { return {}; }
  void store(int64_t row, int64_t column, int count, Floats sums, OfColumns) const {
    dispatch<float, f16, bf16>(args.out_dtype, [&]<class T>() {
      store_columns(static_cast<T*>(args.out) + row * args.out_stride + column, sums, count);
    });
  }

 private:
  template <class T>
  void unpack(const T* row, int64_t step, int64_t block, Element* to, int64_t stride) const {
    const int64_t first = block * kBlock, last = std::min(first + kBlock, k);
    for (int64_t i = first; i < first + kBlock; i += Way::kStep, to += stride) {
      const bool whole = step == 1 && i + Way::kStep <= last;
      if constexpr (__is_same(T, Element)) {
        if (whole) {
          __builtin_memcpy(to, row + i, sizeof(T) * Way::kStep);
          continue;
        }
        for (int64_t j = 0; j < Way::kStep; ++j) to[j] = i + j < last ? row[(i + j) * step] : T{};
      } else {
        T some[Way::kStep] = {};
        for (int64_t j = i; !whole && j < std::min(i + Way::kStep, last); ++j) some[j - i] = row[j * step];
        pykv::PYKV_ISA::store(to, load(whole ? row + i : some));
      }
    }
  }
};

}  // namespace

void dense_gemm_cpu(const DenseGemmArgs& args, const Launch&) {
  if (args.a_dtype == DType::kBFloat16 && args.b_dtype == DType::kBFloat16)
    return in_quickest_way([&]<class Way>() { RowProducts(Product<bf16, bf16, Way>{args}).run(); });
  dispatch<float, f16, bf16>(args.a_dtype, [&]<class A>() {
    if (args.b_dtype != args.a_dtype) return RowProducts(Product<A, float, FloatWay>{args}).run();
    if constexpr (!__is_same(A, bf16)) RowProducts(Product<A, A, FloatWay>{args}).run();
  });
}

}  // namespace pykv::PYKV_ISA
