"""Normalisation of rows.

A row is the last dimension of an array; its elements lie side by side.  All other strides, and the alignment, are the
caller's choice.  Arithmetic is fp32 and rounded once, and the result for a row never depends on how many others there
are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pykv._schema import Rule, Spec, like, operation
from pykv._types import Array, ScalarOrArray, Stream


@Rule
def _codes(arguments: Mapping[str, Any]) -> Spec:
    return Spec(arguments["input"].shape, "float8_e4m3fn")


@Rule
def _row_scales(arguments: Mapping[str, Any]) -> Spec:
    return Spec((math.prod(arguments["input"].shape[:-1]), 1), "float32")


def _block_scales(arguments: Mapping[str, Any]) -> Spec:
    *rows, width = arguments["input"].shape
    return Spec((math.prod(rows), width // arguments["group_size"]), "float32")


@operation(out=like("input"))
def rms_norm(out: Array, input: Array, weight: Array | None, epsilon: float = 1e-6, *, stream: Stream = None) -> None:
    """Divide each row of ``input`` by its root mean square, times ``weight``, into ``out``.

    ``out = input * r * weight`` with ``r = 1 / sqrt(mean(input ** 2) + epsilon)``.

    Args:
        out: ``[..., hidden_size]``, shape and dtype of ``input``; written.  May be ``input`` itself.
        input: ``[..., hidden_size]`` float32, float16 or bfloat16, 1 to 8 dimensions.
        weight: ``[hidden_size]``, or ``[input.shape[0], hidden_size]``, a row for each index of the first dimension;
            dtype of ``input`` or float32.  ``None``: all ones.
        epsilon: added to the mean square.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation()
def fused_add_rms_norm(
    input: Array, residual: Array, weight: Array | None, epsilon: float = 1e-6, *, stream: Stream = None
) -> None:
    """Add ``input`` to ``residual`` and norm the sum into ``input``, both in place.

    ``residual = input + residual``, rounded to the dtype, then ``input = residual * r * weight`` with
    ``r = 1 / sqrt(mean(residual ** 2) + epsilon)``.

    Args:
        input: ``[..., hidden_size]`` float32, float16 or bfloat16, 1 to 8 dimensions; written.
        residual: shape and dtype of ``input``, other memory; written.
        weight: ``[hidden_size]``, dtype of ``input`` or float32.  ``None``: all ones.
        epsilon: added to the mean square.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit, or both arrays are the same memory.
        TypeError: dtypes do not fit.
    """


@operation(out=like("input"))
def gemma_rms_norm(out: Array, input: Array, weight: Array, epsilon: float = 1e-6, *, stream: Stream = None) -> None:
    """Compute :func:`rms_norm` with ``1 + weight``, a sum in fp32, in place of ``weight``, which is required."""


@operation()
def gemma_fused_add_rms_norm(
    input: Array, residual: Array, weight: Array, epsilon: float = 1e-6, *, stream: Stream = None
) -> None:
    """Compute :func:`fused_add_rms_norm` with ``1 + weight``, a sum in fp32, in place of ``weight``, which is required.

    What is normed is the sum in fp32, not rounded; ``residual`` gets it rounded to the dtype.  ``weight`` is
    ``[hidden_size]``.
    """


@operation(out=like("input"))
def layer_norm(
    out: Array,
    input: Array,
    weight: Array | None,
    bias: Array | None,
    epsilon: float = 1e-5,
    residual: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Norm each row of ``input`` by its mean and variance, times ``weight`` plus ``bias``, into ``out``.

    ``out = (z - mean(z)) * r * weight + bias`` with ``r = 1 / sqrt(mean((z - mean(z)) ** 2) + epsilon)`` and ``z`` the
    input, or, with a residual, ``residual = z = input + residual``, rounded to the dtype.

    Args:
        out: ``[..., hidden_size]``, shape and dtype of ``input``; written.  May be ``input`` itself.
        input: ``[..., hidden_size]`` float32, float16 or bfloat16, 1 to 8 dimensions.
        weight: ``[hidden_size]``, dtype of ``input`` or float32.  ``None``: all ones.
        bias: ``[hidden_size]``, dtype of ``input`` or float32.  ``None``: all zeros.
        epsilon: added to the variance.
        residual: shape and dtype of ``input``, other memory than ``input`` and ``out``; written.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit, or residual is the memory of another array.
        TypeError: dtypes do not fit.
    """


@operation(out=like("input"))
def rms_norm_gated(
    out: Array,
    input: Array,
    weight: Array | None,
    z: Array | None = None,
    epsilon: float = 1e-5,
    group_size: int = 0,
    norm_before_gate: bool = False,
    activation: str = "swish",
    *,
    stream: Stream = None,
) -> None:
    """Norm groups of each row, gated by an activation ``g`` of ``z``, in fp32, rounded once.

    With ``norm_before_gate`` it is ``out = u * r * weight * g(z)``, ``u = input``; without, ``out = u * r * weight``,
    ``u = input * g(z)``.  ``r = 1 / sqrt(mean(u ** 2) + epsilon)`` over each group.

    Args:
        out: ``[..., hidden_size]``, shape and dtype of ``input``; written.  May be ``input`` itself.
        input: ``[..., hidden_size]`` float32, float16 or bfloat16, 1 to 8 dimensions.
        weight: ``[hidden_size]``, dtype of ``input`` or float32.  ``None``: all ones.
        z: shape and dtype of ``input``.  ``None``: no gate.
        epsilon: added to the mean square.
        group_size: divides ``hidden_size``; 0: all of it.
        norm_before_gate: what comes first.
        activation: ``"swish"`` or ``"silu"``, which are ``g(z) = z / (1 + exp(-z))``, or ``"sigmoid"``.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit, or the activation is not known.
        TypeError: dtypes do not fit.
    """


@operation(result=_codes)
def rms_norm_static_fp8_quant(
    result: Array,
    input: Array,
    weight: Array | None,
    scale: ScalarOrArray,
    epsilon: float = 1e-6,
    *,
    stream: Stream = None,
) -> None:
    """Compute :func:`rms_norm`, rounded to the dtype, and its E4M3 codes: ``result = E4M3(y * (1 / scale))``.

    Codes saturate at 448, which NaN becomes too.

    Args:
        result: ``[..., hidden_size]`` float8_e4m3fn or uint8, shape of ``input``; written.
        input: ``[..., hidden_size]`` float32, float16 or bfloat16, 1 to 8 dimensions.
        weight: ``[hidden_size]``, dtype of ``input`` or float32.  ``None``: all ones.
        scale: one number.
        epsilon: added to the mean square.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(result=_codes)
def fused_add_rms_norm_static_fp8_quant(
    result: Array,
    input: Array,
    residual: Array,
    weight: Array | None,
    scale: ScalarOrArray,
    epsilon: float = 1e-6,
    *,
    stream: Stream = None,
) -> None:
    """Add ``input`` to ``residual``, rounded to the dtype, then all as :func:`rms_norm_static_fp8_quant` of the sum.

    ``input`` stays as it is; ``residual`` (written) is other memory than ``input`` and ``result``.
    """


@operation(result=_codes, scale=_row_scales)
def rms_norm_dynamic_per_token_quant(
    result: Array,
    input: Array,
    weight: Array | None,
    scale: Array,
    epsilon: float = 1e-6,
    scale_ub: ScalarOrArray | None = None,
    residual: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Norm each row and give its codes, E4M3 or int8, by a scale that its largest magnitude decides.

    ``y`` is what :func:`rms_norm` gives or, with a residual, :func:`fused_add_rms_norm`, and the codes are to the bit
    those that :func:`dynamic_per_token_scaled_fp8_quant` gives of it.  With ``m = max(abs(y))``, of numbers,
    ``scale_ub`` at most:

    - E4M3: ``scale = max(m / 448, 1 / (448 * 512))``, ``result = E4M3(y / scale)``; NaN becomes 448.
    - int8: ``scale = max(m / 127, 2**-23)``, ``result = round(y * (1 / scale))``, ties to even; NaN becomes 0.

    Args:
        result: ``[..., hidden_size]`` float8_e4m3fn or uint8 for E4M3, or int8; shape of ``input``; written.
        input: ``[..., hidden_size]`` float32, float16 or bfloat16, 1 to 8 dimensions.
        weight: ``[hidden_size]``, dtype of ``input`` or float32.  ``None``: all ones.
        scale: ``[num_rows, 1]`` or ``[num_rows]`` float32, any strides; written.  ``num_rows`` is the product of all
            sizes of ``input`` but the last.
        epsilon: added to the mean square.
        scale_ub: bounds ``m``, for E4M3.
        residual: shape and dtype of ``input``, other memory than ``input`` and ``result``; written.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit, or scale_ub is given for int8.
        TypeError: dtypes do not fit.
    """


@operation(result=_codes, scale=Rule(_block_scales, transposed_if="is_scale_transposed"))
def rms_norm_per_block_quant(
    result: Array,
    input: Array,
    weight: Array | None,
    scale: Array,
    epsilon: float = 1e-6,
    scale_ub: ScalarOrArray | None = None,
    residual: Array | None = None,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    *,
    stream: Stream = None,
) -> None:
    """Compute :func:`rms_norm_dynamic_per_token_quant` with a scale for each group of neighbours in a row.

    E4M3 codes, too, are those of ``y * (1 / scale)``: to the bit those of :func:`per_token_group_fp8_quant` with an
    ``eps`` of 1 / 512.

    Args:
        result: as there.
        input: as there.
        weight: as there.
        scale: ``[num_rows, hidden_size / group_size]`` float32, written where its strides say: row by row, or
            transposed (strides ``(1, n)``, with ``n`` padded as TMA wants it or not).
        epsilon: as there.
        scale_ub: as there.
        residual: as there.
        group_size: any that divides ``hidden_size``.
        is_scale_transposed: the caller counts on the scales of one group lying side by side; ``scale`` is checked.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation()
def fused_qk_norm_rope(
    qkv: Array,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: Array | None,
    k_weight: Array | None,
    cos_sin_cache: Array,
    is_neox: bool,
    position_ids: Array,
    *,
    stream: Stream = None,
) -> None:
    """Norm each query and key head of ``qkv`` and rotate its first elements, in place, in fp32 and rounded once.

    A head ``x`` becomes ``x * (r * weight)`` with ``r = 1 / sqrt(mean(x ** 2) + eps)``, rotated as
    :func:`rotary_embedding` does it.  Heads of ``v`` stay as they are.

    Args:
        qkv: ``[<positions>, num_heads * head_dim]`` or ``[<positions>, num_heads, head_dim]`` float32, float16 or
            bfloat16, all heads of ``q``, then of ``k``, then of ``v``; written.
        num_heads_q: heads of ``q``.
        num_heads_k: heads of ``k``.
        num_heads_v: heads of ``v``.
        head_dim: any size.
        eps: added to the mean square.
        q_weight: ``[head_dim]``, dtype of ``qkv`` or float32.  ``None``: all ones.
        k_weight: the same of ``k``.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32, float16 or bfloat16; ``rotary_dim`` is even and at most
            ``head_dim``.
        is_neox: pairs are ``(i, i + rotary_dim / 2)`` instead of neighbours.
        position_ids: ``[num_tokens]`` or ``[batch, seq]`` int32 or int64.  A token whose position is out of range
            stays as it is and is reported.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """
