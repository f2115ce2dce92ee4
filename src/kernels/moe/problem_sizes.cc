#include "moe/problem_sizes.h"

#include <algorithm>
#include <cinttypes>

#include "moe/pair_inputs.h"
#include "pykv/moe.h"

namespace pykv {
namespace {

// Checks sizes, which are int32 in the end, and the two arrays of problems.
ProblemSizesArgs problem_args(Call& call, Dim& experts, DLTensor* problem_sizes1, DLTensor* problem_sizes2, int64_t n,
                              int64_t k) {
  constexpr int64_t kMost = INT32_MAX / 2;
  if (n < 1 || n > kMost) fail(PYKV_VALUE_ERROR, "n: must be 1 to %" PRId64 ", got %" PRId64, kMost, n);
  if (k < 1 || k > kMost) fail(PYKV_VALUE_ERROR, "k: must be 1 to %" PRId64 ", got %" PRId64, kMost, k);
  Dim three{"3", 3};
  ProblemSizesArgs args{};
  args.problems1 =
      static_cast<int32_t*>(int32_output(call, "problem_sizes1", problem_sizes1).shape(experts, three).data());
  args.problems2 =
      static_cast<int32_t*>(int32_output(call, "problem_sizes2", problem_sizes2).shape(experts, three).data());
  args.num_experts = experts;
  args.columns = 2 * n;
  args.hidden = k;
  args.inner = n;
  return args;
}

void run(Call& call, void* stream, const ProblemSizesArgs& args) {
  if (std::max(args.num_experts, args.num_begins) != 0)
    call.run(stream, args, problem_sizes_cpu, PYKV_CUDA(problem_sizes_cuda));
}

}  // namespace
}  // namespace pykv

using namespace pykv;

pykv_status pykv_get_cutlass_moe_mm_problem_sizes_from_expert_offsets(const DLTensor* expert_first_token_offset,
                                                                      DLTensor* problem_sizes1,
                                                                      DLTensor* problem_sizes2, int64_t n, int64_t k,
                                                                      bool swap_ab, void* stream) {
  return guarded("get_cutlass_moe_mm_problem_sizes_from_expert_offsets", [&](Call& call) {
    Tensor offsets = call.read("expert_first_token_offset", expert_first_token_offset).rank(1);
    if (offsets.size(0) < 1)
      offsets.fail(PYKV_VALUE_ERROR, "must have num_experts + 1 elements, got shape %s",
                   offsets.shape_string().c_str());
    Dim experts{"num_experts", offsets.size(0) - 1};
    ProblemSizesArgs args = problem_args(call, experts, problem_sizes1, problem_sizes2, n, k);
    args.offsets = offsets.index();
    args.is_swapped = swap_ab;
    run(call, stream, args);
  });
}

pykv_status pykv_get_cutlass_batched_moe_mm_data(DLTensor* expert_offsets, DLTensor* problem_sizes1,
                                                 DLTensor* problem_sizes2, const DLTensor* expert_num_tokens,
                                                 int64_t num_local_experts, int64_t padded_m, int64_t n, int64_t k,
                                                 void* stream) {
  return guarded("get_cutlass_batched_moe_mm_data", [&](Call& call) {
    Dim experts{"num_local_experts"};
    Tensor counts = call.read("expert_num_tokens", expert_num_tokens).shape(experts);
    if (num_local_experts != experts)
      fail(PYKV_VALUE_ERROR, "num_local_experts: must equal the size of expert_num_tokens, %" PRId64 ", got %" PRId64,
           static_cast<int64_t>(experts), num_local_experts);
    Tensor begins = int32_output(call, "expert_offsets", expert_offsets).rank(1);
    if (begins.size(0) != experts && begins.size(0) != experts + 1)
      begins.fail(PYKV_VALUE_ERROR, "must have num_local_experts = %" PRId64 " elements, or one more, got shape %s",
                  num_local_experts, begins.shape_string().c_str());
    int64_t last;
    if (padded_m < 0 || __builtin_mul_overflow(padded_m, num_local_experts, &last) || last > INT32_MAX)
      fail(PYKV_VALUE_ERROR, "padded_m: must not be negative, and num_local_experts times it fit int32, got %" PRId64,
           padded_m);
    ProblemSizesArgs args = problem_args(call, experts, problem_sizes1, problem_sizes2, n, k);
    args.counts = counts.index();
    args.begins = static_cast<int32_t*>(begins.data());
    args.num_begins = begins.size(0);
    args.rows_of_expert = padded_m;
    run(call, stream, args);
  });
}
