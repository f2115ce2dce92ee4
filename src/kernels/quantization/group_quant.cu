// codes = code(y * factor), scale and factor from the largest |y| of each group of neighbours in a row (core/codes.h); y = input,
// or silu(gate) * up or situ(gate, up), rounded to the dtype as the activation alone rounds it.
//
// Memory-bound: the floor is each byte of input and codes moved once.  While memory delivers an element of 16 bits and takes its
// code, an H200 issues 23 instructions, an H100 31: what a thread does once, for its addresses and its scale, is shared by as
// many elements as registers hold.  Of bytes a lane has kPacks packs of a group, side by side with its neighbours'; of four-bit
// codes it has 32 neighbours alone.  A warp whose numbers are all finite takes the short way.  Groups that do not fill their
// lanes, or rows that are not aligned, go to group_quant_any.cuh.
#include <bit>

#include "quantization/group_quant_any.cuh"
#include "quantization/group_quant_blocks.cuh"

namespace pykv {
namespace {

constexpr int kThreads = 128;

// Of a lane: as many packs as leave room for enough threads on an SM.
template <class T, class Source>
constexpr int kPacks = Source::kHalves == 2 ? 16 / kPackSize<T> : 4;
template <class T, class Source, bool kPlain>
constexpr int kBlocks = sizeof(T) == 4 || std::is_same_v<Source, SituAndMul<T>> ? 8
                        : std::is_same_v<Source, Elements<T>> || !kPlain        ? 10
                                                                                : 12;  // on an SM, at least

// Over the lanes of a group.
__device__ inline uint32_t largest_of_lanes(uint32_t most, int lane_bits) {
#pragma unroll
  for (int bit = 0; bit < 5; ++bit)
    if (bit < lane_bits) most = max(most, __shfl_xor_sync(0xffffffffu, most, 1 << bit));
  return most;
}

// One-byte codes.  kPlain: all groups are there, and have scales by strides.
template <class T, class Source, CodeKind kCodes, bool kPlain>
__global__ __launch_bounds__(kThreads, kBlocks<T, Source, kPlain>) void byte_group_kernel(
    const __grid_constant__ GroupQuantArgs args, const __grid_constant__ GroupPlan plan, Reporter report) {
  constexpr int kSize = kPackSize<T>, kCount = kPacks<T, Source>;
  const int lane_bits = plan.lane_bits, lane = static_cast<int>(threadIdx.x) & ((1 << lane_bits) - 1);
  const uint32_t n = blockIdx.x * (kThreads >> lane_bits) + (threadIdx.x >> lane_bits);
  const bool there = n < plan.total;  // others read the first group, since their warp finds its maxima with all lanes
  uint32_t group;
  const int64_t row = plan.groups(there ? n : 0, group);
  const int64_t first = static_cast<int64_t>(uint64_t{group} * static_cast<uint32_t>(args.group_size)) + lane * kSize;
  const int step = kSize << lane_bits;
  const T* from = static_cast<const T*>(args.input) + (args.input_rows.offset(row) + first);
  uint8_t* to = static_cast<uint8_t*>(args.out) + (args.out_rows.offset(row) + first);
  const bool real = kPlain || first < args.width;
  if (comes_early() && real) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) Source::prefetch(from + k * step, args.width);
  }
  have_ready(to);
  begin_dependent();

  const bool valid = kPlain || is_valid(args, plan, row);
  const Source source(args);
  typename Source::Raw raw[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    if (kPlain || (real && valid)) {
      raw[k] = Source::load(from + k * step, args.width);
    } else {
      raw[k] = {};
    }
  }
  Pack<T> y[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) y[k] = source.value(raw[k]);
  uint32_t most = largest_of_lanes(largest_bits(y), lane_bits);
  const bool any_odd = __any_sync(0xffffffffu, most >= kInfinity);
  if (any_odd) most = largest_of_lanes(__float_as_uint(largest_of(y)), lane_bits);  // passes NaN over
  if (!there) return;
  if (!kPlain && !valid) {
    if (args.fill_scales && real && lane == 0) args.store_scale(row, group, __float_as_uint(1.0f));
    return;
  }
  const ScaleRow scale_row = kPlain ? ScaleRow{row, 0, false, true} : args.scale_row_of(row, report);
  if (!scale_row.there) return;
  const GroupScale scale = args.rule(__uint_as_float(most), args.given, 1.0f);
  if (lane == 0) {
    if constexpr (kPlain) {
      const int64_t at = args.scale_rows.offset(row) +
                         (args.scale_four ? group / 4 * args.scale_four + group % 4 : group * args.scale_group);
      if (plan.scale_bytes) {
        static_cast<uint8_t*>(args.scales)[at] = static_cast<uint8_t>(scale.stored);
      } else {
        static_cast<uint32_t*>(args.scales)[at] = scale.stored;
      }
    } else if (group < args.scale_groups) {
      args.store_scale(scale_row.row, group, real ? scale.stored : 0u);
      if (args.tile_bits && scale_row.last) args.clear_behind(scale_row, group);
    }
  }
  if (!kPlain && group >= args.code_groups) return;
  if (any_odd) {
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      store_vec(to + k * step, codes_times(kCodes, y[k], scale.factor, !(scale.factor > 0.0f)));
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) store_vec(to + k * step, codes_inside<kCodes>(y[k], scale.factor));
  }
  if (!kPlain && row == args.rows - 1) {
    for (int64_t extra = 1; extra <= args.zero_rows; ++extra)
      for (int k = 0; k < kCount; ++k)
        store_vec(static_cast<uint8_t*>(args.out) + (args.out_rows.offset(row + extra) + first) + k * step,
                  Vec<uint8_t, kSize>{});
  }
}

// Four-bit codes of 16-bit numbers that block_kernel does not take: a thread has a unit of 32, two blocks of nvfp4 or one of mxfp4.
template <class T, class Source>
__global__ __launch_bounds__(kThreads, 7) void nibble_group_kernel(const __grid_constant__ GroupQuantArgs args,
                                                                   const __grid_constant__ GroupPlan plan,
                                                                   Reporter report) {
  constexpr int kSize = kPackSize<T>, kCount = kLanePacks<T>;
  const uint32_t n = blockIdx.x * kThreads + threadIdx.x;
  const bool there = n < plan.total;
  uint32_t unit;
  const int64_t row = plan.groups(there ? n : 0, unit);
  const int64_t first = int64_t{unit} * kUnit;
  const T* from = static_cast<const T*>(args.input) + (args.input_rows.offset(row) + first);
  uint8_t* to = static_cast<uint8_t*>(args.out) + (args.out_rows.offset(row) + first / 2);
  const bool real = first < args.width;
  if (comes_early() && real) {
    Source::prefetch(from, args.width);
    Source::prefetch(from + kUnit / 2, args.width);
  }
  have_ready(to);
  begin_dependent();

  const Source source(args);
  typename Source::Raw raw[2][kCount];
#pragma unroll
  for (int k = 0; k < 2 * kCount; ++k) {
    if (real) {
      raw[k / kCount][k % kCount] = Source::load(from + k * kSize, args.width);
    } else {
      raw[k / kCount][k % kCount] = {};
    }
  }
  const bool two = args.group_size < kUnit;
  const int64_t group = two ? 2 * int64_t{unit} : unit;
  const ScaleRow scale_row = args.scale_row_of(row, report);
  const float given = given_of(args, scale_row);
  Pack<T> y[2][kCount];
  uint32_t most[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) y[half][k] = source.value(raw[half][k]);
    most[half] = largest_bits(y[half]);
  }
  const bool any_odd = __any_sync(0xffffffffu, max(most[0], most[1]) >= kInfinity);
  if (any_odd) {
#pragma unroll
    for (int half = 0; half < 2; ++half) most[half] = __float_as_uint(largest_of(y[half]));  // passes NaN over
  }
  if (!two) most[0] = most[1] = max(most[0], most[1]);
  GroupScale scale[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) scale[half] = args.rule(__uint_as_float(most[half]), given, 6.0f);
  uint2 codes[2];
  // Infinity times a factor of 0 is NaN.
  const bool inside =
      __uint_as_float(most[0]) * scale[0].factor < 7.0f && __uint_as_float(most[1]) * scale[1].factor < 7.0f;
  if (any_odd || __any_sync(0xffffffffu, !inside)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) codes[half] = nibbles_of(y[half], scale[half].factor);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) codes[half] = nibbles_of<T, true>(y[half], scale[half].factor);
  }
  if (args.four_over_six) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      choose_four_over_six(args, y[half], __uint_as_float(most[half]), given, scale[half], codes[half]);
  }
  if (!there || !scale_row.there) return;
  if (group < args.scale_groups) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half > 0 && !two) break;
      args.store_scale(scale_row.row, group + half, real ? scale[half].stored : 0u);
      if (args.tile_bits && scale_row.last) args.clear_behind(scale_row, group + half);
    }
  }
  if (group >= args.code_groups) return;
  Vec<uint8_t, 16> bytes;
#pragma unroll
  for (int half = 0; half < 2; ++half) bytes.words[2 * half] = codes[half].x, bytes.words[2 * half + 1] = codes[half].y;
  store_vec(to, bytes);
}

template <class T>
struct Launcher {
  const GroupQuantArgs& args;
  const Launch& launch;
  bool aligned;

  Launcher(const GroupQuantArgs& args, const Launch& launch) : args(args), launch(launch) {
    constexpr int64_t kItem = sizeof(T);
    const bool nibbles = args.codes == CodeKind::kE2M1;
    aligned = rows_aligned(kAccessBytes, args.input, args.input_rows, kItem) &&
              args.width * kItem % kAccessBytes == 0 && args.group_size * kItem % kAccessBytes == 0 &&
              rows_aligned(nibbles ? 8 : kPackSize<T>, args.out, args.out_rows, 1);
  }

  template <class Source>
  void run() const {
    if (args.codes == CodeKind::kE2M1) {
      if constexpr (!std::is_same_v<Source, SituAndMul<T>>) run_nibbles<Source>();
    } else {
      run_bytes<Source>();
    }
  }

 private:
  // Groups that are all there, each with a scale.
  bool plain() const {
    const int64_t groups = args.width / args.group_size;
    return !args.valid.counts.data && !args.of_experts.first.data && args.zero_rows == 0 &&
           args.code_groups == groups && args.scale_groups == groups;
  }

  // Whether block_kernel took the call.
  template <class Source, ScaleKind kScale, CodeKind kCodes>
  bool run_blocks() const {
    constexpr int64_t kSize = kScale == ScaleKind::kE4M3 ? 16 : 32;
    constexpr uint32_t kRows = Source::kHalves == 2 ? 1 : 2;  // more leave too few threads room
    const auto by_one_stride = [](const Rows& rows) { return (rows.size1 | rows.size2) == 1; };
    const int64_t groups = args.width / kSize;
    const bool tiled = args.tile_bits != 0;
    if (!aligned || args.codes != kCodes || args.rule.kind != kScale || args.group_size != kSize ||
        args.width % kUnit || args.valid.counts.data || args.of_experts.first.data || args.zero_rows ||
        args.four_over_six || args.code_groups != groups || (!tiled && args.scale_groups != groups) ||
        !rows_aligned(16, args.out, args.out_rows, 1) || !by_one_stride(args.input_rows) ||
        !by_one_stride(args.out_rows) || (!tiled && !by_one_stride(args.scale_rows)))
      return false;
    const int64_t tile = int64_t{1} << args.tile_bits, rows = (args.rows + tile - 1) / tile * tile,
                  across = tiled ? (args.scale_groups * kSize / kUnit + 3) / 4 : args.width / kUnit,
                  at_once = tiled ? 8 * kRows : kRows,
                  total = (rows + at_once - 1) / at_once * across * (tiled ? 32 : 1);
    if (args.width > INT32_MAX || rows > INT32_MAX - 128 || total > INT32_MAX - kBlockThreads) return false;
    const uint32_t step = args.tile_bits == 7 ? 2 : tiled ? 8 : 1;
    const int64_t scale_step = args.tile_bits == 7 ? 32 : tiled ? args.tiles * 32 : args.scale_rows.stride0;
    const BlockPlan plan{Divider(across),
                         static_cast<uint32_t>(total),
                         static_cast<uint32_t>(rows),
                         step,
                         step * args.out_rows.stride0,
                         scale_step,
                         (tiled || args.scale_group == 1) && is_aligned(2, args.scales, {scale_step})};
    launch_dependent(block_kernel<T, Source, kScale, kCodes, kRows>,
                     static_cast<unsigned>((total + kBlockThreads - 1) / kBlockThreads), kBlockThreads, launch,
                     "group_quant", args, plan);
    return true;
  }

  template <class Source>
  void run_bytes() const {
    if constexpr (sizeof(T) == 2 && std::is_same_v<Source, Elements<T>>)
      if (run_blocks<Source, ScaleKind::kMx, CodeKind::kE4M3>()) return;
    constexpr int64_t kLane = kPacks<T, Source> * kPackSize<T>;
    const int64_t lanes = args.group_size / kLane;
    const bool whole = aligned && args.group_size % kLane == 0 && lanes <= 32 &&
                       std::has_single_bit(static_cast<uint64_t>(lanes)),
               by_strides = plain() && args.tile_bits == 0;
    const auto start = [&](auto kernel) { launch_kernel(kernel, args.groups(), lanes, kThreads); };
    if (whole && args.codes == CodeKind::kE4M3) {
      if (by_strides) return start(byte_group_kernel<T, Source, CodeKind::kE4M3, true>);
      return start(byte_group_kernel<T, Source, CodeKind::kE4M3, false>);
    }
    if constexpr (!std::is_same_v<Source, SituAndMul<T>>) {
      if (whole && args.codes == CodeKind::kInt8 && by_strides)
        return start(byte_group_kernel<T, Source, CodeKind::kInt8, true>);
    }
    run_any<Source, false>();
  }

  template <class Source>
  void run_nibbles() const {
    if constexpr (sizeof(T) == 2) {
      if (run_blocks<Source, ScaleKind::kE4M3, CodeKind::kE2M1>()) return;
      if (run_blocks<Source, ScaleKind::kMx, CodeKind::kE2M1>()) return;
      const int64_t size = args.group_size;
      if (aligned && size <= kUnit && args.width % kUnit == 0 && args.code_groups * size % kUnit == 0 &&
          args.scale_groups * size % kUnit == 0 && rows_aligned(16, args.out, args.out_rows, 1)) {
        const int64_t units = args.groups() * size / kUnit;
        return launch_kernel(nibble_group_kernel<T, Source>, units, 1, kThreads);
      }
    }
    run_any<Source, true>();
  }

  template <class Source, bool kNibbles>
  void run_any() const {
    const int64_t chunks = (args.group_size + kLaneElements - 1) / kLaneElements;
    launch_kernel(any_group_kernel<T, Source, kNibbles>, args.groups(),
                  std::bit_ceil(static_cast<uint64_t>(chunks < 32 ? chunks : 32)), kAnyThreads);
  }

  // With so many groups of a row, each of which so many lanes have.
  template <class Kernel>
  void launch_kernel(Kernel kernel, int64_t groups, int64_t lanes, int threads) const {
    if (args.group_size > INT32_MAX / 4 || groups > INT32_MAX || args.rows > (INT32_MAX - 4 * threads) / groups)
      fail(PYKV_NOT_IMPLEMENTED, "input: 2^31 groups in one call are not supported");
    const int64_t total = groups * args.rows, at_once = threads / lanes;
    const GroupPlan plan{Divider(groups),
                         Divider(args.valid.rows),
                         static_cast<uint32_t>(total),
                         std::countr_zero(static_cast<uint64_t>(lanes)),
                         aligned,
                         args.rule.kind == ScaleKind::kE8M0 || args.rule.kind == ScaleKind::kMx};
    launch_dependent(kernel, static_cast<unsigned>((total + at_once - 1) / at_once), static_cast<unsigned>(threads),
                     launch, "group_quant", args, plan, launch.reporter(args.of_experts.report));
  }
};

}  // namespace

void group_quant_cuda(const GroupQuantArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    const Launcher<T> launcher(args, launch);
    switch (args.source) {
      case RowSource::kElements:
        return launcher.template run<Elements<T>>();
      case RowSource::kSiluAndMul:
        return launcher.template run<SiluAndMul<T>>();
      case RowSource::kSituAndMul:
        return launcher.template run<SituAndMul<T>>();
    }
  });
}

}  // namespace pykv
