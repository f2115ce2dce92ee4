from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from norm import reference
from norm.inputs import EPSILON, WIDTHS, dtypes
from rows import FLOATS, assert_rounded_once, padded, random

import pykv


def layer_norm(array, x, weight=None, bias=None, residual=None, *, offset=0):
    """What NumPy arrays become: out, residual."""
    out = array.output(np.full_like(x, np.nan), offset=offset)
    total = None if residual is None else array.output(residual, offset=offset)
    made = [None if w is None else array.input(w, offset=offset) for w in (weight, bias)]
    pykv.layer_norm(out, array.input(x, offset=offset), *made, EPSILON, total)
    return array.numpy(out), None if residual is None else array.numpy(total)


def check(array, x, weight=None, bias=None, residual=None, **options):
    out, total = layer_norm(array, x, weight, bias, residual, **options)
    z = x
    if residual is not None:
        z = reference.add(x, residual)
        np.testing.assert_array_equal(total, z)
    # near the mean, distances from it are sums that cancel
    size = 1 if weight is None else np.abs(weight.astype(np.float64)).max(initial=1)
    assert_rounded_once(out, reference.layer_norm(z, weight, bias, EPSILON), atol=3e-6 * size)


@dtypes
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "with residual"])
def test_widths(array, dtype, width, with_residual):
    x, weight, bias = random((5, width), dtype), random((width,), dtype, 1), random((width,), dtype, 2)
    check(array, x, weight, bias, random((5, width), dtype, 3) if with_residual else None)


@dtypes
@pytest.mark.parametrize("wide", [False, True], ids=["like input", "in float32"])
@pytest.mark.parametrize("given", ["", "weight", "bias", "both"])
def test_weight_and_bias_are_optional(array, dtype, wide, given):
    kind = np.dtype(np.float32) if wide else dtype
    weight = random((264,), kind, 1) if given in ("weight", "both") else None
    bias = random((264,), kind, 2) if given in ("bias", "both") else None
    check(array, random((9, 264), dtype), weight, bias)


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 9),
    width=st.integers(1, 300) | st.integers(1, 16384),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offset=st.integers(0, 9),
    with_residual=st.booleans(),
)
def test_any_width_stride_and_alignment(array, dtype, rows, width, padding, offset, with_residual):
    x = padded(random((2, rows, width), dtype, width), *padding)
    residual = random((2, rows, width), dtype, width + 1) if with_residual else None
    check(array, x, random((width,), dtype, 1), random((width,), dtype, 2), residual, offset=offset)


@dtypes
def test_a_far_mean_costs_no_more_than_the_input_has(array, dtype):
    """The variance is a sum of squared distances, not a difference of large numbers."""
    x = (random((4, 1000), np.dtype(np.float32)) + np.float32(200)).astype(dtype)
    out, _ = layer_norm(array, x)
    assert np.abs(out.astype(np.float64) - reference.layer_norm(x, None, None, EPSILON)).max() < 2e-2
    if dtype == np.float32:
        assert np.abs(out - reference.layer_norm(x, None, None, EPSILON)).max() < 1e-4


@dtypes
def test_equal_elements_become_the_bias(array, dtype):
    bias = random((96,), dtype, 2)
    out, _ = layer_norm(array, np.full((3, 96), 0.5, dtype), None, bias)
    np.testing.assert_array_equal(out, np.broadcast_to(bias, (3, 96)))


@dtypes
def test_out_may_be_the_input(array, dtype):
    x, residual = random((3, 1000), dtype), random((3, 1000), dtype, 1)
    both, total = array.output(x), array.output(residual)
    pykv.layer_norm(both, both, None, None, EPSILON, total)
    expected, _ = layer_norm(array, x, residual=residual)
    np.testing.assert_array_equal(array.numpy(both), expected)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out": (4, 64)}, ValueError, r"layer_norm: out: must have the shape of input, \[3, 64\], got \[4, 64\]"),
        ({"bias": (63,)}, ValueError, r"layer_norm: bias: dimension 0 must equal hidden_size = 64, got shape \[63\]"),
        ({"bias_dtype": np.float16}, TypeError, "bias: dtype must be that of input, float32, got float16"),
        ({"residual": (3, 63)}, ValueError, r"residual: must have the shape of input, \[3, 64\], got \[3, 63\]"),
        ({"residual_dtype": np.float16}, TypeError, "residual: dtype must be that of input, float32, got float16"),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    shapes = {"out": (3, 64), "x": (3, 64), "weight": (64,), "bias": (64,), "residual": (3, 64)} | change
    names = ("out", "x", "weight", "bias", "residual")
    made = {k: array.output(np.zeros(shapes[k], shapes.get(f"{k}_dtype", np.float32))) for k in names}
    with pytest.raises(error, match=message):
        pykv.layer_norm(made["out"], made["x"], made["weight"], made["bias"], EPSILON, made["residual"])


def test_the_residual_is_memory_of_its_own(array):
    x, out = (array.output(np.ones((3, 8), np.float32)) for _ in range(2))
    with pytest.raises(ValueError, match="residual: must not share memory with input"):
        pykv.layer_norm(out, x, None, None, EPSILON, x)
    with pytest.raises(ValueError, match="residual: must not share memory with out"):
        pykv.layer_norm(out, x, None, None, EPSILON, out)
