// Penalties of tokens in lists, in place.  The idea behind pykv_apply_penalties_.
#pragma once

#include "core/args.h"
#include "cpu/isa.h"
#include "sampling/token_adjustments.h"

namespace pykv {

// A list of ids for each row.
struct TokenLists {
  const void* ids;  // [num_rows, width] int32 or int64; null: none
  int64_t stride, width;
  bool is_int64;
  Index lens;  // data is null: width

  PYKV_HOST_DEVICE __attribute__((always_inline)) int64_t id(int64_t row, int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(ids)[row * stride + i]
                    : static_cast<const int32_t*>(ids)[row * stride + i];
  }
  // A length that is clamped is told to report(value, bound).
  template <class Report>
  PYKV_HOST_DEVICE __attribute__((always_inline)) int64_t length(int64_t row, Report report) const {
    if (!ids || !lens.data) return ids ? width : 0;
    const int64_t n = lens[row];
    if (n < 0 || n > width) report(n, width + 1);
    return n < 0 ? 0 : n < width ? n : width;
  }
};

struct PenaltiesArgs {
  DType dtype;

  void* logits;  // [num_rows, num_cols]
  int64_t logit_stride;
  TokenLists prompt, output;
  RowNumbers presence, frequency, repetition;

  int64_t num_rows;
  int32_t num_cols;
};

// How often a token was put out, and in the uppermost bit whether it is in the prompt.
constexpr uint32_t kInPrompt = 0x80000000u;

// What follows is compiled for each instruction set apart.
namespace {

struct RowPenalties {
  float presence, frequency, repetition;

  PYKV_HOST_DEVICE RowPenalties(const PenaltiesArgs& args, int64_t row)
      : presence(args.presence.at(row, 0.0f)),
        frequency(args.frequency.at(row, 0.0f)),
        repetition(args.repetition.at(row, 1.0f)) {}

  // Of a token that occurs.
  PYKV_HOST_DEVICE float operator()(float x, uint32_t occurs) const {
    x = x > 0.0f ? x / repetition : x * repetition;
    const uint32_t count = occurs & ~kInPrompt;
    return count > 0 ? fused(-frequency, static_cast<float>(count), x) - presence : x;
  }
};

inline constexpr const char* kPenaltyReports[] = {"apply_penalties_: prompt_token_ids",
                                                  "apply_penalties_: output_token_ids", "apply_penalties_: prompt_lens",
                                                  "apply_penalties_: output_lens"};

}  // namespace

PYKV_CPU_TWIN(apply_penalties_cpu, PenaltiesArgs)
void apply_penalties_cuda(const PenaltiesArgs& args, const Launch& launch);

}  // namespace pykv
