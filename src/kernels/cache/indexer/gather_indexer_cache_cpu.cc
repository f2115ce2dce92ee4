// Twin of gather_indexer_cache.cu: rows shared out among threads; those of one block are copied together.
#include <algorithm>

#include "cache/indexer/gather_indexer_cache.h"
#include "cpu/parallel.h"
#include "cpu/prefetch.h"
#include "cpu/stream_copy.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kBytesPerTask = 64 * 1024;  // less is not worth another thread
constexpr int64_t kMostAhead = 4096;          // bytes of the next block

// Rows [row, row + count) of so many bytes, which lie side by side at `from`.
void copy_rows(const GatheredRows& rows, int64_t row, int64_t count, int64_t row_bytes, const char* from,
               LineWriter& out) {
  char* to = static_cast<char*>(rows.data) + row * rows.row;
  if (rows.compact() && rows.row == row_bytes) {
    row_bytes *= count;
    count = 1;
  }
  for (int64_t i = 0; i < count; ++i, to += rows.row, from += row_bytes) {
    if (!rows.compact()) {
      for (int64_t at = 0; at < row_bytes; at += rows.bytes)
        std::memcpy(to + at / rows.bytes * rows.element, from + at, rows.bytes);
    } else {
      out.put(to, from, row_bytes);
    }
  }
}

// Blocks lie anywhere: the processor itself sees only late where the next one is.
void prefetch_place(const GatherIndexerArgs& args, const PagedRequests::Place& place) {
  const char* block = static_cast<const char*>(args.cache) + place.block * args.block_bytes;
  prefetch_bytes(block + place.offset * args.block.values, std::min(place.run * args.block.values, kMostAhead));
  prefetch_bytes(block + args.block.scales_at() + place.offset * args.block.scale_bytes(), 1);
}

}  // namespace

void gather_indexer_cache_cpu(const GatherIndexerArgs& args, const Launch& launch) {
  const int64_t value_bytes = args.block.values, scale_bytes = args.block.scale_bytes();
  const bool streamed = args.num_rows * value_bytes > kWorthStreaming;
  args.requests.check_starts(args.num_rows, 0, 1, launch.errors);
  parallel_for(args.num_rows, kBytesPerTask / value_bytes + 1, [&](int64_t begin, int64_t end) {
    LineWriter values(streamed), scales(false);
    PagedRequests::Place next = args.requests.locate(begin, launch.errors);
    for (int64_t row = begin; row < end;) {
      const auto [block, offset, run] = next;
      const int64_t count = block < 0 ? 1 : std::min(run, end - row);
      if (row + count < end) {
        next = args.requests.locate(row + count, launch.errors);
        if (next.block >= 0) prefetch_place(args, next);
      }
      if (block < 0) {
        ++row;
        continue;
      }
      const char* from = static_cast<const char*>(args.cache) + block * args.block_bytes;
      copy_rows(args.values, row, count, value_bytes, from + offset * value_bytes, values);
      copy_rows(args.scales, row, count, scale_bytes, from + args.block.scales_at() + offset * scale_bytes, scales);
      row += count;
    }
  });
}

}  // namespace pykv::PYKV_ISA
