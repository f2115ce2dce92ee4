// What both twins of gelu know of erfc.
#pragma once

#include "core/launch.h"

namespace pykv {

// For z >= 0 and t = 1 / (1 + z / 2): erfc(z) / 2 = t * exp(-z^2) * h(t), where h, smooth on [0, 1], is this polynomial,
// fitted within 2e-7.  F is a float or a vector of floats.
template <class F>
PYKV_HOST_DEVICE static inline F erfc_factor(F t) {
  F h = 0.0067673246f * t - 0.064807028f;
  h = h * t + 0.22140557f;
  h = h * t - 0.34352291f;
  h = h * t + 0.21707594f;
  h = h * t - 0.05226424f;
  h = h * t + 0.11372276f;
  h = h * t + 0.11914411f;
  h = h * t + 0.14144701f;
  return h * t + 0.14103144f;
}

// The same within 1e-5: for results of 16 bits.
template <class F>
PYKV_HOST_DEVICE static inline F rough_erfc_factor(F t) {
  F h = 0.0310464323f * t - 0.135042706f;
  h = h * t + 0.138303786f;
  h = h * t + 0.0552145731f;
  h = h * t + 0.128698248f;
  h = h * t + 0.140724951f;
  return h * t + 0.141049784f;
}

}  // namespace pykv
