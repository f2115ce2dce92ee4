// Results that depend on the largest magnitude of a row, or of groups within it: the codes of row_norm.cuh.
#pragma once

#include "norm/row_sums.cuh"

namespace pykv {
namespace {

// The largest magnitude of a group by whose scale a PlainCoder makes codes.
constexpr float kMostPlain = 0x1p40f;

// What a result has to know before it can store.
enum class Largest { kNothing, kOfRow, kOfGroups };

// What a thread has of a row whose results depend on its largest magnitude: its scale, and the thread's packs.  packs: of
// the row, none where it is not there.  kFull: as many as there are threads times packs.
template <bool kInt8, bool kFull, class Result, class T, int kSize, int kPacks, class Reducer>
__device__ void store_by_largest_of_row(const Result& result, const Vec<T, kSize> (&y)[kPacks], const Reducer& reducer,
                                        int thread, int threads, int packs) {
  const auto has = [&](int k) { return kFull || thread + k * threads < packs; };
  // packs behind the row are zeros, or NaN
  const float scale = result.template scale_of<kInt8>(reducer.template maximum<2>(largest_of(y)));
  if (thread == 0 && packs > 0) result.store_scale(0, scale);
  const typename Result::template Coder<kInt8> coder(scale);
  if (coder.is_plain()) {
#pragma unroll
    for (int k = 0; k < kPacks; ++k)
      if (has(k)) result.store(k * threads, y[k], coder);
  } else {
#pragma unroll
    for (int k = 0; k < kPacks; ++k)
      if (has(k)) result.store(k * threads, y[k], coder);
  }
}

// The same where each group within the row has a scale.
template <bool kFull, class Result, class T, int kSize, int kPacks>
__device__ void store_by_largest_of_groups(const Result& result, const Vec<T, kSize> (&y)[kPacks], int thread,
                                           int threads, int packs) {
  const auto has = [&](int k) { return kFull || thread + k * threads < packs; };
  const uint32_t lanes = static_cast<uint32_t>(result.group_size()) / kSize;  // a power of two: see in_lanes
  const uint32_t lane = thread & (lanes - 1), shift = 31 - __clz(lanes);
  if (lanes >= kPacks) {  // each lane makes the scale of one pack's group, and hands it to the others
    const float most = result.bounded(largest_of_one(y, lanes));
    if (__all_sync(0xffffffffu, most <= kMostPlain)) {  // nor NaN
      const auto store = [&]<bool kInt8>() {
        const float scale = result.template scale_by<kInt8>(most);
        const uint32_t pack = thread + lane * threads;
        if (lane < kPacks && (kFull || pack < packs)) result.store_scale(pack >> shift, scale);
        const typename Result::template PlainCoder<kInt8> coder(scale);
        uint32_t width = lanes;
        have_ready(width);  // in one register, not fetched anew for each shuffle
#pragma unroll
        for (int k = 0; k < kPacks; ++k) {
          const auto of_pack = coder.of_lane(k, width);
          if (has(k)) result.store(k * threads, y[k], of_pack);
        }
      };
      return result.args.int8 ? store.template operator()<true>() : store.template operator()<false>();
    }
  }
  // What is odd (NaN, infinity, the largest numbers), or groups of few lanes.  A loop: else others pay in registers.
  Vec<T, kSize> left[kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) left[k] = y[k];
#pragma unroll 1
  for (int k = 0; k < kPacks; ++k) {
    const float scale = result.scale_of_either(warp_reduce(largest_of(left[0]), lanes, Maximum()));
    if (has(k)) {
      if (lane == 0) result.store_scale((thread + k * threads) >> shift, scale);
      result.store(k * threads, left[0], typename Result::EitherCoder(scale, result.args.int8));
    }
#pragma unroll
    for (int i = 1; i < kPacks; ++i) left[i - 1] = left[i];
  }
}

}  // namespace
}  // namespace pykv
