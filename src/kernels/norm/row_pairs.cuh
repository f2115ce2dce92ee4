// Two neighbouring rows by the threads of one, for codes in groups whose scales lie side by side from row to row.
//
// Each lane finds the scale of one pack's group (store_by_largest.cuh), in one row or the other, so that what a warp stores of
// them has two neighbours in each sector of memory: half the requests.  Weights are loaded once for both rows.  They add up
// in the order of row_norm_kernel.
#pragma once

#include "cuda/dependent.cuh"
#include "norm/row_sources.cuh"
#include "norm/row_sums.cuh"
#include "norm/store_by_largest.cuh"

namespace pykv {
namespace {

// What becomes of two rows, as if the second followed the first.  kPacks: of a row.
template <class Result, int kPacks>
struct TwoRows : Result {
  bool both;  // are there

  __device__ void store_scale(int group, float scale) const {
    const int lanes = this->group_size() / kPackSize<typename Result::Element>;
    const int groups = kPacks >> (31 - __clz(lanes)), row = group >= groups;  // lanes: a power of two
    if (row == 0 || both) Result::store_scale(group - row * groups, scale, row);
  }
  template <class V, class C>
  __device__ void store(int pack, const V& v, const C& coder) const {
    const int row = pack >= kPacks;
    if (row == 0 || both) Result::store(pack - row * kPacks, v, coder, row);
  }
};

// Each thread has kPacks packs of each row.  Fetched before the wait: the first 4 MiB, as in row_norm.cuh.
template <class Source, class Result, int kThreads, int kPacks, int kBlocks>
__global__ __launch_bounds__(kThreads, kBlocks)  //
    void row_pairs_kernel(const __grid_constant__ typename Result::Args args, float inverse_size) {
  using T = typename Source::Element;
  const int thread = threadIdx.x;
  const bool both = 2 * blockIdx.x + 1 < args.num_rows;
  const auto part = [&](uint32_t row) {
    Part part = Result::part_of(args, row);
    part.first += thread * kPackSize<T>;
    return part;
  };
  const Source sources[2] = {Source(args, part(2 * blockIdx.x)), Source(args, part(2 * blockIdx.x + 1))};
  const auto has = [&](int k) { return k < kPacks || both; };
  constexpr uint32_t kEarly = (4 << 20) / (2 * kThreads * kPacks * kAccessBytes);
  if (comes_early(kEarly)) {
#pragma unroll
    for (int k = 0; k < 2 * kPacks; ++k) {
      if (has(k)) sources[k / kPacks].prefetch(k % kPacks * kThreads);
      if (k < kPacks && blockIdx.x == 0) Result::prefetch(args, part(0), k * kThreads);
    }
  }
  begin_dependent();

  typename Source::Raw raw[2 * kPacks];
#pragma unroll
  for (int k = 0; k < 2 * kPacks; ++k) {
    raw[k] = {};
    if (has(k)) raw[k] = sources[k / kPacks].load(k % kPacks * kThreads);
  }
  const float bound = args.bound();  // in time
  typename Source::Value z[2 * kPacks];
  float sums[2] = {};
#pragma unroll
  for (int k = 0; k < 2 * kPacks; ++k) {
    z[k] = sources[k / kPacks].value(raw[k]);
    if (has(k)) sources[k / kPacks].keep(k % kPacks * kThreads, z[k]);
    sums[k / kPacks] += sum_of_squares<false>(to_floats(z[k]), 0.0f, 0);
  }
  const RowReducer<kThreads, 2> reducer(kThreads);
  const float2 sum = reducer.template sums_of_two<1>(sums);
  const float r[2] = {rsqrtf(fmaf(sum.x, inverse_size, args.epsilon)), rsqrtf(fmaf(sum.y, inverse_size, args.epsilon))};
  uint32_t block;  // anew: addresses that were worked out before would be registers meanwhile
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  TwoRows<Result, kPacks * kThreads> result{{args, part(2 * block)}, both};
  result.bound = bound;
  typename Result::Value y[2 * kPacks];
#pragma unroll
  for (int k = 0; k < kPacks; ++k) {
    typename Result::Raw weights;
    result.load(k * kThreads, weights);
#pragma unroll
    for (int i = 0; i < 2 * kPacks; i += kPacks)
      y[i + k] = result.scaled(k * kThreads, normed<false>(z[i + k], 0.0f, r[i / kPacks]), weights);
  }
  store_by_largest_of_groups<true>(result, y, thread, kThreads, 2 * kPacks * kThreads);
}

}  // namespace
}  // namespace pykv
