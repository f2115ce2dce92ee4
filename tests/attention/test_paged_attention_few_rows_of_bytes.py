"""Up to 64 query rows for a KV head, of several tokens or of many heads in a group, over caches of one byte.

Hopper has kernels of its own for them, which take what lies in rows of tokens where tables are long: tiles of 32 rows,
or of 64 if all sequences may have as many tokens; and of 16 where sequences are many.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.inputs import ONE_BYTE, Batch, Sizes
from attention.test_paged_attention import check, rng
from attention.test_paged_attention_served import LONG_SHARES, begins, check_many, check_reported, times
from libraries import Library

pytestmark = pytest.mark.of_cuda_kernels

PLACES = list(product(ONE_BYTE, ("NHD", "HND")))
HEAD_SIZES = (128, 64, 80, 96, 112)
LONG = 10_000  # tokens that the tables have room for
SHAPES = [  # heads in a group, query tokens
    *((1, 17), (4, 5), (4, 8), (8, 4), (3, 7), (5, 5), (17, 1), (32, 1), (16, 2)),
    *((1, 64), (4, 9), (4, 16), (8, 5), (8, 8), (5, 12), (16, 4), (33, 1), (64, 1)),
]
TWO_SHAPES = [(4, 8), (4, 16)]
SCALES = (np.array([0.7, 1.1], np.float32), np.array([1.3, 0.4], np.float32))  # of two KV heads


def made(i: int, lens: list[tuple[int, int]], group: int, window: int | None = None, **kwargs: Any) -> Batch:
    """The i-th kind, layout, head size and dtype, with two KV heads."""
    kind, layout = PLACES[i % len(PLACES)]
    sizes = Sizes(2 * group, 2, HEAD_SIZES[i % len(HEAD_SIZES)], (16, 8, 32, 128, 3)[i // 2 % 5])
    places = {} if window is None else {"begins": begins(lens, window)}
    places |= {"room": LONG, "dtype": ("bfloat16", "float16")[i // 3 % 2]} | kwargs
    b = inputs.batch(rng(i), lens, sizes, kind=kind, layout=layout, **places)
    options = inputs.scales(kind, *SCALES)
    return b.changed(options=options if window is None else options | {"window": window})


@pytest.mark.parametrize("more", range(3))
@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_shapes(array: Library, shape: int, more: int) -> None:
    group, queries = SHAPES[shape]
    lens = [(queries, n) for n in (queries, 1, 63, 64, 65, 129, 300, 0)]
    check(array, made(shape + more * len(SHAPES), lens, group))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("group", "queries"), TWO_SHAPES)
@pytest.mark.parametrize("head_size", HEAD_SIZES)
@pytest.mark.parametrize(("kind", "layout"), PLACES)
def test_kinds(array: Library, kind: str, layout: str, head_size: int, group: int, queries: int, dtype: str) -> None:
    sizes = Sizes(2 * group, 2, head_size)
    lens = [(queries, n) for n in (128, 200, 17)]
    b = inputs.batch(rng(head_size), lens, sizes, kind=kind, layout=layout, dtype=dtype, room=LONG)
    check(array, b.changed(options=inputs.scales(kind, *SCALES)))


@pytest.mark.parametrize(
    "lens",
    [
        [(8, 300), (1, 77), (0, 40), (5, 5), (2, 1), (0, 0)],
        [(16, 300), (32, 400), (1, 64), (15, 15)],  # 64 rows in the mean
        [(16, 5), (4, 2), (8, 1000), (4, 130), (1, 0)],  # some stand in front of the first token
        [(0, 1), (0, 0), (40, 130), (0, 9), (2, 65)],  # more rows than a tile has
    ],
    ids=str,
)
@pytest.mark.parametrize("i", range(6))
def test_mixed_counts_of_query_tokens(array: Library, i: int, lens: list[tuple[int, int]]) -> None:
    b = made(i, lens, 4)
    check(array, b)
    check(array, b.changed(options=b.options | {"causal": False}))


@pytest.mark.parametrize(("group", "queries"), TWO_SHAPES)
@pytest.mark.parametrize(
    "options",
    [
        *inputs.OPTIONS_OF_8_HEADS,
        {"scale": 3.0},
        {"softcap": 8.0, "alibi_slopes": np.linspace(0, 0.2, 8, dtype=np.float32), "window": 70, "scale": 0.3},
    ],
    ids=str,
)
def test_options(array: Library, options: dict[str, Any], group: int, queries: int) -> None:
    lens = [(queries, 150), (queries, 700), (queries, queries), (queries, 3)]
    for i in range(6):
        b = made(i, lens, group)
        check(array, b.changed(options=b.options | options))


def test_negative_scales_of_keys(array: Library) -> None:
    """A factor that is not positive: the greatest score is not that of the greatest product."""
    for i, (group, queries) in product(range(6), TWO_SHAPES):
        b = made(i, [(queries, 200), (queries, 70)], group)
        check(array, b.changed(options=inputs.scales(b.kind, np.array([0.7, -1.1], np.float32), 0.5)))


@pytest.mark.parametrize(("group", "queries"), TWO_SHAPES)
@pytest.mark.parametrize("window", [1, 16, 33, 63, 64, 65, 100, 500])
def test_windows(array: Library, window: int, group: int, queries: int) -> None:
    """What lies in front of them is poison."""
    for i in range(window % 3, 6, 2):
        lens = [(queries, n) for n in (queries, window, window + 8, window + 70, 700)]
        check(array, made(i, lens, group, window))


@pytest.mark.parametrize(("group", "queries"), TWO_SHAPES)
@pytest.mark.parametrize("at", [0, 70, 200, 399])
def test_bad_ids(array: Library, at: int, group: int, queries: int) -> None:
    for i in range(6):
        b = made(i, [(queries, 400), (queries, 30), (queries, 64)], group)
        bad, page = b.key_cache.shape[:2]
        b.block_tables[0, at // page] = bad
        check_reported(array, b, bad)


@pytest.mark.parametrize(("group", "queries"), TWO_SHAPES)
def test_shares(array: Library, group: int, queries: int) -> None:
    """Segments in pieces, several to a block, and whole ones where all are alike."""
    q = queries
    for i in range(3):
        check(array, made(2 * i, [(q, 6000), (q, q), (q, 1), (q, 100), (q, 0)], group))
        check(array, made(2 * i + 1, [(q, 1500 + 13 * k) for k in range(8)], group))
        check_many(array, made(2 * i, [(q, n) for n in (64, 1, 700, q)], group), 40)
        check_many(array, made(2 * i + 1, [(q, 512)], group), 66)


@pytest.mark.parametrize(("group", "queries"), [(4, 4), *TWO_SHAPES])
def test_long_shares(array: Library, group: int, queries: int) -> None:
    """Each of few KV heads has a line of blocks of its own."""
    check_many(array, made(0, [(queries, n) for n in LONG_SHARES], group), 32)


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("head_size", [80, 96])
def test_long_shares_of_many_heads(array: Library, head_size: int, queries: int) -> None:
    """... and of as many as there may be."""
    lens = [(queries, n) for n in LONG_SHARES]
    check_many(array, inputs.batch(rng(), lens, Sizes(32, 32, head_size), kind="fp8_e4m3", room=LONG), 2)


@pytest.mark.parametrize(("group", "queries"), TWO_SHAPES)
@pytest.mark.parametrize("power", [-18, 17])
def test_queries_beyond_halves(array: Library, power: int, group: int, queries: int) -> None:
    """Of bf16, each row at its own size, which as halves would lose bits or be infinite."""
    for i in range(6):
        b = made(i, [(queries, 200), (queries, 70)], group, dtype="bfloat16")
        sizes = np.exp2(power - np.arange(b.query.shape[0] * b.query.shape[1]) % 7)
        query = inputs.scaled_query(b, sizes.reshape(b.query.shape[:2]))
        query[3] = 0
        check(array, b.changed(query=query, options=b.options | {"scale": 0.5 * 2.0**-power}))


@pytest.mark.parametrize(("group", "queries"), [(4, 4), *TWO_SHAPES])
@pytest.mark.parametrize("spread", [12, 16, 17, 40])
def test_queries_far_apart(array: Library, spread: int, group: int, queries: int) -> None:
    """Of bf16, each other row smaller by two to that power: halves have one scale for all of a tile, or their own."""
    for i in range(6):
        b = made(i, [(queries, 200), (queries, 70)], group, dtype="bfloat16")
        sizes = np.exp2(-spread * (np.arange(b.query.shape[0] * b.query.shape[1]) % 2))
        query = inputs.scaled_query(b, sizes.reshape(b.query.shape[:2]))
        for scale in (0.09, 0.09 * 2.0**spread):  # the large rows see differences, or the small ones
            check_many(array, b.changed(query=query, options=b.options | {"scale": scale}), 35)


@pytest.mark.parametrize("shape", [(4, 2), (4, 4), (2, 3), (8, 2), (5, 3), (1, 9), (4, 1), (8, 1), (12, 1), (16, 1)])
@pytest.mark.parametrize("i", range(5))
def test_up_to_16_rows_of_many_sequences(array: Library, i: int, shape: tuple[int, int]) -> None:
    """Each of the head sizes; decoding itself comes here for many heads in a group, and for heads of 96 and 112."""
    group, queries = shape
    for k in (i, i + 5):
        lens = [(queries, n) for n in (64, 1, 700, 130, 0)]
        check_many(array, made(k, lens, group, decode=queries == 1), 20)
    b = made(i, [(queries, 300)] * 2, group, decode=queries == 1)
    bad, page = b.key_cache.shape[:2]
    b.block_tables[1, 200 // page] = bad
    check_reported(array, times(b, 40), bad)
