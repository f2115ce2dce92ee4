/* pykv: normalisation of rows.
 *
 * The last dimension of an array is a row; its elements lie side by side (stride 1).  The strides of all other
 * dimensions are the caller's choice, separately for each array, and so is the alignment.  The result for a row never
 * depends on how many other rows there are.  Arithmetic is fp32, rounded to the dtype once where nothing else is said.
 */
#ifndef PYKV_NORM_H_
#define PYKV_NORM_H_

#include "pykv/base.h"

/* out = input * r * weight, with r = 1 / sqrt(mean(input^2) + epsilon) of each row.
 *   out     [..., hidden_size]  shape and dtype of input; may be input itself
 *   input   [..., hidden_size]  float32 | float16 | bfloat16, 2 to 4 dimensions
 *   weight  [hidden_size]       dtype of input; NULL: all ones                    */
PYKV_API pykv_status pykv_rms_norm(DLTensor* out, const DLTensor* input, const DLTensor* weight, double epsilon,
                                   void* stream);

/* residual <- z = input + residual, rounded to the dtype;  input <- z * r * weight, with r = 1 / sqrt(mean(z^2) + epsilon).
 *   input     [..., hidden_size]  float32 | float16 | bfloat16, 2 to 4 dimensions
 *   residual  [..., hidden_size]  shape and dtype of input, other memory
 *   weight    [hidden_size]       dtype of input; NULL: all ones                    */
PYKV_API pykv_status pykv_fused_add_rms_norm(DLTensor* input, DLTensor* residual, const DLTensor* weight,
                                             double epsilon, void* stream);

#endif /* PYKV_NORM_H_ */
