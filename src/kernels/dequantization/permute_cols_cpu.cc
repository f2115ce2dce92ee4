// Twin of permute_cols.cu: rows shared out among threads.  Of rows whose columns follow one another, two at once share the places
// that are read, and elements are put together to stores of eight bytes.
#include <algorithm>
#include <vector>

#include "cpu/parallel.h"
#include "cpu/stream_copy.h"
#include "dequantization/permute_cols.h"

namespace pykv::PYKV_ISA {
namespace {

// The elements of some rows from `first` on, at the places that are read.
template <class Word, int kRows>
void gather(Word* const (&to)[kRows], const Word* const (&in)[kRows], const uint32_t* from, int64_t count) {
  constexpr int64_t kTogether = 8 / sizeof(Word);
  int64_t i = 0;
  for (; i + kTogether <= count; i += kTogether) {
    for (int r = 0; r < kRows; ++r) {
      uint64_t all = 0;
      for (int64_t k = 0; k < kTogether; ++k)
        all |= static_cast<uint64_t>(in[r][from[i + k]]) << (8 * sizeof(Word) * static_cast<uint64_t>(k));
      __builtin_memcpy(to[r] + i, &all, sizeof all);
    }
  }
  for (; i < count; ++i)
    for (int r = 0; r < kRows; ++r) to[r][i] = in[r][from[i]];
}

template <class Word>
class Permuter {
  static constexpr int64_t kPiece = 2048 / sizeof(Word);

 public:
  Permuter(const PermuteColsArgs& args, const uint32_t* from, bool streamed)
      : args_(args), from_(from), writer_(streamed) {}

  template <int kRows>
  void rows(int64_t row) {
    const Word* in[kRows];
    Word *out[kRows], *to[kRows];
    for (int r = 0; r < kRows; ++r) {
      in[r] = static_cast<const Word*>(args_.input) + args_.input_rows.offset(row + r);
      out[r] = static_cast<Word*>(args_.output) + args_.output_rows.offset(row + r);
    }
    for (int64_t first = 0; first < args_.columns; first += kPiece) {
      const int64_t count = std::min(kPiece, args_.columns - first);
      for (int r = 0; r < kRows; ++r) to[r] = writer_.streamed() ? buffers_[r] : out[r] + first;
      gather<Word, kRows>(to, in, from_ + first, count);
      if (!writer_.streamed()) continue;
      for (int r = 0; r < kRows; ++r)
        writer_.put(out[r] + first, buffers_[r], count * static_cast<int64_t>(sizeof(Word)));
    }
  }

 private:
  const PermuteColsArgs& args_;
  const uint32_t* from_;
  LineWriter writer_;
  alignas(64) Word buffers_[2][kPiece];
};

template <class Word>
void permute(const PermuteColsArgs& args, const int64_t* from, const int64_t* to, int64_t count) {
  const int64_t grain = std::max<int64_t>(4, 16384 / args.columns);
  const bool side_by_side = args.output_column == 1 && count == args.columns && args.input_column >= 0 &&
                            args.input_column <= UINT32_MAX / args.columns;
  std::vector<uint32_t> places;  // half the cache
  if (side_by_side) places.assign(from, from + count);
  const bool streamed = args.num_rows * args.columns * static_cast<int64_t>(sizeof(Word)) > kWorthStreaming;
  parallel_for(args.num_rows, grain, [&](int64_t begin, int64_t end) {
    int64_t row = begin;
    if (side_by_side) {
      Permuter<Word> permuter(args, places.data(), streamed);
      for (; row + 2 <= end; row += 2) permuter.template rows<2>(row);
      for (; row < end; ++row) permuter.template rows<1>(row);
    }
    for (; row < end; ++row) {
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
