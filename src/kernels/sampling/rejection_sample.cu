// A block, or where requests are few a cluster of them, verifies the draft of a request and draws one token from its vocabulary:
// a single row of target_probs, and of draft_probs, is read.
#include "sampling/rejection_sample.h"
#include "sampling/weighed_tokens.cuh"

namespace pykv {
namespace {

struct Reporters {
  Reporter lens, tokens, probs;
};

__device__ Entry best_of_position(const Speculation& s, RowTeam& team, int position, bool is_rejected, int vocab_size) {
  return best_token(
      s.noise(position), team, vocab_size, [&](int token) { return s.weight(position, is_rejected, token); },
      [](int) { return true; });
}

__global__ __launch_bounds__(kSelectThreads,
                             2) void rejection_sample_kernel(const __grid_constant__ RejectionSampleArgs args,
                                                             int blocks, const __grid_constant__ Reporters reporters) {
  __shared__ RowMemory memory;
  begin_dependent();
  const int64_t request = static_cast<int64_t>(blockIdx.x) / blocks;
  const int thread = threadIdx.x;
  RowTeam team(memory, static_cast<int>(blockIdx.x) % blocks, blocks);
  const bool reports = team.rank() == 0 && thread == 0;
  const Speculation s(args, request);
  const int length = s.length([&](long long value, long long bound) {
    if (reports) reporters.lens(value, bound);
  });
  // The first that is not accepted: the largest of their numbers counted from the end.
  uint64_t from_end = 0;
  for (int i = thread; i < length && from_end == 0; i += kSelectThreads)
    if (!s.accepts(i)) from_end = static_cast<uint64_t>(length - i);
  const int accepted = length - static_cast<int>(team.reduce_block(from_end, Larger()));
  const bool is_rejected = accepted < length;
  if (reports && is_rejected && !s.is_token(s.draft_token(accepted)))
    reporters.tokens(s.draft_token(accepted), args.vocab_size);
  team.wait_for_blocks();
  Entry best = best_of_position(s, team, accepted, is_rejected, args.vocab_size);
  if (best == 0 && is_rejected) best = best_of_position(s, team, accepted, false, args.vocab_size);
  const bool has_nan = key_of(best) == kKeyOfNan;
  if (reports && (best == 0 || has_nan)) reporters.probs(request, has_nan ? kRowHasNan : kRowIsEmpty);
  if (team.rank() == 0) {
    for (int i = thread; i <= args.num_draft; i += kSelectThreads) {
      const int64_t drawn = best == 0 || has_nan ? -1 : int64_t{index_of(best)};
      s.store(i, i < accepted ? s.draft_token(i) : i == accepted ? drawn : -1);
    }
    if (thread == 0) s.store_accepted(accepted);
  }
}

}  // namespace

void rejection_sample_cuda(const RejectionSampleArgs& args, const Launch& launch) {
  const int blocks = blocks_for_row<rejection_sample_kernel>(args.num_requests, args.vocab_size, launch);
  const Reporters reporters{launch.reporter("rejection_sample: draft_lens"),
                            launch.reporter("rejection_sample: draft_token_ids"),
                            launch.reporter("rejection_sample: target_probs")};
  launch_rows<rejection_sample_kernel>(args.num_requests, blocks, kSelectThreads, 0, launch, "rejection_sample", args,
                                       blocks, reporters);
}

}  // namespace pykv
