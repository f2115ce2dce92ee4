// nvfp4, mxfp4 and mxfp8 of rows of experts, whose scales lie in tiles that begin wherever each expert's do: a thread has 32
// neighbours of a row, a warp 8 rows that follow one another, 128 elements each.
//
// What is looked up costs instructions, of which an H200 has few to spare (group_quant_blocks.cuh): by every thread on its own it
// was a fifth of all.  So lanes ask for an expert each before they ask for numbers, and mostly one comparison tells whose all rows
// of the warp are.  Where they are several experts', or offsets are not as they should be, threads look for themselves.
#pragma once

#include "quantization/group_quant_blocks.cuh"

namespace pykv {

struct ExpertPlan {
  Divider across;  // fours of units of a row
  bool by_lanes;   // ids are int32, one behind the other
  uint32_t step;   // between experts that lanes ask for first, of more than there are lanes
  int32_t scale_rows;
  uint32_t tile_bytes;  // between rows of tiles
};

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

// The expert of all of a warp's rows, from `first` to `last`: where its rows end, how far their scales are from them, and its
// global scale.  `known`: it is one, and all of its scales lie where they may.
struct WarpExpert {
  bool known = false;
  uint32_t end = 0, distance = 0;
  float global = 1.0f;
};

// What lanes know of neighbouring experts.
template <bool kGlobals>
class ExpertLanes {
 public:
  // Asks for those about the row `first`.
  __device__ ExpertLanes(const GroupQuantArgs& args, const ExpertPlan& plan, uint32_t first) {
    const ExpertRows& of = args.of_experts;
    const auto* const begins = static_cast<const int32_t*>(of.first.data);
    const uint32_t lane = threadIdx.x % 32, experts = static_cast<uint32_t>(of.experts);
    uint32_t from = 0;
    if (plan.step != 0) {
      const uint32_t i = lane * plan.step;
      const uint32_t begun = __ballot_sync(kAll, i < experts && begins[i] <= static_cast<int32_t>(first));
      if (begun != 0) from = (31 - __clz(static_cast<int>(begun))) * plan.step;
    }
    const uint32_t i = from + lane;
    there_ = i < experts;
    if (there_ || (i == experts && !of.sizes)) begin_ = begins[i];
    if (there_) {
      scales_ = static_cast<const int32_t*>(of.scales_first.data)[i];
      if (kGlobals) global_ = args.globals[i];
      if (of.sizes) size_ = of.sizes[3 * i];
    }
  }

  __device__ WarpExpert of_rows(const GroupQuantArgs& args, const ExpertPlan& plan, uint32_t first,
                                uint32_t last) const {
    const auto low = static_cast<int32_t>(first), high = static_cast<int32_t>(last);
    const uint32_t begun = __ballot_sync(kAll, there_ && begin_ <= low), lane = 31 - __clz(static_cast<int>(begun));
    const int32_t begin = __shfl_sync(kAll, begin_, lane);
    const int32_t end =
        args.of_experts.sizes ? begin + __shfl_sync(kAll, size_, lane) : __shfl_sync(kAll, begin_, lane + 1);
    WarpExpert expert;
    expert.end = static_cast<uint32_t>(end);
    expert.distance = static_cast<uint32_t>(__shfl_sync(kAll, scales_, lane)) - static_cast<uint32_t>(begin);
    if (kGlobals) expert.global = __shfl_sync(kAll, global_, lane);
    // Not the last lane's, who does not know where the next one's begin.
    expert.known = begun != 0 && lane < 31 && begin >= 0 && high < end &&
                   static_cast<int32_t>(first + expert.distance) >= 0 &&
                   last + expert.distance < static_cast<uint32_t>(plan.scale_rows);
    return expert;
  }

 private:
  static constexpr uint32_t kAll = 0xffffffffu;

  bool there_;
  int32_t begin_ = INT32_MAX, scales_ = 0, size_ = 0;
  float global_ = 1.0f;
};

// kRows: of a thread, one or two; a warp has 8 rows as many times.
template <class T, class Source, QuantScale kScale, QuantCode kCodes, int kRows, int kMinBlocks>
__global__ __launch_bounds__(kBlockThreads, kMinBlocks) void expert_kernel(const __grid_constant__ GroupQuantArgs args,
                                                                           const __grid_constant__ ExpertPlan plan,
                                                                           Reporter report) {
  constexpr bool kNvfp4 = kScale == QuantScale::kE4M3;
  constexpr int kSize = kPackSize<T>, kCount = kLanePacks<T>, kGroups = kNvfp4 ? 2 : 1;
  constexpr int kBytes = kCodes == QuantCode::kE2M1 ? kUnit / 2 : kUnit;
  const uint32_t n = blockIdx.x * blockDim.x + threadIdx.x;
  uint32_t four;
  const uint32_t first = plan.across(n / 32, four) * (8 * kRows), unit = four * 4 + n % 4, group = unit * kGroups;
  const uint32_t last = static_cast<uint32_t>(args.rows) - 1;
  const bool numbers = unit * kUnit < static_cast<uint32_t>(args.width);
  const auto own = [&](int r) { return first + n / 4 % 8 + 8 * r; };
  const auto from = [&](int r) {
    return static_cast<const T*>(args.input) +
           (min(own(r), last) * args.input_rows.stride0 + (numbers ? unit * kUnit : 0));
  };
  if (comes_early()) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      Source::prefetch(from(r), args.width);
      Source::prefetch(from(r) + kUnit / 2, args.width);
    }
  }
  if (comes_early(1) && threadIdx.x == 0) {
    prefetch(args.of_experts.first.data);
    prefetch(args.of_experts.scales_first.data);
    if (kNvfp4) prefetch(args.globals);
  }
  begin_dependent();

  typename Source::Raw raw[kRows][2][kCount];
  WarpExpert expert;
  const auto load = [&] {
#pragma unroll
    for (int r = 0; r < kRows; ++r)
#pragma unroll
      for (int k = 0; k < 2 * kCount; ++k)
        raw[r][k / kCount][k % kCount] = Source::load(from(r) + k * kSize, args.width);
  };
  if (plan.by_lanes) {
    const ExpertLanes<kNvfp4> lanes(args, plan, first);
    load();
    expert = lanes.of_rows(args, plan, first, min(first + (8 * kRows - 1), last));
  } else {
    load();
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const uint32_t row = min(own(r), last);
    bool there = own(r) <= last && group < args.scale_groups;
    uint32_t scale_row = row + expert.distance;
    if (!expert.known) {
      const ScaleRow found = args.scale_row_of(row, report);
      if (kNvfp4) expert.global = args.globals[found.expert];
      there &= found.there;
      scale_row = static_cast<uint32_t>(found.row);
      clear_behind_last(args, there && found.last, scale_row, group);
    } else if (expert.end <= first + 8 * kRows) {
      clear_behind_last(args, there && row + 1 == expert.end, scale_row, group);
    }

    const bool real = there && numbers;
    Vec<uint8_t, 16> codes[kBytes / 16];
    GroupScale scale[2] = {};
    if (__any_sync(0xffffffffu, real)) {
      const Source source(args);
      Pack<T> y[2][kCount];
#pragma unroll
      for (int k = 0; k < 2 * kCount; ++k) y[k / kCount][k % kCount] = source.value(raw[r][k / kCount][k % kCount]);
      encode_unit<kScale, kCodes, false, T>(args, Nvfp4Rule(expert.global), expert.global, y, codes, scale);
    }
    if (there) {
      // swizzled_place in 32 bits but for the tile
      const uint32_t within = group / 4 * 512 + scale_row % 32 * 16 + scale_row / 32 % 4 * 4 + group % 4;
      uint8_t* const scales =
          static_cast<uint8_t*>(args.scales) + (uint64_t{scale_row / 128} * plan.tile_bytes + within);
      const uint32_t low = real ? scale[0].stored : 0, high = real ? scale[1].stored : 0;
      if (kNvfp4) {
        *reinterpret_cast<uint16_t*>(scales) = static_cast<uint16_t>(low | high << 8);
      } else {
        *scales = static_cast<uint8_t>(low);
      }
    }
    if (real) {
      uint8_t* const to = static_cast<uint8_t*>(args.out) + (own(r) * args.out_rows.stride0 + unit * kBytes);
      store_vec(to, codes[0]);
      if constexpr (kBytes > 16) store_vec(to + 16, codes[1]);
    }
  }
}

}  // namespace pykv
