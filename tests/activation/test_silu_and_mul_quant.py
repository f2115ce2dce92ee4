from __future__ import annotations

import numpy as np
import pytest
from activation.quantised import CODES, E4M3, assert_codes
from activation.reference import silu
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, name_of, padded, random

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
outs = pytest.mark.parametrize("out", CODES, ids=name_of)


def quantise(array, x, scale, out, *, memory=None, offsets=(0, 0)):
    """The codes for a NumPy array; ``memory`` gives their strides."""
    memory = np.zeros((*x.shape[:-1], x.shape[-1] // 2), out) if memory is None else memory
    # Numba's interface has no name for fp8: the bytes say as much
    result = array.output(memory.view(np.uint8) if out == E4M3 else memory, offset=offsets[0])
    pykv.silu_and_mul_quant(result, array.input(x, offset=offsets[1]), scale)
    return array.numpy(result).view(out)


def check(result, x, scale):
    """The codes of R_T(R_T(silu(a)) * b), either one where the roundings to T hang on the last bits of fp32."""
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    low, high = (silu(gate) * (1 + error) for error in (-1e-6, 1e-6))
    if x.dtype != np.float32:
        low, high = (y.astype(x.dtype).astype(np.float64) * up for y in (low, high))
        low, high = (y.astype(x.dtype).astype(np.float64) for y in (low, high))
        assert np.count_nonzero(low != high) <= 5 + 0.01 * low.size
    else:
        low, high = low * up, high * up
    assert_codes(result, low / np.float32(scale), high / np.float32(scale))


@dtypes
@outs
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8, 24, 64, 781, 2048, 13824])
@pytest.mark.parametrize("rows", [1, 17, 86])
def test_widths(array, dtype, out, rows, width):
    x = random((rows, 2 * width), dtype, width)
    check(quantise(array, x, 0.013, out), x, 0.013)


@outs
@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 12),
    width=st.integers(1, 100) | st.integers(1, 16384),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    out_padding=st.integers(0, 17),
    offsets=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    scale=st.floats(1e-4, 10),
)
def test_any_width_stride_and_alignment(array, out, dtype, rows, width, padding, out_padding, offsets, scale):
    x = random((2, rows, 2 * width), dtype, width)
    memory = np.zeros((2, rows, width + out_padding), out)[..., :width]
    result = quantise(array, padded(x, *padding), scale, out, memory=memory, offsets=offsets)
    check(result, x, scale)


@dtypes
@outs
def test_too_large_numbers_saturate_and_nan_is_a_number(array, dtype, out):
    gates = np.array([100, 100, np.nan, 1, np.inf, 100, 0], dtype)
    ups = np.array([100, -100, 1, np.nan, 1, -np.inf, 3], dtype)
    result = quantise(array, np.concatenate([gates, ups])[None], 0.01, out)[0].astype(np.float32)
    most, least, nan = (448, -448, 448) if out == E4M3 else (127, -128, 0)
    np.testing.assert_array_equal(result, [most, least, nan, nan, most, least, 0])


def test_ties_go_to_even(array):
    gates = np.full(8, 200.0, np.float32)  # silu(200) = 200
    ups = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 3.5, 126.5, -127.5], np.float32)
    x = np.concatenate([gates, ups])[None]
    wanted = [0, 2, 2, 0, -2, 4, 126, -128]
    np.testing.assert_array_equal(quantise(array, x, 200.0, CODES[1])[0], wanted)
    ups = np.array([17, 19, 21, 23, -17, 34, 38, 464], np.float32)  # between codes of E4M3
    x = np.concatenate([gates, ups])[None]
    result = quantise(array, x, 200.0, E4M3)[0].astype(np.float32)
    np.testing.assert_array_equal(result, [16, 20, 20, 24, -16, 32, 40, 448])


def test_the_scale_may_be_an_array(array):
    x = random((3, 40), FLOATS[1])
    result = quantise(array, x, array.input(np.array([0.25], np.float32)), CODES[1])
    np.testing.assert_array_equal(result, quantise(array, x, 0.25, CODES[1]))


@pytest.mark.parametrize("shape", [(0,), (0, 64), (3, 0)], ids=name_of)
def test_empty(array, shape):
    assert quantise(array, np.zeros(shape, np.float32), 1.0, E4M3).size == 0


def test_what_does_not_fit_is_named(array):
    x = array.input(np.zeros((3, 8), np.float16))
    with pytest.raises(
        TypeError, match="silu_and_mul_quant: result: dtype must be float8_e4m3fn or uint8 or int8, got"
    ):
        pykv.silu_and_mul_quant(array.output(np.zeros((3, 4), np.float16)), x, 1.0)
    with pytest.raises(ValueError, match=r"silu_and_mul_quant: result: dimension 1 must equal width = 4, got shape"):
        pykv.silu_and_mul_quant(array.output(np.zeros((3, 5), np.int8)), x, 1.0)
    with pytest.raises(ValueError, match=r"silu_and_mul_quant: scale: must have 1 element, got shape \[2\]"):
        pykv.silu_and_mul_quant(array.output(np.zeros((3, 4), np.int8)), x, array.input(np.ones(2, np.float32)))
