"""Products of 8-bit matrices with scales, in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCK = 128


def numbers(scales: np.ndarray) -> np.ndarray:
    """Of scales that are numbers, or powers of two."""
    return np.exp2(scales.astype(np.float64) - 127) if scales.dtype == np.uint8 else scales.astype(np.float64)


def product(a, b, a_scales, b_scales, bias=None, azp_adj=None, azp=None) -> np.ndarray:
    """Of scales for all, or for rows and columns."""
    x = a.astype(np.float64) @ b.astype(np.float64)
    if azp_adj is not None:
        x -= (1 if azp is None else azp.reshape(-1, 1).astype(np.float64)) * azp_adj.astype(np.float64)
    x = numbers(a_scales).reshape(-1, 1) * numbers(b_scales).reshape(1, -1) * x
    return x if bias is None else x + bias.astype(np.float64)


def spread(a, b, a_scales, b_scales) -> tuple[np.ndarray, np.ndarray]:
    """Both matrices times their scales of blocks."""
    k, n = b.shape
    of_a = np.repeat(numbers(a_scales), BLOCK, axis=1)[:, :k]
    of_b = np.repeat(np.repeat(numbers(b_scales), BLOCK, axis=0)[:k], BLOCK, axis=1)[:, :n]
    return a.astype(np.float64) * of_a, b.astype(np.float64) * of_b
