// A thread pool of our own: libgomp hangs in a forked child, and would lie in the process a second time beside torch's.
#pragma once

#include <cstdint>
#include <type_traits>

namespace pykv {

// Threads that parallel_for may use: PYKV_NUM_THREADS, else the CPUs this process may run on.
int num_threads();
void set_num_threads(int n);

using RangeFn = void (*)(void* context, int64_t begin, int64_t end);

// Calls fn(context, begin, end) over disjoint ranges that cover [0, n), each of at least `grain` items (but the last), on
// several threads at once, and returns when all are done.  Ranges are handed out dynamically.  Nested calls run inline.
void parallel_ranges(int64_t n, int64_t grain, RangeFn fn, void* context);

template <class F>
void parallel_for(int64_t n, int64_t grain, F&& body) {
  parallel_ranges(
      n, grain, [](void* f, int64_t begin, int64_t end) { (*static_cast<std::remove_reference_t<F>*>(f))(begin, end); },
      &body);
}

}  // namespace pykv
