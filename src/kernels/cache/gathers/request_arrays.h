// The arrays of ids that say what to gather, checked.
#pragma once

#include "cache/gathers/paged_requests.h"
#include "core/call.h"

namespace pykv {

// Fails where `t` has fewer rows than `wanted`; of_what says what these are.
void at_least(const Tensor& t, int64_t wanted, const char* of_what);

// A list of at least `wanted` ids.
Index read_ids(Call& call, const char* name, const DLTensor* array, int64_t wanted, const char* of_what);

// The block table [>= num_requests, width].
void set_blocks(Call& call, const DLTensor* block_table, int64_t num_requests, PagedRequests& requests);

// cu_seq_lens [num_requests + 1], which says how many requests there are, and the block table.
void set_requests(Call& call, const DLTensor* cu_seq_lens, const DLTensor* block_table, PagedRequests& requests);

}  // namespace pykv
