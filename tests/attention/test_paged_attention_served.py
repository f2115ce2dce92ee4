"""What the kernels of decoding serve besides one query token that sees all of its sequence.

Windows, up to sixteen query tokens of a sequence, groups of up to 32 heads, heads whose sizes are no power of two, and
large pages of packed caches.  What no query sees is poison, tokens in front of a window too; for most pages of those
the table names no block of the cache, which may not be reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from attention import inputs, test_batch_invariant
from attention.inputs import KINDS, LAYOUTS, NVFP4_LAYOUTS, Batch, Sizes
from attention.test_batch_invariant import Attention, assert_same
from attention.test_paged_attention import check, rng
from cache.inputs import TOKENS
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Library
from tolerance import assert_attention, assert_close

HALVES = ["bfloat16", "float16"]
PLACES = [*product(KINDS, ("NHD", "HND", "packed")), ("nvfp4", "NHD"), ("nvfp4", "HND")]
WINDOWS = (1, 2, 8, 15, 16, 17, 31, 32, 33, 64, 100, 512, 1000)
HEAD_SIZES = (64, 128, 256, 80, 120)
LONG_SHARES = (3000, 300, 1000, 5000, 63)  # tokens: many such sequences give each of few KV heads a line of blocks
Lens = Sequence[tuple[int, int]]  # (queries, length) of each sequence


@dataclass(frozen=True)
class Case:
    sizes: Sizes
    kind: str
    layout: str
    dtype: str
    room: int
    ids: type
    arrangement: str

    def __str__(self) -> str:
        s = self.sizes
        what = f"{s.heads} heads {s.kv_heads} {s.head_size}, pages {s.block_size}, {self.kind} {self.layout}"
        return f"{what}, {self.dtype} {self.arrangement}, room {self.room} {self.ids.__name__}"

    def batch(self, lens: Lens, window: int | None = None, **kwargs: Any) -> Batch:
        b = inputs.batch(
            rng(sum(n for _, n in lens)),
            lens,
            self.sizes,
            kind=self.kind,
            layout=self.layout,
            dtype=self.dtype,
            room=self.room,
            ids=self.ids,
            arrangement=self.arrangement,
            begins=[] if window is None else begins(lens, window),
            **kwargs,
        )
        return b if window is None else b.changed(options={**b.options, "window": window})


def begins(lens: Lens, window: int) -> list[int]:
    """The first key that a query of the sequence sees."""
    return [min(n, max(0, n - queries - window + 1)) for queries, n in lens]


def fitting(head_size: int, kind: str, layout: str) -> int:
    """This size, or the next one that such a cache can have."""
    multiple = 64 if kind == "nvfp4" else 1 if "packed" not in layout else 8 if kind == "auto" else 16
    return -(-head_size // multiple) * multiple


def cases(
    count: int,
    *,
    groups: Sequence[int] = (1, 4, 5, 8, 12, 16),
    head_sizes: Sequence[int] = HEAD_SIZES,
    pages: Sequence[int] = (16, 8, 32, 64, 128),
    rooms: Sequence[int] = (0, 10_000),
    places: Sequence[tuple[str, str]] = PLACES,
    kv_heads: Sequence[int] = (2, 1),
) -> list[Any]:
    """So many parameters.  Those of one kind come up equally often, in an order of their own."""
    order = rng(count)

    def dealt(of: Sequence[Any]) -> list[Any]:
        return [of[i] for i in order.permutation(np.resize(np.arange(len(of)), count))]

    made = []
    for i, ((kind, layout), group, heads, page, room, dtype, ids, arrangement) in enumerate(
        zip(
            *map(dealt, (places, groups, kv_heads, pages, rooms, HALVES, (np.int32, np.int64), TOKENS[:3])), strict=True
        )
    ):
        sizes = Sizes(group * heads, heads, fitting(head_sizes[i % len(head_sizes)], kind, layout), page)
        made.append(Case(sizes, kind, layout, dtype, room, ids, arrangement))
    return made


def times(b: Batch, count: int) -> Batch:
    """The same sequences so often, on the pages of the first ones."""
    cu = b.cu_query_lens
    return b.changed(
        query=np.tile(b.query, (count, 1, 1)),
        block_tables=np.tile(b.block_tables, (count, 1)),
        seq_lens=np.tile(b.seq_lens, count),
        cu_query_lens=None if cu is None else np.cumsum([0, *np.tile(np.diff(cu), count)]).astype(cu.dtype),
    )


def check_many(array: Library, b: Batch, count: int) -> None:
    many = times(b, count)
    out, lse = (array.output(x) for x in inputs.outputs(many))
    inputs.run(array, many, out, lse)
    want_out, want_lse = inputs.expected(b)
    assert_attention(array.numpy(out), np.tile(want_out, (count, 1, 1)))
    assert_close(array.numpy(lse), np.tile(want_lse, (1, count)), atol=2e-5, rtol=1e-5)


def check_reported(array: Library, b: Batch, bad: int) -> None:
    """This id is reported, and its page masked."""
    out, lse = (array.output(x) for x in inputs.outputs(b))
    with array.reports(rf"paged_attention: block_tables: {bad} is out of range \[0, {b.key_cache.shape[0]}\)"):
        inputs.run(array, b, out, lse)
    want_out, want_lse = inputs.expected(b)
    assert_attention(array.numpy(out), want_out)
    assert_close(array.numpy(lse), want_lse, atol=2e-5, rtol=1e-5)


def around(window: int) -> list[tuple[int, int]]:
    """Lengths with which a window begins at the edges of tiles, beside them, and in front of the sequence."""
    more = (-1, 0, 1, 7, 8, 16, 17, 33, 200)
    return [(1, n) for n in (0, 1, *(window + i for i in more))]


def parametrized(name: str, values: Sequence[Any], made: list[Case]) -> Any:
    """Each case with the next of the values."""
    both = [(values[i % len(values)], case) for i, case in enumerate(made)]
    return pytest.mark.parametrize((name, "case"), both, ids=str)


def options_of(heads: int) -> list[dict[str, Any]]:
    slopes = np.linspace(0.01, 0.5, heads, dtype=np.float32)
    sinks = np.linspace(-4, 4, heads, dtype=np.float32)
    return [
        {"causal": False},
        {"sinks": sinks},
        {"softcap": 5.0},
        {"alibi_slopes": slopes},
        {"scale": -0.1},
        {"softcap": 8.0, "alibi_slopes": slopes, "sinks": sinks, "scale": 0.3},
    ]


OPTIONS = range(len(options_of(1)))


# 13 windows and 5 head sizes: each with each
@parametrized("window", WINDOWS, cases(65))
def test_windows(array: Library, window: int, case: Case) -> None:
    lens = around(window)
    order = rng(window).permutation(len(lens))
    few = 1 + case.sizes.heads % 4
    for some in (order[:few], order[few:]):
        check(array, case.batch([lens[i] for i in some], window, decode=True))


@parametrized("window", (1, 33, 100, 512, 1000, 4000), cases(6, groups=(1, 4, 6), rooms=(0, 10_000, 40_000)))
def test_windows_of_a_long_sequence(array: Library, window: int, case: Case) -> None:
    check(array, case.batch([(1, 6000)], window, decode=True))
    check(array, case.batch([(1, 3000 + window % 40), (1, 3), (1, 0), (1, window)], window, decode=True))


@parametrized(
    "window",
    (1, 16, 17, 100, 300, 512, 1000, 2500),
    cases(8, groups=(1, 4, 5, 8, 16), head_sizes=(64, 128, 80, 120), kv_heads=(4, 1, 2)),
)
def test_windows_of_many_sequences(array: Library, window: int, case: Case) -> None:
    """A window of which each block of the grid takes several, or one that is shared out."""
    lens = [*around(window)[::2], (1, 1700), (1, 64), (1, 500)]
    check_many(array, case.batch(lens, window, decode=True), 32)


@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "int8"])
def test_windows_that_find_room_at_once(array: Library, kind: str, head_size: int) -> None:
    """A tile for each warp: two blocks on an SM have one of 180 heads each."""
    lens = [(1, n) for n in range(90, 600, 17)]
    case = Case(Sizes(12, 6, head_size), kind, "NHD", "bfloat16", 10_000, np.int32, "compact")
    check(array, case.batch(lens, 128, decode=True))


@parametrized("option", OPTIONS, cases(12, groups=(1, 4, 8), head_sizes=(64, 128, 96, 192, 80)))
def test_windows_with_options(array: Library, option: int, case: Case) -> None:
    for window in (20, 250):
        lens = [(1, n) for n in (0, 1, 33, 700, 250)]
        b = case.batch(lens, window, decode=True)
        check(array, b.changed(options=b.options | options_of(case.sizes.heads)[option]))


@parametrized("window", (3, 16, 40, 300), cases(12, groups=(4, 8), head_sizes=(64, 128, 80), pages=(16, 8, 32)))
def test_bad_ids_within_a_window(array: Library, window: int, case: Case) -> None:
    """Of the page in which the window begins, the next one and the last one, of one sequence each."""
    n, page = 500, case.sizes.block_size
    for queries in (1, 3):
        b = case.batch([(queries, n)] * 3, window, decode=queries == 1)
        first = begins([(queries, n)], window)[0] // page
        last, blocks = (n - 1) // page, b.key_cache.shape[0]
        for s, (at, bad) in enumerate([(first, -1), (min(first + 1, last), blocks), (last, 2**30)]):
            one = b.changed(block_tables=b.block_tables.copy())
            one.block_tables[s, at] = bad
            check_reported(array, one, bad)


@parametrized("queries", (1, 2, 8), cases(24, groups=(4, 8, 16), head_sizes=(64, 128, 80), pages=(16, 8, 32)))
def test_ids_beyond_32_bits(array: Library, queries: int, case: Case) -> None:
    """Of which 32 bits would name a page."""
    b = replace(case, ids=np.int64).batch([(queries, 500), (queries, 90)], decode=queries == 1)
    b.block_tables[0, 300 // case.sizes.block_size] += 3 << 32
    check_reported(array, b, b.block_tables[0, 300 // case.sizes.block_size])


@parametrized("queries", (1, 3, 8), cases(12, groups=(4, 17), head_sizes=(64, 128)))
def test_caches_without_a_block(array: Library, queries: int, case: Case) -> None:
    """Nothing is read of them: no key is there to see."""
    b = case.batch([(queries, queries)] * 2, decode=queries == 1, spare_blocks=0)
    key, value = b.layout.key, b.layout.value
    b = b.changed(layout=replace(b.layout, key=lambda m: key(m)[:0], value=lambda m: value(m)[:0]))
    out, lse = (array.output(x) for x in inputs.outputs(b))
    with array.reports(r"paged_attention: block_tables: \d+ is out of range \[0, 0\)"):
        inputs.run(array, b, out, lse)
    assert not array.numpy(out).any()
    assert np.isneginf(array.numpy(lse)).all()


@parametrized("window", (1, 17, 33, 100, 512, 1000), cases(12, groups=(1, 4, 8), head_sizes=(64, 128, 80, 128, 120)))
def test_windows_are_batch_invariant(array: Library, window: int, case: Case) -> None:
    lens = [(1, n) for n in (1500, window, window + 15, 1, 530, 2070)]
    p = test_batch_invariant.Prompts(case.batch(lens, window), [n - 1 for _, n in lens])
    attend = Attention(array, p)
    want = attend(p.whole, pages=20_000 // case.sizes.block_size)
    outs, lses = inputs.expected(p.b)
    assert_attention(np.concatenate([out for out, _ in want]), outs)
    assert_close(np.concatenate([lse for _, lse in want], axis=1), lses, atol=2e-5, rtol=1e-5)
    for count in (1, 2, 100):
        for start in range(len(lens) if count == 1 else 1):
            pieces = (p.whole * 30)[start : start + count]
            for (s, _, n), got in zip(pieces, attend(pieces), strict=True):
                assert_same(got, want[s], f"{n} among {count}")


@parametrized("window", (5, 40, 600), cases(6, groups=(4, 3, 17), head_sizes=(64, 128), kv_heads=(1, 2)))
def test_query_tokens_in_windows_are_batch_invariant(array: Library, window: int, case: Case) -> None:
    lens = [(16, 700), (3, 40), (7, 1040)]
    p = test_batch_invariant.Prompts(case.batch(lens, window), [n - queries for queries, n in lens])
    test_batch_invariant.check(array, p, (1, 5))


GROUPS_OF_QUERIES = (1, 2, 3, 4, 5, 8, 16, 17, 24, 32)
QUERIES = range(1, 17)
UP_TO = (2048, 9000)  # tokens that a row of the table has room for


@parametrized(
    "queries",
    QUERIES,
    cases(32, groups=GROUPS_OF_QUERIES, head_sizes=(64, 128, 80, 256, 128), kv_heads=(1, 2), rooms=(0, *UP_TO)),
)
def test_query_tokens(array: Library, queries: int, case: Case) -> None:
    """From one sequence to eight; all have as many."""
    order = rng(queries + case.sizes.heads)
    lens = order.permutation([queries, queries + 1, 16, 17, 63, 128, 300, 600])[: order.integers(1, 9)]
    lens = lens[: max(1, 600 // (queries * case.sizes.heads))]
    check(array, case.batch([(queries, int(n)) for n in lens], extra_rows=1))


MIXED = [
    [(1, 77), (16, 16), (0, 40), (5, 300), (2, 2), (0, 0), (3, 700)],
    [(4, 2), (16, 5), (1, 0), (2, 0), (1, 1), (8, 1000)],  # some stand in front of the first token
    [(2, 400), (40, 130), (1, 33), (0, 9)],  # more rows than a tile has
    [(0, 1), (0, 0), (1, 1500), (0, 20)],
    [(1, 64), (1, 16), (1, 1), (1, 130)],
    [(16, 1030), (15, 31)],
]


@parametrized("lens", MIXED, cases(18, groups=GROUPS_OF_QUERIES, kv_heads=(1, 2), rooms=(0, *UP_TO)))
def test_mixed_counts_of_query_tokens(array: Library, lens: Lens, case: Case) -> None:
    b = case.batch(lens[: max(2, 70 // case.sizes.heads)], extra_rows=2)
    check(array, b)
    if len(lens) % 2 == 0:
        check(array, b.changed(options=b.options | {"causal": False}))


@parametrized("queries", (2, 4, 3, 8), cases(6, groups=(2, 1, 3), kv_heads=(1,), rooms=(0, 9000, 40_000)))
def test_query_tokens_of_long_sequences(array: Library, queries: int, case: Case) -> None:
    queries = max(1, min(queries, 8 // case.sizes.heads))
    check(array, case.batch([(queries, 8900)]))
    check(array, case.batch([(queries, 4100), (1, 1), (queries, queries), (0, 0)]))


@parametrized("queries", (1, 2, 5, 8), cases(8, groups=(1, 4, 8, 16, 17, 32), kv_heads=(1, 2), rooms=UP_TO))
def test_query_tokens_of_many_sequences(array: Library, queries: int, case: Case) -> None:
    lens = [(queries, n) for n in (queries, 17, 130, 555)] + [(0, 0), (1, 64)]
    check_many(array, case.batch(lens), 25)


@parametrized("window", WINDOWS, cases(13, groups=GROUPS_OF_QUERIES, kv_heads=(1, 2), rooms=(0, *UP_TO)))
def test_query_tokens_in_windows(array: Library, window: int, case: Case) -> None:
    queries = max(1, min(16, 32 // case.sizes.heads))
    lens = [(queries, n) for n in (queries, window, window + 8, window + 33, 700)]
    lens += [(1, window + 1), (0, 300), (min(3, queries), window + 17), (2, 1)]
    b = case.batch(lens, window, extra_rows=1)
    check(array, b.changed(options=b.options | {"causal": case.sizes.kv_heads == 1}))


@parametrized(
    "option", OPTIONS, cases(12, groups=(1, 3, 8, 16, 17), head_sizes=(64, 128, 96, 192, 80), kv_heads=(1, 2))
)
def test_query_tokens_with_options(array: Library, option: int, case: Case) -> None:
    queries = max(1, min(9, 32 // case.sizes.heads))
    lens = [(queries, 150), (2, 600), (queries, queries), (4, 2), (1, 1000), (1, 0)]
    for window in (None, 20):
        b = case.batch(lens, window)
        check(array, b.changed(options=b.options | options_of(case.sizes.heads)[option]))


@parametrized(
    "queries", (2, 4, 9, 16), cases(8, groups=(2, 4, 17), head_sizes=(64, 128, 80), kv_heads=(1,), pages=(8, 16))
)
def test_bad_ids_of_query_tokens(array: Library, queries: int, case: Case) -> None:
    """A page in the middle and the last one of a sequence; what has no queries is not looked at."""
    lens = [(queries, 400), (1, 30), (0, 100)]
    page = case.sizes.block_size
    for at in (20, 399):
        b = case.batch(lens)
        blocks = b.key_cache.shape[0]
        b.block_tables[0, at // page] = blocks
        b.block_tables[2, 0] = 2**30
        check_reported(array, b, blocks)


def test_ids_of_a_sequence_without_queries_are_not_reported(array: Library) -> None:
    for queries in (0, 1, 3):
        b = inputs.batch(rng(), [(0, 100), (queries, 40), (0, 30)], Sizes(8, 2, 128))
        b.block_tables[[0, 2]] = 2**30
        check(array, b)


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        *((layout, kind) for i, layout in enumerate(LAYOUTS) for kind in (KINDS[i % 2 * 2], KINDS[i % 2 * 2 + 1])),
        *((layout, "nvfp4") for layout in NVFP4_LAYOUTS),
    ],
)
def test_layouts(array: Library, layout: str, kind: str, queries: int) -> None:
    """Of caches whose scales are of a KV head each."""
    lens = [(queries, n) for n in (3, 40, 65, 300)]
    for dtype, window in zip(HALVES, (None, 50), strict=True):
        case = Case(Sizes(8, 2, 128), kind, layout, dtype, 0, np.int32, "compact")
        b = case.batch(lens, window, decode=queries == 1)
        per_head = inputs.scales(kind, np.array([0.7, 1.1], np.float32), np.array([1.3, 0.4], np.float32))
        check(array, b.changed(options=b.options | per_head))


BETWEEN = (72, 80, 88, 96, 104, 112, 120, 136, 144, 160, 176, 192, 200, 208, 224, 240, 248, 76, 90, 140)


@parametrized("queries", (1, 1, 4), cases(40, groups=(4, 1, 8, 16), head_sizes=BETWEEN, kv_heads=(2, 1)))
def test_head_sizes_between_powers_of_two(array: Library, queries: int, case: Case) -> None:
    lens = [(queries, n) for n in (queries, 15, 16, 33, 400)]
    check(array, case.batch(lens, None if case.sizes.kv_heads == 1 else 40, decode=queries == 1))


IN_PACKED = [(kind, layout) for kind in KINDS for layout in LAYOUTS if "packed" in layout]
LARGE_PAGES = (32, 64, 128, 256, 24, 40, 96)


@parametrized("queries", (1, 1, 3), cases(20, groups=(4, 8, 1), places=IN_PACKED, pages=LARGE_PAGES, kv_heads=(2, 1)))
def test_large_pages_of_packed_caches(array: Library, queries: int, case: Case) -> None:
    page = case.sizes.block_size
    lens = [(queries, n) for n in (queries, page - 1, page, page + 1, 2 * page + 9)]
    for window in (None, page + 3):
        check(array, case.batch(lens, window, decode=queries == 1))


@pytest.mark.parametrize("calls", ["decoding", "query tokens"])
@settings(max_examples=16)
@given(data=st.data())
def test_everything_at_once(array: Library, calls: str, data: st.DataObject) -> None:
    draw, decode = data.draw, calls == "decoding"
    kind, layout = draw(st.sampled_from(PLACES), "place")
    kv_heads, group = draw(st.integers(1, 3), "kv_heads"), draw(st.integers(1, 17 if decode else 32), "group")
    heads, longest = kv_heads * group, draw(st.sampled_from([70, 1200]), "longest")
    counts = st.just(1) if decode else st.integers(0, 16)
    lens = draw(st.lists(st.tuples(counts, st.integers(0, longest)), min_size=1, max_size=8), "lens")
    lens = lens[: max(1, 120 // (1 if decode else 8) // heads)]
    case = Case(
        Sizes(
            heads,
            kv_heads,
            fitting(8 * draw(st.integers(8, 32), "head_size / 8"), kind, layout),
            8 * draw(st.sampled_from([1, 2, 3, 4, 8, 16]), "block_size / 8"),
        ),
        kind,
        layout,
        draw(st.sampled_from(HALVES), "dtype"),
        draw(st.sampled_from([0, *UP_TO]), "room"),
        draw(st.sampled_from([np.int32, np.int64]), "ids"),
        draw(st.sampled_from(TOKENS[:3]), "arrangement"),
    )
    window = draw(st.none() | st.integers(1, longest + 10), "window")
    b = case.batch(lens, window, decode=decode, extra_rows=0 if decode else draw(st.integers(0, 2), "extra_rows"))
    for name, value in {
        "causal": False,
        "softcap": 10.0,
        "alibi_slopes": np.linspace(0, 0.2, heads, dtype=np.float32),
        "sinks": np.linspace(-2, 2, heads, dtype=np.float32),
    }.items():
        if draw(st.booleans(), name):
            b.options[name] = value
    check(array, b)
