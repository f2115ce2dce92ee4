// PagedRequests::locate for up to 32 neighbouring rows by one warp, with as few loads and instructions in a chain as possible.
//
// From a row number to the bytes of its token there are three loads that need each other: where requests start, the block
// table, the token.  Cold, each takes as long as a whole small copy.  So the first two go out together: were all requests of
// one length, row i would belong to a known request, at a known position.  The warp loads the starts of 32 requests around
// that one, and each lane the entry of the block table there; a lane whose guess was wrong loads again.
// What they read is on its way to L2 while the kernel before still runs.
//
// This is done in 32-bit numbers, for the ids and sizes that allow it.  All others, and ids out of range, which are to be
// reported, are left to PagedRequests::locate.
#pragma once

#include <climits>

#include "cache/paged_requests.h"
#include "cuda/dependent.cuh"
#include "cuda/divider.cuh"

namespace pykv {

class RowLocator {
 public:
  RowLocator(const PagedRequests& requests, int64_t num_rows, ErrorWord* errors)
      : requests_(requests), errors_(errors), num_rows_(num_rows) {
    constexpr int64_t kMost = INT_MAX / 2;
    const PagedRequests& r = requests;
    quick_ = num_rows < kMost && r.num_requests < kMost && r.num_blocks < kMost && r.table_width > 0 &&
             r.block_size <= kMost / r.table_width;
    for (const Index* ids : {&r.starts, &r.lengths, &r.positions, &r.request_of, &r.blocks})
      if (ids->data && (ids->is_int64 || ids->stride != 1)) quick_ = false;
    if (!quick_) return;
    const auto ids = [](const Index& i) { return static_cast<const int32_t*>(i.data); };
    starts_ = ids(r.starts);
    lengths_ = ids(r.lengths);
    positions_ = ids(r.positions);
    request_of_ = ids(r.request_of);
    blocks_ = ids(r.blocks);
    blocks_row_ = r.blocks_row;
    blocks_column_ = r.blocks_column;
    num_blocks_ = static_cast<uint32_t>(r.num_blocks);
    num_positions_ = static_cast<uint32_t>(r.table_width * r.block_size);
    last_request_ = static_cast<int>(r.num_requests - 1);
    last_start_ = lengths_ ? last_request_ : last_request_ + 1;
    last_window_ = last_start_ > 31 ? last_start_ - 31 : 0;
    block_size_ = Divider(r.block_size);
    requests_per_row_ = static_cast<float>(r.num_requests) / static_cast<float>(num_rows);
    rows_per_request_ = static_cast<float>(num_rows) / static_cast<float>(r.num_requests);
  }

  __device__ int64_t num_rows() const { return num_rows_; }

  // What can be known without a load; kept by the warp from before it waits for the kernel before.
  struct Guess {
    uint32_t request, column;
    const int32_t *start, *block;
  };
  __device__ __forceinline__ Guess guess(int64_t first, int count) const {
    Guess g{};
    if (!quick_) return g;
    const int lane = threadIdx.x % 32, row = static_cast<int>(first) + min(lane, count - 1);
    g.request = min(static_cast<int>((static_cast<float>(row) + 0.5f) * requests_per_row_), last_request_);
    const int position = row - static_cast<int>(fmaf(static_cast<float>(g.request), rows_per_request_, 0.5f));
    uint32_t rest;
    g.column = block_size_(min(max(position, 0), static_cast<int>(num_positions_) - 1), rest);
    g.block = blocks_ + g.request * blocks_row_ + g.column * blocks_column_;
    g.start = starts_ + window_of(static_cast<int>(__shfl_sync(kAll, g.request, 0)) - 15) + lane;
    have_ready(g.request);
    have_ready(g.column);
    have_ready(g.block);
    have_ready(g.start);
    prefetch(g.block);
    if (g.start <= starts_ + last_start_) prefetch(g.start);
    if (lengths_) prefetch(lengths_ + g.request);
    if (positions_) prefetch(positions_ + g.request);
    if (request_of_) prefetch(request_of_ + row);
    return g;
  }

  // For row first + lane of each lane below `count`, which is at least 1.  All lanes of the warp must call it.
  __device__ __forceinline__ PagedRequests::Place operator()(int64_t first, int count, const Guess& g) const {
    const int lane = threadIdx.x % 32;
    PagedRequests::Place place{-1, 0};
    bool done = lane >= count;
    if (quick_) done = locate_quickly(static_cast<int>(first), count, g, place) || done;
    if (!done) place = requests_.locate(first + lane, errors_);
    return place;
  }

 private:
  static constexpr uint32_t kAll = ~0u;

  // False where the row is still to be found.
  __device__ __forceinline__ bool locate_quickly(int first, int count, const Guess& g,
                                                 PagedRequests::Place& place) const {
    const int lane = threadIdx.x % 32, row = first + min(lane, count - 1), guess = static_cast<int>(g.request);
    int block = *g.block;
    int base = static_cast<int>(g.start - starts_) - lane, start = base + lane <= last_start_ ? *g.start : INT_MAX;
    int length = lengths_ ? lengths_[guess] : 0, before = positions_ ? positions_[guess] : 0;

    int request;
    if (request_of_) {
      request = request_of_[row];
    } else {
      int found = last_before(start, first, count);  // in the window; -1 if all are later
      const bool leaves = (found < 0 && base > 0) || (found == 31 && base < last_window_);
      if (__any_sync(kAll, leaves)) {
        base = window_of(search(first));
        start = load_start(base + lane);
        found = last_before(start, first, count);
      }
      request = found == 31 && base < last_window_ ? -1 : min(base + max(found, 0), last_request_);
    }
    const int in_window = request - base;
    const int begin = __shfl_sync(kAll, start, in_window & 31), end = __shfl_sync(kAll, start, (in_window + 1) & 31);
    if (in_window < 0 || in_window > (lengths_ ? 31 : 30) || request > last_request_) return false;
    if (row < begin) return true;
    if (begin < 0) return false;
    if (request != guess) {
      if (lengths_) length = lengths_[request];
      if (positions_) before = positions_[request];
    }
    const uint32_t in_request = static_cast<uint32_t>(row) - static_cast<uint32_t>(begin);
    if (!lengths_) length = end > row ? INT_MAX : 0;
    if (length <= 0 || in_request >= static_cast<uint32_t>(length)) return true;
    const uint32_t position = in_request + static_cast<uint32_t>(before);
    if (before < 0 || position >= num_positions_) return false;
    uint32_t offset;
    const uint32_t column = block_size_(position, offset);
    if (request != guess || column != g.column) block = blocks_[request * blocks_row_ + column * blocks_column_];
    place = {block, offset};
    return static_cast<uint32_t>(block) < num_blocks_;
  }

  // Where a window that begins at start `i` begins, so that it holds as many as there are.
  __device__ int window_of(int i) const { return min(max(i, 0), last_window_); }

  __device__ int load_start(int i) const { return i <= last_start_ ? starts_[i] : INT_MAX; }

  // For each lane below `count`: the last lane whose start is not after its row, -1 if there is none.
  static __device__ int last_before(int start, int first, int count) {
    const int lane = threadIdx.x % 32;
    const int before = __popc(__ballot_sync(kAll, start <= first)) - 1;
    const uint32_t later = __ballot_sync(kAll, start > first && start < first + count);
    if (later == 0) return before;
    int found = before;
    for (uint32_t rest = later; rest != 0; rest &= rest - 1)
      if (__shfl_sync(kAll, start, __ffs(rest) - 1) <= first + lane) ++found;
    return lane < count ? found : 0;
  }

  // The last request that starts at `row` or before, 32 places at a time.
  __device__ int search(int row) const {
    int low = 0, high = last_request_ + 1;
    while (high - low > 1) {
      const int step = (high - low + 31) / 32, probe = low + static_cast<int>(threadIdx.x % 32) * step;
      const int started = __popc(__ballot_sync(kAll, probe < high && starts_[min(probe, last_request_)] <= row));
      if (started == 0) return 0;
      low += (started - 1) * step;
      high = min(low + step, high);
    }
    return low;
  }

  PagedRequests requests_;
  ErrorWord* errors_;
  int64_t num_rows_;
  bool quick_;
  const int32_t *starts_, *lengths_, *positions_, *request_of_, *blocks_;
  int64_t blocks_row_, blocks_column_;
  uint32_t num_blocks_, num_positions_;
  int last_request_, last_start_, last_window_;  // the last index of a request, of a start, of a window's first start
  Divider block_size_;
  float requests_per_row_, rows_per_request_;
};

}  // namespace pykv
