// A row is one thread's, read once: what is below the k-th best so far is passed over, a vector at a time.
#include "cpu/parallel.h"
#include "sampling/candidates_cpu.h"
#include "sampling/top_k_per_row.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T>
void top_k_of_row(Candidates& candidates, const TopKPerRowArgs& args, int64_t row, const Launch& launch) {
  const RowRange range = range_of_row(args, row, [&](RowArgument argument, int64_t value, int64_t bound) {
    launch.reporter(kRowArguments[static_cast<int>(argument)])(value, bound);
  });
  const T* logits = static_cast<const T*>(args.logits) + row * args.logit_stride + range.begin;
  int32_t* indices = args.indices + row * args.index_stride;
  T* values = args.values ? static_cast<T*>(args.values) + row * args.value_stride : nullptr;
  const auto finish = [&](int32_t i, int32_t index) {  // place i of the results, which are not read again
    indices[i] = index;
    if (values) values[i] = index >= 0 ? logits[index] : from_float<T>(-__builtin_inff());
  };
  if (range.k == range.size && !args.sorted) {
    for (int32_t i = 0; i < range.k; ++i) finish(i, i);
  } else if (range.k > 0) {
    candidates.start(range.k);
    candidates.offer(logits, 0, range.size);
    const Entry* found = args.sorted ? candidates.take() : candidates.take_by_index();
    for (int32_t i = 0; i < range.k; ++i) {
      if (key_of(found[i]) == kKeyOfNan) launch.reporter("top_k_per_row: logits")(row, kRowHasNan);
      finish(i, static_cast<int32_t>(index_of(found[i])));
    }
  }
  for (int32_t i = range.k; i < args.k; ++i) finish(i, -1);
}

}  // namespace

void top_k_per_row_cpu(const TopKPerRowArgs& args, const Launch& launch) {
  constexpr int64_t kLogitsWorthAThread = 16384;
  const int64_t grain = std::max<int64_t>(1, kLogitsWorthAThread / std::max(args.num_cols, 1));
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    parallel_for(args.num_rows, grain, [&](int64_t begin, int64_t end) {
      Candidates candidates;
      for (int64_t row = begin; row < end; ++row) top_k_of_row<T>(candidates, args, row, launch);
    });
  });
}

}  // namespace pykv::PYKV_ISA
