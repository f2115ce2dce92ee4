// Twin of move_rows.cu: rows shared out among threads, those of the target or those of the source.
#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/stream_copy.h"
#include "moe/move_rows.h"

namespace pykv::PYKV_ISA {
namespace {

constexpr int64_t kBytesPerTask = 64 * 1024;  // less is not worth another thread

void copy_row(char* to, const char* from, int64_t bytes, bool streamed) {
  if (streamed)
    stream_copy(to, from, bytes);
  else
    std::memcpy(to, from, static_cast<size_t>(bytes));
}

}  // namespace

void move_rows_cpu(const MoveRowsArgs& args, const Launch& launch) {
  const bool gathers = args.map.data != nullptr;
  const bool streamed = args.num_target_rows * args.row_bytes > kWorthStreaming;
  const int64_t rows = gathers ? args.num_target_rows : args.num_source_rows;
  const int64_t num_valid = gathers ? 0 : std::min(args.num_valid.at(0), args.num_target_rows);
  const int64_t copies = gathers ? 1 : args.top_k;
  parallel_for(rows, kBytesPerTask / (args.row_bytes * copies) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (gathers) {
        char* to = args.target + row * args.target_stride;
        const int64_t from = args.map[row];
        if (from >= args.num_source_rows) launch.reporter(args.report)(from, args.num_source_rows);
        if (from >= 0 && from < args.num_source_rows)
          copy_row(to, args.source + from * args.source_stride, args.row_bytes, streamed);
        else
          std::memset(to, 0, static_cast<size_t>(args.row_bytes));
        continue;
      }
      for (int64_t j = 0; j < args.top_k; ++j) {
        const int64_t to = args.places.at(row, j);
        if (to >= 0 && to < num_valid)
          copy_row(args.target + to * args.target_stride, args.source + row * args.source_stride, args.row_bytes,
                   streamed);
      }
    }
    if (streamed) finish_streaming();
  });
}

}  // namespace pykv::PYKV_ISA
