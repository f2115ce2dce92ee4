"""Every row that counts is what the operation without a mask gives, bit by bit; the others stay."""

from __future__ import annotations

import numpy as np
import pytest
from activation.reference import assert_gated, gelu, silu
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, assert_rounded_once, name_of, padded, random

import pykv

PARAMETERS = {"clamp_limit": 1.5, "alpha": 1.3, "beta": 0.5, "situ_beta": 2.0, "situ_linear_beta": 0.75}


def product(op, *names):
    return lambda out, x: op(out, x, *(PARAMETERS[name] for name in names))


CLAMPED = product(pykv.silu_and_mul_with_clamp, "clamp_limit", "alpha", "beta")
ACTIVATIONS = {
    "silu": product(pykv.silu_and_mul),
    "silu_with_clamp": CLAMPED,
    "swigluoai_uninterleave": CLAMPED,
    "gelu": product(pykv.gelu_and_mul),
    "gelu_tanh": product(pykv.gelu_tanh_and_mul),
    "situ": product(pykv.situ_and_mul, "situ_beta", "situ_linear_beta"),
    "swigluoai": product(pykv.swigluoai_and_mul, "alpha", "clamp_limit"),
    "swiglustep": product(pykv.swiglustep_and_mul, "clamp_limit"),
    "gelu_tanh_no_mul": pykv.gelu_new,
    "relu2_no_mul": pykv.relu_squared,
    "silu_no_mul": None,
    "gelu_no_mul": None,
}
activations = pytest.mark.parametrize("activation", ACTIVATIONS)
dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def check(array, x, counts, activation, out=None, offset=0):
    """``x [num_experts, num_rows, w]``."""
    width = x.shape[-1] if activation.endswith("no_mul") else x.shape[-1] // 2
    before = random((*x.shape[:-1], width), x.dtype, 9)
    memory = array.output(before if out is None else padded(before, *out), offset=offset)
    given = array.input(x, offset=offset)
    pykv.masked_moe_activation(memory, given, array.input(np.array(counts)), activation, **PARAMETERS)
    result = array.numpy(memory)
    whole = array.output(np.zeros(before.shape, x.dtype))
    if op := ACTIVATIONS[activation]:
        op(whole, array.input(x))
    else:
        pykv.masked_moe_activation(whole, given, array.input(np.full(len(x), x.shape[1])), activation)
    for expert, count in enumerate(np.clip(counts, 0, x.shape[1])):
        np.testing.assert_array_equal(result[expert, :count], array.numpy(whole)[expert, :count])
        np.testing.assert_array_equal(result[expert, count:], before[expert, count:])


@dtypes
@activations
@pytest.mark.parametrize("counts", [(0, 3, 5), (-1, 9, 1)])
@pytest.mark.parametrize("width", [6, 512, 5000])
def test_counts(array, dtype, activation, counts, width):
    check(array, random((3, 5, width), dtype), np.array(counts, np.int32), activation)


@activations
@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 70),
    width=st.integers(0, 60) | st.integers(0, 3000),
    counts=st.lists(st.integers(-2, 80), min_size=0, max_size=5),
    ids=st.sampled_from([np.int32, np.int64]),
    padding=st.integers(0, 9),
    offset=st.integers(0, 3),
)
def test_any_shape(array, activation, dtype, rows, width, counts, ids, padding, offset):
    x = random((len(counts), rows, 2 * width), dtype, width)
    check(array, padded(x, padding), np.array(counts, ids), activation, (padding,), offset)


@dtypes
@pytest.mark.parametrize("activation", ["silu_no_mul", "gelu_no_mul"])
def test_a_factor_alone(array, dtype, activation):
    x = random((64, 40), dtype)
    out = array.output(np.zeros_like(x))
    pykv.masked_moe_activation(out, array.input(x), array.input(np.array([64], np.int32)), activation)
    exact = (silu if activation == "silu_no_mul" else gelu)(x.astype(np.float64))
    assert_rounded_once(array.numpy(out), exact, atol=0 if activation == "silu_no_mul" else 1e-6)


@dtypes
def test_rows_without_experts(array, dtype):
    x, out = random((6, 64), dtype), np.full((6, 32), 7, dtype)
    memory = array.output(out)
    pykv.masked_moe_activation(memory, array.input(x), array.input(np.array([4], np.int32)), "silu")
    assert_gated(array.numpy(memory)[:4], x[:4])
    np.testing.assert_array_equal(array.numpy(memory)[4:], out[4:])


def test_what_does_not_fit_is_named(array):
    def call(out, x, counts, activation="silu"):
        counts = array.input(np.ones(counts, np.int32))
        pykv.masked_moe_activation(
            array.output(np.zeros(out, np.float32)), array.input(np.zeros(x, np.float32)), counts, activation
        )

    with pytest.raises(ValueError, match=r"activation: must be one of silu, silu_with_clamp, .*, got 'swish'"):
        call((3, 4), (3, 8), 1, "swish")
    with pytest.raises(ValueError, match="valid_token_counts: dimension 0 must equal num_experts = 2"):
        call((2, 3, 4), (2, 3, 8), 1)
    with pytest.raises(ValueError, match="valid_token_counts: dimension 0 must equal num_experts = 1"):
        call((3, 4), (3, 8), 3)
    with pytest.raises(ValueError, match=r"out: dimension 1 must equal width = 4, got shape \[3, 8\]"):
        call((3, 8), (3, 8), 1)
    with pytest.raises(ValueError, match=r"out: must have the shape of input, \[3, 8\], got \[3, 4\]"):
        call((3, 4), (3, 8), 1, "gelu_no_mul")
    with pytest.raises(ValueError, match=r"input: must have .*dimensions"):
        call((4,), (8,), 1)
