// Twin of reshape_and_cache.cu.  Memory-bound too: see write_tokens_cpu.h.
#include "cache/writes/write_tokens_cpu.h"
#include "cpu/parallel.h"

namespace pykv::PYKV_ISA {
namespace {

template <class Convert>
void write_all(const ReshapeAndCacheArgs& args, const Launch& launch) {
  const int64_t token_bytes = args.num_heads * (args.key.head_size + args.value.head_size) *
                              static_cast<int64_t>(sizeof(typename Convert::Source));
  const bool past_caches = args.num_tokens * token_bytes > kWorthStreaming;
  const TokenWriter<Convert> write(args, launch.reporter(args.report), past_caches);
  const int64_t groups = (args.num_tokens + kGroup - 1) / kGroup;
  parallel_for(groups, kBytesPerTask / (kGroup * token_bytes + 1) + 1, [&](int64_t first, int64_t last) {
    const int64_t end = last == groups ? args.num_tokens : last * kGroup;
    typename TokenWriter<Convert>::Buffers buffers(write);
    write(buffers, first * kGroup, end);
  });
}

}  // namespace

void reshape_and_cache_cpu(const ReshapeAndCacheArgs& args, const Launch& launch) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    with_conversion<T>(args.format, [&]<class Convert>() { write_all<Convert>(args, launch); });
  });
}

}  // namespace pykv::PYKV_ISA
