"""situ_and_mul_quant and persistent_masked_m_silu_mul_quant: the codes of what the activations alone give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libraries import Numpy
from quantization import reference
from quantization.inputs import F, assert_same_bits, odd_rows, rows
from quantization.reference import E4M3
from quantization.test_fp4_quant import silu_and_mul
from rows import FLOATS, name_of, padded

import pykv

DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def situ_and_mul(array, x, beta, linear_beta):
    out = array.output(np.zeros((len(x), x.shape[-1] // 2), x.dtype))
    pykv.situ_and_mul(out, array.input(x), beta, linear_beta)
    return array.numpy(out)


def situ(array, x, size=128, beta=1.0, linear_beta=-1.0, *, valid=None, topk=1, offset=0):
    codes, scales = reference.groups(situ_and_mul(array, x, beta, linear_beta), size, eps=1e-30)
    codes = codes.view(np.uint8)
    if valid is not None:
        codes[max(valid, 0) * topk :] = 0x2A
        scales[max(valid, 0) * topk :] = 1
    q, s = array.output(np.full(codes.shape, 0x2A, np.uint8), offset=offset), array.output(np.full(scales.shape, -1, F))
    count = None if valid is None else array.input(np.array([valid], np.int64 if abs(valid) >> 31 else np.int32))
    pykv.situ_and_mul_quant(q, s, array.input(x, offset=offset), beta, linear_beta, size, count, topk)
    assert_same_bits(array.numpy(s), scales)
    assert_same_bits(array.numpy(q), codes)


@DTYPES
@pytest.mark.parametrize("size", [16, 48, 128, 1024])
def test_situ(array, dtype, size):
    x = rows((7, 4 * size), dtype)
    situ(array, x, size)
    situ(array, x, size, 1.5, 2.5)


@DTYPES
def test_situ_of_valid_rows(array, dtype):
    x = rows((9, 512), dtype)
    for valid, topk in ((0, 1), (4, 2), (9, 1), (100, 1), (3, 0)):
        situ(array, x, valid=valid, topk=topk)
    # products that int64 does not hold
    for valid, topk in ((2**62, 4), (-(2**62), 4), (2, 2**63 - 1), (0, 2**63 - 1), (-3, 2**62), (2**63 - 1, 1)):
        situ(array, x, valid=valid, topk=topk)
    situ(array, x, 64, offset=1)


@given(
    st.sampled_from([16, 48, 128]).flatmap(
        lambda size: st.tuples(st.just(size), odd_rows(st.integers(1, 3).map(lambda n: 2 * n * size)))
    ),
    st.sampled_from([(1.0, -1.0), (0.3, 2.0), (40.0, 0.0)]),
    st.none() | st.integers(-1, 50),
    st.integers(0, 3),
)
def test_any_situ(sized, betas, valid, offset):
    size, x = sized
    situ(Numpy(), x[(0,) * (x.ndim - 2)], size, *betas, valid=valid, offset=offset)


def masked(array, x, counts, size=128, *, ue8m0=False, packed=False, kind=E4M3, scales=None):
    experts, count, width = x.shape
    codes, wanted = reference.groups(silu_and_mul(array, x), size, kind, ue8m0=ue8m0)
    there = (np.arange(count) < np.array(counts)[:, None])[..., None]
    if packed:
        flat = wanted.reshape(experts * count, -1)
        wanted = reference.packed(flat).reshape(experts, count, -1)
    wanted = np.where(there, wanted, wanted.dtype.type(7))
    memory = np.full(wanted.shape, 7, wanted.dtype) if scales is None else scales
    q, s = array.output(np.full((experts, count, width // 2), 0x2A, np.uint8)), array.output(memory)
    pykv.persistent_masked_m_silu_mul_quant(array.input(x), array.input(np.array(counts, np.int32)), q, s, ue8m0, size)
    assert_same_bits(array.numpy(s), wanted)
    assert_same_bits(array.numpy(q), np.where(there, codes.view(np.uint8), np.uint8(0x2A)))


@DTYPES
def test_masked(array, dtype):
    x = rows((3, 5, 768), dtype)
    masked(array, x, [2, 5, 0])
    masked(array, x, [5, 1, 4], 64, ue8m0=True)
    masked(array, x, [5, 1, 4], 32, ue8m0=True, packed=True)
    masked(array, padded(x, 2, 8), [5, 1, 4], 384)
    column_major = np.full((3, 3, 8), 7, F)[..., :5].transpose(0, 2, 1)
    masked(array, x, [5, 0, 4], scales=column_major)
    column_major = np.full((3, 1, 8), 7, np.int32)[..., :5].transpose(0, 2, 1)
    masked(array, x, [5, 0, 4], ue8m0=True, packed=True, scales=column_major)


@given(
    st.sampled_from([32, 48, 128]).flatmap(
        lambda size: st.tuples(st.just(size), odd_rows(st.integers(1, 3).map(lambda n: 2 * n * size)))
    ),
    st.integers(-1, 50),
    st.sampled_from([(False, False), (True, False), (True, True)]),
)
def test_any_masked(sized, count, form):
    size, x = sized
    x = x.reshape(-1, *x.shape[-2:]) if x.ndim != 2 else x[None]
    counts = np.clip([count, 2, 0, 9, 1, count][: len(x)], -1, x.shape[1]).tolist()
    masked(Numpy(), x, counts, size, ue8m0=form[0], packed=form[1])


def test_refused(array):
    x, q = array.input(rows((2, 3, 64), np.dtype(F))), array.output(np.zeros((2, 3, 32), E4M3))
    counts, s = array.input(np.zeros(2, np.int32)), array.output(np.zeros((2, 3, 1), np.int32))
    with pytest.raises(TypeError, match="y_s: int32 is for use_ue8m0"):
        pykv.persistent_masked_m_silu_mul_quant(x, counts, q, s, False, 32)
    with pytest.raises(ValueError, match="group_size: must be positive and divide width = 32, got 128"):
        pykv.persistent_masked_m_silu_mul_quant(x, counts, q, s, True)
    with pytest.raises(ValueError, match="counts: dimension 0 must equal num_experts = 2"):
        pykv.persistent_masked_m_silu_mul_quant(x, array.input(np.zeros(3, np.int32)), q, s, True, 32)
