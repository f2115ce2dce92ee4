"""Operations in array-API terms, for any array library: what a disabled operation falls back to.

They compute in fp32, allocate what they need and are not quick.  Arguments are checked before they are called
(``pykv.dispatch``).  They want the package ``array-api-compat``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

from pykv._types import Array, Stream


def _wide(*arrays: Any) -> tuple[Any, ...]:
    """The namespace of the arrays, and they in fp32."""
    from array_api_compat import array_namespace

    xp = array_namespace(*(a for a in arrays if a is not None))
    return xp, *(None if a is None else xp.astype(a, xp.float32) for a in arrays)


def _store(xp: Any, out: Any, value: Any) -> None:
    out[...] = xp.astype(value, out.dtype)


def rms_norm(out: Array, input: Array, weight: Array | None, epsilon: float = 1e-6, *, stream: Stream = None) -> None:
    """See :func:`pykv.rms_norm`."""
    xp, x, w = _wide(input, weight)
    y = x / xp.sqrt(xp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    _store(xp, out, y if w is None else y * w)


def fused_add_rms_norm(
    input: Array, residual: Array, weight: Array | None, epsilon: float = 1e-6, *, stream: Stream = None
) -> None:
    """See :func:`pykv.fused_add_rms_norm`."""
    xp, x, r = _wide(input, residual)
    _store(xp, residual, x + r)
    rms_norm(input, residual, weight, epsilon)


def _silu(xp: Any, x: Any) -> Any:
    return x / (1 + xp.exp(-x))


def _gelu_tanh(xp: Any, x: Any) -> Any:
    return 0.5 * x * (1 + xp.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def _gated(activation: Callable[[Any, Any], Any], *, gate_first: bool = True) -> Callable[..., None]:
    def function(out: Array, input: Array, *, stream: Stream = None) -> None:
        xp, x = _wide(input)
        half = x.shape[-1] // 2
        gate, up = (x[..., :half], x[..., half:]) if gate_first else (x[..., half:], x[..., :half])
        _store(xp, out, activation(xp, gate) * up)

    return function


def _elementwise(activation: Callable[[Any, Any], Any]) -> Callable[..., None]:
    def function(out: Array, input: Array, *, stream: Stream = None) -> None:
        xp, x = _wide(input)
        _store(xp, out, activation(xp, x))

    return function


def silu_and_mul(result: Array, input: Array, *, stream: Stream = None) -> None:
    """See :func:`pykv.silu_and_mul`."""
    _gated(_silu)(result, input)


def fatrelu_and_mul(out: Array, input: Array, threshold: float = 0.0, *, stream: Stream = None) -> None:
    """See :func:`pykv.fatrelu_and_mul`."""
    _gated(lambda xp, x: xp.where(x > threshold, x, xp.zeros_like(x)))(out, input)


FUNCTIONS: Final[dict[str, Callable[..., None]]] = {
    "rms_norm": rms_norm,
    "fused_add_rms_norm": fused_add_rms_norm,
    "silu_and_mul": silu_and_mul,
    "mul_and_silu": _gated(_silu, gate_first=False),
    "gelu_tanh_and_mul": _gated(_gelu_tanh),
    "fatrelu_and_mul": fatrelu_and_mul,
    "gelu_new": _elementwise(_gelu_tanh),
    "gelu_fast": _elementwise(_gelu_tanh),
    "gelu_quick": _elementwise(lambda xp, x: x / (1 + xp.exp(-1.702 * x))),
    "relu2": _elementwise(lambda xp, x: xp.where(x < 0, xp.zeros_like(x), x) ** 2),  # NaN stays
}
