// Twin of reshape_and_cache.cu.  Memory-bound too: see write_tokens_cpu.h.
#include "cache/write_tokens_cpu.h"
#include "cpu/parallel.h"

namespace pykv::PYKV_ISA {
namespace {

template <class Convert>
void write_all(const ReshapeAndCacheArgs& args, const Launch& launch) {
  const Reporter report = launch.reporter(args.report);
  const int64_t token_bytes = args.num_heads * (args.key.head_size + args.value.head_size) *
                              static_cast<int64_t>(sizeof(typename Convert::Source));
  const bool past_caches = args.num_tokens * token_bytes > kWorthStreaming;
  const int64_t groups = (args.num_tokens + kGroup - 1) / kGroup;
  parallel_for(groups, kBytesPerTask / (kGroup * token_bytes + 1) + 1, [&](int64_t first, int64_t last) {
    const int64_t end = last == groups ? args.num_tokens : last * kGroup;
    write_tokens<Convert>(args, report, first * kGroup, end, past_caches);
    if (past_caches) finish_streaming();
  });
}

template <class Code>
void quantise_all(const ReshapeAndCacheArgs& args, const Launch& launch) {
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() { write_all<Quantise<T, Code>>(args, launch); });
}

}  // namespace

void reshape_and_cache_cpu(const ReshapeAndCacheArgs& args, const Launch& launch) {
  switch (args.format) {
    case KvFormat::kSame:
      return size_of(args.dtype) == 2 ? write_all<Copy<uint16_t>>(args, launch)
                                      : write_all<Copy<uint32_t>>(args, launch);
    case KvFormat::kE4M3:
      return quantise_all<e4m3>(args, launch);
    case KvFormat::kE5M2:
      return quantise_all<e5m2>(args, launch);
    case KvFormat::kInt8:
      return quantise_all<i8>(args, launch);
    case KvFormat::kNvfp4:
      break;
  }
}

}  // namespace pykv::PYKV_ISA
