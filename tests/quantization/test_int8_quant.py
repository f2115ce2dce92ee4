"""static_scaled_int8_quant, dynamic_scaled_int8_quant and per_token_quant_int8."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libraries import Numpy
from quantization import reference
from quantization.inputs import F, assert_same_bits, odd_rows, rows
from rows import FLOATS, name_of, padded, turned

import pykv

DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
WIDTHS = [1, 7, 8, 16, 100, 128, 1024, 1032, 4096, 5000, 40000]


def static(array, x, scale, azp=None, *, offset=0):
    result = array.output(np.zeros(x.shape, np.int8), offset=offset)
    zero = None if azp is None else array.input(np.array([azp], np.int32))
    pykv.static_scaled_int8_quant(result, array.input(x, offset=offset), scale, zero)
    assert_same_bits(array.numpy(result), reference.static_int8(x, scale, azp))


def dynamic(array, x, *, azp=False, offset=0, op="dynamic_scaled_int8_quant"):
    count = int(np.prod(x.shape[:-1]))
    result = array.output(np.zeros(x.shape, np.int8), offset=offset)
    scale = array.output(np.full((count, 1), -1, F))
    zeros = array.output(np.full((count, 1), 77, np.int32)) if azp else None
    given = array.input(x, offset=offset)
    if op == "per_token_quant_int8":
        pykv.per_token_quant_int8(result, given, scale)
        wanted = reference.per_token_int8(x)
    else:
        pykv.dynamic_scaled_int8_quant(result, given, scale, zeros)
        wanted = reference.dynamic_int8_azp(x) if azp else reference.dynamic_int8(x)
    assert_same_bits(array.numpy(scale), wanted[1].reshape(-1, 1))
    if azp:
        assert_same_bits(array.numpy(zeros), wanted[2].reshape(-1, 1))
    assert_same_bits(array.numpy(result), wanted[0])


@DTYPES
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(array, dtype, width):
    x = rows((5, width), dtype)
    static(array, x, 0.37)
    static(array, x, 0.02, -17)
    for azp in (False, True):
        dynamic(array, x, azp=azp)
    dynamic(array, x, op="per_token_quant_int8")


@DTYPES
def test_many_rows(array, dtype):
    x = rows((700, 264), dtype)
    static(array, x, 0.11)
    for azp in (False, True):
        dynamic(array, x, azp=azp)
    dynamic(array, x[:300], op="per_token_quant_int8")
    dynamic(array, rows((300, 4096), dtype), azp=True)


def test_more_than_caches_hold(array):
    """Codes that go past the caches, from any address on."""
    x = rows((1030, 4100), FLOATS[2], odd=True)
    for azp in (False, True):
        dynamic(array, x, azp=azp, offset=3)
    dynamic(array, x, op="per_token_quant_int8", offset=3)


@DTYPES
def test_zero_points_of_one_sign_and_of_neighbours(array, dtype):
    """Rows without a negative or a positive number, whose spread is far below their size, or the smallest there is."""
    x = np.abs(rows((12, 333), dtype, seed=5))
    x[1] = (1000 + np.arange(333) % 3).astype(dtype)
    x[2] = np.nextafter(np.float16(0), np.float16(1)).astype(dtype) * (np.arange(333) % 2).astype(dtype)
    x[3] = np.finfo(dtype).max if dtype.kind == "f" else 3e38
    x[4, ::2] = -x[3, ::2]
    x[5] = dtype.type(-0.0)
    for v in (x, -x):
        dynamic(array, v, azp=True)


def test_halves_and_next_to_them(array):
    halves = np.arange(-126, 127).astype(F) + F(0.5)
    x = np.concatenate(
        [halves, np.nextafter(halves, F(0)), np.nextafter(halves, F(np.inf)), [F(127), F(-127), F(-0.0)]]
    )
    dynamic(array, x[None], op="per_token_quant_int8")
    dynamic(array, x[None])


@DTYPES
def test_nan_and_infinity(array, dtype):
    x = rows((13, 48), dtype, odd=True)
    static(array, x, 0.25)
    static(array, x, 0.25, 3)
    for azp in (False, True):
        dynamic(array, x, azp=azp)
    dynamic(array, x, op="per_token_quant_int8")


@DTYPES
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 0.1, 1.0, 1e30])
def test_static_scales(array, dtype, scale):
    x = rows((9, 136), dtype, seed=3)
    static(array, x, scale)
    for azp in (-128, 0, 127, 2**31 - 1, -(2**31), 1 << 22):
        static(array, x, scale, azp)


def test_ties(array):
    x = (np.arange(-260, 260) / 2).astype(F)[None]
    static(array, x, 1.0)
    static(array, x, 0.5, 1)
    exact = np.concatenate([x, np.array([[127]], F)], axis=1)
    for op in ("dynamic_scaled_int8_quant", "per_token_quant_int8"):
        dynamic(array, exact[:, np.abs(exact[0]) <= 127], op=op)


def test_rows_of_one_number(array):
    x = np.repeat(np.array([[3.5], [-2.0], [0.0], [1e-3]], F), 64, axis=1)
    result, scale = array.output(np.zeros(x.shape, np.int8)), array.output(np.zeros((4, 1), F))
    azp = array.output(np.ones((4, 1), np.int32))
    pykv.dynamic_scaled_int8_quant(result, array.input(x), scale, azp)
    assert array.numpy(azp).tolist() == [[0]] * 4
    assert array.numpy(result)[:, 0].tolist() == [127, -127, 0, 127]
    np.testing.assert_allclose(array.numpy(result) * array.numpy(scale), x, rtol=1e-6)
    dynamic(array, x, azp=True)


def test_azp_uses_the_whole_range(array):
    x = np.random.default_rng(0).uniform(2, 5, (3, 500)).astype(F)
    result, scale = array.output(np.zeros(x.shape, np.int8)), array.output(np.zeros(3, F))
    azp = array.output(np.zeros(3, np.int32))
    pykv.dynamic_scaled_int8_quant(result, array.input(x), scale, azp)
    q, zero = array.numpy(result).astype(np.float64), array.numpy(azp)[:, None]
    assert (q.min(), q.max()) == (-128, 127)
    np.testing.assert_allclose((q - zero) * array.numpy(scale)[:, None], x, atol=0.51 * 3 / 255)


@pytest.mark.parametrize("offset", [1, 4])
def test_alignment(array, offset):
    for dtype in FLOATS:
        x = rows((3, 96), dtype)
        static(array, x, 0.1, offset=offset)
        dynamic(array, x, offset=offset)
        dynamic(array, x, azp=True, offset=offset)


@DTYPES
def test_strides(array, dtype):
    x = padded(turned(rows((2, 3, 4, 40), dtype)), 24)
    memory = np.zeros((24, 2), F)
    result = padded(np.zeros(x.shape, np.float32), 3).astype(np.int8)
    q, scale = array.output(result), array.output(memory[:, :1])
    pykv.dynamic_scaled_int8_quant(q, array.input(x), scale)
    wanted = reference.dynamic_int8(x)
    assert_same_bits(array.numpy(q), wanted[0])
    assert_same_bits(array.numpy(scale), wanted[1].reshape(-1, 1))
    pykv.static_scaled_int8_quant(q, array.input(x), 0.2)
    assert_same_bits(array.numpy(q), reference.static_int8(x, 0.2))


@given(odd_rows(st.integers(1, 600)), st.integers(0, 3), st.booleans())
def test_any(x, offset, azp):
    dynamic(Numpy(), x, azp=azp, offset=offset)
    dynamic(Numpy(), x, offset=offset, op="per_token_quant_int8")
    static(Numpy(), x, 0.3, 5 if azp else None, offset=offset)


def test_empty(array):
    for shape in ((0, 8), (3, 0)):
        x, q = array.input(np.zeros(shape, F)), array.output(np.zeros(shape, np.int8))
        pykv.static_scaled_int8_quant(q, x, 1.0)
        pykv.dynamic_scaled_int8_quant(q, x, array.output(np.zeros((shape[0], 1), F)))


def test_refused(array):
    x, q = array.input(rows((3, 8), np.dtype(F))), array.output(np.zeros((3, 8), np.int8))
    with pytest.raises(ValueError, match="dynamic_scaled_int8_quant: scale: dimension 0 must equal num_rows = 3"):
        pykv.dynamic_scaled_int8_quant(q, x, array.output(np.zeros(4, F)))
    with pytest.raises(ValueError, match="static_scaled_int8_quant: azp: must have 1 element"):
        pykv.static_scaled_int8_quant(q, x, 1.0, array.input(np.zeros(3, np.int32)))
    with pytest.raises(TypeError, match="result: "):
        pykv.static_scaled_int8_quant(array.output(np.zeros((3, 8), np.uint8)), x, 1.0)
    with pytest.raises(TypeError, match="input: "):
        pykv.per_token_quant_int8(q, array.input(np.zeros((3, 8), np.int32)), array.output(np.zeros(3, F)))
