// Twin of concat_and_cache_mla_layers.cu: one layer after the other.
#include "cache/mla/concat_and_cache_mla_layers.h"

namespace pykv::PYKV_ISA {

void concat_and_cache_mla_layers_cpu(const ConcatAndCacheMlaLayersArgs& args, const Launch& launch) {
  ConcatAndCacheMlaArgs layer = args.first;
  const int64_t size = static_cast<int64_t>(size_of(layer.dtype)), id_size = layer.slots.is_int64 ? 8 : 4;
  const auto at = [](const void* data, int64_t bytes) { return static_cast<const char*>(data) + bytes; };
  for (int64_t l = 0; l < args.num_layers; ++l) {
    layer.cache = args.caches ? args.caches[l] : reinterpret_cast<void*>(args.addresses[l * args.address_step]);
    if (!layer.cache) continue;
    layer.latent.data = at(args.first.latent.data, l * args.latent_layer * size);
    layer.rope.data = at(args.first.rope.data, l * args.rope_layer * size);
    layer.slots.data = at(args.first.slots.data, l * args.slots_layer * id_size);
    layer.scale.data = nullptr;
    layer.scale.stride = 0;
    layer.scale.values[0] = args.first.scale[l];
    PYKV_ISA::concat_and_cache_mla_cpu(layer, launch);
  }
}

}  // namespace pykv::PYKV_ISA
