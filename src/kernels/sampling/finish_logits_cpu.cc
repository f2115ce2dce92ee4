// Columns of tokens and of none are ranges: one after another.
#include <algorithm>

#include "cpu/parallel.h"
#include "cpu/silu.h"
#include "sampling/finish_logits.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T>
void finish_row(T* row, const FinishLogitsArgs& args) {
  const auto clear = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) row[i] = from_float<T>(-__builtin_inff());
  };
  const auto compute = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += kWidth) {
      Floats x = load(row + i, end - i);
      if (args.soft_cap != 0.0f) x = args.soft_cap * exact_tanh(x / args.soft_cap);
      store(row + i, x * args.scale, end - i);
    }
  };
  if (args.computes()) {
    compute(0, args.first_pad);
    compute(args.end_of_pad, args.first_unused);
  }
  clear(args.first_pad, args.end_of_pad);
  clear(args.first_unused, args.num_cols);
}

}  // namespace

void finish_logits_cpu(const FinishLogitsArgs& args, const Launch&) {
  constexpr int64_t kElementsWorthAThread = 16384;
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    parallel_for(args.num_rows, kElementsWorthAThread / args.num_cols + 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row)
        finish_row(static_cast<T*>(args.logits) + row * args.logit_stride, args);
    });
  });
}

}  // namespace pykv::PYKV_ISA
