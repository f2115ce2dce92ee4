#include "cache/gathers/request_arrays.h"

#include <cinttypes>

namespace pykv {

void at_least(const Tensor& t, int64_t wanted, const char* of_what) {
  if (t.size(0) < wanted)
    t.fail(PYKV_VALUE_ERROR, "must have at least %" PRId64 " rows, %s, got shape %s", wanted, of_what,
           t.shape_string().c_str());
}

Index read_ids(Call& call, const char* name, const DLTensor* array, int64_t wanted, const char* of_what) {
  Tensor t = call.read(name, array).rank(1);
  at_least(t, wanted, of_what);
  return t.index();
}

void set_blocks(Call& call, const DLTensor* block_table, int64_t num_requests, PagedRequests& requests) {
  Tensor table = call.read("block_table", block_table).rank(2);
  at_least(table, num_requests, "one for each request");
  requests.blocks = table.index();
  requests.blocks.stride = 1;
  requests.blocks_row = table.stride(0);
  requests.blocks_column = table.stride(1);
  requests.table_width = table.size(1);
  requests.num_requests = num_requests;
}

void set_requests(Call& call, const DLTensor* cu_seq_lens, const DLTensor* block_table, PagedRequests& requests) {
  Tensor starts = call.read("cu_seq_lens", cu_seq_lens).rank(1);
  at_least(starts, 1, "one more than there are requests");
  requests.starts = starts.index();
  set_blocks(call, block_table, starts.size(0) - 1, requests);
}

}  // namespace pykv
