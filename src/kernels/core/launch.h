// What every twin gets beside its args: where to run, and where to report what it had to skip.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define PYKV_HOST_DEVICE __host__ __device__
#else
#define PYKV_HOST_DEVICE
#endif

namespace pykv {

// One a device (and one a call on the CPU).  Sticky: the first offender wins until it is read and cleared.
struct ErrorWord {
  unsigned long long claimed;
  const char* what;  // a host string literal, "op: argument"; carried through the device as a number
  long long value;
  long long bound;  // valid values are 0 <= value < bound; or one of these
};

// A bound that says instead what is wrong with row `value` (core/call.cc has the words).
constexpr long long kRowHasNan = -1, kRowIsEmpty = -2;

// Records an id that lies outside its array.  Kernels skip or mask such an id; nothing is ever read or written there.
struct Reporter {
  ErrorWord* word;
  const char* what;

  PYKV_HOST_DEVICE void operator()(long long value, long long bound) const {
#if defined(__CUDA_ARCH__)
    if (atomicCAS(&word->claimed, 0ull, 1ull) != 0) return;
#else
    unsigned long long expected = 0;
    if (!__atomic_compare_exchange_n(&word->claimed, &expected, 1ull, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      return;
#endif
    word->what = what;
    word->value = value;
    word->bound = bound;
  }
};

struct Launch {
  void* stream;       // cudaStream_t; unused on the CPU
  int device;         // CUDA ordinal; unused on the CPU
  ErrorWord* errors;  // device memory on CUDA

  Reporter reporter(const char* what) const { return {errors, what}; }
};

}  // namespace pykv
