"""Few sequences whose tables have room for long ones: the lengths on the device say which way a call goes.

Sequences that are much alike have clusters of blocks; where one has far more tokens than others, all blocks share it.
With one query token, and mostly with up to 16 rows, a kernel is both.  Else there are two: clusters come after a line
of warpgroups, whose pieces they add up, or before any other.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.graphs import CapturedCalls
from attention.inputs import KINDS, Batch, Sizes
from attention.test_paged_attention import check, rng
from attention.test_paged_attention_served import check_reported
from libraries import Library

pytestmark = pytest.mark.of_cuda_kernels

ALIKE = (300, 1, 290, 0, 310, 277, 300, 256, 257)
LONG_ALIKE = (2600, 2480, 2555, 2700)
ONE_LONG = (5, 6000, 300, 0, 64, 1, 20, 33, 7)  # of eight KV heads
SEVERAL_LONG = (7000, 1, 700, 6500, 33, 2, 129, 16, 5)
WAYS = pytest.mark.parametrize(
    "lens", [ALIKE, LONG_ALIKE, ONE_LONG, SEVERAL_LONG], ids=["alike", "long", "one long", "several long"]
)
ROOM = 30_000  # tokens of a table

# Query tokens and heads in a group: 4 to 64 rows.  One token is not the one of each sequence that the host knows of.
SEVERAL = pytest.mark.parametrize(("queries", "group"), [(1, 4), (2, 4), (4, 4), (8, 4), (1, 17), (16, 4), (5, 7)])
ONE_QUITE_LONG = (5, 2500, 300, 0, 64, 1, 20, 33, 7)
SOME_KINDS = pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "int8"])


def batch(lens: tuple[int, ...], sizes: Sizes, **kwargs: Any) -> Batch:
    return inputs.batch(rng(len(lens)), [(1, n) for n in lens], sizes, decode=True, room=ROOM, **kwargs)


def several_tokens(lens: tuple[int, ...], queries: int, group: int, kv_heads: int, kind: str, **kwargs: Any) -> Batch:
    """Sequences without keys have no query, and the first that has room for them has theirs."""
    tokens = [queries if n > 0 else 0 for n in lens]
    tokens[next(i for i, n in enumerate(lens) if n >= 100)] += queries * tokens.count(0)
    sizes = Sizes(kv_heads * group, kv_heads, kwargs.pop("head_size", 128), kwargs.pop("page", 16))
    pairs = [(q, max(q, n)) for q, n in zip(tokens, lens, strict=True)]
    b = inputs.batch(rng(len(lens)), pairs, sizes, kind=kind, room=ROOM, **kwargs)
    return b.changed(options=inputs.scales(kind, 0.7, 1.3))


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
    [(64, 16, "float16"), (64, 15, "bfloat16"), (120, 8, "bfloat16"), (256, 8, "bfloat16"), (192, 3, "float16")],
)
def test_head_sizes(
    array: Library, head_size: int, kv_heads: int, dtype: str, kind: str, lens: tuple[int, ...]
) -> None:
    """Heads of 64 are taken in pairs, if caches are rows of tokens."""
    for layout in ("NHD", "packed") if head_size % 16 == 0 else ("NHD",):  # packed keys are pieces of 16 bytes
        check(array, batch(lens, Sizes(3 * kv_heads, kv_heads, head_size), kind=kind, dtype=dtype, layout=layout))


@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("page", [64, 128])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lens", [ONE_LONG, tuple(range(1, 700, 17))], ids=["few", "many"])
def test_large_pages_of_packed_caches(
    array: Library, lens: tuple[int, ...], kind: str, page: int, window: int | None
) -> None:
    """Lines of values are those of several tiles, whose warps wait for each other."""
    b = batch(lens, Sizes(16, 8, 128, page), kind=kind, layout="packed")
    check(array, b.changed(options={**inputs.scales(kind, 0.7, 1.3), "window": window}))


@pytest.mark.parametrize("lens", [(300, 290, 310), (20_000, 300, 1), (300, 1, 20_000)], ids=["alike", "first", "last"])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
def test_several_blocks_for_a_head(array: Library, kind: str, head_size: int, lens: tuple[int, ...]) -> None:
    for sequence, bad in ((0, -3), (2, 2**30)):
        b = batch(lens, Sizes(8, 4, head_size), kind=kind)
        b.block_tables[sequence, 0] = bad
        check_reported(array, b, bad)


@pytest.mark.parametrize("head_size", [128, 256])
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
def test_replayed_with_lengths_for_the_other_way(cupy: Any, kind: str, head_size: int) -> None:
    longest = (20_000, 19_000, 300, 64)
    b = batch(longest, Sizes(8, 2, head_size), kind=kind, dtype="float16")
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


@SEVERAL
@SOME_KINDS
@pytest.mark.parametrize(
    "lens",
    [ALIKE, ONE_QUITE_LONG, ALIKE + ALIKE, ALIKE + ONE_QUITE_LONG],
    ids=["alike", "one long", "many alike", "one of many long"],
)
def test_several_tokens(array: Library, lens: tuple[int, ...], kind: str, queries: int, group: int) -> None:
    """Of so many KV heads each has an SM, if they are alike; of twice as many they do not find room at once."""
    check(array, several_tokens(lens, queries, group, 8, kind))


# Query tokens, heads in a group and their size: for one kernel that is both, and for two.
ONE_KERNEL = [(2, 4, 128), (4, 4, 128), (3, 5, 80), (1, 16, 128), (2, 8, 64), (2, 3, 256)]
TWO_KERNELS = [(8, 4, 128), (16, 4, 128), (1, 24, 128), (5, 7, 96), (4, 8, 64), (1, 16, 256), (8, 4, 256)]
COLUMNS = pytest.mark.parametrize(("queries", "group", "head_size"), ONE_KERNEL + TWO_KERNELS)


@COLUMNS
@pytest.mark.parametrize(("layout", "page"), [("HND", 16), ("packed", 16), ("packed", 64)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lens", [ALIKE, ONE_QUITE_LONG], ids=["alike", "one long"])
def test_several_tokens_in_other_layouts(
    array: Library, lens: tuple[int, ...], kind: str, layout: str, page: int, queries: int, group: int, head_size: int
) -> None:
    check(array, several_tokens(lens, queries, group, 8, kind, layout=layout, page=page, head_size=head_size))


@SOME_KINDS
@pytest.mark.parametrize("queries", [2, 4, 8, 16])
@pytest.mark.parametrize("lens", [ALIKE, ONE_QUITE_LONG], ids=["alike", "one long"])
def test_sinks_of_several_tokens(array: Library, lens: tuple[int, ...], kind: str, queries: int) -> None:
    """They join a row's weights once, however many pieces the row is in."""
    b = several_tokens(lens, queries, 4, 8, kind, dtype="float16")
    check(array, b.changed(options={**b.options, "sinks": np.linspace(-4, 4, 32, dtype=np.float32)}))


OPTIONS = [{"causal": False}, {"softcap": 5.0}, {"alibi_slopes": np.linspace(0.01, 0.5, 32, dtype=np.float32)}]


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: next(iter(o)))
@pytest.mark.parametrize("lens", [ALIKE, ONE_QUITE_LONG], ids=["alike", "one long"])
def test_options_of_several_tokens(array: Library, lens: tuple[int, ...], options: dict[str, Any], kind: str) -> None:
    for queries, layout in product((2, 4), ("NHD", "packed")):
        b = several_tokens(lens, queries, 4, 8, kind, layout=layout)
        check(array, b.changed(options={**b.options, **options}))


MANY_SHORT = tuple(range(16, 30))


@SEVERAL
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("lens", [(900, 700), (300, 0, 4500, *MANY_SHORT)], ids=["alike", "one long"])
def test_several_tokens_by_several_blocks(
    array: Library, lens: tuple[int, ...], kind: str, queries: int, group: int
) -> None:
    check(array, several_tokens(lens, queries, group, 4, kind, head_size=64, dtype="float16"))


@SOME_KINDS
@pytest.mark.parametrize("length", [500, 13_000])
def test_several_tokens_of_one_sequence(array: Library, length: int, kind: str) -> None:
    check(array, several_tokens((length,), 16, 4, 2, kind, page=32))


@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("queries", [3, 8, 16])
@pytest.mark.parametrize("lens", [ALIKE, ONE_QUITE_LONG], ids=["alike", "one long"])
def test_bad_ids_of_several_tokens(array: Library, lens: tuple[int, ...], kind: str, queries: int, layout: str) -> None:
    b = several_tokens(lens, queries, 2, 8, kind, layout=layout)
    b.block_tables[2, 1] = -3
    check_reported(array, b, -3)


@SOME_KINDS
@pytest.mark.parametrize(
    ("layout", "queries", "head_size"),
    [*product(["NHD", "packed"], [2, 4, 8, 16], [128]), *product(["NHD"], [2, 4, 8], [256]), ("NHD", 4, 64)],
)
def test_several_tokens_replayed_with_lengths_for_the_other_way(
    cupy: Any, kind: str, layout: str, queries: int, head_size: int
) -> None:
    longest = (20_000, 400, 300, 64, 70, 80, 90, 100)
    b = several_tokens(longest, queries, 4, 2, kind, dtype="float16", layout=layout, head_size=head_size)
    captured = CapturedCalls(cupy, b, calls=2)
    for now in (
        longest,
        (250, 260, 300, 64, 70, 80, 90, 100),
        (20_000, 20, 16, 17, 18, 19, 20, 21),
        (30, 31, 32, 33, 34, 35, 36, 37),
        (5000, 400, 300, 64, 70, 80, 90, 100),
    ):
        captured.check(now)
    captured.check((20_000, 0, *[32] * 6), (queries, 0, 2 * queries, *[queries] * 5))
    captured.check([0] * 8, [0] * 8)
