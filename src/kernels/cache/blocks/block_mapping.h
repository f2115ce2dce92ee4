// Rows (from, to) of a block mapping that lies on the host.
#pragma once

#include <vector>

#include "core/check.h"

namespace pykv {

struct BlockPair {
  int64_t from, to;
};

// All rows, checked to lie in [0, num_from) and [0, num_to).
std::vector<BlockPair> read_block_mapping(const Tensor& mapping, int64_t num_from, int64_t num_to);

// Where to cut the rows so that the effect is that of one row after another though the rows of a part are copied at once:
// the end of each part.  Within a part no block is written twice, or both read and written; with `one_space` false, blocks
// to read and blocks to write are different memory and only the former counts.
std::vector<int64_t> independent_parts(const std::vector<BlockPair>& pairs, bool one_space);

}  // namespace pykv
