"""Rows to be quantised, and how results are compared."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st
from rows import FLOATS, padded, turned

F = np.float32
E5M2 = np.dtype(ml_dtypes.float8_e5m2)


def needs(array: Any, kind: np.dtype) -> None:
    """Skips the test where the library has no such dtype: e5m2 in CuPy would be bytes, which are e4m3."""
    if kind == E5M2 and not array.keeps(E5M2):
        pytest.skip("bytes are e4m3")


def rows(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0, *, odd: bool = False) -> np.ndarray:
    """Of many magnitudes; the first row is zeros.  ``odd``: with NaN, infinities and the smallest numbers, too."""
    rng = np.random.default_rng(seed + sum(shape))
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, (*shape[:-1], 1)))
    x = x.astype(F).astype(dtype)
    flat = x.reshape(-1, shape[-1])
    if len(flat) > 1:
        flat[0] = 0
    if odd:
        with np.errstate(over="ignore"):
            special = np.array([np.nan, np.inf, -np.inf, 1e-40, -1e-7, 6e4, 3e38, -0.0], F).astype(dtype)
        for i, value in enumerate(special):
            if len(flat) > 2 + i:
                flat[2 + i, (7 * i) % shape[-1]] = value
        if len(flat) > 11:
            flat[11] = np.nan
    return x


def odd_rows(widths: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    """Rows of any numbers, among them zeros, NaN and infinities anywhere, whole rows of each; and of any strides."""

    @st.composite
    def make(draw: st.DrawFn) -> np.ndarray:
        width, dtype, seed = draw(widths), draw(st.sampled_from(FLOATS)), draw(st.integers(0, 9999))
        shape = (*draw(st.sampled_from([(), (3,), (2, 3)])), draw(st.integers(1, 40)), width)
        rng = np.random.default_rng(seed)
        x = rows(shape, dtype, seed)
        flat = x.reshape(-1, width)
        with np.errstate(over="ignore"):
            special = np.array([np.nan, np.inf, -np.inf, 1e-40, -1e-7, 6e4, 3e38, -0.0, 0.0], F).astype(dtype)
        for value in special[rng.permutation(len(special))[: draw(st.integers(0, 9))]]:
            row = flat[rng.integers(len(flat))]
            row[rng.random(width) < rng.choice([0.01, 0.3, 1])] = value
        padding = draw(st.integers(0, 9))
        if padding:
            x = padded(x, padding)
        return turned(x) if draw(st.booleans()) else x

    return make()


def assert_same_bits(actual: np.ndarray, wanted: np.ndarray) -> None:
    """NaN is NaN; zeros have signs."""
    assert actual.shape == wanted.shape, (actual.shape, wanted.shape)
    if wanted.dtype == F:
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(wanted))
        actual, wanted = (np.where(np.isnan(v), F(0), v) for v in (actual, wanted))
    bits = f"u{wanted.itemsize}"
    a, b = (np.ascontiguousarray(v).view(bits) for v in (actual, wanted))
    wrong = np.argwhere(a != b)
    assert len(wrong) == 0, (
        f"{len(wrong)} of {a.size} are wrong, the first at {tuple(wrong[0])}: {actual[tuple(wrong[0])]} instead of "
        f"{wanted[tuple(wrong[0])]}"
    )
