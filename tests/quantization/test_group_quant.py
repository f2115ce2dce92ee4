"""per_token_group_fp8_quant, per_token_group_fp8_quant_packed and per_token_group_quant_int8."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libraries import Numpy
from quantization import reference
from quantization.inputs import F, assert_same_bits, needs, odd_rows, rows
from quantization.reference import E4M3, E5M2, INT8
from rows import FLOATS, name_of, padded, turned

import pykv

BF16 = FLOATS[2]
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
KINDS = pytest.mark.parametrize("kind", [E4M3, E5M2, INT8], ids=name_of)


def run(array, x, size, kind=E4M3, *, scales=None, offset=0, **more):
    q = array.output(np.zeros(x.shape, kind), offset=offset)
    memory = np.full((*x.shape[:-1], x.shape[-1] // size), -1, F) if scales is None else scales
    s, given = array.output(memory), array.input(x, offset=offset)
    if kind == INT8:
        pykv.per_token_group_quant_int8(given, q, s, size, **more)
    else:
        pykv.per_token_group_fp8_quant(given, q, s, size, **more)
    options = {k: v for k, v in more.items() if k in ("eps", "truncates")}
    most = more.get("fp8_max", more.get("int8_max"))
    wanted = reference.groups(x, size, kind, most=most, ue8m0=more.get("scale_ue8m0", False), **options)
    assert_same_bits(array.numpy(s), wanted[1].reshape(memory.shape))
    assert_same_bits(array.numpy(q), wanted[0])


@DTYPES
@KINDS
@pytest.mark.parametrize("size", [1, 3, 8, 16, 24, 32, 48, 64, 100, 128, 256, 512, 1000, 1024])
def test_sizes(array, dtype, kind, size):
    needs(array, kind)
    run(array, rows((5, 3 * size), dtype), size, kind)
    run(array, rows((2, 8 * size), dtype), size, kind)


@DTYPES
@KINDS
def test_nan_and_infinity(array, dtype, kind):
    needs(array, kind)
    for size in (16, 128, 20):
        run(array, rows((13, 2 * size), dtype, odd=True), size, kind)
        run(array, rows((13, 2 * size), dtype, odd=True), size, kind, eps=0.0)


@DTYPES
def test_powers_of_two(array, dtype):
    x = rows((40, 1024), dtype, seed=2)
    x[3, :128] = np.asarray(448 / 2.0**4, dtype)  # the scale is a power of two of itself
    run(array, x, 128, scale_ue8m0=True)
    run(array, rows((13, 60), dtype, odd=True), 20, scale_ue8m0=True)


@DTYPES
def test_many_groups(array, dtype):
    """As many as tables are worth, of every largest magnitude; with zeros, NaN, infinity and the smallest numbers."""
    x = rows((300, 1024), dtype, odd=True)
    x[20:148, 0] = np.linspace(1, 2, 128, endpoint=False).astype(dtype)
    x[148:160] = (x[148:160].astype(F) * F(1e-9)).astype(dtype)
    run(array, x, 128)
    run(array, x, 128, eps=0.0)
    run(array, x, 64, fp8_max=224.0)
    run(array, x, 128, scale_ue8m0=True)
    packed(array, x, 128)


def test_more_than_caches_hold(array):
    """Codes that go past the caches, from any address on."""
    x = rows((2100, 2080), BF16, odd=True)
    run(array, x, 16, offset=8)
    run(array, x, 130)
    x = rows((2100, 2048), BF16, odd=True)
    for size, kind in ((128, E4M3), (64, INT8), (256, INT8)):
        run(array, x, size, kind)
    run(array, x, 128, scale_ue8m0=True)


def test_largest_codes(array):
    x = rows((6, 256), np.dtype(F))
    run(array, x, 64, fp8_min=-224.0, fp8_max=224.0)
    run(array, x, 64, INT8, int8_min=-128.0, int8_max=100.0)
    run(array, x, 64, INT8, truncates=True)
    run(array, x, 64, eps=3.0)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 256), (4, 256), (7, 640), (130, 384)])
def test_layouts(array, dtype, shape):
    """Column by column, with as many rows as there are, or padded to fours."""
    x, groups = rows(shape, dtype), shape[1] // 128
    for n in (shape[0], -(-shape[0] // 4) * 4):
        memory = np.full((groups, n), -1, F)
        run(array, x, 128, scales=memory[:, : shape[0]].T)
    run(array, x, 128, INT8, scales=np.full((shape[0], 2 * groups), -1, F)[:, ::2])


@DTYPES
@pytest.mark.parametrize("kind", [E4M3, INT8], ids=name_of)
@pytest.mark.parametrize("shape", [(16, 384), (37, 6144), (2100, 2080)], ids=str)
def test_columns(dtype, kind, shape):
    """Of as many rows as a line of scales has, some more, and codes that go past the caches; what is behind stays."""
    x, (count, width) = rows(shape, dtype, odd=True), shape
    for size in (16, 32, 96, 128, 520):
        if width % size != 0:
            continue
        memory = np.full((width // size, count + 3), -1, F)
        q, s = np.zeros(shape, kind), memory[:, :count].T
        (pykv.per_token_group_quant_int8 if kind == INT8 else pykv.per_token_group_fp8_quant)(x, q, s, size)
        codes, scales = reference.groups(x, size, kind)
        assert_same_bits(s, scales)
        assert_same_bits(q, codes)
        assert (memory[:, count:] == -1).all()


@DTYPES
@KINDS
def test_leading_dimensions(array, dtype, kind):
    needs(array, kind)
    x = rows((2, 3, 5, 96), dtype)
    run(array, x, 32, kind)
    run(array, padded(turned(x), 16), 32, kind)
    run(array, x, 32, kind, scales=np.full((30, 3), -1, F))
    run(array, x[0, 0, 0], 32, kind)


@pytest.mark.parametrize("offset", [1, 4])
def test_alignment(array, offset):
    for dtype in FLOATS:
        for size in (16, 128):
            run(array, rows((3, 2 * size), dtype), size, offset=offset)


def packed(array, x, size, kind=E4M3, *, rows_more=0, stride=None):
    count, width = x.shape
    q = array.output(np.ones((count + rows_more, width), kind))
    words = -(-width // size // 4)
    memory = np.full((words, stride or count), -1, np.int32)
    s = array.output(memory[:, :count].T)
    pykv.per_token_group_fp8_quant_packed(array.input(x), q, s, size)
    codes, scales = reference.groups(x, size, kind, ue8m0=True)
    assert_same_bits(array.numpy(s), reference.packed(scales))
    assert_same_bits(array.numpy(q)[:count], codes)
    assert not array.numpy(q)[count:].view(np.uint8).any()


@DTYPES
@pytest.mark.parametrize("groups", [1, 3, 4, 5, 8, 13])
def test_packed(array, dtype, groups):
    for count in (1, 4, 7):
        packed(array, rows((count, groups * 128), dtype), 128, rows_more=-count % 4, stride=-(-count // 4) * 4)
    packed(array, rows((13, groups * 64), dtype, odd=True), 64, rows_more=3)


def test_e5m2_of_powers_of_two(array):
    needs(array, E5M2)
    x = rows((5, 320), np.dtype(F))
    run(array, x, 40, E5M2, scale_ue8m0=True)
    packed(array, x, 40, E5M2)


def test_zero_groups_packed(array):
    s, q = array.output(np.zeros((2, 1), np.int32)), array.output(np.ones((2, 512), E4M3))
    pykv.per_token_group_fp8_quant_packed(array.input(np.zeros((2, 512), F)), q, s)
    assert array.numpy(s).tolist() == [[0x5E5E5E5E]] * 2
    assert not array.numpy(q).view(np.uint8).any()


@given(st.data(), st.integers(1, 140), st.sampled_from([E4M3, E5M2, INT8]), st.integers(0, 3))
def test_any(data, size, kind, offset):
    x = data.draw(odd_rows(st.integers(1, 9).map(lambda groups: groups * size)))
    option = data.draw(st.sampled_from(["", "eps", "scale_ue8m0" if kind != INT8 else "truncates"]))
    run(Numpy(), x, size, kind, offset=offset, **{option: 0.0 if option == "eps" else True} if option else {})
    if kind == E4M3 and x.ndim == 2:
        count = len(x)
        packed(Numpy(), x, size, rows_more=-count % 4, stride=-(-count // 4) * 4)


def test_empty(array):
    x, q = array.input(np.zeros((0, 256), F)), array.output(np.zeros((0, 256), E4M3))
    pykv.per_token_group_fp8_quant(x, q, array.output(np.zeros((0, 2), F)), 128)
    x, q = array.input(np.zeros((3, 0), F)), array.output(np.zeros((3, 0), E4M3))
    pykv.per_token_group_fp8_quant(x, q, array.output(np.zeros((3, 0), F)), 128)


def test_refused(array):
    x, q = array.input(rows((4, 96), np.dtype(F))), array.output(np.zeros((4, 96), E4M3))
    s = array.output(np.zeros((4, 3), F))
    with pytest.raises(ValueError, match="group_size: must be positive and divide width = 96, got 36"):
        pykv.per_token_group_fp8_quant(x, q, s, 36)
    with pytest.raises(ValueError, match="output_s: dimension 1 must equal width / group_size = 6"):
        pykv.per_token_group_fp8_quant(x, q, s, 16)
    with pytest.raises(ValueError, match="fp8_max: must be positive and at most 448, got 500"):
        pykv.per_token_group_fp8_quant(x, q, s, 32, fp8_max=500.0)
    with pytest.raises(ValueError, match="fp8_min: must be"):
        pykv.per_token_group_fp8_quant(x, q, s, 32, fp8_min=-3.0)
    with pytest.raises(ValueError, match="eps: must not be negative"):
        pykv.per_token_group_fp8_quant(x, q, s, 32, -1.0)
    with pytest.raises(ValueError, match="output_q: must have at least num_rows = 4 rows"):
        pykv.per_token_group_fp8_quant_packed(x, array.output(np.zeros((3, 96), E4M3)), s, 32)
