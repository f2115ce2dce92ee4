// nvfp4, mxfp4 and mxfp8 of numbers of 16 bits, where every block is there: a thread has 32 neighbours of a row, two blocks of nvfp4
// or one of the others.  Other calls go to group_quant_any.cuh.
//
// While an H200 moves an element and its code, it issues 18 instructions, of which the conversion to four bits takes 8 where
// scales are any numbers, and 5 where they are powers of two.
//
// Scales in tiles: a warp has 8 rows of 128 elements each at once, those whose words of four scales are neighbours, so that it
// fills whole sectors of 32 bytes; it has rows of padding, too, and clears their scales.  Those of experts: group_quant_experts.cuh.
#pragma once

#include "cuda/approximate.cuh"
#include "quantization/group_sources.cuh"

namespace pykv {

inline constexpr int kBlockThreads = 64, kUnit = 32;

struct BlockPlan {
  Divider across;      // units of a row; in tiles fours of them
  uint32_t total;      // threads
  uint32_t rows;       // with padding
  bool pairs;          // the scales of a unit may be stored as one
  uint32_t row_step;   // to the next row of a thread that has two
  int64_t scale_step;  // between their scales, bytes
};

// Where a thread's unit is, or the first of two: of its scales the distance in bytes from the first one.
struct BlockPlace {
  uint32_t row, unit, group;
  int64_t scale;
};

template <int kGroups, int kRows>
__device__ BlockPlace place_of(const GroupQuantArgs& args, const BlockPlan& plan, uint32_t n) {
  BlockPlace at;
  if (args.tile_bits == 0) {
    at.row = plan.across(n, at.unit) * kRows;
    at.group = at.unit * kGroups;
    at.scale = at.row * args.scale_rows.stride0 + at.group * args.scale_group;
    return at;
  }
  const uint32_t m = n / 4 % 8;
  uint32_t four;
  const uint32_t octet = plan.across(n / 32, four) * kRows;
  at.unit = four * 4 + n % 4;
  at.group = at.unit * kGroups;
  int64_t word;
  if (args.tile_bits == 7) {
    at.row = octet / 16 * 128 + octet % 16 * 2 + m / 4 + m % 4 * 32;
    word = (octet / 16 * args.tiles + at.group / 4) * 128 + octet % 16 * 8 + m;
  } else {
    at.row = octet * 8 + m;
    word = (octet * args.tiles + at.group / 4) * 8 + m;
  }
  at.scale = word * 4 + at.group % 4;
  return at;
}

// Codes of pairs of numbers by a factor that is a power of two: their products are exact.  most: what the magnitudes are bounded
// by, 6 by the factor's inverse.  As in e2m1_codes a code is the least of three lines, each rounded by the sum with a number that
// leaves no place behind the point.
template <class T>
__device__ uint2 nibbles_by_power_of_two(const Pack<T> (&y)[2], float factor, float most) {
  using P = Pair<T>;
  constexpr float kRound = std::is_same_v<T, half> ? 1024.0f : 128.0f;
  constexpr uint32_t kRoundBits = std::is_same_v<T, half> ? 0x6400u : 0x4300u;
  uint32_t words[8];
  __builtin_memcpy(words, y, sizeof words);
  const auto both = [](float x) { return as_pair<T>(word_from_floats<T>(x, x)); };
  const P one = both(factor), two = __hadd2_rn(one, one), half_ = __hmul2_rn(one, both(0.5f)), bound = both(most);
  const P round0 = both(kRound), round1 = both(kRound + 2.0f), round2 = both(kRound + 4.0f);
  const auto codes = [&](uint32_t word) {
    const P x = __hmin2(__habs2(as_pair<T>(word)), bound);
    return as_word(__hmin2(__hmin2(__hfma2(x, two, round0), __hfma2(x, one, round1)), __hfma2(x, half_, round2)));
  };
  // Of two words the codes as four nibbles in the lower half.
  constexpr uint32_t kExtra = kRoundBits * 0x10001u + (kRoundBits * 0x10001u << 8);
  const auto four = [&](int i) {
    const uint32_t apart = codes(words[i]) + (codes(words[i + 1]) << 8) - kExtra;
    return apart + (apart >> 12);
  };
  const uint2 packed{__byte_perm(four(0), four(2), 0x5410), __byte_perm(four(4), four(6), 0x5410)};
  return {packed.x | e2m1_signs<T, 0>(words), packed.y | e2m1_signs<T, 1>(words)};
}

// ScaleRule of e4m3 scales, for finite numbers below a global scale that leaves no product outside the range of normal ones.
class Nvfp4Rule {
 public:
  __device__ explicit Nvfp4Rule(float global)
      : magnitude_(fabsf(global)), inverse_(1.0f / magnitude_), sign_(global < 0.0f ? 0x80u : 0u) {}
  __device__ bool holds() const { return magnitude_ > 0x1p-80f && magnitude_ < 0x1p80f; }
  __device__ GroupScale operator()(float most, float inverse_target = 1.0f / 6.0f) const {
    const uint32_t code = e4m3_of_magnitude(magnitude_ * (most * inverse_target));
    const float unit = magnitude_of_e4m3(code) * inverse_, guess = reciprocal(unit);
    const float factor = __fmaf_rn(guess, -__fmaf_rn(unit, guess, -1.0f), guess);  // 1 / unit
    return code == 0 ? GroupScale{0, 0.0f} : GroupScale{code | sign_, factor};
  }
  __device__ float unit_of(const GroupScale& scale) const {
    return __fmul_rn(magnitude_of_e4m3(scale.stored & 0x7fu), inverse_);
  }

 private:
  float magnitude_, inverse_;
  uint32_t sign_;
};

// The codes of 32 numbers, and the scales of both halves; kChoose: of two for each, four over six.
template <QuantScale kScale, QuantCode kCodes, bool kChoose, class T>
__device__ void encode_unit(const GroupQuantArgs& args, const Nvfp4Rule& rule, float global,
                            const Pack<T> (&y)[2][kLanePacks<T>],
                            Vec<uint8_t, 16> (&codes)[kCodes == QuantCode::kE2M1 ? 1 : 2], GroupScale (&scale)[2]) {
  constexpr bool kNvfp4 = kScale == QuantScale::kE4M3;
  float most[2] = {__uint_as_float(largest_bits(y[0])), __uint_as_float(largest_bits(y[1]))};
  bool odd = max(__float_as_uint(most[0]), __float_as_uint(most[1])) >= kInfinity;
  if constexpr (kNvfp4) {
    odd |= !rule.holds();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = rule(most[half]);
      odd |= !(most[half] * scale[half].factor < 7.0f);
    }
  } else {
    scale[0] = scale[1] = args.rule.of_block(fmaxf(most[0], most[1]));
    if (kCodes == QuantCode::kE2M1 && std::is_same_v<T, half>) odd |= scale[0].factor > 16384.0f;  // half of what T has
  }
  const auto put = [&](auto nibbles, auto bytes) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if constexpr (kCodes == QuantCode::kE2M1) {
        const uint2 pair = nibbles(y[half], scale[half].factor);
        codes[0].words[2 * half] = pair.x;
        codes[0].words[2 * half + 1] = pair.y;
      } else {
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          const auto some = bytes(y[half][k], scale[half].factor);
          codes[half].words[2 * k] = some.words[0];
          codes[half].words[2 * k + 1] = some.words[1];
        }
      }
    }
  };
  const bool any_odd = __any_sync(0xffffffffu, odd);
  if (any_odd) {
#pragma unroll
    for (int half = 0; half < 2; ++half) most[half] = largest_of(y[half]);  // passes NaN over
    if constexpr (!kNvfp4) most[0] = most[1] = fmaxf(most[0], most[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) scale[half] = args.rule(most[half], global, 6.0f);
    put([](const auto& v, float factor) { return nibbles_of<T>(v, factor); },
        [](const auto& v, float factor) { return codes_times(kCodes, v, factor, !(factor > 0.0f)); });
  } else {
    put(
        [&](const auto& v, float factor) {
          if constexpr (kNvfp4) return nibbles_of<T, true>(v, factor);
          return nibbles_by_power_of_two<T>(v, factor, 6.0f * float_of(scale[0].stored << 23));
        },
        [](const auto& v, float factor) { return codes_inside<kCodes>(v, factor); });
  }
  if constexpr (kChoose) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint2 pair{codes[0].words[2 * half], codes[0].words[2 * half + 1]};
      if (any_odd) {
        choose_four_over_six(args, y[half], most[half], global, scale[half], pair);
      } else {
        const GroupScale other = rule(most[half], 1.0f / 4.0f);  // products are inside wherever those by the first are
        choose_closer<T, true>(y[half], other, rule.unit_of(other), rule.unit_of(scale[half]), scale[half], pair);
      }
      codes[0].words[2 * half] = pair.x;
      codes[0].words[2 * half + 1] = pair.y;
    }
  }
}

// kRows: of a thread, one or two.  Two share what a thread does once; with one there are more threads, which few tokens want.
template <class T, class Source, QuantScale kScale, QuantCode kCodes, bool kChoose, int kRows, int kMinBlocks>
__global__ __launch_bounds__(kBlockThreads, kMinBlocks) void block_kernel(const __grid_constant__ GroupQuantArgs args,
                                                                          const __grid_constant__ BlockPlan plan) {
  constexpr int kSize = kPackSize<T>, kCount = kLanePacks<T>, kGroups = kScale == QuantScale::kE4M3 ? 2 : 1;
  constexpr int kBytes = kCodes == QuantCode::kE2M1 ? kUnit / 2 : kUnit;
  const uint32_t n = blockIdx.x * blockDim.x + threadIdx.x;
  const bool there = n < plan.total;
  const BlockPlace at = place_of<kGroups, kRows>(args, plan, there ? n : 0);
  const bool numbers = at.unit * kUnit < args.width;
  const uint32_t last = static_cast<uint32_t>(args.rows) - 1;
  const auto row = [&](int r) { return at.row + r * plan.row_step; };
  // Those that are not there read another one's.
  const auto from = [&](int r) {
    return static_cast<const T*>(args.input) +
           (min(row(r), last) * args.input_rows.stride0 + (numbers ? at.unit * kUnit : 0));
  };
  if (comes_early()) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Source::prefetch(from(r), args.width);
      Source::prefetch(from(r) + kUnit / 2, args.width);
    }
  }
  begin_dependent();

  typename Source::Raw raw[kRows][2][kCount];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int k = 0; k < 2 * kCount; ++k) raw[r][k / kCount][k % kCount] = Source::load(from(r) + k * kSize, args.width);
  const float global = kGroups == 2 ? float{args.given} : 1.0f;
  const Nvfp4Rule rule(global);
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const bool real = there && numbers && row(r) <= last;
    Vec<uint8_t, 16> codes[kBytes / 16];
    GroupScale scale[2] = {};
    if (__any_sync(0xffffffffu, real)) {
      const Source source(args);
      Pack<T> y[2][kCount];
#pragma unroll
      for (int k = 0; k < 2 * kCount; ++k) y[k / kCount][k % kCount] = source.value(raw[r][k / kCount][k % kCount]);
      encode_unit<kScale, kCodes, kChoose, T>(args, rule, global, y, codes, scale);
    }
    if (there && row(r) < plan.rows && at.group < args.scale_groups) {
      uint8_t* const scales = static_cast<uint8_t*>(args.scales) + (at.scale + r * plan.scale_step);
      const uint32_t first = real ? scale[0].stored : 0, second = real ? scale[1].stored : 0;
      if (kGroups == 2 && plan.pairs) {
        *reinterpret_cast<uint16_t*>(scales) = static_cast<uint16_t>(first | second << 8);
      } else {
        *scales = static_cast<uint8_t>(first);
        if (kGroups == 2) scales[args.tile_bits ? 1 : args.scale_group] = static_cast<uint8_t>(second);
      }
    }
    if (real) {
      uint8_t* const to = static_cast<uint8_t*>(args.out) + (row(r) * args.out_rows.stride0 + at.unit * kBytes);
      store_vec(to, codes[0]);
      if constexpr (kBytes > 16) store_vec(to + 16, codes[1]);
    }
  }
}

}  // namespace pykv
