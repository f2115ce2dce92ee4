// The online softmax of rows, or columns, that lie in one warp, of which each lane has parts of two.
//
//   weights = 2^(scores - maximum), and sums are rescaled when the maximum follows what has come
//
// It may lag behind by a factor of 2^kLag, so that following it is rare.  It is a whole number, which makes its powers exact, and each
// row's own affair: a row beside it changes nothing.
#pragma once

#include "cuda/approximate.cuh"

namespace pykv::attention {

constexpr float kLag = 8;

// top: the greatest scores, base 2, that this lane has of its rows; lanes that have others of the same rows differ in the bits kFirst
// to kEnd / 2.  rescale(e, factor): of what row e has so far.  Returns whether a row of the warp has another maximum.
template <int kFirst, int kEnd>
__device__ bool follow_maxima(const float (&top)[2], float (&maximum)[2], auto&& rescale) {
  if (!__any_sync(~0u, top[0] > maximum[0] + kLag || top[1] > maximum[1] + kLag)) return false;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    float all = top[e];
    for (int m = kFirst; m < kEnd; m *= 2) all = fmaxf(all, __shfl_xor_sync(~0u, all, m));
    const float old = maximum[e], now = all > old + kLag ? ceilf(all) : old;
    rescale(e, power_of_2(old - (now == -INFINITY ? 0.f : now)));
    maximum[e] = now;
  }
  return true;
}

// What is subtracted from scores: of a row that has seen no key, zero.
__device__ inline float base_of(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

}  // namespace pykv::attention
