from __future__ import annotations

import numpy as np
import pytest
from activation.reference import assert_gated
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, name_of, padded, random, turned

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def silu_and_mul(array, x, *, out=None, offsets=(0, 0)):
    """The result for a NumPy array; ``out`` gives its strides."""
    out = np.full((*x.shape[:-1], x.shape[-1] // 2), np.nan, x.dtype) if out is None else out
    result = array.output(out, offset=offsets[0])
    pykv.silu_and_mul(result, array.input(x, offset=offsets[1]))
    return array.numpy(result)


@dtypes
@pytest.mark.parametrize("width", [1, 2, 3, 8, 15, 16, 100, 512, 513, 1024, 4096, 13824])
@pytest.mark.parametrize("rows", [1, 7, 83])
def test_widths(array, dtype, rows, width):
    x = random((rows, 2 * width), dtype, width)
    assert_gated(silu_and_mul(array, x), x)


@dtypes
@pytest.mark.parametrize(
    "shape",
    [(10,), (300, 8192), (2, 3, 40), (4, 5, 6, 72), (2, 1, 3, 1, 2, 10), (150000, 6), (150000, 12)],
    ids=name_of,
)
def test_shapes(array, dtype, shape):
    x = random(shape, dtype)
    assert_gated(silu_and_mul(array, x), x)


@dtypes
def test_the_whole_range_of_gates(array, dtype):
    gates = np.linspace(-80, 80, 20011).astype(dtype)
    x = np.stack([gates, np.ones_like(gates)]).reshape(1, -1)
    assert_gated(silu_and_mul(array, x), x)


@dtypes
def test_far_gates(array, dtype):
    gates = np.array([-1000, -200, -100, -90, -88.5, -87.5, 87.5, 88.5, 90, 100, 200, 1000], dtype)
    result = silu_and_mul(array, np.concatenate([gates, np.ones_like(gates)])[None])[0]
    np.testing.assert_allclose(result.astype(np.float64), np.maximum(gates.astype(np.float64), 0), atol=1e-35)


@dtypes
def test_nan_and_infinity(array, dtype):
    gates = np.array([np.nan, np.inf, -np.inf, 1, 0, 0, np.inf], dtype)
    ups = np.array([1, 2, 1, np.nan, np.inf, 5, 0], dtype)
    result = silu_and_mul(array, np.concatenate([gates, ups])[None])[0].astype(np.float32)
    np.testing.assert_array_equal(result, np.array([np.nan, np.inf, np.nan, np.nan, np.nan, 0, np.nan], np.float32))


@dtypes
@pytest.mark.parametrize("padding", [(8,), (1,), (2, 16), (1, 1, 5)], ids=name_of)
def test_strides_of_input_and_result_are_their_own(array, dtype, padding):
    x = random((3, 4, 5, 264), dtype)
    expected = silu_and_mul(array, x)
    assert_gated(expected, x)
    out = padded(np.zeros((3, 4, 5, 132), dtype), *padding)
    for view in (padded(x, *padding), turned(x)):
        np.testing.assert_array_equal(silu_and_mul(array, view), expected)
        np.testing.assert_array_equal(silu_and_mul(array, view, out=out), expected)
        np.testing.assert_array_equal(silu_and_mul(array, view, out=turned(out)), expected)


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 20),
    width=st.integers(1, 100) | st.integers(1, 20000),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    out_padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offsets=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_any_width_stride_and_alignment(array, dtype, rows, width, padding, out_padding, offsets):
    x = random((2, rows, 2 * width), dtype, width)
    out = padded(np.zeros((2, rows, width), dtype), *out_padding)
    result = silu_and_mul(array, padded(x, *padding), out=out, offsets=offsets)
    assert_gated(result, x)
    np.testing.assert_array_equal(result, silu_and_mul(array, x))


@dtypes
@pytest.mark.parametrize("width", [64, 77])
def test_nothing_but_the_rows_is_written(array, dtype, width):
    if array.name == "interface":
        pytest.skip("its arrays cannot be sliced")
    x = random((6, 2 * width), dtype)
    memory = array.output(np.full((8, 96), 3.0, dtype))
    pykv.silu_and_mul(memory[1:7, 5 : 5 + width], array.input(x))
    written = array.numpy(memory)
    assert_gated(written[1:7, 5 : 5 + width], x)
    written[1:7, 5 : 5 + width] = 3.0
    assert (written == 3.0).all()


@dtypes
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("width", [96, 101])
def test_the_result_may_replace_a_half_of_the_input(array, dtype, width, half):
    if array.name == "interface":
        pytest.skip("its arrays cannot be sliced")
    x = random((9, 2 * width), dtype)
    both = array.output(x)
    here = slice(half * width, (half + 1) * width)
    pykv.silu_and_mul(both[:, here], both)
    result = array.numpy(both)
    np.testing.assert_array_equal(result[:, here], silu_and_mul(array, x))
    there = slice((1 - half) * width, (2 - half) * width)
    np.testing.assert_array_equal(result[:, there], x[:, there])


@pytest.mark.parametrize("shape", [(0,), (0, 64), (3, 0), (2, 0, 8)], ids=name_of)
def test_empty(array, shape):
    assert silu_and_mul(array, np.zeros(shape, np.float32)).shape == (*shape[:-1], shape[-1] // 2)


@pytest.mark.parametrize(
    ("result", "x", "message"),
    [
        ((3, 4), (3, 9), r"input: the last dimension holds two halves and must be even, got shape \[3, 9\]"),
        ((3, 5), (3, 8), r"result: dimension 1 must equal width = 4, got shape \[3, 5\]"),
        ((2, 4), (3, 8), r"result: dimension 0 must be that of input, 3, got shape \[2, 4\]"),
        ((12,), (3, 8), r"result: must have 2 dimensions, got shape \[12\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(array, result, x, message):
    with pytest.raises(ValueError, match=f"silu_and_mul: {message}"):
        pykv.silu_and_mul(array.output(np.zeros(result, np.float32)), array.input(np.zeros(x, np.float32)))


def test_dtypes_that_do_not_fit_are_named(array):
    x = np.zeros((3, 8), np.float16)
    with pytest.raises(TypeError, match="silu_and_mul: result: dtype must be that of input, float16, got float32"):
        pykv.silu_and_mul(array.output(np.zeros((3, 4), np.float32)), array.input(x))
    with pytest.raises(TypeError, match="input: dtype must be float32 or float16 or bfloat16, got int32"):
        pykv.silu_and_mul(array.output(np.zeros((3, 4), np.int32)), array.input(x.astype(np.int32)))


def test_rows_must_be_contiguous():
    with pytest.raises(ValueError, match="input: the last dimension must be contiguous"):
        pykv.silu_and_mul(np.zeros((3, 4), np.float32), np.zeros((8, 3), np.float32).T)
    with pytest.raises(ValueError, match="result: the last dimension must be contiguous"):
        pykv.silu_and_mul(np.zeros((4, 3), np.float32).T, np.zeros((3, 8), np.float32))
