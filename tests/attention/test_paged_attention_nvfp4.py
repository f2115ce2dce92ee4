"""Decoding over nvfp4: codes and scales as they come become operands of the tensor cores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.graphs import CapturedCalls
from attention.inputs import NVFP4_LAYOUTS, Batch, Sizes
from attention.test_paged_attention import check, rng
from attention.test_paged_attention_served import check_reported
from libraries import Library

pytestmark = pytest.mark.of_cuda_kernels

HEAD_SIZES = pytest.mark.parametrize("head_size", [64, 128, 192, 256])
MIXED = (1, 0, 31, 32, 33, 255, 256, 257, 700, 2100)
# One sequence, which some or all blocks of the device share, and many short ones.
LENS = pytest.mark.parametrize("lens", [MIXED, (900,), (21_000,), (128,) * 70], ids=["mixed", "short", "long", "many"])


def batch(lens: tuple[int, ...], sizes: Sizes, queries: int = 1, **kwargs: Any) -> Batch:
    """With scales; a sequence without keys has no query if there are several for each."""
    if queries == 1:
        b = inputs.batch(rng(len(lens)), [(1, n) for n in lens], sizes, kind="nvfp4", decode=True, **kwargs)
    else:
        pairs = [(queries, max(n, queries)) if n else (0, 0) for n in lens]
        b = inputs.batch(rng(len(lens)), pairs, sizes, kind="nvfp4", **kwargs)
    return b.changed(options={"k_scale": 0.7, "v_scale": np.linspace(0.5, 1.3, sizes.kv_heads, dtype=np.float32)})


@LENS
@HEAD_SIZES
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_lengths(array: Library, layout: str, head_size: int, lens: tuple[int, ...]) -> None:
    check(array, batch(lens, Sizes(8, 4, head_size), layout=layout))


@HEAD_SIZES
@pytest.mark.parametrize("page", [8, 16, 24, 64])
@pytest.mark.parametrize("layout", NVFP4_LAYOUTS)
def test_pages(array: Library, layout: str, page: int, head_size: int) -> None:
    check(array, batch(MIXED, Sizes(6, 2, head_size, page), layout=layout))


@HEAD_SIZES
@pytest.mark.parametrize("room", [0, 30_000], ids=["", "wide tables"])
@pytest.mark.parametrize(("group", "kv_heads"), [(1, 8), (5, 3), (8, 1), (16, 2), (24, 2)])
def test_groups(array: Library, group: int, kv_heads: int, room: int, head_size: int) -> None:
    """KV heads are taken in pairs, if they are an even number."""
    for lens in (MIXED, (300, 290, 17), (5, 9000, 300)):
        check(array, batch(lens, Sizes(group * kv_heads, kv_heads, head_size), room=room, dtype="float16"))


@HEAD_SIZES
@pytest.mark.parametrize("room", [0, 30_000], ids=["", "wide tables"])
@pytest.mark.parametrize(("queries", "group"), [(2, 4), (4, 4), (3, 5), (8, 4), (16, 4)])  # 8 to 64 columns
def test_several_tokens(array: Library, queries: int, group: int, room: int, head_size: int) -> None:
    for lens in (MIXED, (5, 9000), (100,) * 40, (310, 300, 290), (700, 900) * 12):
        check(array, batch(lens, Sizes(2 * group, 2, head_size), queries, room=room))


@HEAD_SIZES
def test_windows(array: Library, head_size: int) -> None:
    """They begin within groups of tokens whose scales lie together."""
    for window in (1, 100, 103, 128):
        lens = [(1, window + more) for more in (-1, 0, 1, 2, 3, 5, 30, 31, 33, 600)]
        begins = [max(0, n - window) for _, n in lens]
        b = inputs.batch(rng(), lens, Sizes(8, 2, head_size), kind="nvfp4", decode=True, begins=begins)
        check(array, b.changed(options={"window": window}))


@pytest.mark.parametrize("options", inputs.OPTIONS_OF_8_HEADS[1:], ids=str)
def test_options(array: Library, options: dict[str, Any]) -> None:
    for queries in (1, 4):
        b = batch((700, 33), Sizes(8, 2, 128), queries)
        check(array, b.changed(options=b.options | options))


@HEAD_SIZES
def test_any_scale(array: Library, head_size: int) -> None:
    """All that are numbers, of either sign: the greatest are 2^18 times the least."""
    b = batch(MIXED, Sizes(8, 2, head_size))
    random = rng(3)
    for cache in (b.key_cache, b.value_cache):
        blocks, tokens, heads, num_bytes = cache.shape
        pages = cache.reshape(blocks, -1)
        assert np.shares_memory(pages, cache)
        scales = pages[:, -tokens * heads * num_bytes // 9 :]
        any_scale = random.integers(0, 0x7F, scales.shape) | random.integers(0, 2, scales.shape) << 7
        scales[...] = np.where(scales == 0x7F, scales, any_scale.astype(np.uint8))  # NaN: of no token
    check(array, b.changed(options={"k_scale": 0.002, "v_scale": 0.03}))


@pytest.mark.parametrize("room", [0, 30_000], ids=["", "wide tables"])
@pytest.mark.parametrize("queries", [1, 4, 8])
@pytest.mark.parametrize("at", [0, 100, 399])
def test_bad_ids(array: Library, at: int, queries: int, room: int) -> None:
    for head_size in (64, 128, 256):
        for bad in (-3, 2**30):
            b = batch((400, 30, 64), Sizes(8, 2, head_size), queries, room=room)
            b.block_tables[0, at // 16] = bad
            check_reported(array, b, bad)


@pytest.mark.parametrize(
    ("queries", "group", "head_size"),
    [
        (1, 4, 128),
        (2, 4, 128),
        (3, 4, 128),
        (1, 16, 128),
        (8, 4, 128),
        (1, 24, 128),
        (16, 4, 128),
        (4, 4, 64),
        (2, 8, 256),
    ],
)
def test_replayed(cupy: Any, queries: int, group: int, head_size: int) -> None:
    """With lengths for clusters and for the line."""
    longest = (30_000, 9000, 300)
    captured = CapturedCalls(cupy, batch(longest, Sizes(4 * group, 4, head_size), queries, dtype="float16"), calls=2)
    for now in (longest, (20_000, 3, 300), (250, 260, 64), (5000, 6000, 300), longest):
        captured.check(now)
    if queries == 1:
        captured.check((0, 0, 0))
