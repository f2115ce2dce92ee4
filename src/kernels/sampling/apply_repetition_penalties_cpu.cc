// Eight flags of both masks are looked at together: most are 0, and then nothing is read or written.
#include <algorithm>

#include "cpu/float16.h"
#include "cpu/parallel.h"
#include "sampling/apply_repetition_penalties.h"

namespace pykv::PYKV_ISA {
namespace {

template <class T>
void penalise(T* logits, const uint8_t* prompt, const uint8_t* output, int64_t n, float penalty) {
  const auto one = [&](int64_t i) {
    if (!(prompt[i] | output[i])) return;
    const float x = to_float(logits[i]);
    logits[i] = from_float<T>(x > 0.0f ? x / penalty : x * penalty);
  };
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    uint64_t a, b;
    __builtin_memcpy(&a, prompt + i, 8);
    __builtin_memcpy(&b, output + i, 8);
    if (a | b)
      for (int k = 0; k < 8; ++k) one(i + k);
  }
  for (; i < n; ++i) one(i);
}

}  // namespace

void apply_repetition_penalties_cpu(const RepetitionPenaltiesArgs& args, const Launch&) {
  constexpr int64_t kElementsWorthAThread = 32768;
  dispatch<float, f16, bf16>(args.dtype, [&]<class T>() {
    parallel_for(args.num_rows, std::max<int64_t>(1, kElementsWorthAThread / args.num_cols),
                 [&](int64_t begin, int64_t end) {
                   for (int64_t row = begin; row < end; ++row) {
                     const int64_t at = row * args.penalty_stride;
                     const float penalty = args.penalty_dtype == DType::kFloat32
                                               ? static_cast<const float*>(args.penalties)[at]
                                               : to_float(static_cast<const T*>(args.penalties)[at]);
                     penalise(static_cast<T*>(args.logits) + row * args.logit_stride,
                              args.prompt_mask + row * args.prompt_stride, args.output_mask + row * args.output_stride,
                              args.num_cols, penalty);
                   }
                 });
  });
}

}  // namespace pykv::PYKV_ISA
