"""Few KV heads over many keys: several clusters of blocks share a sequence's keys, or few blocks the line.

So it is where a model's KV heads are spread over several devices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.graphs import CapturedCalls
from attention.inputs import KINDS, Batch, Sizes
from attention.test_paged_attention import check, rng
from attention.test_paged_attention_served import check_reported
from libraries import Library
from tolerance import assert_attention

pytestmark = pytest.mark.of_cuda_kernels

ROOM = 40_000  # tokens of a table
SOME_KINDS = pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
# One sequence, long and short; several, of which few keys are one's all; and so many that the line takes them.
LENS = pytest.mark.parametrize(
    "lens",
    [(11_003,), (900,), (9000, 8), (1, 0, 12_500), (13_000, *range(290, 305))],
    ids=["long", "short", "two", "three", "many"],
)


def batch(lens: tuple[int, ...], sizes: Sizes, queries: int = 1, **kwargs: Any) -> Batch:
    """With scales; a sequence without keys has no query, but the last has some more if there are several for each."""
    kind = kwargs.get("kind", "auto")
    if queries == 1:
        b = inputs.batch(rng(len(lens)), [(1, n) for n in lens], sizes, decode=True, room=ROOM, **kwargs)
    else:
        tokens = [queries if n > 0 else 0 for n in lens]
        tokens[-1] += queries * tokens.count(0)
        b = inputs.batch(rng(len(lens)), list(zip(tokens, lens, strict=True)), sizes, room=ROOM, **kwargs)
    return b.changed(options=inputs.scales(kind, 0.7, 1.3))


@LENS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_lengths(array: Library, kv_heads: int, kind: str, lens: tuple[int, ...]) -> None:
    check(array, batch(lens, Sizes(8 * kv_heads, kv_heads, 128), kind=kind))


@SOME_KINDS
@pytest.mark.parametrize("length", [900, 11_003])
@pytest.mark.parametrize("group", [1, 4, 16])
@pytest.mark.parametrize("head_size", [64, 80, 128, 256])
def test_heads(array: Library, head_size: int, group: int, length: int, kind: str) -> None:
    check(array, batch((length,), Sizes(group, 1, head_size), kind=kind, dtype="float16"))


@SOME_KINDS
@pytest.mark.parametrize(("layout", "page"), [("HND", 16), ("packed", 16), ("packed", 128), ("NHD", 24), ("NHD", 1)])
@pytest.mark.parametrize("queries", [1, 3, 5])
def test_layouts(array: Library, queries: int, layout: str, page: int, kind: str) -> None:
    check(array, batch((9700,), Sizes(10, 2, 128, page), queries, layout=layout, kind=kind))


@LENS
@SOME_KINDS
@pytest.mark.parametrize(("queries", "group"), [(2, 4), (4, 4), (5, 6), (8, 7)])
def test_several_tokens(array: Library, queries: int, group: int, kind: str, lens: tuple[int, ...]) -> None:
    check(array, batch(tuple(max(n, queries) if n else 0 for n in lens), Sizes(group, 1, 128), queries, kind=kind))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("queries", [3, 7])
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_several_tokens_of_heads(array: Library, head_size: int, queries: int, kind: str) -> None:
    """Up to 32 and up to 64 rows, by warpgroups where there are any."""
    check(array, batch((6200, 11), Sizes(8, 1, head_size), queries, kind=kind, dtype="float16"))


@pytest.mark.parametrize("options", inputs.OPTIONS_OF_8_HEADS[1:], ids=str)
def test_options(array: Library, options: dict[str, Any]) -> None:
    for queries in (1, 2, 4, 6):
        b = batch((9100,), Sizes(8, 1, 128), queries)
        check(array, b.changed(options=b.options | options))


@SOME_KINDS
@pytest.mark.parametrize("window", [5000, 9000])
def test_long_windows(array: Library, window: int, kind: str) -> None:
    b = batch((14_000,), Sizes(8, 1, 128), 2, kind=kind)
    check(array, b.changed(options=b.options | {"window": window}))


@SOME_KINDS
@pytest.mark.parametrize("queries", [1, 4])
def test_bad_ids(array: Library, queries: int, kind: str) -> None:
    for page, bad in ((0, -3), (400, 2**30)):
        b = batch((9000,), Sizes(8, 1, 128), queries, kind=kind)
        b.block_tables[0, page] = bad
        check_reported(array, b, bad)


@SOME_KINDS
def test_not_finite_values(array: Library, kind: str) -> None:
    """What is no number stays in its column; over elements of one byte the sums are made again."""
    b = batch((9100,), Sizes(4, 1, 128), kind=kind)
    want, _ = inputs.expected(b)
    b.value_cache[b.block_tables[0, 17], 3, 0, 5] = np.nan
    out, lse = (array.output(x) for x in inputs.outputs(b))
    inputs.run(array, b, out, lse)
    got = array.numpy(out)
    assert np.isnan(got[..., 5].astype(np.float32)).all()
    others = np.arange(128) != 5
    assert_attention(got[..., others], want[..., others])


@SOME_KINDS
@pytest.mark.parametrize("queries", [1, 2, 4, 7])
def test_replayed(cupy: Any, queries: int, kind: str) -> None:
    """Sequences come to their clusters' all and to the first alone, in turn, with the same workspace."""
    longest = (30_000, 9000, 300)
    captured = CapturedCalls(cupy, batch(longest, Sizes(8, 1, 128), queries, kind=kind, dtype="float16"), calls=2)
    short = max(queries, 4)
    for now in (longest, (20_000, short, 300), (250, 8900, 64), (30_000, 9000, short), (5000, 6000, 300)):
        captured.check(now)
    if queries > 1:
        captured.check((20_000, 0, 300), (1, 0, 3 * queries - 1))


@SOME_KINDS
def test_replayed_by_few_blocks(cupy: Any, kind: str) -> None:
    """The line of a few heads, with pieces of one long sequence or of none."""
    longest = (30_000, *[300] * 12)
    captured = CapturedCalls(cupy, batch(longest, Sizes(4, 1, 256), kind=kind, dtype="float16"), calls=2)
    for now in (longest, [1] * 13, [29_000] + [0] * 12, [300] * 13, [0] * 13):
        captured.check(now)
