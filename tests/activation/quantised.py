"""Quantised results: codes of numbers, and how exactly an op must hit them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E4M3, INT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)
CODES = [E4M3, INT8]


def codes(y: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The nearest codes, ties to even; NaN is the largest number (E4M3) or 0 (int8)."""
    if dtype == INT8:
        return np.clip(np.rint(np.nan_to_num(y, nan=0.0, posinf=1e9, neginf=-1e9)), -128, 127).astype(np.int8)
    return np.fmax(np.fmin(y, 448.0), -448.0).astype(np.float32).astype(dtype)


def assert_codes(actual: np.ndarray, *bounds: np.ndarray, lost: float = 1e-6) -> None:
    """``actual`` holds codes of numbers known up to ``lost``, relatively: of one of their ``bounds``.

    The sign of a zero does not count: what underflows on the way has none.
    """
    possible = [codes(y * (1 + error), actual.dtype).view(np.uint8) for y in bounds for error in (-lost, lost)]
    assert all(actual.shape == c.shape for c in possible)
    zeros = actual.astype(np.float32) == 0
    right = [(actual.view(np.uint8) == c) | (zeros & (c.view(actual.dtype).astype(np.float32) == 0)) for c in possible]
    wrong = np.argwhere(~np.any(right, axis=0))
    assert len(wrong) == 0, (
        f"{len(wrong)} of {actual.size} codes are wrong, the first at {tuple(wrong[0])}: "
        f"{actual[tuple(wrong[0])]} instead of {bounds[0][tuple(wrong[0])]}"
    )
