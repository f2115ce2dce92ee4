// Twin of scaled_mm.cu.
//
// Rows of a, and some columns of b at a time, are unpacked to what the instruction set multiplies best, with zeros up to a
// multiple of 128.  Lanes keep partial sums, of a block of 128 and, scaled, of all blocks.
#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "gemm/scaled_mm.h"
#include "gemm/scaled_mm_codes_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kBlock = ScaledMmArgs::kBlock;
constexpr int kColumns = 4, kTokens = kWidth == 16 ? 4 : 2;  // of a tile
constexpr int64_t kChunk = 64;                               // rows of a that are kept unpacked

float scale_at(const MmScales& s, int64_t along, int64_t block) {
  const int64_t at = s.place(along, block);
  if (!s.is_e8m0) return static_cast<const float*>(s.data)[at];
  const uint32_t byte = static_cast<const uint8_t*>(s.data)[at];
  return __builtin_bit_cast(float, byte == 0 ? 0x00400000u : byte == 255 ? 0x7fc00000u : byte << 23);
}

// Calls unpack(128 codes, element) for all blocks of a row of k codes, which are `stride` bytes apart.
template <class Unpack>
void for_blocks(const uint8_t* codes, int64_t stride, int64_t k, Unpack unpack) {
  for (int64_t at = 0; at < k; at += kBlock) {
    const int64_t count = std::min<int64_t>(kBlock, k - at);
    const uint8_t* from = codes + at * stride;
    alignas(64) uint8_t block[kBlock];
    if (stride != 1 || count < kBlock) {
      for (int64_t i = 0; i < kBlock; ++i) block[i] = i < count ? from[i * stride] : uint8_t{0};
      from = block;
    }
    unpack(from, at);
  }
}

void store_result(const ScaledMmArgs& args, int64_t row, int64_t column, float result) {
  dispatch<float, f16, bf16>(args.out_dtype, [&]<class T>() {
    if (args.bias) result += to_float(static_cast<const T*>(args.bias)[column]);
    static_cast<T*>(args.out)[row * args.out_stride + column] = from_float<T>(result);
  });
}

template <class Codes>
class Columns {
  using Element = typename Codes::Element;
  using Sum = typename Codes::Sum;

 public:
  explicit Columns(const ScaledMmArgs& args)
      : args_(args), padded_(args.blocks() * kBlock), b_(kColumns * padded_), excess_(kColumns * args.blocks()) {}

  void unpack(int64_t first, int count) {
    first_ = first;
    count_ = count;
    for (int c = 0; c < kColumns; ++c) {
      int32_t* const excess = excess_.data() + c * args_.blocks();
      whole_excess_[c] = 0;
      const uint8_t* const column = args_.b + (first + std::min(c, count - 1)) * args_.b_along_n;
      for_blocks(column, args_.b_along_k, args_.k, [&](const uint8_t* codes, int64_t at) {
        excess[at / kBlock] = Codes::unpack_b(codes, b_.data() + c * padded_ + at);
        whole_excess_[c] += static_cast<uint32_t>(excess[at / kBlock]);
      });
    }
  }

  // Rows of out from `row` on, with a unpacked.  kExact: sums stay integers.
  template <bool kExact, int kRows>
  void multiply(const Element* a, int64_t row) const {
    Sum sums[kRows][kColumns] = {};
    Floats totals[kExact ? 1 : kRows][kColumns] = {};
    for (int64_t block = 0; block < args_.blocks(); ++block, a += kBlock) {
      if constexpr (!kExact)
        for (int r = 0; r < kRows; ++r)
          for (int c = 0; c < kColumns; ++c) sums[r][c] = Codes::less(excess_[c * args_.blocks() + block]);
      const Element* const b = b_.data() + block * kBlock;
      for (int i = 0; i < kBlock; i += Codes::kStep)
        for (int r = 0; r < kRows; ++r)
          for (int c = 0; c < kColumns; ++c)
            sums[r][c] = Codes::add(sums[r][c], a + r * padded_ + i, b + c * padded_ + i);
      if constexpr (!kExact) add_scaled<kRows>(row, block, sums, totals);
    }
    for (int r = 0; r < kRows; ++r)
      for (int c = 0; c < count_; ++c) {
        if constexpr (kExact) {
          finish(row + r, first_ + c, whole(row + r, c, sums[r][c]));
        } else {
          finish(row + r, first_ + c, sum_of(totals[r][c]));
        }
      }
  }

 private:
  template <int kRows>
  [[gnu::always_inline]] void add_scaled(int64_t row, int64_t block, const Sum (&sums)[kRows][kColumns],
                                         Floats (&totals)[kRows][kColumns]) const {
    for (int c = 0; c < kColumns; ++c) {
      const int64_t column = first_ + std::min(c, count_ - 1);
      const float b = args_.in_blocks ? scale_at(args_.b_scales, column / kBlock, block) : 1.0f;
      for (int r = 0; r < kRows; ++r) {
        const float scale = args_.in_blocks ? scale_at(args_.a_scales, row + r, block) * b : 1.0f;
        totals[r][c] = splat(scale) * Codes::floats(sums[r][c]) + totals[r][c];
      }
    }
  }

  static float sum_of(Floats v) {
    for (int half = kWidth / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) v[i] += v[i + half];
    return v[0];
  }

  float whole(int64_t row, int c, Sum lanes) const {
    uint32_t sum = -whole_excess_[c];
    for (int i = 0; i < kWidth; ++i) sum += static_cast<uint32_t>(static_cast<int32_t>(lanes[i]));
    int64_t result = static_cast<int32_t>(sum);
    if (args_.azp_adj) {
      const int64_t azp = args_.azp ? args_.azp[row * args_.azp_stride] : 1;
      result -= azp * args_.azp_adj[(first_ + c) * args_.azp_adj_stride];
    }
    return static_cast<float>(result);
  }

  void finish(int64_t row, int64_t column, float sum) const {
    if (!args_.in_blocks) sum = scale_at(args_.a_scales, row, 0) * (scale_at(args_.b_scales, column, 0) * sum);
    store_result(args_, row, column, sum);
  }

  const ScaledMmArgs& args_;
  const int64_t padded_;
  int64_t first_ = 0;
  int count_ = 0;
  std::vector<Element> b_;
  std::vector<int32_t> excess_;  // of blocks
  uint32_t whole_excess_[kColumns] = {};
};

template <class Codes, bool kExact>
void multiply(const ScaledMmArgs& args) {
  const int64_t padded = args.blocks() * kBlock, column_groups = (args.n + kColumns - 1) / kColumns;
  std::vector<typename Codes::Element> a(static_cast<size_t>(std::min(kChunk, args.m) * padded));
  for (int64_t first = 0; first < args.m; first += kChunk) {
    const int64_t rows = std::min(kChunk, args.m - first);
    parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        for_blocks(args.a + (first + r) * args.a_stride, args.a_along_k, args.k,
                   [&](const uint8_t* codes, int64_t at) { Codes::unpack_a(codes, a.data() + r * padded + at); });
    });
    parallel_for(column_groups, 4, [&](int64_t begin, int64_t end) {
      Columns<Codes> columns(args);
      for (int64_t i = begin; i < end; ++i) {
        columns.unpack(i * kColumns, static_cast<int>(std::min<int64_t>(kColumns, args.n - i * kColumns)));
        int64_t r = 0;
        for (; r + kTokens <= rows; r += kTokens)
          columns.template multiply<kExact, kTokens>(a.data() + r * padded, first + r);
        for (; r < rows; ++r) columns.template multiply<kExact, 1>(a.data() + r * padded, first + r);
      }
    });
  }
}

void multiply(const ScaledMmArgs& args) {
  if (!args.is_int8) return multiply<PairCodes, false>(args);
  if (args.in_blocks) return multiply<Int8Codes, false>(args);
  multiply<Int8Codes, true>(args);
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
