// Twin of rotary_and_cache.cu.  Memory-bound: a few tokens at a time are rotated, and their keys written into the cache
// while they are still in the CPU's own; an entry of MLA at once, so that there is no time without reading or without writing.
// What comes is asked for: 16 threads of a Xeon did three quarters of a copy without both, 95 % with them.
#include <algorithm>
#include <memory>
#include <type_traits>

#include "cache/writes/rotary_and_cache.h"
#include "cache/writes/token_writer_cpu.h"
#include "cpu/parallel.h"
#include "cpu/prefetch.h"
#include "cpu/rotation.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {
namespace {

bool is_cached(const ReshapeAndCacheArgs& cache, int64_t token) {
  if (token >= cache.num_tokens) return false;
  const int64_t slot = cache.slots[token];
  return slot >= 0 && slot < cache.num_blocks * cache.block_size;
}

// Asks for a token's value, if there is such a token.
template <class T>
void prefetch_value(const ReshapeAndCacheArgs& cache, int64_t token) {
  const CacheSide& side = cache.value;
  if (token >= cache.num_tokens || side.data_dim != 1) return;
  prefetch_bytes(static_cast<const T*>(side.data) + token * side.data_token, side.head_size * sizeof(T));
}

template <class T, class Turn>
void run(const RotaryAndCacheArgs& args, const Launch& launch) {
  const Rotation& rotation = args.rotation;
  const ReshapeAndCacheArgs& cache = args.cache;
  const Reporter bad_position = launch.reporter(rotation.report);
  const int64_t cached_bytes =
      cache.num_heads * (cache.key.head_size + cache.value.head_size) * static_cast<int64_t>(sizeof(T));
  const int64_t rotated_bytes =
      (rotation.query.num_heads + rotation.key.num_heads) * rotation.rotary_dim * static_cast<int64_t>(sizeof(T));
  const bool past_caches = cache.num_tokens * cached_bytes > kWorthStreaming;
  const std::unique_ptr<TokenWriter> writer = token_writer(cache, launch.reporter(cache.report), past_caches);
  const bool entries = writer->writes_entries();
  const int64_t group = entries ? 1 : kGroup, groups = (rotation.num_tokens + group - 1) / group;
  const int64_t token_bytes = cached_bytes + rotated_bytes + 1;
  // where there is work for many, small ranges let them end together
  const int64_t at_least = rotation.num_tokens * token_bytes > kBytesPerTask ? kBytesPerTask / 4 : kBytesPerTask;
  const int64_t ahead = rows_ahead<T>(rotated_bytes / static_cast<int64_t>(sizeof(T)));
  parallel_for(groups, at_least / (group * token_bytes) + 1, [&](int64_t first, int64_t last) {
    TokenRotator<T, Turn> rotate(rotation, bad_position);
    const std::unique_ptr<TokenWriter::Buffers> buffers = writer->buffers();
    for (int64_t i = first; i < last; ++i) {
      const int64_t begin = i * group, end = std::min(begin + group, rotation.num_tokens);
      for (int64_t t = begin; t < end; ++t) {
        rotate.prefetch(t + ahead);
        if (rotation.rotary_dim > 0 && (!args.only_cached || is_cached(cache, t))) rotate(t);
      }
      if (args.rotate_only) continue;
      if (entries) prefetch_value<T>(cache, begin + ahead);
      writer->write(*buffers, begin, std::min(end, cache.num_tokens));
    }
  });
}

}  // namespace

void rotary_and_cache_cpu(const RotaryAndCacheArgs& args, const Launch& launch) {
  dispatch<float, f16, bf16>(args.rotation.dtype, [&]<class T>() {
    // the arithmetic of float is that of fp32
    using InDtype = std::conditional_t<std::is_same_v<T, float>, TurnInFloat, TurnIn<T>>;
    args.in_dtype ? run<T, InDtype>(args, launch) : run<T, TurnInFloat>(args, launch);
  });
}

}  // namespace pykv::PYKV_ISA
