// Groups of any size, at any address, of any kind of codes: those that the kernels of group_quant.cu do not take.  The lanes of a
// group have 16 elements each, as many times as it needs; what is not kept is read again.
#pragma once

#include "cuda/largest.cuh"
#include "cuda/quantise.cuh"
#include "cuda/reduce.cuh"
#include "quantization/group_sources.cuh"

namespace pykv {

inline constexpr int kAnyThreads = 128;

template <class T, class Source, bool kNibbles>
__global__ __launch_bounds__(kAnyThreads) void any_group_kernel(const __grid_constant__ GroupQuantArgs args,
                                                                const __grid_constant__ GroupPlan plan,
                                                                Reporter report) {
  constexpr int kSize = kPackSize<T>, kCount = kLanePacks<T>;
  const int lanes = 1 << plan.lane_bits, lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const int size = static_cast<int>(args.group_size),
            chunks = (size + lanes * kLaneElements - 1) / (lanes * kLaneElements);
  const uint32_t n = blockIdx.x * (kAnyThreads >> plan.lane_bits) + (threadIdx.x >> plan.lane_bits);
  const bool there = n < plan.total;
  uint32_t group;
  const int64_t row = plan.groups(there ? n : 0, group);
  const bool real = group < args.width / args.group_size;
  const T* from = static_cast<const T*>(args.input) + args.input_rows.offset(row) + group * args.group_size;
  begin_dependent();

  const bool valid = is_valid(args, plan, row), numbers = there && real && valid;
  const Source source(args);
  const auto element = [&](int k, int chunk) { return (chunk * lanes + lane) * kLaneElements + k * kSize; };
  const auto read = [&](int chunk, Pack<T>(&to)[kCount]) {
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      to[k] =
          source.value(Source::load_some(from + element(k, chunk), args.width, size - element(k, chunk), plan.aligned));
  };
  Pack<T> y[kCount] = {};
  if (numbers) read(0, y);
  float most = largest_of(y);
  for (int chunk = 1; chunk < chunks && numbers; ++chunk) {
    Pack<T> more[kCount];
    read(chunk, more);
    most = fmaxf(most, largest_of(more));
  }
  most = warp_reduce(most, lanes, Maximum());
  if (!there) return;
  if (!valid) {
    if (args.fill_scales && real && lane == 0) args.store_scale(row, group, __float_as_uint(1.0f));
    return;
  }
  const ScaleRow scale_row = args.scale_row_of(row, report);
  if (!scale_row.there) return;
  const float given = given_of(args, scale_row);
  GroupScale scale = args.rule(most, given, 6.0f);
  uint2 nibbles{};
  if constexpr (kNibbles) {
    nibbles = nibbles_of(y, scale.factor);
    if (args.four_over_six) choose_four_over_six(args, y, most, given, scale, nibbles);
  }
  if (lane == 0 && group < args.scale_groups) {
    args.store_scale(scale_row.row, group, numbers ? scale.stored : 0u);
    if (args.tile_bits && scale_row.last) args.clear_behind(scale_row, group);
  }
  if (group >= args.code_groups) return;
  const int zero_rows = row == args.rows - 1 ? static_cast<int>(args.zero_rows) : 0;
  for (int extra = 0; extra <= zero_rows; ++extra) {
    uint8_t* const to = static_cast<uint8_t*>(args.out) + args.out_rows.offset(row + extra) +
                        int64_t{group} * (kNibbles ? size / 2 : size);
    if constexpr (kNibbles) {
      const uint2 codes = extra > 0 || !numbers ? uint2{} : nibbles;
      Vec<uint8_t, 8> bytes;
      bytes.words[0] = codes.x;
      bytes.words[1] = codes.y;
      store_codes(to + lane * 8, bytes, 8, plan.aligned);
    } else {
      for (int chunk = 0; chunk < chunks; ++chunk) {
        if (chunk > 0 && numbers) read(chunk, y);
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          auto codes = codes_times(args.codes, y[k], scale.factor, !(scale.factor > 0.0f));
          if (extra > 0) codes = {};
          store_codes(to + element(k, chunk), codes, size - element(k, chunk), plan.aligned);
        }
      }
    }
  }
}

}  // namespace pykv
