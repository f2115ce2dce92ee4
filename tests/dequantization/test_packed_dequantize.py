"""awq_dequantize and gptq_dequantize."""

from __future__ import annotations

import numpy as np
import pytest
from dequantization import reference
from hypothesis import given
from hypothesis import strategies as st
from libraries import Numpy
from rows import FLOATS, name_of, padded, random

import pykv

BITS = pytest.mark.parametrize("bits", [2, 3, 4, 8])


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def awq_weights(rows: int, columns: int, groups: int, dtype: np.dtype, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "qweight": words(rng, rows, columns // 8),
        "scales": random((groups, columns), dtype, seed),
        "zeros": words(rng, groups, columns // 8),
    }


def gptq_weights(
    rows: int, columns: int, groups: int, bits: int, dtype: np.dtype, seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        "qweight": words(rng, rows * bits // 32, columns),
        "qzeros": words(rng, groups, columns * bits // 32),
        "scales": random((groups, columns), dtype, seed),
    }


def check(array, weights, *, offset=0, out=None, **options):
    arrays = {**weights, **{k: v for k, v in options.items() if isinstance(v, np.ndarray)}}
    expected = reference.awq(**weights) if "zeros" in weights else reference.gptq(**weights, **options)
    made = array.output(np.zeros(expected.shape, expected.dtype) if out is None else out, offset=offset)
    given = {k: array.input(v, offset=offset) for k, v in arrays.items()}
    op = pykv.awq_dequantize if "zeros" in weights else pykv.gptq_dequantize
    op(made, **{**options, **given})
    bits = f"u{expected.itemsize}"
    np.testing.assert_array_equal(array.numpy(made).view(bits), expected.view(bits))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize(("rows", "columns", "groups"), [(128, 64, 1), (256, 1032, 8), (6, 8, 6), (96, 520, 3)])
def test_awq(array, dtype, rows, columns, groups):
    check(array, awq_weights(rows, columns, groups, dtype))


@BITS
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("use_v2_format", [False, True])
def test_gptq(array, dtype, bits, use_v2_format):
    for rows, columns, groups in ((128, 64, 1), (256, 1056, 8), (32, 32, 32)):
        check(array, gptq_weights(rows, columns, groups, bits, dtype), bits=bits, use_v2_format=use_v2_format)


@BITS
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_act_order(array, bits, index):
    weights = gptq_weights(128, 288, 5, bits, np.dtype(np.float16))
    g_idx = np.random.default_rng(1).integers(0, 5, 128).astype(index)  # groups of unequal size
    check(array, weights, g_idx=g_idx, bits=bits)
    check(array, weights | {"scales": weights["scales"][:4], "qzeros": weights["qzeros"][:4]}, bits=bits,
          g_idx=np.zeros(0, index))  # fmt: skip


@BITS
def test_strides_and_alignment(array, bits):
    for dtype in FLOATS:
        weights = gptq_weights(64, 96, 4, bits, dtype)
        for offset in (0, 1):
            check(array, weights, bits=bits, offset=offset)
        weights["scales"] = padded(weights["scales"], 1, 3)
        for name in ("qweight", "qzeros"):
            memory = np.zeros((weights[name].shape[0], weights[name].shape[1] + 5), np.int32)
            memory[:, :-5] = weights[name]
            weights[name] = memory[:, :-5]
        arrays = {k: array.output(v) for k, v in weights.items()}
        expected = reference.gptq(**{k: np.ascontiguousarray(v) for k, v in weights.items()}, bits=bits)
        made = array.output(padded(np.zeros(expected.shape, dtype), 2, 5))
        pykv.gptq_dequantize(made, **arrays, bits=bits)
        np.testing.assert_array_equal(array.numpy(made), expected)


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("offset", [0, 1])
def test_awq_alignment(array, dtype, offset):
    check(array, awq_weights(40, 72, 4, dtype), offset=offset)


@pytest.mark.parametrize("wrong", [-1, 4, 1 << 30])
def test_group_out_of_range(array, wrong):
    weights = gptq_weights(64, 96, 4, 4, np.dtype(np.float16))
    g_idx = (np.arange(64) // 16).astype(np.int32)
    expected = reference.gptq(**weights, g_idx=g_idx)
    g_idx[[3, 40]] = wrong
    expected[[3, 40]] = 7
    out = array.output(np.full((64, 96), 7, np.float16))
    arrays = {k: array.input(v) for k, v in weights.items()}
    with array.reports(rf"gptq_dequantize: g_idx: {wrong} is out of range \[0, 4\)"):
        pykv.gptq_dequantize(out, **arrays, g_idx=array.input(g_idx))
    np.testing.assert_array_equal(array.numpy(out), expected)


def test_empty(array):
    half = np.dtype(np.float16)
    for rows, columns in ((0, 32), (32, 0)):
        out = array.output(np.zeros((rows, columns), half))
        pykv.awq_dequantize(out, *(array.output(x) for x in awq_weights(rows, columns, 1, half).values()))
        pykv.gptq_dequantize(out, *(array.output(x) for x in gptq_weights(rows, columns, 1, 4, half).values()))


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    steps=st.integers(1, 5),
    columns=st.integers(1, 20),
    dtype=st.sampled_from(FLOATS),
    act_order=st.booleans(),
    v2=st.booleans(),
)
def test_any_shape(bits, steps, columns, dtype, act_order, v2):
    weights = gptq_weights(32 * steps, 32 * columns, steps, bits, dtype, seed=columns)
    g_idx = np.random.default_rng(steps).integers(0, steps, 32 * steps) if act_order else None
    check(Numpy(), weights, bits=bits, g_idx=g_idx, use_v2_format=v2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"bits": 5}, ValueError, "bits: must be 2, 3, 4 or 8, got 5"),
        ({"out": np.zeros((60, 96), np.float16)}, ValueError, "out: .*whole words of 32"),
        ({"qweight": np.zeros((9, 96), np.int32)}, ValueError, r"qweight: must have shape \[8, 96\]"),
        ({"qweight": np.zeros((8, 96), np.int64)}, TypeError, "qweight: "),
        ({"qzeros": np.zeros((4, 11), np.int32)}, ValueError, r"qzeros: must have shape \[4, 12\]"),
        ({"scales": np.zeros((5, 96), np.float16)}, ValueError, "scales: "),
        ({"scales": np.zeros((4, 96), np.float32)}, TypeError, "scales: "),
        ({"g_idx": np.zeros(63, np.int32)}, ValueError, "g_idx: "),
        ({"g_idx": np.zeros(64, np.float32)}, TypeError, "g_idx: "),
        (
            {"qzeros": np.zeros((5, 12), np.int32), "scales": np.zeros((5, 96), np.float16)},
            ValueError,
            "scales: .*equal groups of the 64 rows, got 5",
        ),
    ],
)
def test_wrong_arguments(change, error, message):
    wanted = {"out": np.zeros((64, 96), np.float16), **gptq_weights(64, 96, 4, 4, np.dtype(np.float16))} | change
    with pytest.raises(error, match=message):
        pykv.gptq_dequantize(**wanted)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out": np.zeros((64, 36), np.float16)}, ValueError, "out: .*multiple of 8, got 36"),
        ({"zeros": np.zeros((4, 4), np.int32)}, ValueError, r"zeros: must have shape \[4, 5\]"),
        ({"scales": np.zeros((3, 40), np.float16), "zeros": np.zeros((3, 5), np.int32)}, ValueError, "scales: .*got 3"),
    ],
)
def test_wrong_awq_arguments(change, error, message):
    wanted = {"out": np.zeros((64, 40), np.float16), **awq_weights(64, 40, 4, np.dtype(np.float16))} | change
    with pytest.raises(error, match=message):
        pykv.awq_dequantize(**wanted)
