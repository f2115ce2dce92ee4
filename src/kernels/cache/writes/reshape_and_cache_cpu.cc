// Twin of reshape_and_cache.cu.  Memory-bound too: see write_tokens_cpu.h.
#include <memory>
#include <type_traits>

#include "cache/writes/write_tokens_cpu.h"
#include "cpu/parallel.h"

namespace pykv::PYKV_ISA {

std::unique_ptr<TokenWriter> token_writer(const ReshapeAndCacheArgs& args, const Reporter& report, bool past_caches) {
  std::unique_ptr<TokenWriter> writer;
  const auto make = [&]<class Convert>() {
    writer = std::make_unique<FormatWriter<Convert>>(args, report, past_caches);
  };
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    switch (args.format) {
      case KvFormat::kSame:
        return make.template operator()<Copy<std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>>>();
      case KvFormat::kE4M3:
      case KvFormat::kE5M2:
      case KvFormat::kInt8:
        return make.template operator()<Quantise<T>>();
      case KvFormat::kNvfp4:
        return make.template operator()<QuantiseBlocks<T>>();
    }
  });
  return writer;
}

void reshape_and_cache_cpu(const ReshapeAndCacheArgs& args, const Launch& launch) {
  const int64_t token_bytes =
      args.num_heads * (args.key.head_size + args.value.head_size) * static_cast<int64_t>(size_of(args.dtype));
  const bool past_caches = args.num_tokens * token_bytes > kWorthStreaming;
  const std::unique_ptr<TokenWriter> writer = token_writer(args, launch.reporter(args.report), past_caches);
  const int64_t groups = (args.num_tokens + kGroup - 1) / kGroup;
  parallel_for(groups, kBytesPerTask / (kGroup * token_bytes + 1) + 1, [&](int64_t first, int64_t last) {
    const int64_t end = last == groups ? args.num_tokens : last * kGroup;
    writer->write(*writer->buffers(), first * kGroup, end);
  });
}

}  // namespace pykv::PYKV_ISA
