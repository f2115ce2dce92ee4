"""Activation functions.

A row is the last dimension of an array; its elements lie side by side.  All other strides, the width and the alignment
are the caller's choice.
"""

from __future__ import annotations

from pykv import _C
from pykv._types import Array, Stream


def silu_and_mul(result: Array, input: Array, *, stream: Stream = None) -> None:
    """Multiply the second half of each row by ``silu`` of the first: ``result = silu(a) * b``, ``input = [a, b]``.

    ``silu(a) = a / (1 + exp(-a))`` is computed in fp32 and rounded to the dtype, and so is the product.

    Args:
        result: ``[..., width]``, dtype of ``input``; written.  May be the memory of ``a`` (or of ``b``) itself.
        input: ``[..., 2 * width]`` float32, float16 or bfloat16, at least 1 dimension.
        stream: see the package.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """
    _C.silu_and_mul(result, input, stream)


def gelu_tanh_and_mul(out: Array, input: Array, *, stream: Stream = None) -> None:
    """Multiply the second half of each row by the tanh form of ``gelu`` of the first; all else as :func:`silu_and_mul`.

    ``gelu(a) = a / 2 * (1 + tanh(sqrt(2 / pi) * (a + 0.044715 * a**3)))`` (arXiv:1606.08415).
    """
    _C.gelu_tanh_and_mul(out, input, stream)
