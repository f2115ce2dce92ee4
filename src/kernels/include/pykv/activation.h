/* pykv: activation functions.
 *
 * The last dimension of an array is a row; its elements lie side by side (stride 1).  The strides of all other
 * dimensions are the caller's choice, separately for each array, and so are the width and the alignment.
 */
#ifndef PYKV_ACTIVATION_H_
#define PYKV_ACTIVATION_H_

#include "pykv/base.h"

/* result = silu(a) * b, with a the first and b the second half of each row of input and silu(a) = a / (1 + exp(-a)).
 * silu is computed in fp32 and rounded to the dtype; so is the product.
 *   result  [..., width]      dtype of input; may be the memory of a (or of b), with the strides of input
 *   input   [..., 2 * width]  float32 | float16 | bfloat16, at least 1 dimension                            */
PYKV_API pykv_status pykv_silu_and_mul(DLTensor* result, const DLTensor* input, void* stream);

/* out = gelu(a) * b, the same with gelu(a) = a / 2 * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 * a^3))). */
PYKV_API pykv_status pykv_gelu_tanh_and_mul(DLTensor* out, const DLTensor* input, void* stream);

#endif /* PYKV_ACTIVATION_H_ */
