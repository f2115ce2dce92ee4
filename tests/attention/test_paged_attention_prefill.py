"""Many query rows of a sequence, for which Hopper has kernels of its own: tiles of 128 rows and of 128 keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.inputs import Sizes
from attention.test_paged_attention import check, rng
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Library

EDGES = [(63, 63), (64, 127), (65, 128), (127, 129), (128, 256), (129, 257), (1, 300), (0, 5)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_edges_of_tiles(array: Library, group: int, dtype: str) -> None:
    for head_size in (64, 128):
        check(array, inputs.batch(rng(), EDGES, Sizes(2 * group, 2, head_size), dtype=dtype, extra_rows=1))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 128, 192])
def test_pages(array: Library, block_size: int, layout: str) -> None:
    head_size = {8: 64, 24: 96, 16: 256, 128: 192}.get(block_size, 128)
    check(array, inputs.batch(rng(), EDGES[1::2], Sizes(8, 2, head_size, block_size), layout=layout))


@pytest.mark.parametrize("heads", [(130, 1), (71, 1), (12, 3)])
def test_groups_that_fill_no_tile(array: Library, heads: tuple[int, int]) -> None:
    check(array, inputs.batch(rng(), [(70, 70), (9, 200)], Sizes(*heads, 128)))


@pytest.mark.parametrize(
    "options",
    [*inputs.OPTIONS_OF_8_HEADS, {"scale": 3.0}],
    ids=str,
)
def test_options(array: Library, options: dict[str, Any]) -> None:
    b = inputs.batch(rng(), [(150, 150), (70, 500), (20, 20)], Sizes(8, 2, 128))
    check(array, b.changed(options=options))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("factor", [1, 20])
def test_scores_that_rise(array: Library, factor: int, head_size: int, dtype: str) -> None:
    """From tile to tile, at last by more than an exponent holds; and fall again."""
    b = inputs.batch(rng(), [(300, 900), (70, 70), (130, 1300)], Sizes(8, 2, head_size), dtype=dtype)
    for table, length in zip(b.block_tables, b.seq_lens, strict=True):
        pages = table[: -(-int(length) // 16)]
        for i, page in enumerate(pages):
            b.key_cache[page] *= np.float32(1 + factor * min(i, len(pages) - i))
    check(array, b)
    check(array, b.changed(options={"window": 200}))


@pytest.mark.parametrize("head_size", [128, 256])
def test_one_long_sequence_among_others(array: Library, head_size: int) -> None:
    """Tables with room for so much that the blocks may have to share a long tile."""
    lens = [(20, 6000), (100, 100), (16, 16), (1, 1)]
    check(array, inputs.batch(rng(), lens, Sizes(4, 1, head_size, 64), room=9000))


def test_more_tiles_than_processors(array: Library) -> None:
    """Enough of them that each is computed whole, by the order of their lengths."""
    lens = [(300, 900), (3, 50), (1, 1), (0, 0), (600, 600), (129, 300), *[(40, 40)] * 40, (200, 201)]
    check(array, inputs.batch(rng(), lens, Sizes(16, 16, 64, 64)))


@given(data=st.data())
@settings(max_examples=8)
def test_any_lengths(array: Library, data: st.DataObject) -> None:
    lens = []
    for _ in range(data.draw(st.integers(1, 4))):
        queries = data.draw(st.integers(0, 200))
        lens.append((queries, queries + data.draw(st.integers(0, 300))))
    kv_heads = data.draw(st.integers(1, 3))
    sizes = Sizes(
        kv_heads * data.draw(st.integers(1, 9)),
        kv_heads,
        data.draw(st.sampled_from([64, 80, 128, 256])),
        data.draw(st.sampled_from([4, 16, 40, 64])),
    )
    check(array, inputs.batch(rng(), lens, sizes, dtype=data.draw(st.sampled_from(["bfloat16", "float16"]))))
