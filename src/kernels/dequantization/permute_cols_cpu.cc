// Twin of permute_cols.cu: rows shared out among threads.
#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "dequantization/permute_cols.h"

namespace pykv::PYKV_ISA {
namespace {

template <class Word>
void permute(const PermuteColsArgs& args, const int64_t* from, const int64_t* to, int64_t count) {
  const int64_t grain = std::max<int64_t>(1, 16384 / args.columns);
  parallel_for(args.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const Word* in = static_cast<const Word*>(args.input) + args.input_rows.offset(row);
      Word* out = static_cast<Word*>(args.output) + args.output_rows.offset(row);
      for (int64_t i = 0; i < count; ++i) out[to[i]] = in[from[i]];
    }
  });
}

}  // namespace

void permute_cols_cpu(const PermuteColsArgs& args, const Launch& launch) {
  // offsets of valid columns, once for all rows
  const Reporter report = launch.reporter("permute_cols: perm");
  std::vector<int64_t> from, to;
  from.reserve(static_cast<size_t>(args.columns));
  to.reserve(static_cast<size_t>(args.columns));
  for (int64_t c = 0; c < args.columns; ++c) {
    const int64_t column = args.order[c];
    if (column < 0 || column >= args.columns) {
      report(column, args.columns);
      continue;
    }
    from.push_back(column * args.input_column);
    to.push_back(c * args.output_column);
  }
  const auto count = static_cast<int64_t>(from.size());
  switch (args.item) {
    case 1:
      return permute<uint8_t>(args, from.data(), to.data(), count);
    case 2:
      return permute<uint16_t>(args, from.data(), to.data(), count);
    case 4:
      return permute<uint32_t>(args, from.data(), to.data(), count);
    default:
      return permute<uint64_t>(args, from.data(), to.data(), count);
  }
}

}  // namespace pykv::PYKV_ISA
