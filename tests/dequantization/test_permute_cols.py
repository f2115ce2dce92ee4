from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libraries import Numpy
from rows import name_of

import pykv

DTYPES = [np.dtype(t) for t in (np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.int32, np.int64)]


def numbers(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    return (np.arange(np.prod(shape)) % 251).reshape(shape).astype(dtype)


def order(columns: int, index: type = np.int32) -> np.ndarray:
    return np.random.default_rng(columns).permutation(columns).astype(index)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("columns", [1, 7, 64, 1000, 4096])
def test_any_dtype(array, dtype, columns):
    for rows, index in ((1, np.int32), (9, np.int64)):
        x, perm = numbers((rows, columns), dtype), order(columns, index)
        out = array.output(np.zeros_like(x))
        pykv.permute_cols(out, array.output(x), array.output(perm))
        np.testing.assert_array_equal(array.numpy(out), x[:, perm])


@pytest.mark.parametrize("dtype", [np.float64, np.int16, np.uint16, np.uint32, np.uint64, np.bool_])
def test_dtypes_that_no_other_operation_takes(dtype):
    x, perm = numbers((9, 64), np.dtype(dtype)), order(64)
    out = np.zeros_like(x)
    pykv.permute_cols(out, x, perm)
    np.testing.assert_array_equal(out, x[:, perm])
    other = np.zeros(x.shape, np.int8 if x.itemsize == 1 else f"i{x.itemsize}")
    if other.dtype != x.dtype:
        with pytest.raises(TypeError, match="permute_cols: "):
            pykv.permute_cols(other, x, perm)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("rows", [140, 601])
def test_many_rows(array, dtype, rows):
    for columns in (7, 1000, 4096):
        x, perm = numbers((rows, columns + 16), dtype)[:, :columns], order(columns)
        out = array.output(np.zeros(x.shape, dtype))
        pykv.permute_cols(out, array.output(x), array.input(perm))
        np.testing.assert_array_equal(array.numpy(out), x[:, perm])


@pytest.mark.parametrize("columns", [24000, 30000])
def test_rows_too_wide_for_shared_memory(array, columns):
    x, perm = numbers((6, columns), np.dtype(np.float16)), order(columns)
    out = array.output(np.zeros_like(x))
    pykv.permute_cols(out, array.input(x), array.input(perm))
    np.testing.assert_array_equal(array.numpy(out), x[:, perm])


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), np.dtype(np.float32)], ids=name_of)
def test_strides(array, dtype):
    perm = order(40)
    memory = numbers((3, 5, 90), dtype)
    for x in (memory[..., :40], memory[..., 1:81:2], memory[:, ::2, 3:43], np.asfortranarray(memory[..., :40])):
        for out in (np.zeros((3, x.shape[1], 48), dtype)[..., :40], np.zeros((3, x.shape[1], 80), dtype)[..., ::2]):
            made = array.output(out)
            pykv.permute_cols(made, array.output(x), array.output(perm))
            np.testing.assert_array_equal(array.numpy(made), x[..., perm])


@pytest.mark.parametrize("rows", [5, 150])
@pytest.mark.parametrize("wrong", [-1, 64, 1 << 30])
def test_column_out_of_range(array, wrong, rows):
    x, perm = numbers((rows, 64), np.dtype(np.float16)), order(64)
    expected = x[:, perm]
    perm[[0, 33]] = wrong
    expected[:, [0, 33]] = 7
    out = array.output(np.full_like(x, 7))
    given = array.input(x), array.input(perm)
    with array.reports(rf"permute_cols: perm: {wrong} is out of range \[0, 64\)"):
        pykv.permute_cols(out, *given)
    np.testing.assert_array_equal(array.numpy(out), expected)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0)])
def test_empty(array, shape):
    x = array.output(np.zeros(shape, np.float32))
    pykv.permute_cols(array.output(np.zeros(shape, np.float32)), x, array.output(np.zeros(shape[1], np.int32)))


@given(rows=st.integers(1, 9), columns=st.integers(1, 300), dtype=st.sampled_from(DTYPES), offset=st.integers(0, 9))
def test_any_shape(rows, columns, dtype, offset):
    x, perm = numbers((rows, columns), dtype), np.random.default_rng(rows).integers(0, columns, columns)
    out = Numpy().output(np.zeros_like(x), offset=offset)
    pykv.permute_cols(out, Numpy().output(x, offset=offset), perm)
    np.testing.assert_array_equal(out, x[:, perm])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"perm": np.zeros(7, np.int32)}, ValueError, "perm: "),
        ({"perm": np.zeros(8, np.float32)}, TypeError, "perm: "),
        ({"A": np.zeros((4, 8), np.float32)}, ValueError, "A: "),
        ({"A": np.zeros((3, 8), np.float16)}, TypeError, "A: "),
    ],
)
def test_wrong_arguments(change, error, message):
    wanted = {"out": np.zeros((3, 8), np.float32), "A": np.zeros((3, 8), np.float32), "perm": np.arange(8)} | change
    with pytest.raises(error, match=message):
        pykv.permute_cols(**wanted)
