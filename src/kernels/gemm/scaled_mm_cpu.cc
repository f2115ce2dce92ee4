// Twin of scaled_mm.cu.
#include "gemm/scaled_mm.h"
#include "gemm/scaled_mm_codes_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

static_assert(kBlock == ScaledMmArgs::kBlock &&
              kBlock % kColumns == 0);  // kColumns columns have the same scales of blocks

float scale_at(const MmScales& s, int64_t along, int64_t block) {
  const int64_t at = s.place(along, block);
  if (!s.is_e8m0) return static_cast<const float*>(s.data)[at];
  const uint32_t byte = static_cast<const uint8_t*>(s.data)[at];
  return __builtin_bit_cast(float, byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
}

// kScaled_: by scales of blocks
template <class Codes, bool kScaled_>
struct Product {
  using Way = typename Codes::Way;
  using Element = typename Way::Element;
  static constexpr bool kScaled = kScaled_;

  const ScaledMmArgs& args;
  const int64_t m = args.m, n = args.n, k = args.k;
  const Codes codes = {};

  void unpack_a(int64_t row, int64_t block, Element* to, int64_t stride) const {
    uint8_t own[kBlock];
    codes.unpack_a(some(args.a + row * args.a_stride, args.a_along_k, block, own), to, stride);
  }
  typename Way::Sum unpack_b(int64_t column, int64_t block, Element* to, int64_t stride) const {
    uint8_t own[kBlock];
    return codes.unpack_b(some(args.b + column * args.b_along_n, args.b_along_k, block, own), to, stride);
  }
  float a_scale(int64_t row, int64_t block) const { return scale_at(args.a_scales, row, block); }
  float b_scale(int64_t column, int64_t block) const { return scale_at(args.b_scales, column / kBlock, block); }

  void ask_b(int64_t column, int64_t block) const {
    const uint8_t* const codes_of = args.b + column * args.b_along_n + block * kBlock * args.b_along_k;
    for (int i = 0; i < kBlock; i += 64) __builtin_prefetch(codes_of + i, 0, 2);
  }

  struct OfColumns {
    Floats scales, biases;
  };
  OfColumns of_columns(int64_t column, int count) const {
    float scales[kWidth] = {}, biases[kWidth] = {};
    for (int c = 0; c < count; ++c) {
      if (!kScaled) scales[c] = scale_at(args.b_scales, column + c, 0);
      if (args.bias)
        dispatch<float, f16, bf16>(
            args.out_dtype, [&]<class T>() { biases[c] = to_float(static_cast<const T*>(args.bias)[column + c]); });
    }
    return {load(scales), load(biases)};
  }

  void store(int64_t row, int64_t column, int count, auto sums, const OfColumns& of) const {
    Floats v = __builtin_convertvector(sums, Floats);
    if (Codes::kIsInt8 && args.azp_adj) {
      const int64_t azp = args.azp ? args.azp[row * args.azp_stride] : 1;
      for (int c = 0; c < count; ++c)  // may pass 32 bits
        v[c] =
            static_cast<float>(static_cast<int64_t>(sums[c]) - azp * args.azp_adj[(column + c) * args.azp_adj_stride]);
    }
    if (!kScaled) v = scale_at(args.a_scales, row, 0) * (of.scales * v);
    if (args.bias) v += of.biases;
    dispatch<float, f16, bf16>(args.out_dtype, [&]<class T>() {
      store_columns(static_cast<T*>(args.out) + row * args.out_stride + column, v, count);
    });
  }

 private:
  // 128 codes, which lie `stride` bytes apart: in `own` if not as they are wanted.
  const uint8_t* some(const uint8_t* codes_of_row, int64_t stride, int64_t block, uint8_t (&own)[kBlock]) const {
    const uint8_t* const from = codes_of_row + block * kBlock * stride;
    const int64_t count = std::min<int64_t>(kBlock, k - block * kBlock);
    if (stride == 1 && count == kBlock) return from;
    for (int64_t i = 0; i < kBlock; ++i) own[i] = i < count ? from[i * stride] : uint8_t{0};
    return own;
  }
};

template <class Codes>
void multiply_codes(const ScaledMmArgs& args) {
  if (args.in_blocks) return RowProducts(Product<Codes, true>{args}).run();
  RowProducts(Product<Codes, false>{args}).run();
}

void multiply(const ScaledMmArgs& args) {
  if (args.is_int8) return multiply_codes<Int8Codes>(args);
  in_quickest_way([&]<class Way>() { multiply_codes<E4M3Codes<Way>>(args); });
}

// Rows of one group, as a product of its own.
void multiply_rows(const ScaledMmArgs& args, int64_t group, int64_t begin, int64_t end) {
  ScaledMmArgs part = args;
  part.groups.count = 0;
  part.m = end - begin;
  part.a += group * args.a_group + begin * args.a_stride;
  part.b += group * args.b_group;
  part.out = static_cast<char*>(args.out) +
             (group * args.out_group + begin * args.out_stride) * static_cast<int64_t>(size_of(args.out_dtype));
  part.a_scales = args.a_scales.from(group * args.a_scales.group + begin * args.a_scales.along);
  part.b_scales = args.b_scales.from(group * args.b_scales.group);
  if (args.bias)
    part.bias =
        static_cast<const char*>(args.bias) + group * args.bias_group * static_cast<int64_t>(size_of(args.out_dtype));
  multiply(part);
}

}  // namespace

void scaled_mm_cpu(const ScaledMmArgs& args, const Launch& launch) {
  const RowGroups& groups = args.groups;
  if (groups.count == 0) return multiply(args);
  if (groups.of_rows.data) {
    const auto group_of = [&](int64_t row) {
      return row < args.m ? groups.group_of(row, launch.reporter(groups.report_rows)) : -1;
    };
    for (int64_t begin = 0, end; begin < args.m; begin = end) {
      const int64_t group = group_of(begin);
      for (end = begin + 1; end < args.m && group_of(end) == group;) ++end;
      if (group >= 0) multiply_rows(args, group, begin, end);
    }
    return;
  }
  for (int64_t group = 0; group < groups.count; ++group) {
    int64_t begin, end;
    groups.rows_of(group, args.m, begin, end, launch.reporter(groups.report_begins));
    if (begin < end) multiply_rows(args, group, begin, end);
  }
}

}  // namespace pykv::PYKV_ISA
