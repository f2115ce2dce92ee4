// Twin of group_quant.cu: some groups of a row at once.  First their numbers, if an activation makes them, then the largest of
// all, then all scales, then all codes: what one waits for is worked out while others are.
//
// Arithmetic and the work of each group bound them.  With AVX-512 32 codes of bf16 take 16 (four bits) to 23 instructions, what finds the largest 2 to 6,
// and a scale a division, where a Zen 4 begins two a cycle and copies as much in 8 cycles.
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

constexpr int64_t kBlock = 16;  // of four-bit codes
constexpr int64_t kElementsAtOnce = 4096;

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

// A product that is rounded before it is added to anything.
inline Floats rounded_alone(Floats v) {
#if defined(__aarch64__)
  asm volatile("" : "+w"(v));
#elif defined(__AVX512F__)
  asm volatile("" : "+v"(v));
#else
  asm volatile("" : "+x"(v));
#endif
  return v;
}

// By how much such codes are wrong: the sum of the squares, of every fourth one after another, then of the four.
template <class T>
inline float error_of(const T* from, float factor, float unit) {
  using Fours = float __attribute__((vector_size(16)));
  Fours sums{};
  for (int64_t i = 0; i < kBlock; i += kWidth) {
    const Floats x = abs(load(from + i));
    const Words code = e2m1_of(lesser(x * factor, splat(6.0f)));
    const Floats d = x - rounded_alone(values_of_e2m1(code) * unit), squares = rounded_alone(d * d);
    Fours fours[kWidth / 4];
    __builtin_memcpy(fours, &squares, sizeof fours);
    for (const Fours& four : fours) sums += four;
  }
  return (sums[0] + sums[2]) + (sums[1] + sums[3]);
}

// Scales of up to kWidth groups, as stored, and their factors.
struct Scales {
  uint32_t stored[kWidth];
  float factors[kWidth];

  void find(const ScaleRule& rule, const float* most, float given, float target, int64_t groups) {
    if (rule.kind == QuantScale::kE4M3) return find_e4m3(load(most), given, target);
    if (rule.kind == QuantScale::kMx && rule.exponent != ExponentRule::kVllm) return find_mx(rule, load(most));
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
    const Words code = wanted == wanted ? narrow_e4m3<Floats, Words>(abs(wanted)) & 0x7fu : Words{};
    const Floats factor = 1.0f / (widen_e4m3<Floats>(code) * (1.0f / std::fabs(global)));
    const Words sign = global < 0.0f ? Words{} + 0x80u : Words{};
    const Words all = code == 0u ? Words{} : code | sign;
    __builtin_memcpy(stored, &all, sizeof all);
    store(factors, code == 0u ? Floats{} : lesser(factor, splat(__FLT_MAX__)));
  }
};

// Codes of four bits by tables (cpu/nvfp4_stairs.h), below one global scale; for so many elements, since few are not worth
// them.
template <class T>
class BlockTables {
 public:
  BlockTables(const GroupQuantArgs&, float, int64_t) {}
  bool encode(uint8_t*, const T*, const Scales&, const float*, int64_t) const { return false; }
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
  bool encode(uint8_t* codes, const T* from, const Scales& scales, const float* inside, int64_t count) const {
    if (!there_ || count != kWidth) return false;
    if (_mm512_cmp_ps_mask(load(inside), splat(INFINITY), _CMP_LT_OQ) != 0xffff) return false;
    uint8_t bytes[2 * kWidth] = {};
    Words stored = load_raw<Words>(scales.stored);
    stored = mx_ ? stored * 0x101u : stored & 0x7fu;  // of mx a scale is that of two blocks of 16
    if (mx_) {
      const __m256i twice = _mm512_maskz_cvtepi32_epi16(0xffff, __builtin_bit_cast(__m512i, stored));
      __builtin_memcpy(bytes, &twice, sizeof twice);
    } else {
      const Bytes some = narrow_to_bytes(stored);
      __builtin_memcpy(bytes, &some, sizeof some);
    }
    if (!stairs_.have(bytes, 2 * kWidth)) return false;
    const int fours = mx_ ? kWidth / 2 : kWidth / 4;
    const T* places[kWidth / 2];
    for (int i = 0; i < fours; ++i) places[i] = from + i * kNvfp4Four;
    stairs_(codes, places, fours, bytes, kAhead);
    return true;
  }

 private:
  static constexpr int64_t kWorthTables = 1 << 16, kAhead = 1024;

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
        at_once_(std::clamp<int64_t>(kElementsAtOnce / args.group_size, 1, kWidth)),
        given_(args.given),
        tiles_(args.codes == QuantCode::kE4M3 ? args.rows * args.width : 0) {
    if (args.source != RowSource::kElements) values_.resize(at_once_ * args.group_size * sizeof(T) / sizeof(Line) + 2);
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
  int64_t group_bytes() const { return nibbles_ ? args_.group_size / 2 : args_.group_size; }
  uint8_t* codes_at(int64_t row, int64_t group) const {
    return static_cast<uint8_t*>(args_.out) + args_.out_rows.offset(row) + group * group_bytes();
  }

  void encode(int64_t row, int64_t group, int64_t count) {
    const int64_t n = args_.group_size;
    if (!args_.is_valid(row)) {
      if (args_.fill_scales)
        for (int64_t g = group; g < group + count; ++g) args_.store_scale(row, g, bits_of(1.0f));
      return;
    }
    const ScaleRow at = args_.scale_row_of(row, report_);
    if (!at.there) return;
    const T* const from = values(row, group * n, count * n);
    float most[kWidth], inside[kWidth];
    find_largest(most, inside, from, n, count);
    const float given = args_.globals ? args_.globals[at.expert] : given_;
    Scales scales;
    scales.find(args_.rule, most, given, 6.0f, count);
    if (args_.four_over_six) choose(scales, from, most, given, count);
    uint8_t* const codes = codes_at(row, group);
    const bool done = nibbles_ ? tables_[args_.globals ? at.expert : 0].encode(codes, from, scales, inside, count)
                               : encode_pairs(codes, from, n, scales.stored, inside, count);
    for (int64_t g = 0; g < count && !done; ++g) {
      const T* x = from + g * n;
      uint8_t* to = codes + g * group_bytes();
      if (nibbles_) {
        for (int64_t i = 0; i < n; i += kBlock) store_nibbles(to + i / 2, x + i, scales.factors[g]);
      } else {
        encode_bytes(to, x, n, {scales.stored[g], scales.factors[g]}, inside[g]);
      }
    }
    store_scales(at.row, group, count, scales.stored);
    fill_behind(row, at, group, count);
  }

  // Bytes in tiles by fours, and bytes side by side, at once.
  void store_scales(int64_t row, int64_t group, int64_t count, const uint32_t* stored) const {
    const bool bytes = args_.rule.kind == QuantScale::kMx || args_.rule.kind == QuantScale::kE4M3;
    uint8_t* const scales = static_cast<uint8_t*>(args_.scales);
    int64_t g = 0;
    if (bytes && args_.tile_bits && group % 4 == 0) {
      for (; g + 4 <= count; g += 4) {
        const uint8_t four[] = {static_cast<uint8_t>(stored[g]), static_cast<uint8_t>(stored[g + 1]),
                                static_cast<uint8_t>(stored[g + 2]), static_cast<uint8_t>(stored[g + 3])};
        __builtin_memcpy(scales + swizzled_place(row, group + g, args_.tiles, args_.tile_bits), four, sizeof four);
      }
    } else if (bytes && count == kWidth && args_.scale_group == 1 && !args_.tile_bits) {
      const Bytes all = narrow_to_bytes(load_raw<Words>(stored) & 0xffu);
      __builtin_memcpy(scales + args_.scale_rows.offset(row) + group, &all, sizeof all);
      return;
    }
    for (; g < count; ++g) args_.store_scale(row, group + g, stored[g]);
  }

  // mxfp8 of bf16 by tables, for all blocks at once.
  bool encode_pairs(uint8_t* to, const T* x, int64_t n, const uint32_t* stored, const float* inside,
                    int64_t count) const {
    if (n != kPair || args_.rule.kind != QuantScale::kMx || args_.codes != QuantCode::kE4M3) return false;
    bool finite = true;
    for (int64_t g = 0; g < count; ++g) finite &= inside[g] < INFINITY;
    return finite && tiles_.divide_pairs_by_powers(reinterpret_cast<e4m3*>(to), x, count, stored);
  }

  // E4M3 of bf16 by tables, where the scale is a power of two: those of all scales are more than a first-level cache holds.
  void encode_bytes(uint8_t* to, const T* x, int64_t n, GroupScale scale, float inside) const {
    if (args_.codes == QuantCode::kE4M3 && inside < INFINITY && args_.rule.kind != QuantScale::kFloat &&
        tiles_.divide_by_power_of_two(reinterpret_cast<e4m3*>(to), x, n, 1.0f / scale.factor))
      return;
    codes_times(args_.codes, to, x, n, scale.factor, is_inside(inside));
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
    for (int64_t g = 0; g < count; ++g) {
      const T* const x = from + g * kBlock;
      const bool closer = error_of(x, others.factors[g], others.unit(g, inverse)) <
                          error_of(x, scales.factors[g], scales.unit(g, inverse));
      // Without a branch, which would be taken as often as not.
      scales.stored[g] = closer ? others.stored[g] : scales.stored[g];
      scales.factors[g] = closer ? others.factors[g] : scales.factors[g];
    }
  }

  // Groups of padding.
  void pad(int64_t row, int64_t group, int64_t count) const {
    if (!args_.is_valid(row)) return;
    const ScaleRow at = args_.scale_row_of(row, report_);
    if (!at.there) return;
    const int64_t scales = std::min(group + count, args_.scale_groups),
                  codes = std::min(group + count, args_.code_groups);
    for (int64_t g = group; g < scales; ++g) args_.store_scale(at.row, g, 0);
    if (codes > group) __builtin_memset(codes_at(row, group), 0, static_cast<size_t>((codes - group) * group_bytes()));
    fill_behind(row, at, group, count);
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
  const TileEncoder<T, TimesInverse, 448> tiles_;
  std::vector<Line> values_;
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
    parallel_for(args.rows * args.groups(), std::max<int64_t>(1, kElementsWorthAThread / args.group_size),
                 [&](int64_t begin, int64_t end) { Groups<T>(args, tables, report)(begin, end); });
  });
}

}  // namespace pykv::PYKV_ISA
