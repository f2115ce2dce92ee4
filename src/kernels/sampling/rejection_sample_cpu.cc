// A request is one thread's.
#include "cpu/parallel.h"
#include "sampling/rejection_sample.h"
#include "sampling/weighed_tokens_cpu.h"

namespace pykv::PYKV_ISA {
namespace {

Entry best_of_position(const Speculation& s, int position, bool is_rejected, int vocab_size) {
  return best_token(
      s.noise(position), vocab_size, [&](int token) { return s.weight(position, is_rejected, token); },
      [](int) { return true; });
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
      Entry best = best_of_position(s, accepted, is_rejected, args.vocab_size);
      if (best == 0 && is_rejected) best = best_of_position(s, accepted, false, args.vocab_size);
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
