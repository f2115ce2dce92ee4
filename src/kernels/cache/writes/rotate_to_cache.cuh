// Heads rotated in place, and rotated keys into their slots of a cache as well, by some of the blocks of a launch.
//
// The work of all tokens is numbered through, in units: two vectors (so many pairs as a vector has elements) of up to
// kRotatedHeads heads, which share their cosines and sines; or two vectors of what of a key is not rotated.  A thread has
// its elements, slot and position under way before it waits for the position, and then for what that points to.
//
// Packed keys have 16 bytes of neighbouring tokens side by side: there, units are numbered through tiles of four tokens, so
// that a warp writes whole sectors (65536 tokens on an H200: 455 us, not 572).
#pragma once

#include <algorithm>

#include "cache/writes/reshape_and_cache.cuh"
#include "cache/writes/rotary_and_cache.h"
#include "cuda/rotation.cuh"

namespace pykv {

inline constexpr int kRotatedHeads = 2;

struct RotationPlan {
  Rotation rotation;
  Reporter report;
  Divider units;  // of a tile: of 2^tile_log2 neighbouring tokens
  uint32_t tile_log2;
  Divider columns;         // pairs of vectors of a head
  uint32_t rotated_units;  // columns times groups; the others are rest
  uint32_t groups;         // a thread's heads lie so many apart
  uint32_t first_vector;   // of a head's rotated part
  uint32_t rotated_vectors;
  Divider rest;           // pairs of vectors of a key that are not rotated
  uint32_t rest_vectors;  // 2 rest, or one less
  bool in_dtype, only_cached, rotate_only;
  uint32_t num_blocks;
};

// Where one token's keys go; the cache of `side` in vectors of Mover.
template <class Mover>
class KeyPlace {
 public:
  __device__ KeyPlace(const SlotMap& map, const SidePlan& side, int64_t slot) : side_(side) {
    int64_t page;
    uint32_t offset;
    token_ = map.locate(slot, page, offset) ? side.cache + page * side.block + offset * side.token : nullptr;
  }
  __device__ explicit operator bool() const { return token_; }
  __device__ void store(uint32_t head, uint32_t vector, const typename Mover::Loaded& v,
                        const Quotient& quotient) const {
    uint32_t in_chunk;
    const uint32_t chunk = side_.vectors_per_chunk(vector, in_chunk);
    store_vec(token_ + head * side_.head + chunk * side_.chunk + in_chunk * sizeof(typename Mover::Result),
              Mover::convert(v, quotient));
  }

 private:
  const SidePlan& side_;
  char* token_;
};

// What of a key is not rotated: before the rotated part and after it.
template <class Mover, class T>
__device__ __forceinline__ void copy_rest(const RotationPlan& plan, const SlotMap& map, const SidePlan& side,
                                          const Scale* scale, int64_t t, uint32_t unit) {
  using V = typename Mover::Loaded;
  constexpr uint32_t kWidth = Mover::kWidth;
  begin_dependent();
  if (t >= map.num_tokens) return;
  const RotaryHeads& keys = plan.rotation.key;
  uint32_t pair;
  const uint32_t head = plan.rest(unit, pair), first = 2 * pair;
  const bool two = first + 1 < plan.rest_vectors;
  const auto in_head = [&](uint32_t n) { return n < plan.first_vector ? n : n + plan.rotated_vectors; };
  const T* from = static_cast<const T*>(keys.data) + t * keys.token + head * keys.head;
  const auto load = [&](uint32_t n) {
    return load_vec<V>(from + (static_cast<int64_t>(in_head(n)) - plan.first_vector) * kWidth);
  };
  V v[2];
  v[0] = load(first);
  if (two) v[1] = load(first + 1);
  const Quotient quotient(scale ? (*scale)[head] : 1.0f);
  const KeyPlace<Mover> place(map, side, map.slots[t]);
  if (!place) return;
  place.store(head, in_head(first), v[0], quotient);
  if (two) place.store(head, in_head(first + 1), v[1], quotient);
}

// `block` counts from the first block that rotates.
template <class Mover, class T>
__device__ __forceinline__ void rotate_to_cache(const RotationPlan& plan, const SlotMap& map, const SidePlan& side,
                                                const Scale* scale, uint32_t block) {
  using V = typename Mover::Loaded;
  constexpr int kWidth = Mover::kWidth;
  const Rotation& rotation = plan.rotation;
  uint32_t unit, column = 0;
  int64_t t = int64_t{plan.units(block * blockDim.x + threadIdx.x, unit)} << plan.tile_log2;
  const uint32_t all_rotated = plan.rotated_units << plan.tile_log2;
  const bool rotates = unit < all_rotated;
  unit = rotates ? plan.columns(unit, column) : unit - all_rotated;
  t += unit & ((1u << plan.tile_log2) - 1);
  unit >>= plan.tile_log2;
  if (t >= rotation.num_tokens) return begin_dependent();
  if (!rotates) return copy_rest<Mover, T>(plan, map, side, scale, t, unit);

  const uint32_t group = unit;
  const uint32_t low = rotation.is_neox ? column : 2 * column, high = low + (rotation.is_neox ? plan.columns.d : 1);
  const uint32_t num_queries = static_cast<uint32_t>(rotation.query.num_heads);
  const uint32_t num_heads = num_queries + static_cast<uint32_t>(rotation.key.num_heads);
  T* heads[kRotatedHeads];
#pragma unroll
  for (int k = 0; k < kRotatedHeads; ++k) {
    const uint32_t h = group + k * plan.groups;
    const bool is_query = h < num_queries;
    const RotaryHeads& of = is_query ? rotation.query : rotation.key;
    heads[k] = static_cast<T*>(of.data) + t * of.token + (is_query ? h : h - num_queries) * of.head;
    have_ready(heads[k]);
  }
  if (comes_early()) {
    prefetch_angles(rotation, t * rotation.position_token, column * kWidth);
#pragma unroll
    for (int k = 0; k < kRotatedHeads; ++k) {
      if (group + k * plan.groups >= num_heads) continue;
      prefetch(heads[k] + low * kWidth);
      prefetch(heads[k] + high * kWidth);
    }
    map.prefetch_slot(t);
  }
  begin_dependent();
  PositionLoad position_load(rotation.positions, t * rotation.position_token);
  V v[kRotatedHeads][2];
  float scales[kRotatedHeads];
  bool any_key = false;
#pragma unroll
  for (int k = 0; k < kRotatedHeads; ++k) {
    const uint32_t h = group + k * plan.groups;
    const bool is_query = h < num_queries;
    if (h >= num_heads) continue;
    v[k][0] = load_vec<V>(heads[k] + low * kWidth);
    v[k][1] = load_vec<V>(heads[k] + high * kWidth);
    any_key |= !is_query;
    scales[k] = scale && !is_query ? (*scale)[h - num_queries] : 1.0f;
  }
  const int64_t slot = (any_key || plan.only_cached) && t < map.num_tokens ? map.slots[t] : -1;

  const int64_t position = position_load.wait(rotation.positions.is_int64);
  const KeyPlace<Mover> place(map, side, slot);
  if (plan.only_cached && !place) return;
  if (position >= 0 && position < rotation.max_position) {
    const Angles<kWidth> angles = load_angles<kWidth>(rotation, position, column * kWidth);
    const auto turn = [&](V& x, V& y) {
      if (plan.in_dtype)
        return rotation.is_neox ? rotate_in_dtype<true>(x, y, angles) : rotate_in_dtype<false>(x, y, angles);
      rotation.is_neox ? rotate<true>(x, y, angles) : rotate<false>(x, y, angles);
    };
#pragma unroll
    for (int k = 0; k < kRotatedHeads; ++k) {
      if (group + k * plan.groups >= num_heads) continue;
      turn(v[k][0], v[k][1]);
      store_vec(heads[k] + low * kWidth, v[k][0]);
      store_vec(heads[k] + high * kWidth, v[k][1]);
    }
  } else {
    plan.report(position, rotation.max_position);
  }
  if (!place || plan.rotate_only) return;
#pragma unroll
  for (int k = 0; k < kRotatedHeads; ++k) {
    const uint32_t h = group + k * plan.groups;
    if (h < num_queries || h >= num_heads) continue;
    const Quotient quotient(scales[k]);
    place.store(h - num_queries, plan.first_vector + low, v[k][0], quotient);
    place.store(h - num_queries, plan.first_vector + high, v[k][1], quotient);
  }
}

// Elements that a vector of queries and keys may have: `most`, or 1.
inline int64_t rotation_width(const RotaryAndCacheArgs& args, int64_t most) {
  const Rotation& rotation = args.rotation;
  const int64_t size = static_cast<int64_t>(size_of(rotation.dtype));
  const bool fits = args.rope_dim_offset % most == 0 && angles_fit(rotation, most) &&
                    heads_fit(rotation.query, size, most) && heads_fit(rotation.key, size, most);
  return fits ? most : 1;
}

inline RotationPlan plan_rotation(const RotaryAndCacheArgs& args, int64_t width, int64_t heads_per_thread,
                                  int64_t threads, int tile_log2, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  const int64_t num_keys = rotation.key.num_heads, num_heads = rotation.query.num_heads + num_keys;
  const int64_t columns = rotation.rotary_dim / 2 / width,
                groups = (num_heads + heads_per_thread - 1) / heads_per_thread;
  const int64_t rest_vectors = args.rotate_only ? 0 : (args.cache.key.head_size - rotation.rotary_dim) / width;
  const int64_t rest = (rest_vectors + 1) / 2, rotated_units = columns * groups,
                units = (rotated_units + num_keys * rest) << tile_log2;
  const int64_t tiles = (rotation.num_tokens + (1 << tile_log2) - 1) >> tile_log2;
  const int64_t blocks = (tiles * units + threads - 1) / threads;
  if (units >= int64_t{1} << 31 || blocks * threads >= int64_t{1} << 31)
    fail(PYKV_NOT_IMPLEMENTED, "too many tokens for one call");
  return {rotation,
          launch.reporter(rotation.report),
          Divider(units),
          static_cast<uint32_t>(tile_log2),
          Divider(columns),
          static_cast<uint32_t>(rotated_units),
          static_cast<uint32_t>(groups),
          static_cast<uint32_t>(args.rope_dim_offset / width),
          static_cast<uint32_t>(2 * columns),
          Divider(rest),
          static_cast<uint32_t>(rest_vectors),
          args.in_dtype,
          args.only_cached,
          args.rotate_only,
          static_cast<uint32_t>(blocks)};
}

}  // namespace pykv
