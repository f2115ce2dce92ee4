from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, assert_rounded_once, name_of, padded, random

import pykv
from pykv import vllm

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
F32 = np.dtype(np.float32)
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=name_of)


ROUTER = [*HALVES, F32]  # what a router of float32 takes


def fused_a(array, a, w, out, offset) -> None:
    pykv.dsv3_fused_a_gemm(out, array.input(a, offset=offset), array.input(w.T, offset=offset))


def router(array, a, w, out, offset) -> None:
    function = pykv.fp32_router_gemm if w.dtype == F32 else pykv.dsv3_router_gemm
    function(out, array.input(a, offset=offset), array.input(w, offset=offset))


def check(array, function, a, w, out_dtype, *, offset=0, padding=(0, 0)) -> None:
    out = array.output(padded(np.zeros((len(a), len(w)), out_dtype), *padding), offset=offset)
    function(array, padded(a, *padding), padded(w, *padding), out, offset)
    x, y = a.astype(np.float64), w.astype(np.float64)
    lost = 1e-6 * float((np.abs(x) @ np.abs(y).T).max(initial=0))
    assert_rounded_once(array.numpy(out), x @ y.T, atol=lost)


@dtypes
@pytest.mark.parametrize("out_dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 40])
def test_rows_and_dtypes(array, dtype, out_dtype, rows):
    a, w = random((rows, 712), dtype), random((132, 712), dtype, 1)
    check(array, fused_a, a, w, out_dtype)
    check(array, router, a, w, out_dtype)


@pytest.mark.parametrize("dtype", ROUTER, ids=name_of)
@pytest.mark.parametrize("rows", [1, 16, 70])
def test_a_router_of_float32(array, dtype, rows):
    check(array, router, random((rows, 3072), dtype), random((256, 3072), F32, 1), F32)


@given(
    dtype=st.sampled_from(ROUTER),
    wide=st.booleans(),
    m=st.integers(0, 20),
    n=st.integers(0, 40),
    k=st.integers(0, 40) | st.integers(0, 900),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 9)),
    offset=st.integers(0, 9),
)
def test_any_size_stride_and_alignment(array, dtype, wide, m, n, k, padding, offset):
    a, w = random((m, k), dtype), random((n, k), F32 if wide else dtype, 1)
    check(array, router, a, w, F32, padding=padding, offset=offset)


@dtypes
@pytest.mark.parametrize("order", ["CF", "FC", "FF"])
def test_columns_one_after_another(array, dtype, order):
    a, w = np.asarray(random((5, 300), dtype), order=order[0]), np.asarray(random((40, 300), dtype, 1), order=order[1])
    check(array, fused_a, a, w, F32)
    check(array, router, a, w, F32)
    check(array, router, a, w.astype(F32), F32)


@dtypes
@pytest.mark.parametrize("n", [64, 2200])
@pytest.mark.parametrize("wide", [False, True])
def test_a_row_has_the_same_bits_among_any_others(array, dtype, n, wide):
    a, w = random((40, 1000), dtype), array.input(random((n, 1000), F32 if wide else dtype, 1))

    def logits(rows) -> np.ndarray:
        out = array.output(np.zeros((len(rows), n), F32))
        (pykv.fp32_router_gemm if wide else pykv.dsv3_router_gemm)(out, array.input(rows), w)
        return array.numpy(out).view(np.uint32)

    whole = logits(a)
    for part in (slice(0, 1), slice(3, 10), slice(3, 17), slice(20, 40)):
        np.testing.assert_array_equal(logits(a[part]), whole[part])


def test_functions_of_vllm(array):
    if array.name in ("jax", "interface"):
        pytest.skip("the functions of vLLM allocate what they return, like what they are given")
    a, w = random((5, 96), HALVES[0]), random((40, 96), HALVES[0], 1)
    exact = a.astype(np.float64) @ w.astype(np.float64).T
    out = array.numpy(vllm.dsv3_router_gemm(array.input(a), array.input(w), "float32"))
    np.testing.assert_allclose(out, exact, rtol=1e-4, atol=1e-4)
    made = array.output(np.zeros((5, 40), np.float16))
    vllm.dsv3_fused_a_gemm(made, array.input(a), array.input(w.T), True)
    np.testing.assert_allclose(array.numpy(made).astype(np.float64), exact, rtol=1e-3, atol=1e-2)


def test_what_does_not_fit_is_named(array):
    a, w, out = (array.output(np.zeros(s, np.float16)) for s in ((3, 64), (40, 64), (3, 40)))
    with pytest.raises(ValueError, match=r"mat_b: dimension 0 must equal k = 64, got shape \[40, 64\]"):
        pykv.dsv3_fused_a_gemm(out, a, w)
    with pytest.raises(TypeError, match="b: dtype must be float32, got float16"):
        pykv.fp32_router_gemm(out, a, w)
    with pytest.raises(TypeError, match="output: dtype must be float32, got float16"):
        pykv.fp32_router_gemm(out, a, array.output(np.zeros((40, 64), np.float32)))
