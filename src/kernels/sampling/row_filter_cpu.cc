// A row is one thread's, as floats in scratch memory.
#include "cpu/parallel.h"
#include "sampling/candidates_cpu.h"
#include "sampling/row_filter.h"

namespace pykv::PYKV_ISA {
namespace {

class RowFilter {
 public:
  explicit RowFilter(int64_t num_cols) : values_(static_cast<float*>(std::malloc(static_cast<size_t>(num_cols) * 4))) {
    if (!values_) throw std::bad_alloc();
  }
  RowFilter(const RowFilter&) = delete;
  ~RowFilter() { std::free(values_); }

  void run(const RowFilterArgs& args, int64_t row, const Launch& launch) {
    size_ = args.num_cols;
    dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
      const T* from = static_cast<const T*>(args.input) + row * args.input_stride;
      for (int64_t i = 0; i < size_; ++i) values_[i] = to_float(from[i]);
    });
    bool has_nan = false;
    largest_ = -__builtin_inff();
    for (int64_t i = 0; i < size_; ++i) {
      largest_ = values_[i] > largest_ ? values_[i] : largest_;
      has_nan |= values_[i] != values_[i];
    }
    const FilterRow r = filter_row(args, row);
    const bool is_empty = !(largest_ > (args.of_probabilities ? 0.0f : -__builtin_inff()));
    if (has_nan || is_empty) launch.reporter(args.report)(row, has_nan ? -1 : -2);
    const float nan = float_of(0x7fc00000u);
    if (args.result == RowResult::kTokenLogprobs) return logprobs(args, r, row, has_nan || is_empty, launch);
    const bool as_it_is = args.result == RowResult::kLogits;
    const Entry floor = has_nan || is_empty || r.keeps_all() ? 0 : floor_of(r);
    const float total = as_it_is || has_nan || is_empty ? 1.0f : static_cast<float>(mass_from(r, floor)) * 0x1p-40f;
    for (int64_t i = 0; i < size_; ++i) {
      const float x = values_[i];
      const bool kept = entry_of(key_of_logit(x), static_cast<uint32_t>(i)) >= floor;
      float y = as_it_is ? (kept ? x : -__builtin_inff()) : kept ? r.probability(x, largest_, total) : 0.0f;
      if (!as_it_is && (has_nan || is_empty)) y = nan;
      values_[i] = y;
    }
    dispatch<float, f16, bf16>(args.out_dtype, [&]<class T>() {
      T* out = static_cast<T*>(args.out) + row * args.out_stride;
      for (int64_t i = 0; i < size_; ++i) out[i] = from_float<T>(values_[i]);
    });
  }

 private:
  // The last entry that is kept.
  Entry floor_of(const FilterRow& r) {
    const float least = r.least(largest_);
    Entry floor = least == -__builtin_inff() ? 0 : Entry{key_of_logit(least)} << 32;
    if (r.k == 0 && r.top_p >= 1.0f) return floor;
    for (int64_t wanted = r.k > 0 ? r.k : std::min<int64_t>(1024, size_);; wanted = std::min(8 * wanted, size_)) {
      candidates_.start(wanted, least);
      candidates_.offer(values_, 0, size_);
      const Entry* entries = candidates_.take();
      int64_t count = candidates_.count();
      const bool is_complete = r.k > 0 || count < wanted || wanted == size_;
      if (r.top_p < 1.0f) {
        Mass total = is_complete ? 0 : mass_from(r, floor);
        if (is_complete)
          for (int64_t i = 0; i < count; ++i) total += mass(r, entries[i]);
        const Mass target = share_of(total, r.top_p);
        Mass sum = 0;
        int64_t kept = 0;
        while (kept < count && sum < target) sum += mass(r, entries[kept++]);
        if (sum < target && !is_complete) continue;
        count = kept;
      }
      return entries[count - 1];
    }
  }

  Mass mass(const FilterRow& r, Entry entry) const { return r.mass(values_[index_of(entry)], largest_); }
  Mass mass_from(const FilterRow& r, Entry floor) const {
    Mass total = 0;
    for (int64_t i = 0; i < size_; ++i)
      if (entry_of(key_of_logit(values_[i]), static_cast<uint32_t>(i)) >= floor) total += r.mass(values_[i], largest_);
    return total;
  }

  void logprobs(const RowFilterArgs& args, const FilterRow& r, int64_t row, bool is_bad, const Launch& launch) const {
    float* out = static_cast<float*>(args.out) + row * args.out_stride;
    int32_t* ranks = args.ranks ? args.ranks + row * args.rank_stride : nullptr;
    const float log_total = is_bad ? 0.0f : log_of(static_cast<float>(mass_from(r, 0)) * 0x1p-40f);
    for (int32_t i = 0; i < args.num_tokens; ++i) {
      const int64_t token = args.token(row, i);
      const bool there = token >= 0 && token < size_;
      if (!there) launch.reporter("token_logprobs: token_ids")(token, size_);
      const float x = there ? values_[token] : 0.0f;
      out[i] = is_bad || !there ? float_of(0x7fc00000u) : fused(below(x, largest_), r.inverse_temperature, -log_total);
      if (!ranks) continue;
      ranks[i] = -1;
      if (!there) continue;
      const Entry own = entry_of(key_of_logit(x), static_cast<uint32_t>(token));
      int32_t rank = 0;
      for (int64_t at = 0; at < size_; ++at)
        rank += entry_of(key_of_logit(values_[at]), static_cast<uint32_t>(at)) > own;
      ranks[i] = rank;
    }
  }

  float* values_;
  int64_t size_ = 0;
  float largest_ = 0;
  Candidates candidates_;
};

}  // namespace

void row_filter_cpu(const RowFilterArgs& args, const Launch& launch) {
  parallel_for(args.num_rows, 1, [&](int64_t begin, int64_t end) {
    RowFilter filter(args.num_cols);
    for (int64_t row = begin; row < end; ++row) filter.run(args, row, launch);
  });
}

}  // namespace pykv::PYKV_ISA
