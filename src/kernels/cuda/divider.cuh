// n / d for a divisor that the host knows: with 2^shift >= d and multiplier = floor(2^32 (2^shift - d) / d) + 1 it is
// (floor(n multiplier / 2^32) + n) / 2^shift.
#pragma once

#include <bit>
#include <cstdint>

namespace pykv {

// For 0 <= n < 2^31 and 1 <= d < 2^31.
struct Divider {
  uint32_t d, shift, multiplier;

  Divider(int64_t divisor = 1) : d(divisor < 1 ? 1 : static_cast<uint32_t>(divisor)) {
    shift = static_cast<uint32_t>(std::bit_width(d - 1));
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }

  // Gives n / d and leaves n % d in `rest`.
  __device__ uint32_t operator()(uint32_t n, uint32_t& rest) const {
    const uint32_t whole = (__umulhi(n, multiplier) + n) >> shift;
    rest = n - whole * d;
    return whole;
  }
  __device__ int quotient(int n) const { return static_cast<int>((__umulhi(n, multiplier) + n) >> shift); }
  __device__ int remainder(int n) const { return n - quotient(n) * static_cast<int>(d); }
};

}  // namespace pykv
