#include "cache/blocks/block_mapping.h"

#include <cinttypes>
#include <unordered_map>

namespace pykv {

std::vector<BlockPair> read_block_mapping(const Tensor& mapping, int64_t num_from, int64_t num_to) {
  Index ids = Tensor(mapping).index();
  ids.stride = 1;  // the places of both columns are worked out here
  std::vector<BlockPair> pairs(mapping.size(0));
  for (int64_t i = 0; i < mapping.size(0); ++i) {
    int64_t row[2];
    for (int column = 0; column < 2; ++column) {
      const int64_t bound = column == 0 ? num_from : num_to;
      const int64_t at = i * mapping.stride(0) + column * mapping.stride(1);
      row[column] = ids[at];
      if (row[column] < 0 || row[column] >= bound)
        mapping.fail(PYKV_VALUE_ERROR, "row %" PRId64 ": %s block %" PRId64 " is out of range [0, %" PRId64 ")", i,
                     column == 0 ? "source" : "destination", row[column], bound);
    }
    pairs[i] = {row[0], row[1]};
  }
  return pairs;
}

std::vector<int64_t> independent_parts(const std::vector<BlockPair>& pairs, bool one_space) {
  std::vector<int64_t> ends;
  // The last part in which a block was read or written; parts count from 1, 0 is never.
  struct Seen {
    size_t read = 0, written = 0;
  };
  std::unordered_map<int64_t, Seen> seen;
  const int64_t n = static_cast<int64_t>(pairs.size());
  for (int64_t i = 0; i < n && n > 1; ++i) {
    const auto [from, to] = pairs[i];
    Seen& target = seen[to];
    bool cut = target.written == ends.size() + 1;
    if (one_space) cut = cut || target.read == ends.size() + 1 || seen[from].written == ends.size() + 1;
    if (cut) ends.push_back(i);
    seen[to].written = ends.size() + 1;
    if (one_space) seen[from].read = ends.size() + 1;
  }
  ends.push_back(n);
  return ends;
}

}  // namespace pykv
