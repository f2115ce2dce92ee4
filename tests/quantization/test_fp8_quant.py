"""static_scaled_fp8_quant, dynamic_scaled_fp8_quant and dynamic_per_token_scaled_fp8_quant."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libraries import Numpy
from quantization import reference
from quantization.inputs import F, assert_same_bits, needs, odd_rows, rows
from quantization.reference import E4M3, E5M2
from rows import FLOATS, name_of, padded, turned

import pykv

BF16 = FLOATS[2]
DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
KINDS = pytest.mark.parametrize("kind", [E4M3, E5M2], ids=name_of)
WIDTHS = [1, 7, 8, 16, 100, 128, 1024, 1032, 4096, 5000, 40000]


def spread(scale, shape, group):
    """A scale for each element."""
    at = [np.arange(n) // (n if g == -1 else g) for n, g in zip(shape, group, strict=True)]
    return scale[at[0]][:, at[1]]


def static(array, x, scale, kind=E4M3, group=(0, 0), each=None, *, offset=0):
    result = array.output(np.zeros(x.shape, kind), offset=offset)
    given = array.input(scale) if isinstance(scale, np.ndarray) else scale
    pykv.static_scaled_fp8_quant(result, array.input(x, offset=offset), given, *group)
    assert_same_bits(array.numpy(result), reference.static_fp8(x, scale if each is None else each, kind))


def tensor(array, x, kind=E4M3, *, offset=0):
    result, scale = array.output(np.zeros(x.shape, kind), offset=offset), array.output(np.full(1, 5, F))
    pykv.dynamic_scaled_fp8_quant(result, array.input(x, offset=offset), scale)
    wanted = reference.dynamic_fp8(x, kind)
    assert_same_bits(array.numpy(scale), wanted[1].reshape(1))
    assert_same_bits(array.numpy(result), wanted[0])


def token(array, x, kind=E4M3, scale_ub=None, *, offset=0):
    result = array.output(np.zeros(x.shape, kind), offset=offset)
    scale = array.output(np.full((int(np.prod(x.shape[:-1])), 1), -1, F))
    pykv.dynamic_per_token_scaled_fp8_quant(result, array.input(x, offset=offset), scale, scale_ub)
    wanted = reference.per_token_fp8(x, kind, scale_ub)
    assert_same_bits(array.numpy(scale), wanted[1].reshape(-1, 1))
    assert_same_bits(array.numpy(result), wanted[0])


@DTYPES
@KINDS
@pytest.mark.parametrize("width", WIDTHS)
def test_widths(array, dtype, kind, width):
    needs(array, kind)
    x = rows((5, width), dtype)
    static(array, x, 0.037, kind)
    tensor(array, x, kind)
    token(array, x, kind)


@DTYPES
def test_many_rows(array, dtype):
    x = rows((700, 264), dtype)
    static(array, x, 0.11)
    tensor(array, x)
    token(array, x)
    token(array, x, scale_ub=3.0)


@DTYPES
def test_more_rows_than_tables_are_worth(array, dtype):
    x = rows((300, 1000), dtype, odd=True)
    x[20:148] = (x[20:148].astype(F) / 64).astype(dtype)
    x[20:148, 0] = np.linspace(1, 2, 128, endpoint=False).astype(dtype)
    token(array, x)
    token(array, x, scale_ub=1.5)
    token(array, (x.astype(F) * F(1e-6)).astype(dtype))


def test_more_than_caches_hold(array):
    """Codes that go past the caches, from any address on."""
    for width, offset in ((4096, 0), (4100, 3)):
        token(array, rows((1030, width), FLOATS[2], odd=True), offset=offset)


@DTYPES
@KINDS
def test_nan_and_infinity(array, dtype, kind):
    needs(array, kind)
    x = rows((13, 48), dtype, odd=True)
    static(array, x, 0.25, kind)
    tensor(array, x[[0, 1, 5, 6, 9]], kind)
    tensor(array, x, kind)
    token(array, x, kind)
    token(array, x, kind, 2.0)


def test_zeros(array):
    x = np.zeros((5, 72), F)
    result, scale = array.output(np.ones(x.shape, E4M3)), array.output(np.ones(1, F))
    pykv.dynamic_scaled_fp8_quant(result, array.input(x), scale)
    assert not array.numpy(result).view(np.uint8).any()
    assert array.numpy(scale).tolist() == [0]
    for value in (1e-45, 1e-41):  # scales whose inverses are infinite
        x[2, 3] = value
        tensor(array, x)


def test_every_number(array):
    """Every bfloat16, in order, where neighbours are alike, and at random."""
    scales = np.array([[0.037, 1, 1 / 3, 3e-5, 1e4, 7.77e-10, 448, 1.9999]], F)
    bits = np.arange(1 << 16, dtype=np.uint16)
    for order in (bits, np.random.default_rng(0).permutation(bits)):
        numbers = order.view(BF16).reshape(1024, 64)
        x = np.tile(numbers, (1, scales.size))
        static(array, x, scales, E4M3, (-1, 64), spread(scales, x.shape, (-1, 64)))
        for scale in scales[0]:
            static(array, numbers, float(scale))


@DTYPES
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 1.0, 1e30, -0.5])
def test_static_scales(array, dtype, scale):
    x = rows((9, 136), dtype, seed=3)
    static(array, x, scale)


@DTYPES
@KINDS
@pytest.mark.parametrize(
    ("shape", "of", "group", "whole"),
    [
        ((9, 320), (9,), (1, -1), None),
        ((9, 320), (320,), (-1, 1), None),
        ((256, 512), (2, 4), (128, 128), None),
        ((200, 300), (2, 3), (128, 128), None),
        ((64, 96), (4, 6), (0, 0), (16, 16)),
        ((64, 96), (64, 1), (0, 0), (1, 96)),
        ((64, 96), (1, 96), (-1, 1), None),
        ((5, 100), (5, 34), (1, 3), None),
        ((5, 100), (3, 20), (2, 5), None),
        ((3, 8200), (3, 2050), (1, 4), None),
    ],
    ids=str,
)
def test_groups(array, dtype, kind, shape, of, group, whole):
    needs(array, kind)
    scale = np.exp2(np.random.default_rng(1).uniform(-9, 3, of)).astype(F)
    two = scale if scale.ndim == 2 else scale.reshape((-1, 1) if group[0] == 1 else (1, -1))
    each = spread(two, shape, whole or group)
    static(array, rows(shape, dtype), scale, kind, group, each)


def test_expanded_scales(array):
    x = rows((6, 64), np.dtype(F))
    scale = np.broadcast_to(np.array([[0.5]], F), (6, 4))
    result = array.output(np.zeros(x.shape, E4M3))
    pykv.static_scaled_fp8_quant(result, array.input(x), array.input(scale), 1, 16)
    assert_same_bits(array.numpy(result), reference.static_fp8(x, 0.5))


@pytest.mark.parametrize("shape", [(0, 1), (1, 64), (0, 4)])
@pytest.mark.parametrize("group", [(0, 0), (-1, 1), (1, -1)])
def test_no_rows(array, shape, group):
    static(array, rows((0, 64), np.dtype(F)), np.ones(shape, F), E4M3, group, np.ones((0, 64), F))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("group", [(0, 0), (-1, -1), (6, 64)])
def test_one_scale_has_any_shape(array, shape, group):
    x = rows((6, 64), np.dtype(F))
    static(array, x, np.full(shape, 0.5, F), E4M3, group, np.float32(0.5))


@pytest.mark.parametrize("offset", [1, 4])
def test_alignment(array, offset):
    for dtype in FLOATS:
        x = rows((3, 96), dtype)
        static(array, x, 0.1, offset=offset)
        tensor(array, x, offset=offset)
        token(array, x, offset=offset)


@DTYPES
def test_strides(array, dtype):
    x = padded(turned(rows((2, 3, 4, 40), dtype)), 24)
    q = array.output(padded(np.zeros(x.shape, F), 3).astype(E4M3))
    scale = array.output(np.zeros((24, 2), F)[:, :1])
    pykv.dynamic_per_token_scaled_fp8_quant(q, array.input(x), scale)
    wanted = reference.per_token_fp8(x)
    assert_same_bits(array.numpy(q), wanted[0])
    assert_same_bits(array.numpy(scale), wanted[1].reshape(-1, 1))
    one = array.output(np.zeros(1, F))
    pykv.dynamic_scaled_fp8_quant(q, array.input(x), one)
    assert_same_bits(array.numpy(q), reference.dynamic_fp8(x)[0])
    pykv.static_scaled_fp8_quant(q, array.input(x), 0.2)
    assert_same_bits(array.numpy(q), reference.static_fp8(x, 0.2))


def test_large_array(array):
    """That does not fit into one block's registers, nor into as many blocks as there are at once."""
    x = rows((1500, 2048), np.dtype(F), seed=5)
    tensor(array, x)


@given(odd_rows(st.integers(1, 600)), st.integers(0, 3), st.sampled_from([E4M3, E5M2]))
def test_any(x, offset, kind):
    token(Numpy(), x, kind, offset=offset)
    tensor(Numpy(), x, kind, offset=offset)
    static(Numpy(), x, 0.03, kind, offset=offset)


def test_uint8_holds_e4m3(array):
    x = rows((3, 40), np.dtype(F))
    result = array.output(np.zeros(x.shape, np.uint8))
    pykv.static_scaled_fp8_quant(result, array.input(x), 0.1)
    assert_same_bits(array.numpy(result).view(E4M3), reference.static_fp8(x, 0.1))


def test_empty(array):
    for shape in ((0, 8), (3, 0)):
        x, q = array.input(np.zeros(shape, F)), array.output(np.zeros(shape, E4M3))
        pykv.static_scaled_fp8_quant(q, x, 1.0)
        pykv.dynamic_scaled_fp8_quant(q, x, array.output(np.zeros(1, F)))


def test_refused(array):
    x, q = array.input(rows((4, 8), np.dtype(F))), array.output(np.zeros((4, 8), E4M3))
    with pytest.raises(ValueError, match="scale: of 1 dimension must be those of rows"):
        pykv.static_scaled_fp8_quant(q, x, array.input(np.ones(4, F)))
    with pytest.raises(ValueError, match="scale: dimension 0 must equal groups of rows = 2, got shape"):
        pykv.static_scaled_fp8_quant(q, x, array.input(np.ones((3, 1), F)), 2, 8)
    with pytest.raises(ValueError, match="group_rows: is required"):
        pykv.static_scaled_fp8_quant(q, x, array.input(np.ones((3, 1), F)))
    with pytest.raises(ValueError, match="scale: must have 1 element"):
        pykv.dynamic_scaled_fp8_quant(q, x, array.output(np.ones(2, F)))
    with pytest.raises(ValueError, match="result: dimension 1 must equal width = 8, got shape"):
        pykv.static_scaled_fp8_quant(array.output(np.zeros((4, 9), E4M3)), x, 1.0)
