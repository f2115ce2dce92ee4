"""nvfp4 caches read by gather_and_maybe_dequant_cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache import inputs, reference_nvfp4
from cache.inputs import DTYPES
from libraries import Library

import pykv


def gather(
    array: Library,
    cache: np.ndarray,
    *,
    dtype: str = "bfloat16",
    scale: np.float32 = np.float32(0.37),  # noqa: B008
    kind: str = "nvfp4",
    take: Callable[[Any], Any] = lambda m: m,
    take_dst: Callable[[Any], Any] = lambda m: m,
    memory_dst: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape,
    seed: int = 0,
) -> None:
    """Two requests, the second from within a block, against what the reference reads."""
    rng = np.random.default_rng(seed)
    src = take(cache)
    blocks, block_size = src.shape[:2]
    values = reference_nvfp4.load(src if src.ndim == 4 else src[:, :, None], scale, kind == "nvfp4_v")
    values = values if src.ndim == 4 else values[:, :, 0]
    lengths, starts = np.array([2 * block_size + 3, block_size]), np.array([0, 3])
    table = rng.integers(0, blocks, (2, 4))
    rows = int(lengths.sum())
    expected = inputs.bits(rng, memory_dst((rows + 2, *values.shape[2:])), DTYPES[dtype])
    actual = array.output(expected)
    into = take_dst(expected)
    row = 0
    for r in range(2):
        for position in range(starts[r], starts[r] + lengths[r]):
            column, offset = divmod(int(position), block_size)
            with np.errstate(all="ignore"):
                into[row] = values[table[r, column], offset].astype(DTYPES[dtype])
            row += 1
    ids = [array.input(x.astype(np.int32)) for x in (table, np.concatenate([[0], np.cumsum(lengths)]), starts)]
    pykv.gather_and_maybe_dequant_cache(
        inputs.view(array.output(cache), take), inputs.view(actual, take_dst), ids[0], ids[1], None, rows, kind,
        float(scale), ids[2],
    )  # fmt: skip
    got = array.numpy(actual)
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    words = {2: np.uint16, 4: np.uint32}[got.itemsize]
    np.testing.assert_array_equal(got[~nan].view(words), expected[~nan].view(words))


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4_v"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 128, 192, 576])
def test_gather(array: Library, head_size: int, dtype: str, kind: str) -> None:
    """Pages of keys or MLA, and pages of values."""
    rng = np.random.default_rng(head_size)
    row = head_size * 9 // 16
    more: dict[str, Any] = {"dtype": dtype, "kind": kind}
    gather(array, rng.integers(0, 256, (5, 8, row), np.uint8), **more)
    gather(array, rng.integers(0, 256, (5, 8, 3, row), np.uint8), **more)
    gather(array, rng.integers(0, 256, (5, 3, 8, row), np.uint8), take=lambda m: m.swapaxes(1, 2), **more)
    gather(array, rng.integers(0, 256, (5, 2, 8, 3, row), np.uint8), take=lambda m: m[:, 1], **more)


@pytest.mark.parametrize("block_size", [2900, 5700])
def test_gather_many_rows(array: Library, block_size: int) -> None:
    """More than a GPU takes at once by few rows a block, and by any number."""
    tokens = block_size if array.device == "cuda" else block_size // 100 * 4
    gather(array, np.random.default_rng(3).integers(0, 256, (2, tokens, 324), np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_strides(array: Library, dtype: str) -> None:
    cache = np.random.default_rng(1).integers(0, 256, (5, 8, 2, 72), np.uint8)
    gather(array, cache, dtype=dtype, memory_dst=lambda s: (s[1], s[0], s[2]), take_dst=lambda m: m.swapaxes(0, 1))
    gather(array, cache, dtype=dtype, memory_dst=lambda s: (*s[:2], s[2] + 1), take_dst=lambda m: m[..., 1:])
    gather(array, cache, dtype=dtype, memory_dst=lambda s: (*s, 2), take_dst=lambda m: m[..., 1])
    odd = np.random.default_rng(2).integers(0, 256, (5, 8 * 2 * 72 + 5), np.uint8)
    gather(array, odd, dtype=dtype, take=lambda m: m[:, 5:].reshape(5, 8, 2, 72))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 3e38])
def test_gather_every_code(array: Library, scale: float) -> None:
    """All codes under all block scales."""
    page = np.zeros((256, 4, 36), np.uint8)
    page.reshape(256, -1)[:, :128] = np.tile(np.arange(128, dtype=np.uint8) * 2 + 1, (256, 1))
    page.reshape(256, -1)[:, 128:] = np.arange(256, dtype=np.uint8)[:, None]
    for dtype in DTYPES:
        gather(array, page, dtype=dtype, scale=np.float32(scale))
    everything = array.output(np.zeros((1024, 64), np.float32))
    table, ends = np.arange(256, dtype=np.int32)[None], np.array([0, 1024], np.int32)
    pykv.gather_and_maybe_dequant_cache(
        array.output(page), everything, array.input(table), array.input(ends), None, 1024, "nvfp4",
        float(np.float32(scale)),
    )  # fmt: skip
    wanted = reference_nvfp4.load(page[:, :, None], np.float32(scale)).reshape(1024, 64)
    np.testing.assert_array_equal(array.numpy(everything), wanted)


def test_what_was_written_is_read(array: Library) -> None:
    """Within half a step of e2m1 between 4 and 6, and the rounding of the block scale."""
    rng = np.random.default_rng(0)
    dtype = DTYPES["bfloat16"]
    key, value = (rng.standard_normal((50, 4, 128)).astype(dtype) for _ in range(2))
    scale = float(np.float32(np.abs(key.astype(np.float32)).max() / (6 * 448)))
    caches = [array.output(np.zeros((4, 4, 16, 72), np.uint8)) for _ in range(2)]
    views = [inputs.view(c, lambda m: m.swapaxes(1, 2)) for c in caches]
    slots = np.arange(50) + 8
    pykv.reshape_and_cache_flash(
        array.input(key), array.input(value), *views, array.input(slots), "nvfp4", scale, scale
    )
    table, ends = array.input(np.arange(4, dtype=np.int32)[None]), array.input(np.array([0, 50], np.int32))
    for data, view, kind in zip((key, value), views, ("nvfp4", "nvfp4_v"), strict=True):
        out = array.output(np.zeros((50, 4, 128), dtype))
        pykv.gather_and_maybe_dequant_cache(
            view, out, table, ends, None, 50, kind, scale, array.input(np.array([8], np.int32))
        )
        x, y = data.astype(np.float32).reshape(-1, 16), array.numpy(out).astype(np.float32).reshape(-1, 16)
        most = np.abs(x).max(-1, keepdims=True)
        assert (np.abs(x - y) <= most * (1 / 6 + 1 / 16)).all()
        assert np.abs(x - y).mean() < 0.1


def test_errors() -> None:
    out, ids = np.zeros((4, 576), np.float16), [np.zeros((1, 2), np.int32), np.array([0, 4], np.int32)]
    for cache, message in (
        (np.zeros((3, 8, 576), np.uint8), r"dst: must have shape .* with 16 elements in 9 bytes, got \[4, 576\]"),
        (np.zeros((3, 6, 324), np.uint8), "src_cache: nvfp4 needs blocks of a multiple of 4 tokens"),
        (np.zeros((3, 8, 325), np.uint8)[:, :, 1:], "src_cache: nvfp4 needs blocks .* without gaps"),
    ):
        with pytest.raises(ValueError, match=f"^gather_and_maybe_dequant_cache: {message}"):
            pykv.gather_and_maybe_dequant_cache(cache, out, *ids, None, 4, "nvfp4", 1.0)
