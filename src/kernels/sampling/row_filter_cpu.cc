// A row is one thread's.
#include "cpu/parallel.h"
#include "sampling/float_row_cpu.h"
#include "sampling/row_filter.h"

namespace pykv::PYKV_ISA {
namespace {

class RowFilter {
 public:
  explicit RowFilter(int64_t num_cols) : row_(num_cols) {}

  void run(const RowFilterArgs& args, int64_t row, const Launch& launch) {
    row_.load_from(args.dtype, args.input, row * args.input_stride);
    row_.find_largest();
    const FilterRow r = filter_row(args, row);
    const bool has_nan =
        row_.has_nan || (args.of_probabilities && row_.largest == __builtin_inff());  // whose share would be
    const bool is_empty = !(row_.largest > (args.of_probabilities ? 0.0f : -__builtin_inff()));
    if (has_nan || is_empty) launch.reporter(args.report)(row, has_nan ? kRowHasNan : kRowIsEmpty);
    const float nan = float_of(0x7fc00000u);
    if (args.result == RowResult::kTokenLogprobs) return logprobs(args, r, row, has_nan || is_empty, launch);
    const bool as_it_is = args.result == RowResult::kLogits;
    const Entry floor = has_nan || is_empty || r.keeps_all() ? 0 : floor_of(r);
    const float total = as_it_is || has_nan || is_empty ? 1.0f : static_cast<float>(mass_from(r, floor)) * 0x1p-40f;
    for (int64_t i = 0; i < row_.size; ++i) {
      const float x = row_.values[i];
      const bool kept = entry_of(key_of_logit(x), static_cast<uint32_t>(i)) >= floor;
      float y = as_it_is ? (kept ? x : -__builtin_inff()) : kept ? r.share(x, row_.largest) * (1.0f / total) : 0.0f;
      if (!as_it_is && (has_nan || is_empty)) y = nan;
      row_.values[i] = y;
    }
    dispatch<float, f16, bf16>(args.out_dtype, [&]<class T>() {
      T* out = static_cast<T*>(args.out) + row * args.out_stride;
      for (int64_t i = 0; i < row_.size; ++i) out[i] = from_float<T>(row_.values[i]);
    });
  }

 private:
  // The last entry that is kept.
  Entry floor_of(const FilterRow& r) {
    const float least = r.least(row_.largest);
    if (r.k == 0 && r.top_p >= 1.0f) return least == -__builtin_inff() ? 0 : Entry{key_of_logit(least)} << 32;
    const Beginning kept = shortest_beginning(row_, candidates_, r.k, least, r.top_p,
                                              [&](float x) { return mass_of_share(r.share(x, row_.largest)); });
    return kept.entries[kept.count - 1];
  }

  Mass mass_from(const FilterRow& r, Entry floor) const {
    Mass total = 0;
    for (int64_t i = 0; i < row_.size; ++i) {
      const float x = row_.values[i];
      if (entry_of(key_of_logit(x), static_cast<uint32_t>(i)) >= floor)
        total += mass_of_share(r.share(x, row_.largest));
    }
    return total;
  }

  void logprobs(const RowFilterArgs& args, const FilterRow& r, int64_t row, bool is_bad, const Launch& launch) const {
    float* out = static_cast<float*>(args.out) + row * args.out_stride;
    int32_t* ranks = args.ranks ? args.ranks + row * args.rank_stride : nullptr;
    const float log_total = is_bad ? 0.0f : log_of(static_cast<float>(mass_from(r, 0)) * 0x1p-40f);
    for (int32_t i = 0; i < args.num_tokens; ++i) {
      const int64_t token = args.token(row, i);
      const bool there = token >= 0 && token < row_.size;
      if (!there) launch.reporter("token_logprobs: token_ids")(token, row_.size);
      const float x = there ? row_.values[token] : 0.0f;
      out[i] =
          is_bad || !there ? float_of(0x7fc00000u) : fused(below(x, row_.largest), r.inverse_temperature, -log_total);
      if (!ranks) continue;
      ranks[i] = -1;
      if (!there) continue;
      const Entry own = entry_of(key_of_logit(x), static_cast<uint32_t>(token));
      int32_t rank = 0;
      for (int64_t at = 0; at < row_.size; ++at)
        rank += entry_of(key_of_logit(row_.values[at]), static_cast<uint32_t>(at)) > own;
      ranks[i] = rank;
    }
  }

  FloatRow row_;
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
