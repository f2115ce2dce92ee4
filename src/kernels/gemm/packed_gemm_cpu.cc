// Twin of packed_gemm.cu.
//
// A vector of words holds kWidth / 4 rows times four steps of 16 columns: each lane keeps a sum of its own step, and the four
// are added at the end.  A tile is decoded once for several tokens.
#include <vector>

#include "cpu/parallel.h"
#include "cpu/silu.h"
#include "gemm/packed_codes_cpu.h"
#include "gemm/packed_gemm.h"
#include "gemm/tile_map_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int kUnit = PackedWeight::kUnit, kParts = 32 / kWidth;  // vectors of words of a tile for each c
constexpr int64_t kChunk = 64;                                    // tokens whose x is kept in the order of tiles

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

// x of some tokens, [token][unit][c][h], and sums of 16 columns, [token][unit][j].
template <class Element>
struct Reordered {
  std::vector<Element> x;
  std::vector<float> sums;
};

template <class Codes>
struct InFloats {
  using Element = float;  // [e][j]
  static constexpr int kSize = 8;
  static void put(Element* x, int j, int e, float v) { x[e * 4 + j] = v; }
  struct Pair {
    Floats first, second;
  };
  static Pair decode(const Codes& codes, Words words, int shift) {
    return {codes.element(words, shift), codes.element(words, shift + 16)};
  }
  static Floats add(Floats sum, const Pair& w, const Element* x) {
    return w.second * repeat4(x + 4) + (w.first * repeat4(x) + sum);
  }
};

#if defined(__AVX512BF16__)
template <class Codes>
struct InPairs {
  using Element = bf16;  // [j][e]
  static constexpr int kSize = 8;
  static void put(Element* x, int j, int e, float v) { x[j * 2 + e] = from_float<bf16>(v); }
  using Pair = __m512bh;
  static Pair decode(const Codes& codes, Words words, int shift) { return codes.pair(words, shift); }
  static Floats add(Floats sum, const Pair& w, const Element* x) {
    const __m512i pairs = _mm512_maskz_broadcast_i32x4(0xffff, load_raw<__m128i>(x));
    return _mm512_dpbf16_ps(sum, w, __builtin_bit_cast(__m512bh, pairs));
  }
};

// Halves: the upper eight of their bits, and the rest, are numbers of bf16.
template <class Codes>
struct InSplitPairs : InPairs<Codes> {
  using Whole = InPairs<Codes>;
  using Element = bf16;  // [upper, rest][j][e]
  static constexpr int kSize = 16;
  static void put(Element* x, int j, int e, float v) {
    const uint32_t upper = __builtin_bit_cast(uint32_t, v) & 0xffff0000u;
    const bool is_finite = (upper & 0x7f800000u) != 0x7f800000u;
    Whole::put(x, j, e, __builtin_bit_cast(float, upper));
    Whole::put(x + 8, j, e, is_finite ? v - __builtin_bit_cast(float, upper) : 0.0f);
  }
  static Floats add(Floats sum, const typename Whole::Pair& w, const Element* x) {
    return Whole::add(Whole::add(sum, w, x), w, x + 8);
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
      auto* x = into.x.data() + t * w.padded_k * Way::kSize / 8;
      float* sums = into.sums.data() + t * (w.padded_k / 16);
      for (int64_t unit = 0; unit < w.padded_k; unit += kUnit, x += 8 * Way::kSize)
        for (int j = 0; j < 4; ++j) {
          float sum = 0.0f;
          for (int i = 0; i < 16; ++i) {
            const int64_t at = unit + 16 * j + i, column = w.columns ? w.columns[at] : at;
            const float v = column >= 0 && column < w.k ? to_float(row[column * args.x_step]) : 0.0f;
            Way::put(x + (i >> 1) * Way::kSize, j, i & 1, v);
            sum += v;
          }
          *sums++ = sum;
        }
    }
  });
}

// kTokens rows of out times 16 of the weight: kVectors vectors from `part` on, of those with the same half.
template <class Codes, class Way, int kVectors, int kTokens>
class Tile {
 public:
  Tile(const PackedWeight& w, const Codes& codes, const Factors& factors, int64_t block, int part)
      : w_(w), codes_(codes), factors_(factors), block_(block), part_(part) {}

  void run(const typename Way::Element* x, const float* sums) {
    const int64_t unit_words = Codes::kPlanes * 128, x_stride = w_.padded_k / 8 * Way::kSize;
    const auto* words =
        reinterpret_cast<const uint32_t*>(w_.codes) + block_ * (w_.padded_k / kUnit) * unit_words + part_ * kWidth;
    StepGroups groups(w_.group_size);
    for (int64_t column = 0; column < w_.padded_k;
         column += kUnit, words += unit_words, x += 8 * Way::kSize, sums += 4) {
      Floats sum[kVectors][2][kTokens] = {};
      for (int c = 0; c < 4; ++c)
        for (int h = 0; h < 2; ++h)
          for (int v = 0; v < kVectors; ++v) {
            const auto tile = load_raw<Words>(words + (h * (Codes::kPlanes - 1)) * 128 + c * 32 + v * kWidth);
            for (int half = 0; half < 2; ++half) {
              const auto pair = Way::decode(codes_, tile, Codes::shift(half, h));
              for (int t = 0; t < kTokens; ++t)
                sum[v][half][t] = Way::add(sum[v][half][t], pair, x + t * x_stride + (c * 2 + h) * Way::kSize);
            }
          }
      groups.next();
      add(column, groups, sum, sums);
    }
  }

  // Row 8 half + g of the 16, token t.
  float total(int half, int g, int t) const {
    const int lane = g * 4 - part_ * kWidth;
    const Floats v = total_[lane / kWidth][half][t];
    const int at = lane % kWidth;
    return (v[at] + v[at + 1]) + (v[at + 2] + v[at + 3]);
  }

 private:
  [[gnu::always_inline]] void add(int64_t column, const StepGroups& groups, const Floats (&sum)[kVectors][2][kTokens],
                                  const float* sums) {
    for (int v = 0; v < kVectors; ++v) {
      Floats s[2] = {}, m[2] = {};
      factors_of(column, groups, part_ + v, s, m);
      for (int half = 0; half < 2; ++half)
        for (int t = 0; t < kTokens; ++t) {
          Floats& total = total_[v][half][t];
          total += s[half] * sum[v][half][t];
          if (w_.minima) total += m[half] * repeat4(sums + t * (w_.padded_k / 16));
        }
    }
  }

  void factors_of(int64_t column, const StepGroups& groups, int part, Floats (&s)[2], Floats (&m)[2]) const {
    one(column, groups.of[0], part, s, m);
    for (int j = 1; j < 4; ++j) {
      if (groups.of[j] == groups.of[j - 1]) continue;
      Floats step_s[2] = {}, step_m[2] = {};
      one(column, groups.of[j], part, step_s, step_m);
      const Words own = load_raw<Words>(kStepMasks.from[j]);
      for (int half = 0; half < 2; ++half) {
        s[half] = select(own, step_s[half], s[half]);
        m[half] = select(own, step_m[half], m[half]);
      }
    }
  }

  // Those of one group for both halves.
  void one(int64_t column, int64_t group, int part, Floats (&s)[2], Floats (&m)[2]) const {
    const int64_t rows32 = block_ >> 1;
    const bool second = block_ & 1;
    const Floats scale = factors_.scale(rows32, group, column, part);
    s[0] = second ? spread4<2>(scale) : spread4<0>(scale);
    s[1] = second ? spread4<3>(scale) : spread4<1>(scale);
    if (!w_.minima) return;
    const Floats minimum = factors_.minimum(rows32, group, column, part, scale);
    m[0] = second ? spread4<2>(minimum) : spread4<0>(minimum);
    m[1] = second ? spread4<3>(minimum) : spread4<1>(minimum);
  }

  const PackedWeight& w_;
  const Codes& codes_;
  const Factors& factors_;
  const int64_t block_;
  const int part_;
  Floats total_[kVectors][2][kTokens] = {};
};

// Sums of the 16 rows of a block.
using BlockSums = float[16];

template <class Codes, class Way, int kVectors, int kTokens>
void tile(const PackedWeight& w, const Codes& codes, const Factors& factors, int64_t block, int part,
          const typename Way::Element* x, const float* sums_of_x, BlockSums* to) {
  Tile<Codes, Way, kVectors, kTokens> tile(w, codes, factors, block, part);
  tile.run(x, sums_of_x);
  for (int t = 0; t < kTokens; ++t)
    for (int half = 0; half < 2; ++half)
      for (int g = part * kWidth / 4; g < (part + kVectors) * kWidth / 4; ++g)
        to[t][half * 8 + g] = tile.total(half, g, t);
}

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
  const int64_t row = block * 16, count = args.weight.n - row < 16 ? args.weight.n - row : 16;
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
  constexpr int kTokens = kWidth == 16 ? 8 : 4, kAlone = kWidth == 16 ? 2 : 4;
  const PackedWeight& w = args.weight;
  const int64_t rows = rows_of.count < kChunk ? rows_of.count : kChunk;
  Reordered<typename Way::Element> reordered;
  reordered.x.resize(static_cast<size_t>(rows * w.padded_k / 8 * Way::kSize));
  reordered.sums.resize(static_cast<size_t>(rows * (w.padded_k / 16)));
  for (int64_t first = 0; first < rows_of.count; first += kChunk) {
    const int64_t count = rows_of.count - first < kChunk ? rows_of.count - first : kChunk;
    reorder<T, Way>(args, rows_of, first, count, reordered);
    parallel_for((w.n + 15) / 16, 4, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        int64_t t = 0;
        const auto x = [&] { return reordered.x.data() + t * w.padded_k / 8 * Way::kSize; };
        const auto sums = [&] { return reordered.sums.data() + t * (w.padded_k / 16); };
        for (; t + kTokens <= count; t += kTokens) {
          BlockSums of_block[kTokens];
          for (int part = 0; part < kParts; ++part)
            tile<Codes, Way, 1, kTokens>(w, codes, factors, block, part, x(), sums(), of_block);
          store<T>(args, rows_of, block, first + t, kTokens, of_block);
        }
        for (; t < count; ++t) {
          BlockSums of_block[1];
          for (int part = 0; part < kParts; part += kAlone)
            tile<Codes, Way, kAlone, 1>(w, codes, factors, block, part, x(), sums(), of_block);
          store<T>(args, rows_of, block, first + t, 1, of_block);
        }
      }
    });
  }
}

template <class T, class Codes>
void multiply(const PackedGemmArgs& args, const RowList& rows, const float (&table)[16], const Factors& factors) {
  const Codes codes(table);
#if defined(__AVX512BF16__)
  if constexpr (__is_same(T, bf16)) return multiply<T, Codes, InPairs<Codes>>(args, rows, codes, factors);
  bool is_exact = Codes::kQuickPairs;  // in bf16, as all tables are but NF4's
  for (const float entry : table) is_exact = is_exact && to_float(from_float<bf16>(entry)) == entry;
  if constexpr (Codes::kQuickPairs)
    if (is_exact) return multiply<T, Codes, InSplitPairs<Codes>>(args, rows, codes, factors);
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
