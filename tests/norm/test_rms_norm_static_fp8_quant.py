from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from norm import reference
from norm.inputs import EPSILON, WIDTHS, dtypes
from norm.quantised import assert_codes
from rows import FLOATS, padded, random

import pykv

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def quantise(array, x, weight, scale, residual=None, *, result_padding=(0,), offset=0):
    """What NumPy arrays become: codes, residual."""
    out = array.output(padded(np.zeros(x.shape, E4M3), *result_padding), offset=offset)
    made, w = array.input(x, offset=offset), None if weight is None else array.input(weight, offset=offset)
    if residual is None:
        pykv.rms_norm_static_fp8_quant(out, made, w, scale, EPSILON)
        return array.numpy(out).view(E4M3), None
    total = array.output(residual, offset=offset)
    pykv.fused_add_rms_norm_static_fp8_quant(out, made, total, w, scale, EPSILON)
    np.testing.assert_array_equal(array.numpy(made), x)  # stays as it is
    return array.numpy(out).view(E4M3), array.numpy(total)


def check(array, x, weight, scale, residual=None, **options):
    codes, total = quantise(array, x, weight, scale, residual, **options)
    z = x
    if residual is not None:
        z = reference.add(x, residual)
        np.testing.assert_array_equal(total, z)
    inverse = np.float32(1) / np.float32(scale)
    low, high = reference.normed_once(z, np.ones(x.shape[-1], x.dtype) if weight is None else weight, EPSILON)
    with np.errstate(over="ignore"):
        assert_codes(codes, *(reference.e4m3(y.astype(np.float32) * inverse) for y in (low, high)))


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "with residual"])
def test_widths(array, dtype, width, with_residual):
    x, weight = random((5, width), dtype), random((width,), dtype, 1)
    check(array, x, weight, 0.01, random((5, width), dtype, 2) if with_residual else None)


@dtypes
@pytest.mark.parametrize("scale", [1e-4, 0.01, 1.0, 10.0, 1e6])
@pytest.mark.parametrize("wide_weight", [False, True], ids=["weight like input", "weight in float32"])
def test_scales(array, dtype, scale, wide_weight):
    weight = random((512,), np.dtype(np.float32) if wide_weight else dtype, 1)
    check(array, random((7, 512), dtype), weight, scale)


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 9),
    width=st.integers(1, 300) | st.integers(1, 16384),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    result_padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offset=st.integers(0, 9),
    with_residual=st.booleans(),
)
def test_any_width_stride_and_alignment(array, dtype, rows, width, padding, result_padding, offset, with_residual):
    x = padded(random((2, rows, width), dtype, width), *padding)
    residual = random((2, rows, width), dtype, width + 1) if with_residual else None
    check(array, x, random((width,), dtype, 1), 0.02, residual, result_padding=result_padding, offset=offset)


@dtypes
def test_the_scale_may_be_a_number_or_an_array_anywhere(array, dtype):
    x, weight = random((3, 100), dtype), random((100,), dtype, 1)
    expected, _ = quantise(array, x, weight, 0.25)
    for scale in (np.float32(0.25), np.array([0.25], np.float32), array.input(np.array([0.25], np.float32))):
        codes, _ = quantise(array, x, weight, scale)
        np.testing.assert_array_equal(codes.view(np.uint8), expected.view(np.uint8))


@dtypes
@pytest.mark.parametrize("scale", [1.0, 0.013, 3e-6, 1e-30, 1e30])
def test_many_rows_of_all_magnitudes_and_nan(array, dtype, scale):
    """Much at once may be worked out another way (the CPU's tables, where NaN is looked for afterwards)."""
    x, weight = random((20, 4000), dtype), random((4000,), dtype, 1)
    weight = (weight.astype(np.float32) * np.float32(2) ** -(np.arange(4000) % 14)).astype(dtype)
    check(array, x, weight, scale)
    codes, _ = quantise(array, x, weight, scale)
    weight[7] = np.nan
    with_nan, _ = quantise(array, x, weight, scale)
    assert (with_nan.astype(np.float32)[:, 7] == 448).all()
    others = np.arange(4000) != 7
    np.testing.assert_array_equal(with_nan.view(np.uint8)[:, others], codes.view(np.uint8)[:, others])


def test_what_saturates(array):
    x = np.ones((1, 8), np.float32)
    weight = np.array([1, -1, np.nan, np.inf, -np.inf, 0, 1e30, -1e-30], np.float32)
    codes, _ = quantise(array, x, weight, 1.0)
    assert codes.astype(np.float32).tolist()[0] == [1, -1, 448, 448, -448, 0, 448, 0]
    codes, _ = quantise(array, x, weight, 0.0)  # times infinity
    assert codes.astype(np.float32).tolist()[0] == [448, -448, 448, 448, -448, 448, 448, -448]
    codes, _ = quantise(array, np.array([[np.nan, 1, 2, 3]], np.float32), None, 1.0)
    assert (codes.astype(np.float32) == 448).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"result": (3, 63)}, ValueError, r"result: must have the shape of input, \[3, 64\], got \[3, 63\]"),
        ({"result_dtype": np.float16}, TypeError, "result: dtype must be float8_e4m3fn or uint8, got float16"),
        ({"scale": np.ones(2, np.float32)}, ValueError, r"scale: must have 1 element, got shape \[2\]"),
        ({"scale": np.ones(1, np.float16)}, TypeError, "scale: dtype must be float32, got float16"),
        ({"scale": None}, TypeError, "scale: is required"),
        ({"residual": (2, 64)}, ValueError, r"residual: must have the shape of input, \[3, 64\], got \[2, 64\]"),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    wanted = {"result": (3, 64), "result_dtype": np.uint8, "scale": 1.0, "residual": (3, 64)} | change
    result = array.output(np.zeros(wanted["result"], wanted["result_dtype"]))
    x, residual = array.input(np.zeros((3, 64), np.float32)), array.output(np.zeros(wanted["residual"], np.float32))
    with pytest.raises(error, match="fused_add_rms_norm_static_fp8_quant: " + message):
        pykv.fused_add_rms_norm_static_fp8_quant(result, x, residual, None, wanted["scale"], EPSILON)
    if "residual" not in change:
        with pytest.raises(error, match="rms_norm_static_fp8_quant: " + message):
            pykv.rms_norm_static_fp8_quant(result, x, None, wanted["scale"], EPSILON)
