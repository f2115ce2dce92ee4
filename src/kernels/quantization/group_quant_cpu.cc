// Twin of group_quant.cu: some groups of a row at once.  First their numbers, if an activation makes them, then the largest of
// all, then all scales, then all codes: what one waits for is worked out while others are.  Codes go past the caches where they
// are many.
//
// Arithmetic bounds them: docs/log/quantization.md has cycles of each.  What comes next is asked for while codes are made, some
// lines with every group: asked for all at once it kept memory idle in between, and groups of 128 took half as long again.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/codes.h"
#include "cpu/nvfp4_encode.h"
#include "cpu/parallel.h"
#include "cpu/silu.h"
#include "cpu/tile_encoder.h"
#include "quantization/group_quant.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kBlock = 16;                                   // of four-bit codes
constexpr int64_t kElementsAtOnce = 2048, kAtOnce = 4 * kWidth;  // of these at most, and of groups
constexpr int64_t kWorthPassing = 64;                            // elements of a group: past the caches

// What is asked for lies so many elements ahead.
template <class T>
constexpr int64_t kAhead = 3 * kBytesAhead / sizeof(T);

// Codes of 0 <= y <= 6, as narrow_e2m1_magnitude has them.
inline Words e2m1_of(Floats y) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23
  const Floats low = y * 2.0f + kRound, middle = y + (kRound + 2.0f), high = y * 0.5f + (kRound + 4.0f);
  return __builtin_bit_cast(Words, lesser(lesser(low, middle), high)) & 7u;
}

// Sixteen numbers times a factor as four-bit codes; NaN becomes 6.
template <class T>
inline void store_nibbles(uint8_t* codes, const T* from, float factor) {
  const auto signed_codes = [=](int64_t i) {
    const Floats x = load(from + i);
    const Floats within = lesser(abs(x) * factor, splat(6.0f));
    return e2m1_of(within) | (__builtin_bit_cast(Words, x) >> 28 & 8u);
  };
#if defined(__AVX512F__)
  const __m512i all = __builtin_bit_cast(__m512i, signed_codes(0));  // two in 64 bits, which become a byte
  const __m512i pairs = _mm512_or_si512(all, _mm512_maskz_srli_epi64(0xff, all, 28));
  const __m128i bytes = _mm512_maskz_cvtepi64_epi8(0xff, pairs);
  __builtin_memcpy(codes, &bytes, kBlock / 2);
#else
  uint8_t bytes[kBlock];
  for (int64_t i = 0; i < kBlock; i += kWidth) {
    const Bytes some = narrow_to_bytes(signed_codes(i));
    __builtin_memcpy(bytes + i, &some, sizeof some);
  }
  pack_sixteen(codes, bytes);
#endif
}

// What such codes stand for.
inline Floats values_of_e2m1(Words codes) {
#if defined(__AVX512F__)
  const Floats values = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
  return _mm512_maskz_permutexvar_ps(0xffff, __builtin_bit_cast(__m512i, codes), values);
#else
  const Floats large = __builtin_bit_cast(Floats, ((codes >> 1) + 126u) << 23 | (codes & 1u) << 22);
  return codes < 2u ? __builtin_bit_cast(Floats, codes * 0x3f000000u) : large;  // 0 or 0.5
#endif
}

// a * b + c, rounded once.
inline Floats fused(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int64_t i = 0; i < kWidth; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

using Fours = float __attribute__((vector_size(16)));
inline Fours plus_square(Fours a, Fours sum) {
#if defined(__FMA__)
  return _mm_fmadd_ps(a, a, sum);
#else
  for (int64_t i = 0; i < 4; ++i) sum[i] = __builtin_fmaf(a[i], a[i], sum[i]);
  return sum;
#endif
}

// By how much such codes are wrong: the sum of the squares, of every fourth one after another, then of the four.
template <class T>
inline float error_of(const T* from, float factor, float unit) {
  Fours sums{};
  for (int64_t i = 0; i < kBlock; i += kWidth) {
    const Floats x = abs(load(from + i));
    const Words code = e2m1_of(lesser(x * factor, splat(6.0f)));
    const Floats d = fused(values_of_e2m1(code), splat(-unit), x);
    Fours fours[kWidth / 4];
    __builtin_memcpy(fours, &d, sizeof fours);
    for (const Fours& four : fours) sums = plus_square(four, sums);
  }
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Scales of up to kWidth groups, as stored, and their factors: not before they are asked for where that takes a division, since
// tables do without.
struct Scales {
  uint32_t stored[kWidth];
  float factors[kWidth];

  void find_factors(const ScaleRule& rule, float global) {
    if (rule.kind == QuantScale::kFloat)
      store(factors, lesser(1.0f / __builtin_bit_cast(Floats, load_raw<Words>(stored)), splat(__FLT_MAX__)));
    if (rule.kind != QuantScale::kE4M3) return;
    const Words code = load_raw<Words>(stored) & 0x7fu;
    const Floats factor = 1.0f / (widen_e4m3<Floats>(code) * (1.0f / std::fabs(global)));
    store(factors, code == 0u ? Floats{} : lesser(factor, splat(__FLT_MAX__)));
  }
  void find(const ScaleRule& rule, const float* most, float given, float target, int64_t groups) {
    if (rule.kind == QuantScale::kE4M3) return find_e4m3(load(most), given, target);
    if (rule.kind == QuantScale::kMx && rule.exponent != ExponentRule::kVllm) return find_mx(rule, load(most));
    if (rule.kind != QuantScale::kMx) return find_float(rule, load(most), given);
    for (int64_t g = 0; g < groups; ++g) {
      const GroupScale scale = rule(most[g], given, target);
      stored[g] = scale.stored;
      factors[g] = scale.factor;
    }
  }
  // By how much a code of 1 is multiplied.
  float unit(int64_t g, float inverse) const { return magnitude_of_e4m3(stored[g] & 0x7fu) * inverse; }

 private:
  // What ScaleRule gives of each.
  void find_float(const ScaleRule& rule, Floats most, float given) {
    const Floats within = lesser(most / rule.largest, splat(given)), scale = greater(within, splat(rule.least_scale));
    const Words bits =
        __builtin_bit_cast(Words, rule.kind == QuantScale::kFloat ? scale : greater(scale, splat(1e-10f)));
    if (rule.kind == QuantScale::kFloat) {
      __builtin_memcpy(stored, &bits, sizeof bits);
      return;
    }
    const Words up = (bits + 0x7fffffu) >> 23, exponent = up > 0u ? (up < 254u ? up : Words{} + 254u) : Words{} + 1u;
    const Words all = rule.kind == QuantScale::kE8M0 ? exponent : exponent << 23;
    const Words inverse = exponent < 254u ? (254u - exponent) << 23 : Words{} + 0x400000u;
    __builtin_memcpy(stored, &all, sizeof all);
    store(factors, __builtin_bit_cast(Floats, inverse));
  }
  void find_mx(const ScaleRule& rule, Floats given) {
    const Floats most = lesser(given, splat(__FLT_MAX__));
    Words found = __builtin_bit_cast(Words, most) >> 23;
    if (rule.exponent == ExponentRule::kOcp) {
      const auto less = static_cast<uint32_t>(rule.code_exponent);
      found = found > less ? found - less : Words{};
    } else {
      const Words up = (__builtin_bit_cast(Words, most * (1.0f / rule.largest)) + 0x7fffffu) >> 23;
      found = most == 0.0f ? Words{} : up > 0u ? up : Words{} + 1u;
    }
    const Words inverse = found < 254u ? (254u - found) << 23 : Words{} + 0x400000u;
    __builtin_memcpy(stored, &found, sizeof found);
    store(factors, __builtin_bit_cast(Floats, found == 0u ? Words{} : inverse));
  }
  void find_e4m3(Floats most, float global, float target) {
    const Floats wanted = global * (most * (1.0f / target));
    const Words within = __builtin_bit_cast(Words, lesser(abs(wanted), splat(448.0f)));
    const Words code = wanted == wanted ? narrow_finite<3, 7, 8, Floats, Words>(within) & 0x7fu : Words{};
    const Words sign = global < 0.0f ? Words{} + 0x80u : Words{};
    const Words all = code == 0u ? Words{} : code | sign;
    __builtin_memcpy(stored, &all, sizeof all);
  }
};

// Codes of four bits by tables (cpu/nvfp4_stairs.h), below one global scale; for so many elements, since few are not worth
// them.
template <class T>
class BlockTables {
 public:
  BlockTables(const GroupQuantArgs&, float, int64_t) {}
  bool encode(uint8_t*, const T*, const Scales&, const float*, int64_t, int64_t, bool) const { return false; }
};
#if defined(__AVX512BW__)
template <class T>
  requires(sizeof(T) == 2)
class BlockTables<T> {
 public:
  BlockTables(const GroupQuantArgs& args, float global, int64_t elements)
      : mx_(args.rule.kind == QuantScale::kMx),
        stairs_(mx_ ? 1.0f : 1.0f / std::fabs(global)),
        there_(args.codes == QuantCode::kE2M1 && args.group_size == (mx_ ? 2 * kBlock : kBlock) &&
               elements >= kWorthTables && stairs_.build(mx_)) {}

  // Of as many blocks as a vector has lanes, with these scales; false where tables cannot do it.
  bool encode(uint8_t* codes, const T* from, const Scales& scales, const float* inside, int64_t count, int64_t ahead,
              bool past) const {
    if (!there_ || count != kWidth) return false;
    const Words stored = load_raw<Words>(scales.stored) & (mx_ ? 0xffu : 0x7fu);
    if (!all_below(load(inside), INFINITY) || !stairs_.have(stored)) return false;
    if (mx_) {
      stairs_.of_powers(codes, from, kWidth / 4, scales.stored, ahead, past);
      return true;
    }
    constexpr int kFours = kWidth / 4;
    const T* places[kFours];
    for (int i = 0; i < kFours; ++i) places[i] = from + i * kNvfp4Four;
    stairs_(codes, places, kFours, scales.stored, ahead, past);
    return true;
  }

 private:
  static constexpr int64_t kWorthTables = 1 << 16;

  bool mx_;
  Nvfp4Stairs<T> stairs_;
  bool there_;
};
#endif

template <class T>
class Groups {
 public:
  // tables: of each expert's global scale, or of the one of all.
  Groups(const GroupQuantArgs& args, const std::vector<BlockTables<T>>& tables, const Reporter& report)
      : args_(args),
        tables_(tables),
        report_(report),
        nibbles_(args.codes == QuantCode::kE2M1),
        real_(args.width / args.group_size),
        at_once_(std::clamp<int64_t>(kElementsAtOnce / args.group_size, 1, kAtOnce)),
        given_(args.given),
        rows_in_lines_((reinterpret_cast<uintptr_t>(args.out) | static_cast<uint64_t>(args.out_rows.stride0)) % kLine ==
                       0),
        tiles_(args.codes == QuantCode::kE4M3 ? args.rows * args.width : 0),
        // Small groups and codes of four bits are bound by arithmetic, and quicker through the caches.
        writer_(args.rows * args.width > kWorthStreaming && args.group_size <= kElementsAtOnce &&
                (args.group_size >= kWorthPassing || args.rule.kind == QuantScale::kMx ||
                 args.rule.kind == QuantScale::kE4M3)) {
    if (args.source != RowSource::kElements) values_.resize(at_once_ * args.group_size * sizeof(T) / sizeof(Line) + 2);
  }

  // Whether a cache line of scales has four bytes of each of 16 rows: in tiles those of four groups, in columns the fp32 of one.
  // Then 16 rows are encoded together, so that a line is put together and written at once.
  static bool by_lines(const GroupQuantArgs& args) {
    if (args.tile_bits == 7) return !args.of_experts.first.data;
    const Rows& rows = args.scale_rows;
    return is_float(args) && args.rows >= kRowsOfLine && (rows.size1 | rows.size2 | rows.stride0) == 1 &&
           args.scale_group != 1 && !args.scale_four && !args.tile_bits && !args.valid.counts.data;
  }
  // Pieces: up to 16 rows by up to across() groups.
  int64_t pieces() const {
    return (args_.tile_bits ? (args_.rows + 127) / 128 * 8 : (args_.rows + kRowsOfLine - 1) / kRowsOfLine) * in_row();
  }
  void take_pieces(int64_t begin, int64_t end) {
    in_lines_ = true;
    const int64_t steps = std::clamp<int64_t>(kAhead<T> / (at_once_ * args_.group_size), 1, kRowsOfLine);
    int64_t places[2 * kRowsOfLine];  // of this piece's rows and the next one's
    find_places(begin, places + kRowsOfLine);
    for (int64_t piece = begin; piece < end; ++piece) {
      std::copy_n(places + kRowsOfLine, kRowsOfLine, places);
      find_places(piece + 1, places + kRowsOfLine);
      const int64_t first = first_row(piece), group = first_group(piece),
                    all = std::min(args_.groups() - group, across()), real = std::clamp<int64_t>(real_ - group, 0, all),
                    parts = (all + at_once_ - 1) / at_once_;
      first_group_ = group;
      if (args_.tile_bits) __builtin_memset(lines_, 0, static_cast<size_t>(all / 4 * kLine));
      int64_t there = 0;
      for (; there < kRowsOfLine && first + row_of_line(there) < args_.rows; ++there) {
        for (int64_t part = 0; part * at_once_ < real; ++part) {
          const int64_t later = there * parts + part + steps, now = part * at_once_;
          ahead_ = places[later / parts] - places[there] + (later % parts - part) * at_once_ * args_.group_size;
          encode(first + row_of_line(there), group + now, std::min(at_once_, real - now));
        }
        if (real < all) pad_codes(first + row_of_line(there), group + real, all - real);
      }
      if (args_.tile_bits) {
        write_lines(swizzled_place(first, group, args_.tiles, args_.tile_bits), 512, all / 4, kRowsOfLine);
      } else {
        write_lines(4 * (first + group * args_.scale_group), 4 * args_.scale_group, all, there);
      }
    }
  }

  // [begin, end) of all rows' groups, with those of padding.
  void operator()(int64_t begin, int64_t end) {
    const int64_t groups = args_.groups();
    while (begin < end) {
      const int64_t row = begin / groups, group = begin % groups;
      int64_t count = std::min(groups - group, end - begin);
      if (group < real_) {
        count = std::min({count, real_ - group, at_once_});
        encode(row, group, count);
      } else {
        pad(row, group, count);
      }
      begin += count;
    }
  }

 private:
  static constexpr int64_t kRowsOfLine = 16;

  // Groups of a piece.  Where rows of codes do not begin with lines, as many as lines_ has room for, since neighbouring pieces of a row
  // share a line of codes.
  int64_t across() const {
    if (!writer_.streamed() || rows_in_lines_) return at_once_;
    return std::max<int64_t>(1, kAtOnce * (args_.tile_bits ? 4 : 1) / at_once_) * at_once_;
  }
  int64_t in_row() const { return (args_.groups() + across() - 1) / across(); }
  int64_t first_row(int64_t piece) const {
    const int64_t lines = piece / in_row();
    return args_.tile_bits ? lines / 8 * 128 + lines % 8 * 4 : lines * kRowsOfLine;
  }
  int64_t first_group(int64_t piece) const { return piece % in_row() * across(); }
  int64_t row_of_line(int64_t i) const { return args_.tile_bits ? i / 4 * 32 + i % 4 : i; }
  static bool is_float(const GroupQuantArgs& args) {
    return args.rule.kind == QuantScale::kFloat || args.rule.kind == QuantScale::kPowerOfTwo;
  }
  void write_lines(int64_t at, int64_t step, int64_t lines, int64_t words) const {
    char* to = static_cast<char*>(args_.scales) + at;
    for (int64_t line = 0; line < lines; ++line, to += step) {
      if (words < kRowsOfLine) {
        __builtin_memcpy(to, lines_[line].words, static_cast<size_t>(4 * words));
      } else if (writer_.streamed() && reinterpret_cast<uintptr_t>(to) % kLine == 0) {
        stream_line(to, reinterpret_cast<const char*>(lines_[line].words));
      } else {
        __builtin_memcpy(to, lines_[line].words, kLine);
      }
    }
  }
  // Where the elements of a piece begin, of each of its rows.
  void find_places(int64_t piece, int64_t* places) const {
    const int64_t row = first_row(piece), column = first_group(piece) * args_.group_size;
    for (int64_t i = 0; i < kRowsOfLine; ++i) places[i] = args_.input_rows.offset(row + row_of_line(i)) + column;
  }

  int64_t group_bytes() const { return nibbles_ ? args_.group_size / 2 : args_.group_size; }
  bool of_lines() const { return group_bytes() % kLine == 0; }
  uint8_t* codes_at(int64_t row, int64_t group) const {
    return static_cast<uint8_t*>(args_.out) + args_.out_rows.offset(row) + group * group_bytes();
  }

  // Up to kAtOnce groups, as many at a time as a vector has lanes, in steps: what one waits for is worked out while others are.
  void encode(int64_t row, int64_t group, int64_t count) {
    const int64_t n = args_.group_size;
    if (!args_.valid.has(row)) {
      if (args_.fill_scales)
        for (int64_t g = group; g < group + count; ++g) args_.store_scale(row, g, bits_of(1.0f));
      return;
    }
    const ScaleRow at = args_.scale_row_of(row, report_);
    if (!at.there) return;
    ask_for_scales(at.row, group, count);
    const T* const from = values(row, group * n, count * n);
    const float given = args_.globals ? args_.globals[at.expert] : given_;
    float most[kAtOnce], inside[kAtOnce];
    Scales scales[kAtOnce / kWidth];
    const auto each = [&](auto&& step) {
      for (int64_t g = 0; g < count; g += kWidth) step(scales[g / kWidth], g, std::min<int64_t>(kWidth, count - g));
    };
    each([&](Scales&, int64_t g, int64_t some) { find_largest(most + g, inside + g, from + g * n, n, some); });
    each([&](Scales& s, int64_t g, int64_t some) { s.find(args_.rule, most + g, given, 6.0f, some); });
    if (args_.four_over_six)
      each([&](Scales& s, int64_t g, int64_t some) { choose(s, from + g * n, most + g, given, some); });
    uint8_t* const codes = codes_at(row, group);
    // Whole lines go past the caches as they are made, others by way of the writer.
    const bool past = writer_.streamed() && (of_lines() || args_.group_size < kWorthPassing) &&
                      (reinterpret_cast<uintptr_t>(codes) | static_cast<uint64_t>(count * group_bytes())) % kLine == 0;
    uint8_t* const to = writer_.streamed() && !past ? codes_.bytes : codes;
    each([&](Scales& s, int64_t g, int64_t some) {
      encode_some(to + g * group_bytes(), from + g * n, s, inside + g, some, at.expert, given, past);
    });
    if (to != codes) writer_.put(codes, to, count * group_bytes());
    if (in_lines_)
      return each([&](Scales& s, int64_t g, int64_t some) { store_in_lines(row, group + g, some, s.stored); });
    each([&](Scales& s, int64_t g, int64_t some) { store_scales(at.row, group + g, some, s.stored); });
    fill_behind(row, at, group, count);
  }

  // Those in tiles lie in as many lines as there are fours, which a store would wait for one after the other.
  void ask_for_scales(int64_t row, int64_t group, int64_t count) const {
    if (!args_.tile_bits || in_lines_) return;
    const uint8_t* at =
        static_cast<const uint8_t*>(args_.scales) + swizzled_place(row, group, args_.tiles, args_.tile_bits);
    for (int64_t g = 0; g < count; g += 4, at += 4 << args_.tile_bits) __builtin_prefetch(at, 1);
  }

  // Codes of up to kWidth groups.
  void encode_some(uint8_t* codes, const T* from, Scales& scales, const float* inside, int64_t count, int expert,
                   float given, bool past) const {
    const int64_t n = args_.group_size;
    if (nibbles_ ? tables_[args_.globals ? expert : 0].encode(codes, from, scales, inside, count, ahead_, past)
                 : encode_together(codes, from, n, scales.stored, inside, count, past))
      return;
    scales.find_factors(args_.rule, given);
    for (int64_t g = 0; g < count; ++g) {
      const T* x = from + g * n;
      uint8_t* to = codes + g * group_bytes();
      prefetch_bytes(x + ahead_, n * static_cast<int64_t>(sizeof(T)));
      if (nibbles_) {
        for (int64_t i = 0; i < n; i += kBlock) store_nibbles(to + i / 2, x + i, scales.factors[g]);
      } else {
        encode_bytes(to, x, n, {scales.stored[g], scales.factors[g]}, inside[g], past);
      }
    }
  }

  void store_in_lines(int64_t row, int64_t group, int64_t count, const uint32_t* stored) {
    auto* line = lines_ + (group - first_group_) / (args_.tile_bits ? 4 : 1);
    if (!args_.tile_bits) {
      for (int64_t g = 0; g < count; ++g) line[g].words[row % kRowsOfLine] = stored[g];
      return;
    }
    uint32_t words[kWidth / 4];
    const Bytes all = narrow_to_bytes(load_raw<Words>(stored) & 0xffu);
    __builtin_memcpy(words, &all, sizeof all);
    for (int64_t g = 0; g < count; g += 4, ++line)
      line->words[row % 4 * 4 + row % 128 / 32] =
          count - g < 4 ? words[g / 4] & ((1u << 8 * (count - g)) - 1) : words[g / 4];
  }

  // Bytes in tiles by fours, and bytes side by side, at once.
  void store_scales(int64_t row, int64_t group, int64_t count, const uint32_t* stored) const {
    const bool bytes = args_.rule.kind == QuantScale::kMx || args_.rule.kind == QuantScale::kE4M3,
               side_by_side = args_.scale_group == 1 && !args_.tile_bits && args_.rule.kind != QuantScale::kE8M0;
    uint8_t* const scales = static_cast<uint8_t*>(args_.scales);
    int64_t g = 0;
    if (bytes && args_.tile_bits && group % 4 == 0) {
      uint8_t* to = scales + swizzled_place(row, group, args_.tiles, args_.tile_bits);
      uint8_t some[kWidth];
      const Bytes all = narrow_to_bytes(load_raw<Words>(stored) & 0xffu);
      __builtin_memcpy(some, &all, sizeof all);
      for (; g + 4 <= count; g += 4, to += 4 << args_.tile_bits) __builtin_memcpy(to, some + g, 4);
    } else if (count == kWidth && side_by_side) {
      const int64_t at = args_.scale_rows.offset(row) + group;
      if (bytes) {
        const Bytes all = narrow_to_bytes(load_raw<Words>(stored) & 0xffu);
        __builtin_memcpy(scales + at, &all, sizeof all);
      } else {
        __builtin_memcpy(scales + 4 * at, stored, sizeof(Words));
      }
      return;
    }
    for (; g < count; ++g) args_.store_scale(row, group + g, stored[g]);
  }

  // E4M3 of bf16 by tables, for all groups at once.
  bool encode_together(uint8_t* to, const T* x, int64_t n, const uint32_t* stored, const float* inside, int64_t count,
                       bool past) const {
    if (args_.codes != QuantCode::kE4M3) return false;
    auto* const e4m3s = reinterpret_cast<e4m3*>(to);
    const QuantScale kind = args_.rule.kind;
    if (kind != QuantScale::kMx && given_ < INFINITY) return false;  // codes may be too large
    if (kind == QuantScale::kFloat) {
      // Scales that follow from the largest magnitude alone.
      const float least = 449.0f * args_.rule.least_scale;
      bool regular = args_.rule.largest == 448.0f;
      for (int64_t g = 0; g < count; ++g) regular &= inside[g] > least;
      return regular && tiles_.template divide_tiles<false>(e4m3s, x, n, count, inside, ahead_, past);
    }
    if (!all_below(load(inside), INFINITY)) return false;
    if (kind != QuantScale::kMx) {
      float powers[kWidth];
      const Words bits = load_raw<Words>(stored) << (kind == QuantScale::kE8M0 ? 23 : 0);
      __builtin_memcpy(powers, &bits, sizeof bits);
      return tiles_.template divide_tiles<true>(e4m3s, x, n, count, powers, ahead_, past);
    }
    return n == kPair && tiles_.divide_pairs_by_powers(e4m3s, x, count, stored, ahead_, past);
  }

  // E4M3 of bf16 by tables, where the scale is a power of two.
  void encode_bytes(uint8_t* to, const T* x, int64_t n, GroupScale scale, float inside, bool past) const {
    if (args_.codes == QuantCode::kE4M3 && inside < INFINITY && args_.rule.kind != QuantScale::kFloat &&
        tiles_.divide_by_power_of_two(reinterpret_cast<e4m3*>(to), x, n, 1.0f / scale.factor))
      return;
    codes_times(args_.codes, to, x, n, scale.factor, is_inside(inside), past);
  }

  // That a largest magnitude of this kind, NaN where any number is, leaves no product beyond the largest code.
  bool is_inside(float inside) const {
    const bool grows =
        args_.rule.kind == QuantScale::kMx ? args_.rule.exponent != ExponentRule::kCeil : given_ < INFINITY;
    return inside < INFINITY && !grows;
  }

  // Of both scales of a block the one that leads closer.
  void choose(Scales& scales, const T* from, const float* most, float given, int64_t count) const {
    const float inverse = 1.0f / std::fabs(given);
    Scales others;
    others.find(args_.rule, most, given, 4.0f, count);
    others.find_factors(args_.rule, given);
    scales.find_factors(args_.rule, given);
    for (int64_t g = 0; g < count; ++g) {
      const T* const x = from + g * kBlock;
      const bool closer = error_of(x, others.factors[g], others.unit(g, inverse)) <
                          error_of(x, scales.factors[g], scales.unit(g, inverse));
      // Without a branch, which would be taken as often as not.
      scales.stored[g] = closer ? others.stored[g] : scales.stored[g];
    }
  }

  // Groups of padding.
  void pad(int64_t row, int64_t group, int64_t count) const {
    if (!args_.valid.has(row)) return;
    const ScaleRow at = args_.scale_row_of(row, report_);
    if (!at.there) return;
    const int64_t scales = std::min(group + count, args_.scale_groups);
    for (int64_t g = group; g < scales; ++g) args_.store_scale(at.row, g, 0);
    pad_codes(row, group, count);
    fill_behind(row, at, group, count);
  }

  void pad_codes(int64_t row, int64_t group, int64_t count) const {
    const int64_t codes = std::min(group + count, args_.code_groups) - group;
    if (codes > 0) __builtin_memset(codes_at(row, group), 0, static_cast<size_t>(codes * group_bytes()));
  }

  // Rows behind the last one: of scales, up to a whole tile, and of codes.
  void fill_behind(int64_t row, const ScaleRow& at, int64_t group, int64_t count) const {
    if (args_.tile_bits && at.last)
      for (int64_t g = group; g < std::min(group + count, args_.scale_groups); ++g) args_.clear_behind(at, g);
    if (row != args_.rows - 1) return;
    const int64_t codes = std::min(count, args_.code_groups - group);
    for (int64_t r = row + 1; codes > 0 && r <= row + args_.zero_rows; ++r)
      __builtin_memset(codes_at(r, group), 0, static_cast<size_t>(codes * group_bytes()));
  }

  const T* values(int64_t row, int64_t first, int64_t count) {
    const T* const gate = static_cast<const T*>(args_.input) + args_.input_rows.offset(row) + first;
    if (args_.source == RowSource::kElements) return gate;
    T* const to = reinterpret_cast<T*>(values_.data());
    const T* const up = gate + args_.width;
    if (args_.source == RowSource::kSiluAndMul) {
      each_pair(0, count,
                [=](int64_t i, int64_t some) { store_pair(to + i, exact_silu(load_pair<T>(gate + i, some)), some); });
      each_pair(0, count, [=](int64_t i, int64_t some) {
        const Pair<T> factor = load_pair<T>(up + i, some) + 0.0f;  // -0 counts as 0
        store_pair(to + i, load_pair<T>(static_cast<const T*>(to) + i, some) * factor, some);
      });
    } else {
      each_pair(0, count, [=, situ = Situ{plain(args_.beta), plain(args_.linear_beta)}](int64_t i, int64_t some) {
        store_pair(to + i, situ(load_pair<T>(gate + i, some), load_pair<T>(up + i, some)), some);
      });
    }
    return to;
  }

  const GroupQuantArgs& args_;
  const std::vector<BlockTables<T>>& tables_;
  const Reporter report_;
  const bool nibbles_;
  const int64_t real_, at_once_;
  const float given_;
  const bool rows_in_lines_;  // each row of codes begins with a cache line
  const TileEncoder<T, TimesInverse, 448> tiles_;
  LineWriter writer_;
  std::vector<Line> values_;
  bool in_lines_ = false;  // scales go to lines_, for a piece that begins with first_group_
  int64_t first_group_ = 0;
  struct alignas(kLine) {
    uint32_t words[kRowsOfLine];
  } lines_[kAtOnce];
  int64_t ahead_ = kAhead<T>;  // from the elements that are encoded to those that are prefetched
  struct alignas(kLine) {
    uint8_t bytes[kElementsAtOnce];
  } codes_;  // on their way past the caches
};

}  // namespace

void group_quant_cpu(const GroupQuantArgs& args, const Launch& launch) {
  constexpr int64_t kElementsWorthAThread = 8192;
  const Reporter report = launch.reporter(args.of_experts.report);
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    const int64_t experts = args.globals ? args.of_experts.experts : 1;
    std::vector<BlockTables<T>> tables;
    for (int64_t e = 0; e < experts; ++e)
      tables.emplace_back(args, args.globals ? args.globals[e] : float{args.given}, args.rows * args.width / experts);
    if (Groups<T>::by_lines(args)) {
      const int64_t pieces = Groups<T>(args, tables, report).pieces();
      const int64_t elements = std::max<int64_t>(1, args.rows * args.width);  // there may be padding alone
      return parallel_for(pieces, std::max<int64_t>(1, pieces * kElementsWorthAThread / elements),
                          [&](int64_t begin, int64_t end) { Groups<T>(args, tables, report).take_pieces(begin, end); });
    }
    parallel_for(args.rows * args.groups(), std::max<int64_t>(1, kElementsWorthAThread / args.group_size),
                 [&](int64_t begin, int64_t end) { Groups<T>(args, tables, report)(begin, end); });
  });
}

}  // namespace pykv::PYKV_ISA
