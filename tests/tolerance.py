"""How close is close enough, for each dtype."""

from __future__ import annotations

import numpy as np

# (atol, rtol): a few units in the last place of the dtype, and what sums of some hundred terms lose
TOLERANCE = {
    "float32": (1e-5, 1.3e-6),
    "float16": (1e-3, 1e-3),
    "bfloat16": (1e-3, 1.6e-2),
    "float8_e4m3fn": (1e-1, 1e-1),
    "float8_e5m2": (2e-1, 2e-1),
}


def assert_close(
    actual: np.ndarray,
    expected: np.ndarray,
    dtype: object = None,
    *,
    atol: float | None = None,
    rtol: float | None = None,
) -> None:
    """Element by element, NaN equal to NaN.  ``dtype``: whose tolerance holds, by default that of ``actual``."""
    assert actual.shape == expected.shape
    default = TOLERANCE[np.dtype(dtype or actual.dtype).name]
    np.testing.assert_allclose(
        actual.astype(np.float64),
        expected.astype(np.float64),
        atol=default[0] if atol is None else atol,
        rtol=default[1] if rtol is None else rtol,
    )


def assert_attention(actual: np.ndarray, expected: np.ndarray) -> None:
    """The output of attention: the probabilities too may be rounded to the dtype, as tensor cores want them.

    Where few keys share the weight, that is half a unit in the last place of each of their values, which are up to 4 in
    the tests: 2^-9 * 4 = 8e-3.  As a whole the error stays that of a rounding or two.
    """
    name = actual.dtype.name
    assert_close(actual, expected, atol=8e-3 if name == "bfloat16" else None)
    seen = np.isfinite(expected)
    error = np.linalg.norm((actual.astype(np.float64) - expected)[seen])
    assert error <= {"float32": 1e-5, "float16": 6e-4, "bfloat16": 4e-3}[name] * np.linalg.norm(expected[seen])
