// A thread for each expert.
#include <algorithm>

#include "cuda/dependent.cuh"
#include "moe/problem_sizes.h"

namespace pykv {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads) problem_sizes_kernel(const __grid_constant__ ProblemSizesArgs args) {
  begin_dependent();
  args.put(static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x);
}

}  // namespace

void problem_sizes_cuda(const ProblemSizesArgs& args, const Launch& launch) {
  const int64_t most = std::max(args.num_experts, args.num_begins);
  launch_dependent(problem_sizes_kernel, static_cast<uint32_t>((most + kThreads - 1) / kThreads), kThreads, launch,
                   "problem_sizes", args);
}

}  // namespace pykv
