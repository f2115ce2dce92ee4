"""Activation functions.

A row is the last dimension of an array; its elements lie side by side.  All other strides, the width and the alignment
are the caller's choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pykv._schema import Rule, Spec, half_rows_of, like, operation
from pykv._types import Array, ScalarOrArray, Stream


@operation(result=half_rows_of("input"))
def silu_and_mul(result: Array, input: Array, *, stream: Stream = None) -> None:
    """Multiply the second half of each row by ``silu`` of the first: ``result = silu(a) * b``, ``input = [a, b]``.

    ``silu(a) = a / (1 + exp(-a))`` is computed in fp32 and rounded to the dtype, and so is the product.  ``b = -0``
    counts as 0.

    Args:
        result: ``[..., width]``, dtype of ``input``; written.  May be the memory of ``a`` (or of ``b``) itself.
        input: ``[..., 2 * width]`` float32, float16 or bfloat16, at least 1 dimension.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(result=half_rows_of("input", "float8_e4m3fn"))
def silu_and_mul_quant(result: Array, input: Array, scale: ScalarOrArray, *, stream: Stream = None) -> None:
    """Quantise what :func:`silu_and_mul` gives: ``result = code(silu_and_mul(input) * (1 / scale))``.

    Rounded to the nearest code, ties to even, and to the last one where it is too large; NaN becomes 448 or 0.

    Args:
        result: ``[..., width]`` float8_e4m3fn, uint8 (which holds it) or int8; written.
        input: ``[..., 2 * width]`` float32, float16 or bfloat16, at least 1 dimension.
        scale: one number.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


def _scales(arguments: Mapping[str, Any]) -> Spec:
    tokens, width = arguments["input"].shape
    return Spec((tokens, width // 2 // arguments["group_size"]), "float32")


@operation(out=half_rows_of("input", "float8_e4m3fn"), scales=Rule(_scales, transposed_if="is_scale_transposed"))
def silu_and_mul_per_block_quant(
    out: Array,
    input: Array,
    scales: Array,
    group_size: int,
    scale_ub: ScalarOrArray | None = None,
    is_scale_transposed: bool = False,
    *,
    stream: Stream = None,
) -> None:
    """Quantise what :func:`silu_and_mul` gives, ``y``, with a scale for each group: ``out = code(y * (1 / s))``.

    ``s = max(abs(y)) / 448`` (float8_e4m3fn) or ``/ 127`` (int8) over the group, at most ``scale_ub``, at least
    ``1 / (448 * 512)`` or ``2**-23``.  NaN does not count for the scale; it becomes 448 or 0.  To the bit that is what
    :func:`per_token_group_fp8_quant` with an ``eps`` of 1 / 512 gives of ``y``.

    Args:
        out: ``[num_tokens, width]`` float8_e4m3fn, uint8 (which holds it) or int8; written.
        input: ``[num_tokens, 2 * width]`` float32, float16 or bfloat16.
        scales: ``[num_tokens, width / group_size]`` float32, any strides; written.
        group_size: elements that share a scale; divides ``width``.
        scale_ub: the largest scale, for float8_e4m3fn.
        is_scale_transposed: ``scales`` must be the transpose of a contiguous array, or that array itself,
            ``[width / group_size, num_tokens]``.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(out=half_rows_of("input"))
def gelu_tanh_and_mul(out: Array, input: Array, *, stream: Stream = None) -> None:
    """Multiply the second half of each row by the tanh form of ``gelu`` of the first; all else as :func:`silu_and_mul`.

    ``gelu(a) = a / 2 * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 * a**3)))`` (arXiv:1606.08415), of which fp32 leaves few
    digits below ``a = -4``.
    """


@operation(out=half_rows_of("input"))
def mul_and_silu(out: Array, input: Array, *, stream: Stream = None) -> None:
    """Multiply the first half of each row by ``silu`` of the second; all else as :func:`silu_and_mul`."""


@operation(result=half_rows_of("input"))
def silu_and_mul_with_clamp(
    result: Array, input: Array, limit: float, alpha: float = 1.0, beta: float = 0.0, *, stream: Stream = None
) -> None:
    """Compute ``result = g / (1 + exp(-alpha * g)) * (clamp(b, -limit, limit) + beta)`` with ``g = min(a, limit)``.

    ``g``, the quotient and the product are rounded to the dtype, the sum is fp32.  NaN in ``a`` or ``b`` is taken for
    ``limit``.  All else is as in :func:`silu_and_mul`; ``alpha = 1.702`` and ``beta = 1`` make it
    :func:`swigluoai_and_mul` of separate halves, but for roundings.
    """


@operation(out=half_rows_of("input"))
def gelu_and_mul(out: Array, input: Array, *, stream: Stream = None) -> None:
    """Multiply the second half of each row by ``gelu`` of the first; all else as :func:`silu_and_mul`.

    ``gelu(a) = a / 2 * (1 + erf(a / sqrt(2)))`` (arXiv:1606.08415), of which fp32 leaves few digits below ``a = -4``.
    """


@operation(out=half_rows_of("input"))
def gelu_and_mul_sparse(
    out: Array, input: Array, activation_sparsity: float, approximate: str = "none", *, stream: Stream = None
) -> None:
    """Compute ``out = gelu(max(a - cut, 0)) * b``, ``input = [a, b]``, which is 0 for most elements (Gemma 3n).

    ``cut = mean(a) + c * std(a)`` of each row, over all its elements, where a normal variable lies below ``c`` with
    probability ``activation_sparsity``.  In fp32; ``gelu`` and the product are rounded to the dtype.

    Args:
        out: ``[..., width]``, dtype of ``input``; written.
        input: ``[..., 2 * width]`` float32, float16 or bfloat16, at least 1 dimension.
        activation_sparsity: more than 0, less than 1.
        approximate: the form of ``gelu``: ``"none"`` (:func:`gelu_and_mul`) or ``"tanh"`` (:func:`gelu_tanh_and_mul`).
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or parameters do not fit.
        TypeError: dtypes do not fit.
    """


@operation(out=half_rows_of("input"))
def fatrelu_and_mul(out: Array, input: Array, threshold: float = 0.0, *, stream: Stream = None) -> None:
    """Compute ``out = (a > threshold ? a : 0) * b``, ``input = [a, b]``; all else as :func:`silu_and_mul`.

    The comparison is made in fp32; NaN in ``a`` counts as 0.
    """


@operation(out=half_rows_of("input"))
def swigluoai_and_mul(
    out: Array, input: Array, alpha: float = 1.702, limit: float = 7.0, *, stream: Stream = None
) -> None:
    """Compute ``out = (u + 1) * g / (1 + exp(-alpha * g))`` of interleaved rows ``input = [g0, u0, g1, u1, ...]``.

    First ``g = min(g, limit)`` and ``u = clamp(u, -limit, limit)``, where NaN is taken for ``limit``.  Arithmetic is
    fp32, rounded once.  Shapes and dtypes are those of :func:`silu_and_mul`; ``out`` may not be memory of ``input``.
    """


@operation(out=half_rows_of("input"))
def swiglustep_and_mul(out: Array, input: Array, limit: float = 7.0, *, stream: Stream = None) -> None:
    """Compute ``out = min(silu(a), limit) * clamp(b, -limit, limit)``, ``input = [a, b]``, in fp32, rounded once.

    NaN in ``a`` or ``b`` is taken for ``limit``.  Shapes and dtypes are those of :func:`silu_and_mul`.
    """


@operation(out=half_rows_of("input"))
def situ_and_mul(
    out: Array, input: Array, beta: float = 1.0, linear_beta: float = -1.0, *, stream: Stream = None
) -> None:
    """Compute ``out = beta * tanh(a / beta) / (1 + exp(-a)) * u``, ``input = [a, b]``, in fp32, rounded once.

    ``u = linear_beta * tanh(b / linear_beta)``, or ``b`` where ``linear_beta`` is not positive.  Shapes and dtypes are
    those of :func:`silu_and_mul`.
    """


@operation()
def masked_moe_activation(
    out: Array,
    input: Array,
    valid_token_counts: Array,
    activation: str,
    clamp_limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    situ_beta: float = 1.0,
    situ_linear_beta: float = -1.0,
    *,
    stream: Stream = None,
) -> None:
    """Apply an activation to those rows of each expert that its tokens fill; the other rows of ``out`` stay.

    These are products of two halves of each row: ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"situ"``, ``"swigluoai"``
    and ``"swiglustep"``, which are the operation with ``_and_mul`` behind its name, and ``"silu_with_clamp"`` and
    ``"swigluoai_uninterleave"``, which are both :func:`silu_and_mul_with_clamp`.  ``"silu_no_mul"``,
    ``"gelu_no_mul"`` and ``"gelu_tanh_no_mul"`` are the first factor alone, rounded once; ``"relu2_no_mul"`` is
    :func:`relu_squared`.

    Args:
        out: ``[num_rows, width]`` or ``[num_experts, num_rows, width]``, dtype of ``input``; written.
        input: float32, float16 or bfloat16; the shape of ``out``, with ``2 * width`` where there is a product.
        valid_token_counts: ``[1]`` or ``[num_experts]`` int32 or int64: so many rows of an expert, the first ones, are
            computed.  Clamped to 0 ... ``num_rows``.
        activation: its name.
        clamp_limit: ``limit`` of ``"silu_with_clamp"``, ``"swigluoai_uninterleave"``, ``"swigluoai"`` and
            ``"swiglustep"``.
        alpha: of the first three of these.
        beta: of the first two.
        situ_beta: ``beta`` of ``"situ"``.
        situ_linear_beta: its ``linear_beta``.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or the name do not fit.
        TypeError: dtypes do not fit.
    """


@operation(out=like("input"))
def gelu_new(out: Array, input: Array, *, stream: Stream = None) -> None:
    """Apply ``x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))`` to each element, in fp32, rounded once.

    Args:
        out: shape and dtype of ``input``; written.  May be ``input`` itself.
        input: float32, float16 or bfloat16, at least 1 dimension.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation(out=like("input"))
def gelu_fast(out: Array, input: Array, *, stream: Stream = None) -> None:
    """Apply the same function as :func:`gelu_new`: the names differ in roundings that are not made here."""


@operation(out=like("input"))
def gelu_quick(out: Array, input: Array, *, stream: Stream = None) -> None:
    """Apply ``x / (1 + exp(-1.702 * x))`` to each element; all else as :func:`gelu_new`."""


@operation(out=like("input"))
def relu2(out: Array, input: Array, *, stream: Stream = None) -> None:
    """Apply ``max(x, 0) ** 2`` to each element, NaN staying; all else as :func:`gelu_new`."""


@operation(out=like("input"))
def relu_squared(out: Array, input: Array, *, stream: Stream = None) -> None:
    """Apply ``max(x, 0) ** 2`` to each element, as :func:`relu2`, but NaN gives 0."""


@operation(out=like("input"))
def xielu(
    out: Array,
    input: Array,
    alpha_p: ScalarOrArray,
    alpha_n: ScalarOrArray,
    beta: float = 0.5,
    eps: float = -1e-6,
    *,
    stream: Stream = None,
) -> None:
    """Apply xIELU (arXiv:2411.13010) to each element; arrays as in :func:`gelu_new`.

    ``softplus(alpha_p) * x**2 + beta * x`` where ``x > 0``, elsewhere
    ``(beta + softplus(alpha_n)) * (expm1(min(x, eps)) - x) + beta * x``.

    Args:
        out: shape and dtype of ``input``; written.
        input: float32, float16 or bfloat16.
        alpha_p: one number, as it was trained (before ``softplus``).
        alpha_n: one number, as it was trained.
        beta: slope at 0.
        eps: keeps ``expm1`` away from 0.
        stream: CUDA stream; ``None``: the current one of the arrays' library.
    """
