// cache[slot[t] / BS, slot[t] % BS] = concat(kv_c[t], k_pe[t]): copied, quantised by one scale (concat_rows.cuh), or as
// fp8_ds_mla records with a scale for each tile of 128, worked out here.
//
// All read each element once and write its bytes once; the floor is that traffic at copy bandwidth.
//
// Records: 16 neighbouring lanes take a tile, 8 elements each, so that its amax is four shuffles away; lanes beyond the
// tiles copy rope.  As in concat_rows.cuh a thread does this for kRowsPerThread neighbouring tokens at once.
#include <algorithm>

#include "cache/concat_and_cache_mla.h"
#include "cache/concat_rows.cuh"
#include "cache/mla_record.h"
#include "cache/nvfp4_tokens.cuh"
#include "cache/slot_map.cuh"

namespace pykv {
namespace {

struct SlotTarget {
  SlotMap map;
  char* cache;
  int64_t block, token;  // bytes

  __device__ char* operator()(int64_t t) const {
    int64_t page;
    uint32_t offset;
    return map.locate(map.slots[t], page, offset) ? cache + page * block + offset * token : nullptr;
  }
};

template <class Mover>
__global__ void __launch_bounds__(kConcatThreads)
    concat_and_cache_mla_kernel(const __grid_constant__ ConcatPlan plan, const __grid_constant__ SlotTarget target,
                                const __grid_constant__ Scales<Mover::kStoredFormat> scales, int64_t first_row) {
  float scale = 1.0f;
  if constexpr (Mover::kStoredFormat != KvFormat::kSame) scale = scales.key[0];
  concat_rows<Mover>(plan, target, scale, first_row);
}

struct PagePlan {
  const char *latent, *rope;
  int64_t latent_row, latent_dim, rope_row, rope_dim;  // bytes
  int64_t latent_size;
  Divider blocks;  // of 16 elements, in an entry
  char* cache;
  int64_t block;
  Nvfp4Page page;
  SlotMap map;
};

// nvfp4, as of one head.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kConcatThreads)
    mla_nvfp4_kernel(const __grid_constant__ PagePlan plan, const __grid_constant__ Scale scale, int64_t first_token) {
  uint32_t block;
  const uint32_t group = plan.blocks(blockIdx.x * kConcatThreads + threadIdx.x, block);
  const int64_t first = first_token + int64_t{group} * kNvfp4Tokens, end = first + kNvfp4Tokens;
  const int64_t column = int64_t{block} * kNvfp4Block, in_rope = column - plan.latent_size;
  const bool from_rope = in_rope >= 0;
  const char *latent = plan.latent + column * plan.latent_dim, *rope = plan.rope + in_rope * plan.rope_dim;
  const Nvfp4Source source = {from_rope ? rope : latent,
                              rope,
                              from_rope ? plan.rope_row : plan.latent_row,
                              plan.rope_row,
                              from_rope ? plan.rope_dim : plan.latent_dim,
                              plan.rope_dim,
                              from_rope ? kNvfp4Block : static_cast<int>(min(-in_rope, int64_t{kNvfp4Block}))};
  const Nvfp4Target target(plan.cache, plan.block, plan.page, 0, block);
  write_nvfp4<T, kAligned>(plan.map, source, target, scale[0], first,
                           end < plan.map.num_tokens ? end : plan.map.num_tokens);
}

struct RecordPlan {
  const char *latent, *rope;
  int64_t latent_row, latent_dim, rope_row, rope_dim;  // bytes
  Divider lanes;                                       // that a token takes: a multiple of 16
  uint32_t latent_lanes, rope_size;
  int64_t scales_at, rope_at;
  int64_t num_tokens;
};

constexpr int kLaneElements = 8, kTileLanes = MlaRecord::kTile / kLaneElements;

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

// kAligned: every access is one vector.  Otherwise elements are read, and bytes written, one by one.
template <class T, bool kAligned>
__global__ void __launch_bounds__(kConcatThreads)
    mla_record_kernel(const __grid_constant__ RecordPlan plan, const __grid_constant__ SlotTarget target,
                      int64_t first_token) {
  using Loaded = Vec<T, kLaneElements>;
  using Codes = Mover<T, KvFormat::kE4M3, kLaneElements>;
  uint32_t lane;
  const uint32_t group = plan.lanes(blockIdx.x * kConcatThreads + threadIdx.x, lane);
  const int64_t first = first_token + int64_t{group} * kRowsPerThread;
  const bool in_latent = lane < plan.latent_lanes;  // all 16 lanes of a tile alike
  const uint32_t column = (in_latent ? lane : lane - plan.latent_lanes) * kLaneElements;
  const int count = in_latent ? kLaneElements : min(static_cast<int>(plan.rope_size - column), kLaneElements);
  if (count <= 0) return;  // no lane of a tile
  const char* from = in_latent ? plan.latent + column * plan.latent_dim : plan.rope + column * plan.rope_dim;
  const int64_t row = in_latent ? plan.latent_row : plan.rope_row, dim = in_latent ? plan.latent_dim : plan.rope_dim;

  Loaded loaded[kRowsPerThread];
  char* places[kRowsPerThread];
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    loaded[i] = Loaded{};
    if (first + i >= plan.num_tokens) continue;
    const char* token = from + (first + i) * row;
    if constexpr (kAligned) {
      loaded[i] = load_vec<Loaded>(token);
    } else {
      loaded[i] = load_elements<T>(token, dim, count);
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) places[i] = first + i < plan.num_tokens ? target(first + i) : nullptr;

  if (!in_latent) {
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
      if (!places[i]) continue;
      char* to = places[i] + plan.rope_at + 2 * column;
      if constexpr (kAligned) {
        store_vec(to, loaded[i]);
      } else {
        const char* bytes = reinterpret_cast<const char*>(&loaded[i]);
#pragma unroll
        for (int b = 0; b < 2 * kLaneElements; ++b)
          if (b < 2 * count) to[b] = bytes[b];
      }
    }
    return;
  }

  const uint32_t tile_mask = 0xffffu << (threadIdx.x & 16);
#pragma unroll
  for (int i = 0; i < kRowsPerThread; ++i) {
    const Vec<float, kLaneElements> x = to_floats(loaded[i]);
    float most = 0.0f;
#pragma unroll
    for (int e = 0; e < kLaneElements; ++e) most = fmaxf(most, fabsf(x[e]));  // NaN is not counted
#pragma unroll
    for (int distance = kTileLanes / 2; distance > 0; distance /= 2)
      most = fmaxf(most, __shfl_xor_sync(tile_mask, most, distance));
    const float scale = fmaxf(__fdiv_rn(most, MlaRecord::kLargest), MlaRecord::kLeastScale);
    if (!places[i]) continue;
    const auto codes = Codes::convert(loaded[i], Quotient(scale));
    char* to = places[i] + column;
    char* scale_to = places[i] + plan.scales_at + lane / kTileLanes * 4;
    if constexpr (kAligned) {
      store_vec(to, codes);
      if (lane % kTileLanes == 0) *reinterpret_cast<float*>(scale_to) = scale;
    } else {
#pragma unroll
      for (int b = 0; b < kLaneElements; ++b) to[b] = static_cast<char>(codes[b]);
      if (lane % kTileLanes == 0)
        for (int b = 0; b < 4; ++b) scale_to[b] = static_cast<char>(__float_as_uint(scale) >> (8 * b));
    }
  }
}

SlotMap slot_map_of(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  const int64_t num_slots = args.num_blocks * args.block_size;
  if (args.block_size >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "blocks of 2^31 tokens are not supported");
  return {args.slots,
          args.num_tokens,
          num_slots,
          Divider(args.block_size),
          num_slots >= int64_t{1} << 31,
          launch.reporter(args.report)};
}

SlotTarget target_of(const ConcatAndCacheMlaArgs& args, int64_t stored_size, const Launch& launch) {
  return {slot_map_of(args, launch), static_cast<char*>(args.cache), args.block * stored_size,
          args.token * stored_size};
}

// launch(first token, blocks) for as many tokens at a time as 31-bit numbers allow.
template <class F>
void for_each_launch(const ConcatAndCacheMlaArgs& args, int64_t vectors, F&& launch_some) {
  if (args.num_tokens >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "2^31 tokens in one call are not supported");
  const int64_t most = rows_of_a_launch(vectors);
  for (int64_t first = 0; first < args.num_tokens; first += most) {
    launch_some(first, concat_blocks(std::min(most, args.num_tokens - first), vectors));
    check_launch("concat_and_cache_mla");
  }
}

template <class Mover>
void launch_concat(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  constexpr int64_t kWidth = Mover::kWidth, kSource = sizeof(typename Mover::Loaded) / kWidth;
  constexpr int64_t kStored = sizeof(typename Mover::Stored);
  const auto part = [](const MlaPart& p) {
    return ConcatPart{static_cast<const char*>(p.data), {Divider(1), p.row * kSource, 0}, p.dim * kWidth * kSource};
  };
  const int64_t vectors = (args.latent.size + args.rope.size) / kWidth;
  const ConcatPlan plan{
      part(args.latent),           part(args.rope), Divider(vectors), static_cast<uint32_t>(args.latent.size / kWidth),
      args.dim * kWidth * kStored, args.num_tokens};
  const SlotTarget target = target_of(args, kStored, launch);
  Scales<Mover::kStoredFormat> scales;
  if constexpr (Mover::kStoredFormat != KvFormat::kSame) scales.key = args.scale;
  for_each_launch(args, vectors, [&](int64_t first, uint32_t blocks) {
    concat_and_cache_mla_kernel<Mover><<<blocks, kConcatThreads, 0, stream_of(launch)>>>(plan, target, scales, first);
  });
}

template <class T>
void launch_records(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  const MlaPart &latent = args.latent, &rope = args.rope;
  const MlaRecord record{latent.size, rope.size};
  const uint32_t latent_lanes = static_cast<uint32_t>(latent.size / kLaneElements);
  const int64_t rope_lanes = (rope.size + kLaneElements - 1) / kLaneElements;
  const int64_t lanes = latent_lanes + (rope_lanes + kTileLanes - 1) / kTileLanes * kTileLanes;
  const RecordPlan plan{static_cast<const char*>(latent.data),
                        static_cast<const char*>(rope.data),
                        2 * latent.row,
                        2 * latent.dim,
                        2 * rope.row,
                        2 * rope.dim,
                        Divider(lanes),
                        latent_lanes,
                        static_cast<uint32_t>(rope.size),
                        record.scales_at(),
                        record.rope_at(),
                        args.num_tokens};
  const bool aligned = latent.dim == 1 && (rope.dim == 1 || rope.size <= 1) && rope.size % kLaneElements == 0 &&
                       is_aligned(16, latent.data, {2 * latent.row}) && is_aligned(16, rope.data, {2 * rope.row}) &&
                       is_aligned(16, args.cache, {args.block, args.token, record.rope_at()});
  const SlotTarget target = target_of(args, 1, launch);
  for_each_launch(args, lanes, [&](int64_t first, uint32_t blocks) {
    dispatch_bool(aligned, [&]<bool kAligned> {
      mla_record_kernel<T, kAligned><<<blocks, kConcatThreads, 0, stream_of(launch)>>>(plan, target, first);
    });
  });
}

template <class T>
void launch_nvfp4(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  constexpr int64_t kSource = sizeof(T);
  const MlaPart &latent = args.latent, &rope = args.rope;
  const int64_t blocks = (latent.size + rope.size) / kNvfp4Block;
  const PagePlan plan{static_cast<const char*>(latent.data),
                      static_cast<const char*>(rope.data),
                      latent.row * kSource,
                      latent.dim * kSource,
                      rope.row * kSource,
                      rope.dim * kSource,
                      latent.size,
                      Divider(blocks),
                      static_cast<char*>(args.cache),
                      args.block,
                      args.page,
                      slot_map_of(args, launch)};
  const auto fits = [](const MlaPart& p) {
    return p.size == 0 || (p.size % kNvfp4Block == 0 && p.dim == 1 && is_aligned(16, p.data, {p.row * kSource}));
  };
  const bool aligned = fits(latent) && fits(rope) && is_aligned(8, args.cache, {args.block});
  static_assert(kNvfp4Tokens == kRowsPerThread);
  for_each_launch(args, blocks, [&](int64_t first, uint32_t grid) {
    dispatch_bool(aligned, [&]<bool kAligned> {
      mla_nvfp4_kernel<T, kAligned><<<grid, kConcatThreads, 0, stream_of(launch)>>>(plan, args.scale, first);
    });
  });
}

// Whether vectors of `bytes` of the source fit both parts and the cache.
bool fits(const ConcatAndCacheMlaArgs& args, int64_t bytes, int64_t stored_size) {
  const int64_t size = static_cast<int64_t>(size_of(args.dtype)), width = bytes / size;
  for (const MlaPart* p : {&args.latent, &args.rope}) {
    if (p->size == 0) continue;
    if (p->dim != 1 || p->size % width != 0 || !is_aligned(bytes, p->data, {p->row * size})) return false;
  }
  return args.dim == 1 &&
         is_aligned(width * stored_size, args.cache, {args.block * stored_size, args.token * stored_size});
}

}  // namespace

void concat_and_cache_mla_cuda(const ConcatAndCacheMlaArgs& args, const Launch& launch) {
  if (args.latent.size + args.rope.size >= int64_t{1} << 30) fail(PYKV_NOT_IMPLEMENTED, "entries of 2^30 elements");
  if (args.entry == MlaEntry::kRecord)
    return dispatch<half, bf16>(args.dtype, [&]<class T> { launch_records<T>(args, launch); });
  const bool wide = fits(args, 16, args.format == KvFormat::kSame ? static_cast<int64_t>(size_of(args.dtype)) : 1);
  const auto launch_with = [&]<class T, KvFormat kFormat> {
    return wide ? launch_concat<Mover<T, kFormat, 16 / sizeof(T)>>(args, launch)
                : launch_concat<Mover<T, kFormat, 1>>(args, launch);
  };
  switch (args.format) {
    case KvFormat::kSame:
      return size_of(args.dtype) == 2 ? launch_with.operator()<uint16_t, KvFormat::kSame>()
                                      : launch_with.operator()<uint32_t, KvFormat::kSame>();
    case KvFormat::kE4M3:
      return dispatch<half, bf16, float>(args.dtype,
                                         [&]<class T> { launch_with.template operator()<T, KvFormat::kE4M3>(); });
    case KvFormat::kE5M2:
      return dispatch<half, bf16, float>(args.dtype,
                                         [&]<class T> { launch_with.template operator()<T, KvFormat::kE5M2>(); });
    case KvFormat::kInt8:
      return dispatch<half, bf16, float>(args.dtype,
                                         [&]<class T> { launch_with.template operator()<T, KvFormat::kInt8>(); });
    case KvFormat::kNvfp4:
      return dispatch<half, bf16, float>(args.dtype, [&]<class T> { launch_nvfp4<T>(args, launch); });
  }
}

}  // namespace pykv
