#include "cache/swap_blocks.h"
#include "cuda/launch.h"

namespace pykv {

void swap_blocks_cuda(const SwapBlocksArgs& args, const Launch& launch) {
  for (int64_t i = 0, n; i < args.num_pairs; i += n) {
    const BlockPair* run = args.pairs + i;
    for (n = 1; i + n < args.num_pairs && run[n].from == run[0].from + n && run[n].to == run[0].to + n;) ++n;
    const char* from = args.from + run[0].from * args.block_bytes;
    char* to = args.to + run[0].to * args.block_bytes;
    const size_t bytes = static_cast<size_t>(n * args.block_bytes);
    if (args.from_device >= 0 && args.to_device >= 0) {
      cuda_check(cudaMemcpyPeerAsync(to, args.to_device, from, args.from_device, bytes, stream_of(launch)),
                 "cudaMemcpyPeerAsync");
    } else {
      const auto kind = args.to_device >= 0 ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost;
      cuda_check(cudaMemcpyAsync(to, from, bytes, kind, stream_of(launch)), "cudaMemcpyAsync");
    }
  }
}

}  // namespace pykv
