// Twin of packed_gemm.cu.
//
// A vector of words holds kWidth / 4 rows times four steps of 16 columns: each lane keeps a sum of its own step, and the four
// are added at the end.  A tile is decoded once for several tokens.
#include <algorithm>
#include <memory>
#include <utility>

#include "cpu/parallel.h"
#include "cpu/silu.h"
#include "gemm/packed_codes_cpu.h"
#include "gemm/packed_gemm.h"
#include "gemm/quick_pairs_cpu.h"
#include "gemm/tile_map_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kUnit = PackedWeight::kUnit, kParts = 32 / kWidth;  // vectors of words of a tile for each c
constexpr int kAhead = 16;      // units from where the codes of one token are read to where they are asked for
constexpr int64_t kChunk = 64;  // tokens that a block is decoded for
constexpr int64_t kMostAlone = kWidth == 16 ? 4 : 1;  // tokens for which a block is decoded anew each time
constexpr int64_t kMostRows = 256;  // tokens whose x is kept in the order of tiles, a multiple of kChunk

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

// x of some tokens as a way of multiplying wants it, and sums of 16 columns, [token][unit][j].  Tokens that are multiplied together lie
// together, [unit][token]: rows that are a power of two apart would want the same places of the first cache.
template <class Element>
struct Reordered {
  std::unique_ptr<Element[]> x;  // not initialised: the threads that write it touch its pages first
  std::unique_ptr<float[]> sums;
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

// of(0), of(1), ... of all lanes, which must be known where this is compiled.
template <class Of>
[[gnu::always_inline]] inline Words of_lanes(Of of) {
  return [&]<int... kAt>(std::integer_sequence<int, kAt...>) __attribute__((always_inline)) {
    return Words{static_cast<uint32_t>(of(kAt))...};
  }(std::make_integer_sequence<int, kWidth>{});
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
  static constexpr int kOfUnit = 64, kSteps = 2, kMostTokens = kWidth == 16 ? 8 : 4, kVectorsAlone = 2;
  static void put(Element* x, const float (&v)[kUnit]) {
#if defined(__AVX512F__)
    unrolled<4>([&](auto quarter) PYKV_ALWAYS_INLINE {
      constexpr int kFirst = 4 * quarter;
      const Words lanes = of_lanes([](int lane) { return kFirst + lane / 4 + lane % 2 * 16; });
      const Floats first_two = shuffle(load(v), load(v + 16), lanes),
                   others = shuffle(load(v + 32), load(v + 48), lanes);
      store(x + 4 * kFirst, select(of_lanes([](int lane) { return lane % 4 < 2 ? -1 : 0; }), first_two, others));
    });
#else
    for (int i = 0; i < kUnit; ++i) x[i % 16 * 4 + i / 16] = v[i];
#endif
  }
  struct Pair {
    Floats first, second;
  };
  using Weights = Pair;
  static Weights decode(const Codes& codes, const uint32_t* words, int half, int h) {
    const auto tile = load_raw<Words>(words + h * (Codes::kPlanes - 1) * 128);
    const int shift = Codes::shift(half, h);
#if defined(__AVX512BF16__)
    if constexpr (Codes::kQuickFloats) {
      const auto pairs = __builtin_bit_cast(Words, codes.pair(tile, shift));
      return {__builtin_bit_cast(Floats, pairs << 16), __builtin_bit_cast(Floats, pairs & 0xffff0000u)};
    }
#endif
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
  static constexpr int kOfUnit = 64, kSteps = 2, kMostTokens = 8, kVectorsAlone = 2;
  static void put(Element* x, const float (&v)[kUnit]) {
    const auto pairs = [&](int i) {
      return __builtin_bit_cast(Words, _mm512_cvtne2ps_pbh(load(v + i + 16), load(v + i)));
    };
    const Words first_two = pairs(0), second_two = pairs(32);
    unrolled<2>([&](auto part) PYKV_ALWAYS_INLINE {
      constexpr int kFirst = 4 * part;
      const Words some =
          shuffle(first_two, second_two, of_lanes([](int lane) { return lane % 4 * 8 + kFirst + lane / 4; }));
      __builtin_memcpy(x + 8 * kFirst, &some, sizeof(some));
    });
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
  static constexpr int kSteps = 1, kMostTokens = 4, kVectorsAlone = 1;

  static void put(Element* x, const float (&v)[kUnit]) {
    __m512i whole[4];
    for (int j = 0; j < 4; ++j) {
      const Floats step = load(v + 16 * j);
      const Words magnitudes = __builtin_bit_cast(Words, step) & 0x7fffffffu;
      float unit;
      if (_mm512_cmpge_epu32_mask(__builtin_bit_cast(__m512i, magnitudes), _mm512_set1_epi32(0x7f800000)) != 0) {
        unit = infinity_of(v + 16 * j);
        whole[j] = signs_of_infinity(step);
      } else {
        // so that the largest is less than 2^kBits of them
        const auto largest = __builtin_bit_cast(uint32_t, max(__builtin_bit_cast(Floats, magnitudes)));
        const int wanted = static_cast<int>(largest >> 23) - kBits + 1;
        const uint32_t exponent = wanted < 1 ? 1 : static_cast<uint32_t>(wanted);
        unit = __builtin_bit_cast(float, exponent << 23);
        whole[j] = _mm512_maskz_cvtps_epi32(0xffff, step * __builtin_bit_cast(float, (254 - exponent) << 23));
      }
      __builtin_memcpy(x + kUnitsAt + j, &unit, sizeof(unit));
    }
    for (int byte = 0; byte < kBytes; ++byte) {
      Words bytes = {};  // [c][j] of four, in the order of the codes of a word: columns 0, 2, 1, 3
      unrolled<4>([&](auto j) PYKV_ALWAYS_INLINE {
        constexpr int kStep = j;
        const __m512i digits = _mm512_maskz_srai_epi32(0xffff, _mm512_maskz_slli_epi32(0xffff, whole[j], 24), 24);
        whole[j] = _mm512_maskz_srai_epi32(0xffff, _mm512_sub_epi32(whole[j], digits), 8);
        const auto places = of_lanes([](int lane) { return lane % 4 == kStep ? 0x0c040800 : -1; });
        bytes |= __builtin_bit_cast(
            Words, _mm512_maskz_shuffle_epi8(~__mmask64{}, digits, __builtin_bit_cast(__m512i, places)));
      });
      auto all =
          __builtin_bit_cast(Words, _mm512_dpbusd_epi32(__m512i{}, _mm512_set1_epi8(static_cast<char>(Codes::kOffset)),
                                                        __builtin_bit_cast(__m512i, bytes)));
      all += shuffle(all, all, of_lanes([](int lane) { return lane ^ 4; }));
      all += shuffle(all, all, of_lanes([](int lane) { return lane ^ 8; }));
      for (int c = 0; c < 4; ++c)
        for (int j = 0; j < 4; ++j) x[(c * kBytes + byte) * 4 + j] = static_cast<int32_t>(bytes[4 * c + j]);
      for (int j = 0; j < 4; ++j) x[kBeginAt + byte * 4 + j] = -static_cast<int32_t>(all[j]);
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
    Floats whole;
    if constexpr (Codes::kOffset == 8) {  // fits into 32 bits
      whole = converted(
          __builtin_bit_cast(Integers, _mm512_add_epi32(_mm512_maskz_slli_epi32(0xffff, upper, 8), sum.of[0])));
    } else {
      whole =
          converted(__builtin_bit_cast(Integers, upper)) * 256.0f + converted(__builtin_bit_cast(Integers, sum.of[0]));
    }
    return whole * repeat4(reinterpret_cast<const float*>(x + kUnitsAt));
  }

 private:
  static constexpr int kBits = 8 * kBytes - 2;

  PYKV_ALWAYS_INLINE static __m512i repeat(const Element* x) {
    return _mm512_maskz_broadcast_i32x4(0xffff, load_raw<__m128i>(x));
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

// Of `count` rows from `first` on.
template <class T, class Way>
void reorder(const PackedGemmArgs& args, const RowList& rows, int64_t first, int64_t count,
             const Reordered<typename Way::Element>& into) {
  constexpr int64_t kUnits = 8;  // at once: those of a single token are shared out, too
  const PackedWeight& w = args.weight;
  const int64_t top_k = rows.rows ? args.map.top_k : 1, units = w.padded_k / kUnit;
  const int64_t pieces = (units + kUnits - 1) / kUnits;
  parallel_for(count * pieces, 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t t = i / pieces, chunk = t / kChunk * kChunk, of_chunk = std::min(kChunk, count - chunk);
      const int64_t most = count <= kMostAlone ? 1 : Way::kMostTokens;
      const int64_t together = t - chunk < of_chunk - of_chunk % most ? most : 1;
      const int64_t place = (t - chunk) % together;
      const T* const row = static_cast<const T*>(args.x) + rows[first + t] / top_k * args.x_stride;
      for (int64_t unit = i % pieces * kUnits; unit < std::min(units, (i % pieces + 1) * kUnits); ++unit) {
        alignas(64) float v[kUnit];
        if (args.x_step == 1 && !w.columns && (unit + 1) * kUnit <= w.k) {
          for (int at = 0; at < kUnit; at += kWidth) pykv::PYKV_ISA::store(v + at, load(row + unit * kUnit + at));
        } else {
          for (int64_t column = unit * kUnit; column < (unit + 1) * kUnit; ++column) {
            const int64_t from = w.columns ? w.columns[column] : column;
            v[column - unit * kUnit] = from >= 0 && from < w.k ? to_float(row[from * args.x_step]) : 0.0f;
          }
        }
        Way::put(into.x.get() + ((t - place) * units + place + unit * together) * Way::kOfUnit, v);
        for (int j = 0; j < 4; ++j) {
          Floats of_step = load(v + 16 * j);
          for (int at = kWidth; at < 16; at += kWidth) of_step += load(v + 16 * j + at);
          into.sums[static_cast<size_t>((t * units + unit) * 4 + j)] = sum(of_step);
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
  [[gnu::always_inline]] void of_unit(int64_t column, const StepGroups& groups, int part, OfRows& s, OfRows& m) const {
    one(column, groups.of[0], part, s, m);
    for (int j = 1; j < 4; ++j) {
      if (groups.of[j] == groups.of[j - 1]) continue;
      OfRows step_s = {}, step_m = {};
      one(column, groups.of[j], part, step_s, step_m);
      const Words own = load_raw<Words>(kStepMasks.from[j]);
      for (int r = 0; r < kBlocks; ++r)
        for (int half = 0; half < 2; ++half) {
          s[r][half] = select(own, step_s[r][half], s[r][half]);
          if (w_.minima) m[r][half] = select(own, step_m[r][half], m[r][half]);
        }
    }
  }

 private:
  // Those of one group.
  [[gnu::always_inline]] void one(int64_t column, int64_t group, int part, OfRows& s, OfRows& m) const {
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

// A block of 16 rows, of which some columns at a time are decoded once for all rows of out: as many as the first cache has room for, with
// x of those that are multiplied together, which all vectors of rows read one after another.
template <class Codes, class Way>
class Panel {
 public:
  Panel(const PackedWeight& w, const Codes& codes, const Factors& factors, int64_t block)
      : w_(w),
        codes_(codes),
        factors_(w, factors, block),
        words_(reinterpret_cast<const uint32_t*>(w.codes) + block * (w.padded_k / kUnit) * kUnitWords<Codes>),
        groups_(w.group_size) {}

  // Of `count` rows.
  void multiply(const typename Way::Element* x, const float* sums, int64_t count, BlockSums (&to)[kChunk]) {
    constexpr int kTokens = Way::kMostTokens;
    const int64_t units = w_.padded_k / kUnit, whole = count - count % kTokens;
    for (int64_t unit = 0; unit < units; unit += kUnits) {
      const int here = static_cast<int>(units - unit < kUnits ? units - unit : kUnits);
      for (int i = 0; i < here; ++i) decode(i, (unit + i) * kUnit);
      const auto run = [&]<int kCount>(int64_t t) {
        for (int part = 0; part < kParts; ++part)
          multiply<kCount>(part, here, x + (t * units + kCount * unit) * Way::kOfUnit, sums + (t * units + unit) * 4,
                           total_[part] + t);
      };
      for (int64_t t = 0; t < whole; t += kTokens) run.template operator()<kTokens>(t);
      for (int64_t t = whole; t < count; ++t) run.template operator()<1>(t);
    }
    for (int64_t t = 0; t < count; ++t)
      for (int part = 0; part < kParts; ++part)
        for (int half = 0; half < 2; ++half) of_steps(total_[part][t][half], to[t] + half * 8 + part * (kWidth / 4));
  }

 private:
  static constexpr int kUnits = 8;
  struct Unit {
    typename Way::Weights of[4][Way::kSteps][2];
    Floats scale[2], minimum[2];
  };
  using Total = Floats[2];

  void decode(int at, int64_t column) {
    groups_.next();
    for (int part = 0; part < kParts; ++part) {
      Unit& unit = units_[part][at];
      unrolled<4 * Way::kSteps>([&](auto i) PYKV_ALWAYS_INLINE {
        constexpr int c = i / Way::kSteps, step = i % Way::kSteps;
        unrolled<2>([&](auto half) PYKV_ALWAYS_INLINE {
          unit.of[c][step][half] = Way::decode(codes_, words_ + part * kWidth + c * 32, half, step);
        });
      });
      Floats s[1][2] = {}, m[1][2] = {};
      factors_.of_unit(column, groups_, part, s, m);
      for (int half = 0; half < 2; ++half) {
        unit.scale[half] = s[0][half];
        unit.minimum[half] = m[0][half];
      }
    }
    words_ += kUnitWords<Codes>;
  }

  template <int kTokens>
  void multiply(int part, int count, const typename Way::Element* x, const float* sums, Total* to) const {
    const int64_t stride = w_.padded_k / 16;
    // Both halves of rows by a token, then by the next: what is read of x is not wanted any longer.
    const auto each = [&](auto&& with) PYKV_ALWAYS_INLINE {
      unrolled<kTokens>([&](auto t)
                            PYKV_ALWAYS_INLINE { unrolled<2>([&](auto half) PYKV_ALWAYS_INLINE { with(half, t); }); });
    };
    const bool adds = w_.minima;
    for (const Unit* unit = units_[part]; unit < units_[part] + count; ++unit) {
      typename Way::Sum sum[2][kTokens];
      each([&](auto half, auto t) PYKV_ALWAYS_INLINE { Way::begin(sum[half][t], x + t * Way::kOfUnit); });
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c)
#pragma GCC unroll 2
        for (int step = 0; step < Way::kSteps; ++step)
          each([&](auto half, auto t) PYKV_ALWAYS_INLINE {
            Way::add(sum[half][t], unit->of[c][step][half], x + t * Way::kOfUnit, c, step);
          });
      each([&](auto half, auto t) PYKV_ALWAYS_INLINE { Way::settle(sum[half][t]); });
      unrolled<kTokens>([&](auto t) PYKV_ALWAYS_INLINE {
        Floats total[2] = {to[t][0], to[t][1]};
        unrolled<2>([&](auto half) PYKV_ALWAYS_INLINE {
          total[half] += unit->scale[half] * Way::end(sum[half][t], x + t * Way::kOfUnit);
        });
        if (adds) {
          const Floats of_x = repeat4(sums + t * stride);
          unrolled<2>([&](auto half) PYKV_ALWAYS_INLINE { total[half] += unit->minimum[half] * of_x; });
        }
        unrolled<2>([&](auto half) PYKV_ALWAYS_INLINE { to[t][half] = total[half]; });
      });
      asm volatile("" ::: "memory");  // totals lie there: in registers they would take the place of sums
      x += kTokens * Way::kOfUnit;
      sums += 4;
    }
  }

  const PackedWeight& w_;
  const Codes& codes_;
  const RowFactors<1> factors_;
  const uint32_t* words_;
  StepGroups groups_;
  Unit units_[kParts][kUnits];
  Total total_[kParts][kChunk] = {};
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
void multiply(const PackedGemmArgs& args, const RowList& rows, const Codes& codes, const Factors& factors) {
  const PackedWeight& w = args.weight;
  const int64_t most = std::min(rows.count, kMostRows), units = w.padded_k / kUnit;
  using Element = typename Way::Element;
  const Reordered<Element> x{
      std::make_unique_for_overwrite<Element[]>(static_cast<size_t>(most * units * Way::kOfUnit)),
      std::make_unique_for_overwrite<float[]>(static_cast<size_t>(most * units * 4))};
  for (int64_t first = 0; first < rows.count; first += kMostRows) {
    const int64_t here = std::min(kMostRows, rows.count - first);
    reorder<T, Way>(args, rows, first, here, x);
    if (here <= kMostAlone) {
      parallel_for((w.n + 31) / 32, 1, [&](int64_t begin, int64_t end) {
        for (int64_t band = begin; band < end; ++band) {
          Alone<Codes, Way, Way::kVectorsAlone> alone(w, codes, factors, band * 2);
          for (int64_t t = 0; t < here; ++t) {
            BlockSums of_blocks[2];
            alone.run(x.x.get() + t * units * Way::kOfUnit, x.sums.get() + t * units * 4, of_blocks);
            for (int r = 0; r < 2; ++r) store<T>(args, rows, band * 2 + r, first + t, 1, &of_blocks[r]);
          }
        }
      });
      continue;
    }
    // All blocks with some rows of x, then all with the next.
    const int64_t blocks = (w.n + 15) / 16;
    parallel_for(blocks * ((here + kChunk - 1) / kChunk), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t chunk = i / blocks * kChunk, block = i % blocks, count = std::min(kChunk, here - chunk);
        BlockSums of_block[kChunk];
        Panel<Codes, Way>(w, codes, factors, block)
            .multiply(x.x.get() + chunk * units * Way::kOfUnit, x.sums.get() + chunk * units * 4, count, of_block);
        store<T>(args, rows, block, first + chunk, static_cast<int>(count), of_block);
      }
    });
  }
}

template <class T, class Codes>
void multiply(const PackedGemmArgs& args, const RowList& rows, const float (&table)[16], const Factors& factors) {
  const Codes codes(table);
#if defined(__AVX512BF16__)
  if constexpr (__is_same(T, bf16)) {
    if (has_quick_pairs()) return multiply<T, Codes, InPairs<Codes>>(args, rows, codes, factors);
  } else {
    if constexpr (Codes::kHasOctets)
      if (codes.has_octets()) return multiply<T, Codes, InBytes<Codes>>(args, rows, codes, factors);
    if constexpr (Codes::kQuickPairs) {
      bool is_exact = has_quick_pairs();  // in bf16, as all tables are but NF4's
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
