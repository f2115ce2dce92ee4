from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest
from activation.reference import gelu, gelu_tanh
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, name_of, padded, random, turned
from tolerance import assert_close

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def apply(array, x, sparsity=0.8, approximate="none", *, out=None, offsets=(0, 0)):
    """The result for a NumPy array; ``out`` gives its strides."""
    out = np.full((*x.shape[:-1], x.shape[-1] // 2), np.nan, x.dtype) if out is None else out
    result = array.output(out, offset=offsets[0])
    pykv.gelu_and_mul_sparse(result, array.input(x, offset=offsets[1]), sparsity, approximate)
    return array.numpy(result)


def check(actual, x, sparsity=0.8, approximate="none", *, atol=None):
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    cut = gate.mean(-1, keepdims=True) + gate.std(-1, keepdims=True) * NormalDist().inv_cdf(sparsity)
    g = np.maximum(gate - cut, 0)
    assert_close(actual, (gelu if approximate == "none" else gelu_tanh)(g) * up, atol=atol)
    # what lies clearly below the cut gives zeros
    assert (actual[gate < cut - 1e-4] == 0).all()


@dtypes
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(
    "shape",
    [(2,), (1, 2), (7, 66), (2, 3, 40), (83, 2048), (3, 16384), (2, 32768), (2, 40000), (9000, 10)],
    ids=name_of,
)
def test_shapes(array, dtype, shape, approximate):
    x = random(shape, dtype)
    check(apply(array, x, approximate=approximate), x, approximate=approximate)


@dtypes
@pytest.mark.parametrize("sparsity", [1e-6, 0.1, 0.5, 0.95, 1 - 1e-9])
def test_sparsity(array, dtype, sparsity):
    x = random((5, 8192), dtype)
    x[:, :4096] += np.asarray(0.5, dtype)
    result = apply(array, x, sparsity)
    check(result, x, sparsity)
    assert abs(np.count_nonzero(result == 0) / result.size - sparsity) < 0.03


@dtypes
def test_the_mean_may_be_far_from_0(array, dtype):
    x = random((4, 2 * 3000), dtype)
    x[:, :3000] = (1000 + 8 * np.round(x[:, :3000].astype(np.float32))).astype(dtype)
    check(apply(array, x), x, atol=2e-3)  # fp32 knows the cut up to 6e-5


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 12),
    width=st.integers(1, 100) | st.integers(1, 16384),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    out_padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offsets=st.tuples(st.integers(0, 9), st.integers(0, 9)),
)
def test_any_width_stride_and_alignment(array, dtype, rows, width, padding, out_padding, offsets):
    x = random((2, rows, 2 * width), dtype, width)
    out = padded(np.zeros((2, rows, width), dtype), *out_padding)
    result = apply(array, padded(x, *padding), out=out, offsets=offsets)
    check(result, x)
    np.testing.assert_array_equal(result, apply(array, x))


@dtypes
@pytest.mark.parametrize("width", [40, 1000, 9000])
def test_a_row_does_not_depend_on_the_others(array, dtype, width):
    x = random((50, 2 * width), dtype)
    together = apply(array, x)
    for row in (0, 17, 49):
        np.testing.assert_array_equal(apply(array, x[row : row + 1])[0], together[row])
    np.testing.assert_array_equal(apply(array, turned(x.reshape(5, 10, -1))), together.reshape(5, 10, -1))


@dtypes
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("width", [96, 101, 20000])
def test_the_result_may_replace_a_half_of_the_input(array, dtype, width, half):
    if array.name == "interface":
        pytest.skip("its arrays cannot be sliced")
    x = random((3, 2 * width), dtype)
    both = array.output(x)
    here = slice(half * width, (half + 1) * width)
    pykv.gelu_and_mul_sparse(both[:, here], both, 0.8)
    np.testing.assert_array_equal(array.numpy(both)[:, here], apply(array, x))


@dtypes
def test_nan_and_infinity(array, dtype):
    x = random((4, 80), dtype)
    x[1, 7] = np.nan  # a gate: its whole row
    x[2, 40 + 7] = np.nan  # a factor
    x[3, 7] = np.inf  # a deviation of NaN
    result = np.isnan(apply(array, x).astype(np.float32))
    assert not result[0].any()
    assert result[1].all()
    assert np.flatnonzero(result[2]).tolist() == [7]
    assert result[3].all()


@pytest.mark.parametrize("shape", [(0,), (0, 64), (3, 0)], ids=name_of)
def test_empty(array, shape):
    assert apply(array, np.zeros(shape, np.float32)).size == 0


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ((0.0,), "activation_sparsity: must lie between 0 and 1, both excluded, got 0"),
        ((1.0,), "activation_sparsity: must lie between 0 and 1, both excluded, got 1"),
        ((float("nan"),), "activation_sparsity: must lie between 0 and 1, both excluded, got nan"),
        ((0.5, "erf"), "approximate: must be 'none' or 'tanh', got 'erf'"),
    ],
)
def test_parameters_that_do_not_fit_are_named(array, parameters, message):
    with pytest.raises(ValueError, match=f"gelu_and_mul_sparse: {message}"):
        apply(array, np.zeros((3, 8), np.float32), *parameters)


def test_what_does_not_fit_is_named(array):
    x = array.input(np.zeros((3, 8), np.float32))
    with pytest.raises(ValueError, match=r"gelu_and_mul_sparse: out: dimension 1 must equal width = 4, got shape"):
        pykv.gelu_and_mul_sparse(array.output(np.zeros((3, 5), np.float32)), x, 0.5)
