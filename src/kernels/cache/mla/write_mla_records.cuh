// Tokens into fp8_ds_mla records (mla_record.h): a scale for each tile of 128 elements, worked out here, its codes, and rope.
//
// Memory-bound as long as arithmetic is spread thin.  Eight neighbouring lanes take a tile, two vectors of 8 elements each:
// its largest magnitude is found among pairs of 16-bit floats as they are, three shuffles away, and what a division by the
// scale needs is worked out once for 16 elements.  Lanes beyond the tiles copy rope.  A thread does this for up to four
// neighbouring tokens, all loads under way first.
#pragma once

#include "cache/magnitude.cuh"
#include "cache/mla/concat_and_cache_mla.h"
#include "cache/mla/concat_rows.cuh"
#include "cache/mla_record.h"

namespace pykv {

struct RecordPlan {
  const char *latent, *rope;                           // null rope: zeros
  int64_t latent_row, latent_dim, rope_row, rope_dim;  // bytes
  Divider lanes;                                       // that a token takes: a multiple of kTileLanes
  uint32_t latent_lanes, rope_size, rope_step;         // elements from one vector of a rope lane to the next
  int64_t scales_at, rope_at;
  uint32_t num_tokens;
};

inline constexpr int kLaneElements = 8, kLaneVectors = 2;
inline constexpr int kTileLanes = MlaRecord::kTile / (kLaneElements * kLaneVectors);

// Up to 8 elements, one by one; the others are 0.
template <class T>
__device__ Vec<T, kLaneElements> load_elements(const char* from, int64_t dim, int count) {
  uint16_t bits[kLaneElements];
#pragma unroll
  for (int i = 0; i < kLaneElements; ++i)
    bits[i] = i < count ? *reinterpret_cast<const uint16_t*>(from + i * dim) : uint16_t{0};
  Vec<T, kLaneElements> v;
  __builtin_memcpy(&v, bits, sizeof v);
  return v;
}

// Of a tile, given to all its lanes; NaN is not counted.  All lanes of the warp must call it.
template <class T>
__device__ __forceinline__ float tile_magnitude(const Vec<T, kLaneElements> (&vectors)[kLaneVectors]) {
  uint32_t most = largest_word(vectors);
#pragma unroll
  for (int distance = kTileLanes / 2; distance > 0; distance /= 2)
    most = larger<T>(most, __shfl_xor_sync(~0u, most, distance));
  return largest_in_word<T>(most);
}

// The least power of two that is at least magnitude / 448 and kLeastScale.
__device__ __forceinline__ float tile_scale(float magnitude) {
  return power_of_two_from(magnitude > 0x1.fep127f ? magnitude : fmaxf(fp8_unit(magnitude), MlaRecord::kLeastScale));
}

// Records of latents and, behind them, the first `rope_size` elements of rope.
inline RecordPlan record_plan(const ConcatAndCacheMlaArgs& args, int64_t rope_size) {
  const MlaPart &latent = args.latent, &rope = args.rope;
  const MlaRecord record{latent.size, rope.size};
  const uint32_t latent_lanes = static_cast<uint32_t>(latent.size / (kLaneElements * kLaneVectors));
  const int64_t rope_vectors = (rope_size + kLaneElements - 1) / kLaneElements, group = kTileLanes * kLaneVectors;
  const int64_t rope_lanes = (rope_vectors + group - 1) / group * kTileLanes;
  return {static_cast<const char*>(latent.data),
          static_cast<const char*>(rope.data),
          2 * latent.row,
          2 * latent.dim,
          2 * rope.row,
          2 * rope.dim,
          Divider(latent_lanes + rope_lanes),
          latent_lanes,
          static_cast<uint32_t>(rope_size),
          static_cast<uint32_t>(rope_lanes * kLaneElements),
          record.scales_at(),
          record.rope_at(),
          static_cast<uint32_t>(args.num_tokens)};
}

inline bool records_aligned(const ConcatAndCacheMlaArgs& args) {
  const MlaPart &latent = args.latent, &rope = args.rope;
  return latent.dim == 1 && (rope.dim == 1 || rope.size <= 1) && rope.size % kLaneElements == 0 &&
         is_aligned(16, latent.data, {2 * latent.row}) && is_aligned(16, rope.data, {2 * rope.row}) &&
         is_aligned(16, args.cache, {args.block, args.token, MlaRecord{latent.size, rope.size}.rope_at()});
}

// kAligned: every access is one vector.  Otherwise elements are read, and bytes written, one by one.  Waits for the kernel
// before.
template <class T, bool kAligned, int kRows, class Target>
__device__ __forceinline__ void write_mla_records(const RecordPlan& plan, const Target& target, uint32_t first_token) {
  using Loaded = Vec<T, kLaneElements>;
  using Codes = Mover<T, KvFormat::kE4M3, kLaneElements>;
  uint32_t lane;
  const uint32_t group = plan.lanes(blockIdx.x * kConcatThreads + threadIdx.x, lane);
  const uint32_t first = first_token + group * kRows;
  const bool in_latent = lane < plan.latent_lanes;  // all lanes of a tile alike
  const uint32_t tile = lane / kTileLanes;
  const uint32_t column = in_latent ? tile * uint32_t{MlaRecord::kTile} + lane % kTileLanes * kLaneElements
                                    : (lane - plan.latent_lanes) * kLaneElements;
  const uint32_t step = in_latent ? MlaRecord::kTile / kLaneVectors : plan.rope_step;
  const int64_t row = in_latent ? plan.latent_row : plan.rope_row;
  const int64_t dim = kAligned ? int64_t{sizeof(T)} : in_latent ? plan.latent_dim : plan.rope_dim;
  const char* from = (in_latent ? plan.latent : plan.rope) + first * row + column * dim;
  int counts[kLaneVectors];
#pragma unroll
  for (int v = 0; v < kLaneVectors; ++v)
    counts[v] =
        in_latent ? kLaneElements : max(min(static_cast<int>(plan.rope_size - column - v * step), kLaneElements), 0);
  const bool is_given = in_latent || plan.rope;

  have_ready(from);
  if (kAligned && comes_early()) {
    target.prefetch_ids(first, plan.num_tokens);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int v = 0; v < kLaneVectors; ++v)
        if (first + i < plan.num_tokens && counts[v] > 0 && is_given) prefetch(from + i * row + v * step * dim);
  }
  begin_dependent();

  // First what there is to work out while the elements are on their way.
  const auto ids = target.template ids<kRows>(first, plan.num_tokens);
  Loaded loaded[kRows][kLaneVectors];
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) {
      loaded[i][v] = Loaded{};
      if (first + i >= plan.num_tokens || counts[v] == 0 || !is_given) continue;
      const char* at = from + i * row + v * step * dim;
      if constexpr (kAligned) {
        loaded[i][v] = load_vec_in_order<Loaded>(at);
      } else {
        loaded[i][v] = load_elements<T>(at, dim, counts[v]);
      }
    }

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float scale = tile_scale(tile_magnitude(loaded[i]));  // lanes of rope take part, for nothing
    char* place = target.place(ids, i);
    if (!place) continue;
    if (!in_latent) {
#pragma unroll
      for (int v = 0; v < kLaneVectors; ++v) {
        char* to = place + plan.rope_at + 2 * (column + v * step);
        if constexpr (kAligned) {
          if (counts[v] > 0) store_vec(to, loaded[i][v]);
        } else {
          const char* bytes = reinterpret_cast<const char*>(&loaded[i][v]);
#pragma unroll
          for (int b = 0; b < 2 * kLaneElements; ++b)
            if (b < 2 * counts[v]) to[b] = bytes[b];
        }
      }
      continue;
    }
    const Quotient quotient(scale);
#pragma unroll
    for (int v = 0; v < kLaneVectors; ++v) {
      const auto codes = Codes::convert(loaded[i][v], quotient);
      char* to = place + column + v * step;
      if constexpr (kAligned) {
        store_vec(to, codes);
      } else {
#pragma unroll
        for (int b = 0; b < kLaneElements; ++b) to[b] = static_cast<char>(codes[b]);
      }
    }
    if (lane % kTileLanes != 0) continue;
    char* scale_to = place + plan.scales_at + 4 * tile;
    if constexpr (kAligned) {
      *reinterpret_cast<float*>(scale_to) = scale;
    } else {
      for (int b = 0; b < 4; ++b) scale_to[b] = static_cast<char>(__float_as_uint(scale) >> (8 * b));
    }
  }
}

}  // namespace pykv
