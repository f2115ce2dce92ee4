// codes = code(y * factor), scale and factor from the largest |y| of each group of neighbours in a row (core/codes.h); y = input,
// or silu(gate) * up or situ(gate, up), rounded to the dtype as the activation alone rounds it.
//
// Memory-bound: the floor is each byte of input and codes moved once.  While memory delivers an element of 16 bits and takes its
// code, an H200 issues 20 instructions: what a thread does once, for its addresses and its scale, is shared by as many elements
// as registers hold.  A lane has kPacks packs of a group, side by side with its neighbours'.  A warp whose numbers are all finite
// takes the short way.  Four-bit codes and mxfp8 go to group_quant_blocks.cuh; groups that do not fill their lanes, rows that are
// not aligned and scales in tiles to group_quant_any.cuh.
#include <bit>

#include "cuda/device.h"
#include "quantization/group_quant_any.cuh"
#include "quantization/group_quant_blocks.cuh"
#include "quantization/group_quant_experts.cuh"

namespace pykv {
namespace {

constexpr int kThreads = 128;

// Of a lane: as many packs as leave room for enough threads on an SM.
template <class T, class Source>
constexpr int kPacks = Source::kHalves == 2 ? 16 / kPackSize<T> : 4;
// The same where groups fill the chip, by blocks of half the size: then twice the numbers share what a thread does once, which for
// situ is a fifth of all.  silu alone is quicker with less, but where it asks which rows are there.
template <class T, class Source, bool kPlain>
constexpr int kMorePacks =
    sizeof(T) == 2 && std::is_same_v<Source, std::conditional_t<kPlain, SituAndMul<T>, SiluAndMul<T>>> ? 4 : 0;
template <class T, class Source, int kCount>
constexpr int kBlocks = sizeof(T) == 4 || std::is_same_v<Source, SituAndMul<T>> || kCount * Source::kHalves == 8 ? 8
                        : std::is_same_v<Source, Elements<T>> ? 10
                                                              : 12;  // on an SM, at least

// Over the lanes of a group.
__device__ inline uint32_t largest_of_lanes(uint32_t most, int lane_bits) {
#pragma unroll
  for (int bit = 0; bit < 5; ++bit)
    if (bit < lane_bits) most = max(most, __shfl_xor_sync(0xffffffffu, most, 1 << bit));
  return most;
}

// One-byte codes, their scales by strides.  kPlain: all rows are there and nothing is padded, which saves few tokens a sixth.
template <class T, class Source, QuantCode kCodes, bool kPlain, int kCount>
__global__ __launch_bounds__(kThreads, kBlocks<T, Source, kCount>) void byte_group_kernel(
    const __grid_constant__ GroupQuantArgs args, const __grid_constant__ GroupPlan plan) {
  constexpr int kSize = kPackSize<T>;
  const int lane_bits = plan.lane_bits, lane = static_cast<int>(threadIdx.x) & ((1 << lane_bits) - 1);
  const uint32_t n = blockIdx.x * (blockDim.x >> lane_bits) + (threadIdx.x >> lane_bits);
  const bool there = n < plan.total;  // others read the first group, since their warp finds its maxima with all lanes
  uint32_t group;
  const int64_t row = plan.groups(there ? n : 0, group);
  const int64_t first = static_cast<int64_t>(uint64_t{group} * static_cast<uint32_t>(args.group_size)) + lane * kSize;
  const int step = kSize << lane_bits;
  const T* from = static_cast<const T*>(args.input) + (args.input_rows.offset(row) + first);
  uint8_t* to = static_cast<uint8_t*>(args.out) + (args.out_rows.offset(row) + first);
  if (comes_early()) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) Source::prefetch(from + k * step, args.width);
  }
  have_ready(to);
  begin_dependent();

  const bool valid = kPlain || is_valid(args, plan, row);
  const Source source(args);
  typename Source::Raw raw[kCount];
  if constexpr (!kPlain)
    for (auto& r : raw) r = {};
  if (valid) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) raw[k] = Source::load(from + k * step, args.width);
  }
  Pack<T> y[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) y[k] = source.value(raw[k]);
  uint32_t most = largest_of_lanes(largest_bits(y), lane_bits);
  const bool any_odd = __any_sync(0xffffffffu, most >= kInfinity);
  if (any_odd) most = largest_of_lanes(__float_as_uint(largest_of(y)), lane_bits);  // passes NaN over
  if (!there || (!valid && !args.fill_scales)) return;
  GroupScale scale = args.rule(__uint_as_float(most), args.given, 1.0f);
  if (lane == 0) {
    const int64_t of_row = args.scale_rows.offset(row);
    const auto put = [&](uint32_t g, uint32_t stored) {
      const int64_t at = of_row + (args.scale_four ? g / 4 * args.scale_four + g % 4 : g * args.scale_group);
      if (plan.scale_bytes) {
        static_cast<uint8_t*>(args.scales)[at] = static_cast<uint8_t>(stored);
      } else {
        static_cast<uint32_t*>(args.scales)[at] = stored;
      }
    };
    put(group, valid ? scale.stored : __float_as_uint(1.0f));
    if (!kPlain && group == plan.groups.d - 1)
      for (uint32_t g = group + 1; g < args.scale_groups; ++g) put(g, 0);
  }
  if (!valid) return;
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

template <class T>
struct Launcher {
  const GroupQuantArgs& args;
  const Launch& launch;
  bool aligned;

  Launcher(const GroupQuantArgs& args, const Launch& launch) : args(args), launch(launch) {
    constexpr int64_t kItem = sizeof(T);
    const bool nibbles = args.codes == QuantCode::kE2M1;
    aligned = rows_aligned(kAccessBytes, args.input, args.input_rows, kItem) &&
              args.width * kItem % kAccessBytes == 0 && args.group_size * kItem % kAccessBytes == 0 &&
              rows_aligned(nibbles ? 8 : kPackSize<T>, args.out, args.out_rows, 1);
  }

  template <class Source>
  void run() const {
    if (args.codes == QuantCode::kE2M1) {
      if constexpr (!std::is_same_v<Source, SituAndMul<T>>) run_nibbles<Source>();
    } else {
      run_bytes<Source>();
    }
  }

 private:
  // Whether block_kernel or expert_kernel took the call.
  template <class Source, QuantScale kScale, QuantCode kCodes, bool kChoose = false>
  bool run_blocks() const {
    constexpr bool kNvfp4 = kScale == QuantScale::kE4M3, kGated = Source::kHalves == 2;
    constexpr int64_t kSize = kNvfp4 ? 16 : 32;
    const auto by_one_stride = [](const Rows& rows) { return (rows.size1 | rows.size2) == 1; };
    const int64_t groups = args.width / kSize, items = args.scale_groups * kSize / kUnit;
    const bool tiled = args.tile_bits != 0;
    if (!aligned || args.codes != kCodes || args.rule.kind != kScale || args.group_size != kSize ||
        args.width % kUnit || args.valid.counts.data || args.zero_rows || args.four_over_six != kChoose ||
        args.code_groups != groups || (!tiled && args.scale_groups != groups) ||
        !rows_aligned(16, args.out, args.out_rows, 1) || !by_one_stride(args.input_rows) ||
        !by_one_stride(args.out_rows) || (!tiled && !by_one_stride(args.scale_rows)) || args.width > INT32_MAX / 16)
      return false;
    const int64_t fours = (items + 3) / 4;
    const auto start = [&](auto kernel, int64_t total, const auto&... plans) {
      if (total > INT32_MAX - kBlockThreads) return false;
      launch_dependent(kernel, static_cast<unsigned>((total + kBlockThreads - 1) / kBlockThreads), kBlockThreads,
                       launch, "group_quant", args, plans...);
      return true;
    };
    // As many threads on an SM as do not spill: they hide each other's arithmetic.  Two rows a thread share a sixth of it: from some
    // four thousand tokens on that is worth more than twice the threads.
    constexpr bool kMayHaveTwo = kCodes == QuantCode::kE2M1 && !kGated && !kChoose;
    constexpr int kMinBlocks = kChoose ? 14 : kGated ? 16 : 20, kMinBlocksOfTwo = kNvfp4 ? 14 : 16;
    const bool two = kMayHaveTwo && args.rows * args.width / kUnit >= int64_t{3072} * num_sms(launch.device);
    const int64_t step = two ? 2 : 1;
    if (args.of_experts.first.data) {
      if constexpr (!kChoose) {
        const ExpertRows& of = args.of_experts;
        const auto side_by_side = [](const Index& ids) { return !ids.is_int64 && ids.stride == 1; };
        if (!is_aligned(16, args.scales) || args.rows > INT32_MAX - 16 || of.scale_rows > INT32_MAX) return false;
        const ExpertPlan plan{Divider(fours), side_by_side(of.first) && side_by_side(of.scales_first),
                              static_cast<uint32_t>(of.experts < 32 ? 0 : (of.experts + 31) / 32),
                              static_cast<int32_t>(of.scale_rows), static_cast<uint32_t>(args.tiles * 512)};
        const int64_t total = (args.rows + 8 * step - 1) / (8 * step) * fours * 32;
        if constexpr (kMayHaveTwo)
          if (two)
            return start(expert_kernel<T, Source, kScale, kCodes, 2, kMinBlocksOfTwo>, total, plan,
                         launch.reporter(of.report));
        return start(expert_kernel<T, Source, kScale, kCodes, 1, kMinBlocks>, total, plan, launch.reporter(of.report));
      }
    } else if constexpr (kNvfp4 || !kGated) {  // silu to mxfp4 is of experts alone
      const int64_t tile = int64_t{1} << args.tile_bits, rows = (args.rows + tile - 1) / tile * tile,
                    total = tiled ? (rows / 8 + step - 1) / step * fours * 32
                                  : (rows + step - 1) / step * (args.width / kUnit),
                    scale_step = tiled ? 2 : args.scale_rows.stride0;
      if (rows > INT32_MAX - 128) return false;
      // Two rows of a thread are neighbours; in tiles those of two octets (BlockPlace) that are.
      const int64_t row_step = !tiled ? 1 : args.tile_bits == 7 ? 2 : 8;
      const int64_t octet_step = args.tile_bits == 7 ? 32 : 32 * args.tiles;
      const BlockPlan plan{Divider(tiled ? fours : args.width / kUnit),
                           static_cast<uint32_t>(total),
                           static_cast<uint32_t>(rows),
                           (tiled || args.scale_group == 1) && is_aligned(2, args.scales, {scale_step}),
                           static_cast<uint32_t>(row_step),
                           tiled ? octet_step : args.scale_rows.stride0};
      if constexpr (kMayHaveTwo)
        if (two) return start(block_kernel<T, Source, kScale, kCodes, kChoose, 2, kMinBlocksOfTwo>, total, plan);
      return start(block_kernel<T, Source, kScale, kCodes, kChoose, 1, kMinBlocks>, total, plan);
    }
    return false;
  }

  // Whether byte_group_kernel took the call, with so many packs of a lane.
  template <class Source, int kCount>
  bool run_groups() const {
    constexpr int64_t kLane = kCount * kPackSize<T>;
    const int64_t lanes = args.group_size / kLane;
    if (!aligned || args.group_size % kLane != 0 || lanes > 32 || !std::has_single_bit(static_cast<uint64_t>(lanes)) ||
        args.tile_bits != 0 || args.code_groups * args.group_size != args.width)
      return false;
    const bool plain = !args.valid.counts.data && args.zero_rows == 0 && args.scale_groups == args.code_groups;
    constexpr bool kMore = kCount > kPacks<T, Source>, kOwn = kCount == kPacks<T, Source>;
    const auto start = [&](auto kernel) {
      launch_kernel(kernel, args.code_groups, lanes, kMore ? kThreads / 2 : kThreads);
      return true;
    };
    const bool e4m3 = args.codes == QuantCode::kE4M3;
    if constexpr (sizeof(T) == 2 && (kOwn || (kMore && kMorePacks<T, Source, true> != 0)))
      if (e4m3 && plain) return start(byte_group_kernel<T, Source, QuantCode::kE4M3, true, kCount>);
    if constexpr (kOwn || (kMore && kMorePacks<T, Source, false> != 0))
      if (e4m3 && (!plain || sizeof(T) == 4))
        return start(byte_group_kernel<T, Source, QuantCode::kE4M3, false, kCount>);
    if constexpr (!kMore && !std::is_same_v<Source, SituAndMul<T>>)
      if (plain && args.codes == QuantCode::kInt8)
        return start(byte_group_kernel<T, Source, QuantCode::kInt8, true, kCount>);
    return false;
  }

  template <class Source>
  void run_bytes() const {
    if constexpr (sizeof(T) == 2 && std::is_same_v<Source, Elements<T>>)
      if (run_blocks<Source, QuantScale::kMx, QuantCode::kE4M3>()) return;
    constexpr int kMore = kMorePacks<T, Source, true> + kMorePacks<T, Source, false>;
    if constexpr (kMore != 0)
      if (args.rows * args.width / (kMore * kPackSize<T>) >= 1024 * num_sms(launch.device) &&
          run_groups<Source, kMore>())
        return;
    // int8 of few tokens by one pack: there vLLM is quick (1.30 -> 1.13 us for one).
    if constexpr (sizeof(T) == 2 && std::is_same_v<Source, Elements<T>>)
      if (args.codes == QuantCode::kInt8 &&
          args.rows * args.width <= int64_t{kThreads} * kPackSize<T> * num_sms(launch.device) &&
          run_groups<Source, 1>())
        return;
    if (run_groups<Source, kPacks<T, Source>>()) return;
    run_any<Source, false>();
  }

  template <class Source>
  void run_nibbles() const {
    if constexpr (sizeof(T) == 2) {
      if (run_blocks<Source, QuantScale::kE4M3, QuantCode::kE2M1>()) return;
      if (run_blocks<Source, QuantScale::kMx, QuantCode::kE2M1>()) return;
      if constexpr (std::is_same_v<Source, Elements<T>>)
        if (run_blocks<Source, QuantScale::kE4M3, QuantCode::kE2M1, true>()) return;
    }
    run_any<Source, true>();
  }

  template <class Source, bool kNibbles>
  void run_any() const {
    const int64_t chunks = (args.group_size + kLaneElements - 1) / kLaneElements;
    launch_kernel(any_group_kernel<T, Source, kNibbles>, args.groups(),
                  std::bit_ceil(static_cast<uint64_t>(chunks < 32 ? chunks : 32)), kAnyThreads,
                  launch.reporter(args.of_experts.report));
  }

  // With so many groups of a row, each of which so many lanes have.
  template <class Kernel, class... Others>
  void launch_kernel(Kernel kernel, int64_t groups, int64_t lanes, int threads, const Others&... others) const {
    if (args.group_size > INT32_MAX / 4 || groups > INT32_MAX || args.rows > (INT32_MAX - 4 * threads) / groups)
      fail(PYKV_NOT_IMPLEMENTED, "input: 2^31 groups in one call are not supported");
    const int64_t total = groups * args.rows, at_once = threads / lanes;
    const GroupPlan plan{Divider(groups),
                         Divider(args.valid.rows),
                         static_cast<uint32_t>(total),
                         std::countr_zero(static_cast<uint64_t>(lanes)),
                         aligned,
                         args.rule.kind == QuantScale::kE8M0 || args.rule.kind == QuantScale::kMx};
    launch_dependent(kernel, static_cast<unsigned>((total + at_once - 1) / at_once), static_cast<unsigned>(threads),
                     launch, "group_quant", args, plan, others...);
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
