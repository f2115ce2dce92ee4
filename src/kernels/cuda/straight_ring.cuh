// A ring of stages in shared memory, of warps that are not to branch: with addresses in uniform registers.
#pragma once

#include <cstdint>

namespace pykv {

// mbarrier_wait(), but the compiler does not see that this is a loop: after one it would ask the warp to meet again.
[[maybe_unused]] __device__ inline void wait_for(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done:}" ::
          "r"(barrier),
      "r"(parity)
      : "memory");
}

// Turn (cuda/turn.cuh) of a number of stages that the compiler knows.
template <int kStages>
struct StraightTurn {
  uint32_t stage = 0, parity = 0;

  __device__ void next() {
    stage = stage + 1 == kStages ? 0 : stage + 1;
    parity ^= stage == 0;
  }
};

}  // namespace pykv
