// nvfp4, mxfp4 and mxfp8 of numbers of 16 bits, where every block is there: a thread has 32 neighbours of some rows, two blocks of
// nvfp4 or one of the others of each.  Other calls go to group_quant_any.cuh.
//
// While an H200 moves an element and its code, it issues 18 instructions, of which the conversion to four bits takes 8 where
// scales are any numbers, and 5 where they are powers of two.  What is done once for a thread is shared by all of its rows.
//
// Scales in tiles: a warp has 8 rows of 128 elements each at once, those whose words of four scales are neighbours, so that it
// fills whole sectors of 32 bytes; it has rows of padding, too, and clears their scales.  Those of experts lie wherever each
// begins: a thread looks up the expert of its first row while it waits for its numbers, and the warp that has the last row of one
// clears what lies behind it.
#pragma once

#include "cuda/approximate.cuh"
#include "quantization/group_sources.cuh"

namespace pykv {

inline constexpr int kBlockThreads = 64, kMostThreads = 128, kUnit = 32;  // kMostThreads: of blocks of experts

struct BlockPlan {
  Divider across;                 // units of a row; in tiles fours of them
  uint32_t total;                 // threads
  uint32_t rows;                  // with padding
  uint32_t row_step;              // between a thread's rows
  int64_t code_step, scale_step;  // bytes between those
  bool pairs;                     // the scales of a unit may be stored as one
};

// Where a thread's first row is: of its scales the distance in bytes from the first one.
struct BlockPlace {
  uint32_t row, unit, group;
  int64_t scale;
};

// In tiles of 128, of the eight rows that a warp has at once, row m's distance from the first.
__device__ inline uint32_t row_of_octet(uint32_t m) { return m / 4 + m % 4 * 32; }

template <int kRows, int kGroups>
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
    at.row = octet / 16 * 128 + octet % 16 * 2 + row_of_octet(m);
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

// Zeros for the scales behind the last rows of experts that lanes of the warp have, up to whole tiles of 128 rows.
__device__ inline void clear_behind_last(const GroupQuantArgs& args, bool last, int64_t row, uint32_t group) {
  for (uint32_t lanes = __ballot_sync(0xffffffffu, last && group % 4 == 0); lanes != 0; lanes &= lanes - 1) {
    const int from = __ffs(static_cast<int>(lanes)) - 1, lane = static_cast<int>(threadIdx.x) % 32;
    const int64_t of = __shfl_sync(0xffffffffu, row, from);
    const uint32_t four = __shfl_sync(0xffffffffu, group, from) / 4;
    // A lane has rows `lane`, lane + 32, ..., which are neighbours.
    auto* const words = static_cast<uint32_t*>(args.scales) + ((of >> 7) * args.tiles + four) * 128 + lane * 4;
    const int first = (static_cast<int>(of & 127) + 32 - lane) / 32;  // of those behind
    if (first == 0) {
      *reinterpret_cast<uint4*>(words) = uint4{};
    } else {
      for (int i = first; i < 4; ++i) words[i] = 0;
    }
  }
}

// What a block finds once for each of its rows of experts.
struct ExpertRow {
  int64_t row;    // among the scales
  int64_t scale;  // of these the first one's distance in bytes
  float global;
  bool there, last;
};

// kExperts: rows may be those of experts.  Then all warps of a block have the same rows, and the first threads look them up while
// numbers are on their way: done by every warp it took a fifth of the time.
template <class T, class Source, QuantScale kScale, QuantCode kCodes, bool kChoose, bool kExperts, int kRows,
          int kMinBlocks>
__global__ __launch_bounds__(kMostThreads, kMinBlocks) void block_kernel(const __grid_constant__ GroupQuantArgs args,
                                                                         const __grid_constant__ BlockPlan plan,
                                                                         Reporter report) {
  constexpr int kSize = kPackSize<T>, kCount = kLanePacks<T>, kGroups = kScale == QuantScale::kE4M3 ? 2 : 1;
  constexpr int kBytes = kCodes == QuantCode::kE2M1 ? kUnit / 2 : kUnit;
  __shared__ ExpertRow expert_rows[kExperts ? 8 * kRows : 1];
  const uint32_t n = blockIdx.x * blockDim.x + threadIdx.x;
  const bool there = n < plan.total;
  const BlockPlace at = place_of<kRows, kGroups>(args, plan, there ? n : 0);
  const bool numbers = at.unit * kUnit < args.width;
  const uint32_t last = static_cast<uint32_t>(args.rows) - 1;
  const T* const from = static_cast<const T*>(args.input);
  const bool of_experts = kExperts && args.of_experts.first.data;
  const T* rows[kRows];  // those that are not there read another one
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    rows[i] =
        from + (min(at.row + i * plan.row_step, last) * args.input_rows.stride0 + (numbers ? at.unit * kUnit : 0));
    if (comes_early()) {
      Source::prefetch(rows[i], args.width);
      Source::prefetch(rows[i] + kUnit / 2, args.width);
    }
  }
  if (of_experts && comes_early(1) && threadIdx.x < 3) {
    prefetch(threadIdx.x == 0   ? args.of_experts.first.data
             : threadIdx.x == 1 ? args.of_experts.scales_first.data
             : args.globals     ? args.globals
                                : args.of_experts.first.data);
  }
  begin_dependent();

  const Source source(args);
  typename Source::Raw raw[kRows][2][kCount];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int k = 0; k < 2 * kCount; ++k) raw[i][k / kCount][k % kCount] = Source::load(rows[i] + k * kSize, args.width);
  float global = 1.0f;
  if (of_experts) {
    if (threadIdx.x < 8 * kRows) {
      const uint32_t m = threadIdx.x % 8, i = threadIdx.x / 8;
      const uint32_t row = min(at.row - row_of_octet(threadIdx.x / 4) + row_of_octet(m) + i * plan.row_step, last);
      const ScaleRow found = args.scale_row_of(row, report);
      expert_rows[threadIdx.x] = {found.row, swizzled_place(found.row, 0, args.tiles, 7),
                                  kGroups == 2 ? args.globals[found.expert] : 1.0f, found.there, found.last};
    }
    __syncthreads();
  } else if (kGroups == 2) {
    global = float{args.given};
  }
  Nvfp4Rule rule(global);
  uint8_t* to = static_cast<uint8_t*>(args.out) + (at.row * args.out_rows.stride0 + at.unit * kBytes);
  uint8_t* scales = static_cast<uint8_t*>(args.scales) + at.scale;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const uint32_t row = at.row + i * plan.row_step;
    bool real = there && numbers && row <= last, scaled = there && row < plan.rows && at.group < args.scale_groups;
    if (of_experts) {
      const ExpertRow& mine = expert_rows[i * 8 + threadIdx.x / 4 % 8];
      if (kGroups == 2) {
        global = mine.global;
        rule = Nvfp4Rule(global);
      }
      real &= mine.there;
      scaled &= mine.there && row <= last;
      scales = static_cast<uint8_t*>(args.scales) + (mine.scale + at.group / 4 * 512 + at.group % 4);
      clear_behind_last(args, scaled && mine.last, mine.row, at.group);
    }
    Vec<uint8_t, 16> codes[kBytes / 16];
    GroupScale scale[2] = {};
    if (__any_sync(0xffffffffu, real)) {
      Pack<T> y[2][kCount];
#pragma unroll
      for (int k = 0; k < 2 * kCount; ++k) y[k / kCount][k % kCount] = source.value(raw[i][k / kCount][k % kCount]);
      encode_unit<kScale, kCodes, kChoose, T>(args, rule, global, y, codes, scale);
    }
    if (scaled) {
      const uint32_t first = real ? scale[0].stored : 0, second = real ? scale[1].stored : 0;
      if (kGroups == 2 && plan.pairs) {
        *reinterpret_cast<uint16_t*>(scales) = static_cast<uint16_t>(first | second << 8);
      } else {
        *scales = static_cast<uint8_t>(first);
        if (kGroups == 2) scales[args.tile_bits ? 1 : args.scale_group] = static_cast<uint8_t>(second);
      }
    }
    if (real) {
      store_vec(to, codes[0]);
      if constexpr (kBytes > 16) store_vec(to + 16, codes[1]);
    }
    to += plan.code_step;
    scales += plan.scale_step;
  }
}

}  // namespace pykv
