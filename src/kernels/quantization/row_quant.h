// Rows to codes with a scale for each row: the idea behind dynamic_scaled_int8_quant, per_token_quant_int8 and
// dynamic_per_token_scaled_fp8_quant; and a whole small array as one row, behind dynamic_scaled_fp8_quant.
#pragma once

#include "core/args.h"
#include "core/codes.h"
#include "core/valid_rows.h"
#include "cpu/isa.h"

namespace pykv {

// How codes follow from the largest magnitude of a row.
enum class RowRule : uint8_t {
  kDivide,      // fp8: scale = max(largest / code, 1 / (512 code)), codes of x / scale
  kMultiply,    // fp8: scale = largest / code, codes of x * (1 / scale); zeros of zeros
  kInt8,        // scale = largest / 127, codes of x * (127 / largest)
  kInt8Away,    // the same with a largest of 1e-10 at least, and halves rounded away from zero
  kInt8Shifted  // scale = (max - min) / 255, zero point = -128 - min / scale
};

struct RowScale {
  float scale, factor;
  int32_t zero_point;
};

struct RowQuantArgs {
  DType dtype;
  QuantCode codes;
  RowRule rule;
  bool bounded;  // the largest magnitude counts as `bound` at most
  Parameter bound;

  const void* input;  // [rows, width]
  void* out;
  float* scales;         // [rows]
  int32_t* zero_points;  // [rows], or null
  Rows input_rows, out_rows;
  int64_t scale_stride, zero_stride;
  int64_t rows, width;
  RowCount valid;  // others are neither read nor written

  // Of a row with these extremes; a row without numbers has 0.  Of the rules but kInt8Shifted `high` is the largest magnitude.
  PYKV_INLINE RowScale scale_of(float low, float high, float bound) const {
    const float largest = largest_code(codes);
    if (rule == RowRule::kDivide) {
      const float most = bound < high ? bound : high, scale = most / largest, least = 1.0f / (largest * 512.0f);
      return {scale > least ? scale : least, 0.0f, 0};
    }
    if (rule == RowRule::kMultiply) return {high / largest, factor_of(high / largest), 0};
    if (rule == RowRule::kInt8Shifted) {
      // A row of one number is that exactly.
      const float spread = (high - low) / 255.0f, size = high < 0.0f ? -high : high;
      if (spread == 0.0f) {
        const float scale = size != 0.0f ? size / 127.0f : 1.0f;
        return {scale, 1.0f / scale, 0};
      }
      return {spread, 1.0f / spread, to_int(-128.0f - low / spread)};
    }
    const float most = rule == RowRule::kInt8Away && !(high > 1e-10f) ? 1e-10f : high;
    return {most / 127.0f, most == 0.0f ? 0.0f : 127.0f / most, 0};
  }

 private:
  // To nearest even; saturated, and 0 for NaN.
  PYKV_INLINE static int32_t to_int(float x) {
    if (!(x == x)) return 0;
    if (x >= 0x1p31f) return INT32_MAX;
    if (x <= -0x1p31f) return INT32_MIN;
    const float size = x < 0.0f ? -x : x;
    // Below 2^23 adding and subtracting that rounds; beyond there are no fractions.
    const float rounded = size < 0x1p23f ? (size + 0x1p23f) - 0x1p23f : size;
    return static_cast<int32_t>(x < 0.0f ? -rounded : rounded);
  }
};

PYKV_CPU_TWIN(row_quant_cpu, RowQuantArgs)
void row_quant_cuda(const RowQuantArgs& args, const Launch& launch);

}  // namespace pykv
