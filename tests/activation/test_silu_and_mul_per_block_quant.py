from __future__ import annotations

import numpy as np
import pytest
from activation.quantised import CODES, E4M3, INT8, assert_codes
from activation.reference import silu
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, name_of, padded, random

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
outs = pytest.mark.parametrize("out", CODES, ids=name_of)


def quantise(array, x, group_size, out, scale_ub=None, *, transposed=False, paddings=(0, 0), offsets=(0, 0)):
    """Codes and scales for a NumPy array."""
    tokens, width = x.shape[0], x.shape[1] // 2
    codes = np.zeros((tokens, width + paddings[0]), out)[:, :width]
    # Numba's interface has no name for fp8: the bytes say as much
    codes = array.output(codes.view(np.uint8) if out == E4M3 else codes, offset=offsets[0])
    shape = (width // group_size, tokens) if transposed else (tokens, width // group_size)
    scales = padded(np.full(shape, np.nan, np.float32), paddings[1])
    scales = array.output(scales.T if transposed else scales)
    given = array.input(x, offset=offsets[1])
    pykv.silu_and_mul_per_block_quant(codes, given, scales, group_size, scale_ub, transposed)
    return array.numpy(codes).view(out), array.numpy(scales)


def check(result, x, group_size, scale_ub=None):
    """The scales that float64 gives, and the codes that the scales give, of products rounded as those of silu_and_mul.

    silu in fp32 may be off by some units in the last place, and then what it is rounded to, by one of the dtype's.
    """
    codes, scales = result
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        ends = [(silu(gate) * (1 + lost)).astype(x.dtype).astype(np.float64) for lost in (-1e-6, 1e-6)]
        ys = [(y * up).astype(x.dtype).astype(np.float64).reshape(*scales.shape, group_size) for y in ends]
    most, least = (448, 1 / (448 * 512)) if codes.dtype == E4M3 else (127, 2.0**-23)
    wanted = []
    for choose, lost in ((np.minimum, -2e-7), (np.maximum, 2e-7)):
        end = choose(*np.abs(ys)).max(-1, initial=0) / most
        wanted.append(np.maximum(end if scale_ub is None else np.minimum(end, scale_ub), least) * (1 + lost))
    assert (wanted[0] <= scales).all()
    assert (scales <= wanted[1]).all()
    with np.errstate(invalid="ignore"):  # 16-bit products overflow
        quotients = [(y / scales[..., None].astype(np.float64)).reshape(codes.shape) for y in ys]
    assert_codes(codes, *quotients, lost=2e-7)


@dtypes
@outs
@pytest.mark.parametrize("group_size", [64, 128])
@pytest.mark.parametrize(("tokens", "groups"), [(1, 1), (7, 3), (83, 16), (3, 108)])
@pytest.mark.parametrize("transposed", [False, True])
def test_sizes(array, dtype, out, group_size, tokens, groups, transposed):
    x = random((tokens, 2 * groups * group_size), dtype, groups)
    check(quantise(array, x, group_size, out, transposed=transposed), x, group_size)


@dtypes
@outs
@pytest.mark.parametrize("group_size", [1, 3, 8, 24, 40, 96, 250, 256, 512, 1024, 3000, 16384])
def test_any_group_size(array, dtype, out, group_size):
    x = random((5, 4 * group_size), dtype, group_size)
    check(quantise(array, x, group_size, out), x, group_size)


@outs
@given(
    dtype=st.sampled_from(FLOATS),
    tokens=st.integers(0, 12),
    groups=st.integers(0, 40),
    group_size=st.sampled_from([1, 2, 7, 16, 32, 64, 128, 160]),
    magnitude=st.sampled_from([1e-4, 1.0, 100.0]),
    transposed=st.booleans(),
    paddings=st.tuples(st.integers(0, 17), st.integers(0, 3)),
    offsets=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    padding=st.integers(0, 17),
)
def test_any_width_stride_and_alignment(
    array, out, dtype, tokens, groups, group_size, magnitude, transposed, paddings, offsets, padding
):
    x = (random((tokens, 2 * groups * group_size), dtype, groups).astype(np.float32) * magnitude).astype(dtype)
    result = quantise(
        array, padded(x, padding), group_size, out, transposed=transposed, paddings=paddings, offsets=offsets
    )
    check(result, x, group_size)


@dtypes
def test_scales_are_bounded(array, dtype):
    x = random((6, 512), dtype)
    x[3] = 0
    check(quantise(array, x, 64, E4M3, 0.003), x, 64, np.float32(0.003))
    bound = array.input(np.array([0.003], np.float32))
    np.testing.assert_array_equal(quantise(array, x, 64, E4M3, bound)[1], quantise(array, x, 64, E4M3, 0.003)[1])
    assert (quantise(array, x, 64, E4M3)[1][3] == np.float32(1 / (448 * 512))).all()
    assert (quantise(array, x, 64, INT8)[1][3] == np.float32(2.0**-23)).all()


@dtypes
@outs
def test_nan_does_not_count_for_the_scale(array, dtype, out):
    x = random((2, 256), dtype)
    x[0, 5], x[1, 128 + 7] = np.nan, np.nan
    codes, scales = quantise(array, x, 64, out)
    nan = 448 if out == E4M3 else 0
    assert (codes[0, 5].astype(np.float32), codes[1, 7].astype(np.float32)) == (nan, nan)
    known = np.where(np.isnan(x.astype(np.float32)), 0, x.astype(np.float32)).astype(dtype)
    codes[0, 5], codes[1, 7] = 0, 0
    check((codes, scales), known, 64)


@outs
def test_infinity_takes_the_whole_scale(array, out):
    x = np.full((1, 64), 2.0, np.float32)
    x[0, 4], x[0, 5] = np.inf, np.inf
    x[0, 32 + 5] = -2
    codes, scales = quantise(array, x, 32, out)
    assert scales[0, 0] == np.inf
    assert codes[0, 4].astype(np.float32) == (448 if out == E4M3 else 0)  # inf / inf
    assert (np.delete(codes[0].astype(np.float32), [4, 5]) == 0).all()


def test_infinity_saturates_under_a_bound(array):
    x = np.full((1, 64), 2.0, np.float32)
    x[0, 4], x[0, 5] = np.inf, np.inf
    x[0, 32 + 5] = -2
    codes, scales = quantise(array, x, 32, E4M3, 0.5)
    assert scales[0, 0] == 0.5
    assert codes[0, 4:6].astype(np.float32).tolist() == [448, -448]


@pytest.mark.parametrize("shape", [(0, 256), (3, 0)], ids=name_of)
def test_empty(array, shape):
    codes, scales = quantise(array, np.zeros(shape, np.float32), 64, E4M3)
    assert codes.size == scales.size == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"input": (3, 255)}, ValueError, r"input: the last dimension holds two halves and must be even"),
        ({"out": (3, 64)}, ValueError, r"out: dimension 1 must equal width = 128, got shape \[3, 64\]"),
        ({"out": (4, 128)}, ValueError, r"out: dimension 0 must equal the input's = 3, got shape \[4, 128\]"),
        ({"scales": (3, 3)}, ValueError, r"scales: dimension 1 must equal num_groups = 2, got shape \[3, 3\]"),
        ({"group_size": 48}, ValueError, r"group_size: must be positive and divide width = 128, got 48"),
        ({"group_size": 0}, ValueError, r"group_size: must be positive and divide width = 128, got 0"),
        ({"transposed": True}, ValueError, r"scales: must be the transpose of a contiguous array .* got stride 2"),
        ({"scale_ub": 1.0}, ValueError, r"scale_ub: is for float8_e4m3fn alone"),
        ({"scales_dtype": np.float16}, TypeError, r"scales: dtype must be float32, got float16"),
        ({"out_dtype": np.float32}, TypeError, r"out: dtype must be float8_e4m3fn or uint8 or int8, got float32"),
        ({"input_dtype": np.int32}, TypeError, r"input: dtype must be float32 or float16 or bfloat16, got int32"),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    given = {"input": (3, 256), "out": (3, 128), "scales": (3, 2)} | change
    dtypes = {"input": np.float32, "out": np.int8, "scales": np.float32}
    made = {n: array.output(np.zeros(given[n], change.get(f"{n}_dtype", dtypes[n]))) for n in dtypes}
    with pytest.raises(error, match=f"silu_and_mul_per_block_quant: {message}"):
        pykv.silu_and_mul_per_block_quant(
            made["out"],
            made["input"],
            made["scales"],
            change.get("group_size", 64),
            change.get("scale_ub"),
            change.get("transposed", False),
        )


@pytest.mark.parametrize(("tokens", "groups"), [(7, 3), (3, 3), (1, 4), (5, 1), (1, 1)])
def test_transposed_scales_in_storage_order(array, tokens, groups):
    x = random((tokens, 2 * groups * 64), np.dtype(np.float16), 1)
    codes, wanted = quantise(array, x, 64, INT8, transposed=True)
    out, scales = array.output(np.zeros(codes.shape, np.int8)), array.output(np.zeros((groups, tokens), np.float32))
    pykv.silu_and_mul_per_block_quant(out, array.input(x), scales, 64, None, True)
    np.testing.assert_array_equal(array.numpy(out), codes)
    np.testing.assert_array_equal(array.numpy(scales), wanted.T)


def test_scales_in_storage_order_are_contiguous_and_only_where_transposed(array):
    x, out = array.input(np.zeros((7, 384), np.float32)), array.output(np.zeros((7, 192), np.int8))
    with pytest.raises(ValueError, match=r"scales: dimension 0 must equal num_tokens = 7, got shape \[3, 7\]"):
        pykv.silu_and_mul_per_block_quant(out, x, array.output(np.zeros((3, 7), np.float32)), 64)
    scales = array.output(padded(np.zeros((3, 7), np.float32), 1))
    with pytest.raises(ValueError, match="scales: must be contiguous"):
        pykv.silu_and_mul_per_block_quant(out, x, scales, 64, None, True)
