"""``pykv.vllm`` against the signatures of ``vllm._custom_ops`` 0.33, recorded here."""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from rows import random

import pykv
from pykv import vllm as ops

# name: parameters in order, those with a default as "name=default"; then what is returned
SIGNATURES = {
    "allspark_repack_weight": "qweight, scale, zero_point=None, has_zp=False",
    "allspark_w8a16_gemm": (
        "a, b_qweight, b_scales, b_qzeros, n, group_size, sm_count, sm_version, CUBLAS_M_THRESHOLD, has_zp, "
        "n32k16_reorder"
    ),
    "marlin_int4_fp8_preprocess": "qweight, qzeros_or_none=None, inplace=False",
    "awq_dequantize": "qweight, scales, zeros, split_k_iters, thx, thy",
    "apply_repetition_penalties": "logits, prompt_mask, output_mask, repetition_penalties",
    "apply_repetition_penalties_cuda": "logits, prompt_mask, output_mask, repetition_penalties",
    "concat_and_cache_mla": "kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, skip_scale=False",
    "concat_and_cache_mla_grouped": (
        "kv_c, k_pe, kv_cache_ptrs, slot_mapping, block_size, block_stride, entry_stride, kv_scales=None, "
        "kv_cache_dtype='auto'"
    ),
    "concat_and_cache_mla_rope_fused": (
        "positions, q_pe, k_pe, kv_c, cos_sin_cache, is_neox, slot_mapping, kv_cache, kv_cache_dtype, kv_cache_scale"
    ),
    "concat_mla_q": "ql_nope, q_pe, q_out",
    "convert_fp8": "output, input, scale=1.0, kv_dtype='fp8'",
    "cooperative_topk": "logits, lengths, output, workspace, k, max_seq_len",
    "cp_gather_and_upconvert_fp8_kv_cache": (
        "src_cache, dst, block_table, workspace_starts, batch_size, seq_starts=None, host_cache=None, "
        "host_row_ids=None, device_row_ids=None"
    ),
    "cp_gather_and_upconvert_nvfp4_kv_cache": "src_cache, dst, block_table, workspace_starts, batch_size",
    "cp_gather_cache": "src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts=None",
    "cp_gather_indexer_k_quant_cache": "kv_cache, dst_k, dst_scale, block_table, cu_seq_lens",
    "cutlass_group_gemm_supported": "cuda_device_capability",
    "cutlass_moe_mm": (
        "out_tensors, a_tensors, b_tensors, a_scales, b_scales, expert_offsets, problem_sizes, a_strides, b_strides, "
        "c_strides, per_act_token, per_out_ch"
    ),
    "cutlass_scaled_fp4_mm": "a, b, block_scale_a, block_scale_b, alpha, out_dtype",
    "cutlass_scaled_mm": "a, b, scale_a, scale_b, out_dtype, bias=None",
    "cutlass_scaled_mm_azp": "a, b, scale_a, scale_b, out_dtype, azp_adj, azp=None, bias=None",
    "cutlass_scaled_mm_supports_block_fp8": "cuda_device_capability",
    "cutlass_scaled_mm_supports_fp4": "cuda_device_capability",
    "cutlass_scaled_mm_supports_fp8": "cuda_device_capability",
    "dsv3_fused_a_gemm": "output, mat_a, mat_b, enable_pdl=False",
    "dsv3_router_gemm": "hidden_states, router_weight, output_dtype",
    "fp32_router_gemm": "hidden_states, router_weight",
    "fp8_gemm_nt": "a, b, d",  # this and the two grouped ones: of vllm.utils.deep_gemm
    "fp8_m_grouped_gemm_nt_masked": "a, b, d, masked_m, expected_m",
    "m_grouped_fp8_gemm_nt_contiguous": "a, b, d, m_indices",
    "fused_add_rms_norm": "input, residual, weight, epsilon",
    "fused_qk_norm_rope": (
        "qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, cos_sin_cache, is_neox, "
        "position_ids, forced_token_heads_per_warp=-1"
    ),
    "fused_qknorm_rope_cache": (
        "qkv, q_weight, k_weight, cos_sin_cache, positions, slot_mapping, key_cache, value_cache, num_q_heads, "
        "num_kv_heads, head_dim, rotary_dim, eps, norm_weight_bias=0.0, kv_cache_dtype='auto', k_scale=None, "
        "v_scale=None"
    ),
    "gather_and_maybe_dequant_cache": (
        "src_cache, dst, block_table, cu_seq_lens, token_to_seq, num_tokens, kv_cache_dtype, scale, seq_starts=None"
    ),
    "grouped_topk": (
        "scores, num_expert_group, topk_group, topk, renormalize, routed_scaling_factor, bias, scoring_func=0"
    ),
    "ggml_dequantize": "W, quant_type, m, n, dtype",  # of 0.22; dtype has no default there, either
    "hadacore_transform": "x, inplace=True",
    "indexer_k_quant_and_cache": "k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype",
    "merge_attn_states": (
        "output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None, "
        "prefill_tokens_with_context=None, output_scale=None"
    ),
    "mxfp4_experts_quant": "input_tensor, expert_offsets, blockscale_offsets, n_experts, topk",
    "mxfp4_experts_quant_supported": "cuda_device_capability",
    "mxfp8_experts_quant": (  # of 0.22
        "input, problem_sizes, expert_offsets, blockscale_offsets, quant_output, scale_factor"
    ),
    "permute_cols": "a, perm",  # of 0.22
    "persistent_topk": "logits, lengths, output, workspace, k, max_seq_len",
    "reshape_and_cache": (
        "key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale, interleaved_v=False"
    ),
    "reshape_and_cache_flash": "key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale",
    "rms_norm": "out, input, weight, epsilon",
    "rms_norm_dynamic_per_token_quant": "input, weight, epsilon, quant_dtype, scale_ub=None, residual=None",
    "rms_norm_per_block_quant": (
        "input, weight, epsilon, quant_dtype, group_size, scale_ub=None, residual=None, is_scale_transposed=False, "
        "tma_alignment=0"
    ),
    "rotary_embedding": ("positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset=0, inverse=False"),
    "scaled_fp4_experts_quant": "input_tensor, input_global_scale, expert_offsets, blockscale_offsets, topk",
    "scaled_fp4_quant": ("input, input_global_scale, is_sf_swizzled_layout=True, backend='none', padded_n=None"),
    "scaled_fp8_quant": (
        "input, scale=None, num_token_padding=None, scale_ub=None, use_per_token_if_dynamic=False, output=None, "
        "group_shape=None"
    ),
    "scaled_int8_quant": "input, scale=None, azp=None, symmetric=True",
    "silu_and_mul_mxfp4_experts_quant": "input_tensor, expert_offsets, blockscale_offsets, n_experts, topk",
    "silu_and_mul_scaled_fp4_experts_quant": (
        "input_tensor, input_global_scale, expert_offsets, blockscale_offsets, topk"
    ),
    "silu_and_mul_per_block_quant": "input, group_size, quant_dtype, scale_ub=None, is_scale_transposed=False",
    "swap_blocks": "src, dst, block_size_in_bytes, block_mapping",
    "swap_blocks_batch": "src_ptrs, dst_ptrs, sizes, is_src_access_order_any=False",
    "batched_moe_align_block_size": (
        "max_tokens_per_batch, block_size, expert_num_tokens, sorted_ids, expert_ids, num_tokens_post_pad"
    ),
    "get_cutlass_batched_moe_mm_data": (
        "expert_offsets, problem_sizes1, problem_sizes2, expert_num_tokens, num_local_experts, padded_m, n, k"
    ),
    "get_cutlass_moe_mm_data": (
        "topk_ids, expert_offsets, problem_sizes1, problem_sizes2, input_permutation, output_permutation, num_experts, "
        "n, k, blockscale_offsets=None, is_gated=True"
    ),
    "get_cutlass_moe_mm_problem_sizes_from_expert_offsets": (
        "expert_first_token_offset, problem_sizes1, problem_sizes2, n, k, swap_ab"
    ),
    "moe_align_block_size": (
        "topk_ids, num_experts, block_size, sorted_token_ids, experts_ids, num_tokens_post_pad, expert_map=None, "
        "scatter_idx=None"
    ),
    "moe_lora_align_block_size": (
        "topk_ids, token_lora_mapping, num_experts, block_size, max_loras, max_num_tokens_padded, max_num_m_blocks, "
        "sorted_token_ids, experts_ids, num_tokens_post_pad, adapter_enabled, lora_ids, expert_map=None"
    ),
    "moe_permute_unpermute_supported": "",
    "moe_sum": "input, output, topk_ids=None, expert_map=None",
    "shuffle_rows": "input_tensor, dst2src_map",
    "topk_hash_softplus_sqrt": (
        "topk_weights, topk_indices, token_expert_indices, gating_output, renormalize=False, "
        "routed_scaling_factor=1.0, e_score_correction_bias=None, input_tokens=None, hash_indices_table=None, "
        "is_padding=None, bias_vl=None, image_sentinel_lo=0"
    ),
    "topk_sigmoid": (
        "topk_weights, topk_ids, token_expert_indices, gating_output, renormalize=False, "
        "e_score_correction_bias=None, routed_scaling_factor=1.0, is_padding=None"
    ),
    "topk_softmax": (
        "topk_weights, topk_ids, token_expert_indices, gating_output, renormalize=False, "
        "e_score_correction_bias=None, is_padding=None"
    ),
    "top_k_per_row_decode": "logits, next_n, seq_lens, raw_topk_indices, num_rows, stride0, stride1, topk_tokens",
    "top_k_per_row_prefill": (
        "logits, cu_seqlen_ks, cu_seqlen_ke, raw_topk_indices, num_rows, stride0, stride1, topk_tokens"
    ),
}
SIGNATURES |= {
    "cutlass_encode_and_reorder_int4b": "b",
    "cutlass_encode_and_reorder_int4b_grouped": "b_tensors",
    "cutlass_fp4_moe_mm": (
        "out_tensors, a_tensors, b_tensors, a_scales, b_scales, alphas, problem_sizes, expert_offsets, sf_offsets"
    ),
    "cutlass_mxfp4_moe_mm": (
        "out_tensors, a_tensors, b_tensors, a_scales, b_scales, problem_sizes, expert_offsets, sf_offsets"
    ),
    "cutlass_pack_scale_fp8": "scales",
    "cutlass_w4a8_mm": (
        "a, b_q, b_group_scales, b_group_size, b_channel_scales, a_token_scales, out_type=None, maybe_schedule=None"
    ),
    "cutlass_w4a8_moe_mm": (
        "out_tensors, a_tensors, b_tensors, a_scales, b_scales, b_group_scales, b_group_size, expert_offsets, "
        "problem_sizes, a_strides, b_strides, c_strides, group_scale_strides, maybe_schedule=None"
    ),
    "machete_supported_schedules": (
        "a_type, b_type, group_scales_type, group_zeros_type=None, channel_scales_type=None, token_scales_type=None, "
        "out_type=None"
    ),
    "awq_marlin_moe_repack": "b_q_weight, size_k, size_n, num_bits, is_a_8bit=False",
    "gptq_marlin_moe_repack": "b_q_weight, size_k, size_n, num_bits, is_a_8bit=False",
    "moe_wna16_marlin_gemm": (
        "input, output, b_qweight, b_bias, b_scales, a_scales, global_scale, b_qzeros, workspace, sorted_token_ids, "
        "expert_ids, num_tokens_past_padded, topk_weights, moe_block_size, top_k, mul_topk_weights, b_q_type, size_m, "
        "size_n, size_k, use_atomic_add, use_fp32_reduce, is_zp_float, thread_k=-1, thread_n=-1, blocks_per_sm=-1"
    ),
    "vocab_parallel_embedding": (
        "input_ids, weight, org_vocab_start_index, org_vocab_end_index, num_org_vocab_padding, "
        "added_vocab_start_index, added_vocab_end_index"
    ),
    "awq_gemm": "input, qweight, scales, qzeros, split_k_iters",
    "awq_marlin_repack": "b_q_weight, size_k, size_n, num_bits, is_a_8bit=False",
    "ggml_mul_mat_a8": "W, X, quant_type, row",  # of 0.22
    "ggml_mul_mat_vec_a8": "W, X, quant_type, row",
    "gptq_gemm": "a, b_q_weight, b_gptq_qzeros, b_gptq_scales, use_exllama, use_v2_format, bit",
    "gptq_marlin_repack": "b_q_weight, size_k, size_n, num_bits, is_a_8bit=False",
    "gptq_shuffle": "q_weight, bit",
    "machete_mm": (
        "a, b_q, b_type, out_type=None, b_group_scales=None, b_group_zeros=None, b_group_size=None, "
        "b_channel_scales=None, a_token_scales=None, schedule=None"
    ),
    "machete_prepack_B": "b_q_weight, a_type, b_type, group_scales_type",
    "marlin_gemm": (
        "a, c, b_q_weight, b_bias, b_scales, a_scales, global_scale, b_zeros, workspace, b_q_type, "
        "size_m, size_n, size_k, use_atomic_add=False, use_fp32_reduce=False, is_zp_float=False"
    ),
    "ggml_moe_a8": (  # these of 0.22
        "X, W, sorted_token_ids, expert_ids, num_tokens_post_padded, quant_type, row, top_k, tokens"
    ),
    "ggml_moe_a8_vec": "X, W, topk_ids, top_k, quant_type, row, tokens",
    "ggml_moe_get_block_size": "quant_type",
    "moe_wna16_gemm": (
        "input, output, b_qweight, b_scales, b_qzeros, topk_weights, sorted_token_ids, experts_ids, "
        "num_tokens_post_pad, top_k, BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, bit"
    ),
}
RETURNED = {  # how many arrays; the others return None
    "allspark_repack_weight": 3,
    "allspark_w8a16_gemm": 1,
    "awq_gemm": 1,
    "cutlass_encode_and_reorder_int4b": 1,
    "cutlass_encode_and_reorder_int4b_grouped": 2,
    "cutlass_pack_scale_fp8": 1,
    "cutlass_w4a8_mm": 1,
    "cutlass_group_gemm_supported": 1,
    "cutlass_scaled_fp4_mm": 1,
    "cutlass_scaled_mm": 1,
    "cutlass_scaled_mm_azp": 1,
    "cutlass_scaled_mm_supports_block_fp8": 1,
    "cutlass_scaled_mm_supports_fp4": 1,
    "cutlass_scaled_mm_supports_fp8": 1,
    "moe_permute_unpermute_supported": 1,
    "dsv3_router_gemm": 1,
    "fp32_router_gemm": 1,
    "awq_marlin_repack": 1,
    "ggml_mul_mat_a8": 1,
    "ggml_mul_mat_vec_a8": 1,
    "gptq_gemm": 1,
    "gptq_marlin_repack": 1,
    "machete_mm": 1,
    "machete_prepack_B": 1,
    "machete_supported_schedules": 1,
    "marlin_gemm": 1,
    "marlin_int4_fp8_preprocess": 1,
    "ggml_moe_a8": 1,
    "ggml_moe_a8_vec": 1,
    "ggml_moe_get_block_size": 1,
    "moe_wna16_gemm": 1,
    "moe_wna16_marlin_gemm": 1,
    "awq_marlin_moe_repack": 1,
    "gptq_marlin_moe_repack": 1,
    "awq_dequantize": 1,
    "ggml_dequantize": 1,
    "hadacore_transform": 1,
    "mxfp4_experts_quant": 2,
    "mxfp4_experts_quant_supported": 1,
    "vocab_parallel_embedding": 1,
    "permute_cols": 1,
    "fused_qknorm_rope_cache": 3,
    "grouped_topk": 2,
    "shuffle_rows": 1,
    "rms_norm_dynamic_per_token_quant": 2,
    "rms_norm_per_block_quant": 2,
    "scaled_fp4_experts_quant": 2,
    "scaled_fp4_quant": 2,
    "scaled_fp8_quant": 2,
    "scaled_int8_quant": 3,
    "silu_and_mul_mxfp4_experts_quant": 2,
    "silu_and_mul_per_block_quant": 2,
    "silu_and_mul_scaled_fp4_experts_quant": 2,
}


def parameters(signature: inspect.Signature) -> list[inspect.Parameter]:
    return [p for p in signature.parameters.values() if p.kind is not p.KEYWORD_ONLY]


def test_every_name_is_recorded() -> None:
    assert sorted(ops.__all__) == sorted(SIGNATURES)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def recorded({SIGNATURES[name]}): pass", scope)
    wanted = parameters(inspect.signature(scope["recorded"]))
    found = parameters(inspect.signature(getattr(ops, name)))
    assert [p.name for p in found[: len(wanted)]] == [p.name for p in wanted]
    for ours, theirs in zip(found, wanted, strict=False):
        if theirs.default is not theirs.empty:
            assert ours.default == theirs.default
    assert all(p.default is not p.empty for p in found[len(wanted) :])  # nothing more has to be given


CODES = [np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn)]


@pytest.mark.parametrize("quant_dtype", [*CODES, np.int8, "float8_e4m3fn"], ids=str)
def test_per_token_quant(quant_dtype: Any) -> None:
    x, w = random((3, 5, 64), np.dtype(np.float16)), random((64,), np.dtype(np.float16), 1)
    codes, scales = ops.rms_norm_dynamic_per_token_quant(x, w, 1e-5, quant_dtype)
    assert codes.shape == x.shape
    assert scales.shape == (15, 1)
    wanted, wanted_scales = np.zeros_like(codes), np.zeros_like(scales)
    pykv.rms_norm_dynamic_per_token_quant(wanted, x, w, wanted_scales, 1e-5)
    np.testing.assert_array_equal(codes.view(np.int8), wanted.view(np.int8))
    np.testing.assert_array_equal(scales, wanted_scales)


@pytest.mark.parametrize(
    ("transposed", "alignment", "strides"), [(False, 0, (2, 1)), (True, 0, (1, 7)), (True, 4, (1, 8))]
)
def test_per_block_quant(transposed: bool, alignment: int, strides: tuple[int, int]) -> None:
    x, w = random((7, 128), np.dtype(np.float16)), random((128,), np.dtype(np.float16), 1)
    codes, scales = ops.rms_norm_per_block_quant(x, w, 1e-5, CODES[0], [1, 64], None, None, transposed, alignment)
    assert tuple(s // 4 for s in scales.strides) == strides
    wanted, wanted_scales = np.zeros_like(codes), np.zeros((7, 2), np.float32)
    pykv.rms_norm_per_block_quant(wanted, x, w, wanted_scales, 1e-5, None, None, 64)
    np.testing.assert_array_equal(codes, wanted)
    np.testing.assert_array_equal(scales, wanted_scales)
    if alignment:
        return
    x = random((7, 256), np.dtype(np.float16))
    codes, scales = ops.silu_and_mul_per_block_quant(x, 64, CODES[0], None, transposed)
    assert tuple(s // 4 for s in scales.strides) == strides
    pykv.silu_and_mul_per_block_quant(wanted, x, wanted_scales, 64)
    np.testing.assert_array_equal(codes, wanted)
    np.testing.assert_array_equal(scales, wanted_scales)


def test_dtypes_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x, w = torch.randn(7, 64), torch.ones(64)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        codes, scales = ops.rms_norm_dynamic_per_token_quant(x, w, 1e-5, dtype)
        assert (codes.dtype, scales.dtype, scales.shape) == (dtype, torch.float32, (7, 1))


def test_fused_qknorm_rope_cache() -> None:
    qkv = random((5, 4 * 64), np.dtype(np.float16))
    weights = [random((64,), np.dtype(np.float16), seed) for seed in (1, 2)]
    table = random((9, 64), np.dtype(np.float16), 3)
    given = (np.arange(5), np.arange(5))
    caches = [[np.zeros((2, 4, 1, 64), np.float16) for _ in range(2)] for _ in range(2)]
    found = ops.fused_qknorm_rope_cache(qkv, *weights, table, *given, *caches[0], 2, 1, 64, 64, 1e-6, 1.0)
    assert [x.shape for x in found] == [(5, 128), (5, 64), (5, 64)]
    wanted = [np.zeros_like(x) for x in found]
    pykv.fused_qknorm_rope_cache(
        *wanted, qkv, *weights, table[:, :32], table[:, 32:], *given, *caches[1], 64, 2, 1, 32, 1e-6, 1.0
    )
    for ours, theirs in zip((*found, *caches[0]), (*wanted, *caches[1]), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_experts() -> None:
    logits = random((5, 16), np.dtype(np.float32))
    weights, ids = ops.grouped_topk(logits, 4, 2, 3, True, 2.5, np.zeros(16, np.float32), 1)
    assert (weights.shape, weights.dtype, ids.shape, ids.dtype) == ((5, 3), np.float32, (5, 3), np.int32)
    np.testing.assert_allclose(weights.sum(1), 2.5, rtol=1e-6)
    found, table = np.zeros((5, 3), np.int32), np.arange(12, dtype=np.int32).reshape(4, 3)
    ops.topk_hash_softplus_sqrt(weights, found, None, logits, True, 1.0, None, np.array([3, 0, 1, 2, 3]), table)
    np.testing.assert_array_equal(found, table[[3, 0, 1, 2, 3]])
    images = np.where(np.arange(16) < 3, 9, 0).astype(np.float32)
    ops.topk_hash_softplus_sqrt(
        weights, found, None, logits, input_tokens=np.arange(5), bias_vl=images, image_sentinel_lo=1
    )
    np.testing.assert_array_equal(np.sort(found[1:]), [[0, 1, 2]] * 4)
    rows = ops.shuffle_rows(logits, np.array([4, 0, -1]))
    np.testing.assert_array_equal(rows, np.stack([logits[4], logits[0], 0 * logits[0]]))


@pytest.mark.parametrize("name", sorted(set(SIGNATURES) - set(RETURNED)))
def test_the_others_return_nothing(name: str) -> None:
    assert inspect.signature(getattr(ops, name)).return_annotation in (None, "None")


def test_dequantised_weights() -> None:
    blocks = np.random.default_rng(0).integers(0, 256, (3, 36), dtype=np.uint8)
    wanted = np.zeros((3, 64), np.float32)
    pykv.ggml_dequantize(wanted, blocks, 2)
    weights = ops.ggml_dequantize(blocks, 2, 3, 64, np.float32)
    np.testing.assert_array_equal(weights, wanted)
    assert ops.ggml_dequantize(blocks, 2, 3, 64, None).dtype == np.float16
    codes = blocks[:, :32].reshape(12, 8).view(np.int32)
    scales = random((2, 16), np.dtype(np.float16))
    weights = ops.awq_dequantize(codes, scales, codes[:2], 0, 0, 0)
    wanted = np.zeros((12, 16), np.float16)
    pykv.awq_dequantize(wanted, codes, scales, codes[:2])
    np.testing.assert_array_equal(weights, wanted)


def test_rotated_and_permuted() -> None:
    x = random((3, 16), np.dtype(np.float16))
    turned = ops.hadacore_transform(x, inplace=False)
    assert turned is not x
    perm = np.arange(16)[::-1].copy()
    np.testing.assert_array_equal(ops.permute_cols(x, perm), x[:, ::-1])
    assert ops.hadacore_transform(x) is x
    np.testing.assert_array_equal(x, turned)


def test_top_k_by_the_names_of_vllm() -> None:
    x = random((6, 500), np.dtype(np.float32))
    lens = np.array([400, 1, 30], np.int32)
    ends = np.array([399, 400, 0, 1, 29, 30], np.int32)
    wanted = np.zeros((6, 16), np.int32)
    pykv.top_k_per_row(wanted, x, 16, row_ends=ends)
    found = np.zeros((5, 8, 16), np.int32)
    ops.top_k_per_row_decode(x, 2, lens, found[0], 6, 500, 1, 16)
    ops.top_k_per_row_decode(x, 2, ends.reshape(3, 2), found[1], 6, 500, 1, 16)
    ops.top_k_per_row_prefill(x, np.zeros(6, np.int32), ends, found[2], 6, 500, 1, 16)
    ops.persistent_topk(x, ends, found[3][:6], np.zeros(64, np.uint8), 16, 400)
    ops.cooperative_topk(x, ends.reshape(3, 2), found[4][:6], np.zeros(64, np.uint8), 16, 400)
    for one in found:
        np.testing.assert_array_equal(one[:6], wanted)
    mask = x > 1
    penalised = x.copy()
    ops.apply_repetition_penalties(penalised, mask, mask, np.full(6, 2, np.float32))
    np.testing.assert_array_equal(penalised, np.where(mask, x / 2, x))


def test_rows_of_all_shards_are_the_embedding() -> None:
    """Ids of other shards are as right as those of this one, wherever they lie."""
    vocabulary, added, ids = 100, 20, np.array([0, 5, 49, 50, 99, 100, 119, 110])
    table = random((vocabulary + added, 16), np.dtype(np.float16))
    total = np.zeros((8, 16), np.float16)
    for rank in range(2):
        first, then = slice(50 * rank, 50 * rank + 50), slice(100 + 10 * rank, 110 + 10 * rank)
        weight = np.concatenate([table[first], np.ones((14, 16), np.float16), table[then]])
        total += ops.vocab_parallel_embedding(ids, weight, first.start, first.stop, 14, then.start, then.stop)
    np.testing.assert_array_equal(total, table[ids])
    with pytest.raises(ValueError, match="ids: -1 is out of range"):
        ops.vocab_parallel_embedding(np.array([-1]), table, 0, 100, 0, 100, 120)


def same(found: Any, *wanted: Any) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


def test_int8_codes() -> None:
    x = random((2, 3, 40), np.dtype(np.float16))
    codes, scales, azp = np.zeros(x.shape, np.int8), np.zeros((6, 1), np.float32), np.zeros((6, 1), np.int32)
    pykv.dynamic_scaled_int8_quant(codes, x, scales, azp)
    same(ops.scaled_int8_quant(x, symmetric=False), codes, scales, azp)
    pykv.dynamic_scaled_int8_quant(codes, x, scales)
    same(ops.scaled_int8_quant(np.asfortranarray(x))[:2], codes, scales)
    found = ops.scaled_int8_quant(x)
    same(found[:2], codes, scales)
    assert found[2] is None
    pykv.static_scaled_int8_quant(codes, x, 0.02)
    same(ops.scaled_int8_quant(x, 0.02)[:1], codes)
    zero = np.array([3], np.int32)
    pykv.static_scaled_int8_quant(codes, x, 0.02, zero)
    found = ops.scaled_int8_quant(x, 0.02, zero, False)
    same(found[:1], codes)
    assert found[1:] == (0.02, zero)
    with pytest.raises(ValueError, match="azp: must be given where symmetric is False"):
        ops.scaled_int8_quant(x, 0.02, zero)


def test_fp8_codes() -> None:
    x = random((3, 40), np.dtype(np.float16))
    codes, scale, scales = np.zeros(x.shape, CODES[1]), np.zeros(1, np.float32), np.zeros((3, 1), np.float32)
    pykv.dynamic_scaled_fp8_quant(codes, x, scale)
    same(ops.scaled_fp8_quant(x), codes, scale)
    same(ops.scaled_fp8_quant(x, scale), codes, scale)
    found = ops.scaled_fp8_quant(x, output=np.zeros_like(codes))
    same(found, codes, scale)
    pykv.dynamic_per_token_scaled_fp8_quant(codes, x, scales, 1.5)
    found = ops.scaled_fp8_quant(x, None, 5, 1.5, True)
    assert [f.shape for f in found] == [(5, 40), (5, 1)]
    same([f[:3] for f in found], codes, scales)
    pykv.static_scaled_fp8_quant(codes, x, scales[:, 0], 1, -1)
    same(ops.scaled_fp8_quant(x, scales[:, 0], group_shape=(1, -1))[:1], codes)
    with pytest.raises(ValueError, match="input: must have 2 dimensions"):
        ops.scaled_fp8_quant(x[0])
    with pytest.raises(ValueError, match="output: must not be given"):
        ops.scaled_fp8_quant(x, None, 5, output=codes)


def test_fp4_codes() -> None:
    x = random((2, 3, 32), np.dtype(np.float16))
    codes, scales = np.zeros((6, 32), np.uint8), np.zeros((128, 4), CODES[1])
    pykv.scaled_fp4_quant(codes, scales, x.reshape(6, 32), 7.0)
    same(ops.scaled_fp4_quant(x, 7.0, padded_n=64), codes, scales)
    linear = np.zeros((6, 2), CODES[1])
    pykv.scaled_fp4_quant(codes[:, :16], linear, x.reshape(6, 32), 7.0, False)
    same(ops.scaled_fp4_quant(x, 7.0, False), codes[:, :16].copy(), linear)
    for swizzled in (True, False):
        assert [a.shape for a in ops.scaled_fp4_quant(x[:0], 7.0, swizzled)] == [(0, 16), (0, 4 if swizzled else 2)]
    with pytest.raises(ValueError, match="padded_n: must be a multiple of 16 and at least 32, got 24"):
        ops.scaled_fp4_quant(x, 7.0, padded_n=24)
    with pytest.raises(ValueError, match="input: the last dimension must be a multiple of 16, got 24"):
        ops.scaled_fp4_quant(x[..., :24], 7.0)
    few = np.zeros((8, 4), CODES[1])
    pykv.scaled_fp4_quant(codes[:, :16], few, x.reshape(6, 32), 7.0, tile_rows=8)
    same(ops.scaled_fp4_quant(x, 7.0, backend="trtllm"), codes[:, :16].copy(), few)
    many = random((33, 32), np.dtype(np.float16))  # too many rows for such tiles
    same(ops.scaled_fp4_quant(many, 7.0, backend="trtllm"), *ops.scaled_fp4_quant(many, 7.0))


@pytest.mark.parametrize("gated", [False, True])
def test_codes_of_experts(gated: bool) -> None:
    x = random((6, 64 * (1 + gated)), np.dtype(np.float16))
    first, scales_first = np.array([0, 2, 2, 6], np.int32), np.array([0, 128, 128, 256], np.int32)
    g = np.array([3, 4, 5], np.float32)
    codes, scales = np.zeros((6, 32), np.uint8), np.zeros((512, 4), CODES[1])
    name = "silu_and_mul_" * gated + "scaled_fp4_experts_quant"
    getattr(pykv, name)(codes, scales, x, g, first, scales_first)
    found = getattr(ops, name)(x, g, first, scales_first, 2)
    same([found[0], found[1][:256]], codes, scales[:256])
    name = "silu_and_mul_" * gated + "mxfp4_experts_quant"
    getattr(pykv, name)(codes, scales.view(np.uint8), x, first, scales_first)
    found = getattr(ops, name)(x, first, scales_first, 3, 2)
    same([found[0], found[1][:256]], codes, scales[:256].view(np.uint8))


def test_names_of_dtypes_and_empty_shards() -> None:
    words, scales = np.zeros((16, 64), np.int32), np.ones((1, 64), np.float16)
    x = random((2, 128), np.dtype(np.float16))
    for name in (np.float16, np.dtype(np.float16), "float16"):
        for schedule in ops.machete_supported_schedules(np.float16, "uint4b8", np.float16):
            out = ops.machete_mm(x, words, "uint4b8", name, scales, schedule=schedule)
            np.testing.assert_allclose(
                out, -8 * x.astype(np.float64).sum(1, keepdims=True).repeat(64, 1), rtol=2e-3, atol=1e-3
            )
    codes, one = np.zeros((16, 16), CODES[1]), np.ones(1, np.float32)
    for wrong in ("float61", None, np.float64):
        with pytest.raises(TypeError, match=r"out_dtype: must be one of float32, float16, .*, got"):
            ops.cutlass_scaled_mm(codes, codes.T, one, one, wrong)
    weight = random((8, 16), np.dtype(np.float16))
    rows = ops.vocab_parallel_embedding(np.array([3, 7, 10, 11]), weight, 2, 6, 2, 10, 12)
    np.testing.assert_array_equal(rows, [weight[1], 0 * weight[0], weight[6], weight[7]])
    assert ops.vocab_parallel_embedding(np.zeros(0, np.int32), weight, 2, 6, 2, 10, 12).shape == (0, 16)
    logits = ops.fp32_router_gemm(random((0, 16), np.dtype(ml_dtypes.bfloat16)), random((4, 16), np.dtype(np.float32)))
    assert (logits.shape, logits.dtype) == ((0, 4), np.float32)
