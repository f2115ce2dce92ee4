"""The quantisers of ``vllm._custom_ops``: what :mod:`pykv.vllm` has of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pykv
from pykv._libraries import empty_beside, in_rows, spec_of
from pykv._types import Array, ScalarOrArray

FP8 = "float8_e4m3fn"


def _up_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def scaled_int8_quant(
    input: Array, scale: ScalarOrArray | None = None, azp: Array | None = None, symmetric: bool = True
) -> tuple[Any, Any, Any]:
    """:func:`pykv.static_scaled_int8_quant` where ``scale`` is given, else :func:`pykv.dynamic_scaled_int8_quant`.

    Returns the codes, the scale (``[num_rows, 1]`` where it was not given), and the zero points or ``None``.  Of
    ``input`` whose rows do not lie side by side a copy is made.
    """
    shape, _ = spec_of(input)
    codes, input = empty_beside(input, shape, "int8"), in_rows(input)
    if scale is not None:
        if symmetric != (azp is None):
            raise ValueError("azp: must be given where symmetric is False, and only there")
        pykv.static_scaled_int8_quant(codes, input, scale, azp)
        return codes, scale, azp
    rows = math.prod(shape[:-1])
    scales = empty_beside(input, (rows, 1), "float32")
    zero_points = None if symmetric else empty_beside(input, (rows, 1), "int32")
    pykv.dynamic_scaled_int8_quant(codes, input, scales, zero_points)
    return codes, scales, zero_points


def scaled_fp8_quant(
    input: Array,
    scale: ScalarOrArray | None = None,
    num_token_padding: int | None = None,
    scale_ub: ScalarOrArray | None = None,
    use_per_token_if_dynamic: bool = False,
    output: Array | None = None,
    group_shape: Sequence[int] | None = None,
) -> tuple[Any, Any]:
    """One of pykv's ``*_scaled_fp8_quant``: static where ``scale`` is given; returns the codes and the scale.

    ``input`` has two dimensions.  With ``num_token_padding`` codes and scales of rows have so many rows at least; those
    behind the input's are not written.
    """
    shape, _ = spec_of(input)
    if len(shape) != 2:
        raise ValueError(f"input: must have 2 dimensions, got shape {tuple(shape)}")
    rows = max(shape[0], num_token_padding or 0)
    if output is not None and num_token_padding is not None:
        raise ValueError("output: must not be given together with num_token_padding")
    codes: Any = empty_beside(input, (rows, shape[1]), FP8) if output is None else output
    written = codes[: shape[0]]
    if scale is not None:
        pykv.static_scaled_fp8_quant(written, input, scale, *(group_shape or (0, 0)))
        return codes, scale
    scales = empty_beside(input, (rows, 1) if use_per_token_if_dynamic else (1,), "float32")
    if use_per_token_if_dynamic:
        pykv.dynamic_per_token_scaled_fp8_quant(written, input, scales[: shape[0]], scale_ub)
    else:
        pykv.dynamic_scaled_fp8_quant(written, input, scales)
    return codes, scales


def scaled_fp4_quant(
    input: Array,
    input_global_scale: ScalarOrArray,
    is_sf_swizzled_layout: bool = True,
    backend: str = "none",
    padded_n: int | None = None,
) -> tuple[Any, Any]:
    """:func:`pykv.scaled_fp4_quant`; returns the codes ``[rows, n / 2]`` and the scales, leading dimensions being one.

    ``padded_n``: what ``n`` is enlarged to, with zeros.  For up to 32 rows a ``backend`` of TensorRT-LLM has scales
    in tiles of 8 rows, not of 128.
    """
    (*lead, n), _ = spec_of(input)
    rows, width = math.prod(lead), n if padded_n is None else padded_n
    if n % 16 != 0:
        raise ValueError(f"input: the last dimension must be a multiple of 16, got {n}")
    if width < n or width % 16 != 0:
        raise ValueError(f"padded_n: must be a multiple of 16 and at least {n}, got {width}")
    tile_rows = 8 if backend.startswith("trtllm") and rows <= 32 else 128
    codes = empty_beside(input, (*lead, width // 2), "uint8")
    if is_sf_swizzled_layout:
        scales = empty_beside(input, (_up_to(rows, tile_rows), _up_to(width // 16, 4)), FP8)
    else:
        scales = empty_beside(input, (*lead, width // 16), FP8)
    pykv.scaled_fp4_quant(codes, scales, input, input_global_scale, is_sf_swizzled_layout, tile_rows=tile_rows)
    return codes.reshape(rows, width // 2), scales if is_sf_swizzled_layout else scales.reshape(rows, width // 16)


def _of_experts(input: Array, experts: int, halves: int, block: int, dtype: str) -> tuple[Any, Any]:
    """Codes and scales of rows of experts: each expert's scales begin at a multiple of 128 rows."""
    (rows, width), _ = spec_of(input)
    width //= halves
    scale_rows = _up_to(rows + 127 * min(experts, rows), 128)
    scales = empty_beside(input, (scale_rows, _up_to(width // block, 4)), dtype)
    return empty_beside(input, (rows, width // 2), "uint8"), scales


def scaled_fp4_experts_quant(
    input_tensor: Array, input_global_scale: Array, expert_offsets: Array, blockscale_offsets: Array, topk: int
) -> tuple[Any, Any]:
    """:func:`pykv.scaled_fp4_experts_quant`; returns the codes and the scales.  ``topk`` changes no result.

    There are as many rows of scales as experts can need whose scales begin at multiples of 128, one behind another.
    """
    codes, scales = _of_experts(input_tensor, spec_of(input_global_scale).shape[0], 1, 16, FP8)
    pykv.scaled_fp4_experts_quant(
        codes, scales, input_tensor, input_global_scale, expert_offsets, blockscale_offsets
    )  # fmt: skip
    return codes, scales


def silu_and_mul_scaled_fp4_experts_quant(
    input_tensor: Array, input_global_scale: Array, expert_offsets: Array, blockscale_offsets: Array, topk: int
) -> tuple[Any, Any]:
    """:func:`pykv.silu_and_mul_scaled_fp4_experts_quant`, as :func:`scaled_fp4_experts_quant`."""
    codes, scales = _of_experts(input_tensor, spec_of(input_global_scale).shape[0], 2, 16, FP8)
    pykv.silu_and_mul_scaled_fp4_experts_quant(
        codes, scales, input_tensor, input_global_scale, expert_offsets, blockscale_offsets
    )  # fmt: skip
    return codes, scales


def mxfp4_experts_quant(
    input_tensor: Array, expert_offsets: Array, blockscale_offsets: Array, n_experts: int, topk: int
) -> tuple[Any, Any]:
    """:func:`pykv.mxfp4_experts_quant`, as :func:`scaled_fp4_experts_quant`; scales are uint8."""
    codes, scales = _of_experts(input_tensor, n_experts, 1, 32, "uint8")
    pykv.mxfp4_experts_quant(codes, scales, input_tensor, expert_offsets, blockscale_offsets, n_experts)
    return codes, scales


def silu_and_mul_mxfp4_experts_quant(
    input_tensor: Array, expert_offsets: Array, blockscale_offsets: Array, n_experts: int, topk: int
) -> tuple[Any, Any]:
    """:func:`pykv.silu_and_mul_mxfp4_experts_quant`, as :func:`mxfp4_experts_quant`."""
    codes, scales = _of_experts(input_tensor, n_experts, 2, 32, "uint8")
    pykv.silu_and_mul_mxfp4_experts_quant(codes, scales, input_tensor, expert_offsets, blockscale_offsets, n_experts)
    return codes, scales
