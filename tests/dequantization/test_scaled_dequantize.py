"""fp8_dequantize, mxfp8_dequantize, mxfp4_dequantize and nvfp4_dequantize."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from dequantization.reference import e2m1_values, e8m0_values, spread, swizzled
from hypothesis import given
from hypothesis import strategies as st
from libraries import Numpy
from rows import FLOATS, name_of

import pykv

F = np.float32
E4M3, E5M2 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2)
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def codes(*shape: int, seed: int = 0) -> np.ndarray:
    """Every code, NaN and infinities too."""
    return np.random.default_rng(seed + sum(shape)).integers(0, 256, shape, dtype=np.uint8)


def scales(*shape: int, seed: int = 0) -> np.ndarray:
    return np.exp2(np.random.default_rng(seed).uniform(-9, 3, shape)).astype(F)


def assert_equal(actual: np.ndarray, exact: np.ndarray) -> None:
    """Zeros with their signs; NaN is NaN."""
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = exact.astype(F).astype(actual.dtype)
    nan = np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    bits = f"u{actual.itemsize}"
    np.testing.assert_array_equal(actual.view(bits)[~nan], wanted.view(bits)[~nan])


def has_e5m2(array):
    """CuPy has no such dtype: there they are bytes."""
    return "e5m2" in str(getattr(array.input(np.zeros(1, E5M2)), "dtype", ""))


def fp8(array, x, scale, dtype, group=(0, 0), *, expand=None, offset=0):
    """``expand``: the group that these scales have, where that is not to be told."""
    out = array.output(np.zeros(x.shape, dtype), offset=offset)
    given = array.input(scale) if isinstance(scale, np.ndarray) else scale
    pykv.fp8_dequantize(out, array.input(x, offset=offset), given, *group)
    kind = E4M3 if x.dtype == np.uint8 else x.dtype
    rows, columns = [n if g == -1 else g for g, n in zip(expand or group, x.shape[-2:], strict=True)]
    of_groups = np.asarray(scale, F)
    if of_groups.size == 1:
        each = of_groups.reshape(())
    else:
        if of_groups.ndim == 1:
            of_groups = of_groups.reshape((-1, 1) if columns == x.shape[-1] else (1, -1))
        each = spread(of_groups, x.shape, rows, columns)
    with np.errstate(all="ignore"):
        assert_equal(array.numpy(out), x.view(kind).astype(F) * each)


@DTYPES
def test_scales_that_are_no_numbers(array, dtype):
    """With any of NaN's bits."""
    scale = scales(4, 3)
    bits = scale.view(np.uint32)
    bits[0], bits[1, 0], bits[2, 1], bits[3, 2] = (
        (0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001),
        0x7F800000,
        0xFFFFBFFF,
        0x7FBFFFFF,
    )
    fp8(array, codes(4, 192), scale, dtype, (1, 64))


@DTYPES
@pytest.mark.parametrize("kind", [np.dtype(np.uint8), E4M3, E5M2], ids=str)
def test_fp8_formats(array, dtype, kind):
    x = codes(9, 300).view(kind)
    if kind == E5M2 and not has_e5m2(array):
        pytest.skip("bytes are e4m3")
    fp8(array, x, 0.37, dtype)
    fp8(array, x, scales(9), dtype, (1, -1))
    fp8(array, x, scales(300), dtype, (-1, 1))
    fp8(array, x, scales(3, 3), dtype, (4, 128))


@pytest.mark.parametrize(
    ("shape", "of", "group", "expand"),
    [
        ((256, 512), (2, 4), (128, 128), None),
        ((200, 300), (2, 3), (128, 128), None),
        ((64, 96), (4, 6), (0, 0), (16, 16)),
        ((64, 96), (64, 1), (1, -1), None),
        ((64, 96), (1, 96), (-1, 1), None),
        ((5, 100), (5, 34), (1, 3), None),
        ((3, 40, 72), (3, 2, 3), (32, 24), None),
        ((3, 40, 72), (3, 1, 1), (-1, -1), None),
        ((2, 1), (2, 1), (1, 1), None),
    ],
    ids=str,
)
def test_fp8_groups(array, shape, of, group, expand):
    for dtype in FLOATS:
        fp8(array, codes(*shape), scales(*of), dtype, group, expand=expand)


@DTYPES
@pytest.mark.parametrize("offset", [1, 8])
def test_fp8_alignment(array, dtype, offset):
    fp8(array, codes(7, 61), scales(7, 8), dtype, (1, 8), offset=offset)
    fp8(array, codes(7, 64), scales(7), dtype, (1, -1), offset=offset)


def test_fp8_strides(array):
    x, scale = codes(4, 6, 80), np.asfortranarray(scales(4, 3, 10))
    of_groups = np.ascontiguousarray(scale.transpose(2, 0, 1)).transpose(1, 2, 0)
    memory = np.zeros((4, 9, 96), np.float16)
    out = array.output(memory[:, :6, :80])
    wide = np.zeros((5, 6, 90), np.uint8)
    wide[:4, :, :80] = x
    pykv.fp8_dequantize(out, array.output(wide[:4, :, :80]), array.output(of_groups), 2, 8)
    with np.errstate(all="ignore"):
        assert_equal(array.numpy(out), x.view(E4M3).astype(F) * spread(scale, x.shape, 2, 8))


def mx(array, name, x, scale, dtype, is_swizzled, *, offset=0):
    fours = name == "mxfp4_dequantize"
    values = e2m1_values(x) if fours else x.view(E4M3 if x.dtype == np.uint8 else x.dtype).astype(F)
    with np.errstate(all="ignore"):
        exact = values * spread(e8m0_values(scale), values.shape, 1, 32)
    out = array.output(np.zeros(values.shape, dtype), offset=offset)
    given = array.input(swizzled(scale) if is_swizzled else scale)
    getattr(pykv, name)(out, array.input(x, offset=offset), given, is_swizzled)
    assert_equal(array.numpy(out), exact)


@DTYPES
@pytest.mark.parametrize("is_swizzled", [False, True])
@pytest.mark.parametrize("name", ["mxfp4_dequantize", "mxfp8_dequantize"])
def test_mx(array, dtype, is_swizzled, name):
    for shape in ((1, 32), (130, 160), (3, 129, 288)):
        x = codes(*shape[:-1], shape[-1] // (2 if name == "mxfp4_dequantize" else 1))
        mx(array, name, x, codes(*shape[:-1], shape[-1] // 32), dtype, is_swizzled)
    if has_e5m2(array):
        mx(array, "mxfp8_dequantize", codes(5, 64).view(E5M2), codes(5, 2), dtype, False)


def nvfp4(array, x, scale, global_scale, dtype, is_swizzled, *, offset=0):
    values = e2m1_values(x)
    with np.errstate(all="ignore"):
        each = spread(scale.view(E4M3).astype(F) / F(global_scale), values.shape, 1, 16)
        exact = values * each
    out = array.output(np.zeros(values.shape, dtype), offset=offset)
    given = array.input(swizzled(scale) if is_swizzled else scale)
    pykv.nvfp4_dequantize(out, array.input(x, offset=offset), given, global_scale, is_swizzled)
    assert_equal(array.numpy(out), exact)


@DTYPES
@pytest.mark.parametrize("is_swizzled", [False, True])
def test_nvfp4(array, dtype, is_swizzled):
    for shape in ((1, 16), (130, 208), (3, 129, 272)):
        x, scale = codes(*shape[:-1], shape[-1] // 2), codes(*shape[:-1], shape[-1] // 16)
        nvfp4(array, x, scale, 417.3, dtype, is_swizzled)
        nvfp4(array, x, scale.view(E4M3), 0.03, dtype, is_swizzled)


@DTYPES
def test_unaligned_codes(array, dtype):
    for offset in (1, 2, 4):
        nvfp4(array, codes(5, 40), codes(5, 5), 2.0, dtype, False, offset=offset)
        mx(array, "mxfp8_dequantize", codes(5, 96), codes(5, 3), dtype, False, offset=offset)


def test_global_scale_as_array(array):
    x, scale = codes(3, 24), codes(3, 3)
    outs = [array.output(np.zeros((3, 48), np.float16)) for _ in range(2)]
    pykv.nvfp4_dequantize(outs[0], array.input(x), array.input(scale), 7.5, False)
    pykv.nvfp4_dequantize(outs[1], array.input(x), array.input(scale), array.input(np.full(1, 7.5, F)), False)
    np.testing.assert_array_equal(array.numpy(outs[0]).view(np.uint16), array.numpy(outs[1]).view(np.uint16))


@pytest.mark.parametrize("offset", [0, 1, 8])
@DTYPES
def test_more_than_caches_hold(array, dtype, offset):
    """Results that go past the caches, from any address on; and as many as tables are worth, of every scale."""
    x, of_blocks = codes(1060, 2080), scales(9, 17)
    fp8(array, x, of_blocks, dtype, (128, 128), offset=offset)
    fp8(array, x, -scales(1060), dtype, (1, -1), offset=offset)
    mx(array, "mxfp8_dequantize", x, codes(1060, 65), dtype, False, offset=offset)
    mx(array, "mxfp4_dequantize", codes(1060, 1040), codes(1060, 65), dtype, True, offset=offset)
    nvfp4(array, codes(1060, 1040), codes(1060, 130), 3.7, dtype, False, offset=offset)


@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0, 4, 32), (2, 0, 32)])
def test_empty(array, shape):
    half = np.float16
    *lead, columns = shape
    out = array.output(np.zeros(shape, half))
    pykv.fp8_dequantize(out, array.output(np.zeros(shape, np.uint8)), 1.0)
    by_32 = array.output(np.zeros((*lead, columns // 32), np.uint8))
    pykv.mxfp8_dequantize(out, array.output(np.zeros(shape, np.uint8)), by_32)
    packed = array.output(np.zeros((*lead, columns // 2), np.uint8))
    pykv.mxfp4_dequantize(out, packed, by_32)
    pykv.nvfp4_dequantize(out, packed, array.output(np.zeros((*lead, columns // 16), np.uint8)), 1.0, False)


@given(
    rows=st.integers(1, 40),
    columns=st.integers(1, 300),
    group=st.tuples(st.integers(1, 50), st.integers(1, 310)),
    dtype=st.sampled_from(FLOATS),
    offset=st.integers(0, 9),
)
def test_any_group(rows, columns, group, dtype, offset):
    of = scales(-(-rows // group[0]), -(-columns // group[1]))
    fp8(Numpy(), codes(rows, columns), of, dtype, group, offset=offset)


@given(
    rows=st.integers(1, 300),
    blocks=st.integers(1, 12),
    dtype=st.sampled_from(FLOATS),
    is_swizzled=st.booleans(),
    name=st.sampled_from(["mxfp4_dequantize", "mxfp8_dequantize"]),
)
def test_any_rows(rows, blocks, dtype, is_swizzled, name):
    x = codes(rows, blocks * (16 if name == "mxfp4_dequantize" else 32))
    mx(Numpy(), name, x, codes(rows, blocks), dtype, is_swizzled)
    nvfp4(Numpy(), codes(rows, 8 * blocks), codes(rows, blocks), 3.7, dtype, is_swizzled)


FP8: dict[str, Any] = {"out": np.zeros((64, 96), np.float16), "input": np.zeros((64, 96), np.uint8), "scale": 1.0}
NVFP4: dict[str, Any] = {
    "out": np.zeros((64, 96), np.float16),
    "input": np.zeros((64, 48), np.uint8),
    "scale": np.zeros((64, 6), np.uint8),
    "global_scale": 1.0,
    "is_sf_swizzled_layout": False,
}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scale": np.ones(64, F)}, ValueError, "scale: of 1 dimension must be those of rows"),
        ({"scale": np.ones(63, F), "group_rows": 1, "group_columns": -1}, ValueError, "scale: .*64"),
        ({"scale": np.ones((3, 1), F)}, ValueError, "group_rows: is required, for 3 scales do not divide 64 evenly"),
        ({"scale": np.ones((2, 2), F), "group_rows": 128, "group_columns": 48}, ValueError, "scale: "),
        ({"group_rows": -2, "scale": np.ones((2, 2), F)}, ValueError, "group_rows: must be positive"),
        ({"scale": np.ones((1, 64, 1), F)}, ValueError, "scale: "),
        ({"scale": np.ones((2, 2), np.float64)}, (TypeError, ValueError), "scale: "),
        ({"input": np.zeros((64, 95), np.uint8)}, ValueError, "input: "),
        ({"input": np.zeros((64, 96), np.int8)}, TypeError, "input: "),
        ({"out": np.zeros(96, np.float16)}, ValueError, "out: "),
        ({"out": np.zeros((64, 96), np.uint8)}, TypeError, "out: "),
    ],
)
def test_wrong_fp8_arguments(change, error, message):
    with pytest.raises(error, match=message):
        pykv.fp8_dequantize(**FP8 | change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"is_sf_swizzled_layout": True}, ValueError, r"scale: must have 1024 elements .*got .*64, 6"),
        ({"scale": np.zeros((64, 5), np.uint8)}, ValueError, "scale: "),
        ({"scale": np.zeros((64, 6), F)}, TypeError, "scale: "),
        ({"input": np.zeros((64, 96), np.uint8)}, ValueError, "input: .*48"),
        ({"out": np.zeros((64, 90), np.float16), "input": np.zeros((64, 45), np.uint8)}, ValueError, "multiple of 16"),
        ({"global_scale": np.ones(2, F)}, ValueError, "global_scale: "),
    ],
)
def test_wrong_nvfp4_arguments(change, error, message):
    with pytest.raises(error, match=message):
        pykv.nvfp4_dequantize(**NVFP4 | change)


def test_a_group_may_be_larger_than_the_matrix(array):
    x, most = codes(5, 96), 2**63 - 1
    for group, shape in (((most, 32), (1, 3)), ((2, most), (3, 1)), ((most, most), (1, 1)), ((6, 97), (1, 1))):
        out = [array.output(np.zeros(x.shape, F)) for _ in range(2)]
        given, scale = array.input(x), array.input(scales(*shape))
        pykv.fp8_dequantize(out[0], given, scale, *group)
        limits = [min(g, n) for g, n in zip(group, x.shape, strict=True)]
        pykv.fp8_dequantize(out[1], given, scale, *limits)
        np.testing.assert_array_equal(*(array.numpy(o) for o in out))
