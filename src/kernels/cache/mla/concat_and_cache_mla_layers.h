// Latent vectors and rotated keys of several layers into their slots, all layers at once.  The idea behind
// pykv_concat_and_cache_mla_layers and pykv_concat_and_cache_mla_grouped.
#pragma once

#include "cache/mla/concat_and_cache_mla.h"

namespace pykv {

struct ConcatAndCacheMlaLayersArgs {
  // What layers have in common, and where the first one's rows and slots are.  Its cache is not looked at; there is a scale
  // for all of them, or one for each.
  ConcatAndCacheMlaArgs first;
  int64_t num_layers = 0;
  int64_t latent_layer = 0, rope_layer = 0, slots_layer = 0;  // elements from layer to layer
  void* const* caches = nullptr;                              // null: addresses
  const int64_t* addresses = nullptr;                         // in the memory of the call's device; 0: no such layer
  int64_t address_step = 0;                                   // elements
};

PYKV_CPU_TWIN(concat_and_cache_mla_layers_cpu, ConcatAndCacheMlaLayersArgs)
void concat_and_cache_mla_layers_cuda(const ConcatAndCacheMlaLayersArgs& args, const Launch& launch);

}  // namespace pykv
