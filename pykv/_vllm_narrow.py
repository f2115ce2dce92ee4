"""The products of activations of 8 and 4 bits with weights of 4 bits of ``vllm._custom_ops``, for :mod:`pykv.vllm`.

They are decoded for the products that there are.  A weight of W4A8 is decoded to fp8 once (``_vllm_packed.py``), which
takes a byte for each of its numbers besides; one of fp4 is packed.  Activations of fp4 are decoded at each call, to 16
bits, which hold them exactly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import pykv
from pykv._libraries import array_like, empty_beside, spec_of
from pykv._types import Array
from pykv._vllm_packed import made_once, packed_once
from pykv.gemm import bit_stream, pack_mxfp4, pack_nvfp4, stack_packed
from pykv.packed_weight import WORDS, Host, PackedWeight, an_array, checked, host


def cutlass_encode_and_reorder_int4b(b: Array) -> Any:
    """The weight ``[k / 8, n]`` as it is, for :func:`cutlass_w4a8_mm`; contiguous."""
    return array_like(np.ascontiguousarray(host(b)), "int32", b)


def cutlass_encode_and_reorder_int4b_grouped(b_tensors: Array) -> tuple[Any, Any]:
    """The weights ``[experts, n, k / 8]`` as they are, for :func:`cutlass_w4a8_moe_mm`, and zeros for ``b_strides``."""
    words = array_like(np.ascontiguousarray(host(b_tensors)), "int32", b_tensors)
    return words, array_like(np.zeros((spec_of(b_tensors).shape[0], 1), np.int32), "int32", b_tensors)


def cutlass_pack_scale_fp8(scales: Any) -> Any:
    """The scales of groups as they are; contiguous."""
    out = empty_beside(an_array("scales", scales), *spec_of(scales))
    out[...] = scales
    return out


def cutlass_w4a8_mm(
    a: Array,
    b_q: Array,
    b_group_scales: Array,
    b_group_size: int,
    b_channel_scales: Any,
    a_token_scales: Any,
    out_type: Any = None,
    maybe_schedule: str | None = None,
) -> Any:
    """:func:`pykv.cutlass_scaled_mm` of fp8 with ``fp8(code * group scale)``; bfloat16, or what ``out_type`` says.

    ``b_q`` is what :func:`cutlass_encode_and_reorder_int4b` returned, ``b_group_scales`` ``[k / b_group_size, n]`` what
    :func:`cutlass_pack_scale_fp8` did, groups of any size that divides ``k``.  ``maybe_schedule`` is ignored.
    """

    def decode() -> Any:
        words, scales = checked("b_q", b_q, WORDS, (None, None)), _octets(b_group_scales)
        return array_like(_to_fp8(words, scales, b_group_size).T, "uint8", b_q)

    weight: Any = made_once(b_q, (b_group_scales,), (b_group_size,), decode)
    name = "bfloat16" if out_type is None else str(getattr(out_type, "__name__", out_type)).rpartition(".")[2]
    out = empty_beside(a, (spec_of(a).shape[0], weight.shape[0]), name)
    given = (an_array("a_token_scales", a_token_scales), an_array("b_channel_scales", b_channel_scales))
    scales = tuple(array.reshape(-1) for array in given)
    pykv.cutlass_scaled_mm(out, a, weight.swapaxes(0, 1), *scales)
    return out


def cutlass_w4a8_moe_mm(
    out_tensors: Array,
    a_tensors: Array,
    b_tensors: Array,
    a_scales: Any,
    b_scales: Any,
    b_group_scales: Array,
    b_group_size: int,
    expert_offsets: Array,
    problem_sizes: Array,
    a_strides: Array,
    b_strides: Array,
    c_strides: Array,
    group_scale_strides: Array,
    maybe_schedule: str | None = None,
) -> None:
    """:func:`pykv.grouped_scaled_mm` of weights as :func:`cutlass_w4a8_mm` has them.

    ``b_tensors`` is what :func:`cutlass_encode_and_reorder_int4b_grouped` returned, ``b_group_scales``
    ``[experts, k / b_group_size, n]``.  Strides are those of the arrays.
    """

    def decode() -> Any:
        words = checked("b_tensors", b_tensors, WORDS, (None, None, None))
        scales = _octets(b_group_scales)
        if scales.shape[:1] != words.shape[:1]:
            raise ValueError(f"b_group_scales: must be of {words.shape[0]} experts, got shape {list(scales.shape)}")
        each = [_to_fp8(w.T, s, b_group_size).T for w, s in zip(words, scales, strict=True)]
        _, n, words_of_k = words.shape
        return array_like(np.stack(each) if each else np.empty((0, n, 8 * words_of_k), np.uint8), "uint8", b_tensors)

    weights: Any = made_once(b_tensors, (b_group_scales,), (b_group_size,), decode)
    a, b = a_scales.reshape(-1), b_scales.reshape(weights.shape[0], -1)
    pykv.grouped_scaled_mm(
        out_tensors, a_tensors, weights.swapaxes(1, 2), a, b, group_begins=expert_offsets, group_sizes=problem_sizes
    )


def cutlass_fp4_moe_mm(
    out_tensors: Array,
    a_tensors: Array,
    b_tensors: Array,
    a_scales: Any,
    b_scales: Array,
    alphas: Any,
    problem_sizes: Any,
    expert_offsets: Any,
    sf_offsets: Any,
) -> None:
    """:func:`pykv.fused_moe_gemm` of rows and weights of nvfp4, with the rows of each expert times its alpha.

    All scales are swizzled.  ``problem_sizes`` are ``(rows, n, k)``, and the rows of an expert begin at
    ``expert_offsets``, its scales at row ``sf_offsets``, a multiple of 128.
    """
    _multiply_fp4(
        (out_tensors, a_tensors, b_tensors, a_scales, b_scales), alphas, problem_sizes, expert_offsets, sf_offsets,
        16, pack_nvfp4, lambda x, codes, scales: pykv.nvfp4_dequantize(x, codes, scales, 1.0, False),
    )  # fmt: skip


def cutlass_mxfp4_moe_mm(
    out_tensors: Array,
    a_tensors: Array,
    b_tensors: Array,
    a_scales: Any,
    b_scales: Array,
    problem_sizes: Any,
    expert_offsets: Any,
    sf_offsets: Any,
) -> None:
    """The same of mxfp4, without alphas.  Where ``out_tensors`` is float16, rows are decoded to that."""
    _multiply_fp4(
        (out_tensors, a_tensors, b_tensors, a_scales, b_scales), None, problem_sizes, expert_offsets, sf_offsets,
        32, pack_mxfp4, lambda x, codes, scales: pykv.mxfp4_dequantize(x, codes, scales, False),
    )  # fmt: skip


def _octets(scales: Any) -> Host:
    return checked("b_group_scales", scales, ["float8_e4m3fn", "uint8", "int8"], None).view(np.uint8)


def _to_fp8(words: Host, scales: Host, group_size: int) -> Host:
    """Signed codes ``[k / 8, n]``, eight in a word, times their scales, as bytes of e4m3: ``[k, n]``."""
    codes = bit_stream(words, 4)
    k, n = codes.shape
    if group_size <= 0 or k % group_size or scales.shape != (k // group_size, n):
        wanted = f"[k / b_group_size, n] = [{k} / {group_size}, {n}]"
        raise ValueError(f"b_group_scales: must have shape {wanted}, got {list(scales.shape)}")
    rows: Host = _products()[codes, np.repeat(scales, group_size, axis=0)]
    return rows


def _products() -> Host:
    """Bytes of e4m3: of each code of four bits and each scale."""
    scales, products = np.empty(256, np.float32), np.empty((16, 256), np.uint8)
    pykv.convert_fp8(scales, np.arange(256, dtype=np.uint8))
    signed = (np.arange(16) ^ 8) - 8
    pykv.convert_fp8(products, signed.astype(np.float32)[:, None] * scales)
    return products


def _linear(tiles: Any, groups: int) -> Any:
    """Of swizzled scales, those of row 32 a + b of a tile of 128 rows at place (b, a), those of each row."""
    across = -(-groups // 4)
    parts = tiles.reshape(-1, across, 32, 4, 4).swapaxes(1, 3)
    return parts.reshape(-1, across * 4)[:, :groups]


def _multiply_fp4(
    arrays: tuple[Any, Any, Any, Any, Any],
    alphas: Any,
    problem_sizes: Any,
    expert_offsets: Any,
    sf_offsets: Any,
    block: int,
    pack: Callable[[Host, Host], PackedWeight],
    decode: Callable[[Any, Any, Any], None],
) -> None:
    out, a, b, a_scales, b_scales = arrays
    (rows, half), (experts, n, _) = spec_of(a).shape, spec_of(b).shape
    groups = 2 * half // block

    def packed() -> PackedWeight:
        codes, tiles = host(b), host(b_scales).view(np.uint8).reshape(experts, -1)
        return stack_packed([pack(codes[e], _linear(tiles[e], groups)[:n]) for e in range(experts)])

    if rows == 0 or experts == 0:
        return
    w = packed_once(b, (b_scales,), (block,), packed)
    ids, scale_rows = _of_rows(a, rows, experts, problem_sizes, expert_offsets, sf_offsets)
    scales = empty_beside(a, (rows, groups), spec_of(a_scales).dtype)
    pykv.shuffle_rows(_linear(a_scales, groups), scale_rows, scales)
    x = empty_beside(out, (rows, 2 * half), spec_of(out).dtype)
    decode(x, a, scales)
    size = 64 if rows > 32 * experts else 16
    most = -(-(rows + min(rows, experts) * (size - 1)) // size)
    places, blocks, taken = (empty_beside(a, (length,), "int32") for length in (most * size, most, 1))
    pykv.moe_align_block_size(ids, experts, size, places, blocks, taken)
    of_rows = None if alphas is None else alphas.reshape(-1)[ids.reshape(-1)]
    pykv.fused_moe_gemm(out, x, w.data, of_rows, places, blocks, taken, 1, size, None, w.format)


def _of_rows(
    like: Any, rows: int, experts: int, problem_sizes: Any, expert_offsets: Any, sf_offsets: Any
) -> tuple[Any, Any]:
    """Of each row its expert, ``[rows, 1]`` int32, ``-1`` for none, and the row of its scales, ``[rows]`` int32."""
    row = _counted(like, rows).reshape(rows, 1)
    begins = expert_offsets[:experts]
    inside = (row >= begins) & (row < begins + problem_sizes[:, 0])  # [rows, experts]
    ids, scale_rows = empty_beside(like, (rows, 1), "int32"), empty_beside(like, (rows,), "int32")
    ids[:, 0] = (inside * (_counted(like, experts) + 1)).sum(1) - 1
    scale_rows[...] = (inside * (row - begins + sf_offsets[:experts])).sum(1)
    return ids, scale_rows


def _counted(like: Any, length: int) -> Any:
    """0, 1, 2 and so on, made where ``like`` lies."""
    ones = empty_beside(like, (length,), "int64")
    ones[...] = 1
    return ones.cumsum(0) - 1
