from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from norm import reference
from norm.inputs import EPSILON, WIDTHS, dtypes
from rows import FLOATS, assert_rounded_once, name_of, padded, random, turned

import pykv


def fused_add_rms_norm(array, x, residual, weight, *, offsets=(0, 0, 0)):
    """What NumPy arrays become: input, residual."""
    x_offset, residual_offset, weight_offset = offsets
    made_x, made_residual = array.output(x, offset=x_offset), array.output(residual, offset=residual_offset)
    made_weight = None if weight is None else array.input(weight, offset=weight_offset)
    pykv.fused_add_rms_norm(made_x, made_residual, made_weight, EPSILON)
    return array.numpy(made_x), array.numpy(made_residual)


def check(array, x, residual, weight, **options):
    normed, total = fused_add_rms_norm(array, x, residual, weight, **options)
    expected = reference.add(x, residual)
    np.testing.assert_array_equal(total, expected)
    assert_rounded_once(normed, reference.rms_norm(expected, weight, EPSILON))
    return normed


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(array, dtype, width):
    check(array, *(random((5, width), dtype, seed) for seed in (0, 1)), random((width,), dtype, 2))


@dtypes
@pytest.mark.parametrize("shape", [(1, 64), (33, 4096), (1025, 128), (2, 3, 100), (4, 5, 6, 72)], ids=name_of)
def test_shapes(array, dtype, shape):
    check(array, *(random(shape, dtype, seed) for seed in (0, 1)), random(shape[-1:], dtype, 2))


@dtypes
def test_strides_of_input_and_residual_are_their_own(array, dtype):
    x, residual, weight = random((3, 4, 136), dtype), random((3, 4, 136), dtype, 1), random((136,), dtype, 2)
    compact = check(array, x, residual, weight)
    np.testing.assert_array_equal(check(array, padded(x, 1, 8), residual, weight), compact)
    np.testing.assert_array_equal(check(array, x, padded(residual, 2, 5), weight), compact)
    np.testing.assert_array_equal(check(array, turned(x), padded(residual, 3), weight), compact)


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 9),
    width=st.integers(1, 300) | st.integers(1, 16384),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    residual_padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offsets=st.tuples(*[st.integers(0, 9)] * 3),
    with_weight=st.booleans(),
)
def test_any_width_stride_and_alignment(array, dtype, rows, width, padding, residual_padding, offsets, with_weight):
    x, residual = random((2, rows, width), dtype, width), random((2, rows, width), dtype, width + 1)
    weight = random((width,), dtype, 1) if with_weight else None
    normed = check(array, padded(x, *padding), padded(residual, *residual_padding), weight, offsets=offsets)
    np.testing.assert_array_equal(normed, check(array, x, residual, weight))


@dtypes
def test_it_is_the_sum_and_then_rms_norm(array, dtype):
    x, residual, weight = random((7, 1000), dtype), random((7, 1000), dtype, 1), random((1000,), dtype, 2)
    normed, total = fused_add_rms_norm(array, x, residual, weight)
    apart = array.output(np.zeros_like(x))
    pykv.rms_norm(apart, array.input(total), array.input(weight), EPSILON)
    np.testing.assert_array_equal(normed, array.numpy(apart))


@dtypes
@pytest.mark.parametrize("width", [128, 1000, 4096, 8195])
def test_a_row_does_not_depend_on_the_others(array, dtype, width):
    x, residual, weight = random((301, width), dtype), random((301, width), dtype, 1), random((width,), dtype, 2)
    together, _ = fused_add_rms_norm(array, x, residual, weight)
    for rows in (slice(0, 1), slice(7, 9), slice(40, 300)):
        alone, _ = fused_add_rms_norm(array, x[rows], residual[rows], weight)
        np.testing.assert_array_equal(alone, together[rows])


@dtypes
def test_nan_and_infinity_stay_in_their_row(array, dtype):
    x, residual = random((4, 264), dtype), random((4, 264), dtype, 1)
    x[1, 5] = np.nan
    x[2, 6], residual[2, 6] = np.inf, -np.inf
    normed, total = fused_add_rms_norm(array, x, residual, None)
    assert np.isnan(normed[1:3]).all()
    assert np.isnan(total[1, 5])
    assert np.isnan(total[2, 6])
    assert np.isnan(total).sum() == 2
    for row in (0, 3):
        assert_rounded_once(normed[row], reference.rms_norm(reference.add(x[row], residual[row]), None, EPSILON))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 8)], ids=name_of)
def test_empty(array, shape):
    x = np.zeros(shape, np.float32)
    fused_add_rms_norm(array, x, x, np.ones(shape[-1], np.float32))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"residual": (4, 64)}, ValueError, r"residual: must have the shape of input, \[3, 64\], got \[4, 64\]"),
        ({"residual_dtype": np.float16}, TypeError, "residual: dtype must be that of input, float32, got float16"),
        ({"weight": (63,)}, ValueError, r"weight: dimension 0 must equal hidden_size = 64, got shape \[63\]"),
        ({"weight_dtype": np.float16}, TypeError, "weight: dtype must be that of input, float32, got float16"),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    wanted = {"x": (3, 64), "residual": (3, 64), "weight": (64,)} | change
    made = {k: np.zeros(wanted[k], wanted.get(f"{k}_dtype", np.float32)) for k in ("x", "residual", "weight")}
    with pytest.raises(error, match=message):
        pykv.fused_add_rms_norm(array.output(made["x"]), array.output(made["residual"]), array.input(made["weight"]))


def test_input_and_residual_are_two_arrays(array):
    x = array.output(np.ones((3, 8), np.float32))
    with pytest.raises(ValueError, match="residual: must not share memory with input"):
        pykv.fused_add_rms_norm(x, x, None)


def test_a_row_written_twice_is_refused():
    rows = np.broadcast_to(np.ones(8, np.float32), (3, 8))
    rows.flags.writeable = False
    with pytest.raises((ValueError, TypeError)):
        pykv.fused_add_rms_norm(rows, np.ones((3, 8), np.float32), None)
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match=r"input: is written, but dimension 0 .* has stride 0"):
        pykv.fused_add_rms_norm(torch.ones(8).expand(3, 8), torch.ones(3, 8), None)
