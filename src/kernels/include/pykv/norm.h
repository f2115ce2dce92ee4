/* pykv: normalisation of rows.
 *
 * The last dimension of an array is a row; its elements lie side by side (stride 1).  The strides of all other
 * dimensions are the caller's choice, separately for each array, and so is the alignment.  The result for a row never
 * depends on how many other rows there are.  Arithmetic is fp32, rounded to the dtype once where nothing else is said.
 *
 * Example, three rows on the host:
 *
 *   float x[3][8] = {{1, 2, 3}}, y[3][8], w[8] = {1, 1, 1, 1, 1, 1, 1, 1};
 *   int64_t rows[] = {3, 8}, row[] = {8};
 *   DLTensor input = {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, rows, NULL, 0}, out = input;
 *   DLTensor weight = {w, {kDLCPU, 0}, 1, {kDLFloat, 32, 1}, row, NULL, 0};
 *   out.data = y;
 *   if (pykv_rms_norm(&out, &input, &weight, 1e-6, NULL) != PYKV_OK) puts(pykv_last_error());
 */
#ifndef PYKV_NORM_H_
#define PYKV_NORM_H_

#include "pykv/base.h"

/* out = input * r * weight, with r = 1 / sqrt(mean(input^2) + epsilon) of each row.
 *   out     [..., hidden_size]  shape and dtype of input; may be input itself
 *   input   [..., hidden_size]  float32 | float16 | bfloat16, 1 to 8 dimensions
 *   weight  [hidden_size] or, for each index of input's first dimension, [size of that, hidden_size] with rows apart as
 *           you like  dtype of input, or float32; NULL: all ones                  */
PYKV_API pykv_status pykv_rms_norm(DLTensor* out, const DLTensor* input, const DLTensor* weight, double epsilon,
                                   void* stream);

/* residual <- z = input + residual, rounded to the dtype;  input <- z * r * weight, with r = 1 / sqrt(mean(z^2) + epsilon).
 *   input     [..., hidden_size]  float32 | float16 | bfloat16, 1 to 8 dimensions
 *   residual  [..., hidden_size]  shape and dtype of input, other memory
 *   weight    [hidden_size]       dtype of input, or float32; NULL: all ones        */
PYKV_API pykv_status pykv_fused_add_rms_norm(DLTensor* input, DLTensor* residual, const DLTensor* weight,
                                             double epsilon, void* stream);

/* The same two with 1 + weight in place of weight (a sum in fp32), which is not optional; weight is [hidden_size].  Here z
 * is the sum in fp32: residual gets it rounded, input the norm of what is not. */
PYKV_API pykv_status pykv_gemma_rms_norm(DLTensor* out, const DLTensor* input, const DLTensor* weight, double epsilon,
                                         void* stream);
PYKV_API pykv_status pykv_gemma_fused_add_rms_norm(DLTensor* input, DLTensor* residual, const DLTensor* weight,
                                                   double epsilon, void* stream);

/* out = (z - mean) * r * weight + bias, with r = 1 / sqrt(mean((z - mean)^2) + epsilon) and mean = mean(z) of each row.
 * z = input, or, with a residual, residual <- z = input + residual, rounded to the dtype.
 *   out       [..., hidden_size]  shape and dtype of input; may be input itself
 *   input     [..., hidden_size]  float32 | float16 | bfloat16, 1 to 8 dimensions
 *   weight    [hidden_size]       dtype of input, or float32; NULL: all ones
 *   bias      [hidden_size]       dtype of input, or float32; NULL: all zeros
 *   residual  [..., hidden_size]  shape and dtype of input, other memory than input and out; NULL: none */
PYKV_API pykv_status pykv_layer_norm(DLTensor* out, const DLTensor* input, const DLTensor* weight, const DLTensor* bias,
                                     double epsilon, DLTensor* residual, void* stream);

/* A norm of groups of each row, times an activation of a gate z: g(z) = z / (1 + exp(-z)) or, for "sigmoid",
 * 1 / (1 + exp(-z)).  All in fp32, rounded once.  r = 1 / sqrt(mean(u^2) + epsilon) of each group of u.
 *   norm_before_gate: out = u * r * weight * g(z), u = input
 *   else:             out = u * r * weight,        u = input * g(z)
 *
 *   out         [..., hidden_size]  shape and dtype of input; may be input itself
 *   input       [..., hidden_size]  float32 | float16 | bfloat16, 1 to 8 dimensions
 *   weight      [hidden_size]       dtype of input, or float32; NULL: all ones
 *   z           [..., hidden_size]  shape and dtype of input; NULL: g(z) is 1
 *   group_size  divides hidden_size; 0: hidden_size
 *   activation  "swish" or "silu" (the same), or "sigmoid" */
PYKV_API pykv_status pykv_rms_norm_gated(DLTensor* out, const DLTensor* input, const DLTensor* weight,
                                         const DLTensor* z, double epsilon, int64_t group_size, bool norm_before_gate,
                                         const char* activation, void* stream);

/* Norms that end in codes for GEMMs, E4M3 or int8.  What is too large for a code becomes the largest one (of E4M3: 448),
 * and so does NaN in E4M3; in int8 it becomes 0. */

/* result = E4M3(y * (1 / scale)), y the row as pykv_rms_norm has it, rounded to the dtype of input.
 *   result  [..., hidden_size]  float8_e4m3fn | uint8, shape of input
 *   input   [..., hidden_size]  float32 | float16 | bfloat16, 1 to 8 dimensions
 *   weight  [hidden_size]       dtype of input, or float32; NULL: all ones
 *   scale   float32, 1 element, on the host or on the device                  */
PYKV_API pykv_status pykv_rms_norm_static_fp8_quant(DLTensor* result, const DLTensor* input, const DLTensor* weight,
                                                    const DLTensor* scale, double epsilon, void* stream);

/* The same of residual <- z = input + residual, rounded to the dtype.  input stays as it is.
 *   residual  [..., hidden_size]  shape and dtype of input, other memory than input and result */
PYKV_API pykv_status pykv_fused_add_rms_norm_static_fp8_quant(DLTensor* result, const DLTensor* input,
                                                              DLTensor* residual, const DLTensor* weight,
                                                              const DLTensor* scale, double epsilon, void* stream);

/* y = z * r * weight, rounded to the dtype of input, with r = 1 / sqrt(mean(z^2) + epsilon) and z = input or, with a residual,
 * residual <- input + residual, rounded: what pykv_rms_norm and pykv_fused_add_rms_norm give.  Each row has a scale of its own:
 *   E4M3: scale = max(m / 448, 1 / (448 * 512)),  result = E4M3(y / scale)
 *   int8: scale = max(m / 127, 2^-23),            result = round(y * (1 / scale)), ties to even
 * with m = max|y|, of numbers, and scale_ub at most.
 *   result    [..., hidden_size]  float8_e4m3fn | uint8 (E4M3), or int8; shape of input
 *   input     [..., hidden_size]  float32 | float16 | bfloat16, 1 to 8 dimensions
 *   weight    [hidden_size]       dtype of input, or float32; NULL: all ones
 *   scale     [num_rows, 1] | [num_rows]  float32, any strides, written; num_rows: the product of all sizes but the last
 *   scale_ub  float32, 1 element, on the host or on the device, for E4M3; NULL: no bound
 *   residual  [..., hidden_size]  shape and dtype of input, other memory than input and result; NULL: none */
PYKV_API pykv_status pykv_rms_norm_dynamic_per_token_quant(DLTensor* result, const DLTensor* input,
                                                           const DLTensor* weight, DLTensor* scale, double epsilon,
                                                           const DLTensor* scale_ub, DLTensor* residual, void* stream);

/* The same with a scale for each group of group_size neighbours in a row.
 *   scale       [num_rows, hidden_size / group_size]  float32, written where its strides say: row by row, or transposed,
 *               with padding or without
 *   E4M3: result = E4M3(y * (1 / scale))
 *   group_size  divides hidden_size
 *   is_scale_transposed  the caller counts on scales of one group lying side by side: a check of scale's strides */
PYKV_API pykv_status pykv_rms_norm_per_block_quant(DLTensor* result, const DLTensor* input, const DLTensor* weight,
                                                   DLTensor* scale, double epsilon, const DLTensor* scale_ub,
                                                   DLTensor* residual, int64_t group_size, bool is_scale_transposed,
                                                   void* stream);

/* Each query and key head x of qkv becomes x * (r * weight), with r = 1 / sqrt(mean(x^2) + eps), its first rotary_dim
 * elements rotated as pykv_rotary_embedding does it, in fp32 from load to store and rounded once.  Heads of v stay.
 *   qkv            [<positions>, num_heads * head_dim] or [<positions>, num_heads, head_dim]  float32 | float16 | bfloat16,
 *                  with num_heads = num_heads_q + num_heads_k + num_heads_v
 *   q_weight       [head_dim]  dtype of qkv, or float32; NULL: all ones.  So is k_weight.
 *   cos_sin_cache  [max_position, rotary_dim]  float32 | float16 | bfloat16, rotary_dim even, head_dim at most
 *   position_ids   [num_tokens] | [batch, seq]  int32 | int64; a token whose position is out of range stays as it is */
PYKV_API pykv_status pykv_fused_qk_norm_rope(DLTensor* qkv, int64_t num_heads_q, int64_t num_heads_k,
                                             int64_t num_heads_v, int64_t head_dim, double eps,
                                             const DLTensor* q_weight, const DLTensor* k_weight,
                                             const DLTensor* cos_sin_cache, bool is_neox, const DLTensor* position_ids,
                                             void* stream);

#endif /* PYKV_NORM_H_ */
