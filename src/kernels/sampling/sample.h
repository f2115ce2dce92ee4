// A token drawn from each row of logits.  The idea behind pykv_sample.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "sampling/arithmetic.h"
#include "sampling/token_adjustments.h"

namespace pykv {

struct SampleArgs {
  DType dtype;

  const void* logits;  // [num_rows, num_cols]
  int64_t logit_stride;
  void* out;  // [num_rows] int32 or int64
  int64_t out_stride;
  bool out_is_int64;
  float* logprobs;  // [num_rows]; null: not wanted
  float* scores;    // [num_rows]; null: not wanted
  int64_t logprob_stride, score_stride;

  Index seeds, steps;
  RowNumbers temperature, top_p, min_p;
  RowCounts top_k;
  TokenAdjustments adjustments;

  int64_t num_rows;
  int32_t num_cols, first_token;
};

// What follows is compiled for each instruction set apart.
namespace {

// What the parameters of a row come to.
struct SampleRow {
  bool greedy;
  float inverse_temperature, temperature;
  float scale;      // of a logit, in powers of 2
  float log_min_p;  // of the largest probability; -infinity: no bound
  float top_p;      // 1 or more: all
  int32_t k;        // num_cols: all
  TokenNoise noise;

  // Logits below this one are not drawn.
  PYKV_HOST_DEVICE float least(float largest) const { return least_logit(log_min_p, temperature, largest); }
};

PYKV_HOST_DEVICE static inline SampleRow sample_row(const SampleArgs& args, int64_t row) {
  constexpr float kLeastTemperature = 1e-5f;
  // Read side by side, before any is used.
  const float temperature = args.temperature.at(row, 1.0f), min_p = args.min_p.at(row, 0.0f);
  const float top_p = args.top_p.at(row, 1.0f);
  const int64_t k = args.top_k.at(row, 0), seed = args.seeds.data ? args.seeds[row] : 0;
  const int64_t step = args.steps.data ? args.steps[row] : 0;
  SampleRow r;
  r.temperature = temperature;
  r.greedy = !(r.temperature >= kLeastTemperature);
  r.inverse_temperature = r.greedy ? 1.0f : 1.0f / r.temperature;
  r.scale = r.inverse_temperature * 1.44269504f;
  r.log_min_p = min_p > 0.0f ? log_of_min_p(min_p) : -__builtin_inff();
  r.top_p = known_top_p(top_p);
  r.k = k > 0 && k < args.num_cols ? static_cast<int32_t>(k) : args.num_cols;
  if (r.greedy) r.k = args.num_cols;
  r.noise = TokenNoise::of(seed, step);
  return r;
}

// Takes what was drawn: an entry of the token's score, or 0.
struct Drawn {
  Entry entry;
  float logit, largest;  // adjusted; unused where no log-probability is wanted
  Mass total;            // of all that might have been drawn; 0: this token alone
};
template <class Report>
PYKV_HOST_DEVICE static inline void store_drawn(const SampleArgs& args, int64_t row, const SampleRow& r,
                                                const Drawn& drawn, Report report) {
  int64_t token = -1;
  float logprob = float_of(0x7fc00000u), score = -__builtin_inff();
  if (drawn.entry == 0) {
    report(row, kRowIsEmpty);
  } else if (key_of(drawn.entry) == kKeyOfNan) {
    report(row, kRowHasNan);
    score = logprob;
  } else {
    token = int64_t{index_of(drawn.entry)};
    score = logit_of_key(key_of(drawn.entry));
    logprob = 0.0f;
    if (args.logprobs && drawn.total > 0) {
      const float share = log_of(static_cast<float>(drawn.total) * 0x1p-40f);
      logprob = fused(below(drawn.logit, drawn.largest), r.inverse_temperature, -share);
    }
  }
  if (args.out_is_int64) {
    static_cast<int64_t*>(args.out)[row * args.out_stride] = token;
  } else {
    static_cast<int32_t*>(args.out)[row * args.out_stride] = static_cast<int32_t>(token);
  }
  if (args.logprobs) args.logprobs[row * args.logprob_stride] = logprob;
  if (args.scores) args.scores[row * args.score_stride] = score;
}

}  // namespace

PYKV_CPU_TWIN(sample_cpu, SampleArgs)
void sample_cuda(const SampleArgs& args, const Launch& launch);

}  // namespace pykv
