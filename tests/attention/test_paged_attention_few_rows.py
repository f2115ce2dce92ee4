"""Up to 32 query rows for a KV head, as speculative decoding or many heads in a group have them.

Tiles have 16 or 32 rows.  Hopper has kernels of its own for them, in which keys are the rows of products, 64 at a time.
"""

from __future__ import annotations

from typing import Any

import pytest
from attention import inputs
from attention.inputs import Sizes
from attention.test_paged_attention import check, rng
from attention.test_paged_attention_served import LONG_SHARES, check_many
from libraries import Library

pytestmark = pytest.mark.of_cuda_kernels

LENS = [1, 8, 63, 65, 129, 300]
GROUPS = [(4, 2), (4, 4), (1, 9), (16, 1), (3, 5), (4, 8), (8, 4), (1, 32), (32, 1), (3, 10), (5, 5), (17, 1)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("group", "queries"), GROUPS)
def test_groups(array: Library, group: int, queries: int, dtype: str) -> None:
    lens = [(min(queries, n), n) for n in LENS]
    for head_size in (64, 128):
        check(array, inputs.batch(rng(), lens, Sizes(2 * group, 2, head_size), dtype=dtype, extra_rows=1))


@pytest.mark.parametrize("queries", [3, 8])
@pytest.mark.parametrize("head_size", [72, 80, 96, 112, 120])
def test_padded_heads(array: Library, head_size: int, queries: int) -> None:
    check(array, inputs.batch(rng(), [(queries, n) for n in (8, 100, 700)], Sizes(8, 2, head_size)))


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 128])
def test_pages(array: Library, block_size: int, layout: str) -> None:
    check(array, inputs.batch(rng(), [(8, 8), (8, 129)], Sizes(8, 2, 128, block_size), layout=layout))


@pytest.mark.parametrize("queries", [2, 8])
@pytest.mark.parametrize(
    "options",
    [*inputs.OPTIONS_OF_8_HEADS, {"scale": 30.0}],
    ids=str,
)
def test_options(array: Library, options: dict[str, Any], queries: int) -> None:
    lens = [(queries, 150), (queries, 500), (queries, queries), (1, 3000)]
    b = inputs.batch(rng(), lens, Sizes(8, 2, 128))
    check(array, b.changed(options=options))


@pytest.mark.parametrize("queries", [4, 8])
def test_shares(array: Library, queries: int) -> None:
    """Segments in pieces, several to a block, and whole ones where all are alike."""
    q = queries
    check(array, inputs.batch(rng(), [(q, 6000), (q, q), (1, 1), (q, 100), (0, 0)], Sizes(8, 2, 128)))
    check(array, inputs.batch(rng(), [(q, 1500 + 13 * i) for i in range(12)], Sizes(16, 4, 128)))
    check(array, inputs.batch(rng(), [(q, 512)] * 34, Sizes(16, 4, 128)))


@pytest.mark.parametrize(("head_size", "queries"), [(64, 2), (64, 16), (128, 8), (256, 2)])
def test_long_shares(array: Library, head_size: int, queries: int) -> None:
    """Each of few KV heads has a line of blocks of its own."""
    lens = [(queries, n) for n in LONG_SHARES]
    check_many(array, inputs.batch(rng(), lens, Sizes(16, 4, head_size)), 16)


def test_more_rows_than_a_tile_has(array: Library) -> None:
    check(array, inputs.batch(rng(), [(30, 900), *((1, 20 * i) for i in range(1, 30))], Sizes(8, 2, 128)))
    check(array, inputs.batch(rng(), [(30, 900), *((1, 70 * i) for i in range(1, 8))], Sizes(12, 2, 128)))
