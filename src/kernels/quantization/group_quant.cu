// codes = code(y * factor), scale and factor from the largest |y| of each group of neighbours in a row (core/codes.h); y = input,
// or silu(gate) * up or situ(gate, up), rounded to the dtype as the activation alone rounds it.
//
// Memory-bound: the floor is each byte of input and codes moved once.  The lanes of a group have 16 elements each, a thread
// those of two groups, all loaded before the first is used: 64 bytes of a 16-bit dtype.  Bytes are stored by packs that
// neighbouring lanes have side by side; of four-bit codes a lane has 16 neighbours, as many as share an nvfp4 scale, and eight
// bytes.  Groups that do not fill their lanes, or rows that are not aligned, take the general kernel.
#include <bit>

#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"
#include "cuda/e2m1.cuh"
#include "cuda/largest.cuh"
#include "cuda/quantise.cuh"
#include "cuda/reduce.cuh"
#include "cuda/silu.cuh"
#include "quantization/group_quant.h"
#include "quantization/packs.cuh"

namespace pykv {
namespace {

constexpr int kThreads = 128, kElements = kE2m1AtOnce;
constexpr int groups_at_once(bool whole) { return whole ? 2 : 1; }  // of a thread
template <class T>
constexpr int kPacks = kElements / kPackSize<T>;

struct Plan {
  Divider groups;  // of a row
  uint32_t total;
  int lane_bits;
  bool aligned;
};

template <class T>
struct Elements {
  using Raw = Pack<T>;
  __device__ explicit Elements(const GroupQuantArgs&) {}
  __device__ static Raw load(const T* from, int64_t, int count, bool aligned) {
    return load_pack(from, count, aligned);
  }
  __device__ static void prefetch(const T* from, int64_t) { pykv::prefetch(from); }
  __device__ Pack<T> value(const Raw& raw) const { return raw; }
};

template <class T>
struct Gated {
  struct Raw {
    Pack<T> gate, up;
  };
  __device__ static Raw load(const T* from, int64_t width, int count, bool aligned) {
    return {load_pack(from, count, aligned), load_pack(from + width, count, aligned)};
  }
  __device__ static void prefetch(const T* from, int64_t width) {
    pykv::prefetch(from);
    pykv::prefetch(from + width);
  }
};

template <class T>
struct SiluAndMul : Gated<T> {
  __device__ explicit SiluAndMul(const GroupQuantArgs&) {}
  __device__ Pack<T> value(const typename Gated<T>::Raw& raw) const { return silu_and_mul(raw.gate, raw.up); }
};

template <class T>
struct SituAndMul : Gated<T>, Situ {
  __device__ explicit SituAndMul(const GroupQuantArgs& args) : Situ(args.beta, args.linear_beta) {}
  __device__ Pack<T> value(const typename Gated<T>::Raw& raw) const {
    auto x = to_floats(raw.gate);
    const auto up = to_floats(raw.up);
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) x[i] = product(activation(x[i]), up[i]);
    return round_to<T>(x);
  }
};

// Where a group is, and what is to be done with it.
struct Place {
  int64_t row, group;
  bool there;    // in the grid at all
  bool numbers;  // has any: is no padding, nor a row that is not valid
};

// By how much the codes are wrong: the sum of the squares, of every fourth one after another, then of the four.
template <class T>
__device__ float error_of(const Pack<T> (&y)[kPacks<T>], uint2 codes, float unit) {
  float sums[4] = {};
#pragma unroll
  for (int k = 0; k < kPacks<T>; ++k) {
    const auto x = to_floats(y[k]);
#pragma unroll
    for (int i = 0; i < kPackSize<T>; ++i) {
      const int e = k * kPackSize<T> + i;
      const uint32_t code = (e < 8 ? codes.x : codes.y) >> (e % 8 * 4) & 7u;
      const float value =
          code < 2 ? 0.5f * static_cast<float>(code) : __uint_as_float((code >> 1) + 126u << 23 | (code & 1u) << 22);
      const float d = __fsub_rn(fabsf(x[i]), __fmul_rn(value, unit));
      sums[e % 4] = __fadd_rn(sums[e % 4], __fmul_rn(d, d));
    }
  }
  return __fadd_rn(__fadd_rn(sums[0], sums[2]), __fadd_rn(sums[1], sums[3]));
}

template <class T>
__device__ uint2 nibbles_of(const Pack<T> (&y)[kPacks<T>], float factor) {
  uint32_t words[4 * sizeof(T)];
  __builtin_memcpy(words, y, sizeof words);
  float scaled[kElements];
  e2m1_multiply<T>(words, factor, scaled);
#pragma unroll
  for (float& v : scaled) v = fminf(v, 6.0f);
  return e2m1_codes<T>(words, scaled);
}

// kWhole: each lane of a group has exactly 16 elements, aligned.
template <class T, class Source, bool kNibbles, bool kWhole>
__global__ __launch_bounds__(kThreads) void group_quant_kernel(const __grid_constant__ GroupQuantArgs args,
                                                               const __grid_constant__ Plan plan, Reporter report) {
  constexpr int kSize = kPackSize<T>, kCount = kPacks<T>, kGroups = groups_at_once(kWhole);
  constexpr bool kSideBySide = kWhole && !kNibbles;  // packs of neighbouring lanes
  const int lanes = 1 << plan.lane_bits, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int size = static_cast<int>(args.group_size);
  const uint32_t teams = kThreads >> plan.lane_bits;
  const uint32_t first = blockIdx.x * (teams * kGroups) + (threadIdx.x >> plan.lane_bits);
  const int64_t real_groups = args.width / args.group_size;
  // Of the group: pack k of the lane's 16 elements number `chunk`.
  const auto element = [&](int k, int chunk) {
    return kSideBySide ? (k * lanes + lane) * kSize : (chunk * lanes + lane) * kElements + k * kSize;
  };
  const T* from[kGroups];
  Place places[kGroups];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const uint32_t n = first + j * teams;
    uint32_t group;
    Place& at = places[j];
    at.there = n < plan.total;
    at.row = plan.groups(at.there ? n : 0, group);
    at.group = group;
    at.numbers = at.there && at.group < real_groups;
    from[j] = static_cast<const T*>(args.input) + args.input_rows.offset(at.row) + at.group * args.group_size;
    if (kWhole && at.numbers && comes_early()) {
#pragma unroll
      for (int k = 0; k < kCount; ++k) Source::prefetch(from[j] + element(k, 0), args.width);
    }
  }
  begin_dependent();

  const bool aligned = kWhole || plan.aligned;
  const Source source(args);
  typename Source::Raw raw[kGroups][kCount];
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    if (places[j].there && args.valid.counts.data) places[j].numbers &= args.is_valid(places[j].row);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      raw[j][k] = {};
      if (places[j].numbers)
        raw[j][k] = Source::load(from[j] + element(k, 0), args.width, kWhole ? kSize : size - element(k, 0), aligned);
    }
  }
  const float global = args.rule.kind == ScaleKind::kE4M3 && !args.globals ? float{args.global} : 1.0f;
#pragma unroll
  for (int j = 0; j < kGroups; ++j) {
    const Place at = places[j];
    Pack<T> y[kCount];
#pragma unroll
    for (int k = 0; k < kCount; ++k) y[k] = source.value(raw[j][k]);
    float most = largest_of(y);
    const int chunks = kWhole ? 1 : (size + lanes * kElements - 1) / (lanes * kElements);
    const auto read_again = [&](int chunk, Pack<T>(&to)[kCount]) {
#pragma unroll
      for (int k = 0; k < kCount; ++k)
        to[k] = source.value(Source::load(from[j] + element(k, chunk), args.width, size - element(k, chunk), aligned));
    };
    if constexpr (!kWhole) {
      for (int chunk = 1; chunk < chunks && at.numbers; ++chunk) {
        Pack<T> more[kCount];
        read_again(chunk, more);
        most = fmaxf(most, largest_of(more));
      }
    }
    most = warp_reduce(most, lanes, Maximum());
    if (!at.there) continue;
    if (args.valid.counts.data && !at.numbers && at.group < real_groups) {
      if (args.fill_scales && lane == 0) args.store_scale(at.row, at.group, __float_as_uint(1.0f));
      continue;
    }
    const ScaleRow scale_row = args.scale_row_of(at.row, report);
    if (!scale_row.there) continue;
    const float g = args.globals ? args.globals[scale_row.expert] : global;
    GroupScale scale = args.rule(most, g, 6.0f);
    uint2 nibbles{};
    if constexpr (kNibbles) {
      nibbles = nibbles_of(y, scale.factor);
      if (args.four_over_six) {
        const GroupScale other = args.rule(most, g, 4.0f);
        const uint2 others = nibbles_of(y, other.factor);
        const float inverse = 1.0f / fabsf(g);
        const auto unit = [&](const GroupScale& s) { return __fmul_rn(magnitude_of_e4m3(s.stored & 0x7fu), inverse); };
        if (error_of(y, others, unit(other)) < error_of(y, nibbles, unit(scale))) scale = other, nibbles = others;
      }
    }
    if (lane == 0 && at.group < args.scale_groups) {
      args.store_scale(scale_row.row, at.group, at.numbers ? scale.stored : 0u);
      if (args.tile_bits && scale_row.last) args.clear_behind(scale_row, at.group);
    }
    if (at.group >= args.code_groups) continue;
    const int zero_rows = at.row == args.rows - 1 ? static_cast<int>(args.zero_rows) : 0;
    uint8_t* const out = static_cast<uint8_t*>(args.out);
    for (int extra = 0; extra <= zero_rows; ++extra) {
      uint8_t* const to = out + args.out_rows.offset(at.row + extra) + at.group * (kNibbles ? size / 2 : size);
      const bool zero = extra > 0;
      if constexpr (kNibbles) {
        const uint2 codes = zero || !at.numbers ? uint2{} : nibbles;
        Vec<uint8_t, 8> bytes;
        bytes.words[0] = codes.x;
        bytes.words[1] = codes.y;
        store_codes(to + lane * 8, bytes, 8, aligned);
      } else {
        for (int chunk = 0; chunk < chunks; ++chunk) {
          if (chunk > 0) {
            if (at.numbers) read_again(chunk, y);
          }
#pragma unroll
          for (int k = 0; k < kCount; ++k) {
            const int e = element(k, chunk);
            auto codes = codes_times(args.codes, y[k], scale.factor, !(scale.factor > 0.0f));
            if (zero) codes = {};
            store_codes(to + e, codes, kWhole ? kSize : size - e, aligned);
          }
        }
      }
    }
  }
}

template <class T, class Source, bool kNibbles>
void launch_kernel(const GroupQuantArgs& args, const Launch& launch) {
  constexpr int64_t kItem = sizeof(T), kCode = kNibbles ? 2 : 1;
  const int64_t groups = args.groups(), total = groups * args.rows,
                chunks = (args.group_size + kElements - 1) / kElements;
  if (args.group_size > INT32_MAX / 4 || groups > INT32_MAX || args.rows > (INT32_MAX - 4 * kThreads) / groups)
    fail(PYKV_NOT_IMPLEMENTED, "input: 2^31 groups in one call are not supported");
  const int lanes = static_cast<int>(std::bit_ceil(static_cast<uint64_t>(chunks < 32 ? chunks : 32)));
  const bool aligned = rows_aligned(kAccessBytes, args.input, args.input_rows, kItem) &&
                       args.width * kItem % kAccessBytes == 0 && args.group_size * kItem % kAccessBytes == 0 &&
                       rows_aligned(kNibbles ? 8 : kPackSize<T>, args.out, args.out_rows, 1);
  const Plan plan{Divider(groups), static_cast<uint32_t>(total), std::countr_zero(static_cast<unsigned>(lanes)),
                  aligned};
  const Reporter report = launch.reporter(args.of_experts.report);
  const bool whole = aligned && args.group_size == int64_t{lanes} * kElements && args.group_size / kCode % 8 == 0;
  const int64_t at_once = int64_t{kThreads / lanes} * groups_at_once(whole);
  const auto start = [&](auto kernel) {
    launch_dependent(kernel, static_cast<unsigned>((total + at_once - 1) / at_once), kThreads, launch, "group_quant",
                     args, plan, report);
  };
  if (whole) {
    start(group_quant_kernel<T, Source, kNibbles, true>);
  } else {
    start(group_quant_kernel<T, Source, kNibbles, false>);
  }
}

template <class T, class Source>
void run(const GroupQuantArgs& args, const Launch& launch) {
  if (args.codes == CodeKind::kE2M1) {
    launch_kernel<T, Source, true>(args, launch);
  } else {
    launch_kernel<T, Source, false>(args, launch);
  }
}

}  // namespace

void group_quant_cuda(const GroupQuantArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    switch (args.source) {
      case RowSource::kElements:
        return run<T, Elements<T>>(args, launch);
      case RowSource::kSiluAndMul:
        return run<T, SiluAndMul<T>>(args, launch);
      case RowSource::kSituAndMul:
        return launch_kernel<T, SituAndMul<T>, false>(args, launch);
    }
  });
}

}  // namespace pykv
