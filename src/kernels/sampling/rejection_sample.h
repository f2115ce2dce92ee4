// Tokens of a draft that a target model accepts, and one more.  The idea behind pykv_rejection_sample.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "sampling/weighed_tokens.h"

namespace pykv {

struct RejectionSampleArgs {
  void* out;  // [num_requests, num_draft + 1] int32 or int64
  int64_t out_stride;
  bool out_is_int64;
  int32_t* num_accepted;  // [num_requests]; null: not wanted
  int64_t accepted_stride;

  const void* draft_tokens;  // [num_requests, num_draft] int32 or int64
  int64_t draft_token_stride;
  bool draft_tokens_are_int64;
  const float* target;  // [num_requests, num_draft + 1, vocab_size]
  const float* draft;   // [num_requests, num_draft, vocab_size]; null: draft tokens were certain
  int64_t target_request, target_token, draft_request, draft_token;  // strides

  Index draft_lens;  // data is null: num_draft
  Index seeds, steps;

  int64_t num_requests;
  int32_t num_draft, vocab_size;
};

// What follows is compiled for each instruction set apart.
namespace {

// One request: its draft, and the position of the token that is drawn.
class Speculation {
 public:
  PYKV_HOST_DEVICE Speculation(const RejectionSampleArgs& args, int64_t request)
      : args_(args),
        target_(args.target + request * args.target_request),
        draft_(args.draft ? args.draft + request * args.draft_request : nullptr),
        request_(request),
        seed_(args.seeds.data ? args.seeds[request] : 0),
        step_(args.steps.data ? args.steps[request] : 0) {}

  // Beyond num_draft it is clamped, and reported.
  template <class Report>
  PYKV_HOST_DEVICE int length(Report report) const {
    const int64_t n = args_.draft_lens.data ? args_.draft_lens[request_] : args_.num_draft;
    if (n < 0 || n > args_.num_draft) report(n, int64_t{args_.num_draft} + 1);
    return static_cast<int>(n < 0 ? 0 : n < args_.num_draft ? n : args_.num_draft);
  }
  PYKV_HOST_DEVICE int64_t draft_token(int i) const {
    const int64_t at = request_ * args_.draft_token_stride + i;
    return args_.draft_tokens_are_int64 ? static_cast<const int64_t*>(args_.draft_tokens)[at]
                                        : static_cast<const int32_t*>(args_.draft_tokens)[at];
  }
  PYKV_HOST_DEVICE bool is_token(int64_t token) const { return token >= 0 && token < args_.vocab_size; }
  // Whether the token at i is accepted, if all before it are: with probability target / draft.
  PYKV_HOST_DEVICE bool accepts(int i) const {
    const int64_t token = draft_token(i);
    if (!is_token(token)) return false;
    const float u = acceptance_number(TokenNoise::of(seed_, step_), i);
    const float p = target_[i * args_.target_token + token], q = draft_ ? draft_[i * args_.draft_token + token] : 1.0f;
    return u * q < p;
  }
  // What a token is drawn by at position i, `is_rejected` there: the rest of the target's probability.
  PYKV_HOST_DEVICE float weight(int i, bool is_rejected, int token) const {
    const float p = target_[i * args_.target_token + token];
    if (!is_rejected) return p;
    if (!draft_) return token == draft_token(i) ? 0.0f : p;
    const float rest = p - draft_[i * args_.draft_token + token];
    return rest <= 0.0f ? 0.0f : rest;
  }
  PYKV_HOST_DEVICE TokenNoise noise(int i) const { return noise_at(seed_, step_, i); }
  PYKV_HOST_DEVICE void store(int i, int64_t token) const {
    const int64_t at = request_ * args_.out_stride + i;
    if (args_.out_is_int64) {
      static_cast<int64_t*>(args_.out)[at] = token;
    } else {
      static_cast<int32_t*>(args_.out)[at] = static_cast<int32_t>(token);
    }
  }
  PYKV_HOST_DEVICE void store_accepted(int n) const {
    if (args_.num_accepted) args_.num_accepted[request_ * args_.accepted_stride] = n;
  }

 private:
  const RejectionSampleArgs& args_;
  const float *target_, *draft_;
  int64_t request_, seed_, step_;
};

}  // namespace

PYKV_CPU_TWIN(rejection_sample_cpu, RejectionSampleArgs)
void rejection_sample_cuda(const RejectionSampleArgs& args, const Launch& launch);

}  // namespace pykv
