/* pykv: matrix products with packed weights, and of 8-bit matrices with scales.
 *
 * Weights are packed beforehand, by pykv.gemm.pack_* in Python: into one array of bytes that can be saved and mapped, the same
 * for CPU and CUDA, and a format, a line of text such as "u4.f16.zero.n4096.k4096.g128.p4096".
 *
 * Example, a weight of 2 rows and 16 columns, all zeros but for its header, which only what reads files looks at:
 *
 *   static union {
 *     long double aligned;
 *     uint8_t bytes[256 + 32 * 64 / 2 + 32 * 4 * 2];
 *   } packed;
 *   uint16_t rows[3][16] = {{0}}, products[3][2];
 *   int64_t of_rows[] = {3, 16}, of_products[] = {3, 2}, of_packed[] = {sizeof packed.bytes};
 *   DLTensor x = {rows, {kDLCPU, 0}, 2, {kDLBfloat, 16, 1}, of_rows, NULL, 0}, out = x;
 *   DLTensor weight = {packed.bytes, {kDLCPU, 0}, 1, {kDLUInt, 8, 1}, of_packed, NULL, 0};
 *   out.data = products;
 *   out.shape = of_products;
 *   if (pykv_packed_gemm(&out, &x, &weight, "u4.f16.none.n2.k16.g16.p64", NULL, NULL, NULL, "", NULL, NULL, NULL) != PYKV_OK)
 *     puts(pykv_last_error());
 */
#ifndef PYKV_GEMM_H_
#define PYKV_GEMM_H_

#include "pykv/base.h"

/* out = token_scales (channel_scales (x w^T)) + bias, with sums in fp32 that are rounded once.  A row of out has the same bits
 * however many rows there are.  With an activation, neighbours a, b of a row become g(a) b; then the residual is added.
 *   out     [num_rows, n]  dtype of x, or with out_scale float8_e4m3fn (or uint8, which holds it) | int8; with an activation
 *                          [num_rows, n / 2]; the elements of a row lie side by side; shares no memory with the others
 *   x       [num_rows, k]  float16 | bfloat16, any strides; fast where the elements of a row lie side by side
 *   weight  [bytes]        uint8, contiguous, aligned to 16 bytes: what pykv.gemm.pack_* made
 *   format  what it is: "codes.scales.minima.n<rows>.k<columns>.g<group>.p<padded columns>[.columns]"
 *             codes   integers of some bits less 2^(bits - 1), in the middle of four or eight bits: "u2" | "u3" | "u4" |
 *                     "u5" | "u6" | "u8"; "e4m3"; "t4": an entry of a table of 16
 *             scales  "f16" | "bf16" | "f32" | "e4m3" | "e8m0" | "f16u8", "f16i8": of two levels
 *             minima  "none" | "zero": zero points | "f16" | "f32" | "f16u8": of two levels
 *   bias    [n], dtype of x, or NULL
 *   token_scales    float32, 1 element or num_rows; NULL: 1
 *   channel_scales  float32, 1 element or n; NULL: 1
 *   activation      "" | "silu" | "gelu" | "gelu_tanh": g.  n is even; rows of the two projections take turns in the weight
 *   residual        as out without out_scale, which it may be itself; NULL: 0
 *   out_scale       float32, 1 element, on the host or on the device: out is the nearest code to result * (1 / out_scale), ties to
 *                   even, saturated; NaN becomes 448, or 0 of int8.  NULL: numbers  */
PYKV_API pykv_status pykv_packed_gemm(DLTensor* out, const DLTensor* x, const DLTensor* weight, const char* format,
                                      const DLTensor* bias, const DLTensor* token_scales,
                                      const DLTensor* channel_scales, const char* activation, const DLTensor* residual,
                                      const DLTensor* out_scale, void* stream);

/* out = (a_scales b_scales) (a b) + bias with 8-bit a and b, rounded once: a_scale (b_scale sum) + bias in fp32.  Sums of int8 are
 * exact (int32).  Those of float8_e4m3fn are fp32 over blocks of 128 of k, and a row of out has the same bits however many rows there are.
 *   out       [num_rows, n]  float32 | float16 | bfloat16; the elements of a row lie side by side; shares no memory with the others
 *   a         [num_rows, k]  float8_e4m3fn (or uint8, which holds it) | int8, any strides
 *   b         [k, n]         as a, any strides.  Both fast where neighbours of k lie side by side, and rows of a and columns of
 *             b begin at multiples of 16 bytes
 *   a_scales  float32, 1 element (may be in host memory) or num_rows
 *   b_scales  float32, 1 element (may be in host memory) or n
 *   bias      [n] or [1, n], dtype of out, or NULL
 * Or both scales are those of blocks: out = sum over blocks of k of a_scale b_scale (a b of the block) + bias
 *   a_scales  [num_rows, ceil(k / 128)]         float32 | uint8 (e8m0: 2^(byte - 127), 255 is NaN); any strides.  Or
 *             [num_rows, ceil(ceil(k / 128) / 4)] int32: four of these bytes, the lowest first
 *   b_scales  [ceil(k / 128), ceil(n / 128)]    float32 | uint8; any strides  */
PYKV_API pykv_status pykv_cutlass_scaled_mm(DLTensor* out, const DLTensor* a, const DLTensor* b,
                                            const DLTensor* a_scales, const DLTensor* b_scales, const DLTensor* bias,
                                            void* stream);

/* The same of int8 with zero points of a: out = (a_scales b_scales) (a b - azp azp_adj) + bias.  Scales of blocks are refused.
 *   azp_adj  [n] or [1, n] int32: sums of the columns of b; without azp these times the one zero point
 *   azp      [num_rows] or [num_rows, 1] int32: zero points of rows; or NULL  */
PYKV_API pykv_status pykv_cutlass_scaled_mm_azp(DLTensor* out, const DLTensor* a, const DLTensor* b,
                                                const DLTensor* a_scales, const DLTensor* b_scales,
                                                const DLTensor* azp_adj, const DLTensor* azp, const DLTensor* bias,
                                                void* stream);

/* The same with several b: rows belong to groups, and are multiplied by the b of their group.  Rows of no group are not written.  A row
 * of out has the same bits whatever the others are.
 *   out, a     [num_rows, n], [num_rows, k], or with group_sizes alone [groups, num_rows, n] and [groups, num_rows, k]; as above
 *   b          [groups, k, n], any strides, at most 512 groups
 *   a_scales   float32, 1 element (may be in host memory), or [num_rows] ([groups, num_rows])
 *   b_scales   float32, [groups] or [groups, 1], or [groups, n]
 *              Or both are those of blocks, float32 | uint8: [num_rows, ceil(k / 128)] ([groups, num_rows, ceil(k / 128)]) and
 *              [groups, ceil(k / 128), ceil(n / 128)].  Those of a may be int32, four of the bytes, as above
 * Which rows a group has is told in one of three ways, by int32 | int64 arrays:
 *   row_groups    [num_rows]: the group of each row, one for 128 neighbours, that of the first; another, if negative: the row is skipped
 *   group_begins  [groups] or, without group_sizes, [groups + 1]: where the rows of each begin, one after another
 *   group_sizes   [groups]: how many rows there are.  Or [groups, 3]: (rows, n, k) or (n, rows, k).  Without group_begins each
 *                 group has the first rows of its own matrix
 *   expected_rows how many rows a group may have, which chooses the kernel and changes no result; 0: as many as there are on average
 * Groups and rows out of range are skipped and reported.  */
PYKV_API pykv_status pykv_grouped_scaled_mm(DLTensor* out, const DLTensor* a, const DLTensor* b,
                                            const DLTensor* a_scales, const DLTensor* b_scales,
                                            const DLTensor* row_groups, const DLTensor* group_begins,
                                            const DLTensor* group_sizes, int64_t expected_rows, void* stream);

/* out = alpha (a block_scale_a) (b block_scale_b)^T of nvfp4: products are exact, sums fp32, rounded once.  A row of out has the same
 * bits however many rows there are.
 *   out            [num_rows, n]      float32 | float16 | bfloat16; the elements of a row lie side by side
 *   a, b           [num_rows, k / 2], [n, k / 2] uint8, any strides: four-bit floats (e2m1), the first of two in the lower half;
 *                  k a multiple of 16
 *   block_scale_a  float8_e4m3fn (or uint8), contiguous, for each 16 neighbours, in tiles of 128 rows and 4 scales as in
 *   block_scale_b  dequantization.h; those of rows and groups that do not exist may be anything
 *   alpha          float32, 1 element, on the host or on the device  */
PYKV_API pykv_status pykv_cutlass_scaled_fp4_mm(DLTensor* out, const DLTensor* a, const DLTensor* b,
                                                const DLTensor* block_scale_a, const DLTensor* block_scale_b,
                                                const DLTensor* alpha, void* stream);

/* output = mat_a mat_b with sums in fp32, made for few rows.  A row of output has the same bits however many rows there are.
 *   output  [num_rows, n]  float32 | float16 | bfloat16; the elements of a row lie side by side
 *   mat_a   [num_rows, k]  float16 | bfloat16, any strides
 *   mat_b   [k, n]         dtype of mat_a, any strides; fast where the elements of a column lie side by side */
PYKV_API pykv_status pykv_dsv3_fused_a_gemm(DLTensor* output, const DLTensor* mat_a, const DLTensor* mat_b,
                                            void* stream);

/* output = hidden_states router_weight^T, the same of a weight [n, k]. */
PYKV_API pykv_status pykv_dsv3_router_gemm(DLTensor* output, const DLTensor* hidden_states,
                                           const DLTensor* router_weight, void* stream);

/* output = a b^T with output and b [n, k] in float32; a may be float32, too. */
PYKV_API pykv_status pykv_fp32_router_gemm(DLTensor* output, const DLTensor* a, const DLTensor* b, void* stream);

#endif /* PYKV_GEMM_H_ */
