from __future__ import annotations

import numpy as np
import pytest
from dequantization.hadamard import ORDERS, transform
from hypothesis import given
from hypothesis import strategies as st
from libraries import Numpy
from rows import FLOATS, assert_rounded_once, name_of, padded, random, turned

import pykv

WIDTHS = [1, 2, 4, 8, 16, 32, 64, 256, 512, 2048, 4096, 12, 20, 24, 28, 40, 56, 80, 96, 224, 320, 896, 1536, 5120, 7168]


def check(array, x, *, offset=0):
    out = array.output(np.zeros(x.shape, x.dtype), offset=offset)
    pykv.hadacore_transform(out, array.input(x, offset=offset))
    assert_rounded_once(array.numpy(out), transform(x), lost=1e-6, atol=2e-6 * np.abs(x.astype(np.float64)).max())


@pytest.mark.parametrize("order", ORDERS)
def test_orders(array, order):
    """The rows of the identity are those of the transpose, and orthogonal."""
    matrix = ORDERS[order]
    np.testing.assert_array_equal(matrix @ matrix.T, order * np.eye(order))
    out = array.output(np.zeros((order, order), np.float32))
    pykv.hadacore_transform(out, array.input(np.eye(order, dtype=np.float32)))
    np.testing.assert_allclose(array.numpy(out) * np.sqrt(order), matrix.T, rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("width", WIDTHS)
def test_any_width(array, dtype, width):
    check(array, random((7, width), dtype))


@pytest.mark.parametrize("width", [32768, 40960, 49152])
def test_wide(array, width):
    x = random((3, width), np.dtype(np.float16))
    out = array.output(np.zeros_like(x))
    pykv.hadacore_transform(out, array.input(x))
    back = array.output(np.zeros_like(x))
    pykv.hadacore_transform(back, out)
    if width == 32768:  # symmetric, and so its own inverse
        np.testing.assert_allclose(array.numpy(back).astype(float), x.astype(float), atol=4e-3)
    np.testing.assert_allclose(
        np.linalg.norm(array.numpy(out).astype(float), axis=1), np.linalg.norm(x.astype(float), axis=1), rtol=1e-3
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 255, 1000])
def test_any_number_of_rows(array, rows):
    for width in (8, 128, 1024):
        check(array, random((rows, width), np.dtype(np.float16)))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("shape", [(1100, 1024), (4301, 1024), (301, 4096), (35, 32768)], ids=str)
def test_many_rows(array, dtype, shape):
    """So many that threads have packs of their own, and the last block has too few."""
    x = padded(random(shape, dtype), 1, 8)
    out = array.output(x)
    pykv.hadacore_transform(out, out)
    assert_rounded_once(array.numpy(out), transform(x), lost=1e-6, atol=1e-5)


@pytest.mark.parametrize("shape", [(1100, 1024), (301, 4096), (35, 32768)], ids=str)
def test_bits_of_a_row_do_not_depend_on_others(array, shape):
    x = random(shape, np.dtype(np.float32))
    many = array.output(np.zeros_like(x))
    pykv.hadacore_transform(many, array.input(x))
    for offset in (0, 1):
        few = array.output(np.zeros_like(x[-2:]), offset=offset)
        pykv.hadacore_transform(few, array.input(x[-2:], offset=offset))
        np.testing.assert_array_equal(array.numpy(few), array.numpy(many)[-2:])


@pytest.mark.parametrize("width", [12, 896, 4096])
def test_more_than_caches_hold(array, width):
    check(array, random((1_300_000 // width, width), np.dtype(np.float32)), offset=1)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_strides_and_alignment(array, dtype):
    for x in (padded(random((3, 5, 160), dtype), 1, 8), padded(random((3, 5, 160), dtype), 0, 3)):
        out = array.output(turned(np.zeros(x.shape, dtype)))
        pykv.hadacore_transform(out, array.output(x))
        assert_rounded_once(array.numpy(out), transform(x), atol=1e-5)
    check(array, random((5, 256), dtype), offset=1)


def test_in_place(array):
    for width in (64, 4096, 7168):
        x = random((130, width), np.dtype(np.float32))
        made = array.output(x)
        pykv.hadacore_transform(made, made)
        assert_rounded_once(array.numpy(made), transform(x), atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0)])
def test_empty(array, shape):
    pykv.hadacore_transform(*(array.output(np.zeros(shape, np.float32)) for _ in range(2)))


@given(
    order=st.sampled_from(list(ORDERS)),
    log2=st.integers(0, 8),
    rows=st.integers(1, 40),
    dtype=st.sampled_from(FLOATS),
    offset=st.integers(0, 9),
)
def test_any_shape(order, log2, rows, dtype, offset):
    check(Numpy(), random((rows, order << log2), dtype), offset=offset)


@pytest.mark.parametrize(
    ("shape", "error", "message"),
    [
        ((3, 36), ValueError, "x: the last dimension must be 2.k, or 12, 20, 28 or 40 times that, got 36"),
        ((1, 65536), NotImplementedError, "x: the last dimension must be at most 49152, got 65536"),
        ((), ValueError, "out: "),
    ],
)
def test_wrong_widths(shape, error, message):
    x = np.zeros(shape, np.float32)
    with pytest.raises(error, match=message):
        pykv.hadacore_transform(np.zeros_like(x), x)
