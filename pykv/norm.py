"""Normalisation of rows.

A row is the last dimension of an array; its elements lie side by side.  All other strides, and the alignment, are the
caller's choice.  Arithmetic is fp32 and rounded once, and the result for a row never depends on how many others there
are.
"""

from __future__ import annotations

from pykv import _C
from pykv._schema import like, returns
from pykv._types import Array, Stream


@returns(out=like("input"))
def rms_norm(out: Array, input: Array, weight: Array | None, epsilon: float = 1e-6, *, stream: Stream = None) -> None:
    """Divide each row of ``input`` by its root mean square, times ``weight``, into ``out``.

    ``out = input * r * weight`` with ``r = 1 / sqrt(mean(input ** 2) + epsilon)``.

    Args:
        out: ``[..., hidden_size]``, shape and dtype of ``input``; written.  May be ``input`` itself.
        input: ``[..., hidden_size]`` float32, float16 or bfloat16, 2 to 4 dimensions.
        weight: ``[hidden_size]``, dtype of ``input``.  ``None``: all ones.
        epsilon: added to the mean square.
        stream: see the package.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """
    _C.rms_norm(out, input, weight, epsilon, stream)


def fused_add_rms_norm(
    input: Array, residual: Array, weight: Array | None, epsilon: float = 1e-6, *, stream: Stream = None
) -> None:
    """Add ``input`` to ``residual`` and norm the sum into ``input``, both in place.

    ``residual = input + residual``, rounded to the dtype, then ``input = residual * r * weight`` with
    ``r = 1 / sqrt(mean(residual ** 2) + epsilon)``.

    Args:
        input: ``[..., hidden_size]`` float32, float16 or bfloat16, 2 to 4 dimensions; written.
        residual: shape and dtype of ``input``, other memory; written.
        weight: ``[hidden_size]``, dtype of ``input``.  ``None``: all ones.
        epsilon: added to the mean square.
        stream: see the package.

    Raises:
        ValueError: shapes, strides or devices do not fit, or both arrays are the same memory.
        TypeError: dtypes do not fit.
    """
    _C.fused_add_rms_norm(input, residual, weight, epsilon, stream)
