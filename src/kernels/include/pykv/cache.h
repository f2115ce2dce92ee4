/* pykv: the paged KV cache: writing new tokens, copying blocks within it, moving blocks out of it and back.
 *
 * NB blocks of BS tokens; a slot is block * BS + offset.  Layouts, with x = 16 / sizeof(element of the cache):
 *   packed   key_cache [NB, num_kv_heads, head_size / x, BS, x]   value_cache [NB, num_kv_heads, v_head_size, BS]
 *   flash    key_cache [NB, BS, num_kv_heads, head_size]          value_cache [NB, BS, num_kv_heads, v_head_size]
 *            NHD as it stands, HND by permuted strides
 * nvfp4: bytes [NB, BS, num_kv_heads, head_size * 9 / 16], a flash cache by its nominal shape.  In a block lie first all
 * four-bit floats (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; the even element in the lower half of a byte),
 * then a scale (e4m3) for each 16 of them, NHD or HND both, S = head_size / 16 of a token and head.  Of keys scale s of token t
 * lies in row t and column s; of values in row (t / 4) * 4 + s / (S / 4) and column (s % (S / 4)) * 4 + t % 4.  head_size must
 * be a multiple of 64, BS of 4; blocks may lie anywhere, but have no gaps.
 * All strides of all arrays are honoured, those of key_cache and value_cache independently: two views of one allocation
 * are as good as two allocations.
 *
 * Example, two tokens into the second of three blocks of four on the host:
 *
 *   float k[2][2][8] = {{{1}}}, v[2][2][8] = {{{2}}}, keys[3][4][2][8], values[3][4][2][8];
 *   int64_t slots[] = {4, 5}, of_tokens[] = {2, 2, 8}, of_cache[] = {3, 4, 2, 8}, of_slots[] = {2};
 *   DLTensor key = {k, {kDLCPU, 0}, 3, {kDLFloat, 32, 1}, of_tokens, NULL, 0}, value = key;
 *   DLTensor key_cache = {keys, {kDLCPU, 0}, 4, {kDLFloat, 32, 1}, of_cache, NULL, 0}, value_cache = key_cache;
 *   DLTensor slot_mapping = {slots, {kDLCPU, 0}, 1, {kDLInt, 64, 1}, of_slots, NULL, 0};
 *   value.data = v;
 *   value_cache.data = values;
 *   if (pykv_reshape_and_cache_flash(&key, &value, &key_cache, &value_cache, &slot_mapping, "auto", NULL, NULL, NULL))
 *     puts(pykv_last_error());
 */
#ifndef PYKV_CACHE_H_
#define PYKV_CACHE_H_

#include "pykv/base.h"

/* For each token t with slot_mapping[t] >= 0: writes key[t] and value[t] into that slot of packed caches.
 *   key            [num_rows, num_kv_heads, head_size]     f32 | f16 | bf16
 *   value          [num_rows, num_kv_heads, v_head_size]   dtype of key
 *   key_cache, value_cache                                 packed; dtype of key, or one-byte elements
 *   slot_mapping   [num_tokens]                            int32 | int64; negative: padding, the token is skipped
 *   kv_cache_dtype "auto", "float32", "float16", "bfloat16": elements are copied, the dtypes must agree;
 *                  "fp8", "fp8_e4m3", "fp8_e5m2": element = value / scale, rounded to nearest even, saturated to the
 *                  largest finite value; NaN stays NaN;
 *                  "int8": the same with integers, -128 to 127; NaN becomes 0;
 *                  "nvfp4" (flash only): element = value / (block scale * scale), to nearest, ties to even, at most 6;
 *                  NaN becomes 0.  block scale = e4m3(largest magnitude of the 16, NaN not counted / (6 * scale)), at
 *                  most 448.  So scale = largest of all / 2688 uses the whole range;
 *                  "nvfp4_4over6": the same, with e4m3(largest magnitude / (4 * scale)) as block scale where the sum of the
 *                  squared errors of the 16 is less then; readers know no difference
 *   k_scale, v_scale   one float, or one for each head; NULL: 1.  Looked at where elements are divided by them
 *   interleaved_v  value_cache is [NB, num_kv_heads, BS / x, v_head_size, x]: element d of offset o lies at
 *                  [o / x, d, o % x]
 * num_tokens decides: key and value may have more rows.  Where two tokens share a slot, either of them may win.
 * A slot >= NB * BS is skipped and reported. */
PYKV_API pykv_status pykv_reshape_and_cache(const DLTensor* key, const DLTensor* value, DLTensor* key_cache,
                                            DLTensor* value_cache, const DLTensor* slot_mapping,
                                            const char* kv_cache_dtype, const DLTensor* k_scale,
                                            const DLTensor* v_scale, bool interleaved_v, void* stream);

/* The same for flash caches. */
PYKV_API pykv_status pykv_reshape_and_cache_flash(const DLTensor* key, const DLTensor* value, DLTensor* key_cache,
                                                  DLTensor* value_cache, const DLTensor* slot_mapping,
                                                  const char* kv_cache_dtype, const DLTensor* k_scale,
                                                  const DLTensor* v_scale, void* stream);

/* pykv_rotary_embedding of query and key, then pykv_reshape_and_cache(_flash) of the rotated key and of value, in one
 * launch and with the very same results.
 *   positions      [num_tokens]                                       int32 | int64
 *   query          [num_tokens, num_heads * head_size] or [num_tokens, num_heads, head_size]      f32 | f16 | bf16
 *   key            the same with num_kv_heads; dtype of query
 *   value          the same with num_kv_heads and v_head_size; dtype of query
 *   cos_sin_cache  [max_position, rotary_dim]   f32 | f16 | bf16: cos_0 ... , sin_0 ... in each row
 *   key_cache, value_cache                      flash or packed: head_size is theirs
 *   slot_mapping   [<= num_tokens]              int32 | int64; a token without a slot (beyond its end, or negative) is
 *                                               rotated and not cached
 * query and key are rotated in place, from element rope_dim_offset of each head on; their last dimensions must be
 * contiguous.  The three may be parts of one buffer.  A position outside [0, max_position) is reported, and
 * its token not rotated, but cached as it is.  All else as for those two. */
PYKV_API pykv_status pykv_rotary_and_cache(const DLTensor* positions, DLTensor* query, DLTensor* key,
                                           const DLTensor* value, const DLTensor* cos_sin_cache, bool is_neox,
                                           DLTensor* key_cache, DLTensor* value_cache, const DLTensor* slot_mapping,
                                           const char* kv_cache_dtype, const DLTensor* k_scale, const DLTensor* v_scale,
                                           int64_t rope_dim_offset, void* stream);

/* The heads of a fused buffer into arrays of their own, normed, rotated and cached.  Of each query and key head x first
 * x * r * (weight + norm_weight_bias), r = 1 / sqrt(sum(x^2) / head_dim + epsilon), in fp32 and rounded to the dtype of qkv;
 * then its NeoX rotation, rounded again.  Value heads are copied.  Then pykv_reshape_and_cache_flash of k_out and v_out.
 *   q_out             [num_tokens, num_q_heads * head_dim] or [num_tokens, num_q_heads, head_dim]; dtype of qkv
 *   k_out, v_out      the same with num_kv_heads
 *   qkv               [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]  f32 | f16 | bf16; not changed
 *   q_weight, k_weight  [head_dim]                                  f32 | f16 | bf16, both of one dtype
 *   cos, sin          [max_position, >= rotary_pairs]  f32 | f16 | bf16, both of one dtype, with one row stride
 *   positions         [num_tokens]      int32 | int64
 *   slot_mapping      [<= num_tokens]   int32 | int64; a token without a slot (beyond its end, or negative) is not cached
 *   k_cache, v_cache  flash             as for pykv_reshape_and_cache_flash
 *   rotary_pairs      element i of a head is rotated with element i + rotary_pairs, i < rotary_pairs <= head_dim / 2; 0: none
 *   kv_cache_dtype, k_scale, v_scale    as for pykv_reshape_and_cache_flash
 * Rows of all arrays are contiguous, other strides free.  A position outside [0, max_position) is reported, and its token
 * not rotated, but normed and cached. */
PYKV_API pykv_status pykv_fused_qknorm_rope_cache(DLTensor* q_out, DLTensor* k_out, DLTensor* v_out,
                                                  const DLTensor* qkv, const DLTensor* q_weight,
                                                  const DLTensor* k_weight, const DLTensor* cos, const DLTensor* sin,
                                                  const DLTensor* positions, const DLTensor* slot_mapping,
                                                  DLTensor* k_cache, DLTensor* v_cache, int64_t head_dim,
                                                  int64_t num_q_heads, int64_t num_kv_heads, int64_t rotary_pairs,
                                                  double epsilon, double norm_weight_bias, const char* kv_cache_dtype,
                                                  const DLTensor* k_scale, const DLTensor* v_scale, void* stream);

/* cache[to] = cache[from] for each row (from, to) of block_mapping and each of the key and value caches.
 *   key_caches, value_caches   one cache [NB, ...] a layer each; any dtype and layout, NB alike in all of them
 *   block_mapping              [num_pairs, 2]  int32 | int64, on the host or on the device of the caches
 * A mapping on the host (and any mapping of CPU caches) is checked before anything is copied, and its rows take effect in
 * order: a block may be a destination first and a source later.  The rows of a mapping on the device are copied
 * concurrently: no block may be a destination and occur a second time.  There, ids out of range are skipped and
 * reported. */
PYKV_API pykv_status pykv_copy_blocks(pykv_tensor_list key_caches, pykv_tensor_list value_caches,
                                      const DLTensor* block_mapping, void* stream);

/* The same for layers of one cache [NB, ...] each. */
PYKV_API pykv_status pykv_copy_blocks_mla(pykv_tensor_list kv_caches, const DLTensor* block_mapping, void* stream);

/* Copies bytes [from * block_size_in_bytes, (from + 1) * block_size_in_bytes) of src to block `to` of dst, for each row
 * (from, to) of block_mapping, in order.
 *   src, dst        any dtype and shape, taken as the bytes from their data pointer on; on the CPU or on any CUDA
 *                   device, the same or two different ones
 *   block_mapping   [num_pairs, 2]  int32 | int64, on the host; checked before anything is copied
 * Enqueued on `stream`, which belongs to the device of dst, or to that of src where dst lies on the host.  Host memory
 * must stay alive until then; pageable host memory makes the call wait for its copies. */
PYKV_API pykv_status pykv_swap_blocks(const DLTensor* src, DLTensor* dst, int64_t block_size_in_bytes,
                                      const DLTensor* block_mapping, void* stream);

/* The same for each pair (src_caches[i], dst_caches[i]), one after the other: the caches of all layers in one call.
 *   src_caches   on one device        dst_caches   as many, on one device
 *   block_mapping                     checked against the smallest of them
 * Between a device and pinned memory, many short runs of blocks are copied by a kernel on a few SMs, few long ones by
 * the copy engines. */
PYKV_API pykv_status pykv_swap_blocks_layers(pykv_tensor_list src_caches, pykv_tensor_list dst_caches,
                                             int64_t block_size_in_bytes, const DLTensor* block_mapping, void* stream);

/* Copies sizes[i] bytes from the address src_ptrs[i] to the address dst_ptrs[i], for each i, in no order among them.
 *   src_ptrs, dst_ptrs, sizes   [n]  int64, on the host; looked at during the call alone
 *   is_src_access_order_any     permits to read before what was enqueued earlier is done; reads are in order all the same
 * Each address is one of the host, pinned or pageable, or of any CUDA device; neighbours that go on where the one before
 * them ends are copied as one.  Enqueued on `stream`; NULL is the default stream of the first device that has one of the
 * addresses, and where all of them are the host's, its CPU copies before the call returns.  Host memory must stay alive until
 * the copies are done; pageable host memory makes the call wait for its copies.
 * Ranges that are written must not overlap others.  No memory can be looked up here: an address that is not one crashes. */
PYKV_API pykv_status pykv_swap_blocks_batch(const DLTensor* src_ptrs, const DLTensor* dst_ptrs, const DLTensor* sizes,
                                            bool is_src_access_order_any, void* stream);

/* MLA caches [NB, BS, kv_lora_rank + rope_size]: for each token t with slot_mapping[t] >= 0 writes concat(kv_c[t],
 * k_pe[t]) into that slot.
 *   kv_c           [num_rows, kv_lora_rank]  f32 | f16 | bf16
 *   k_pe           [num_rows, rope_size]     dtype of kv_c
 *   kv_cache       as above; dtype of kv_c, or one-byte elements; for records [NB, BS, record] of bytes
 *   slot_mapping   [num_tokens]              int32 | int64; negative: padding, the token is skipped
 *   kv_cache_dtype as for pykv_reshape_and_cache; "nvfp4": kv_cache [NB, BS, (kv_lora_rank + rope_size) * 9 / 16], keys
 *                  of one head of kv_lora_rank + rope_size elements, which must be a multiple of 64; or
 *                  "fp8_ds_mla": a record of kv_lora_rank e4m3 elements, a float32 scale for each 128 of them (the least
 *                  power of two that is at least their largest magnitude / 448 and 1e-4; NaN is not counted), and k_pe as
 *                  it is; where rope_size is 0, zeros up to the end of the record.  kv_lora_rank must be a multiple of
 *                  128 and the data 16-bit floats; 512 and 64 make 656 bytes
 *                  "nvfp4_ds_mla": a record of kv_lora_rank four-bit elements, k_pe as e4m3, and an e4m3 scale for each
 *                  16 elements: largest magnitude / 6, at least 2^-9; NaN is not counted.  Scale s lies at
 *                  s % 4 * (kv_lora_rank / 64) + s / 4 of them.  kv_lora_rank must be a multiple of 64, rope_size of 8 and
 *                  the data 16-bit floats; 512 and 64 make 352 bytes
 *   scale          one float; NULL: 1.  Looked at for "fp8..." except "fp8_ds_mla", "int8" and "nvfp4"
 *   skip_scale     take 1 for the scale and do not look at it: the data is quantised but for the rounding
 * num_tokens decides: kv_c and k_pe may have more rows.  Where two tokens share a slot, either of them may win.
 * A slot >= NB * BS is skipped and reported. */
PYKV_API pykv_status pykv_concat_and_cache_mla(const DLTensor* kv_c, const DLTensor* k_pe, DLTensor* kv_cache,
                                               const DLTensor* slot_mapping, const char* kv_cache_dtype,
                                               const DLTensor* scale, bool skip_scale, void* stream);

/* The same for several layers at once, each with a cache of its own.
 *   kv_c           [num_layers, num_rows, kv_lora_rank]  f32 | f16 | bf16
 *   k_pe           [num_layers, num_rows, rope_size]     dtype of kv_c
 *   kv_caches      [NB, BS, kv_lora_rank + rope_size] each, of one dtype and with the same strides
 *   slot_mapping   [num_layers, num_tokens]              int32 | int64; stride 0: the same slots for all layers
 *   kv_cache_dtype "auto", "float32", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2"
 *   kv_scales      one float, or one for each layer; NULL: 1.  Looked at for "fp8..." */
PYKV_API pykv_status pykv_concat_and_cache_mla_layers(const DLTensor* kv_c, const DLTensor* k_pe,
                                                      pykv_tensor_list kv_caches, const DLTensor* slot_mapping,
                                                      const char* kv_cache_dtype, const DLTensor* kv_scales,
                                                      void* stream);

/* The same for caches that are known by their addresses alone.
 *   kv_cache_ptrs  [num_layers]  int64, on the device of the others (in host memory for the CPU): addresses of elements of
 *                  the dtype of kv_c, or one-byte ones for "fp8..."; 0: nothing is written for this layer
 *   block_size     BS; slot s lies at element s / BS * block_stride + s % BS * entry_stride of each cache
 *   block_stride, entry_stride   in elements, at least kv_lora_rank + rope_size
 *   num_blocks     NB of all caches: a slot >= NB * BS is skipped and reported.  Negative: it is not known
 * No memory can be looked up here: an address that is not one of this device, or a slot beyond a cache whose num_blocks is
 * not given, overwrites foreign memory, or ends the process or its CUDA context.  Addresses are read when the work runs, and
 * must stay right until then; pykv_concat_and_cache_mla_layers has none of these dangers. */
PYKV_API pykv_status pykv_concat_and_cache_mla_grouped(const DLTensor* kv_c, const DLTensor* k_pe,
                                                       const DLTensor* kv_cache_ptrs, const DLTensor* slot_mapping,
                                                       int64_t block_size, int64_t block_stride, int64_t entry_stride,
                                                       const DLTensor* kv_scales, const char* kv_cache_dtype,
                                                       int64_t num_blocks, void* stream);

/* The same as pykv_concat_and_cache_mla with rotation first: rotates q_pe and k_pe in place by the angles of the token's position, as
 * pykv_rotary_embedding does, then writes concat(kv_c[t], k_pe[t]).
 *   positions       [num_rows]                       int32 | int64
 *   q_pe            [num_rows, num_heads * rope_size] or [num_rows, num_heads, rope_size]   f32 | f16 | bf16
 *   k_pe            [num_rows, rope_size]            dtype of q_pe
 *   kv_c            [>= num_tokens, kv_lora_rank]    dtype of q_pe
 *   cos_sin_cache   [max_position, rope_size]        f32 | f16 | bf16: cos_0 ... , sin_0 ... in each row
 *   slot_mapping    [num_tokens <= num_rows]
 *   rotate_in_fp32  rotate as pykv_rotary_embedding: in fp32, rounded once.  Otherwise as vLLM does, in the data's own dtype:
 *                   cosines, sines, both products and their sum are rounded to it, one after the other
 *   rotate_padded   rotate all tokens.  Otherwise those without a place in the cache (beyond slot_mapping's end, or with a
 *                   slot that is negative or beyond the cache) are left as they are
 * The last dimensions of q_pe and k_pe must be contiguous.  A position outside [0, max_position) is reported, and its token
 * not rotated, but cached as it is. */
PYKV_API pykv_status pykv_concat_and_cache_mla_rope_fused(const DLTensor* positions, DLTensor* q_pe, DLTensor* k_pe,
                                                          const DLTensor* kv_c, const DLTensor* cos_sin_cache,
                                                          bool is_neox, const DLTensor* slot_mapping,
                                                          DLTensor* kv_cache, const char* kv_cache_dtype,
                                                          const DLTensor* kv_cache_scale, bool rotate_in_fp32,
                                                          bool rotate_padded, void* stream);

/* dst[i] = entry of src_cache for row i of the gathered requests: request r has rows cu_seq_lens[r] to cu_seq_lens[r + 1]
 * of dst, and row i is its token i - cu_seq_lens[r] + seq_starts[r].
 *   src_cache     [NB, BS, ...]           any dtype
 *   dst           [num_rows, ...]         dtype and entries of src_cache; rows that no request has stay as they are
 *   block_table   [>= batch_size, width]  int32 | int64, as all ids here
 *   cu_seq_lens   [>= batch_size + 1]     ascending
 *   seq_starts    [>= batch_size]         any token of a block; NULL: 0
 * An entry is any number of dimensions that merge into at most 2: [heads, head_size] of NHD and HND caches, too.
 * Rows whose position is beyond the block table, or whose block is not in [0, NB), are not written but reported. */
PYKV_API pykv_status pykv_cp_gather_cache(const DLTensor* src_cache, DLTensor* dst, const DLTensor* block_table,
                                          const DLTensor* cu_seq_lens, int64_t batch_size, const DLTensor* seq_starts,
                                          void* stream);

/* The same for the requests of all of cu_seq_lens [num_requests + 1], with elements turned into those of dst.
 *   dst            [>= num_tokens, ...]   f32 | f16 | bf16; no row from num_tokens on is written
 *   token_to_seq   [>= num_tokens]        the request of each row; NULL: it is searched for in cu_seq_lens.  A row at or
 *                                         beyond its request's end is left as it is; a request out of range reported
 *   kv_cache_dtype "auto" and so on: copied, the dtypes must agree; "fp8...", "int8": element * scale, rounded to nearest
 *                  even; "nvfp4": element * block scale * scale, src_cache [NB, BS, head_size * 9 / 16] for dst
 *                  [num_rows, head_size], or with heads before the last dimension of both: pages of keys or MLA; "nvfp4_v":
 *                  pages of values;
 *                  "fp8_ds_mla": src_cache [NB, BS, record] as pykv_concat_and_cache_mla writes it, dst f16 | bf16
 *                  [num_rows, kv_lora_rank + rope_size]; the rope is copied: it must have been written in the dtype of dst
 *   scale          one float; NULL: 1.  Looked at for "fp8..." except "fp8_ds_mla", "int8" and "nvfp4" */
PYKV_API pykv_status pykv_gather_and_maybe_dequant_cache(const DLTensor* src_cache, DLTensor* dst,
                                                         const DLTensor* block_table, const DLTensor* cu_seq_lens,
                                                         const DLTensor* token_to_seq, int64_t num_tokens,
                                                         const char* kv_cache_dtype, const DLTensor* scale,
                                                         const DLTensor* seq_starts, void* stream);

/* The same for "fp8_ds_mla" caches, with request r in rows workspace_starts[r] to workspace_starts[r + 1], the last request
 * in all rows up to the end of dst.
 *   workspace_starts   [>= batch_size]    ascending
 *   seq_starts         [>= batch_size]    any token of a block; NULL: 0
 * Records that lie partly in host memory, as all three of the following say, or none of them (NULL); block b of the block
 * table then stands for the slots b * BS to (b + 1) * BS, below num_slots:
 *   device_row_ids     [num_slots]   int32 | int64, contiguous, any shape: the record of slot s is that of slot
 *                                    device_row_ids[s] of src_cache; negative:
 *   host_row_ids       likewise      it is host_cache[host_row_ids[s]]
 *   host_cache         [num_host_rows, record]   of bytes, in host memory; where the others are on CUDA it must be pinned,
 *                                    for the kernel reads it
 * A row beyond src_cache or host_cache is not read but reported. */
PYKV_API pykv_status pykv_cp_gather_and_upconvert_fp8_kv_cache(const DLTensor* src_cache, DLTensor* dst,
                                                               const DLTensor* block_table,
                                                               const DLTensor* workspace_starts, int64_t batch_size,
                                                               const DLTensor* seq_starts, const DLTensor* host_cache,
                                                               const DLTensor* host_row_ids,
                                                               const DLTensor* device_row_ids, void* stream);

/* The same for "nvfp4_ds_mla" caches, all of it on one device, from the first token of each request on.  Elements are
 * element * scale, which float16 holds exactly, rounded to the dtype of dst; rope is that of the record. */
PYKV_API pykv_status pykv_cp_gather_and_upconvert_nvfp4_kv_cache(const DLTensor* src_cache, DLTensor* dst,
                                                                 const DLTensor* block_table,
                                                                 const DLTensor* workspace_starts, int64_t batch_size,
                                                                 void* stream);

/* Keys of a sparse-attention indexer into a cache of blocks that hold first all values, then all scales: with G = head_dim /
 * quant_block_size, in bytes from the beginning of a block,
 *   value d of offset o   o * head_dim + d                        e4m3
 *   scale g of offset o   BS * head_dim + (o * G + g) * 4         float32; of "mxfp8", four equal bytes
 * For each token t with slot_mapping[t] >= 0 and each group of quant_block_size elements of k[t]:
 *   scale = max(amax, 1e-4) / 448, NaN not counted; value = k / scale, rounded to nearest even; NaN stays NaN
 *   k                [num_rows, head_dim]   f32 | f16 | bf16
 *   kv_cache         [NB, BS, >= head_dim + 4 * G]  of bytes; the shape of a token is its size alone.  A block must be
 *                    contiguous
 *   slot_mapping     [num_tokens]           int32 | int64; negative: padding, the token is skipped
 *   quant_block_size a divisor of head_dim
 *   kv_cache_dtype   "ue8m0": scales are rounded up to powers of two (still stored as float32); "mxfp8": the same powers,
 *                    each stored as its biased exponent in all four bytes of its place: with groups of 128 a byte for each
 *                    32 values, as MX formats want it; "auto", "fp8", "fp8_e4m3": they are not rounded
 * num_tokens decides: k may have more rows.  A slot >= NB * BS is skipped and reported. */
PYKV_API pykv_status pykv_indexer_k_quant_and_cache(const DLTensor* k, DLTensor* kv_cache, const DLTensor* slot_mapping,
                                                    int64_t quant_block_size, const char* kv_cache_dtype, void* stream);

/* The values and scales of requests from such a cache: row i of dst_k and dst_scale for row i of the requests, as for
 * pykv_cp_gather_cache, requests being those of all of cu_seq_lens.
 *   kv_cache      as above
 *   dst_k         [num_rows, head_dim]    of bytes; rows that no request has stay as they are, as those of dst_scale
 *   dst_scale     [num_rows, G] float32, or [num_rows, 4 * G] of bytes: decides how many scales a token has
 *   block_table   [>= num_requests, width]  int32 | int64, as all ids here
 *   cu_seq_lens   [num_requests + 1]        ascending
 *   seq_starts    [>= num_requests]         NULL: 0 */
PYKV_API pykv_status pykv_cp_gather_indexer_k_quant_cache(const DLTensor* kv_cache, DLTensor* dst_k,
                                                          DLTensor* dst_scale, const DLTensor* block_table,
                                                          const DLTensor* cu_seq_lens, const DLTensor* seq_starts,
                                                          void* stream);

/* output = fp8(input / scale), rounded to nearest even and saturated, if input is f32 | f16 | bf16 and output has one-byte
 * elements; output = input * scale, rounded to nearest even, the other way round.  NaN stays NaN.
 *   output, input   the same shape, any strides; or other shapes of the same first dimension and as many elements, each
 *                   index of which is one contiguous block: the blocks are taken as they lie (packed key caches, whose x
 *                   depends on the dtype)
 *   scale           one float; NULL: 1
 *   kv_dtype        "fp8", "fp8_e4m3", "fp8_e5m2" */
PYKV_API pykv_status pykv_convert_fp8(DLTensor* output, const DLTensor* input, const DLTensor* scale,
                                      const char* kv_dtype, void* stream);

/* q_out = concat(ql_nope, q_pe) along the last dimension, bit by bit.
 *   ql_nope   [num_tokens, num_heads, kv_lora_rank]               any dtype; any strides, as for the others
 *   q_pe      [num_tokens, num_heads, rope_size]                  the same dtype
 *   q_out     [num_tokens, >= num_heads, kv_lora_rank + rope_size]   the same dtype; heads beyond num_heads stay as they are
 * ql_nope may be q_out[:, :num_heads, :kv_lora_rank] itself: then q_pe alone is copied.  Otherwise the arrays must not overlap. */
PYKV_API pykv_status pykv_concat_mla_q(const DLTensor* ql_nope, const DLTensor* q_pe, DLTensor* q_out, void* stream);

#endif /* PYKV_CACHE_H_ */
