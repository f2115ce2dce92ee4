// Division of 31-bit numbers by a divisor that a whole launch shares: a multiplication and a shift.
#pragma once

#include <cstdint>

#include "core/launch.h"

namespace pykv {

// With 2^shift >= divisor and multiplier = floor(2^32 (2^shift - divisor) / divisor) + 1, the quotient of every
// n < 2^31 is (floor(n multiplier / 2^32) + n) / 2^shift.
class Divider {
 public:
  Divider() = default;
  explicit Divider(int divisor) : divisor_(divisor), shift_(0) {
    while ((int64_t{1} << shift_) < divisor) ++shift_;
    multiplier_ = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift_) - divisor) / divisor + 1);
  }

#if defined(__CUDACC__)
  __device__ int quotient(int n) const { return static_cast<int>((__umulhi(n, multiplier_) + n) >> shift_); }
  __device__ int remainder(int n) const { return n - quotient(n) * divisor_; }
#endif

 private:
  int divisor_, shift_;
  uint32_t multiplier_;
};

}  // namespace pykv
