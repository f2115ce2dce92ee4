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
    "apply_repetition_penalties": "logits, prompt_mask, output_mask, repetition_penalties",
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
    "cp_gather_cache": "src_cache, dst, block_table, cu_seq_lens, batch_size, seq_starts=None",
    "cp_gather_indexer_k_quant_cache": "kv_cache, dst_k, dst_scale, block_table, cu_seq_lens",
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
    "indexer_k_quant_and_cache": "k, kv_cache, slot_mapping, quant_block_size, kv_cache_dtype",
    "merge_attn_states": (
        "output, prefix_output, prefix_lse, suffix_output, suffix_lse, output_lse=None, "
        "prefill_tokens_with_context=None, output_scale=None"
    ),
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
    "silu_and_mul_per_block_quant": "input, group_size, quant_dtype, scale_ub=None, is_scale_transposed=False",
    "swap_blocks": "src, dst, block_size_in_bytes, block_mapping",
    "swap_blocks_batch": "src_ptrs, dst_ptrs, sizes, is_src_access_order_any=False",
    "top_k_per_row_decode": "logits, next_n, seq_lens, indices, numRows, stride0, stride1, topK",
    "top_k_per_row_prefill": "logits, rowStarts, rowEnds, indices, numRows, stride0, stride1, topK",
}
RETURNED = {  # how many arrays; the others return None
    "fused_qknorm_rope_cache": 3,
    "rms_norm_dynamic_per_token_quant": 2,
    "rms_norm_per_block_quant": 2,
    "silu_and_mul_per_block_quant": 2,
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


@pytest.mark.parametrize("name", sorted(set(SIGNATURES) - set(RETURNED)))
def test_the_others_return_nothing(name: str) -> None:
    assert inspect.signature(getattr(ops, name)).return_annotation in (None, "None")


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
