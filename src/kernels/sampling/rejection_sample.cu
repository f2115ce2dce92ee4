// A block, or where requests are few a cluster of them, verifies the draft of a request and draws one token from its vocabulary:
// a single row of target_probs, and of draft_probs, is read.  Noise is worked out only for tokens that may win (sample.cu).
#include "cuda/approximate.cuh"
#include "sampling/rejection_sample.h"
#include "sampling/row_passes.cuh"

namespace pykv {
namespace {

struct Reporters {
  Reporter lens, tokens, probs;
};

__device__ Entry best_token(const Speculation& s, RowTeam& team, int position, bool is_rejected, int vocab_size) {
  const TokenNoise noise = s.noise(position);
  Entry best = 0;
  float reach = INFINITY;  // of a weight: what its random number must not exceed
  const int groups = (vocab_size + 3) / 4;
  for (int first = team.rank() * kSelectThreads; first < groups; first += team.blocks() * kSelectThreads) {
    const int group = first + static_cast<int>(threadIdx.x);
    float weights[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 4 * group + i;
      weights[i] = group < groups && token < vocab_size ? s.weight(position, is_rejected, token) : 0.0f;
    }
    const FourWords words = noise.group(static_cast<uint32_t>(group));
    const Entry last = best;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      // It wins if -ln(1 - u) is below weight * reach, and so only if u is.  NaN passes.
      if (__uint_as_float(words.w[i] >> 9 | 0x3f800000u) > fmaf(weights[i], reach, 1.0000003f)) continue;
      best = Larger()(best, weighed_entry(weights[i], words.w[i], static_cast<uint32_t>(4 * group + i)));
    }
    if (__any_sync(0xffffffffu, best != last)) {
      const float score = logit_of_key(__reduce_max_sync(0xffffffffu, key_of(best)));
      reach = score < INFINITY ? power_of_2(-1.44269504f * score) * 1.01f : 0.0f;
    }
  }
  return team.reduce(best, Larger());
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
  Entry best = best_token(s, team, accepted, is_rejected, args.vocab_size);
  if (best == 0 && is_rejected) best = best_token(s, team, accepted, false, args.vocab_size);
  const bool has_nan = key_of(best) == kKeyOfNan;
  if (reports && (best == 0 || has_nan)) reporters.probs(request, has_nan ? kRowHasNan : kRowIsEmpty);
  if (team.rank() == 0) {
    for (int i = thread; i <= args.num_draft; i += kSelectThreads) {
      const int64_t drawn = best == 0 || has_nan ? -1 : int64_t{index_of(best)};
      s.store(i, i < accepted ? s.draft_token(i) : i == accepted ? drawn : -1);
    }
    if (thread == 0) s.store_accepted(accepted);
  }
  team.barrier();  // others may still read this block's sums
}

}  // namespace

void rejection_sample_cuda(const RejectionSampleArgs& args, const Launch& launch) {
  const int blocks = blocks_for_row(args.num_requests, args.vocab_size, 8, launch);
  const Reporters reporters{launch.reporter("rejection_sample: draft_lens"),
                            launch.reporter("rejection_sample: draft_token_ids"),
                            launch.reporter("rejection_sample: target_probs")};
  launch_rows<rejection_sample_kernel>(args.num_requests, blocks, kSelectThreads, 0, launch, "rejection_sample", args,
                                       blocks, reporters);
}

}  // namespace pykv
