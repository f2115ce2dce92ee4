// Twin of swap_blocks_batch.cu where all memory is the host's: its bytes, numbered through, shared out among threads.
#include "cache/blocks/swap_blocks_batch.h"
#include "cpu/parallel.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kBytesPerTask = 128 * 1024;  // less is not worth another thread

// The transfer that byte `at` belongs to.
const Transfer* find(const SwapBlocksBatchArgs& args, int64_t at) {
  const Transfer *first = args.transfers, *last = first + args.num_transfers - 1;
  while (first < last) {
    const Transfer* middle = first + (last - first) / 2;
    if (at < middle->end) {
      last = middle;
    } else {
      first = middle + 1;
    }
  }
  return first;
}

}  // namespace

void swap_blocks_batch_cpu(const SwapBlocksBatchArgs& args, const Launch&) {
  const int64_t total = args.transfers[args.num_transfers - 1].end;
  parallel_for(total, kBytesPerTask, [&](int64_t begin, int64_t end) {
    for (const Transfer* t = find(args, begin); begin < end; ++t) {
      const int64_t done = begin - (t->end - t->bytes), bytes = (t->end < end ? t->end : end) - begin;
      if (total > kWorthStreaming) {
        stream_copy(t->to + done, t->from + done, bytes);
      } else {
        std::memcpy(t->to + done, t->from + done, bytes);
      }
      begin += bytes;
    }
    finish_streaming();
  });
}

}  // namespace pykv::PYKV_ISA
