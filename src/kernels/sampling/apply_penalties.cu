// A block has some columns of a row and counts in shared memory how often each occurs in the row's lists, all of which it reads:
// they are short beside the logits, and the second-level cache has them after the first block.  Only logits of tokens that occur
// are touched.
#include "cuda/dependent.cuh"
#include "cuda/vec.cuh"
#include "sampling/apply_penalties.h"

namespace pykv {
namespace {

constexpr int kThreads = 256, kColumns = 8192;  // of a block

struct Reporters {
  Reporter prompt_ids, output_ids, prompt_lens, output_lens;
};

template <class T>
__global__ __launch_bounds__(kThreads) void apply_penalties_kernel(const __grid_constant__ PenaltiesArgs args,
                                                                   uint32_t blocks_per_row,
                                                                   const __grid_constant__ Reporters reporters) {
  __shared__ uint32_t occurs[kColumns];
  begin_dependent();
  const int64_t row = blockIdx.x / blocks_per_row;
  const int first = static_cast<int>(blockIdx.x % blocks_per_row) * kColumns;
  const int size = min(args.num_cols - first, kColumns);
  const bool reports = first == 0;
  for (int i = threadIdx.x; i < size; i += kThreads) occurs[i] = 0;
  __syncthreads();

  const auto each = [&](const TokenLists& lists, const Reporter& of_length, const Reporter& of_ids, auto add) {
    const int64_t n = lists.length(row, [&](long long value, long long bound) {
      if (reports && threadIdx.x == 0) of_length(value, bound);
    });
    for (int64_t i = threadIdx.x; i < n; i += kThreads) {
      const int64_t id = lists.id(row, i);
      if (id >= first && id < first + size) add(&occurs[id - first]);
      if (reports && id > args.num_cols) of_ids(id, args.num_cols);
    }
  };
  each(args.prompt, reporters.prompt_lens, reporters.prompt_ids, [](uint32_t* at) { atomicOr(at, kInPrompt); });
  each(args.output, reporters.output_lens, reporters.output_ids, [](uint32_t* at) { atomicAdd(at, 1u); });
  __syncthreads();

  const RowPenalties penalties(args, row);
  T* logits = static_cast<T*>(args.logits) + row * args.logit_stride + first;
  for (int i = threadIdx.x; i < size; i += kThreads)
    if (occurs[i] != 0) logits[i] = from_float<T>(penalties(to_float(logits[i]), occurs[i]));
}

}  // namespace

void apply_penalties_cuda(const PenaltiesArgs& args, const Launch& launch) {
  const int64_t per_row = (int64_t{args.num_cols} + kColumns - 1) / kColumns;
  if (per_row > INT32_MAX / args.num_rows)
    fail(PYKV_NOT_IMPLEMENTED, "logits: more than 2^31 blocks of %d columns are not supported", kColumns);
  const Reporters reporters{launch.reporter(kPenaltyReports[0]), launch.reporter(kPenaltyReports[1]),
                            launch.reporter(kPenaltyReports[2]), launch.reporter(kPenaltyReports[3])};
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    launch_dependent(apply_penalties_kernel<T>, static_cast<unsigned>(per_row * args.num_rows), kThreads, launch,
                     "apply_penalties_", args, static_cast<uint32_t>(per_row), reporters);
  });
}

}  // namespace pykv
