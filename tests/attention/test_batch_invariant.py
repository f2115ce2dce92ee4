"""``batch_invariant=True``: the same bits for a query whatever else the call does and however a prompt is cut."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.graphs import CapturedCalls
from attention.inputs import KINDS, Batch, Sizes
from cache.inputs import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from libraries import Library
from tolerance import assert_attention, assert_close

import pykv

USUAL = Sizes()
Piece = tuple[int, int, int]  # sequence, and the positions first to end - 1 that its queries have in this call


@dataclass
class Prompts:
    """Sequences whose pages are written, and queries for the positions from ``firsts`` on."""

    b: Batch
    firsts: list[int]

    @property
    def lens(self) -> list[int]:
        return [int(n) for n in self.b.seq_lens]

    @property
    def whole(self) -> list[Piece]:
        return [(s, first, n) for s, (first, n) in enumerate(zip(self.firsts, self.lens, strict=True))]

    def cuts(self, size: int, rng: np.random.Generator) -> Iterator[list[Piece]]:
        """Calls with at most ``size`` queries of each sequence, whose order and number differ from call to call."""
        pieces = [
            [(s, at, min(at + size, end)) for at in range(first, end, size)]
            for s, first, end in self.whole
            if first < end
        ]
        while pieces:
            rng.shuffle(pieces)
            taken = pieces[: rng.integers(1, len(pieces) + 1)]
            yield [p.pop(0) for p in taken]
            pieces = [p for p in pieces if p]


def prompts(lens: list[tuple[int, int]], sizes: Sizes = USUAL, seed: int = 0, **kwargs: Any) -> Prompts:
    """``lens``: first position with a query, and length of each sequence."""
    b = inputs.batch(np.random.default_rng(seed), [(n - first, n) for first, n in lens], sizes, **kwargs)
    return Prompts(b, [first for first, _ in lens])


class Attention:
    """The op on arrays that are copied to the device once."""

    def __init__(self, array: Library, prompts: Prompts, **options: Any) -> None:
        self.array, self.prompts = array, prompts
        self.caches = inputs.caches(array, prompts.b)
        given = {**prompts.b.options, **options}
        self.options = {k: array.input(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}

    def __call__(self, pieces: list[Piece], pages: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
        """Output and lse of each piece; the block table has room for so many pages at the least."""
        b, firsts = self.prompts.b, self.prompts.firsts
        assert b.cu_query_lens is not None
        rows = [np.arange(first, end) - firsts[s] + b.cu_query_lens[s] for s, first, end in pieces]
        bounds = np.cumsum([0, *map(len, rows)]).astype(np.int32)
        query = b.query[np.concatenate(rows)]
        out = self.array.output(np.zeros_like(query))
        lse = self.array.output(np.zeros((query.shape[1], query.shape[0]), np.float32))
        decoding = all(end - first == 1 for _, first, end in pieces)
        tables = b.block_tables[[s for s, _, _ in pieces]]
        tables = np.pad(tables, ((0, 0), (0, max(0, pages - tables.shape[1]))), constant_values=-1)
        pykv.paged_attention(
            out,
            self.array.input(query),
            *self.caches,
            self.array.input(tables),
            self.array.input(np.array([end for _, _, end in pieces], np.int32)),
            cu_query_lens=None if decoding else self.array.input(bounds),
            kv_cache_dtype=b.kind,
            batch_invariant=True,
            lse=lse,
            **self.options,
        )
        outs, lses = self.array.numpy(out), self.array.numpy(lse)
        return [(outs[i:j], lses[:, i:j]) for i, j in pairwise(bounds)]


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x).view(f"u{x.itemsize}")


def assert_same(got: tuple[np.ndarray, np.ndarray], want: tuple[np.ndarray, np.ndarray], what: str) -> None:
    for g, w, name in zip(got, want, ("out", "lse"), strict=True):
        np.testing.assert_array_equal(bits(g), bits(w), err_msg=f"{name} of {what}")


def check(array: Library, p: Prompts, cuts: tuple[int, ...] = (1, 3, 16), **options: Any) -> None:
    """All at once against the reference, then everything else against all at once."""
    attend = Attention(array, p, **options)
    want = attend(p.whole)
    assert p.b.cu_query_lens is not None
    outs, lses = inputs.expected(p.b.changed(options={**p.b.options, **options}))
    assert_attention(np.concatenate([out for out, _ in want]), outs)
    assert_close(np.concatenate([lse for _, lse in want], axis=1), lses, atol=2e-5, rtol=1e-5)
    for piece in p.whole:
        if piece[1] < piece[2]:
            assert_same(attend([piece])[0], want[piece[0]], f"{piece} alone")
    rng = np.random.default_rng(1)
    for size in cuts:
        for pieces in p.cuts(size, rng):
            for (s, first, end), got in zip(pieces, attend(pieces), strict=True):
                here = slice(first - p.firsts[s], end - p.firsts[s])
                assert_same(got, (want[s][0][here], want[s][1][:, here]), f"{(s, first, end)} among {pieces}")


LENS = [(0, 20), (300, 340), (250, 262), (0, 1), (1500, 1537)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [*KINDS, "nvfp4"])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_kinds(array: Library, layout: str, kind: str, dtype: str) -> None:
    if kind == "nvfp4" and layout == "packed":
        layout = "HND"
    check(array, prompts(LENS, layout=layout, kind=kind, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"window": 33},
        {"window": 270, "sinks": np.linspace(-2, 2, 8, dtype=np.float32)},
        {"softcap": 5.0, "alibi_slopes": np.linspace(0, 0.3, 8, dtype=np.float32)},
        {"scale": 0.4},
    ],
)
def test_options(array: Library, options: dict[str, Any]) -> None:
    for dtype in DTYPES:
        check(array, prompts(LENS, dtype=dtype), **options)


@pytest.mark.parametrize(
    "sizes", [Sizes(4, 4, 128), Sizes(8, 2, 256, 32), Sizes(20, 1, 80), Sizes(6, 2, 40, 4), Sizes(71, 1, 7, 3)]
)
def test_sizes(array: Library, sizes: Sizes) -> None:
    check(array, prompts([(0, 40), (280, 300), (2040, 2060)], sizes))


# Keys are taken in chunks of 512, a quarter of one by each warp, 16 or 32 keys at a time.
EDGES = [(120, 136), (250, 258), (505, 520), (1018, 1030), (0, 513), (2047, 2049)]


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("sizes", [Sizes(8, 2, 64), Sizes(12, 2, 128), Sizes(16, 1, 128, 8), Sizes(4, 1, 256)])
def test_lengths_around_the_edges_of_chunks(array: Library, sizes: Sizes, kind: str) -> None:
    check(array, prompts(EDGES, sizes, kind=kind), (1, 2, 5, 11, 40))


@pytest.mark.parametrize("count", [1, 2, 5, 17, 70])
def test_decoding_of_few_and_of_many(array: Library, count: int) -> None:
    """How many sequences there are decides which kernel takes them, and how many blocks each of them gets."""
    p = prompts([(n - 1, n) for n in (513, 1024, 1500, 1, 300)], Sizes(8, 2, 128))
    attend = Attention(array, p)
    want = attend(p.whole)
    pieces = (p.whole * 14)[:count]
    for (s, _, _), got in zip(pieces, attend(pieces), strict=True):
        assert_same(got, want[s], f"sequence {s} of {count}")


@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_many_sequences_of_narrow_elements(array: Library, kind: str, layout: str) -> None:
    """How many there are for each SM, and how wide their table is, decides which blocks share them."""
    lens = (1024, 513, 1000, 130, 1, 700)
    p = prompts([(n - 1, n) for n in lens], Sizes(12, 2, 128), kind=kind, layout=layout)
    attend = Attention(array, p)
    want = attend(p.whole)
    for count, pages in ((140, 0), (230, 0), (300, 0), (40, 1024)):
        pieces = (p.whole * 50)[:count]
        for (s, _, _), got in zip(pieces, attend(pieces, pages), strict=True):
            assert_same(got, want[s], f"{lens[s]} among {count}, {pages} pages")


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("sizes", [Sizes(8, 2, 128), Sizes(8, 1, 128, 8), Sizes(4, 1, 64), Sizes(6, 2, 256)])
def test_narrow_tables_and_wide_ones(array: Library, sizes: Sizes, kind: str) -> None:
    """Clusters of blocks take sequences whose table is narrow, the line those whose table is wide.

    A cluster spreads what is left after whole rounds of chunks by tiles; how many warps there are for that depends on
    the number of sequences.
    """
    lens = (1, 100, 130, 1000, 1024, 1500, 2050, 3000, 3072, 4096, 4200, 6000, 7700, 8192)
    p = prompts([(max(0, n - 2), n) for n in lens], sizes, kind=kind)
    attend = Attention(array, p)
    decoding = [(s, n - 1, n) for s, n in enumerate(lens)]
    want = attend(decoding, pages=3 * 8192 // sizes.block_size)
    for (s, _, n), got in zip(p.whole, attend(p.whole), strict=True):
        assert_same((got[0][-1:], got[1][:, -1:]), want[s], f"{n} by prefill")
    for count in (1, 2, 8, 9, len(lens), 40, 100):
        for start in range(0, len(lens), count):
            pieces = (decoding * 8)[start : start + count]
            for (s, _, n), got in zip(pieces, attend(pieces), strict=True):
                assert_same(got, want[s], f"{n} among {count}")


@pytest.mark.of_cuda_kernels
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize(
    "sizes", [Sizes(16, 8, 128), Sizes(40, 5, 128), Sizes(8, 1, 128), Sizes(6, 2, 64, 32), Sizes(5, 1, 256)]
)
def test_a_long_sequence_alone(array: Library, sizes: Sizes, kind: str) -> None:
    """It has a cluster for each KV head, or more blocks than a cluster has if its table has room for so much; of few KV
    heads each has several clusters, in several sequences, too.
    """
    lens = (1, 9000, 12_000, 20_000, 40_000)
    p = prompts([(n - 1, n) for n in lens], sizes, kind=kind)
    attend = Attention(array, p)
    want = attend(p.whole)
    for s, piece in enumerate(p.whole):
        for tokens in (0, 1 << 17):
            assert_same(attend([piece], tokens // sizes.block_size)[0], want[s], f"{lens[s]} in {tokens}")
        assert_same(attend([p.whole[1], piece])[1], want[s], f"{lens[s]} beside {lens[1]}")
    for count in (4, 8):
        pieces = (p.whole * 2)[-count:]
        for piece, got in zip(pieces, attend(pieces), strict=True):
            assert_same(got, want[piece[0]], f"{piece} of {count}")


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("sizes", [Sizes(8, 2, 128), Sizes(24, 6, 128), Sizes(32, 8, 64, 32), Sizes(4, 2, 256)])
def test_few_sequences_in_wide_tables(array: Library, sizes: Sizes, kind: str) -> None:
    """Lengths say whether clusters take a call, a head each, or all blocks together."""
    lens = (40, 700, 2049, 9000)
    p = prompts([(n - 1, n) for n in lens], sizes, kind=kind)
    attend = Attention(array, p)
    want = attend(p.whole)
    a, b, c, d = p.whole
    for pieces in ([a, b, c], [b, c] * 3, [d, a, b, c], [d, a, a, a, a, a, a, a], [d, d]):
        for piece, got in zip(pieces, attend(pieces, (1 << 17) // sizes.block_size), strict=True):
            assert_same(got, want[piece[0]], f"{piece} of {pieces}")


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_replayed(cupy: Any, kv_heads: int, kind: str) -> None:
    """Calls that clusters take, and others, in turn, with the same workspace."""
    longest = (20_000, *[300] * 7)
    b = inputs.batch(
        np.random.default_rng(0), [(1, n) for n in longest], Sizes(4 * kv_heads, kv_heads, 128), kind=kind, decode=True
    )
    captured = CapturedCalls(cupy, b, calls=2, batch_invariant=True)
    for now in (longest, [300] * 8, (19_000, *[0] * 7), range(293, 301), [0] * 8, (4000, *[300] * 7)):
        captured.check(tuple(now))


def some_of(p: Prompts, rng: np.random.Generator, count: int) -> list[Piece]:
    """Single queries."""
    every = [(s, at, at + 1) for s, first, end in p.whole for at in range(first, end)]
    return [every[i] for i in rng.choice(len(every), count, replace=False)]


def assert_parts(attend: Attention, want: list[tuple[np.ndarray, np.ndarray]], pieces: list[Piece]) -> None:
    """These pieces, in one call, against all queries at once."""
    for (s, first, end), got in zip(pieces, attend(pieces), strict=True):
        here = slice(first - attend.prompts.firsts[s], end - attend.prompts.firsts[s])
        assert_same(got, (want[s][0][here], want[s][1][:, here]), f"{(s, first, end)} among {pieces[:9]}")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("sizes", [Sizes(8, 2, 128), Sizes(12, 1, 64, 32), Sizes(6, 2, 80), Sizes(71, 1, 128)])
def test_prefill_of_many_chunks(array: Library, sizes: Sizes, dtype: str) -> None:
    """More of them than wait to be added up together; in tiles that are computed whole, and in shares of a line."""
    p = prompts([(0, 2600), (7920, 8000), (3000, 3300), (17_400, 17_430)], sizes, dtype=dtype, layout="HND")
    attend = Attention(array, p)
    want = attend(p.whole)
    cuts = [[(3, 17_400, 17_420)], [(1, 7920, 8000)], [(0, 0, 1100), (2, 3000, 3300)]]
    for pieces in (*cuts, [(0, 1100, 2600)], [(2, 3001, 3050)]):
        assert_parts(attend, want, pieces)
    assert_parts(attend, want, some_of(p, np.random.default_rng(0), 100))


@pytest.mark.parametrize("options", [{}, {"window": 300}], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_maxima_that_rise_within_a_part(array: Library, dtype: str, options: dict[str, Any]) -> None:
    p = prompts([(900, 1100), (0, 200), (40, 60)], Sizes(8, 2, 128), dtype=dtype)
    for table, length in zip(p.b.block_tables, p.lens, strict=True):
        for i, page in enumerate(table[: -(-length // 16)]):
            p.b.key_cache[page] *= np.float32(i * 5 % 13)
    check(array, p, (1, 50), **options)


@given(data=st.data())
def test_random_batches(array: Library, data: st.DataObject) -> None:
    draw = data.draw
    lens = [
        (max(0, n - draw(st.integers(0, 24), "queries")), n)
        for n in draw(st.lists(st.integers(1, 1100), min_size=1, max_size=6), "lens")
    ]
    kv_heads, group = draw(st.integers(1, 3), "kv_heads"), draw(st.sampled_from([1, 2, 4, 5, 16, 32]), "group")
    sizes = Sizes(kv_heads * group, kv_heads, draw(st.sampled_from([64, 128]), "head_size"))
    options = {"window": draw(st.sampled_from([None, 17, 400]), "window")}
    kind = draw(st.sampled_from(KINDS), "kind")
    p = prompts(
        lens, sizes, draw(st.integers(0, 99), "seed"), kind=kind, dtype=draw(st.sampled_from(list(DTYPES)), "dtype")
    )
    check(array, p, (draw(st.integers(1, 20), "cut"),), **options)


def test_long_sequences_are_shared_by_many_blocks(array: Library) -> None:
    """Shares of work are cut at other places for each batch."""
    lens = [(n - 1, n) for n in (9000, 40_000, 700, 8192, 1)]
    p = prompts(lens, Sizes(4, 1, 128))
    check(array, p)
    attend = Attention(array, p)
    want = attend(p.whole)
    for times in (3, 40):
        for s, piece in enumerate(p.whole):
            for got in attend([piece] * times):
                assert_same(got, want[s], f"{piece}, {times} times")


def test_without_a_causal_mask(array: Library) -> None:
    """All queries see all keys; which queries share a call does not matter."""
    p = prompts([(0, 50), (500, 540)])
    attend = Attention(array, p, causal=False)
    want = attend(p.whole)
    for s, first, end in p.whole:
        for start in (first + 1, first + 7, end - 1):
            assert_same(
                attend([(s, start, end)])[0], (want[s][0][start - first :], want[s][1][:, start - first :]), f"{start}"
            )


def test_extremes_add_up(array: Library) -> None:
    """Chunks whose sums are far apart."""
    p = prompts([(2090, 2100)], Sizes(2, 1, 64), dtype="float32")
    table = p.b.block_tables[0]
    for page, factor in ((0, 1e30), (20, 1e-30), (40, 1e-38), (60, 0.0), (100, -1e20)):
        p.b.value_cache[table[page]] *= np.float32(factor)
    p.b.key_cache[table[70]] *= 300
    check(array, p)


def test_what_is_left_when_great_sums_cancel(array: Library) -> None:
    """Of three chunks the first and the last cancel; the second's sum is near the last digit that counts beside them.

    A sequence alone has a block for each chunk, many have one for all: what is left must not depend on that.
    """
    n = 3 * 512
    for dtype in DTYPES:
        p = prompts([(n - 1, n)], Sizes(2, 1, 64), dtype=dtype)
        first, second, third = np.split(p.b.block_tables[0][: n // 16], 3)
        p.b.query[:] = 1
        p.b.key_cache[:] = 0
        p.b.value_cache[first], p.b.value_cache[second], p.b.value_cache[third] = 1, 1, -1
        for logit in (-26, -28.75, -31, -37):  # in base 2: -37.5, -41.5, -44.7, -53.4
            p.b.key_cache[second] = logit / 64
            attend = Attention(array, p, scale=1.0)
            want = attend(p.whole)[0]
            for count in (2, 30, 700):
                for got in attend(p.whole * count):
                    assert_same(got, want, f"{dtype}, {logit}, one of {count}")


def test_what_is_no_number_stays_in_its_column(array: Library) -> None:
    p = prompts([(2090, 2100)], Sizes(2, 1, 64), dtype="float32")
    table = p.b.block_tables[0]
    p.b.value_cache[table[3], 2, 0, 5] = np.inf
    p.b.value_cache[table[90], 1, 0, 5] = np.inf
    p.b.value_cache[table[90], 2, 0, 6] = -np.inf
    p.b.value_cache[table[110], 3, 0, 7] = np.nan
    attend = Attention(array, p)
    want = attend(p.whole)[0]
    assert (want[0][..., 5] == np.inf).all()
    assert (want[0][..., 6] == -np.inf).all()
    assert np.isnan(want[0][..., 7]).all()
    assert np.isfinite(np.delete(want[0], [5, 6, 7], axis=-1)).all()
    for i in range(10):
        assert_same(attend([(0, 2090 + i, 2091 + i)])[0], (want[0][i : i + 1], want[1][:, i : i + 1]), f"{i}")


def test_tables_must_not_be_wider_than_the_sums() -> None:
    b = inputs.batch(np.random.default_rng(0), [(1, 20)], decode=True)
    tables = np.zeros((1, (1 << 19) + 1), np.int32)
    out = inputs.outputs(b)[0]
    with pytest.raises(
        NotImplementedError, match="block_tables: with batch_invariant a row may hold 8388608 tokens at most"
    ):
        pykv.paged_attention(out, b.query, b.key_cache, b.value_cache, tables, b.seq_lens, batch_invariant=True)
