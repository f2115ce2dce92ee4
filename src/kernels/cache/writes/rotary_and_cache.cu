// query and key rotated in place; cache[slot[t] / BS, slot[t] % BS] = rotated key[t] (and value[t]): the results of
// rotary_embedding and reshape_and_cache in one launch.
//
// Memory-bound: queries and keys are moved in and out once, and keys and values into the cache; the floor is that traffic
// at copy bandwidth.  Against the two launches it spares a launch and reading the keys again.  The first blocks write
// values as reshape_and_cache does (write_side.cuh), the others rotate (rotate_to_cache.cuh).
#include <algorithm>

#include "cache/writes/rotary_and_cache.h"
#include "cache/writes/rotate_to_cache.cuh"
#include "cache/writes/write_side.cuh"
#include "cuda/dependent.cuh"

namespace pykv {
namespace {

// Blocks that an SM must hold; where conversions to fp8 are code, they want registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
constexpr int kLeastBlocks = 3;
#else
constexpr int kLeastBlocks = 4;
#endif

constexpr int kThreads = 256;
constexpr int64_t kManyTokens = 512;  // from so many on, tiles of tokens (rotate_to_cache.cuh)

// Values are copied as bits.
template <class T, KvFormat kFormat, int kWidth>
using ValueMover =
    Mover<std::conditional_t<kFormat != KvFormat::kSame, T, std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>,
          kFormat, kWidth>;

template <class T, KvFormat kFormat, int kWidth, bool kTransposes>
__global__ void __launch_bounds__(kThreads, kLeastBlocks)
    rotary_and_cache_kernel(const __grid_constant__ Plan plan, const __grid_constant__ RotationPlan rotation,
                            const __grid_constant__ Scales<kFormat> scales) {
  const Scale *k_scale = nullptr, *v_scale = nullptr;
  if constexpr (kFormat != KvFormat::kSame) k_scale = &scales.key, v_scale = &scales.value;
  const uint32_t value_blocks = plan.value.num_blocks;
  if (blockIdx.x < value_blocks) {
    write_side<ValueMover<T, kFormat, kWidth>, kTransposes, kThreads>(plan.map, plan.value, v_scale, blockIdx.x);
  } else {
    rotate_to_cache<Mover<T, kFormat, kWidth>, T>(rotation, plan.map, plan.key, k_scale, blockIdx.x - value_blocks);
  }
}

template <class T, KvFormat kFormat, int kWidth, bool kTransposes>
void launch_kernel(const RotaryAndCacheArgs& args, const Launch& launch) {
  using Values = ValueMover<T, kFormat, kWidth>;
  const ReshapeAndCacheArgs& cache = args.cache;
  const Widths w{kWidth, sizeof(T), sizeof(typename Values::Stored)};
  Plan plan{};
  plan.map = slot_map_of(cache, launch);
  Scales<kFormat> scales;
  if constexpr (kFormat != KvFormat::kSame) scales = {cache.key.scale, cache.value.scale};

  // Few tokens are spread over the machine.
  Grain grain = Grain::coarsest<Values, kTransposes>(kThreads);
  int64_t heads = kRotatedHeads;
  const uint32_t enough = (kTransposes ? 4 : 2) * num_sms(launch.device);
  // Where the next token is nearer in the cache than the next vector, neighbouring lanes take neighbouring tokens.
  const int tile_log2 =
      !args.rotate_only && cache.key.chunk < cache.key.head_size && cache.num_tokens >= kManyTokens ? 2 : 0;
  RotationPlan rotation;
  uint32_t blocks;
  do {
    plan.key = plan_side(cache.key, cache, w, grain);
    if (!args.rotate_only) plan.value = plan_side(cache.value, cache, w, grain);
    rotation = plan_rotation(args, kWidth, heads, grain.threads, tile_log2, launch);
    blocks = plan.value.num_blocks + rotation.num_blocks;
    heads = 1;
  } while (blocks < enough && grain.refine());
  if (blocks == 0) return;
  launch_dependent(rotary_and_cache_kernel<T, kFormat, kWidth, kTransposes>, blocks, grain.threads, launch,
                   "rotary_and_cache", plan, rotation, scales);
}

// Rotates alone: a second launch writes what this one has no way to store, such as nvfp4, whose blocks lie across the
// vectors that are rotated.
template <class T>
void rotate_first(RotaryAndCacheArgs args, const Launch& launch) {
  args.rotate_only = true;
  if (rotation_width(args, kPackSize<T>) == kPackSize<T>) {
    launch_kernel<T, KvFormat::kSame, kPackSize<T>, false>(args, launch);
  } else {
    launch_kernel<T, KvFormat::kSame, 1, false>(args, launch);
  }
}

template <class T, KvFormat kFormat>
void launch_with(const RotaryAndCacheArgs& args, const Launch& launch) {
  constexpr int kWidth = kPackSize<T>;
  const ReshapeAndCacheArgs& cache = args.cache;
  const int64_t stored_size = kFormat == KvFormat::kSame ? sizeof(T) : 1;
  const bool transposed = transposes(cache.value, cache.block_size);
  const bool wide = rotation_width(args, kWidth) == kWidth &&
                    vector_width(cache.key, sizeof(T), stored_size, false) >= kWidth &&
                    vector_width(cache.value, sizeof(T), stored_size, transposed) >= kWidth;
  if (!wide) {
    launch_kernel<T, kFormat, 1, false>(args, launch);
  } else if (transposed) {
    launch_kernel<T, kFormat, kWidth, true>(args, launch);
  } else {
    launch_kernel<T, kFormat, kWidth, false>(args, launch);
  }
}

}  // namespace

void rotary_and_cache_cuda(const RotaryAndCacheArgs& args, const Launch& launch) {
  dispatch<half, bf16, float>(args.rotation.dtype, [&]<class T>() {
    if (args.rotate_only) return rotate_first<T>(args, launch);
    switch (args.cache.format) {
      case KvFormat::kSame:
        return launch_with<T, KvFormat::kSame>(args, launch);
      case KvFormat::kE4M3:
        return launch_with<T, KvFormat::kE4M3>(args, launch);
      case KvFormat::kE5M2:
        return launch_with<T, KvFormat::kE5M2>(args, launch);
      case KvFormat::kInt8:
        return launch_with<T, KvFormat::kInt8>(args, launch);
      case KvFormat::kNvfp4:
        rotate_first<T>(args, launch);
        return reshape_and_cache_cuda(args.cache, launch);
    }
  });
}

}  // namespace pykv
