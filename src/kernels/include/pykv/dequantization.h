/* pykv: decoders of packed weights to floats, and the transforms of activations that such weights need.
 *
 * Example, a row of one block of Q8_0 (32 elements, 34 bytes) on the host:
 *
 *   uint8_t block[34] = {0, 0x3c, 1, 2, 3};
 *   float y[32];
 *   int64_t of_w[] = {1, 34}, of_y[] = {1, 32};
 *   DLTensor W = {block, {kDLCPU, 0}, 2, {kDLUInt, 8, 1}, of_w, NULL, 0};
 *   DLTensor out = {y, {kDLCPU, 0}, 2, {kDLFloat, 32, 1}, of_y, NULL, 0};
 *   if (pykv_ggml_dequantize(&out, &W, 8, NULL) != PYKV_OK) puts(pykv_last_error());
 */
#ifndef PYKV_DEQUANTIZATION_H_
#define PYKV_DEQUANTIZATION_H_

#include "pykv/base.h"

/* Decodes the block formats of GGUF: float32 to the bit as the Python package gguf does, other dtypes rounded once from that.
 *   out         [..., n]      float32 | float16 | bfloat16; the elements of a row side by side, the rows strided
 *   W           [..., bytes]  uint8, the bytes of a row side by side: whole blocks, one after another.  Where both arrays are
 *               contiguous, only the number of blocks must agree, not the shapes
 *   quant_type  the format's id in GGUF: 2 Q4_0, 3 Q4_1, 6 Q5_0, 7 Q5_1, 8 Q8_0, 9 Q8_1 (36 bytes), 10 Q2_K, 11 Q3_K, 12 Q4_K,
 *               13 Q5_K, 14 Q6_K, 15 Q8_K, 16 IQ2_XXS, 17 IQ2_XS, 18 IQ3_XXS, 19 IQ1_S, 20 IQ4_NL, 21 IQ3_S, 22 IQ2_S,
 *               23 IQ4_XS, 29 IQ1_M, 34 TQ1_0, 35 TQ2_0, 39 MXFP4, 40 NVFP4, 41 Q1_0 */
PYKV_API pykv_status pykv_ggml_dequantize(DLTensor* out, const DLTensor* W, int64_t quant_type, void* stream);

/* out = (code - zero) * scale of AWQ's 4-bit weights, rounded once.
 *   out      [K, N]      float32 | float16 | bfloat16, N a multiple of 8; the elements of a row side by side in all arrays
 *   qweight  [K, N / 8]  int32: of columns 8 c ... 8 c + 7, column 2 i in nibble i and column 2 i + 1 in nibble i + 4 of word c
 *   scales   [groups, N] dtype of out; row k belongs to group k / (K / groups)
 *   zeros    [groups, N / 8] int32, packed as qweight */
PYKV_API pykv_status pykv_awq_dequantize(DLTensor* out, const DLTensor* qweight, const DLTensor* scales,
                                         const DLTensor* zeros, void* stream);

/* out = (code - zero) * scale of GPTQ's weights, rounded once.
 *   out      [K, N]              float32 | float16 | bfloat16; the elements of a row side by side in all arrays
 *   qweight  [K * bits / 32, N]  int32: the words of a column are its codes as a stream of bits, the lowest first
 *   qzeros   [groups, N * bits / 32]  int32: such a stream along the columns
 *   scales   [groups, N]         dtype of out
 *   g_idx    [K] int32 | int64, the group of each row (act-order); NULL or empty: k / (K / groups).  A row whose group is out of
 *            range is not written and reported
 *   bits     2, 3, 4 or 8
 *   use_v2_format  zeros are what is stored, else one more */
PYKV_API pykv_status pykv_gptq_dequantize(DLTensor* out, const DLTensor* qweight, const DLTensor* qzeros,
                                          const DLTensor* scales, const DLTensor* g_idx, int64_t bits,
                                          bool use_v2_format, void* stream);

/* out = code * scale of one-byte floats, rounded once.
 *   out    [rows, columns] or [matrices, rows, columns]  float32 | float16 | bfloat16; the elements of a row side by side
 *   input  the same shape, float8_e4m3fn (or uint8, which holds it) or float8_e5m2; the elements of a row side by side
 *   scale  float32: 1 element, on the host or on the device; or [groups of rows, groups of columns], with matrices in front
 *          where out has them; or [rows] or [columns] (group_rows 1 and group_columns -1, or -1 and 1).  Any strides
 *   group_rows, group_columns  rows and columns that share a scale; the last group may have fewer.  -1: all; 0: what divides
 *          evenly                                                                                                        */
PYKV_API pykv_status pykv_fp8_dequantize(DLTensor* out, const DLTensor* input, const DLTensor* scale,
                                         int64_t group_rows, int64_t group_columns, void* stream);

/* The same with a power of two for each 32 neighbours of a row.
 *   out    [rows, columns] or [matrices, rows, columns], columns a multiple of 32
 *   scale  uint8 (e8m0: 2^(byte - 127), 255 is NaN), [..., columns / 32] of any strides.  Where is_sf_swizzled_layout it is
 *          contiguous and in tiles of 128 rows and 4 scales, padded to whole ones: byte ((r / 128) * tiles + g / 4) * 512 +
 *          r % 32 * 16 + r % 128 / 32 * 4 + g % 4 of row r and group g, with `tiles` side by side
 *
 * mxfp4: input is uint8 [..., columns / 2], four-bit floats (e2m1), the element of an even column in the low half of its byte. */
PYKV_API pykv_status pykv_mxfp8_dequantize(DLTensor* out, const DLTensor* input, const DLTensor* scale,
                                           bool is_sf_swizzled_layout, void* stream);
PYKV_API pykv_status pykv_mxfp4_dequantize(DLTensor* out, const DLTensor* input, const DLTensor* scale,
                                           bool is_sf_swizzled_layout, void* stream);

/* out = code * (scale / global_scale), with a scale for each 16 neighbours of a row; in fp32, then rounded.
 *   out    [rows, columns] or [matrices, rows, columns], columns a multiple of 16
 *   input  uint8 [..., columns / 2], as of pykv_mxfp4_dequantize
 *   scale  float8_e4m3fn (or uint8) [..., columns / 16], or swizzled as above
 *   global_scale  float32, 1 element, on the host or on the device                             */
PYKV_API pykv_status pykv_nvfp4_dequantize(DLTensor* out, const DLTensor* input, const DLTensor* scale,
                                           const DLTensor* global_scale, bool is_sf_swizzled_layout, void* stream);

/* out[..., c] = A[..., perm[c]].
 *   out, A  [..., columns], one dtype (any), any strides; out is no memory of A
 *   perm    [columns] int32 | int64.  A column that is out of range is reported, and out's column not written */
PYKV_API pykv_status pykv_permute_cols(DLTensor* out, const DLTensor* A, const DLTensor* perm, void* stream);

/* out = H x / sqrt(n) for each row x of n elements, in fp32 and rounded once.  H is Sylvester's Hadamard matrix where n is 2^k,
 * element (i, j) = (-1)^popcount(i & j); where n is m 2^k, m one of 12, 20, 28 and 40, it is a Hadamard matrix of order m times
 * (Kronecker) that of order 2^k: Paley's of 12 and 40, Williamson's of 20 and 28, as fast-hadamard-transform has them.
 *   out, x  [..., n]  float32 | float16 | bfloat16, n at most 49152 (22528 on GPUs with 99 KB of shared memory); the elements of a
 *           row side by side.  out may be x */
PYKV_API pykv_status pykv_hadacore_transform(DLTensor* out, const DLTensor* x, void* stream);

#endif /* PYKV_DEQUANTIZATION_H_ */
