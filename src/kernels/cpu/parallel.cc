// The pool behind parallel_for.
//
// A job is a counter from which the caller and the workers take ranges.  Workers spin for a moment after a job, since
// the next kernel of a model follows within microseconds, and sleep otherwise.  The caller never waits for a worker to
// wake up: it closes the gate when no range is left, and waits only for those who came in before.
#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "core/float_environment.h"

namespace pykv {
namespace {

constexpr int kSpins = 2000;  // some 40 microseconds
constexpr int kMaxThreads = 1024;

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns once `word` differs from `old`.
void await_change(const std::atomic<uint32_t>& word, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    relax();
  }
  word.wait(old, std::memory_order_acquire);
}

thread_local bool inside = false;  // this thread is running a range already

class Pool {
 public:
  // False if another thread holds the pool.
  bool run(int threads, int64_t n, int64_t grain, RangeFn fn, void* context) {
    std::unique_lock<std::mutex> lock(busy_, std::try_to_lock);
    if (!lock) return false;
    if (threads != threads_) resize(threads);

    fn_ = fn;
    context_ = context;
    n_ = n;
    grain_ = grain;
    next_.store(0, std::memory_order_relaxed);
    failure_ = nullptr;
    failed_.store(false, std::memory_order_relaxed);
    gate_.fetch_and(~kClosed, std::memory_order_release);
    call_workers();

    take_ranges();
    uint32_t within = gate_.fetch_or(kClosed, std::memory_order_acq_rel) | kClosed;
    while (within != kClosed) {
      await_change(gate_, within);
      within = gate_.load(std::memory_order_acquire);
    }
    if (failure_) std::rethrow_exception(failure_);
    return true;
  }

  void close() {
    const std::lock_guard<std::mutex> lock(busy_);
    stop_workers();
  }

 private:
  static constexpr uint32_t kClosed = 1u << 31;

  void stop_workers() {
    stop_.store(true, std::memory_order_relaxed);
    call_workers();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stop_.store(false, std::memory_order_relaxed);
  }

  void call_workers() {
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
  }

  void resize(int threads) {
    stop_workers();
    threads_ = threads;
    // Workers inherit the mask: signals stay with the threads that the application made.
    sigset_t every, before;
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &before);
    try {
      for (int i = 1; i < threads; ++i) workers_.emplace_back([this, seen = calls_.load()] { work(seen); });
    } catch (const std::exception&) {
      // The system gives no more threads, or no memory for them: those we have do the work.
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }

  void work(uint32_t seen) {
    const UsualArithmetic usual;  // a thread inherits its maker's environment
    for (;;) {
      await_change(calls_, seen);
      seen = calls_.load(std::memory_order_acquire);
      if (stop_.load(std::memory_order_relaxed)) return;
      if (!(gate_.fetch_add(1, std::memory_order_acq_rel) & kClosed)) take_ranges();
      gate_.fetch_sub(1, std::memory_order_release);
      gate_.notify_all();
    }
  }

  // Ranges shrink as the end comes near, so that all threads get there together.
  void take_ranges() {
    inside = true;
    int64_t begin = next_.load(std::memory_order_relaxed);
    while (begin < n_ && !failed_.load(std::memory_order_relaxed)) {
      const int64_t size = std::max(grain_, (n_ - begin) / (4 * threads_));
      const int64_t end = std::min(n_, begin + size);
      if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      try {
        fn_(context_, begin, end);
      } catch (...) {
        if (!failed_.exchange(true)) failure_ = std::current_exception();
      }
      begin = next_.load(std::memory_order_relaxed);
    }
    inside = false;
  }

  std::mutex busy_;  // held by the caller of the job
  std::vector<std::thread> workers_;
  int threads_ = 1;

  RangeFn fn_ = nullptr;
  void* context_ = nullptr;
  int64_t n_ = 0, grain_ = 1;
  std::exception_ptr failure_;

  alignas(64) std::atomic<int64_t> next_{0};
  std::atomic<bool> failed_{false};
  alignas(64) std::atomic<uint32_t> gate_{kClosed};  // threads within, and whether others may still come in
  alignas(64) std::atomic<uint32_t> calls_{0};       // changes when workers should look
  std::atomic<bool> stop_{false};
};

std::atomic<Pool*> pool{nullptr};  // never freed: a thread may still be in it while the process exits
std::atomic<bool> closing{false};

// A forked child has none of the workers, and the mutex as it happened to be: it starts with a new pool.
void forget_pool() { pool.store(nullptr); }

Pool* the_pool() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (current) return current;
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  (void)registered;
  Pool* fresh = new Pool;
  if (pool.compare_exchange_strong(current, fresh)) return fresh;
  delete fresh;
  return current;
}

// Ends the workers before the code they run is unmapped (dlclose) or the process is torn down.
struct Reaper {
  ~Reaper() {
    closing.store(true);
    if (Pool* current = pool.load()) current->close();
  }
} reaper;

int default_threads() {
  if (const char* wanted = std::getenv("PYKV_NUM_THREADS")) {
    char* end = nullptr;
    const long n = std::strtol(wanted, &end, 10);
    if (end != wanted && *end == '\0' && n > 0) return static_cast<int>(std::min<long>(n, kMaxThreads));
  }
  cpu_set_t cpus;
  if (sched_getaffinity(0, sizeof(cpus), &cpus) == 0) return std::max(1, CPU_COUNT(&cpus));
  return std::max(1u, std::thread::hardware_concurrency());  // more CPUs than a cpu_set_t holds
}

std::atomic<int> chosen_threads{0};  // 0: not asked yet

}  // namespace

int num_threads() {
  int n = chosen_threads.load(std::memory_order_relaxed);
  if (n == 0) {
    n = std::min(default_threads(), kMaxThreads);
    int unset = 0;
    if (!chosen_threads.compare_exchange_strong(unset, n)) n = unset;
  }
  return n;
}

void set_num_threads(int n) { chosen_threads.store(n < 1 ? 0 : std::min(n, kMaxThreads)); }

void parallel_ranges(int64_t n, int64_t grain, RangeFn fn, void* context) {
  if (n <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  const int threads = num_threads();
  if (threads > 1 && n > grain && !inside && !closing.load(std::memory_order_relaxed)) {
    if (the_pool()->run(threads, n, grain, fn, context)) return;
  }
  fn(context, 0, n);
}

}  // namespace pykv
