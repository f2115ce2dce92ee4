// What changes logits before anything is chosen: a bias, penalties of tokens that occur, and tokens that are not allowed.
#pragma once

#include "core/args.h"
#include "sampling/arithmetic.h"

namespace pykv {

// One number for each row, or one for all.
struct RowNumbers {
  const float* data;  // null: value, where there is one
  int64_t stride;
  float value;
  bool given;

  PYKV_HOST_DEVICE float at(int64_t row, float otherwise) const {
    return !given ? otherwise : data ? data[row * stride] : value;
  }
};
struct RowCounts {
  Index list;  // data is null: value
  int64_t value;
  bool given;

  PYKV_HOST_DEVICE int64_t at(int64_t row, int64_t otherwise) const {
    return !given ? otherwise : list.data ? list[row] : value;
  }
};

// Bits for the tokens of each row, 32 to a word, the lowest one first.
struct RowBits {
  const uint32_t* data;
  int64_t stride;  // words
};

struct TokenAdjustments {
  RowBits allowed, prompt;
  const int32_t* counts;  // [num_rows, num_cols]
  const float* bias;
  int64_t count_stride, bias_stride;
  RowNumbers repetition, frequency, presence;

  bool any() const { return allowed.data || prompt.data || counts || bias; }
};

namespace {

class RowAdjustments {
 public:
  PYKV_HOST_DEVICE RowAdjustments(const TokenAdjustments& all, int64_t row)
      : allowed_(all.allowed.data ? all.allowed.data + row * all.allowed.stride : nullptr),
        prompt_(all.prompt.data ? all.prompt.data + row * all.prompt.stride : nullptr),
        counts_(all.counts ? all.counts + row * all.count_stride : nullptr),
        bias_(all.bias ? all.bias + row * all.bias_stride : nullptr),
        repetition_(all.repetition.at(row, 1.0f)),
        frequency_(all.frequency.at(row, 0.0f)),
        presence_(all.presence.at(row, 0.0f)) {}

  PYKV_HOST_DEVICE float operator()(float x, int column) const {
    if (allowed_ && !bit(allowed_, column)) return -__builtin_inff();
    if (bias_) x = x + bias_[column];
    const int32_t count = counts_ ? counts_[column] : 0;
    if (count > 0 || (prompt_ && bit(prompt_, column))) x = x > 0.0f ? x / repetition_ : x * repetition_;
    if (count > 0) x = fused(-frequency_, static_cast<float>(count), x) - presence_;
    return x;
  }

 private:
  PYKV_HOST_DEVICE static bool bit(const uint32_t* words, int column) {
    return (words[column / 32] >> (column % 32) & 1u) != 0;
  }

  const uint32_t *allowed_, *prompt_;
  const int32_t* counts_;
  const float* bias_;
  float repetition_, frequency_, presence_;
};

}  // namespace

}  // namespace pykv
