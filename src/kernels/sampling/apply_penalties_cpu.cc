// A thread has a row, and a number for each token of the vocabulary: how often it occurs.  Only tokens in the lists are looked
// at, once: they may change meanwhile.
#include <algorithm>
#include <cstdlib>
#include <new>
#include <vector>

#include "cpu/float16.h"
#include "cpu/parallel.h"
#include "sampling/apply_penalties.h"

namespace pykv::PYKV_ISA {
namespace {

class Occurrences {
 public:
  explicit Occurrences(int64_t size) : counts_(static_cast<uint32_t*>(std::calloc(static_cast<size_t>(size), 4))) {
    if (!counts_) throw std::bad_alloc();
  }
  Occurrences(const Occurrences&) = delete;
  ~Occurrences() { std::free(counts_); }

  void penalise_row(const PenaltiesArgs& args, int64_t row, const Launch& launch) {
    const RowPenalties penalties(args, row);
    const int64_t prompt = args.prompt.length(row, launch.reporter(kPenaltyReports[2]));
    const int64_t output = args.output.length(row, launch.reporter(kPenaltyReports[3]));
    each(args, args.prompt, row, prompt, launch.reporter(kPenaltyReports[0]),
         [&](int64_t id) { seen(id) |= kInPrompt; });
    each(args, args.output, row, output, launch.reporter(kPenaltyReports[1]), [&](int64_t id) { ++seen(id); });
    dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
      T* logits = static_cast<T*>(args.logits) + row * args.logit_stride;
      for (const int64_t id : ids_) {
        logits[id] = from_float<T>(penalties(to_float(logits[id]), counts_[id]));
        counts_[id] = 0;
      }
    });
    ids_.clear();
  }

 private:
  uint32_t& seen(int64_t id) {
    if (counts_[id] == 0) ids_.push_back(id);
    return counts_[id];
  }
  template <class Report, class F>
  static void each(const PenaltiesArgs& args, const TokenLists& lists, int64_t row, int64_t n, Report report, F f) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t id = lists.id(row, i);
      if (id >= 0 && id < args.num_cols) {
        f(id);
      } else if (id > args.num_cols) {
        report(id, args.num_cols);
      }
    }
  }

  uint32_t* counts_;          // all 0 between rows
  std::vector<int64_t> ids_;  // whose counts are not 0
};

}  // namespace

void apply_penalties_cpu(const PenaltiesArgs& args, const Launch& launch) {
  parallel_for(args.num_rows, 1, [&](int64_t begin, int64_t end) {
    Occurrences occurrences(args.num_cols);
    for (int64_t row = begin; row < end; ++row) occurrences.penalise_row(args, row, launch);
  });
}

}  // namespace pykv::PYKV_ISA
