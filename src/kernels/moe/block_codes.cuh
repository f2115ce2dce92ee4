// Codes of blocks of 128 numbers that share a scale, as byte_group_kernel of quantization/group_quant.cu makes them.
#pragma once

#include "quantization/group_sources.cuh"

namespace pykv {

inline constexpr int kLanesOfBlock = 16;

// Codes of a lane's numbers, and the scale of the block that neighbouring lanes share.  All lanes of a warp take part.
// given: what scales are at most
template <QuantCode kCodes, class T>
__device__ Vec<uint8_t, kPackSize<T>> block_codes(const ScaleRule& rule, float given, const Pack<T>& x,
                                                  GroupScale& scale) {
  static_assert(kLanesOfBlock * kPackSize<T> == 128);
  const Pack<T> y[1] = {x};
  const auto largest = [](uint32_t most) {
#pragma unroll
    for (int bit = 1; bit < kLanesOfBlock; bit *= 2) most = max(most, __shfl_xor_sync(~0u, most, bit));
    return most;
  };
  uint32_t most = largest(largest_bits(y));
  const bool any_odd = __any_sync(~0u, most >= kInfinity);
  if (any_odd) most = largest(__float_as_uint(largest_of(y)));  // passes NaN over
  scale = rule(__uint_as_float(most), given, 1.0f);
  return any_odd ? codes_times(kCodes, x, scale.factor, !(scale.factor > 0.0f)) : codes_inside<kCodes>(x, scale.factor);
}

}  // namespace pykv
