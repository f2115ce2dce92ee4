from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from norm import reference
from norm.inputs import EPSILON, WIDTHS, dtypes
from rows import FLOATS, assert_rounded_once, padded, random

import pykv

orders = pytest.mark.parametrize("norm_before_gate", [False, True], ids=["gate first", "norm first"])


def rms_norm_gated(array, x, weight, z, group_size=0, norm_before_gate=False, activation="swish", *, offset=0):
    out = array.output(np.full(x.shape, np.nan, x.dtype), offset=offset)
    made = [None if a is None else array.input(a, offset=offset) for a in (x, weight, z)]
    pykv.rms_norm_gated(out, *made, EPSILON, group_size, norm_before_gate, activation)
    return array.numpy(out)


def check(array, x, weight, z, group_size=0, norm_before_gate=False, activation="swish", **options):
    result = rms_norm_gated(array, x, weight, z, group_size, norm_before_gate, activation, **options)
    exact = reference.rms_norm_gated(x, weight, z, EPSILON, group_size, norm_before_gate, activation)
    assert_rounded_once(result, exact, lost=3e-6)


@dtypes
@orders
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(array, dtype, norm_before_gate, width):
    x, z = random((5, width), dtype), random((5, width), dtype, 1)
    check(array, x, random((width,), dtype, 2), z, norm_before_gate=norm_before_gate)


@dtypes
@orders
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("group_size", [0, 1, 7, 64, 448])
def test_groups_and_activations(array, dtype, norm_before_gate, activation, group_size):
    x, z, weight = random((3, 4, 448), dtype), random((3, 4, 448), dtype, 1), random((448,), dtype, 2)
    check(array, x, weight, z, group_size, norm_before_gate, activation)


@dtypes
@orders
@pytest.mark.parametrize("wide_weight", [False, True], ids=["weight like input", "weight in float32"])
def test_without_gate_it_is_the_norm_of_groups(array, dtype, norm_before_gate, wide_weight):
    weight = random((512,), np.dtype(np.float32) if wide_weight else dtype, 1)
    check(array, random((5, 512), dtype), weight, None, 128, norm_before_gate)


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 5),
    groups=st.integers(1, 6),
    group_size=st.integers(1, 300) | st.integers(1, 2700),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    z_padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offset=st.integers(0, 9),
    norm_before_gate=st.booleans(),
    with_weight=st.booleans(),
)
def test_any_group_stride_and_alignment(
    array, dtype, rows, groups, group_size, padding, z_padding, offset, norm_before_gate, with_weight
):
    shape = (2, rows, groups * group_size)
    x, z = padded(random(shape, dtype), *padding), padded(random(shape, dtype, 1), *z_padding)
    weight = random(shape[-1:], dtype, 2) if with_weight else None
    check(array, x, weight, z, group_size, norm_before_gate, offset=offset)
    apart = rms_norm_gated(
        array, np.ascontiguousarray(x), weight, np.ascontiguousarray(z), group_size, norm_before_gate
    )
    together = rms_norm_gated(array, x, weight, z, group_size, norm_before_gate, offset=offset)
    np.testing.assert_array_equal(together, apart)


@dtypes
@orders
def test_out_may_be_the_input(array, dtype, norm_before_gate):
    x, z = random((3, 1000), dtype), random((3, 1000), dtype, 1)
    both = array.output(x)
    pykv.rms_norm_gated(both, both, None, array.input(z), EPSILON, 0, norm_before_gate)
    expected = rms_norm_gated(array, x, None, z, norm_before_gate=norm_before_gate)
    np.testing.assert_array_equal(array.numpy(both), expected)


def test_a_closed_and_an_open_gate(array):
    x, z = np.ones((2, 8), np.float32), np.full((2, 8), 1e4, np.float32)
    np.testing.assert_allclose(rms_norm_gated(array, x, None, z, norm_before_gate=True), 1e4, rtol=1e-4)
    assert (rms_norm_gated(array, x, None, -z, norm_before_gate=True) == 0).all()
    assert (rms_norm_gated(array, x, None, -z) == 0).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"group_size": 7}, ValueError, r"rms_norm_gated: group_size: must divide hidden_size = 64 .*, got 7"),
        ({"group_size": -8}, ValueError, r"rms_norm_gated: group_size: must divide hidden_size = 64 .*, got -8"),
        ({"activation": "relu"}, ValueError, r"activation: must be 'swish', 'silu' or 'sigmoid', got 'relu'"),
        (
            {"z": np.zeros((3, 63), np.float32)},
            ValueError,
            r"z: must have the shape of input, \[3, 64\], got \[3, 63\]",
        ),
        ({"z": np.zeros((3, 64), np.float16)}, TypeError, "z: dtype must be that of input, float32, got float16"),
        ({"weight": np.zeros(8, np.float32)}, ValueError, r"weight: dimension 0 must equal hidden_size = 64"),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    wanted = {"group_size": 0, "activation": "silu", "z": np.zeros((3, 64), np.float32), "weight": None} | change
    x = np.zeros((3, 64), np.float32)
    with pytest.raises(error, match=message):
        rms_norm_gated(array, x, wanted["weight"], wanted["z"], wanted["group_size"], False, wanted["activation"])
