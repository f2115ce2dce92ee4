"""nvfp4 with the better of two scales for each block: the largest magnitude becomes 6, or 4 where that errs less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cache import inputs, reference_nvfp4
from cache.inputs import DTYPES
from libraries import Library

import pykv

TOKENS = 4  # that share a group of scales


def some_blocks(dtype: np.dtype[Any], count: int) -> np.ndarray:
    """Among them multiples of a few numbers, of which one scale loses nothing."""
    rng = np.random.default_rng(0)
    blocks = inputs.blocks_of_floats(rng, (count * 16,), dtype).reshape(count, 16)
    even = count // 3
    steps = rng.integers(-4, 5, (even, 16)) * np.exp2(rng.integers(-9, 9, (even, 1))) * rng.integers(1, 8, (even, 1))
    normal = rng.standard_normal((even, 16)) * np.exp2(rng.integers(-6, 6, (even, 1)))
    return np.concatenate([blocks[: count - 2 * even], steps.astype(dtype), normal.astype(dtype)])


def errors(blocks: np.ndarray, codes: np.ndarray, scales: np.ndarray, g: np.float32) -> np.ndarray:
    with np.errstate(all="ignore"):
        values = reference_nvfp4.dequantise(codes, scales, np.float32(1)).astype(np.float64) * np.float64(g)
        return ((values - blocks.astype(np.float64)) ** 2).sum(axis=1)


def assert_best(blocks: np.ndarray, codes: np.ndarray, scales: np.ndarray, g: np.float32) -> None:
    """Codes ``[n, 8]`` and scales ``[n, 1]`` are those of 6, or of 4 where the error is less; of equal ones any."""
    six, four = (reference_nvfp4.quantise(blocks, g, code) for code in (6, 4))
    of_six, of_four = (errors(blocks, *candidate, g) for candidate in (six, four))
    with np.errstate(all="ignore"):
        near = np.abs(of_six - of_four) <= 1e-5 * (of_six + of_four)
        better = of_four < of_six
    is_six, is_four = (
        (codes == candidate[0]).all(axis=1) & (scales == candidate[1]).all(axis=1) for candidate in (six, four)
    )
    equal = of_six == of_four
    assert is_six[equal].all()
    right = np.where(better, is_four, is_six) | (near & (is_six | is_four))
    np.testing.assert_array_equal(right, True, err_msg=str(blocks[~right][:2]))
    differ = ~near & (six[1] != four[1]).any(axis=1)
    assert better[differ].any()
    assert not better[differ].all()


def repeated(blocks: np.ndarray, heads: int, size: int) -> np.ndarray:
    """``[tokens, heads, size]``: a head of a group of tokens holds one block, so that the order of scales is none."""
    x = blocks.reshape(-1, 1, heads, 1, 16)
    return np.broadcast_to(x, (len(x), TOKENS, heads, size // 16, 16)).reshape(-1, heads, size).copy()


def stored(page: np.ndarray, heads: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of the blocks of a page, found to be the same everywhere in a group."""
    codes, scales = (x.reshape(-1, TOKENS, heads, *x.shape[2:]) for x in reference_nvfp4.parts(page))
    codes = codes.reshape(*codes.shape[:3], -1, 8)
    assert (codes == codes[:, :1, :, :1]).all()
    assert (scales == scales[:, :1, :, :1]).all()
    return codes[:, 0, :, 0].reshape(-1, 8), scales[:, 0, :, 0].reshape(-1, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.37, 0.011, 900.0, -0.5])
@pytest.mark.parametrize("layout", ["NHD", "HND", "not aligned"])
def test_the_better_scale(array: Library, layout: str, scale: float, dtype: str) -> None:
    heads, size, pages, groups = 3, 64, 5, 16
    blocks = some_blocks(DTYPES[dtype], heads * pages * groups)
    block_size, row = TOKENS * groups, size * 9 // 16
    g = np.float32(scale)
    expected = np.zeros((pages, 1 + heads * block_size * row), np.uint8)
    memories = [array.output(expected) for _ in range(2)]

    def take(memory: Any) -> Any:
        flat = memory[:, 1:] if layout == "not aligned" else memory[:, :-1]
        if layout == "HND":
            return flat.reshape(pages, heads, block_size, row).swapaxes(1, 2)
        return flat.reshape(pages, block_size, heads, row)

    data = repeated(blocks, heads, size)
    given = array.input(data), array.input(-data), *(inputs.view(m, take) for m in memories)
    slots = array.input(np.arange(len(data)))
    pykv.reshape_and_cache_flash(*given, slots, "nvfp4_4over6", float(g), float(g))
    for signed, memory in zip((blocks, -blocks), memories, strict=True):
        parts = [stored(page, heads) for page in take(array.numpy(memory))]
        codes, scales = (np.concatenate(x) for x in zip(*parts, strict=True))
        assert_best(signed, codes, scales, g)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mla(array: Library, dtype: str) -> None:
    blocks = some_blocks(DTYPES[dtype], 60)
    data = repeated(blocks, 1, 192)[:, 0]
    cache = array.output(np.zeros((3, 80, 108), np.uint8))
    g = np.float32(0.37)
    parts = [array.input(x) for x in (data[:, :128].copy(), data[:, 128:].copy())]
    pykv.concat_and_cache_mla(*parts, cache, array.input(np.arange(len(data))), "nvfp4_4over6", float(g))
    pages = [stored(page[:, None], 1) for page in array.numpy(cache)]
    codes, scales = (np.concatenate(x) for x in zip(*pages, strict=True))
    assert_best(blocks, codes, scales, g)


@pytest.mark.parametrize(
    ("values", "scale", "codes"),
    [
        ([10, 20, 30, 40], 10.0, [2, 4, 5, 6]),  # by 4 nothing is lost
        ([6, -6, 3, 1.5], 1.0, [7, 15, 5, 3]),  # by 6 nothing is
        ([6, 6, 6, 6], 1.0, [7, 7, 7, 7]),  # nor by 4: then 6
        ([0, 0, 0, 0], 0.0, [0, 0, 0, 0]),
    ],
)
def test_blocks_of_which_nothing_is_lost(array: Library, values: list[float], scale: float, codes: list[int]) -> None:
    data = repeated(np.array(values * 4, np.float16)[None], 1, 64)
    caches = [array.output(np.zeros((1, 4, 1, 36), np.uint8)) for _ in range(2)]
    given = array.input(data)
    pykv.reshape_and_cache_flash(given, given, *caches, array.input(np.arange(4)), "nvfp4_4over6")
    for cache in caches:
        got, scales = stored(array.numpy(cache)[0], 1)
        assert scales.view(reference_nvfp4.E4M3).astype(np.float32) == scale
        assert [x for byte in got[0] for x in (byte & 15, byte >> 4)] == codes * 4


def test_readers_take_the_name(array: Library) -> None:
    rng = np.random.default_rng(0)
    data = rng.standard_normal((16, 1, 64)).astype(np.float16)
    caches = [array.output(np.zeros((4, 4, 1, 36), np.uint8)) for _ in range(2)]
    slots = array.input(np.arange(16))
    pykv.reshape_and_cache_flash(array.input(data), array.input(data), *caches, slots, "nvfp4_4over6", 0.01, 0.01)
    table, ends = array.input(np.arange(4, dtype=np.int32)[None]), array.input(np.array([0, 16], np.int32))
    rows = []
    for kind in ("nvfp4", "nvfp4_4over6"):
        rows.append(array.output(np.zeros((16, 1, 64), np.float16)))
        pykv.gather_and_maybe_dequant_cache(caches[0], rows[-1], table, ends, None, 16, kind, 0.01)
    np.testing.assert_array_equal(*map(array.numpy, rows))
    assert np.abs(array.numpy(rows[0]).astype(np.float32) - data.astype(np.float32)).max() < 0.5
