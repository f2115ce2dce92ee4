/* pykv: quantisers. Numbers to codes of 8 and 4 bits, with scales of arrays, rows, columns, blocks or groups of neighbours.
 *
 * A code is the nearest one, ties to even, the largest where the number is too large.  NaN is passed over when the largest
 * magnitude is found; its own code is the largest one (int8: 0).  Rows are leading dimensions, of any strides; the elements of a
 * row lie side by side.
 *
 * Example, a row of four numbers on the host to int8:
 *
 *   float x[4] = {1, -2, 3, -4}, scale[1];
 *   int8_t q[4];
 *   int64_t shape[] = {1, 4}, rows[] = {1};
 *   DLTensor input = {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, shape, NULL, 0};
 *   DLTensor result = {q, {kDLCPU, 0}, 2, {kDLInt, 8, 1}, shape, NULL, 0};
 *   DLTensor scales = {scale, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, rows, NULL, 0};
 *   if (pykv_dynamic_scaled_int8_quant(&result, &input, &scales, NULL, NULL) != PYKV_OK) puts(pykv_last_error());
 */
#ifndef PYKV_QUANTIZATION_H_
#define PYKV_QUANTIZATION_H_

#include "pykv/base.h"

/* result = int8(input / scale); with azp int8(input * (1 / scale)) + azp, saturated.
 *   result  [..., width]  int8; written
 *   input   [..., width]  float32 | float16 | bfloat16
 *   scale   float32, 1 element, on the host or on the device
 *   azp     int32, 1 element, on the device; may be NULL                                                               */
PYKV_API pykv_status pykv_static_scaled_int8_quant(DLTensor* result, const DLTensor* input, const DLTensor* scale,
                                                   const DLTensor* azp, void* stream);

/* The same with a scale for each row.
 *   scale  [rows] or [rows, 1]  float32; written: largest magnitude / 127.  Codes are those of input * (127 / largest)
 *   azp    [rows] or [rows, 1]  int32; written; may be NULL.  With it scale = (max - min) / 255 and azp = -128 - min / scale,
 *          rounded; a row of one number has azp 0 and codes of 127 or -127, of zeros 0 and a scale of 1
 * per_token_quant_int8: without azp, the largest counts as 1e-10 at least, and halves are rounded away from zero. */
PYKV_API pykv_status pykv_dynamic_scaled_int8_quant(DLTensor* result, const DLTensor* input, DLTensor* scale,
                                                    DLTensor* azp, void* stream);
PYKV_API pykv_status pykv_per_token_quant_int8(DLTensor* result, const DLTensor* input, DLTensor* scale, void* stream);

/* result = fp8(input * (1 / scale)).
 *   result  [..., width]  float8_e4m3fn | uint8 (the same) | float8_e5m2; written
 *   input   [..., width]  float32 | float16 | bfloat16
 *   scale   float32: 1 element, on the host or on the device; or [groups of rows, groups of columns], rows being all leading
 *           dimensions; or [rows] or [columns] (group_rows 1 and group_columns -1, or -1 and 1).  Any strides, 0 too
 *   group_rows, group_columns  rows and columns that share a scale; the last group may have fewer.  -1: all; 0: what divides
 *           evenly                                                                                                         */
PYKV_API pykv_status pykv_static_scaled_fp8_quant(DLTensor* result, const DLTensor* input, const DLTensor* scale,
                                                  int64_t group_rows, int64_t group_columns, void* stream);

/* The same with one scale, largest magnitude of all / largest code, which is written.  Codes of zeros are 0.
 *   scale  float32, 1 element, on the device; written */
PYKV_API pykv_status pykv_dynamic_scaled_fp8_quant(DLTensor* result, const DLTensor* input, DLTensor* scale,
                                                   void* stream);

/* result = fp8(input / scale), with a scale for each row: max(largest / code, 1 / (512 code)), code the largest one.
 *   scale     [rows] or [rows, 1]  float32; written
 *   scale_ub  float32, 1 element, on the host or on the device: what the largest magnitude counts as at most; may be NULL */
PYKV_API pykv_status pykv_dynamic_per_token_scaled_fp8_quant(DLTensor* result, const DLTensor* input, DLTensor* scale,
                                                             const DLTensor* scale_ub, void* stream);

/* output_q = fp8(input * (1 / scale)), scale = max(largest, eps) / fp8_max of each group_size neighbours of a row.
 *   input     [..., width]  float32 | float16 | bfloat16
 *   output_q  [..., width]  float8_e4m3fn | uint8 (the same) | float8_e5m2; written
 *   output_s  [..., width / group_size] or [rows, width / group_size]  float32; written; any strides: transposed, padded
 *   fp8_max   the code that the largest number becomes; 0: the format's largest.  fp8_min is 0 or its negative
 *   scale_ue8m0  the scale is the least power of two that is not below that, nor below 1e-10                        */
PYKV_API pykv_status pykv_per_token_group_fp8_quant(const DLTensor* input, DLTensor* output_q, DLTensor* output_s,
                                                    int64_t group_size, double eps, double fp8_min, double fp8_max,
                                                    bool scale_ue8m0, void* stream);

/* The same with powers of two, of which four neighbouring groups' exponents (e8m0) are the bytes of a word, the first the lowest.
 *   input     [rows, width]
 *   output_q  [rows or more, width]; rows behind the last one become zeros
 *   output_s_packed  [rows, width / group_size / 4, rounded up]  int32; written, with 0 for groups that there are not; any strides */
PYKV_API pykv_status pykv_per_token_group_fp8_quant_packed(const DLTensor* input, DLTensor* output_q,
                                                           DLTensor* output_s_packed, int64_t group_size, double eps,
                                                           double fp8_min, double fp8_max, void* stream);

/* output_q = int8(input * (1 / scale)), scale = max(largest, eps) / int8_max of each group_size neighbours of a row.
 *   output_q   [..., width]  int8; written
 *   int8_max   0: 127.  int8_min is 0, or at most its negative, below which there is no code
 *   truncates  fractions are cut off, as vLLM does, not rounded                                                  */
PYKV_API pykv_status pykv_per_token_group_quant_int8(const DLTensor* input, DLTensor* output_q, DLTensor* output_s,
                                                     int64_t group_size, double eps, double int8_min, double int8_max,
                                                     bool truncates, void* stream);

/* Blocks of 16 neighbours as four-bit floats (e2m1) below a scale in e4m3 and a global one (nvfp4): e4m3(g * (largest / 6)), and the
 * codes of input * (1 / (scale * (1 / g))); a block whose scale is 0 becomes zeros.  Element 2 j is the low half of byte j.
 *   output        [..., bytes]  uint8, at least width / 2 bytes of each row; those behind become 0; written
 *   output_scale  float8_e4m3fn | uint8, or int32 as four bytes each; written: [..., bytes / 8] of any strides; or, where
 *                 is_sf_swizzled_layout, contiguous and in tiles of 128 rows and 4 scales, rows and scales rounded up to whole
 *                 ones, with 0 in what is padding: byte ((r / 128) * tiles + b / 4) * 512 + r % 32 * 16 + r % 128 / 32 * 4 + b % 4
 *                 of row r and block b, with `tiles` side by side; in tiles of 8 rows ((r / 8) * tiles + b / 4) * 32 + r % 8 * 4 +
 *                 b % 4
 *   input         [..., width]  float32 | float16 | bfloat16, width a multiple of 16
 *   input_scale   g: float32, 1 element, on the host or on the device
 *   four_over_six  a block's scale is e4m3(g * (largest / 4)) where the sum of the squares of what codes are wrong by is less so
 *   tile_rows     128, or 8: TensorRT-LLM's for few rows
 * silu_and_mul_nvfp4_quant: of silu(input's first half) * its second, rounded to the dtype; scales swizzled. */
PYKV_API pykv_status pykv_scaled_fp4_quant(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                           const DLTensor* input_scale, bool is_sf_swizzled_layout, bool four_over_six,
                                           int64_t tile_rows, void* stream);
PYKV_API pykv_status pykv_silu_and_mul_nvfp4_quant(DLTensor* result, DLTensor* result_block_scale,
                                                   const DLTensor* input, const DLTensor* input_global_scale,
                                                   void* stream);

/* The same for the rows of experts, one expert after another, with swizzled scales of each expert's own.
 *   output        [rows, width / 2]  uint8; written
 *   output_scale  [scale rows, width / 16 rounded up to a multiple of 4]  float8_e4m3fn | uint8, or int32 as four bytes each,
 *                 contiguous; written, with 0 up to the next multiple of 128 rows behind those of an expert
 *   input         [rows, width], or of silu_and_mul_... [rows, 2 * width]
 *   input_global_scale  [experts]  float32, contiguous, on the device
 *   input_offset_by_experts, output_scale_offset_by_experts  [experts + 1] int32 | int64: where an expert's rows begin, and its
 *                 scales' rows, multiples of 128.  Rows that are no expert's are not written, nor are those whose scales lie
 *                 outside output_scale, which is reported                                                                  */
PYKV_API pykv_status pykv_scaled_fp4_experts_quant(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                                   const DLTensor* input_global_scale,
                                                   const DLTensor* input_offset_by_experts,
                                                   const DLTensor* output_scale_offset_by_experts, void* stream);
PYKV_API pykv_status pykv_silu_and_mul_scaled_fp4_experts_quant(
    DLTensor* output, DLTensor* output_scale, const DLTensor* input, const DLTensor* input_global_scale,
    const DLTensor* input_offset_by_experts, const DLTensor* output_scale_offset_by_experts, void* stream);

/* Blocks of 32 neighbours below a power of two, whose exponent (e8m0) is stored.
 *   output        mxfp8: [..., width] float8_e4m3fn | uint8 (the same) | float8_e5m2; mxfp4: uint8 as above; written
 *   output_scale  uint8 (or int32 as four bytes each), as above with blocks of 32; written
 *   input         [..., width]  float32 | float16 | bfloat16, width a multiple of 32
 *   scale_mode    "ceil": the least power that leaves no number too large; "ocp": 2^(floor(log2(largest)) - e), e the exponent of
 *                 the largest code (mxfp4 2, e4m3 8, e5m2 15), by which numbers up to twice too large saturate; "vllm": what vLLM
 *                 0.22 has, largest / 6 (mxfp4) or largest (mxfp8), rounded down.  Blocks of zeros have the exponent 0
 *                 ("vllm", mxfp8: 1)                                                                                       */
PYKV_API pykv_status pykv_mxfp8_quantize(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                         bool is_sf_swizzled_layout, const char* scale_mode, void* stream);
PYKV_API pykv_status pykv_mxfp4_quantize(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                         bool is_sf_swizzled_layout, const char* scale_mode, void* stream);

/* The same for the rows of experts; arguments as those of pykv_scaled_fp4_experts_quant, scales of blocks of 32.
 *   n_experts  of which there are, or 0 */
PYKV_API pykv_status pykv_mxfp4_experts_quant(DLTensor* output, DLTensor* output_scale, const DLTensor* input,
                                              const DLTensor* input_offset_by_experts,
                                              const DLTensor* output_scale_offset_by_experts, int64_t n_experts,
                                              const char* scale_mode, void* stream);
PYKV_API pykv_status pykv_silu_and_mul_mxfp4_experts_quant(DLTensor* output, DLTensor* output_scale,
                                                           const DLTensor* input,
                                                           const DLTensor* input_offset_by_experts,
                                                           const DLTensor* output_scale_offset_by_experts,
                                                           int64_t n_experts, const char* scale_mode, void* stream);

/* The same in fp8, for experts whose rows need not follow each other.
 *   input          [rows, width]  float32 | float16 | bfloat16, width a multiple of 32
 *   problem_sizes  [experts, 3]  int32, contiguous: how many rows an expert has, and two numbers that are not read
 *   expert_offsets, blockscale_offsets  [experts] int32 | int64: where an expert's rows begin, in rising order, and its scales'
 *   quant_output   [rows, width]  float8_e4m3fn | uint8 (the same) | float8_e5m2; written
 *   scale_factor   [scale rows, width / 32 rounded up to a multiple of 4]  uint8 (or int32 as four bytes each), contiguous; written */
PYKV_API pykv_status pykv_mxfp8_experts_quant(const DLTensor* input, const DLTensor* problem_sizes,
                                              const DLTensor* expert_offsets, const DLTensor* blockscale_offsets,
                                              DLTensor* quant_output, DLTensor* scale_factor, const char* scale_mode,
                                              void* stream);

/* Codes in groups, as of pykv_per_token_group_fp8_quant with eps 1e-30, of beta * tanh(gate / beta) * sigmoid(gate) * up, rounded to
 * the dtype, as pykv_situ_and_mul has it.
 *   out    [rows, width]  float8_e4m3fn | uint8 (the same) | float8_e5m2; written
 *   scale  [rows, width / group_size]  float32, any strides; written
 *   input  [rows, 2 * width]  float32 | float16 | bfloat16
 *   num_valid_tokens  int32 | int64, 1 element, on the device; may be NULL.  Rows from that times topk on are not written, and
 *                     their scales become 1                                                                              */
PYKV_API pykv_status pykv_situ_and_mul_quant(DLTensor* out, DLTensor* scale, const DLTensor* input, double beta,
                                             double linear_beta, int64_t group_size, const DLTensor* num_valid_tokens,
                                             int64_t topk, void* stream);

/* Codes in groups, as of pykv_per_token_group_fp8_quant, of silu(gate) * up, rounded to the dtype, of the first rows of experts.
 *   input   [experts, rows, 2 * width]  float32 | float16 | bfloat16
 *   counts  [experts]  int32 | int64: how many rows of each; the others are not written
 *   y_q     [experts, rows, width]  float8_e4m3fn | uint8 (the same) | float8_e5m2; written
 *   y_s     [experts, rows, width / group_size]  float32, any strides; written.  Where use_ue8m0 powers of two, and then it may be
 *           [experts, rows, width / group_size / 4, rounded up]  int32, as of pykv_per_token_group_fp8_quant_packed          */
PYKV_API pykv_status pykv_persistent_masked_m_silu_mul_quant(const DLTensor* input, const DLTensor* counts,
                                                             DLTensor* y_q, DLTensor* y_s, bool use_ue8m0,
                                                             int64_t group_size, void* stream);

#endif
