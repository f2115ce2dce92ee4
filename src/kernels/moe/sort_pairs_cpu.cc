// Twin of sort_pairs.cu: count, add up, place.
#include <algorithm>
#include <vector>

#include "moe/sort_pairs.h"

namespace pykv::PYKV_ISA {
namespace {

class Sorter {
 public:
  Sorter(const SortPairsArgs& a, const Launch& launch)
      : a_(a), launch_(launch), bins_(a.sizes.data ? 0 : a.num_pairs), counts_(a.num_bins), starts_(a.num_bins + 1) {}

  // adapter: of the pairs that are sorted; -1: all are.
  void make_list(int64_t adapter) {
    list_ = std::max<int64_t>(adapter, 0);
    std::fill(counts_.begin(), counts_.end(), 0);
    starts_[0] = 0;
    if (a_.sizes.data)
      take_sizes();
    else
      find_bins(adapter);
    for (int64_t b = 0; b < a_.num_bins; ++b)
      starts_[b + 1] = starts_[b] + (counts_[b] + a_.block_size - 1) / a_.block_size * a_.block_size;
    put_bins();
    if (a_.sizes.data)
      list_rows();
    else
      place_pairs();
  }

 private:
  void take_sizes() {
    for (int64_t b = 0; b < a_.num_bins; ++b) {
      const int64_t size = a_.sizes[b];
      if (size > a_.rows_of_bin) launch_.reporter(a_.report_sizes)(size, a_.rows_of_bin + 1);
      counts_[b] = std::clamp<int64_t>(size, 0, a_.rows_of_bin);
    }
  }

  void find_bins(int64_t adapter) {
    int32_t* bin = bins_.data();
    for (int64_t t = 0; t < a_.num_tokens; ++t) {
      const bool is_wanted = adapter < 0 || a_.token_adapters[t] == adapter;
      for (int64_t j = 0; j < a_.top_k; ++j) {
        *bin = is_wanted ? bin_of(a_.ids.at(t, j)) : -1;
        if (*bin >= 0) ++counts_[*bin];
        ++bin;
      }
    }
  }

  int32_t bin_of(int64_t id) const {
    const auto dropped = static_cast<int32_t>(a_.keeps_all ? a_.num_bins - 1 : -1);
    if (id >= a_.num_experts) launch_.reporter(a_.report_ids)(id, a_.num_experts);
    if (id < 0 || id >= a_.num_experts) return dropped;
    if (!a_.expert_map.data) return static_cast<int32_t>(id);
    const int64_t bin = a_.expert_map[id];
    if (bin >= a_.num_listed) launch_.reporter(a_.report_map)(bin, a_.num_listed);
    if (bin >= 0 && bin < a_.num_listed) return static_cast<int32_t>(bin);
    return a_.keeps_all ? static_cast<int32_t>(a_.num_listed + id) : -1;
  }

  // Everything but the pairs.
  void put_bins() {
    const int64_t taken = starts_[a_.num_listed];
    if (a_.num_padded) a_.num_padded[list_ * a_.num_padded_stride] = static_cast<int32_t>(taken);
    if (a_.sorted) std::fill_n(a_.sorted + list_ * a_.list_stride, a_.capacity, a_.sentinel);
    if (a_.blocks) {
      int32_t* to = a_.blocks + list_ * a_.blocks_stride;
      std::fill_n(to, a_.num_blocks, -1);
      for (int64_t b = 0; b < a_.num_listed; ++b)
        std::fill(to + starts_[b] / a_.block_size, to + starts_[b + 1] / a_.block_size, static_cast<int32_t>(b));
    }
    int64_t of_128 = 0;
    for (int64_t b = 0; b <= a_.num_listed; ++b) {
      if (a_.offsets) a_.offsets[b] = static_cast<int32_t>(starts_[b]);
      if (a_.wide_offsets) a_.wide_offsets[b] = starts_[b];
      if (a_.offsets_of_128) a_.offsets_of_128[b] = static_cast<int32_t>(of_128);
      if (b == a_.num_listed) break;
      of_128 += (counts_[b] + 127) / 128 * 128;
      if (a_.problems1) put_problem(a_.problems1 + 3 * b, counts_[b], a_.columns, a_.hidden, a_.is_swapped);
      if (a_.problems2) put_problem(a_.problems2 + 3 * b, counts_[b], a_.hidden, a_.inner, a_.is_swapped);
    }
  }

  void list_rows() {
    for (int64_t b = 0; b < a_.num_bins; ++b)
      for (int64_t i = 0; i < counts_[b]; ++i) a_.sorted[starts_[b] + i] = static_cast<int32_t>(b * a_.rows_of_bin + i);
  }

  void place_pairs() {
    int32_t pair = 0;
    for (int64_t t = 0; t < a_.num_tokens; ++t) {
      for (int64_t j = 0; j < a_.top_k; ++j, ++pair) {
        const int64_t bin = bins_[pair];
        const int64_t place = bin < 0 ? a_.dropped_place : starts_[bin]++;
        if (a_.places) a_.places[pair] = static_cast<int32_t>(place);
        if (bin < 0 || bin >= a_.num_listed) continue;
        if (a_.sorted) a_.sorted[list_ * a_.list_stride + place] = pair;
        if (a_.sorted_tokens) a_.sorted_tokens[place] = static_cast<int32_t>(t);
      }
    }
  }

  const SortPairsArgs& a_;
  const Launch& launch_;
  int64_t list_ = 0;
  std::vector<int32_t> bins_;
  std::vector<int64_t> counts_, starts_;
};

}  // namespace

void sort_pairs_cpu(const SortPairsArgs& args, const Launch& launch) {
  Sorter sorter(args, launch);
  if (!args.adapters.data) return sorter.make_list(-1);
  for (int64_t i = 0; i < args.num_lists; ++i) {
    const int64_t adapter = args.adapters[i];
    if (adapter >= args.max_adapters) launch.reporter(args.report_adapters)(adapter, args.max_adapters);
    if (adapter >= 0 && adapter < args.max_adapters && args.adapter_enabled[adapter] != 0) sorter.make_list(adapter);
  }
}

}  // namespace pykv::PYKV_ISA
