"""Activations in float64, and the ranges that a result must hit."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

# What fp32 may lose, relatively, of an activation before it is rounded.
LOST = 1e-6


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def gelu(x: np.ndarray) -> np.ndarray:
    # by erfc, which keeps the tail
    return 0.5 * x * np.vectorize(math.erfc, otypes=[np.float64])(-x / np.sqrt(2))


def gelu_quick(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-1.702 * x))


def situ(gate: np.ndarray, up: np.ndarray, beta: float = 1.0, linear_beta: float = -1.0) -> np.ndarray:
    u = linear_beta * np.tanh(up / linear_beta) if linear_beta > 0 else up
    return beta * np.tanh(gate / beta) / (1 + np.exp(-gate)) * u


def relu2(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) ** 2


def xielu(x: np.ndarray, alpha_p: float, alpha_n: float, beta: float = 0.5, eps: float = -1e-6) -> np.ndarray:
    positive, negative = np.log1p(np.exp(alpha_p)), beta + np.log1p(np.exp(alpha_n))
    curve = np.where(x > 0, positive * x**2, negative * (np.expm1(np.minimum(x, eps)) - x))
    return curve + beta * x


def assert_gated(
    actual: np.ndarray,
    x: np.ndarray,
    activation=silu,
    *,
    up: np.ndarray | None = None,
    lost: float = LOST,
    cancelled: float = 0.0,
) -> None:
    """``actual`` is R_T(R_T(activation(gate)) * up), exactly, where ``activation`` is known up to ``lost``, relatively,
    and ``cancelled`` of the gate, absolutely."""
    width = x.shape[-1] // 2
    gate = x[..., :width].astype(np.float64)
    up = x[..., width:].astype(np.float64) if up is None else up
    exact = activation(gate)
    error = lost * np.abs(exact) + cancelled * np.abs(gate)
    assert actual.shape == exact.shape
    if actual.dtype == np.float32:
        difference = np.abs(actual.astype(np.float64) - exact * up)
        assert (difference <= error * np.abs(up) + 1e-36).all()
        return
    # all that the activation may be rounded to: two neighbours where it lies so close to the middle between them that
    # fp32 cannot tell
    low, high = ((exact + e).astype(x.dtype).astype(np.float32) for e in (-error, error))
    ends = [(end * up.astype(np.float32)).astype(x.dtype).astype(np.float64) for end in (low, high)]
    result = actual.astype(np.float64)
    wrong = np.argwhere(~((result >= np.minimum(*ends)) & (result <= np.maximum(*ends))))
    assert len(wrong) == 0, f"{len(wrong)} of {actual.size} elements are wrong, the first at {tuple(wrong[0])}"
    # ... which is rare
    assert np.count_nonzero(low != high) <= 5 + (0.01 * lost / LOST + 2e5 * cancelled) * actual.size


def in_steps(gate: np.ndarray, name: str) -> np.ndarray:
    """The formula in fp32, each step rounded as if it were exact, and rounded to the dtype of ``gate``."""
    f32 = np.float32
    x = gate.astype(f32)

    def exactly(function: Callable[[np.ndarray], np.ndarray], v: np.ndarray) -> np.ndarray:
        return function(v.astype(np.float64)).astype(f32)

    with np.errstate(over="ignore", invalid="ignore"):
        if name == "silu":
            y = x / (f32(1) + exactly(np.exp, -x))
        elif name == "gelu":
            y = f32(0.5) * x * (f32(1) + exactly(np.vectorize(math.erf), x * f32(np.sqrt(0.5))))
        else:
            cubic = x + f32(0.044715) * (x * x * x)
            y = f32(0.5) * x * (f32(1) + exactly(np.tanh, f32(np.sqrt(2 / np.pi)) * cubic))
        return y.astype(gate.dtype)
