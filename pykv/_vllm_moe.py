"""The products with packed weights of experts of ``vllm._custom_ops``, for :mod:`pykv.vllm`.

The weights are packed for :func:`pykv.fused_moe_gemm` once (``_vllm_packed.py``).
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

import pykv
from pykv._libraries import empty_beside, spec_of
from pykv._types import Array
from pykv._vllm_gemm import through_bfloat16
from pykv._vllm_packed import packed_once
from pykv.gemm import pack_gguf, stack_packed
from pykv.packed_gguf import GGUF_TYPES
from pykv.packed_weight import Factor, Host, PackedWeight, checked, integers, plain_scales, zero_points

_BLOCK: Final = 8  # of ggml_moe_a8


def moe_wna16_gemm(
    input: Array,
    output: Array,
    b_qweight: Array,
    b_scales: Array,
    b_qzeros: Array | None,
    topk_weights: Array | None,
    sorted_token_ids: Array,
    experts_ids: Array,
    num_tokens_post_pad: Array,
    top_k: int,
    BLOCK_SIZE_M: int,
    BLOCK_SIZE_N: int,
    BLOCK_SIZE_K: int,
    bit: int,
) -> Any:
    """:func:`pykv.fused_moe_gemm` of weights of 4 or 8 bits; returns ``output``, with zeros where a pair has no expert.

    The last two block sizes are ignored, and sums are fp32 and in one order.
    """

    def pack() -> PackedWeight:
        if bit not in (4, 8):
            raise ValueError(f"bit: must be 4 or 8, got {bit}")
        weights = checked("b_qweight", b_qweight, ["uint8"], (None, None, None))
        experts, n, width = weights.shape
        k = width * 8 // bit
        scales, all_zeros = plain_scales("b_scales", b_scales, (experts, n, None)), None
        groups = scales.values.shape[2]
        if k and (not groups or k % groups):
            raise ValueError(f"b_scales: its {groups} groups must divide {k} columns of b_qweight")
        if b_qzeros is not None:
            all_zeros = checked("b_qzeros", b_qzeros, ["uint8"], (experts, n * bit // 8, groups))

        def expert(e: int, octets: Host) -> PackedWeight:
            codes = octets if bit == 8 else np.stack([octets & 15, octets >> 4], -1).reshape(len(octets), -1)
            factor = Factor(scales.kind, scales.values[e])
            zeros = None
            if all_zeros is not None:
                z = all_zeros[e]
                if bit == 4:
                    z = np.stack([z & 15, z >> 4], 1).reshape(-1, z.shape[-1])
                zeros = zero_points(z.astype(np.int64), bit, factor)
            return integers(codes, factor, zeros, max(1, k // max(1, groups)), bit)

        return stack_packed([expert(e, octets) for e, octets in enumerate(weights)])

    w = packed_once(b_qweight, (b_scales, b_qzeros), (bit,), pack)
    target: Any = output
    target[...] = 0
    rows = target.reshape(-1, w.shape[0])
    maps = (sorted_token_ids, experts_ids, num_tokens_post_pad)
    pykv.fused_moe_gemm(rows, input, w.data, topk_weights, *maps, top_k, BLOCK_SIZE_M, None, w.format)
    return output


def ggml_moe_get_block_size(quant_type: int) -> int:
    """What :func:`ggml_moe_a8` wants pairs to be aligned to; 0 for weights that it does not take."""
    return _BLOCK if quant_type in GGUF_TYPES else 0


def ggml_moe_a8(
    X: Array,
    W: Array,
    sorted_token_ids: Array,
    expert_ids: Array,
    num_tokens_post_padded: Array,
    quant_type: int,
    row: int,
    top_k: int,
    tokens: int,
) -> Any:
    """:func:`pykv.fused_moe_gemm` of weights of GGUF, as 0.22 had it: ``[tokens * top_k, row]``, zeros for no expert.

    Activations keep their 16 bits; those of float32 are rounded to bfloat16, and the result is float32 again.
    """

    def pack() -> PackedWeight:
        experts = checked("W", W, ["uint8"], (None, row, None))
        return stack_packed([pack_gguf(blocks, quant_type) for blocks in experts])

    def multiply(x: Any) -> Any:
        w = packed_once(W, (), (quant_type, row), pack)
        out = empty_beside(x, (tokens * top_k, row), spec_of(x).dtype)
        out[...] = 0
        maps = (sorted_token_ids, expert_ids, num_tokens_post_padded)
        pykv.fused_moe_gemm(out, x, w.data, None, *maps, top_k, _BLOCK, None, w.format)
        return out

    return through_bfloat16(multiply, X)


def ggml_moe_a8_vec(X: Array, W: Array, topk_ids: Array, top_k: int, quant_type: int, row: int, tokens: int) -> Any:
    """The same by the experts of each row."""
    pairs, experts = tokens * top_k, spec_of(W).shape[0]
    capacity = pairs + min(pairs, experts) * (_BLOCK - 1)
    places, blocks, taken = (empty_beside(X, (n,), "int32") for n in (capacity, capacity // _BLOCK, 1))
    ids: Any = topk_ids
    pykv.moe_align_block_size(ids.reshape(tokens, top_k), experts, _BLOCK, places, blocks, taken)
    return ggml_moe_a8(X, W, places, blocks, taken, quant_type, row, top_k, tokens)
