// PagedRequests::locate for up to 32 neighbouring rows by one warp, with as few loads and instructions in a chain as possible.
//
// From a row number to the bytes of its token there are three loads that need each other: where requests start, the block
// table, the token.  Cold, each takes as long as a whole small copy.  So the first two go out together: were all requests of
// one length, row i would belong to a known request, at a known position.  The warp loads the starts of 32 requests around
// that one, and each lane the entry of the block table there; a lane whose guess was wrong loads again.
// All this is done while the kernel before still runs, by what ids may be then, and what they lead to is brought to L2
// (prefetch_entry).  After the wait the same ids are read again, from L2 by now: mostly they have not changed, and rows are where
// they were found; else all is done again.
//
// Numbers are of 32 bits, for the sizes that allow it; ids of 64 bits beyond are as good as ids far out of range.  All others,
// and ids out of range, which are to be reported, are left to PagedRequests::locate.
#pragma once

#include <climits>

#include "cache/early.cuh"
#include "cache/gathers/paged_requests.h"
#include "cuda/divider.cuh"

namespace pykv {

class RowLocator {
  // An id on its way.
  struct Loaded {
    int32_t low = 0, high = 0;
  };

 public:
  RowLocator(const PagedRequests& requests, int64_t num_rows, ErrorWord* errors)
      : requests_(requests), errors_(errors), num_rows_(num_rows) {
    const PagedRequests& r = requests;
    quick_ = num_rows < kMost && r.num_requests < kMost && r.num_blocks < kMost && r.table_width > 0 &&
             r.block_size < kMost / r.table_width;
    for (const Index* ids : {&r.starts, &r.positions, &r.request_of, &r.blocks})
      if (ids->data && ids->stride != 1) quick_ = false;
    if (!quick_) return;
    starts_ = Ids(r.starts);
    positions_ = Ids(r.positions);
    request_of_ = Ids(r.request_of);
    blocks_ = Ids(r.blocks);
    blocks_row_ = r.blocks_row * blocks_.bytes;
    blocks_column_ = r.blocks_column * blocks_.bytes;
    num_blocks_ = static_cast<uint32_t>(r.num_blocks);
    num_positions_ = static_cast<uint32_t>(r.table_width * r.block_size);
    last_request_ = static_cast<int>(r.num_requests - 1);
    last_start_ = r.open_end ? last_request_ : last_request_ + 1;
    last_window_ = last_request_ > 30 ? last_request_ - 30 : 0;
    block_size_ = Divider(r.block_size);
    requests_per_row_ = static_cast<float>(r.num_requests) / static_cast<float>(num_rows);
    rows_per_request_ = static_cast<float>(num_rows) / static_cast<float>(r.num_requests);
  }

  __device__ int64_t num_rows() const { return num_rows_; }
  __device__ int64_t block_size() const { return requests_.block_size; }
  __device__ ErrorWord* errors() const { return errors_; }

  // What can be known without a load; kept by the warp from before it waits for the kernel before.  `fetch`: brings the ids
  // to L2, for a warp that will not load them before the wait anyway.
  struct Guess {
    uint32_t request, column;
    int base;  // number of the first start in the window
    const char *start, *block;
  };
  __device__ __forceinline__ Guess guess(int64_t first, int count, bool fetch) const {
    Guess g{};
    if (!quick_) return g;
    const int lane = threadIdx.x % 32, row = static_cast<int>(first) + min(lane, count - 1);
    g.request = min(static_cast<int>((static_cast<float>(row) + 0.5f) * requests_per_row_), last_request_);
    const int position = row - static_cast<int>(fmaf(static_cast<float>(g.request), rows_per_request_, 0.5f));
    uint32_t rest;
    g.column = block_size_(min(max(position, 0), static_cast<int>(num_positions_) - 1), rest);
    g.block = block_at(g.request, g.column);
    g.base = window_of(static_cast<int>(__shfl_sync(kAll, g.request, 0)) - 15);
    g.start = starts_.at(g.base + lane);
    have_ready(g.request);
    have_ready(g.column);
    have_ready(g.block);
    have_ready(g.start);
    if (!fetch) return g;
    prefetch(g.block);
    if (g.base + lane <= last_start_) prefetch(g.start);
    if (positions_) prefetch(positions_.at(g.request));
    if (request_of_) prefetch(request_of_.at(row));
    return g;
  }

  // What a lane was led by: a start, and the entry of the block table.
  struct Seen {
    int start, block;
    const char* block_at;
    bool is_all = false;
  };

  // For row first + lane of each lane below `count`, which is at least 1.  All lanes of the warp must call it.  `early`: by what
  // ids are before the wait; none where that would take long.
  __device__ __forceinline__ PagedRequests::Place operator()(int64_t first, int count, const Guess& g, bool early,
                                                             Seen& seen) const {
    const int lane = threadIdx.x % 32;
    PagedRequests::Place place{-1, 0};
    bool found = false;
    if (quick_) found = locate_quickly(static_cast<int>(first), count, g, early, place, seen);
    seen.is_all = found && !positions_ && !request_of_;
    if (lane >= count || (early && !found)) place.block = -1;
    if (lane < count && !early && !found) place = requests_.locate(first + lane, errors_);
    return place;
  }

  // By all threads of a block that has nothing else to do.
  __device__ void check_starts() const { requests_.check_starts(num_rows_, threadIdx.x, blockDim.x, errors_); }

  // The ids that a lane was led by once more, on their way.
  struct Again {
    Loaded start, block;
  };
  __device__ __forceinline__ Again load_again(const Guess& g, const Seen& seen) const {
    Again again;
    if (!seen.is_all) return again;
    again.block = load(blocks_, seen.block_at);
    if (knows_start(g)) again.start = load(starts_, g.start);
    return again;
  }
  // Whether they are still what was seen.  If so for all lanes of the warp, the rows are where they were found.
  __device__ __forceinline__ bool unchanged(const Guess& g, const Seen& seen, const Again& again) const {
    return seen.is_all && value(blocks_, again.block) == seen.block &&
           (!knows_start(g) || value(starts_, again.start) == seen.start);
  }
  // Both, for all lanes of the warp, which must all call it.
  __device__ __forceinline__ bool unchanged(const Guess& g, const Seen& seen) const {
    bool same = seen.is_all;
    if (same) same = unchanged(g, seen, load_again(g, seen));
    return __all_sync(kAll, same);
  }

 private:
  static constexpr uint32_t kAll = ~0u;
  static constexpr int kMost = 1 << 30;  // what numbers stay below

  // Ids side by side, of 4 or 8 bytes.
  struct Ids {
    const char* data = nullptr;
    uint32_t bytes = 4;

    Ids() = default;
    explicit Ids(const Index& ids) : data(static_cast<const char*>(ids.data)), bytes(ids.is_int64 ? 8 : 4) {}
    __device__ explicit operator bool() const { return data; }
    __device__ const char* at(uint32_t i) const { return data + uint64_t{i} * bytes; }
  };

  static __device__ Loaded load(const Ids& ids, const char* at) {
    Loaded id;
    id.low = load_id(at);
    if (ids.bytes == 8) id.high = load_id(at + 4);
    return id;
  }
  static __device__ int value(const Ids& ids, const Loaded& id) {
    return ids.bytes == 4 || id.high == id.low >> 31 ? id.low : id.high < 0 ? -kMost : kMost;
  }
  __device__ const char* block_at(uint32_t request, uint32_t column) const {
    return blocks_.data + request * blocks_row_ + column * blocks_column_;
  }

  __device__ bool knows_start(const Guess& g) const {
    return g.base + static_cast<int>(threadIdx.x % 32) <= last_start_;
  }

  // False where the row is still to be found.
  __device__ __forceinline__ bool locate_quickly(int first, int count, const Guess& g, bool early,
                                                 PagedRequests::Place& place, Seen& seen) const {
    const int lane = threadIdx.x % 32, row = first + min(lane, count - 1), guess = static_cast<int>(g.request);
    const Loaded block_load = load(blocks_, g.block);
    Loaded start_load, before_load, request_load;
    if (g.base + lane <= last_start_) start_load = load(starts_, g.start);
    if (positions_) before_load = load(positions_, positions_.at(guess));
    if (request_of_) request_load = load(request_of_, request_of_.at(row));

    int base = g.base, start = base + lane <= last_start_ ? value(starts_, start_load) : INT_MAX, request;
    seen.start = start;
    seen.block = value(blocks_, block_load);
    seen.block_at = g.block;
    if (request_of_) {
      request = value(request_of_, request_load);
    } else {
      int found = last_before(start, first, count);  // in the window; -1 if all are later
      const bool leaves = (found < 0 && base > 0) || (found == 31 && base < last_window_);
      if (__any_sync(kAll, leaves)) {
        if (early) return false;
        base = window_of(search(first));
        start = start_at(base + lane);
        found = last_before(start, first, count);
      }
      request = found == 31 && base < last_window_ ? -1 : min(base + max(found, 0), last_request_);
    }
    const int in_window = request - base;
    const int begin = __shfl_sync(kAll, start, in_window & 31), end = __shfl_sync(kAll, start, (in_window + 1) & 31);
    if (in_window < 0 || in_window > 30 || request > last_request_) return false;
    if (row < begin) return true;
    if (begin < 0) return false;
    if (end <= row) return true;
    if (request != guess && positions_) before_load = load(positions_, positions_.at(request));
    const uint32_t in_request = static_cast<uint32_t>(row) - static_cast<uint32_t>(begin);
    const int before = positions_ ? value(positions_, before_load) : 0;
    const uint32_t position = in_request + static_cast<uint32_t>(before);
    if (before < 0 || position >= num_positions_) return false;
    uint32_t offset;
    const uint32_t column = block_size_(position, offset);
    if (request != guess || column != g.column) {
      seen.block_at = block_at(request, column);
      seen.block = value(blocks_, load(blocks_, seen.block_at));
    }
    place = {seen.block, offset};
    return static_cast<uint32_t>(seen.block) < num_blocks_;
  }

  // Where a window that begins at start `i` begins, so that it holds as many as there are.
  __device__ int window_of(int i) const { return min(max(i, 0), last_window_); }

  __device__ int start_at(int i) const {
    return i <= last_start_ ? value(starts_, load(starts_, starts_.at(i))) : INT_MAX;
  }

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
      const int started = __popc(__ballot_sync(kAll, probe < high && start_at(min(probe, last_request_)) <= row));
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
  Ids starts_, positions_, request_of_, blocks_;
  int64_t blocks_row_, blocks_column_;  // bytes
  uint32_t num_blocks_, num_positions_;
  // The last index of a request, of a start in memory (behind which they are taken for late), of a window's first start.
  int last_request_, last_start_, last_window_;
  Divider block_size_;
  float requests_per_row_, rows_per_request_;
};

}  // namespace pykv
