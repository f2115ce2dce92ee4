"""Norms in float64."""

from __future__ import annotations

import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray | None, epsilon: float) -> np.ndarray:
    """Not yet rounded to the dtype of ``x``."""
    wide = x.astype(np.float64)
    normed = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return normed if weight is None else normed * weight.astype(np.float64)


def add(x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Rounded to the dtype, as it is stored.  Exact: float32 holds more than twice the bits of the 16-bit types."""
    return (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
