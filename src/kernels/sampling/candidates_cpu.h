// The first k entries of a row that comes piece by piece: those that may still be among them are kept, and cut back to k when
// they are twice as many.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>

#include "cpu/simd.h"
#include "sampling/logit_order.h"

namespace pykv::PYKV_ISA {
namespace {

// Types of this namespace, so that what the standard library makes of them is compiled for this instruction set alone.
struct Before {
  bool operator()(Entry a, Entry b) const { return a > b; }
};
struct ByIndex {
  bool operator()(Entry a, Entry b) const { return index_of(a) < index_of(b); }
};

class Candidates {
 public:
  Candidates() = default;
  Candidates(const Candidates&) = delete;
  ~Candidates() { std::free(entries_); }

  // Logits below `least` are not offered.
  void start(int64_t k, float least = -__builtin_inff()) {
    if (k > room_) {
      std::free(entries_);
      entries_ = static_cast<Entry*>(std::malloc(static_cast<size_t>(2 * k) * sizeof(Entry)));
      room_ = entries_ ? k : 0;
      if (!entries_) throw std::bad_alloc();
    }
    k_ = k;
    count_ = 0;
    bound_ = least;
  }

  // Logits `first` to first + n of a row.
  template <class T>
  void offer(const T* row, int64_t first, int64_t n) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) {
      const Floats x = load(row + first + i);
      if (any_not_below(x, bound_))
        for (int lane = 0; lane < kWidth; ++lane) offer(x[lane], first + i + lane);
    }
    for (; i < n; ++i) offer(to_float(row[first + i]), first + i);
  }

  static bool any_not_below(Floats x, float bound) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask(x, splat(bound), _CMP_NLT_UQ) != 0;
#elif defined(__AVX2__)
    return _mm256_movemask_ps(_mm256_cmp_ps(x, splat(bound), _CMP_NLT_UQ)) != 0;
#else
    bool any = false;
    for (int i = 0; i < kWidth; ++i) any |= !(x[i] < bound);
    return any;
#endif
  }

  int64_t count() const { return count_; }

  // The first k in order, or all where there were fewer.
  const Entry* take() {
    if (count_ > k_) cut();
    std::sort(entries_, entries_ + count_, Before());
    return entries_;
  }
  // The same ones, as they come in the row.
  const Entry* take_by_index() {
    if (count_ > k_) cut();
    std::sort(entries_, entries_ + count_, ByIndex());
    return entries_;
  }

 private:
  void offer(float x, int64_t index) {
    if (x < bound_) return;
    entries_[count_++] = entry_of(key_of_logit(x), static_cast<uint32_t>(index));
    if (count_ == 2 * k_) cut();
  }

  void cut() {
    std::nth_element(entries_, entries_ + (k_ - 1), entries_ + count_, Before());
    count_ = k_;
    bound_ = logit_of_key(key_of(entries_[k_ - 1]));  // NaN, where all are NaN: then nothing is below it
  }

  int64_t k_ = 0, count_ = 0, room_ = 0;
  float bound_ = 0;
  Entry* entries_ = nullptr;
};

}  // namespace
}  // namespace pykv::PYKV_ISA
