// Rotation of query and key heads by angles that depend on a token's position, or on several.
// The idea behind pykv_rotary_embedding, pykv_batched_rotary_embedding and pykv_mrope.
#pragma once

#include "core/rotation.h"
#include "cpu/isa.h"

namespace pykv {

// How the positions of a token (time, height, width, ...) share its frequencies.
struct RotaryAxes {
  static constexpr int kMost = 4;

  int count;         // 1: one position
  int64_t stride;    // elements between two positions of a token
  int sizes[kMost];  // frequencies of each axis
  Index on_device;   // where they are instead, if not null
  bool
      interleaved;  // axis k > 0 has the first of the frequencies k, k + count, k + 2 count, ...; else all lie in a row

  PYKV_HOST_DEVICE int size(int axis) const { return on_device.data ? static_cast<int>(on_device[axis]) : sizes[axis]; }
  // Whatever the sizes are, one of the axes.
  PYKV_HOST_DEVICE int operator()(int frequency) const {
    if (interleaved) {
      const int axis = frequency % count;
      return frequency < count * size(axis) ? axis : 0;
    }
    int axis = 0, end = 0;
    for (int k = 0; k + 1 < kMost; ++k) {  // as many as can be: to be unrolled
      end += k + 1 < count ? size(k) : 0;
      axis += k + 1 < count && frequency >= end;
    }
    return axis;
  }
};

struct RotaryEmbeddingArgs {
  Rotation rotation;
  Index offsets;  // added to the positions of token t, where there are any
  RotaryAxes axes;

  PYKV_HOST_DEVICE bool is_plain() const { return axes.count == 1 && !offsets.data; }
  // Position of token t, with its offset.
  PYKV_HOST_DEVICE int64_t sum(int64_t position, int64_t t) const {
    return static_cast<int64_t>(static_cast<uint64_t>(position) + static_cast<uint64_t>(offsets.data ? offsets[t] : 0));
  }
  PYKV_HOST_DEVICE int64_t position(int axis, int64_t b, int64_t s) const {
    const Rotation& r = rotation;
    const int64_t position = r.positions[axis * axes.stride + b * r.position_batch + s * r.position_token];
    return sum(position, b * r.seq + s);
  }
};

PYKV_CPU_TWIN(rotary_embedding_cpu, RotaryEmbeddingArgs)
void rotary_embedding_cuda(const RotaryEmbeddingArgs& args, const Launch& launch);

}  // namespace pykv
