from __future__ import annotations

import numpy as np
import pytest
from activation.reference import gelu_quick, gelu_tanh, relu2, xielu
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, assert_rounded_once, name_of, padded, random

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
ALPHAS = (0.203, -0.85)

OPS = {
    "gelu_new": (pykv.gelu_new, gelu_tanh),
    "gelu_fast": (pykv.gelu_fast, gelu_tanh),
    "gelu_quick": (pykv.gelu_quick, gelu_quick),
    "relu2": (pykv.relu2, relu2),
    "relu_squared": (pykv.relu_squared, relu2),
    "xielu": (lambda out, x: pykv.xielu(out, x, *ALPHAS), lambda x: xielu(x, *ALPHAS)),
}
ops = pytest.mark.parametrize("op", OPS)
# What fp32 may lose of each, relatively; where terms cancel (xielu near 0) also absolutely.
LOST, ATOL = 2e-5, 3e-7


def apply(array, op, x, *, out=None, offsets=(0, 0)):
    result = array.output(np.full(x.shape, np.nan, x.dtype) if out is None else out, offset=offsets[0])
    OPS[op][0](result, array.input(x, offset=offsets[1]))
    return array.numpy(result)


def assert_right(actual, op, x):
    assert_rounded_once(actual, OPS[op][1](x.astype(np.float64)), lost=LOST, atol=ATOL)


@dtypes
@ops
@pytest.mark.parametrize("shape", [(1,), (7, 1), (3, 33), (2, 3, 4096), (5000, 24), (9000, 513)], ids=name_of)
def test_shapes(array, op, dtype, shape):
    x = random(shape, dtype)
    assert_right(apply(array, op, x), op, x)


@dtypes
@ops
def test_the_whole_range(array, op, dtype):
    x = np.linspace(-30, 30, 20011).astype(dtype)
    assert_right(apply(array, op, x), op, x)


@ops
@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 20),
    width=st.integers(1, 100) | st.integers(1, 16384),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    out_padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offsets=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_any_width_stride_and_alignment(array, op, dtype, rows, width, padding, out_padding, offsets):
    x = random((2, rows, width), dtype, width)
    out = padded(np.zeros((2, rows, width), dtype), *out_padding)
    assert_right(apply(array, op, padded(x, *padding), out=out, offsets=offsets), op, x)


@dtypes
@ops
def test_nan_and_infinity(array, op, dtype):
    result = apply(array, op, np.array([np.nan, np.inf, 0.0], dtype)).astype(np.float32)
    zero = result[2] if op == "xielu" else 0.0  # where xielu is eps, nearly
    of_nan = 0.0 if op == "relu_squared" else np.nan
    np.testing.assert_array_equal(result, np.array([of_nan, np.inf, zero], np.float32))


@dtypes
@ops
def test_in_place(array, op, dtype):
    x = random((9, 101), dtype)
    both = array.output(x)
    OPS[op][0](both, both)
    np.testing.assert_array_equal(array.numpy(both), apply(array, op, x))


def test_the_parameters_of_xielu_may_be_arrays(array):
    x = random((3, 40), np.dtype(np.float32))
    out = array.output(np.zeros_like(x))
    pykv.xielu(out, array.input(x), *(array.input(np.array([a], np.float32)) for a in ALPHAS), beta=0.25, eps=-1e-3)
    assert_rounded_once(
        array.numpy(out), xielu(x.astype(np.float64), *ALPHAS, beta=0.25, eps=-1e-3), lost=LOST, atol=ATOL
    )


@ops
@pytest.mark.parametrize("shape", [(0,), (0, 64), (3, 0), (2, 0, 8)], ids=name_of)
def test_empty(array, op, shape):
    assert apply(array, op, np.zeros(shape, np.float32)).shape == shape


@ops
def test_what_does_not_fit_is_named(array, op):
    x = array.input(np.zeros((3, 8), np.float16))
    with pytest.raises(ValueError, match=rf"{op}: out: must have the shape of input, \[3, 8\], got \[3, 9\]"):
        OPS[op][0](array.output(np.zeros((3, 9), np.float16)), x)
    with pytest.raises(TypeError, match=f"{op}: out: dtype must be that of input, float16, got float32"):
        OPS[op][0](array.output(np.zeros((3, 8), np.float32)), x)
