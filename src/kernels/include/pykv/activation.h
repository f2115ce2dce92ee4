/* pykv: activation functions.
 *
 * The last dimension of an array is a row; its elements lie side by side (stride 1).  The strides of all other
 * dimensions are the caller's choice, separately for each array, and so are the width and the alignment.
 *
 * Example, three rows on the host:
 *
 *   float x[3][16] = {{1, 2, 3}}, y[3][8];
 *   int64_t of_x[] = {3, 16}, of_y[] = {3, 8};
 *   DLTensor input = {x, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, of_x, NULL, 0}, result = input;
 *   result.data = y;
 *   result.shape = of_y;
 *   if (pykv_silu_and_mul(&result, &input, NULL) != PYKV_OK) puts(pykv_last_error());
 */
#ifndef PYKV_ACTIVATION_H_
#define PYKV_ACTIVATION_H_

#include "pykv/base.h"

/* result = silu(a) * b, with a the first and b the second half of each row of input and silu(a) = a / (1 + exp(-a)).
 * silu is computed in fp32 and rounded to the dtype; so is the product.  b = -0 counts as 0.
 *   result  [..., width]      dtype of input; may be the memory of a (or of b), with the strides of input
 *   input   [..., 2 * width]  float32 | float16 | bfloat16, at least 1 dimension                            */
PYKV_API pykv_status pykv_silu_and_mul(DLTensor* result, const DLTensor* input, void* stream);

/* result = code(y * (1 / scale)), with y what pykv_silu_and_mul gives: the nearest code, ties to even, the last one where
 * it is too large.  NaN becomes 448 or 0.
 *   result  [..., width]  float8_e4m3fn, uint8 (which holds it) or int8
 *   scale   float32, 1 element, on the host or on the device          */
PYKV_API pykv_status pykv_silu_and_mul_quant(DLTensor* result, const DLTensor* input, const DLTensor* scale,
                                             void* stream);

/* out = code(y * (1 / s)), y what pykv_silu_and_mul gives, with a scale s for each group of neighbours: max |y| / 448
 * (float8_e4m3fn) or / 127 (int8), at most scale_ub, at least 1 / (448 * 512) or 2^-23.  NaN does not count for the scale and
 * becomes 448 or 0.
 *   out         [num_tokens, width]               float8_e4m3fn, uint8 (which holds it) or int8
 *   input       [num_tokens, 2 * width]           float32 | float16 | bfloat16
 *   scales      [num_tokens, width / group_size]  float32, any strides; written.  Where is_scale_transposed it may also be
 *               [width / group_size, num_tokens], contiguous: its transpose in storage order
 *   group_size  divides width
 *   scale_ub    float32, 1 element, on the host or on the device; for float8_e4m3fn; NULL: no bound
 *   is_scale_transposed  scales must be the transpose of a contiguous array, or that array itself  */
PYKV_API pykv_status pykv_silu_and_mul_per_block_quant(DLTensor* out, const DLTensor* input, DLTensor* scales,
                                                       int64_t group_size, const DLTensor* scale_ub,
                                                       bool is_scale_transposed, void* stream);

/* out = gelu(a) * b, the same with gelu(a) = a / 2 * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 * a^3))). */
PYKV_API pykv_status pykv_gelu_tanh_and_mul(DLTensor* out, const DLTensor* input, void* stream);

/* out = a * silu(b): the second half of each row is activated. */
PYKV_API pykv_status pykv_mul_and_silu(DLTensor* out, const DLTensor* input, void* stream);

/* result = g / (1 + exp(-alpha * g)) * (clamp(b, -limit, limit) + beta), with g = min(a, limit).  g, the quotient and the
 * product are rounded to the dtype, the sum is fp32.  NaN in a or in b is taken for limit.  alpha = 1 and beta = 0 is silu;
 * 1.702 and 1 is SwiGLU-OAI of separate halves. */
PYKV_API pykv_status pykv_silu_and_mul_with_clamp(DLTensor* result, const DLTensor* input, double limit, double alpha,
                                                  double beta, void* stream);

/* out = gelu(a) * b, with gelu(a) = a / 2 * (1 + erf(a / sqrt(2))), of which fp32 leaves few digits below a = -4; roundings
 * as in pykv_silu_and_mul. */
PYKV_API pykv_status pykv_gelu_and_mul(DLTensor* out, const DLTensor* input, void* stream);

/* out = gelu(max(a - cut, 0)) * b, with cut = mean(a) + c * std(a) of each row (the deviation of all its elements) and c
 * below which a normal variable lies with probability activation_sparsity: about so many of a give 0.  In fp32, gelu and
 * the product rounded to the dtype.
 *   activation_sparsity  more than 0, less than 1
 *   approximate          "none": gelu of pykv_gelu_and_mul; "tanh": of pykv_gelu_tanh_and_mul */
PYKV_API pykv_status pykv_gelu_and_mul_sparse(DLTensor* out, const DLTensor* input, double activation_sparsity,
                                              const char* approximate, void* stream);

/* out = (a > threshold ? a : 0) * b.  The threshold is compared in fp32; NaN in a gives 0 * b. */
PYKV_API pykv_status pykv_fatrelu_and_mul(DLTensor* out, const DLTensor* input, double threshold, void* stream);

/* out = (clamp(u, -limit, limit) + 1) * g / (1 + exp(-alpha * g)), with g = min(gate, limit), in fp32 and rounded once.
 * A row of input is interleaved: gate, u, gate, u, ...  NaN in gate or u is taken for limit.  out may not be the memory
 * of input. */
PYKV_API pykv_status pykv_swigluoai_and_mul(DLTensor* out, const DLTensor* input, double alpha, double limit,
                                            void* stream);

/* out = min(silu(a), limit) * clamp(b, -limit, limit), in fp32 and rounded once.  NaN in a or b is taken for limit. */
PYKV_API pykv_status pykv_swiglustep_and_mul(DLTensor* out, const DLTensor* input, double limit, void* stream);

/* out = G * U in fp32 and rounded once, with G = beta * tanh(a / beta) / (1 + exp(-a)) and U = linear_beta * tanh(b /
 * linear_beta), or b where linear_beta is not positive; a and b as in pykv_silu_and_mul. */
PYKV_API pykv_status pykv_situ_and_mul(DLTensor* out, const DLTensor* input, double beta, double linear_beta,
                                       void* stream);

/* An activation of the first valid_token_counts[e] rows of each expert e.  Counts are clamped to 0 ... num_rows; the other rows
 * of out stay as they are.
 *   out                 [num_rows, width] or [num_experts, num_rows, width], dtype of input
 *   input               the same with 2 * width where the activation is a product of two halves, else as out
 *   valid_token_counts  [1] or [num_experts] int32 | int64, on the device of the others
 *   activation   "silu", "gelu", "gelu_tanh", "situ", "swigluoai", "swiglustep": the ..._and_mul of this name, with alpha,
 *                clamp_limit for limit, situ_beta for beta and situ_linear_beta for linear_beta where it has those
 *                "silu_with_clamp", "swigluoai_uninterleave": pykv_silu_and_mul_with_clamp, with clamp_limit, alpha, beta
 *                "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul": the first factor alone, rounded once
 *                "relu2_no_mul": pykv_relu_squared                                                                   */
PYKV_API pykv_status pykv_masked_moe_activation(DLTensor* out, const DLTensor* input,
                                                const DLTensor* valid_token_counts, const char* activation,
                                                double clamp_limit, double alpha, double beta, double situ_beta,
                                                double situ_linear_beta, void* stream);

/* Activations of every element, in fp32 and rounded once.
 *   out    shape and dtype of input; may be input itself
 *   input  float32 | float16 | bfloat16, at least 1 dimension
 *
 * gelu_new and gelu_fast: x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))).
 * gelu_quick: x / (1 + exp(-1.702 * x)).
 * relu2: max(x, 0)^2; NaN stays.
 * relu_squared: the same, but NaN gives 0. */
PYKV_API pykv_status pykv_gelu_new(DLTensor* out, const DLTensor* input, void* stream);
PYKV_API pykv_status pykv_gelu_fast(DLTensor* out, const DLTensor* input, void* stream);
PYKV_API pykv_status pykv_gelu_quick(DLTensor* out, const DLTensor* input, void* stream);
PYKV_API pykv_status pykv_relu2(DLTensor* out, const DLTensor* input, void* stream);
PYKV_API pykv_status pykv_relu_squared(DLTensor* out, const DLTensor* input, void* stream);

/* out = ap * x^2 + beta * x where x > 0, else an * (expm1(min(x, eps)) - x) + beta * x, with ap = softplus(alpha_p) and
 * an = beta + softplus(alpha_n).
 *   alpha_p, alpha_n  float32, 1 element, on the host or on the device */
PYKV_API pykv_status pykv_xielu(DLTensor* out, const DLTensor* input, const DLTensor* alpha_p, const DLTensor* alpha_n,
                                double beta, double eps, void* stream);

#endif /* PYKV_ACTIVATION_H_ */
