from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from norm import reference
from norm.inputs import EPSILON, WIDTHS, dtypes
from rows import FLOATS, assert_rounded_once, name_of, padded, random, turned

import pykv


def rms_norm(array, x, weight=None, *, out=None, offsets=(0, 0, 0), epsilon=EPSILON):
    """The result for NumPy arrays; ``out`` gives its strides."""
    out_offset, x_offset, weight_offset = offsets
    made = array.output(np.full_like(x, np.nan) if out is None else out, offset=out_offset)
    pykv.rms_norm(
        made,
        array.input(x, offset=x_offset),
        None if weight is None else array.input(weight, offset=weight_offset),
        epsilon,
    )
    return array.numpy(made)


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(array, dtype, width):
    x, weight = random((5, width), dtype), random((width,), dtype, 1)
    assert_rounded_once(rms_norm(array, x, weight), reference.rms_norm(x, weight, EPSILON))


@dtypes
@pytest.mark.parametrize(
    "shape",
    [(1, 64), (33, 4096), (1025, 128), (2, 3, 100), (4, 5, 6, 72), (1, 7, 1, 8), (300, 1, 513), (2, 1, 3, 1, 2, 40)],
    ids=name_of,
)
def test_shapes(array, dtype, shape):
    x, weight = random(shape, dtype), random(shape[-1:], dtype, 1)
    assert_rounded_once(rms_norm(array, x, weight), reference.rms_norm(x, weight, EPSILON))


@dtypes
@pytest.mark.parametrize("padding", [(8,), (1,), (3, 16), (1, 1, 5)], ids=name_of)
@pytest.mark.parametrize("order", [np.asarray, turned], ids=["in order", "turned"])
def test_strides_of_input_and_out_are_their_own(array, dtype, padding, order):
    x, weight = random((3, 4, 5, 264), dtype), random((264,), dtype, 1)
    expected = reference.rms_norm(x, weight, EPSILON)
    strided = padded(order(x), *padding) if order is np.asarray else turned(x)
    assert_rounded_once(rms_norm(array, strided, weight), expected)
    assert_rounded_once(rms_norm(array, x, weight, out=padded(np.zeros_like(x), *reversed(padding))), expected)
    assert_rounded_once(rms_norm(array, strided, weight, out=turned(np.zeros_like(x))), expected)


@dtypes
def test_nothing_but_the_rows_is_written(array, dtype):
    if array.name == "interface":
        pytest.skip("its arrays cannot be sliced")
    x = random((6, 77), dtype)
    memory = array.output(np.full((8, 96), 3.0, dtype))
    pykv.rms_norm(memory[1:7, 5:82], array.input(x), None, EPSILON)
    written = array.numpy(memory)
    assert_rounded_once(written[1:7, 5:82], reference.rms_norm(x, None, EPSILON))
    written[1:7, 5:82] = 3.0
    assert (written == 3.0).all()


@dtypes
def test_without_weight(array, dtype):
    x = random((9, 384), dtype)
    ones = np.ones(384, dtype)
    np.testing.assert_array_equal(rms_norm(array, x), rms_norm(array, x, ones))


@dtypes
@pytest.mark.parametrize("width", [96, 101, 4096, 20008])
def test_out_may_be_the_input(array, dtype, width):
    x, weight = random((4, width), dtype), random((width,), dtype, 1)
    both = array.output(x)
    pykv.rms_norm(both, both, array.input(weight), EPSILON)
    np.testing.assert_array_equal(array.numpy(both), rms_norm(array, x, weight))


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 9),
    width=st.integers(1, 300) | st.integers(1, 16384),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    out_padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offsets=st.tuples(*[st.integers(0, 9)] * 3),
    with_weight=st.booleans(),
)
def test_any_width_stride_and_alignment(array, dtype, rows, width, padding, out_padding, offsets, with_weight):
    x = random((2, rows, width), dtype, width)
    weight = random((width,), dtype, 1) if with_weight else None
    out = padded(np.zeros_like(x), *out_padding)
    result = rms_norm(array, padded(x, *padding), weight, out=out, offsets=offsets)
    assert_rounded_once(result, reference.rms_norm(x, weight, EPSILON))
    # neither strides nor alignment change a bit
    np.testing.assert_array_equal(result, rms_norm(array, x, weight))


@dtypes
@pytest.mark.parametrize("width", [128, 1000, 4096, 8195])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_row_does_not_depend_on_the_others(array, dtype, width, padding):
    x, weight = random((301, width), dtype), random((width,), dtype, 1)
    together = rms_norm(array, padded(x, padding), weight)
    for rows in (slice(0, 1), slice(7, 9), slice(40, 300)):
        np.testing.assert_array_equal(rms_norm(array, padded(x, padding)[rows], weight), together[rows])


@dtypes
@pytest.mark.parametrize("width", [24, 4096, 20008])
def test_nan_and_infinity_stay_in_their_row(array, dtype, width):
    x, weight = random((5, width), dtype), random((width,), dtype, 1)
    x[1, width // 2] = np.nan
    x[2, 3] = np.inf
    x[3] = 0
    result = rms_norm(array, x, weight)
    assert np.isnan(result[1]).all()
    # inf * (1 / inf) is NaN, and everything else in its row 0
    assert np.flatnonzero(np.isnan(result[2])).tolist() == [3]
    assert (np.delete(result[2], 3) == 0).all()
    assert (result[3] == 0).all()
    for row in (0, 4):
        assert_rounded_once(result[row], reference.rms_norm(x[row], weight, EPSILON))


@dtypes
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFF80FFFF], ids=hex)
def test_nan_has_any_bits(array, dtype, bits):
    """That of float32 weights beside 16-bit rows: rounding must not carry over into another number."""
    weight = np.full(96, bits, np.uint32).view(np.float32)
    assert np.isnan(rms_norm(array, random((3, 96), dtype), weight).astype(np.float32)).all()


def test_squares_of_large_halves_do_not_overflow(array):
    x = np.full((2, 512), 60000, np.float16)
    np.testing.assert_array_equal(rms_norm(array, x), np.ones_like(x))


@dtypes
@pytest.mark.parametrize("epsilon", [0.0, 1e-12, 0.5, 100.0])
def test_epsilon(array, dtype, epsilon):
    x = random((3, 72), dtype)
    assert_rounded_once(rms_norm(array, x, epsilon=epsilon), reference.rms_norm(x, None, epsilon))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 8), (0, 5, 2, 7)], ids=name_of)
def test_empty(array, shape):
    x = np.zeros(shape, np.float32)
    assert rms_norm(array, x, np.ones(shape[-1], np.float32)).shape == shape


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": (1,) * 8 + (64,)}, ValueError, r"rms_norm: input: (must have 1 to 8 dimensions|at most 8 dimensions)"),
        ({"out": (4, 64)}, ValueError, r"rms_norm: out: must have the shape of input, \[3, 64\], got \[4, 64\]"),
        ({"out_dtype": np.float16}, TypeError, "rms_norm: out: dtype must be that of input, float32, got float16"),
        ({"weight": (63,)}, ValueError, r"rms_norm: weight: dimension 0 must equal hidden_size = 64, got shape \[63\]"),
        (
            {"weight": (1, 64)},
            ValueError,
            r"rms_norm: weight: dimension 0 must equal dimension 0 of input = 3, got shape \[1, 64\]",
        ),
        (
            {"weight_dtype": np.float16},
            TypeError,
            "rms_norm: weight: dtype must be that of input, float32, got float16",
        ),
        ({"x_dtype": np.int32}, TypeError, "rms_norm: input: dtype must be float32 or float16 or bfloat16, got int32"),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    wanted = {"out": (3, 64), "x": (3, 64), "weight": (64,)} | change
    made = {k: np.zeros(wanted[k], wanted.get(f"{k}_dtype", np.float32)) for k in ("out", "x", "weight")}
    with pytest.raises(error, match=message):
        pykv.rms_norm(array.output(made["out"]), array.input(made["x"]), array.input(made["weight"]), EPSILON)


def test_rows_must_be_contiguous():
    x = np.zeros((8, 3), np.float32)
    with pytest.raises(ValueError, match="input: the last dimension must be contiguous"):
        pykv.rms_norm(np.zeros((3, 8), np.float32), x.T, None)
    with pytest.raises(ValueError, match="out: the last dimension must be contiguous"):
        pykv.rms_norm(np.zeros((8, 3), np.float32).T, np.zeros((3, 8), np.float32), None)
    with pytest.raises(ValueError, match="weight: must be contiguous, got stride 2"):
        pykv.rms_norm(x, x, np.zeros(6, np.float32)[::2])


def test_input_is_required():
    x = np.zeros((2, 8), np.float32)
    with pytest.raises(TypeError, match="input"):
        pykv.rms_norm(x, None, None)
    with pytest.raises(TypeError, match="out"):
        pykv.rms_norm(None, x, None)


@dtypes
@pytest.mark.parametrize("wide_weight", [False, True], ids=["weight like input", "weight in float32"])
@pytest.mark.parametrize(
    "shape", [(5, 128), (5, 4096), (3, 1000), (2, 20008), (4, 7, 128), (3, 2, 4096), (1, 2, 64)], ids=str
)
@pytest.mark.parametrize("padding", [0, 8, 3])
def test_weights_of_rows(array, dtype, wide_weight, shape, padding):
    x = random(shape, dtype)
    weight = random((shape[0], shape[-1]), np.dtype(np.float32) if wide_weight else dtype, 1)
    out = array.output(np.full_like(x, np.nan))
    pykv.rms_norm(out, array.input(x), array.input(padded(weight, padding)), EPSILON)
    each = weight.reshape(shape[0], *[1] * (len(shape) - 2), shape[-1])
    assert_rounded_once(array.numpy(out), reference.rms_norm(x, each, EPSILON))


def test_weights_of_rows_that_do_not_fit(array):
    x = array.output(np.zeros((3, 8), np.float32))
    with pytest.raises(
        ValueError, match=r"weight: dimension 0 must equal dimension 0 of input = 3, got shape \[2, 8\]"
    ):
        pykv.rms_norm(x, x, array.input(np.zeros((2, 8), np.float32)))
    with pytest.raises(ValueError, match="weight: "):
        pykv.gemma_rms_norm(x, x, array.input(np.zeros((3, 8), np.float32)))
