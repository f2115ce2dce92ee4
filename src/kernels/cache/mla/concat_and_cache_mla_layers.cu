// For each layer: cache[slot[t] / BS, slot[t] % BS] = concat(kv_c[t], k_pe[t]), copied or quantised by the layer's scale.
//
// Memory-bound as concat_and_cache_mla.cu, and by the same way (concat_rows.cuh); layers are the second dimension of the
// grid.  Addresses of caches travel in the kernel's parameters, or lie in device memory, where they are read after the wait
// for the kernel before.  Nothing is known then of how they are aligned: stores are cut where they must be.
#include <algorithm>

#include "cache/mla/concat_and_cache_mla_layers.h"
#include "cache/mla/concat_rows.cuh"
#include "cache/mla/entry_places.cuh"

namespace pykv {
namespace {

constexpr int kMostCaches = 64;  // whose addresses travel in the parameters

struct Layers {
  int64_t latent, rope, slots;  // bytes from layer to layer
  const int64_t* addresses;     // null: caches
  int64_t address_step;
  uint32_t first;             // that this launch takes
  char* caches[kMostCaches];  // from the first on
};

struct LayerTarget {
  const SlotTarget& slots;
  const Layers& layers;

  template <int kRows>
  struct Ids {
    Slots<kRows> slots;
    char* cache;
  };
  __device__ void prefetch_ids(uint32_t first, uint32_t end) const { slots.prefetch_ids(first, end); }
  template <int kRows>
  __device__ Ids<kRows> ids(uint32_t first, uint32_t end) const {
    const uint32_t layer = blockIdx.y;
    char* cache = layers.addresses
                      ? reinterpret_cast<char*>(layers.addresses[(layers.first + layer) * layers.address_step])
                      : layers.caches[layer];
    return {slots.ids<kRows>(first, end), cache};
  }
  template <int kRows>
  __device__ char* place(const Ids<kRows>& ids, int i) const {
    int64_t page;
    uint32_t offset;
    if (!ids.cache || !slots.map.locate(slots.map.slot(ids.slots, i), page, offset)) return nullptr;
    return ids.cache + page * slots.block + offset * slots.token;
  }
  template <class V>
  static __device__ void store(char* to, const V& v) {
    if (reinterpret_cast<uintptr_t>(to) % sizeof(V) == 0) return store_vec(to, v);
    const char* bytes = reinterpret_cast<const char*>(&v);
#pragma unroll
    for (int b = 0; b < static_cast<int>(sizeof(V)); ++b) to[b] = bytes[b];
  }
};

template <class Mover, int kRows>
__global__ void __launch_bounds__(kConcatThreads)
    concat_layers_kernel(const __grid_constant__ ConcatPlan plan, const __grid_constant__ SlotTarget slots,
                         const __grid_constant__ Layers layers,
                         const __grid_constant__ Scales<Mover::kStoredFormat> scales, uint32_t first_row) {
  const uint32_t layer = layers.first + blockIdx.y;
  ConcatPlan own = plan;
  own.a.data += layer * layers.latent;
  own.b.data += layer * layers.rope;
  SlotTarget own_slots = slots;
  own_slots.map.slots.data = static_cast<const char*>(slots.map.slots.data) + layer * layers.slots;
  concat_rows<Mover, kRows>(
      own, LayerTarget{own_slots, layers},
      [&] {
        float scale = 1.0f;
        if constexpr (Mover::kStoredFormat != KvFormat::kSame) scale = scales.key[layer];
        return scale;
      },
      first_row);
}

template <class Mover>
void launch_layers(const ConcatAndCacheMlaLayersArgs& args, const Launch& launch) {
  constexpr int64_t kWidth = Mover::kWidth, kSource = sizeof(typename Mover::Loaded) / kWidth;
  constexpr int64_t kStored = sizeof(typename Mover::Stored), kMostLayers = 65535;
  const ConcatAndCacheMlaArgs& of = args.first;
  const auto part = [](const MlaPart& p) {
    return ConcatPart{static_cast<const char*>(p.data), RowMap::plain(p.row * kSource), p.dim * kWidth * kSource};
  };
  const int64_t vectors = (of.latent.size + of.rope.size) / kWidth;
  const ConcatPlan plan{part(of.latent),           part(of.rope),
                        Divider(vectors),          static_cast<uint32_t>(of.latent.size / kWidth),
                        of.dim * kWidth * kStored, static_cast<uint32_t>(of.num_tokens)};
  const SlotTarget target = target_of(of, kStored, launch);
  Scales<Mover::kStoredFormat> scales;
  if constexpr (Mover::kStoredFormat != KvFormat::kSame) scales.key = of.scale;
  Layers layers{args.latent_layer * kSource,
                args.rope_layer * kSource,
                args.slots_layer * (of.slots.is_int64 ? 8 : 4),
                args.addresses,
                args.address_step,
                0,
                {}};
  const int64_t most = args.caches ? kMostCaches : kMostLayers;
  for (int64_t first = 0; first < args.num_layers; first += most) {
    const int64_t count = std::min(args.num_layers - first, most);
    layers.first = static_cast<uint32_t>(first);
    for (int64_t i = 0; args.caches && i < count; ++i) layers.caches[i] = static_cast<char*>(args.caches[first + i]);
    dispatch_rows_per_thread<2>(of.num_tokens * count, vectors, launch, [&]<int kRows> {
      for_each_concat_launch(of.num_tokens, vectors, kRows, [&](uint32_t row, uint32_t blocks) {
        launch_dependent(concat_layers_kernel<Mover, kRows>, dim3(blocks, static_cast<uint32_t>(count)), kConcatThreads,
                         launch, "concat_and_cache_mla_layers", plan, target, layers, scales, row);
      });
    });
  }
}

// Whether vectors of 16 bytes of the source fit both parts of all layers, and the distances in the caches.
bool fits(const ConcatAndCacheMlaLayersArgs& args, int64_t stored_size) {
  const ConcatAndCacheMlaArgs& of = args.first;
  const int64_t size = static_cast<int64_t>(size_of(of.dtype)), width = 16 / size;
  const auto fits_part = [&](const MlaPart& p, int64_t layer) {
    return p.size == 0 || (p.dim == 1 && p.size % width == 0 && is_aligned(16, p.data, {p.row * size, layer * size}));
  };
  return fits_part(of.latent, args.latent_layer) && fits_part(of.rope, args.rope_layer) && of.dim == 1 &&
         is_aligned(width * stored_size, nullptr, {of.block * stored_size, of.token * stored_size});
}

}  // namespace

void concat_and_cache_mla_layers_cuda(const ConcatAndCacheMlaLayersArgs& args, const Launch& launch) {
  const ConcatAndCacheMlaArgs& of = args.first;
  if (of.latent.size + of.rope.size >= int64_t{1} << 30) fail(PYKV_NOT_IMPLEMENTED, "entries of 2^30 elements");
  if (of.num_tokens >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "2^31 tokens in one call are not supported");
  if (args.num_layers >= int64_t{1} << 31) fail(PYKV_NOT_IMPLEMENTED, "2^31 layers in one call are not supported");
  const auto launch_with = [&]<class T, KvFormat kFormat> {
    return fits(args, kFormat == KvFormat::kSame ? sizeof(T) : 1)
               ? launch_layers<Mover<T, kFormat, 16 / sizeof(T)>>(args, launch)
               : launch_layers<Mover<T, kFormat, 1>>(args, launch);
  };
  if (of.format == KvFormat::kSame)
    return size_of(of.dtype) == 2 ? launch_with.operator()<uint16_t, KvFormat::kSame>()
                                  : launch_with.operator()<uint32_t, KvFormat::kSame>();
  dispatch<half, bf16, float>(of.dtype, [&]<class T> {
    of.format == KvFormat::kE4M3 ? launch_with.template operator()<T, KvFormat::kE4M3>()
                                 : launch_with.template operator()<T, KvFormat::kE5M2>();
  });
}

}  // namespace pykv
