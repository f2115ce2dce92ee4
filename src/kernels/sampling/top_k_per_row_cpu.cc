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
  if (range.k == range.size && !args.sorted) {
    for (int32_t i = 0; i < range.k; ++i) indices[i] = i;
  } else if (range.k > 0) {
    candidates.start(range.k);
    candidates.offer(logits, 0, range.size);
    const Entry* found = candidates.take();
    if (key_of(found[0]) == kKeyOfNan) launch.reporter("top_k_per_row: logits")(row, kRowHasNan);
    for (int32_t i = 0; i < range.k; ++i) indices[i] = static_cast<int32_t>(index_of(found[i]));
    if (!args.sorted) std::sort(indices, indices + range.k, Ascending());
  }
  for (int32_t i = range.k; i < args.k; ++i) indices[i] = -1;
  if (!values) return;
  for (int32_t i = 0; i < range.k; ++i) values[i] = logits[indices[i]];
  for (int32_t i = range.k; i < args.k; ++i) values[i] = from_float<T>(-__builtin_inff());
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
