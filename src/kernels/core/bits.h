// Floats as their bits, on either device.
#pragma once

#include <cstdint>

#include "core/launch.h"

namespace pykv {

// Static: the CPU twins compile these for several instruction sets, and none may become a symbol that they share.
PYKV_HOST_DEVICE static inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
PYKV_HOST_DEVICE static inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace pykv
