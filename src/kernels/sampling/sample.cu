// A row's token is drawn by a block, or where rows are few by a cluster of them (row_sampler.cuh).
#include "sampling/row_sampler.cuh"

namespace pykv {
namespace {

// What sample_row() reads.
__device__ inline void prefetch_sample_row(const SampleArgs& args, int64_t row) {
  for (const RowNumbers* numbers : {&args.temperature, &args.top_p, &args.min_p})
    if (numbers->data) prefetch(numbers->data + row * numbers->stride);
  for (const Index* list : {&args.seeds, &args.steps, &args.top_k.list})
    if (list->data) prefetch(static_cast<const char*>(list->data) + row * list->stride * (list->is_int64 ? 8 : 4));
}

// Where there are options, registers for loads ahead are worth more than a second block on a multiprocessor.
template <class T, bool kAdjusted, bool kPlain, int kThreads = kSelectThreads>
__global__ __launch_bounds__(kThreads, kPlain ? 2 * kSelectThreads / kThreads
                                              : 1) void sample_kernel(const __grid_constant__ SampleArgs args,
                                                                      int blocks, int room,
                                                                      const __grid_constant__ Reporter reporter) {
  extern __shared__ __align__(16) Entry entries[];
  __shared__ RowMemory memory;
  const int64_t row = static_cast<int64_t>(blockIdx.x) / blocks;
  RowTeamOf<kThreads / 32> team(memory, static_cast<int>(blockIdx.x) % blocks, blocks);
  const RowSlice<T> slice(static_cast<const T*>(args.logits) + row * args.logit_stride, args.num_cols, team.rank(),
                          blocks);
  slice.prefetch_first();
  if (threadIdx.x == 0) prefetch_sample_row(args, row);
  begin_dependent();
  __shared__ SampleRow of_row;
  __shared__ Search search;
  __shared__ alignas(RowAdjustments) char adjusted[sizeof(RowAdjustments)];
  if (threadIdx.x == 0) {
    of_row = sample_row(args, row);
    if constexpr (kAdjusted) new (adjusted) RowAdjustments(args.adjustments, row);
  }
  __syncthreads();
  team.wait_for_blocks();
  RowSampler<T, kAdjusted, kPlain, !kAdjusted && !kPlain, kThreads>(
      args, slice, of_row, *reinterpret_cast<const RowAdjustments*>(adjusted), team, memory, search, entries, room)
      .draw(row, reporter);
}

}  // namespace

void sample_cuda(const SampleArgs& args, const Launch& launch) {
  const bool is_plain =
      !args.adjustments.any() && !args.top_k.given && !args.top_p.given && !args.min_p.given && !args.logprobs;
  dispatch<half, bf16, float>(args.dtype, [&]<class T>() {
    const auto run = [&]<bool kAdjusted, bool kPlain>() {
      constexpr auto kKernel = sample_kernel<T, kAdjusted, kPlain>;
      int blocks = blocks_for_row<kKernel>(args.num_rows, args.num_cols, launch);
      while (!kPlain && blocks > 1 && !has_room_for<kKernel>(args.num_rows, blocks, launch)) blocks /= 2;
      if constexpr (kPlain) {
        // Twice the threads where each block has a multiprocessor for itself, and a warp several steps.
        constexpr int kThreads = 2 * kSelectThreads, kManyColumns = 1 << 15;
        constexpr auto kLarge = sample_kernel<T, false, true, kThreads>;
        if (args.num_cols / blocks >= kManyColumns && has_room_for<kLarge>(args.num_rows, blocks, launch))
          return launch_rows<kLarge>(args.num_rows, blocks, kThreads, 0, launch, "sample", args, blocks, 0,
                                     launch.reporter("sample: logits"));
      }
      const int room = kPlain ? 0 : TopKCandidates<T, 1>::room(kMostListed);
      launch_rows<kKernel>(args.num_rows, blocks, kSelectThreads, room * static_cast<int>(sizeof(Entry)), launch,
                           "sample", args, blocks, room, launch.reporter("sample: logits"));
    };
    if (is_plain) return run.template operator()<false, true>();
    dispatch_bool(args.adjustments.any(), [&]<bool kAdjusted>() { run.template operator()<kAdjusted, false>(); });
  });
}

}  // namespace pykv
