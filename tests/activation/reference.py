"""Activations in float64, and the ranges that a result must hit."""

from __future__ import annotations

import math

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


def relu2(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0) ** 2


def xielu(x: np.ndarray, alpha_p: float, alpha_n: float, beta: float = 0.5, eps: float = -1e-6) -> np.ndarray:
    positive, negative = np.log1p(np.exp(alpha_p)), beta + np.log1p(np.exp(alpha_n))
    curve = np.where(x > 0, positive * x**2, negative * (np.expm1(np.minimum(x, eps)) - x))
    return curve + beta * x


def assert_gated(actual: np.ndarray, x: np.ndarray, activation=silu, *, lost: float = LOST) -> None:
    """``actual`` is R_T(R_T(activation(gate)) * up), exactly, where ``activation`` is known up to ``lost``."""
    width = x.shape[-1] // 2
    gate, up = x[..., :width].astype(np.float64), x[..., width:].astype(np.float64)
    exact = activation(gate)
    if actual.dtype == np.float32:
        np.testing.assert_allclose(actual.astype(np.float64), exact * up, rtol=lost, atol=1e-36)
        return
    # both neighbours where the activation lies so close to the middle between them that fp32 cannot tell
    low, high = ((exact * (1 + error)).astype(x.dtype).astype(np.float64) for error in (-lost, lost))
    result = actual.astype(np.float64)
    assert actual.shape == exact.shape
    right = (result == (low * up).astype(x.dtype).astype(np.float64)) | (
        result == (high * up).astype(x.dtype).astype(np.float64)
    )
    wrong = np.argwhere(~right)
    assert len(wrong) == 0, f"{len(wrong)} of {actual.size} elements are wrong, the first at {tuple(wrong[0])}"
    # ... which is rare
    assert np.count_nonzero(low != high) <= 5 + 0.01 * lost / LOST * actual.size
