// What is kept of each row, as logits or as probabilities, and log-probabilities of given tokens.  The idea behind pykv_softmax,
// pykv_top_k_top_p_mask, pykv_top_k_top_p_renorm and pykv_token_logprobs.
#pragma once

#include "cpu/isa.h"
#include "sampling/arithmetic.h"
#include "sampling/token_adjustments.h"

namespace pykv {

enum class RowResult : uint8_t { kLogits, kProbabilities, kTokenLogprobs };

struct RowFilterArgs {
  const char* report;  // "op: argument"
  DType dtype, out_dtype;
  RowResult result;
  bool of_probabilities;  // the input holds them, and not logits

  const void* input;  // [num_rows, num_cols]
  void* out;          // [num_rows, num_cols], or [num_rows, num_tokens] float32
  int64_t input_stride, out_stride;

  RowNumbers temperature, top_p, min_p;
  RowCounts top_k;

  const void* tokens;  // [num_rows, num_tokens] int32 or int64
  bool tokens_are_int64;
  int32_t* ranks;  // [num_rows, num_tokens]; null: not wanted
  int64_t token_stride, rank_stride;
  int32_t num_tokens;

  int64_t num_rows;
  int32_t num_cols;

  PYKV_HOST_DEVICE int64_t token(int64_t row, int i) const {
    const int64_t at = row * token_stride + i;
    return tokens_are_int64 ? static_cast<const int64_t*>(tokens)[at] : static_cast<const int32_t*>(tokens)[at];
  }
};

// What follows is compiled for each instruction set apart.
namespace {

struct FilterRow {
  float inverse_temperature, temperature, scale, min_p, top_p;
  int32_t k;
  bool of_probabilities;

  PYKV_HOST_DEVICE bool keeps_all() const { return min_p <= 0.0f && top_p >= 1.0f && k == 0; }
  // What is below this is not kept.
  PYKV_HOST_DEVICE float least(float largest) const {
    if (!(min_p > 0.0f)) return -__builtin_inff();
    if (of_probabilities) return min_p * largest;
    return least_logit(log_of_min_p(min_p), temperature, largest);
  }
  // A value as a share of the largest: known when compiled whether they are probabilities, or not.
  template <bool kProbabilities>
  PYKV_HOST_DEVICE float share(float x, float largest) const {
    if constexpr (kProbabilities) {
      return x > 0.0f ? x / largest : 0.0f;
    } else {
      return share_of_largest(x, largest, scale);
    }
  }
  PYKV_HOST_DEVICE float share(float x, float largest) const {
    return of_probabilities ? share<true>(x, largest) : share<false>(x, largest);
  }
};

PYKV_HOST_DEVICE static inline FilterRow filter_row(const RowFilterArgs& args, int64_t row) {
  FilterRow r;
  const float temperature = args.temperature.at(row, 1.0f);
  r.temperature = temperature >= 1e-5f ? temperature : 1e-5f;
  r.inverse_temperature = 1.0f / r.temperature;
  r.scale = r.inverse_temperature * 1.44269504f;
  r.min_p = args.min_p.at(row, 0.0f);
  r.min_p = r.min_p > 0.0f ? (r.min_p < 1.0f ? r.min_p : 1.0f) : 0.0f;
  r.top_p = known_top_p(args.top_p.at(row, 1.0f));
  const int64_t k = args.top_k.at(row, 0);
  r.k = k > 0 && k < args.num_cols ? static_cast<int32_t>(k) : 0;
  r.of_probabilities = args.of_probabilities;
  return r;
}

}  // namespace

PYKV_CPU_TWIN(row_filter_cpu, RowFilterArgs)
void row_filter_cuda(const RowFilterArgs& args, const Launch& launch);

}  // namespace pykv
