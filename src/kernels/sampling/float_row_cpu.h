// A row of logits or probabilities as one thread has it: as floats in scratch memory, with what comes first in it.
#pragma once

#include "core/args.h"
#include "sampling/arithmetic.h"
#include "sampling/candidates_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

class FloatRow {
 public:
  explicit FloatRow(int64_t size_) : size(size_), values(static_cast<float*>(std::malloc(size_t(size_) * 4))) {
    if (!values) throw std::bad_alloc();
  }
  FloatRow(const FloatRow&) = delete;
  ~FloatRow() { std::free(values); }

  // From a row of these that begins with element `at`.
  void load_from(DType dtype, const void* rows, int64_t at) {
    dispatch<float, f16, bf16>(dtype, [&]<class T>() {
      const T* from = static_cast<const T*>(rows) + at;
      int64_t i = 0;
      for (; i + kWidth <= size; i += kWidth) store(values + i, load(from + i));
      for (; i < size; ++i) values[i] = to_float(from[i]);
    });
  }
  void find_largest() {
    largest = -__builtin_inff();
    has_nan = false;
    for (int64_t i = 0; i < size; ++i) {
      largest = values[i] > largest ? values[i] : largest;
      has_nan |= values[i] != values[i];
    }
  }

  const int64_t size;
  float* const values;
  float largest = 0;
  bool has_nan = false;
};

// Of all values that are not below `least`; mass(value).
template <class MassOf>
Mass mass_of_all(const FloatRow& row, float least, MassOf mass) {
  Mass total = 0;
  for (int64_t i = 0; i < row.size; ++i) total += row.values[i] < least ? 0 : mass(row.values[i]);
  return total;
}

// Entries in their order.
struct Beginning {
  const Entry* entries;
  int64_t count;
};

// The first k entries of a row (0: all), none below `least`, and of those the fewest that have the share top_p (1: all) of their
// mass; mass(value).  All of a row are no list: k is given, or top_p below 1.
template <class MassOf>
Beginning shortest_beginning(const FloatRow& row, Candidates& candidates, int64_t k, float least, float top_p,
                             MassOf mass) {
  // Without k, the list begins with as many as nearly always are enough.
  for (int64_t wanted = k > 0 ? k : std::min<int64_t>(1024, row.size);; wanted = std::min(8 * wanted, row.size)) {
    candidates.start(wanted, least);
    candidates.offer(row.values, 0, row.size);
    const Entry* entries = candidates.take();
    const int64_t count = candidates.count();
    if (!(top_p < 1.0f)) return {entries, count};
    const bool is_complete = k > 0 || count < wanted || wanted == row.size;
    Mass total = is_complete ? 0 : mass_of_all(row, least, mass);
    if (is_complete)
      for (int64_t i = 0; i < count; ++i) total += mass(row.values[index_of(entries[i])]);
    const Mass target = share_of(total, top_p);
    Mass sum = 0;
    int64_t kept = 0;
    while (kept < count && sum < target) sum += mass(row.values[index_of(entries[kept++])]);
    if (sum >= target || is_complete) return {entries, kept};
  }
}

}  // namespace
}  // namespace pykv::PYKV_ISA
