// Twin of packed_gemm.cu.
//
// A vector of words holds kWidth / 4 rows times four steps of 16 columns: each lane keeps a sum of its own step, and the four
// are added at the end.  A tile is decoded once for several tokens.
#include <algorithm>
#include <utility>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/silu.h"
#include "gemm/packed_codes_cpu.h"
#include "gemm/packed_gemm.h"
#include "gemm/tile_map_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kUnit = PackedWeight::kUnit, kParts = 32 / kWidth;  // vectors of words of a tile for each c
constexpr int kAhead = 16;      // units from where the codes of one token are read to where they are asked for
constexpr int64_t kChunk = 64;  // tokens whose x is kept in the order of tiles

// The lanes of each step and of those after it.
struct StepMasks {
  uint32_t from[4][kWidth] = {};
  constexpr StepMasks() {
    for (int step = 0; step < 4; ++step)
      for (int lane = 0; lane < kWidth; ++lane) from[step][lane] = lane % 4 >= step ? ~0u : 0u;
  }
};
constexpr StepMasks kStepMasks;

// The groups of the steps of a unit.
struct StepGroups {
  int64_t of[4], group = -1, left = 0, size;

  explicit StepGroups(int64_t group_size) : size(group_size) {}
  void next() {
    for (int64_t& g : of) {
      if (left == 0) {
        ++group;
        left = size;
      }
      left -= 16;
      g = group;
    }
  }
};

// x of some tokens, [token][unit] as a way of multiplying wants it, and sums of 16 columns, [token][unit][j].
template <class Element>
struct Reordered {
  std::vector<Element> x;
  std::vector<float> sums;
};

// Of a function or a lambda: where GCC calls it, sums go through memory.
#define PYKV_ALWAYS_INLINE __attribute__((always_inline))

// with(0), with(1), ..., of which each is compiled by itself: what they index stays in registers.
template <int kCount, class With>
[[gnu::always_inline]] inline void unrolled(With with) {
  [&]<int... kAt>(std::integer_sequence<int, kAt...>) __attribute__((always_inline)) {
    (with(std::integral_constant<int, kAt>{}), ...);
  }(std::make_integer_sequence<int, kCount>{});
}

// Sums are worked out here: GCC would move the work behind the branches of factors, and what it is done with into memory.
[[gnu::always_inline]] inline void have_ready([[maybe_unused]] Floats& v) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(v));
#endif
}

template <class Codes>
inline constexpr int64_t kUnitWords = Codes::kPlanes * 128;

// Sums of the four steps, of each row of a vector.
inline void of_steps(Floats v, float* to) {
  for (int g = 0; g < kWidth / 4; ++g) to[g] = (v[4 * g] + v[4 * g + 1]) + (v[4 * g + 2] + v[4 * g + 3]);
}

// Ways to multiply.  kSteps: how many times the words of one c are decoded, for rows of one half, until all their codes were; Sum: of
// a unit, in lanes as those of the words.

template <class Codes>
struct InFloats {
  using Element = float;  // [c][h][e][j]
  static constexpr int kOfUnit = 64, kSteps = 2, kMostTokens = kWidth == 16 ? 8 : 4;
  static void put(Element* x, const float (&v)[kUnit]) {
    for (int i = 0; i < kUnit; ++i) x[i % 16 / 2 * 8 + i % 2 * 4 + i / 16] = v[i];
  }
  struct Pair {
    Floats first, second;
  };
  using Weights = Pair;
  static Weights decode(const Codes& codes, const uint32_t* words, int half, int h) {
    const auto tile = load_raw<Words>(words + h * (Codes::kPlanes - 1) * 128);
    const int shift = Codes::shift(half, h);
    return {codes.element(tile, shift), codes.element(tile, shift + 16)};
  }
  using Sum = Floats;
  static void begin(Sum& sum, const Element*) { sum = Sum{}; }
  static void add(Sum& sum, const Pair& w, const Element* x, int c, int h) {
    x += (c * 2 + h) * 8;
    sum = w.first * repeat4(x) + sum;
#if defined(__AVX512F__)
    asm("" : "+v"(sum));  // GCC would choose which of two products is rounded where one sum has nothing before them
#endif
    sum = w.second * repeat4(x + 4) + sum;
  }
  static void settle(Sum& sum) { have_ready(sum); }
  static Floats end(const Sum& sum, const Element*) { return sum; }
};

#if defined(__AVX512BF16__)
template <class Codes>
struct InPairs {
  using Element = bf16;  // [c][h][j][e]
  static constexpr int kOfUnit = 64, kSteps = 2, kMostTokens = 8;
  static void put(Element* x, const float (&v)[kUnit]) {
    for (int i = 0; i < kUnit; ++i) x[i % 16 / 2 * 8 + i / 16 * 2 + i % 2] = from_float<bf16>(v[i]);
  }
  using Weights = __m512bh;
  static Weights decode(const Codes& codes, const uint32_t* words, int half, int h) {
    return codes.pair(load_raw<Words>(words + h * (Codes::kPlanes - 1) * 128), Codes::shift(half, h));
  }
  using Sum = Floats;
  static void begin(Sum& sum, const Element*) { sum = Sum{}; }
  static void add(Sum& sum, __m512bh w, const Element* x, int c, int h) {
    const __m512i pairs = _mm512_maskz_broadcast_i32x4(0xffff, load_raw<__m128i>(x + (c * 2 + h) * 8));
    sum = _mm512_dpbf16_ps(sum, w, __builtin_bit_cast(__m512bh, pairs));
  }
  static void settle(Sum& sum) { have_ready(sum); }
  static Floats end(const Sum& sum, const Element*) { return sum; }
};

// x as integers of three bytes, in units of a power of two for each 16 columns: of halves, which have 11 bits, what is not below 2^-11
// of the largest of them is exact, and the rest to 2^-23 of that.  Products of bytes and their sums are exact.
template <class Codes>
struct InBytes {
  // [c][byte][j] of four bytes, [byte][j] what a sum begins with, [j] what an integer is multiplied by
  using Element = int32_t;
  static constexpr int kBytes = 3, kBeginAt = 16 * kBytes, kUnitsAt = 20 * kBytes, kOfUnit = kUnitsAt + 4;
  static constexpr int kSteps = 1, kMostTokens = 4;

  static void put(Element* x, const float (&v)[kUnit]) {
    for (int j = 0; j < 4; ++j) {
      const Floats step = load(v + 16 * j);
      const Words magnitudes = __builtin_bit_cast(Words, step) & 0x7fffffffu;
      uint32_t largest = 0;  // GCC 12 warns of its own _mm512_reduce_max_epu32
      for (int i = 0; i < 16; ++i) largest = std::max<uint32_t>(largest, magnitudes[i]);
      float unit;
      if (largest >= 0x7f800000u) {
        unit = infinity_of(v + 16 * j);
        put_step(x, j, signs_of_infinity(step));
      } else {
        // so that the largest is less than 2^kBits of them
        const int wanted = static_cast<int>(largest >> 23) - kBits + 1;
        const uint32_t exponent = wanted < 1 ? 1 : static_cast<uint32_t>(wanted);
        unit = __builtin_bit_cast(float, exponent << 23);
        const float units_of_1 = __builtin_bit_cast(float, (254 - exponent) << 23);
        put_step(x, j, _mm512_maskz_cvtps_epi32(0xffff, step * units_of_1));
      }
      __builtin_memcpy(x + kUnitsAt + j, &unit, sizeof(unit));
    }
  }

  struct Sum {
    __m512i of[kBytes];
  };
  using Weights = __m512i;
  PYKV_ALWAYS_INLINE static Weights decode(const Codes& codes, const uint32_t* words, int half, int) {
    return codes.octets(words, half);
  }
  PYKV_ALWAYS_INLINE static void begin(Sum& sum, const Element* x) {
    unrolled<kBytes>([&](auto byte) PYKV_ALWAYS_INLINE { sum.of[byte] = repeat(x + kBeginAt + 4 * byte); });
  }
  PYKV_ALWAYS_INLINE static void add(Sum& sum, __m512i w, const Element* x, int c, int) {
    unrolled<kBytes>([&](auto byte) PYKV_ALWAYS_INLINE {
      sum.of[byte] = _mm512_dpbusd_epi32(sum.of[byte], w, repeat(x + (c * kBytes + byte) * 4));
    });
  }
  PYKV_ALWAYS_INLINE static void settle(Sum& sum) {
    unrolled<kBytes>([&](auto byte) PYKV_ALWAYS_INLINE { asm volatile("" : "+v"(sum.of[byte])); });
  }
  PYKV_ALWAYS_INLINE static Floats end(const Sum& sum, const Element* x) {
    const __m512i upper = _mm512_add_epi32(_mm512_maskz_slli_epi32(0xffff, sum.of[2], 8), sum.of[1]);
    const Floats whole =
        converted(__builtin_bit_cast(Integers, upper)) * 256.0f + converted(__builtin_bit_cast(Integers, sum.of[0]));
    return whole * repeat4(reinterpret_cast<const float*>(x + kUnitsAt));
  }

 private:
  static constexpr int kBits = 8 * kBytes - 2;

  PYKV_ALWAYS_INLINE static __m512i repeat(const Element* x) {
    return _mm512_maskz_broadcast_i32x4(0xffff, load_raw<__m128i>(x));
  }

  // The 16 columns of a step.
  static void put_step(Element* x, int j, __m512i whole) {
    for (int byte = 0; byte < kBytes; ++byte) {
      alignas(64) int32_t of[16];
      const __m512i digits = _mm512_maskz_srai_epi32(0xffff, _mm512_maskz_slli_epi32(0xffff, whole, 24), 24);
      whole = _mm512_maskz_srai_epi32(0xffff, _mm512_sub_epi32(whole, digits), 8);
      __builtin_memcpy(of, &digits, sizeof(of));
      int32_t all = 0;
      for (int c = 0; c < 4; ++c) {
        // as the codes of a word: columns 0, 2, 1, 3
        const int32_t* const four = of + 4 * c;
        const uint32_t bytes =
            (four[0] & 0xffu) | (four[2] & 0xffu) << 8 | (four[1] & 0xffu) << 16 | static_cast<uint32_t>(four[3]) << 24;
        x[(c * kBytes + byte) * 4 + j] = static_cast<int32_t>(bytes);
        all += four[0] + four[1] + four[2] + four[3];
      }
      x[kBeginAt + byte * 4 + j] = -Codes::kOffset * all;
    }
  }

  // What is infinite counts as its sign, and all else not at all: infinity times such a sum, NaN if there are both or there is one.
  static float infinity_of(const float* v) {
    constexpr float kInfinity = __builtin_inff();
    bool has_plus = false, has_minus = false;
    for (int i = 0; i < 16; ++i) {
      has_plus = has_plus || !(v[i] < kInfinity);
      has_minus = has_minus || !(v[i] > -kInfinity);
    }
    return has_plus && has_minus ? __builtin_nanf("") : kInfinity;
  }
  static __m512i signs_of_infinity(Floats v) {
    const Integers minus = v == splat(-__builtin_inff()), plus = v == splat(__builtin_inff());
    return __builtin_bit_cast(__m512i, minus - plus);  // a comparison gives -1
  }
};

// Halves: the upper eight of their bits, and the rest, are numbers of bf16.
template <class Codes>
struct InSplitPairs : InPairs<Codes> {
  using Whole = InPairs<Codes>;
  using Element = bf16;  // [upper, rest] of a unit
  static constexpr int kOfUnit = 2 * Whole::kOfUnit;
  static void put(Element* x, const float (&v)[kUnit]) {
    float upper[kUnit], rest[kUnit];
    for (int i = 0; i < kUnit; ++i) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, v[i]) & 0xffff0000u;
      upper[i] = __builtin_bit_cast(float, bits);
      rest[i] = (bits & 0x7f800000u) != 0x7f800000u ? v[i] - upper[i] : 0.0f;
    }
    Whole::put(x, upper);
    Whole::put(x + Whole::kOfUnit, rest);
  }
  static void add(Floats& sum, __m512bh w, const Element* x, int c, int h) {
    Whole::add(sum, w, x, c, h);
    Whole::add(sum, w, x + Whole::kOfUnit, c, h);
  }
};
#endif

// Rows of out with one weight.
struct RowList {
  const int32_t* rows;  // null: 0, 1, ...
  int64_t count;

  int64_t operator[](int64_t i) const { return rows ? rows[i] : i; }
};

template <class T, class Way>
void reorder(const PackedGemmArgs& args, const RowList& rows, int64_t first, int64_t count,
             Reordered<typename Way::Element>& into) {
  const PackedWeight& w = args.weight;
  const int64_t top_k = rows.rows ? args.map.top_k : 1;
  parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* const row = static_cast<const T*>(args.x) + rows[first + t] / top_k * args.x_stride;
      auto* x = into.x.data() + t * (w.padded_k / kUnit) * Way::kOfUnit;
      float* sums = into.sums.data() + t * (w.padded_k / 16);
      for (int64_t unit = 0; unit < w.padded_k; unit += kUnit, x += Way::kOfUnit) {
        float v[kUnit];
        for (int64_t column = unit; column < unit + kUnit; ++column) {
          const int64_t from = w.columns ? w.columns[column] : column;
          v[column - unit] = from >= 0 && from < w.k ? to_float(row[from * args.x_step]) : 0.0f;
        }
        Way::put(x, v);
        for (int j = 0; j < 4; ++j) {
          float sum = 0.0f;
          for (int i = 0; i < 16; ++i) sum += v[16 * j + i];
          *sums++ = sum;
        }
      }
    }
  });
}

// Factors of kBlocks blocks of 16 rows, from `block` on, two of which have them side by side: [block][half].
template <int kBlocks>
class RowFactors {
 public:
  using OfRows = Floats[kBlocks][2];

  RowFactors(const PackedWeight& w, const Factors& factors, int64_t block) : w_(w), factors_(factors), block_(block) {}

  // part: of a vector of rows
  void of_unit(int64_t column, const StepGroups& groups, int part, OfRows& s, OfRows& m) const {
    one(column, groups.of[0], part, s, m);
    for (int j = 1; j < 4; ++j) {
      if (groups.of[j] == groups.of[j - 1]) continue;
      OfRows step_s = {}, step_m = {};
      one(column, groups.of[j], part, step_s, step_m);
      const Words own = load_raw<Words>(kStepMasks.from[j]);
      for (int r = 0; r < kBlocks; ++r)
        for (int half = 0; half < 2; ++half) {
          s[r][half] = select(own, step_s[r][half], s[r][half]);
          m[r][half] = select(own, step_m[r][half], m[r][half]);
        }
    }
  }

 private:
  // Those of one group.
  void one(int64_t column, int64_t group, int part, OfRows& s, OfRows& m) const {
    const Floats scale = factors_.scale(block_ >> 1, group, column, part);
    spread(scale, s);
    if (w_.minima) spread(factors_.minimum(block_ >> 1, group, column, part, scale), m);
  }

  // Of [g][r][half], for four steps.
  void spread(Floats v, OfRows& to) const {
    if constexpr (kBlocks == 2) {
      to[0][0] = spread4<0>(v);
      to[0][1] = spread4<1>(v);
      to[1][0] = spread4<2>(v);
      to[1][1] = spread4<3>(v);
    } else {
      const bool second = block_ & 1;
      to[0][0] = second ? spread4<2>(v) : spread4<0>(v);
      to[0][1] = second ? spread4<3>(v) : spread4<1>(v);
    }
  }

  const PackedWeight& w_;
  const Factors& factors_;
  const int64_t block_;
};

// Sums of the 16 rows of a block.
using BlockSums = float[16];

// One row of out times two blocks of 16 rows of the weight.  Of rows with the same half, kVectors vectors at once, and all of these one
// after another.
template <class Codes, class Way, int kVectors>
class Alone {
  static constexpr int kBlocks = 2, kPasses = kParts / kVectors;

 public:
  Alone(const PackedWeight& w, const Codes& codes, const Factors& factors, int64_t block)
      : w_(w), codes_(codes), factors_(w, factors, block), block_(block) {}

  void run(const typename Way::Element* x, const float* sums, BlockSums (&to)[kBlocks]) {
    const int64_t units = w_.padded_k / kUnit, stride = units * kUnitWords<Codes>;
    const auto* words = reinterpret_cast<const uint32_t*>(w_.codes) + block_ * stride;
    const auto each = [&](auto&& with) PYKV_ALWAYS_INLINE {
      unrolled<kBlocks>([&](auto r) PYKV_ALWAYS_INLINE {
        unrolled<kVectors>(
            [&](auto v) PYKV_ALWAYS_INLINE { unrolled<2>([&](auto half) PYKV_ALWAYS_INLINE { with(r, v, half); }); });
      });
    };
    Floats total[kPasses][kBlocks][kVectors][2] = {};
    StepGroups groups(w_.group_size);
    for (int64_t column = 0; column < w_.padded_k;
         column += kUnit, words += kUnitWords<Codes>, x += Way::kOfUnit, sums += 4) {
      ask_for(words, column, stride, w_.padded_k);
      groups.next();
#pragma GCC unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const auto* const from = words + pass * kVectors * kWidth;
        typename Way::Sum sum[kBlocks][kVectors][2];
        each([&](auto r, auto v, auto half) PYKV_ALWAYS_INLINE { Way::begin(sum[r][v][half], x); });
#pragma GCC unroll 4
        for (int c = 0; c < 4; ++c)
#pragma GCC unroll 2
          for (int step = 0; step < Way::kSteps; ++step)
            each([&](auto r, auto v, auto half) PYKV_ALWAYS_INLINE {
              const auto w = Way::decode(codes_, from + r * stride + c * 32 + v * kWidth, half, step);
              Way::add(sum[r][v][half], w, x, c, step);
            });
        each([&](auto r, auto v, auto half) PYKV_ALWAYS_INLINE { Way::settle(sum[r][v][half]); });
        unrolled<kVectors>([&](auto v) PYKV_ALWAYS_INLINE {
          Floats s[kBlocks][2] = {}, m[kBlocks][2] = {};
          factors_.of_unit(column, groups, pass * kVectors + v, s, m);
          unrolled<kBlocks>([&](auto r) PYKV_ALWAYS_INLINE {
            unrolled<2>([&](auto half) PYKV_ALWAYS_INLINE {
              Floats& of_rows = total[pass][r][v][half];
              of_rows += s[r][half] * Way::end(sum[r][v][half], x);
              if (w_.minima) of_rows += m[r][half] * repeat4(sums);
            });
          });
        });
      }
    }
    for (int part = 0; part < kParts; ++part)
      for (int r = 0; r < kBlocks; ++r)
        for (int half = 0; half < 2; ++half)
          of_steps(total[part / kVectors][r][part % kVectors][half], to[r] + half * 8 + part * (kWidth / 4));
  }

 private:
  // For codes that are read some units later: of these blocks, or of those behind them.
  static void ask_for(const uint32_t* words, int64_t column, int64_t stride, int64_t columns) {
    const auto* const next =
        words + kAhead * kUnitWords<Codes> + (column + kAhead * kUnit < columns ? 0 : (kBlocks - 1) * stride);
    for (int r = 0; r < kBlocks; ++r)
      for (int line = 0; line < kUnitWords<Codes> / 16; ++line) __builtin_prefetch(next + r * stride + line * 16, 0, 2);
  }

  const PackedWeight& w_;
  const Codes& codes_;
  const RowFactors<kBlocks> factors_;
  const int64_t block_;
};

// All columns of a vector of rows of each half, decoded once for all rows of out.
template <class Codes, class Way>
class Panel {
 public:
  explicit Panel(const PackedWeight& w) : w_(w), units_(static_cast<size_t>(w.padded_k / kUnit)) {}

  // part: which vector of the block
  void decode(const Codes& codes, const Factors& factors, int64_t block, int part) {
    const auto* words =
        reinterpret_cast<const uint32_t*>(w_.codes) + block * (w_.padded_k / kUnit) * kUnitWords<Codes> + part * kWidth;
    const RowFactors<1> of_rows(w_, factors, block);
    StepGroups groups(w_.group_size);
    int64_t column = 0;
    for (Unit& unit : units_) {
      unrolled<4 * Way::kSteps>([&](auto i) PYKV_ALWAYS_INLINE {
        constexpr int c = i / Way::kSteps, step = i % Way::kSteps;
        unrolled<2>([&](auto half) PYKV_ALWAYS_INLINE {
          unit.of[c][step][half] = Way::decode(codes, words + c * 32, half, step);
        });
      });
      groups.next();
      Floats s[1][2] = {}, m[1][2] = {};
      of_rows.of_unit(column, groups, part, s, m);
      for (int half = 0; half < 2; ++half) {
        unit.scale[half] = s[0][half];
        unit.minimum[half] = m[0][half];
      }
      words += kUnitWords<Codes>;
      column += kUnit;
    }
  }

  // kTokens rows of out; to: sums of the rows of each half, from their first on
  template <int kTokens>
  void multiply(const typename Way::Element* x, const float* sums, BlockSums* to, int part) const {
    const int64_t units = w_.padded_k / kUnit, x_stride = units * Way::kOfUnit;
    const auto each = [&](auto&& with) PYKV_ALWAYS_INLINE {
      unrolled<2>([&](auto half)
                      PYKV_ALWAYS_INLINE { unrolled<kTokens>([&](auto t) PYKV_ALWAYS_INLINE { with(half, t); }); });
    };
    Floats total[2][kTokens] = {};
    const bool adds = w_.minima;
    for (const Unit& unit : units_) {
      typename Way::Sum sum[2][kTokens];
      each([&](auto half, auto t) PYKV_ALWAYS_INLINE { Way::begin(sum[half][t], x + t * x_stride); });
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c)
#pragma GCC unroll 2
        for (int step = 0; step < Way::kSteps; ++step)
          each([&](auto half, auto t)
                   PYKV_ALWAYS_INLINE { Way::add(sum[half][t], unit.of[c][step][half], x + t * x_stride, c, step); });
      each([&](auto half, auto t) PYKV_ALWAYS_INLINE { Way::settle(sum[half][t]); });
      each([&](auto half, auto t) PYKV_ALWAYS_INLINE {
        total[half][t] += unit.scale[half] * Way::end(sum[half][t], x + t * x_stride);
        if (adds) total[half][t] += unit.minimum[half] * repeat4(sums + t * units * 4);
      });
      x += Way::kOfUnit;
      sums += 4;
    }
    for (int t = 0; t < kTokens; ++t)
      for (int half = 0; half < 2; ++half) of_steps(total[half][t], to[t] + half * 8 + part * (kWidth / 4));
  }

 private:
  struct Unit {
    typename Way::Weights of[4][Way::kSteps][2];
    Floats scale[2], minimum[2];
  };

  const PackedWeight& w_;
  std::vector<Unit> units_;
};

inline Floats activated(Gate gate, Floats a) {
  if (gate == Gate::kSilu) return a / (1.0f + exp(-a));
  if (gate == Gate::kGeluTanh) return exact_gelu_tanh(a);
  for (int i = 0; i < kWidth; ++i) a[i] = 0.5f * a[i] * (1.0f + __builtin_erff(0.70710678f * a[i]));
  return a;
}

// Pairs of neighbours become one number each.
inline void gate_pairs(Gate gate, BlockSums& v) {
  float a[kWidth < 8 ? 8 : kWidth] = {};
  for (int i = 0; i < 8; ++i) a[i] = v[2 * i];
  for (int i = 0; i < 8; i += kWidth) store(a + i, activated(gate, load(a + i)));
  for (int i = 0; i < 8; ++i) v[i] = a[i] * v[2 * i + 1];
}

// The epilogue of row `at` of out, for `count` rows of the weight from `row` on.
template <class T>
[[gnu::noinline]] void finish(const PackedGemmArgs& args, int64_t at, int64_t row, int64_t count, BlockSums& v) {
  const Epilogue& e = args.epilogue;
  const float of_token = e.token_scales ? e.token_scales[at * e.token_stride] : 1.0f;
  for (int64_t i = 0; i < count; ++i) {
    if (e.channel_scales) v[i] *= e.channel_scales[(row + i) * e.channel_stride];
    v[i] = v[i] * of_token + (args.bias ? to_float(static_cast<const T*>(args.bias)[row + i]) : 0.0f);
  }
  if (e.gate != Gate::kNone) {
    gate_pairs(e.gate, v);
    row /= 2;
    count /= 2;
  }
  if (e.residual)
    for (int64_t i = 0; i < count; ++i)
      v[i] += to_float(static_cast<const T*>(e.residual)[at * e.residual_stride + row + i]);
  const int64_t to = at * args.out_stride + row;
  if (!e.has_codes) {
    for (int64_t i = 0; i < count; ++i) static_cast<T*>(args.out)[to + i] = from_float<T>(v[i]);
    return;
  }
  const float factor = 1.0f / e.out_scale;
  for (int64_t i = 0; i < count; ++i) {
    const float x = v[i] * factor;
    if (e.codes == QuantCode::kInt8) {
      static_cast<i8*>(args.out)[to + i] = from_float<i8>(x);
    } else {
      static_cast<e4m3*>(args.out)[to + i] = from_float<e4m3>(x < 448.0f ? x : 448.0f);
    }
  }
}

template <class T>
void store(const PackedGemmArgs& args, const RowList& rows, int64_t block, int64_t token, int tokens, BlockSums* sums) {
  const int64_t row = block * 16, left = args.weight.n - row, count = left < 0 ? 0 : left < 16 ? left : 16;
  for (int t = 0; t < tokens; ++t) {
    const int64_t at = rows[token + t];
    if (args.epilogue.any) {
      finish<T>(args, at, row, count, sums[t]);
      continue;
    }
    T* const out = static_cast<T*>(args.out) + at * args.out_stride + row;
    const float last = args.map.factor_of(at);
    for (int64_t i = 0; i < count; ++i) {
      const float bias = args.bias ? to_float(static_cast<const T*>(args.bias)[row + i]) : 0.0f;
      out[i] = from_float<T>((sums[t][i] + bias) * last);
    }
  }
}

template <class T, class Codes, class Way>
void multiply(const PackedGemmArgs& args, const RowList& rows_of, const Codes& codes, const Factors& factors) {
  constexpr int kTokens = Way::kMostTokens;
  const PackedWeight& w = args.weight;
  const int64_t rows = rows_of.count < kChunk ? rows_of.count : kChunk, units = w.padded_k / kUnit;
  Reordered<typename Way::Element> reordered;
  reordered.x.resize(static_cast<size_t>(rows * units * Way::kOfUnit));
  reordered.sums.resize(static_cast<size_t>(rows * units * 4));
  for (int64_t first = 0; first < rows_of.count; first += kChunk) {
    const int64_t count = rows_of.count - first < kChunk ? rows_of.count - first : kChunk;
    reorder<T, Way>(args, rows_of, first, count, reordered);
    const auto x = [&](int64_t t) { return reordered.x.data() + t * units * Way::kOfUnit; };
    const auto sums = [&](int64_t t) { return reordered.sums.data() + t * units * 4; };
    if (count == 1) {
      parallel_for((w.n + 31) / 32, 2, [&](int64_t begin, int64_t end) {
        for (int64_t band = begin; band < end; ++band) {
          BlockSums of_blocks[2];
          Alone<Codes, Way, kWidth == 16 ? 1 : 2>(w, codes, factors, band * 2).run(x(0), sums(0), of_blocks);
          for (int r = 0; r < 2; ++r) store<T>(args, rows_of, band * 2 + r, first, 1, &of_blocks[r]);
        }
      });
      continue;
    }
    parallel_for((w.n + 15) / 16, 4, [&](int64_t begin, int64_t end) {
      Panel<Codes, Way> panel(w);
      for (int64_t block = begin; block < end; ++block) {
        BlockSums of_block[kChunk];
        for (int part = 0; part < kParts; ++part) {
          panel.decode(codes, factors, block, part);
          int64_t t = 0;
          for (; t + kTokens <= count; t += kTokens)
            panel.template multiply<kTokens>(x(t), sums(t), of_block + t, part);
          for (; t < count; ++t) panel.template multiply<1>(x(t), sums(t), of_block + t, part);
        }
        store<T>(args, rows_of, block, first, static_cast<int>(count), of_block);
      }
    });
  }
}

template <class T, class Codes>
void multiply(const PackedGemmArgs& args, const RowList& rows, const float (&table)[16], const Factors& factors) {
  const Codes codes(table);
#if defined(__AVX512BF16__)
  if constexpr (__is_same(T, bf16)) {
    return multiply<T, Codes, InPairs<Codes>>(args, rows, codes, factors);
  } else {
    if constexpr (Codes::kHasOctets)
      if (codes.has_octets()) return multiply<T, Codes, InBytes<Codes>>(args, rows, codes, factors);
    if constexpr (Codes::kQuickPairs) {
      bool is_exact = true;  // in bf16, as all tables are but NF4's
      for (const float entry : table) is_exact = is_exact && to_float(from_float<bf16>(entry)) == entry;
      if (is_exact) return multiply<T, Codes, InSplitPairs<Codes>>(args, rows, codes, factors);
    }
  }
#endif
  multiply<T, Codes, InFloats<Codes>>(args, rows, codes, factors);
}

void multiply_rows(const PackedGemmArgs& args, const RowList& rows) {
  const PackedWeight& w = args.weight;
  float table[16], global;
  __builtin_memcpy(table, w.data + PackedWeight::kTableAt, sizeof(table));
  __builtin_memcpy(&global, w.data + PackedWeight::kGlobalScaleAt, sizeof(global));
  if (w.codes_kind == CodeKind::kUint4)
    for (int i = 0; i < 16; ++i) table[i] = static_cast<float>(i - 8);
  const Factors factors(w, global);
  dispatch<f16, bf16>(args.dtype, [&]<class T>() {
    switch (w.codes_kind) {
      case CodeKind::kUint8:
        return multiply<T, ByteCodes<CodeKind::kUint8>>(args, rows, table, factors);
      case CodeKind::kE4M3:
        return multiply<T, ByteCodes<CodeKind::kE4M3>>(args, rows, table, factors);
      default:
        return multiply<T, TableCodes>(args, rows, table, factors);
    }
  });
}

}  // namespace

void packed_gemm_cpu(const PackedGemmArgs& args, const Launch&) {
  if (!args.map.rows) return multiply_rows(args, {nullptr, args.num_rows});
  PackedGemmArgs of_one = args;
  for_each_weight(args.map, args.num_rows, [&](int32_t weight, const int32_t* rows, int64_t count) {
    place_sections(of_one.weight, args.weight.data + weight * args.map.weight_stride);
    of_one.bias = args.bias ? static_cast<const char*>(args.bias) + 2 * weight * args.map.bias_stride : nullptr;
    multiply_rows(of_one, {rows, count});
  });
}

}  // namespace pykv::PYKV_ISA
