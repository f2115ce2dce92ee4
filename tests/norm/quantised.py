"""How exactly codes must come out."""

from __future__ import annotations

import numpy as np


def assert_codes(codes: np.ndarray, *ends: np.ndarray) -> None:
    """Every code lies between two that are mostly one: those of the ends of what fp32 arithmetic may lose before."""
    values, (a, b) = codes.astype(np.float32), (end.astype(np.float32) for end in ends)
    low, high = np.minimum(a, b), np.maximum(a, b)
    assert codes.shape == low.shape
    wrong = np.argwhere((values < low) | (values > high) | np.isnan(values))
    assert len(wrong) == 0, (
        f"{len(wrong)} of {codes.size} codes are wrong, the first at {tuple(wrong[0])}: "
        f"{values[tuple(wrong[0])]} is not between {low[tuple(wrong[0])]} and {high[tuple(wrong[0])]}"
    )
    assert (low != high).mean() < 0.01 if codes.size > 10000 else True, "the ends are too far apart to test anything"
