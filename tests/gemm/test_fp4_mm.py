from __future__ import annotations

import numpy as np
import pytest
from gemm.fp4 import decoded, tiled, untiled
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, assert_rounded_once, name_of

import pykv
from pykv import vllm


def matrix(rows: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Codes, and scales in tiles whose padding is NaN."""
    rng = np.random.default_rng(seed + rows + k)
    scales = rng.integers(0x20, 0x50, (rows, k // 16)).astype(np.uint8)
    return rng.integers(0, 256, (rows, k // 2), np.uint8), tiled(scales, fill=0x7F)


def multiply(array, a, b, alpha: float, dtype, *, offset=0, padding=0) -> np.ndarray:
    out = array.output(np.full((len(a[0]), len(b[0]) + padding), np.nan, dtype)[:, : len(b[0])], offset=offset)
    codes, scales = ([array.input(x[i], offset=offset) for x in (a, b)] for i in (0, 1))
    pykv.cutlass_scaled_fp4_mm(out, *codes, *scales, alpha)
    return array.numpy(out)


def check(array, m, n, k, dtype, *, order="CC", **options) -> None:
    (a, b), alpha = (matrix(m, k), matrix(n, k, 1)), 0.015625
    a, b = ((np.asarray(codes, order=o), scales) for (codes, scales), o in zip((a, b), order, strict=True))
    x, w = decoded(*a), decoded(*b)
    lost = 1e-6 * float((np.abs(x) @ np.abs(w).T).max(initial=0)) * alpha
    assert_rounded_once(multiply(array, a, b, alpha, dtype, **options), alpha * (x @ w.T), atol=lost)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("rows", [0, 1, 8, 9, 33, 130])
def test_rows_and_dtypes(array, dtype, rows):
    check(array, rows, 264, 1088, dtype)


@pytest.mark.parametrize(("rows", "n", "k"), [(40, 1000, 2128), (600, 2200, 144), (257, 300, 2064)])
def test_tiles_for_few_and_many_multiprocessors(array, rows, n, k):
    check(array, rows, n, k, np.dtype(np.float32))


@pytest.mark.parametrize("order", ["CF", "FC", "FF"])
@pytest.mark.parametrize("rows", [5, 40])
def test_columns_one_after_another(array, rows, order):
    check(array, rows, 72, 320, np.dtype(np.float32), order=order)


@given(
    m=st.integers(0, 40),
    n=st.integers(0, 150),
    groups=st.integers(0, 70),
    offset=st.integers(0, 9),
    padding=st.integers(0, 3),
)
def test_any_size_and_alignment(array, m, n, groups, offset, padding):
    check(array, m, n, 16 * groups, np.dtype(np.float16), offset=offset, padding=padding)


@pytest.mark.parametrize(("m", "n", "k"), [(100, 72, 640), (600, 2200, 1168), (200, 4096, 272)])
def test_a_row_has_the_same_bits_among_any_others(array, m, n, k):
    a, b = matrix(m, k), matrix(n, k, 1)
    scales = untiled(a[1], m, k // 16)
    whole = multiply(array, a, b, 1.0, np.float32)
    for first, rows in ((0, 1), (5, 8), (60, 30), (20, 70)):
        part = slice(first, first + rows)
        some = multiply(array, (a[0][part], tiled(scales[part])), b, 1.0, np.float32)
        np.testing.assert_array_equal(some.view(np.uint32), whole[part].view(np.uint32))


def test_the_largest_and_the_smallest_are_exact(array):
    """Codes times scales that are products of 448 and 6, or of 2^-9 and 1/2."""
    for code, scale, number in ((0x77, 0x7E, 448 * 6), (0x11, 0x01, 2**-10)):
        a = np.full((1, 8), code, np.uint8), tiled(np.full((1, 1), scale, np.uint8), fill=0x7F)
        assert multiply(array, a, a, 1.0, np.float32)[0, 0] == np.float32(16 * number**2)


def test_function_of_vllm(array):
    if array.name in ("jax", "interface"):
        pytest.skip("the functions of vLLM allocate what they return, like what they are given")
    a, b = matrix(5, 96), matrix(40, 96, 1)
    given = [array.input(x) for x in (a[0], b[0], a[1], b[1])]
    out = array.numpy(vllm.cutlass_scaled_fp4_mm(*given, array.input(np.full(1, 0.5, np.float32)), "float16"))
    np.testing.assert_array_equal(out, multiply(array, a, b, 0.5, np.float16))
    assert vllm.cutlass_scaled_mm_supports_fp4(80)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": (3, 30)}, ValueError, "b: dimension 1 must equal k / 2 = 30"),
        ({"a": (3, 20), "b": (40, 20)}, ValueError, "a: dimension 1 must be a multiple of 8"),
        ({"out": (3, 41)}, ValueError, "out: dimension 1 must equal n = 40"),
        ({"block_scale_a": (3, 4)}, ValueError, r"block_scale_a: must have 512 elements .*, got shape \[3, 4\]"),
        ({"block_scale_b": (511,)}, ValueError, "block_scale_b: must have 512 elements"),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    shapes = {"out": (3, 40), "a": (3, 32), "b": (40, 32), "block_scale_a": (512,), "block_scale_b": (512,)} | change
    made = {k: array.output(np.zeros(s, np.float16 if k == "out" else np.uint8)) for k, s in shapes.items()}
    with pytest.raises(error, match=message):
        pykv.cutlass_scaled_fp4_mm(**made, alpha=1.0)
