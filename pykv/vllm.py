"""The functions of ``vllm._custom_ops`` 0.33 that pykv has: ``from pykv import vllm as ops``.

Names, order, defaults and returns are those there; what is allocated there is allocated here, in the library of the
first array (NumPy, CuPy or torch).  Most are pykv's own operations, which take ``stream=`` besides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pykv
from pykv import (
    concat_and_cache_mla,
    concat_and_cache_mla_grouped,
    concat_and_cache_mla_rope_fused,
    concat_mla_q,
    convert_fp8,
    cp_gather_and_upconvert_fp8_kv_cache,
    cp_gather_and_upconvert_nvfp4_kv_cache,
    cp_gather_cache,
    cp_gather_indexer_k_quant_cache,
    fused_add_rms_norm,
    gather_and_maybe_dequant_cache,
    get_cutlass_batched_moe_mm_data,
    get_cutlass_moe_mm_data,
    get_cutlass_moe_mm_problem_sizes_from_expert_offsets,
    indexer_k_quant_and_cache,
    merge_attn_states,
    moe_align_block_size,
    moe_lora_align_block_size,
    moe_sum,
    mxfp8_experts_quant,
    reshape_and_cache,
    reshape_and_cache_flash,
    rms_norm,
    rotary_embedding,
    swap_blocks,
    swap_blocks_batch,
    topk_sigmoid,
    topk_softmax,
)
from pykv._libraries import empty_beside, spec_of
from pykv._types import Array, ScalarOrArray
from pykv._vllm_gemm import (
    allspark_repack_weight,
    allspark_w8a16_gemm,
    awq_gemm,
    ggml_mul_mat_a8,
    ggml_mul_mat_vec_a8,
    gptq_gemm,
    gptq_shuffle,
    machete_mm,
    machete_prepack_B,
    machete_supported_schedules,
)
from pykv._vllm_marlin import (
    awq_marlin_moe_repack,
    awq_marlin_repack,
    gptq_marlin_moe_repack,
    gptq_marlin_repack,
    marlin_gemm,
    marlin_int4_fp8_preprocess,
    moe_wna16_marlin_gemm,
)
from pykv._vllm_moe import ggml_moe_a8, ggml_moe_a8_vec, ggml_moe_get_block_size, moe_wna16_gemm
from pykv._vllm_narrow import (
    cutlass_encode_and_reorder_int4b,
    cutlass_encode_and_reorder_int4b_grouped,
    cutlass_fp4_moe_mm,
    cutlass_mxfp4_moe_mm,
    cutlass_pack_scale_fp8,
    cutlass_w4a8_mm,
    cutlass_w4a8_moe_mm,
)
from pykv._vllm_quantisers import (
    mxfp4_experts_quant,
    scaled_fp4_experts_quant,
    scaled_fp4_quant,
    scaled_fp8_quant,
    scaled_int8_quant,
    silu_and_mul_mxfp4_experts_quant,
    silu_and_mul_scaled_fp4_experts_quant,
)
from pykv._vllm_sampling import (
    apply_repetition_penalties,
    cooperative_topk,
    fp32_router_gemm,
    persistent_topk,
    top_k_per_row_decode,
    top_k_per_row_prefill,
    vocab_parallel_embedding,
)

__all__ = [
    "allspark_repack_weight",
    "allspark_w8a16_gemm",
    "apply_repetition_penalties",
    "apply_repetition_penalties_cuda",
    "awq_dequantize",
    "awq_gemm",
    "awq_marlin_moe_repack",
    "awq_marlin_repack",
    "batched_moe_align_block_size",
    "concat_and_cache_mla",
    "concat_and_cache_mla_grouped",
    "concat_and_cache_mla_rope_fused",
    "concat_mla_q",
    "convert_fp8",
    "cooperative_topk",
    "cp_gather_and_upconvert_fp8_kv_cache",
    "cp_gather_and_upconvert_nvfp4_kv_cache",
    "cp_gather_cache",
    "cp_gather_indexer_k_quant_cache",
    "cutlass_encode_and_reorder_int4b",
    "cutlass_encode_and_reorder_int4b_grouped",
    "cutlass_fp4_moe_mm",
    "cutlass_group_gemm_supported",
    "cutlass_moe_mm",
    "cutlass_mxfp4_moe_mm",
    "cutlass_pack_scale_fp8",
    "cutlass_scaled_fp4_mm",
    "cutlass_scaled_mm",
    "cutlass_scaled_mm_azp",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_scaled_mm_supports_fp4",
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_w4a8_mm",
    "cutlass_w4a8_moe_mm",
    "dsv3_fused_a_gemm",
    "dsv3_router_gemm",
    "fp8_gemm_nt",
    "fp8_m_grouped_gemm_nt_masked",
    "fp32_router_gemm",
    "fused_add_rms_norm",
    "fused_qk_norm_rope",
    "fused_qknorm_rope_cache",
    "gather_and_maybe_dequant_cache",
    "get_cutlass_batched_moe_mm_data",
    "get_cutlass_moe_mm_data",
    "get_cutlass_moe_mm_problem_sizes_from_expert_offsets",
    "ggml_dequantize",
    "ggml_moe_a8",
    "ggml_moe_a8_vec",
    "ggml_moe_get_block_size",
    "ggml_mul_mat_a8",
    "ggml_mul_mat_vec_a8",
    "gptq_gemm",
    "gptq_marlin_moe_repack",
    "gptq_marlin_repack",
    "gptq_shuffle",
    "grouped_topk",
    "hadacore_transform",
    "indexer_k_quant_and_cache",
    "m_grouped_fp8_gemm_nt_contiguous",
    "machete_mm",
    "machete_prepack_B",
    "machete_supported_schedules",
    "marlin_gemm",
    "marlin_int4_fp8_preprocess",
    "merge_attn_states",
    "moe_align_block_size",
    "moe_lora_align_block_size",
    "moe_permute_unpermute_supported",
    "moe_sum",
    "moe_wna16_gemm",
    "moe_wna16_marlin_gemm",
    "mxfp4_experts_quant",
    "mxfp4_experts_quant_supported",
    "mxfp8_experts_quant",
    "permute_cols",
    "persistent_topk",
    "reshape_and_cache",
    "reshape_and_cache_flash",
    "rms_norm",
    "rms_norm_dynamic_per_token_quant",
    "rms_norm_per_block_quant",
    "rotary_embedding",
    "scaled_fp4_experts_quant",
    "scaled_fp4_quant",
    "scaled_fp8_quant",
    "scaled_int8_quant",
    "shuffle_rows",
    "silu_and_mul_mxfp4_experts_quant",
    "silu_and_mul_per_block_quant",
    "silu_and_mul_scaled_fp4_experts_quant",
    "swap_blocks",
    "swap_blocks_batch",
    "top_k_per_row_decode",
    "top_k_per_row_prefill",
    "topk_hash_softplus_sqrt",
    "topk_sigmoid",
    "topk_softmax",
    "vocab_parallel_embedding",
]


apply_repetition_penalties_cuda = apply_repetition_penalties


_RESULTS: Final = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")


def _name_of(argument: str, dtype: Any) -> str:
    """Of a dtype of any library, a scalar type or a string: ``torch.int8`` is ``int8``."""
    name = getattr(dtype, "__name__", None) or getattr(dtype, "name", None) or str(dtype)
    name = str(name).rpartition(".")[2]
    if name not in _RESULTS:
        raise TypeError(f"{argument}: must be one of {', '.join(_RESULTS)}, got {dtype!r}")
    return name


def _codes_and_scales(
    input: Any, width: int, quant_dtype: Any, groups: int, transposed: bool = False, tma_alignment: int = 0
) -> tuple[Any, Any]:
    """Of all rows of ``input``, not initialised.  Transposed scales lie in storage as ``[groups, rows]``."""
    *lead, _ = spec_of(input).shape
    codes = empty_beside(input, (*lead, width), _name_of("quant_dtype", quant_dtype))
    rows = 1
    for n in lead:
        rows *= n
    if not transposed:
        return codes, empty_beside(input, (rows, groups), "float32")
    padded = -(-rows // tma_alignment) * tma_alignment if tma_alignment else rows
    return codes, empty_beside(input, (groups, padded), "float32")[:, :rows].T


def awq_dequantize(qweight: Array, scales: Array, zeros: Array, split_k_iters: int, thx: int, thy: int) -> Any:
    """:func:`pykv.awq_dequantize`; returns the weights.  The last three arguments change no result."""
    (_, columns), dtype = spec_of(scales)
    out = empty_beside(qweight, (spec_of(qweight).shape[0], columns), dtype)
    pykv.awq_dequantize(out, qweight, scales, zeros)
    return out


def ggml_dequantize(W: Array, quant_type: int, m: int, n: int, dtype: Any = None) -> Any:
    """:func:`pykv.ggml_dequantize`, as 0.22 had it; returns ``[m, n]``, float16 by default."""
    out = empty_beside(W, (m, n), "float16" if dtype is None else _name_of("dtype", dtype))
    pykv.ggml_dequantize(out, W, quant_type)
    return out


def cutlass_scaled_mm(
    a: Any, b: Array, scale_a: ScalarOrArray, scale_b: ScalarOrArray, out_dtype: Any, bias: Array | None = None
) -> Any:
    """:func:`pykv.cutlass_scaled_mm`; returns ``[..., n]`` of ``out_dtype``.  Any ``k`` and ``n`` will do."""
    out, rows = _product(a, b, out_dtype)
    pykv.cutlass_scaled_mm(out, rows, b, scale_a, scale_b, bias)
    return out.reshape(*spec_of(a).shape[:-1], spec_of(b).shape[1])


def cutlass_scaled_mm_azp(
    a: Any,
    b: Array,
    scale_a: ScalarOrArray,
    scale_b: ScalarOrArray,
    out_dtype: Any,
    azp_adj: Array,
    azp: Array | None = None,
    bias: Array | None = None,
) -> Any:
    """:func:`pykv.cutlass_scaled_mm_azp`; returns ``[..., n]`` of ``out_dtype``."""
    out, rows = _product(a, b, out_dtype)
    pykv.cutlass_scaled_mm_azp(out, rows, b, scale_a, scale_b, azp_adj, azp, bias)
    return out.reshape(*spec_of(a).shape[:-1], spec_of(b).shape[1])


def _product(a: Any, b: Array, out_dtype: Any) -> tuple[Any, Any]:
    """Where it goes, with the leading dimensions of ``a`` as one."""
    rows = a.reshape(-1, a.shape[-1]) if a.ndim != 2 else a
    return empty_beside(a, (rows.shape[0], spec_of(b).shape[1]), _name_of("out_dtype", out_dtype)), rows


def cutlass_scaled_mm_supports_fp8(cuda_device_capability: int) -> bool:
    """Whether :func:`cutlass_scaled_mm` takes fp8 there: from 8.0 (80) on, where pykv's kernels run."""
    return cuda_device_capability >= 80


def cutlass_scaled_mm_supports_block_fp8(cuda_device_capability: int) -> bool:
    """The same, with scales of blocks."""
    return cuda_device_capability >= 80


def cutlass_scaled_mm_supports_fp4(cuda_device_capability: int) -> bool:
    """Whether :func:`cutlass_scaled_fp4_mm` runs there, by decoding: from 8.0 (80) on."""
    return cuda_device_capability >= 80


def cutlass_group_gemm_supported(cuda_device_capability: int) -> bool:
    """Whether :func:`cutlass_moe_mm` runs there: from 8.0 (80) on."""
    return cuda_device_capability >= 80


def mxfp4_experts_quant_supported(cuda_device_capability: int) -> bool:
    """Whether :func:`mxfp4_experts_quant` runs there: from 8.0 (80) on."""
    return cuda_device_capability >= 80


def moe_permute_unpermute_supported() -> bool:
    """Whether :func:`pykv.moe_permute` and :func:`pykv.moe_unpermute` are there: on every device."""
    return True


def cutlass_moe_mm(
    out_tensors: Array,
    a_tensors: Array,
    b_tensors: Array,
    a_scales: Any,
    b_scales: Any,
    expert_offsets: Array,
    problem_sizes: Array,
    a_strides: Array,
    b_strides: Array,
    c_strides: Array,
    per_act_token: bool,
    per_out_ch: bool,
) -> None:
    """:func:`pykv.grouped_scaled_mm`; strides are those of the arrays, and scales say themselves what they are of."""
    a, b = a_scales.reshape(-1), b_scales.reshape(spec_of(b_scales).shape[0], -1)
    pykv.grouped_scaled_mm(
        out_tensors, a_tensors, b_tensors, a, b, group_begins=expert_offsets, group_sizes=problem_sizes
    )


def fp8_gemm_nt(a: tuple[Array, Array], b: tuple[Any, Any], d: Array) -> None:
    """:func:`pykv.cutlass_scaled_mm` of matrices with their scales of blocks, ``b`` ``[n, k]``."""
    pykv.cutlass_scaled_mm(d, a[0], b[0].swapaxes(-1, -2), a[1], b[1].swapaxes(-1, -2))


def m_grouped_fp8_gemm_nt_contiguous(a: tuple[Array, Array], b: tuple[Any, Any], d: Array, m_indices: Array) -> None:
    """:func:`pykv.grouped_scaled_mm` of matrices with their scales of blocks, ``b`` ``[groups, n, k]``.

    Rows of ``a`` are in groups of multiples of 128.
    """
    w, scales = (x.swapaxes(-1, -2) for x in b)
    pykv.grouped_scaled_mm(d, a[0], w, a[1], scales, m_indices)


def fp8_m_grouped_gemm_nt_masked(
    a: tuple[Array, Array], b: tuple[Any, Any], d: Array, masked_m: Array, expected_m: int
) -> None:
    """The same of ``a`` ``[groups, num_rows, k]``, of which each group has its first ``masked_m`` rows."""
    w, scales = (x.swapaxes(-1, -2) for x in b)
    pykv.grouped_scaled_mm(d, a[0], w, a[1], scales, group_sizes=masked_m, expected_rows=expected_m)


def cutlass_scaled_fp4_mm(
    a: Array, b: Array, block_scale_a: Array, block_scale_b: Array, alpha: ScalarOrArray, out_dtype: Any
) -> Any:
    """:func:`pykv.cutlass_scaled_fp4_mm`; returns ``[num_rows, n]`` of ``out_dtype``."""
    out = empty_beside(a, (spec_of(a).shape[0], spec_of(b).shape[0]), _name_of("out_dtype", out_dtype))
    pykv.cutlass_scaled_fp4_mm(out, a, b, block_scale_a, block_scale_b, alpha)
    return out


def dsv3_fused_a_gemm(output: Array, mat_a: Array, mat_b: Array, enable_pdl: bool = False) -> None:
    """:func:`pykv.dsv3_fused_a_gemm`, of any sizes; ``enable_pdl`` changes no result."""
    pykv.dsv3_fused_a_gemm(output, mat_a, mat_b)


def dsv3_router_gemm(hidden_states: Array, router_weight: Array, output_dtype: Any) -> Any:
    """:func:`pykv.dsv3_router_gemm`, as 0.22 had it; returns ``[num_rows, num_experts]`` of ``output_dtype``."""
    shape = (spec_of(hidden_states).shape[0], spec_of(router_weight).shape[0])
    output = empty_beside(hidden_states, shape, _name_of("output_dtype", output_dtype))
    pykv.dsv3_router_gemm(output, hidden_states, router_weight)
    return output


def hadacore_transform(x: Array, inplace: bool = True) -> Any:
    """:func:`pykv.hadacore_transform`; returns ``x``, or a new array."""
    out = x if inplace else empty_beside(x, *spec_of(x))
    pykv.hadacore_transform(out, x)
    return out


def fused_qk_norm_rope(
    qkv: Array,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Array,
    k_weight: Array,
    cos_sin_cache: Array,
    is_neox: bool,
    position_ids: Array,
    forced_token_heads_per_warp: int = -1,
) -> None:
    """:func:`pykv.fused_qk_norm_rope`; ``forced_token_heads_per_warp`` is ignored: it changes no result."""
    pykv.fused_qk_norm_rope(
        qkv, num_heads_q, num_heads_k, num_heads_v, head_dim, eps, q_weight, k_weight, cos_sin_cache, is_neox,
        position_ids,
    )  # fmt: skip


def fused_qknorm_rope_cache(
    qkv: Array,
    q_weight: Array,
    k_weight: Array,
    cos_sin_cache: Array,
    positions: Array,
    slot_mapping: Array,
    key_cache: Array,
    value_cache: Array,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    eps: float,
    norm_weight_bias: float = 0.0,
    kv_cache_dtype: str = "auto",
    k_scale: ScalarOrArray | None = None,
    v_scale: ScalarOrArray | None = None,
) -> tuple[Any, Any, Any]:
    """:func:`pykv.fused_qknorm_rope_cache`; returns ``q_out``, ``k_out`` and ``v_out``."""
    (rows, _), dtype = spec_of(qkv)
    q, k, v = (empty_beside(qkv, (rows, n * head_dim), dtype) for n in (num_q_heads, num_kv_heads, num_kv_heads))
    table: Any = cos_sin_cache
    half = table.shape[1] // 2
    pykv.fused_qknorm_rope_cache(
        q, k, v, qkv, q_weight, k_weight, table[:, :half], table[:, half:], positions, slot_mapping, key_cache,
        value_cache, head_dim, num_q_heads, num_kv_heads, rotary_dim // 2, eps, norm_weight_bias, kv_cache_dtype,
        k_scale, v_scale,
    )  # fmt: skip
    return q, k, v


def permute_cols(a: Array, perm: Array) -> Any:
    """:func:`pykv.permute_cols`, as 0.22 had it; returns the new array."""
    out = empty_beside(a, *spec_of(a))
    pykv.permute_cols(out, a, perm)
    return out


def rms_norm_dynamic_per_token_quant(
    input: Array,
    weight: Array,
    epsilon: float,
    quant_dtype: Any,
    scale_ub: ScalarOrArray | None = None,
    residual: Array | None = None,
) -> tuple[Any, Any]:
    """:func:`pykv.rms_norm_dynamic_per_token_quant`; returns the codes and the scales ``[num_rows, 1]``."""
    codes, scales = _codes_and_scales(input, spec_of(input).shape[-1], quant_dtype, 1)
    pykv.rms_norm_dynamic_per_token_quant(codes, input, weight, scales, epsilon, scale_ub, residual)
    return codes, scales


def rms_norm_per_block_quant(
    input: Array,
    weight: Array,
    epsilon: float,
    quant_dtype: Any,
    group_size: Sequence[int],
    scale_ub: ScalarOrArray | None = None,
    residual: Array | None = None,
    is_scale_transposed: bool = False,
    tma_alignment: int = 0,
) -> tuple[Any, Any]:
    """:func:`pykv.rms_norm_per_block_quant` with groups of ``group_size[1]``; returns the codes and the scales.

    Where transposed, scales ``[num_rows, num_groups]`` have the strides 1 and ``num_rows``, this rounded up to a
    multiple of ``tma_alignment``.
    """
    size = group_size[1]
    width = spec_of(input).shape[-1]
    codes, scales = _codes_and_scales(input, width, quant_dtype, width // size, is_scale_transposed, tma_alignment)
    pykv.rms_norm_per_block_quant(
        codes, input, weight, scales, epsilon, scale_ub, residual, size, is_scale_transposed
    )  # fmt: skip
    return codes, scales


def silu_and_mul_per_block_quant(
    input: Array,
    group_size: int,
    quant_dtype: Any,
    scale_ub: ScalarOrArray | None = None,
    is_scale_transposed: bool = False,
) -> tuple[Any, Any]:
    """:func:`pykv.silu_and_mul_per_block_quant`; returns the codes and the scales ``[num_tokens, num_groups]``."""
    width = spec_of(input).shape[-1] // 2
    codes, scales = _codes_and_scales(input, width, quant_dtype, width // group_size, is_scale_transposed)
    pykv.silu_and_mul_per_block_quant(codes, input, scales, group_size, scale_ub, is_scale_transposed)
    return codes, scales


def grouped_topk(
    scores: Array,
    num_expert_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Array,
    scoring_func: int = 0,
) -> tuple[Any, Any]:
    """:func:`pykv.grouped_topk`; returns the weights and the ids ``[T, topk]``, int32."""
    shape = (spec_of(scores).shape[0], topk)
    weights, ids = empty_beside(scores, shape, "float32"), empty_beside(scores, shape, "int32")
    pykv.grouped_topk(
        weights, ids, scores, num_expert_group, topk_group, topk, renormalize, routed_scaling_factor, bias,
        scoring_func,
    )  # fmt: skip
    return weights, ids


def batched_moe_align_block_size(
    max_tokens_per_batch: int,
    block_size: int,
    expert_num_tokens: Array,
    sorted_ids: Array,
    expert_ids: Array,
    num_tokens_post_pad: Array,
) -> None:
    """:func:`pykv.batched_moe_align_block_size`."""
    pykv.batched_moe_align_block_size(
        max_tokens_per_batch, block_size, expert_num_tokens, sorted_ids, expert_ids, num_tokens_post_pad
    )  # fmt: skip


def shuffle_rows(input_tensor: Array, dst2src_map: Array) -> Any:
    """:func:`pykv.shuffle_rows`; returns the rows."""
    (_, width), dtype = spec_of(input_tensor)
    rows = empty_beside(input_tensor, (*spec_of(dst2src_map).shape, width), dtype)
    pykv.shuffle_rows(input_tensor, dst2src_map, rows)
    return rows


def topk_hash_softplus_sqrt(
    topk_weights: Array,
    topk_indices: Array,
    token_expert_indices: Array,
    gating_output: Array,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Array | None = None,
    input_tokens: Array | None = None,
    hash_indices_table: Array | None = None,
    is_padding: Array | None = None,
    bias_vl: Array | None = None,
    image_sentinel_lo: int = 0,
) -> None:
    """:func:`pykv.topk_softplus_sqrt`."""
    needs_ids = hash_indices_table is not None or bias_vl is not None
    pykv.topk_softplus_sqrt(
        topk_weights, topk_indices, token_expert_indices, gating_output, renormalize, routed_scaling_factor,
        e_score_correction_bias, input_tokens if needs_ids else None, hash_indices_table, is_padding, bias_vl,
        image_sentinel_lo,
    )  # fmt: skip
