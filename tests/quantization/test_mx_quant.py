"""mxfp8_quantize, mxfp4_quantize and those of experts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libraries import Numpy
from quantization import reference_blocks as reference
from quantization.inputs import F, assert_same_bits, odd_rows, rows
from quantization.reference import E4M3
from quantization.test_fp4_quant import silu_and_mul
from rows import FLOATS, name_of, padded, turned

import pykv

DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
KINDS = pytest.mark.parametrize("kind", [4, E4M3], ids=["mxfp4", "mxfp8"])
MODES = pytest.mark.parametrize("mode", ["ceil", "ocp", "vllm"])
OPS = {4: pykv.mxfp4_quantize, E4M3: pykv.mxfp8_quantize}


def run(array, x, kind, mode, *, swizzled=False, offset=0):
    codes, scales = reference.mx(x, kind, mode)
    q = array.output(np.full(codes.shape, 0x2A, np.uint8), offset=offset)
    wanted = reference.swizzled(scales.reshape(-1, scales.shape[-1])) if swizzled else scales
    s = array.output(np.full(wanted.shape, 0x77, np.uint8))
    OPS[kind](q, s, array.input(x, offset=offset), swizzled, mode)
    assert_same_bits(array.numpy(s), wanted)
    assert_same_bits(array.numpy(q), codes.view(np.uint8))


@DTYPES
@KINDS
@MODES
@pytest.mark.parametrize("shape", [(1, 32), (5, 96), (130, 160), (33, 1024)])
def test_shapes(array, dtype, kind, mode, shape):
    for swizzled in (False, True):
        run(array, rows(shape, dtype), kind, mode, swizzled=swizzled)


@DTYPES
@KINDS
@MODES
def test_nan_and_infinity(array, dtype, kind, mode):
    run(array, rows((13, 64), dtype, odd=True), kind, mode)


@DTYPES
@KINDS
@MODES
def test_many_blocks(array, dtype, kind, mode):
    """As many as tables are worth."""
    run(array, rows((300, 1024), dtype, odd=True), kind, mode)


@KINDS
def test_more_than_caches_hold(array, kind):
    """Codes that go past the caches: whole lines, and rows that do not begin with one; scales in lines of tiles."""
    run(array, rows((2100, 2048), FLOATS[2], odd=True), kind, "ocp")
    run(array, rows((2100, 2080), FLOATS[2], odd=True), kind, "ceil", offset=8)
    run(array, rows((2100, 4224), FLOATS[2], odd=True), kind, "ceil", swizzled=True)


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=name_of)
def test_more_than_fill_a_gpu(array, dtype):
    """So many that a thread has two rows of mxfp4."""
    if array.name not in ("numpy", "cupy"):
        pytest.skip("one library is enough")
    some = rows((301, 4096), dtype, odd=True)
    codes, scales = reference.mx(some, 4, "ocp")
    count = 17017 if array.device == "cuda" else 1001
    x, codes, scales = (np.resize(v.view(f"u{v.itemsize}"), (count, v.shape[1])) for v in (some, codes, scales))
    x, tiles = array.input(x.view(dtype)), reference.swizzled(scales)
    for wanted, swizzled in ((tiles, True), (scales, False)):
        q, s = array.output(np.full(codes.shape, 0xAA, np.uint8)), array.output(np.full(wanted.shape, 0x77, np.uint8))
        pykv.mxfp4_quantize(q, s, x, swizzled, "ocp")
        assert_same_bits(array.numpy(s), wanted)
        assert_same_bits(array.numpy(q), codes)
    q, s = array.output(np.full(codes.shape, 0xAA, np.uint8)), array.output(np.full(tiles.shape, 0x77, np.uint8))
    first, scales_first = (array.input(np.array([0, n], np.int32)) for n in (count, len(tiles)))
    pykv.mxfp4_experts_quant(q, s, x, first, scales_first, 1, "ocp")
    assert_same_bits(array.numpy(s), tiles)
    assert_same_bits(array.numpy(q), codes)


@KINDS
@MODES
def test_powers_of_two_and_next_to_them(array, kind, mode):
    """Largest magnitudes where the exponent changes, over the whole range of fp32."""
    powers = np.ldexp(F(1), np.arange(-149, 128))
    above = np.nextafter(powers * F(1.75), F(np.inf))
    edges = [powers, powers * F(1.5), powers * F(1.75), np.nextafter(powers, F(0)), above]
    most = np.concatenate([e.astype(F) for e in edges])
    x = most[:, None] * np.linspace(-1, 1, 32, dtype=F)
    run(array, x.astype(F), kind, mode)


def test_ceil_never_saturates_and_ocp_does(array):
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(F)
    for mode, most in (("ceil", 1.0), ("ocp", 2.0)):
        q, s = array.output(np.zeros((64, 256), E4M3)), array.output(np.zeros((64, 8), np.uint8))
        pykv.mxfp8_quantize(q, s, array.input(x), False, mode)
        scale = np.ldexp(1.0, array.numpy(s).astype(int) - 127)
        ratio = np.abs(x).reshape(64, 8, 32).max(-1) / scale / 448
        assert ratio.max() <= most
        assert ratio.max() > most / 2 * 1.05
        if mode == "ceil":
            values = array.numpy(q).view(E4M3).astype(np.float64).reshape(64, 8, 32) * scale[..., None]
            assert (np.abs(values - x.reshape(values.shape)) <= np.abs(x.reshape(values.shape)) / 16 + 1e-3).all()


@DTYPES
@KINDS
def test_leading_dimensions(array, dtype, kind):
    x = padded(turned(rows((2, 3, 4, 64), dtype)), 8)
    codes, scales = reference.mx(x, kind, "ocp")
    q = array.output(padded(np.zeros(codes.shape, F), 4).astype(np.uint8))
    s = array.output(np.zeros((2, 3, 4, 5), np.uint8)[..., 1:5:2])
    OPS[kind](q, s, array.input(x), False, "ocp")
    assert_same_bits(array.numpy(q), codes.view(np.uint8))
    assert_same_bits(array.numpy(s), scales)


@KINDS
@pytest.mark.parametrize("offset", [1, 4])
def test_alignment(array, kind, offset):
    for dtype in FLOATS:
        run(array, rows((3, 96), dtype), kind, "ceil", offset=offset)


def experts(array, sizes, width, dtype, kind, *, gated=False, gap=0, mode="ocp", odd=False):
    """``gap``: rows between experts, which are nobody's; ``odd``: with NaN and infinities."""
    sizes = np.array(sizes)
    first = np.cumsum([0, *(sizes + gap)])
    scales_first = np.concatenate([[0], np.cumsum(-(-sizes // 128) * 128)])
    x = rows((first[-1], width * (2 if gated else 1)), dtype, odd=odd)
    y = silu_and_mul(array, x) if gated else x
    blocks = -(-(width // 32) // 4) * 4
    wanted_codes = np.full((len(x), width // (2 if kind == 4 else 1)), 0x2A, np.uint8)
    wanted_scales = np.full((scales_first[-1] + 128, blocks), 0x77, np.uint8)
    for e, n in enumerate(sizes):
        if n:
            codes, scales = reference.mx(y[first[e] : first[e] + n], kind, mode)
            wanted_codes[first[e] : first[e] + n] = codes.view(np.uint8)
            tiles = reference.swizzled(scales)
            wanted_scales[scales_first[e] : scales_first[e] + len(tiles)] = tiles
    q = array.output(np.full(wanted_codes.shape, 0x2A, np.uint8))
    s = array.output(np.full(wanted_scales.shape, 0x77, np.uint8))
    offsets = [array.input(v.astype(np.int32)) for v in (first, scales_first)]
    if kind == 4:
        op = pykv.silu_and_mul_mxfp4_experts_quant if gated else pykv.mxfp4_experts_quant
        op(q, s, array.input(x), *offsets, len(sizes), mode)
    else:
        problems = np.stack([sizes, np.full_like(sizes, -1), np.full_like(sizes, -1)], 1).astype(np.int32)
        starts = [array.input(v[:-1].astype(np.int64)) for v in (first, scales_first)]
        pykv.mxfp8_experts_quant(array.input(x), array.input(problems), *starts, q, s, mode)
    assert_same_bits(array.numpy(q), wanted_codes)
    assert_same_bits(array.numpy(s), wanted_scales)


@DTYPES
@MODES
@pytest.mark.parametrize("sizes", [[5], [3, 0, 130, 1], [0, 0, 128, 7, 0]], ids=str)
def test_experts(array, dtype, mode, sizes):
    experts(array, sizes, 64, dtype, 4, mode=mode)
    experts(array, sizes, 160, dtype, 4, mode=mode, gated=True)
    experts(array, sizes, 128, dtype, E4M3, mode=mode)
    experts(array, sizes, 160, dtype, E4M3, mode=mode, gap=3)


@DTYPES
@pytest.mark.parametrize("count", [33, 129])
def test_many_experts(array, dtype, count):
    """As many as a warp has lanes, as memory of a block holds, and more; some have no rows."""
    sizes = [i % 4 * (1 + i % 3) for i in range(count)]
    for gated in (False, True):
        experts(array, sizes, 128, dtype, 4, gated=gated, odd=True)
    experts(array, sizes, 128, dtype, E4M3, gap=2, odd=True)


@given(
    st.lists(st.integers(0, 140) | st.integers(0, 3), min_size=1, max_size=9).filter(any),
    st.integers(1, 6),
    st.sampled_from(FLOATS),
    st.sampled_from(["ceil", "ocp", "vllm"]),
    st.booleans(),
)
def test_any_experts(sizes, blocks, dtype, mode, gated):
    experts(Numpy(), sizes, 32 * blocks, dtype, 4, mode=mode, gated=gated, odd=True)
    experts(Numpy(), sizes, 32 * blocks, dtype, E4M3, mode=mode, gap=3, odd=True)


@given(odd_rows(st.integers(1, 8).map(lambda n: 32 * n)), st.integers(0, 3), st.booleans(), st.booleans())
def test_any(x, offset, swizzled, four):
    for mode in ("ceil", "ocp", "vllm"):
        run(Numpy(), x, 4 if four else E4M3, mode, offset=offset, swizzled=swizzled)


def test_refused(array):
    x, q = array.input(rows((4, 96), np.dtype(F))), array.output(np.zeros((4, 96), E4M3))
    s = array.output(np.zeros((4, 3), np.uint8))
    with pytest.raises(ValueError, match='scale_mode: must be "ceil", "ocp" or "vllm", got "floor"'):
        pykv.mxfp8_quantize(q, s, x, False, "floor")
    with pytest.raises(TypeError, match="output_scale: "):
        pykv.mxfp8_quantize(q, array.output(np.zeros((4, 3), np.int16)), x)
    with pytest.raises(ValueError, match="output_scale: the last dimension must be at least 3"):
        pykv.mxfp8_quantize(q, array.output(np.zeros((4, 2), np.uint8)), x)
    offsets = array.input(np.zeros(3, np.int32))
    codes, scales = array.output(np.zeros((4, 48), np.uint8)), array.output(np.zeros((128, 4), np.uint8))
    with pytest.raises(ValueError, match="n_experts: must be one less than there are offsets, 2, got 3"):
        pykv.mxfp4_experts_quant(codes, scales, x, offsets, offsets, 3)
