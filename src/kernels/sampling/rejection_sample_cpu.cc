// A request is one thread's.
#include "cpu/parallel.h"
#include "sampling/rejection_sample.h"

namespace pykv::PYKV_ISA {
namespace {

// What wins at a position; 0: all weights are 0.
Entry best_token(const Speculation& s, int position, bool is_rejected, int vocab_size) {
  const TokenNoise noise = s.noise(position);
  Entry best = 0;
  for (int first = 0; first < vocab_size; first += 4) {
    float weights[4] = {};
    bool any = false;
    for (int i = 0; i < 4 && first + i < vocab_size; ++i) {
      weights[i] = s.weight(position, is_rejected, first + i);
      any |= weights[i] != 0.0f;
    }
    if (!any) continue;
    const FourWords words = noise.group(static_cast<uint32_t>(first) / 4);
    for (int i = 0; i < 4; ++i) {
      const Entry entry = weighed_entry(weights[i], words.w[i], static_cast<uint32_t>(first + i));
      best = entry > best ? entry : best;
    }
  }
  return best;
}

}  // namespace

void rejection_sample_cpu(const RejectionSampleArgs& args, const Launch& launch) {
  parallel_for(args.num_requests, 1, [&](int64_t begin, int64_t end) {
    for (int64_t request = begin; request < end; ++request) {
      const Speculation s(args, request);
      const int length = s.length(launch.reporter("rejection_sample: draft_lens"));
      int accepted = 0;
      while (accepted < length && s.accepts(accepted)) ++accepted;
      const bool is_rejected = accepted < length;
      if (is_rejected && !s.is_token(s.draft_token(accepted)))
        launch.reporter("rejection_sample: draft_token_ids")(s.draft_token(accepted), args.vocab_size);
      Entry best = best_token(s, accepted, is_rejected, args.vocab_size);
      if (best == 0 && is_rejected) best = best_token(s, accepted, false, args.vocab_size);
      const bool has_nan = key_of(best) == kKeyOfNan;
      if (best == 0 || has_nan)
        launch.reporter("rejection_sample: target_probs")(request, has_nan ? kRowHasNan : kRowIsEmpty);
      for (int i = 0; i < accepted; ++i) s.store(i, s.draft_token(i));
      s.store(accepted, best == 0 || has_nan ? -1 : int64_t{index_of(best)});
      for (int i = accepted + 1; i <= args.num_draft; ++i) s.store(i, -1);
      s.store_accepted(accepted);
    }
  });
}

}  // namespace pykv::PYKV_ISA
