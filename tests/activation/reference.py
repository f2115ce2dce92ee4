"""Activations in float64, and the ranges that a result must hit."""

from __future__ import annotations

import numpy as np

# What fp32 may lose, relatively, of an activation before it is rounded.
LOST = 1e-6


def silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        return x / (1 + np.exp(-x))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def assert_gated(actual: np.ndarray, x: np.ndarray, activation=silu) -> None:
    """``actual`` is R_T(R_T(activation(gate)) * up), exactly, where ``activation`` is known up to LOST."""
    width = x.shape[-1] // 2
    gate, up = x[..., :width].astype(np.float64), x[..., width:].astype(np.float64)
    exact = activation(gate)
    if actual.dtype == np.float32:
        np.testing.assert_allclose(actual.astype(np.float64), exact * up, rtol=LOST, atol=1e-36)
        return
    # both neighbours where the activation lies so close to the middle between them that fp32 cannot tell
    low, high = ((exact * (1 + lost)).astype(x.dtype).astype(np.float64) for lost in (-LOST, LOST))
    result = actual.astype(np.float64)
    assert actual.shape == exact.shape
    right = (result == (low * up).astype(x.dtype).astype(np.float64)) | (
        result == (high * up).astype(x.dtype).astype(np.float64)
    )
    wrong = np.argwhere(~right)
    assert len(wrong) == 0, f"{len(wrong)} of {actual.size} elements are wrong, the first at {tuple(wrong[0])}"
    # ... which is rare
    assert np.count_nonzero(low != high) <= 5 + 0.01 * actual.size
