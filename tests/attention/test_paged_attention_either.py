"""Few sequences whose tables have room for long ones: the lengths on the device say which way a call goes.

Sequences that are much alike have clusters of blocks; where one has far more tokens than others, all blocks share it.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from attention import inputs
from attention.graphs import CapturedCalls
from attention.inputs import KINDS, Batch, Sizes
from attention.test_paged_attention import check, rng
from attention.test_paged_attention_served import check_reported
from libraries import Library

ALIKE = (300, 1, 290, 0, 310, 277, 300, 256, 257)
LONG_ALIKE = (2600, 2480, 2555, 2700)
ONE_LONG = (5, 6000, 300, 0, 64, 1, 20, 33, 7)  # of eight KV heads
SEVERAL_LONG = (7000, 1, 700, 6500, 33, 2, 129, 16, 5)
WAYS = pytest.mark.parametrize(
    "lens", [ALIKE, LONG_ALIKE, ONE_LONG, SEVERAL_LONG], ids=["alike", "long", "one long", "several long"]
)
ROOM = 30_000  # tokens of a table


def batch(lens: tuple[int, ...], sizes: Sizes, **kwargs: Any) -> Batch:
    return inputs.batch(rng(len(lens)), [(1, n) for n in lens], sizes, decode=True, room=ROOM, **kwargs)


# Groups of up to four and of up to eight, and an odd number of KV heads, which are not taken in pairs.
SIZES = [Sizes(16, 8, 128), Sizes(40, 8, 128), Sizes(9, 9, 128)]
PLACES = [*product(KINDS, SIZES, ["NHD"]), *product(KINDS, SIZES[:1], ["HND", "packed"])]


@WAYS
@pytest.mark.parametrize(("kind", "sizes", "layout"), PLACES, ids=str)
def test_layouts(array: Library, kind: str, sizes: Sizes, layout: str, lens: tuple[int, ...]) -> None:
    b = batch(lens, sizes, layout=layout, kind=kind)
    check(array, b.changed(options=inputs.scales(kind, 0.7, 1.3)))


@WAYS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("head_size", "kv_heads", "dtype"),
    [(64, 16, "float16"), (64, 15, "bfloat16"), (120, 8, "bfloat16")],
)
def test_head_sizes(
    array: Library, head_size: int, kv_heads: int, dtype: str, kind: str, lens: tuple[int, ...]
) -> None:
    """Heads of 64 are taken in pairs."""
    check(array, batch(lens, Sizes(3 * kv_heads, kv_heads, head_size), kind=kind, dtype=dtype))


@pytest.mark.parametrize("lens", [(300, 290, 310), (20_000, 300, 1), (300, 1, 20_000)], ids=["alike", "first", "last"])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
def test_several_blocks_for_a_head(array: Library, kind: str, head_size: int, lens: tuple[int, ...]) -> None:
    for sequence, bad in ((0, -3), (2, 2**30)):
        b = batch(lens, Sizes(8, 4, head_size), kind=kind)
        b.block_tables[sequence, 0] = bad
        check_reported(array, b, bad)


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
def test_replayed_with_lengths_for_the_other_way(cupy: Any, kind: str) -> None:
    longest = (20_000, 19_000, 300, 64)
    b = batch(longest, Sizes(8, 2, 128), kind=kind, dtype="float16")
    b = b.changed(options=inputs.scales(kind, 0.7, 1.3))
    captured = CapturedCalls(cupy, b, calls=2)
    for now in (
        longest,
        (20_000, 3, 300, 0),
        (250, 260, 300, 64),
        (1, 19_000, 2, 64),
        (0, 0, 0, 0),
        (5000, 4900, 300, 64),
    ):
        captured.check(now)
