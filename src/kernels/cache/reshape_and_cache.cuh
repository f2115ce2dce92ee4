// Pieces of the reshape_and_cache kernel: its plan, and how a vector of elements is loaded, converted and stored.
#pragma once

#include <type_traits>

#include "cache/reshape_and_cache.h"
#include "cuda/divider.cuh"
#include "cuda/fp8.cuh"
#include "cuda/vec.cuh"

namespace pykv {

// Where tokens go.
struct SlotMap {
  Index slots;
  int64_t num_tokens, num_slots;
  Divider block_size;
  bool wide;  // 2^31 slots or more
  Reporter report;

  // False for padding and for a slot outside the cache, which is reported.
  __device__ bool locate(int64_t slot, int64_t& block, uint32_t& offset) const {
    if (slot < 0) return false;
    if (slot >= num_slots) {
      report(slot, num_slots);
      return false;
    }
    if (wide) {
      block = slot / block_size.d;
      offset = static_cast<uint32_t>(slot % block_size.d);
    } else {
      block = block_size(static_cast<uint32_t>(slot), offset);
    }
    return true;
  }
};

// Keys or values of the call, everything in bytes, the head cut into vectors of the kernel's width.
struct SidePlan {
  const char* data;
  char* cache;
  int64_t data_token, data_head, data_vector;
  int64_t block, token, head, chunk;  // distances in the cache
  Divider vectors_per_head, vectors_per_chunk;
  uint32_t num_vectors, head_size;
  uint32_t num_blocks;  // of the grid, that work on this side
  uint32_t lanes_log2;  // neighbouring threads (transposing: warps) that take neighbouring vectors of a token
  Divider pieces;       // blocks over the width of a token (transposing: of a head)
  uint32_t tokens;      // of a thread: at most as many as it is compiled for
  // Transposing only.
  Divider heads;
  uint32_t tile_tokens_log2;
  uint32_t run;  // tokens stored at once: a power of two; 0: do not transpose
};

struct Plan {
  SlotMap map;
  SidePlan key, value;
};

template <KvFormat kFormat>
struct Scales {
  Scale key, value;
};
template <>
struct Scales<KvFormat::kSame> {};

// kVector elements at once: T on their way in; T again (kSame) or one-byte floats on their way out.
template <class T, KvFormat kFormat, int kVector>
struct Mover {
  static constexpr KvFormat kStoredFormat = kFormat;
  static constexpr int kWidth = kVector;
  using Stored = std::conditional_t<kFormat == KvFormat::kSame, T, uint8_t>;
  using Loaded = Vec<T, kVector>;
  using Result = Vec<Stored, kVector>;

  static __device__ Result convert(const Loaded& v, const Quotient& quotient) {
    if constexpr (kFormat == KvFormat::kSame) {
      return v;
    } else if constexpr (kVector == 1) {
      return {to_fp8<kFormat>(v[0], quotient)};
    } else {
      constexpr int kQuads = kVector / 4;
      Result result;
      auto& codes = reinterpret_cast<uint32_t (&)[kQuads]>(result);
      auto& words = reinterpret_cast<const uint32_t (&)[kQuads][sizeof(T)]>(v);
#pragma unroll
      for (int i = 0; i < kQuads; ++i) codes[i] = to_fp8x4<kFormat, T>(words[i], quotient);
      return result;
    }
  }
};

}  // namespace pykv
