// A place in a ring of stages in shared memory.
#pragma once

#include <cstdint>

namespace pykv {

// The stage, and the parity of the phase that its barriers are in.
struct Turn {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void next(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  __device__ void advance(int count, int stages) {
    for (stage += count; stage >= stages; stage -= stages) parity ^= 1;
  }
};

}  // namespace pykv
