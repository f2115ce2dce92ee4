// Rotation of query heads at the five positions that dual chunk attention asks for, and of key heads at one.
#pragma once

#include "core/rotation.h"
#include "cpu/isa.h"

namespace pykv {

// Positions are taken within chunks of `stride` tokens; of which one the key is, a query may be another's.
struct DualChunks {
  static constexpr int kCopies = 5;

  int64_t stride, size;  // chunk_size - local_size, chunk_size

  // The position of key and of the first copy of query, of a token at `position` >= 0.
  PYKV_HOST_DEVICE int64_t own(int64_t position) const { return position % stride; }
  // The position of a copy, from the key's.
  PYKV_HOST_DEVICE int64_t of_copy(int copy, int64_t own) const {
    switch (copy) {
      case 0:
        return own;
      case 1:
        return own + stride < size ? own + stride : size;
      case 2:
        return 2 * stride - 1 < size ? 2 * stride - 1 : size;
      case 3:
        return own + stride;
      default:
        return own + size;
    }
  }
  // Of all of them the largest.
  PYKV_HOST_DEVICE int64_t last(int64_t own) const { return own + size; }
};

struct DualChunkRotaryEmbeddingArgs {
  Rotation rotation;  // with no query; key in place
  RotaryHeads query;  // read
  RotaryHeads out;    // the first copy
  int64_t copy;       // elements between two copies
  int64_t head_size;  // what is not rotated is copied
  Index offsets;      // added to the positions of token t, where there are any
  DualChunks chunks;

  PYKV_HOST_DEVICE int64_t shifted(int64_t position, int64_t t) const {
    return static_cast<int64_t>(static_cast<uint64_t>(position) + static_cast<uint64_t>(offsets.data ? offsets[t] : 0));
  }
  PYKV_HOST_DEVICE int64_t position(int64_t t) const { return shifted(rotation.position(0, t), t); }
};

PYKV_CPU_TWIN(dual_chunk_rotary_embedding_cpu, DualChunkRotaryEmbeddingArgs)
void dual_chunk_rotary_embedding_cuda(const DualChunkRotaryEmbeddingArgs& args, const Launch& launch);

}  // namespace pykv
