"""scaled_fp4_quant, silu_and_mul_nvfp4_quant and those of experts."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libraries import Numpy
from quantization import reference_blocks as reference
from quantization.inputs import F, assert_same_bits, odd_rows, rows
from quantization.reference import E4M3
from rows import FLOATS, name_of, padded, turned

import pykv

DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def silu_and_mul(array, x):
    """By pykv's own operation, of which fused ones must be the codes."""
    out = array.output(np.zeros((*x.shape[:-1], x.shape[-1] // 2), x.dtype))
    pykv.silu_and_mul(out, array.input(x))
    return array.numpy(out)


def widened(codes, scales, blocks):
    """With blocks of zeros up to so many."""
    more = [(0, 0)] * (codes.ndim - 1)
    missing = blocks - scales.shape[-1]
    zeros = np.pad(scales.view(np.uint8), (*more, (0, missing))).view(scales.dtype)
    return np.pad(codes, (*more, (0, 8 * missing))), zeros


def run(array, x, g=30.0, *, swizzled=True, four=False, gated=False, more=0, offset=0, scale_dtype=E4M3, tile_rows=128):
    y = silu_and_mul(array, x) if gated else x
    codes, scales = reference.nvfp4(y, g, four_over_six=four)
    blocks = y.shape[-1] // 16 + more
    codes, scales = widened(codes, scales, blocks)
    q = array.output(np.full(codes.shape, 0xAA, np.uint8), offset=offset)
    wanted = reference.swizzled(scales.reshape(-1, blocks), tile_rows) if swizzled else scales
    memory = np.full(wanted.shape, 0x77, np.uint8)
    s = array.output(memory.view(scale_dtype))
    given = array.input(x, offset=offset)
    if gated:
        pykv.silu_and_mul_nvfp4_quant(q, s, given, g)
    else:
        pykv.scaled_fp4_quant(q, s, given, g, swizzled, four, tile_rows)
    assert_same_bits(array.numpy(s).view(np.uint8), np.ascontiguousarray(wanted).view(np.uint8))
    assert_same_bits(array.numpy(q), codes)


def test_more_than_caches_hold(array):
    """Codes that go past the caches, from any address on."""
    x = rows((4200, 2080), FLOATS[2], odd=True)
    run(array, x, offset=4)
    run(array, x, swizzled=False)


@pytest.mark.parametrize("dtype", FLOATS[1:], ids=name_of)
def test_more_than_fill_a_gpu(array, dtype):
    """So many that a thread has two rows, the last of which may have no second one."""
    if array.name not in ("numpy", "cupy"):
        pytest.skip("one library is enough")
    some = rows((301, 4096), dtype, odd=True)
    codes, scales = reference.nvfp4(some, 30.0)
    count = 17017 if array.device == "cuda" else 1001
    x, codes, scales = (np.resize(v.view(f"u{v.itemsize}"), (count, v.shape[1])) for v in (some, codes, scales))
    x, q = array.input(x.view(dtype)), array.output(np.full(codes.shape, 0xAA, np.uint8))
    for tile_rows in (128, 8, None):
        wanted = reference.swizzled(scales, tile_rows) if tile_rows else scales
        s = array.output(np.full(wanted.shape, 0x77, np.uint8))
        pykv.scaled_fp4_quant(q, s, x, 30.0, tile_rows is not None, False, tile_rows or 128)
        assert_same_bits(array.numpy(s), np.ascontiguousarray(wanted))
        assert_same_bits(array.numpy(q), codes)
    # of experts, among them some that end within what a warp has
    sizes = [count // 2 + 3, 0, 1, 15, 17, 130]
    sizes.append(count - sum(sizes))
    first, padded_sizes = np.concatenate([[0], np.cumsum(sizes)]), -(-np.array(sizes) // 128) * 128
    scales_first = np.concatenate([[0], np.cumsum(padded_sizes)])
    tiles = [reference.swizzled(part) for part in np.split(scales, first[1:-1])]
    wanted = np.concatenate([t.reshape(n, -1) for t, n in zip(tiles, padded_sizes, strict=True) if n])
    q, s = array.output(np.full(codes.shape, 0xAA, np.uint8)), array.output(np.full(wanted.shape, 0x77, np.uint8))
    offsets = [array.input(v.astype(np.int32)) for v in (first, scales_first)]
    pykv.scaled_fp4_experts_quant(q, s, x, array.input(np.full(len(sizes), 30, F)), *offsets)
    assert_same_bits(array.numpy(s), wanted)
    assert_same_bits(array.numpy(q), codes)


@DTYPES
@pytest.mark.parametrize("swizzled", [True, False])
@pytest.mark.parametrize("shape", [(1, 16), (3, 48), (5, 64), (130, 160), (256, 80), (33, 1024)])
def test_shapes(array, dtype, swizzled, shape):
    run(array, rows(shape, dtype), swizzled=swizzled)
    run(array, rows(shape, dtype), 0.02, swizzled=swizzled, four=True)


@DTYPES
def test_nan_and_infinity(array, dtype):
    x = rows((13, 64), dtype, odd=True)
    for g in (30.0, 1e-3, 1e6, -3.0, 0.0):
        run(array, x, g)
    run(array, x, 30.0, four=True, swizzled=False)


@DTYPES
def test_padding(array, dtype):
    for swizzled in (True, False):
        run(array, rows((7, 48), dtype), swizzled=swizzled, more=3)
        run(array, rows((130, 64), dtype), swizzled=swizzled, more=1)
    run(array, rows((70, 1040), dtype), more=70)  # some of what is made at once has nothing but padding


@pytest.mark.parametrize("swizzled", [True, False])
def test_padding_alone(swizzled):
    q, s = np.full((130, 16), 0xAA, np.uint8), np.full((256 if swizzled else 130, 4), 0x77, np.uint8)
    pykv.scaled_fp4_quant(q, s, np.zeros((130, 0), FLOATS[1]), 30.0, swizzled)
    assert not q.any()
    assert not s.any()


@DTYPES
@pytest.mark.parametrize("shape", [(1, 16), (5, 80), (8, 64), (31, 128), (130, 160)])
def test_tiles_of_8_rows(array, dtype, shape):
    run(array, rows(shape, dtype), tile_rows=8)
    run(array, rows(shape, dtype), tile_rows=8, more=5, four=True)


def test_every_code(array):
    """All numbers that a code may be the nearest one of, and all ties."""
    steps = np.arange(-260, 261) / 40
    ties = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -2.5, -5, 0.0, -0.0])
    x = np.concatenate([steps, ties])
    x = np.pad(x, (0, -len(x) % 15)).reshape(-1, 15)
    x = np.concatenate([np.full((len(x), 1), 6.0), np.clip(x, -6, 6)], axis=1).astype(F)
    run(array, x, 1.0, swizzled=False)
    codes = array.output(np.zeros((len(x), 8), np.uint8))
    pykv.scaled_fp4_quant(codes, array.output(np.zeros((len(x), 1), E4M3)), array.input(x), 1.0, False)
    q = array.numpy(codes)
    own = np.stack([q & 15, q >> 4], -1).reshape(x.shape)
    assert_same_bits(own, x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15)


@DTYPES
def test_global_scale_on_the_device_and_words(array, dtype):
    x = rows((5, 128), dtype)
    codes, scales = reference.nvfp4(x, 17.0)
    q, s = array.output(np.zeros(codes.shape, np.uint8)), array.output(np.zeros((128, 2), np.int32))
    pykv.scaled_fp4_quant(q, s, array.input(x), array.input(np.array([17], F)))
    assert_same_bits(array.numpy(q), codes)
    assert_same_bits(array.numpy(s).view(np.uint8), reference.swizzled(scales.view(np.uint8)))


@DTYPES
def test_leading_dimensions(array, dtype):
    x = padded(turned(rows((2, 3, 4, 64), dtype)), 8)
    codes, scales = reference.nvfp4(x, 5.0)
    q = array.output(padded(np.zeros((2, 3, 4, 32), F), 4).astype(np.uint8))
    s = array.output(np.zeros((2, 3, 4, 9), np.uint8)[..., 1:9:2])
    pykv.scaled_fp4_quant(q, s, array.input(x), 5.0, False)
    assert_same_bits(array.numpy(q), codes)
    assert_same_bits(array.numpy(s), scales.view(np.uint8))


@pytest.mark.parametrize("offset", [1, 4])
def test_alignment(array, offset):
    for dtype in FLOATS:
        run(array, rows((3, 96), dtype), offset=offset)
        run(array, rows((3, 96), dtype), offset=offset, gated=True)


@DTYPES
@pytest.mark.parametrize("shape", [(1, 32), (5, 128), (130, 288)])
def test_silu(array, dtype, shape):
    run(array, rows(shape, dtype), gated=True)


@given(odd_rows(st.integers(1, 6).map(lambda n: 32 * n)), st.integers(0, 3))
def test_any_silu(x, offset):
    run(Numpy(), x, 7.0, gated=True, offset=offset)


def test_four_over_six_is_closer(array):
    x = rows((40, 256), np.dtype(F), seed=1)[1:]
    errors = []
    for four in (False, True):
        q, s = array.output(np.zeros((39, 128), np.uint8)), array.output(np.zeros((39, 16), E4M3))
        pykv.scaled_fp4_quant(q, s, array.input(x), 2.0, False, four)
        codes = array.numpy(q)
        values = reference.E2M1[np.stack([codes & 7, codes >> 4 & 7], -1)].reshape(39, 16, 16)
        d = values * array.numpy(s).view(E4M3).astype(F)[..., None] / 2 - np.abs(x).reshape(39, 16, 16)
        errors.append((d**2).sum(-1))
    assert (errors[1] <= errors[0] * 1.0001).all()
    assert errors[1].sum() < 0.95 * errors[0].sum()


def experts(array, sizes, width, dtype, *, gated=False, gap=0, odd=False):
    """``gap``: rows behind the last expert, which are nobody's; ``odd``: with NaN and infinities."""
    sizes = np.array(sizes)
    first = np.concatenate([[0], np.cumsum(sizes)])
    scales_first = np.concatenate([[0], np.cumsum(-(-sizes // 128) * 128)])
    x = rows((first[-1] + gap, width * (2 if gated else 1)), dtype, odd=odd)
    y = silu_and_mul(array, x) if gated else x
    g = np.linspace(3, 40, len(sizes)).astype(F)
    blocks = -(-(width // 16) // 4) * 4
    wanted_codes = np.full((len(x), width // 2), 0xAA, np.uint8)
    wanted_scales = np.full((scales_first[-1] + 128, blocks), 0x77, np.uint8)
    for e, n in enumerate(sizes):
        if n:
            codes, scales = reference.nvfp4(y[first[e] : first[e + 1]], g[e])
            wanted_codes[first[e] : first[e + 1]] = codes
            tiles = reference.swizzled(scales.view(np.uint8))
            wanted_scales[scales_first[e] : scales_first[e] + len(tiles)] = tiles
    q = array.output(np.full(wanted_codes.shape, 0xAA, np.uint8))
    s = array.output(np.full(wanted_scales.shape, 0x77, np.uint8))
    op = pykv.silu_and_mul_scaled_fp4_experts_quant if gated else pykv.scaled_fp4_experts_quant
    offsets = [array.input(v.astype(np.int32)) for v in (first, scales_first)]
    op(q, s, array.input(x), array.input(g), *offsets)
    assert_same_bits(array.numpy(q), wanted_codes)
    assert_same_bits(array.numpy(s), wanted_scales)


@DTYPES
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("sizes", [[5], [3, 0, 130, 1], [0, 0, 128, 7, 0]], ids=str)
def test_experts(array, dtype, gated, sizes):
    experts(array, sizes, 64, dtype, gated=gated)
    experts(array, sizes, 208, dtype, gated=gated, gap=2)


@DTYPES
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("count", [33, 129])
def test_many_experts(array, dtype, gated, count):
    """As many as a warp has lanes, as memory of a block holds, and more; some have no rows."""
    experts(array, [i % 4 * (1 + i % 3) for i in range(count)], 128, dtype, gated=gated, gap=1, odd=True)


@given(
    st.lists(st.integers(0, 140) | st.integers(0, 3), min_size=1, max_size=9).filter(any),
    st.integers(1, 12),
    st.sampled_from(FLOATS),
    st.booleans(),
    st.integers(0, 3),
    st.booleans(),
)
def test_any_experts(sizes, blocks, dtype, gated, gap, odd):
    experts(Numpy(), sizes, 16 * blocks, dtype, gated=gated, gap=gap, odd=odd)


def test_scales_elsewhere_are_reported(array):
    x = rows((6, 32), np.dtype(F))
    q, s = array.output(np.full((6, 16), 0xAA, np.uint8)), array.output(np.full((128, 4), 0x77, np.uint8))
    first, scales_first = array.input(np.array([0, 3, 6], np.int32)), array.input(np.array([0, 128, 256], np.int32))
    name = "scaled_fp4_experts_quant: output_scale_offset_by_experts"
    with array.reports(f"{name}: (128|129|130) is out of range"):
        pykv.scaled_fp4_experts_quant(q, s, array.input(x), array.input(np.ones(2, F)), first, scales_first)
    codes, scales = reference.nvfp4(x[:3], 1.0)
    assert_same_bits(array.numpy(q)[:3], codes)
    assert (array.numpy(q)[3:] == 0xAA).all()
    assert_same_bits(array.numpy(s), reference.swizzled(scales.view(np.uint8)))


@given(
    odd_rows(st.integers(1, 12).map(lambda n: 16 * n)),
    st.integers(0, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([8, 128]),
)
def test_any(x, offset, swizzled, four, tile_rows):
    run(Numpy(), x, 7.0, offset=offset, swizzled=swizzled, four=four, tile_rows=tile_rows)


def test_empty(array):
    x, q = array.input(np.zeros((0, 64), F)), array.output(np.zeros((0, 32), np.uint8))
    pykv.scaled_fp4_quant(q, array.output(np.zeros((0, 4), E4M3)), x, 1.0)


def test_refused(array):
    x, q = array.input(rows((4, 96), np.dtype(F))), array.output(np.zeros((4, 48), np.uint8))
    with pytest.raises(ValueError, match="output_scale: must have 1024 bytes"):
        pykv.scaled_fp4_quant(q, array.output(np.zeros((4, 6), E4M3)), x, 1.0)
    with pytest.raises(ValueError, match="output: the last dimension must be a multiple of 8 and at least 48 bytes"):
        pykv.scaled_fp4_quant(array.output(np.zeros((4, 40), np.uint8)), array.output(np.zeros((4, 6), E4M3)), x, 1.0)
    with pytest.raises(ValueError, match="input: the last dimension must be a multiple of 16, got 20"):
        pykv.scaled_fp4_quant(q, array.output(np.zeros((4, 6), E4M3)), array.input(np.zeros((4, 20), F)), 1.0)
    with pytest.raises(TypeError, match="output_scale: int32 is for swizzled scales"):
        pykv.scaled_fp4_quant(q, array.output(np.zeros((4, 6), np.int32)), x, 1.0, False)
    with pytest.raises(ValueError, match=r"output_scale: must have 64 bytes .* multiples of 8 and of 4"):
        pykv.scaled_fp4_quant(q, array.output(np.zeros((128, 8), E4M3)), x, 1.0, tile_rows=8)
    with pytest.raises(ValueError, match="tile_rows: must be 128 or 8, got 16"):
        pykv.scaled_fp4_quant(q, array.output(np.zeros((16, 8), E4M3)), x, 1.0, tile_rows=16)
