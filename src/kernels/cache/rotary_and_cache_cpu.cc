// Twin of rotary_and_cache.cu.  Memory-bound: a few tokens at a time are rotated, and their keys written into the cache
// while they are still in the CPU's own.
#include <algorithm>

#include "cache/rotary_and_cache.h"
#include "cache/write_tokens_cpu.h"
#include "cpu/parallel.h"
#include "cpu/rotation.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T, class Convert>
void run(const RotaryAndCacheArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  const ReshapeAndCacheArgs& cache = args.cache;
  const Reporter bad_position = launch.reporter(rotation.report), bad_slot = launch.reporter(cache.report);
  const int64_t cached_bytes =
      cache.num_heads * (cache.key.head_size + cache.value.head_size) * static_cast<int64_t>(sizeof(T));
  const int64_t rotated_bytes =
      (rotation.query.num_heads + rotation.key.num_heads) * rotation.rotary_dim * static_cast<int64_t>(sizeof(T));
  const bool past_caches = cache.num_tokens * cached_bytes > kWorthStreaming;
  const int64_t groups = (rotation.num_tokens + kGroup - 1) / kGroup;
  const int64_t grain = kBytesPerTask / (kGroup * (cached_bytes + rotated_bytes) + 1) + 1;
  parallel_for(groups, grain, [&](int64_t first, int64_t last) {
    TokenRotator<T> rotate(rotation, bad_position);
    for (int64_t group = first; group < last; ++group) {
      const int64_t begin = group * kGroup, end = std::min(begin + kGroup, rotation.num_tokens);
      if (rotation.rotary_dim > 0)
        for (int64_t t = begin; t < end; ++t) rotate(t);
      write_tokens<Convert>(cache, bad_slot, begin, std::min(end, cache.num_tokens), past_caches);
    }
    if (past_caches) finish_streaming();
  });
}

}  // namespace

void rotary_and_cache_cpu(const RotaryAndCacheArgs& args, const Launch& launch) {
  dispatch<float, f16, bf16>(args.rotation.dtype, [&]<class T>() {
    with_conversion<T>(args.cache.format, [&]<class Convert>() { run<T, Convert>(args, launch); });
  });
}

}  // namespace pykv::PYKV_ISA
