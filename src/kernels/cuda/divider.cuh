// n / d for a divisor that the host knows, by a multiplication.
#pragma once

#include <bit>
#include <cstdint>

namespace pykv {

// For 0 <= n < 2^31 and 1 <= d < 2^31.
struct Divider {
  uint32_t d, multiplier, shift;

  Divider(int64_t divisor = 1) : d(divisor < 1 ? 1 : static_cast<uint32_t>(divisor)) {
    shift = static_cast<uint32_t>(std::bit_width(d - 1));
    multiplier = static_cast<uint32_t>((((uint64_t{1} << shift) - d) << 32) / d + 1);
  }

  // Gives n / d and leaves n % d in `rest`.
  __device__ uint32_t operator()(uint32_t n, uint32_t& rest) const {
    const uint32_t quotient = (__umulhi(n, multiplier) + n) >> shift;
    rest = n - quotient * d;
    return quotient;
  }
};

}  // namespace pykv
