"""Rows in memory, and how exactly an op that rounds once must hit them."""

from __future__ import annotations

import ml_dtypes
import numpy as np

FLOATS = [np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


def name_of(value: object) -> str | None:
    """Readable test ids for dtypes and shapes."""
    if isinstance(value, np.dtype):
        return value.name
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


def random(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


def padded(x: np.ndarray, *padding: int) -> np.ndarray:
    """The same values in larger memory, full of NaN elsewhere: ``padding`` more along each of the last axes."""
    grow = (0,) * (x.ndim - len(padding)) + padding
    memory = np.full([n + p for n, p in zip(x.shape, grow, strict=True)], np.nan, x.dtype)
    view = memory[tuple(slice(n) for n in x.shape)]
    view[...] = x
    return view


def turned(x: np.ndarray) -> np.ndarray:
    """The same values with the leading dimensions laid out in reverse order: they do not collapse into one."""
    order = (*reversed(range(x.ndim - 1)), x.ndim - 1)
    return np.ascontiguousarray(x.transpose(order)).transpose(order)


def assert_rounded_once(actual: np.ndarray, exact: np.ndarray, *, lost: float = 1e-6, atol: float = 1e-9) -> None:
    """``actual`` is ``exact`` (float64) rounded to the dtype of ``actual``, give or take what fp32 arithmetic loses
    before: ``lost``, relative, and ``atol``, absolute.  NaN equals NaN, infinity itself."""
    assert actual.shape == exact.shape
    info = ml_dtypes.finfo(actual.dtype)
    half_ulp = 0.0 if actual.dtype == np.float32 else 0.5 * float(info.eps)
    smallest = float(info.smallest_subnormal)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = exact.astype(actual.dtype).astype(np.float64)
        error = np.abs(actual.astype(np.float64) - exact)
    same = (wanted == actual.astype(np.float64)) | (np.isnan(wanted) & np.isnan(actual.astype(np.float64)))
    close = error <= (half_ulp + lost) * np.abs(exact) * (1 + 1e-6) + 0.5 * smallest + atol
    wrong = np.argwhere(~(same | close))
    assert len(wrong) == 0, (
        f"{len(wrong)} of {actual.size} elements are wrong, the first at {tuple(wrong[0])}: "
        f"{actual[tuple(wrong[0])]} instead of {exact[tuple(wrong[0])]}"
    )
