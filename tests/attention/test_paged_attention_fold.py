"""KV heads side by side, which kernels may take in pairs as one head of twice the size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.inputs import KINDS, Batch, Sizes
from attention.test_paged_attention import check, rng
from attention.test_paged_attention_served import LONG_SHARES, begins, check_many, times
from libraries import Library
from tolerance import assert_attention

pytestmark = pytest.mark.of_cuda_kernels

LENS = [(1, n) for n in (1, 15, 33, 64, 400, 129, 700, 16)]
OPTIONS = ["none", "scales", "sinks", "softcap", "alibi_slopes", "window", "lengths"]


def sizes_of(kind: str) -> list[int]:
    return [64, 80, 96, 112, 120, 40, 72] if kind == "auto" else [64, 48, 96, 112]


def batch(
    kind: str, head_size: int, group: int, kv_heads: int, room: int, dtype: str, seen_from: Sequence[int] = ()
) -> Batch:
    sizes = Sizes(group * kv_heads, kv_heads, head_size)
    return inputs.batch(
        rng(head_size + group), LENS, sizes, kind=kind, dtype=dtype, room=room, decode=True, begins=seen_from
    )


def scales_of_heads(kind: str, kv_heads: int) -> dict[str, Any]:
    per_head = np.linspace(0.5, 1.4, kv_heads, dtype=np.float32)
    return inputs.scales(kind, per_head, per_head[::-1].copy())


@pytest.mark.parametrize(("kind", "head_size"), [(k, n) for k in KINDS for n in sizes_of(k)])
@pytest.mark.parametrize("group", [1, 3, 4, 5, 8, 9])
def test_pairs(array: Library, kind: str, head_size: int, group: int) -> None:
    """Short tables or long ones; four heads make two pairs, two make one, six an odd number of pairs."""
    for kv_heads in (4, 2, 6):
        turn = (kv_heads // 2 + group // 3) % 2
        check(array, batch(kind, head_size, group, kv_heads, turn * 10_000, ("bfloat16", "float16")[turn]))


@pytest.mark.parametrize(("kind", "head_size"), [(k, n) for k in ("auto", "fp8_e4m3") for n in sizes_of(k)])
@pytest.mark.parametrize("group", [1, 4, 5])
def test_pairs_of_many_sequences(array: Library, kind: str, head_size: int, group: int) -> None:
    """All blocks share them; of four heads, which are two pairs of 16 bits, a block has both."""
    for kv_heads, dtype in ((4, "bfloat16"), (6, "float16")):
        check_many(array, batch(kind, head_size, group, kv_heads, 10_000, dtype), 12)


@pytest.mark.parametrize("head_size", [80, 120])
def test_long_shares_of_pairs(array: Library, head_size: int) -> None:
    """Each of few pairs, or two of them together, have a line of blocks of their own."""
    for kv_heads in (2, 8):
        b = inputs.batch(rng(), [(1, n) for n in LONG_SHARES], Sizes(8, kv_heads, head_size), room=10_000, decode=True)
        check_many(array, b, 40)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("kind", "head_size"), [("fp8_e4m3", 64), ("int8", 64), ("auto", 64), ("auto", 96)])
def test_options(array: Library, kind: str, head_size: int, option: str) -> None:
    kv_heads, group = 4, 2
    per_query_head = np.geomspace(0.01, 2, kv_heads * group, dtype=np.float32)
    options = {
        "none": {},
        "scales": scales_of_heads(kind, kv_heads),
        "sinks": {"sinks": per_query_head},
        "softcap": {"softcap": 3.0},
        "alibi_slopes": {"alibi_slopes": per_query_head},
        "window": {"window": 50},
        "lengths": {},
    }[option]
    seen_from = begins(LENS, 50) if option == "window" else ()
    for room in (0, 10_000):
        b = batch(kind, head_size, group, kv_heads, room, "bfloat16", seen_from)
        if option == "lengths":
            b = b.changed(seq_lens=np.zeros_like(b.seq_lens))
        check(array, b.changed(options=b.options | options))


def check_elsewhere(
    array: Library, b: Batch, want: np.ndarray, mine: np.ndarray, *, is_seen: bool, count: int = 1
) -> None:
    """Of so many such batches: all but `mine` is as wanted; what is no number is seen there, if it has to be."""
    many, mine = times(b, count), np.tile(mine, (count, 1, 1))
    out = array.output(inputs.outputs(many)[0])
    inputs.run(array, many, out)
    got = array.numpy(out).copy()
    if is_seen:
        assert not np.isfinite(got[mine].astype(np.float32)).any()
    assert_attention(np.where(mine, 0, got), np.where(mine, 0, np.tile(want, (count, 1, 1))))


@pytest.mark.parametrize("cache", ["key", "value"])
@pytest.mark.parametrize("head", [0, 1, 3])
@pytest.mark.parametrize(
    ("kind", "head_size", "group", "number"),
    [
        ("fp8_e4m3", 64, 3, np.nan),
        ("fp8_e5m2", 64, 8, np.nan),
        ("fp8_e5m2", 48, 4, np.inf),
        ("auto", 64, 4, np.nan),
        ("auto", 64, 8, np.inf),
        ("auto", 96, 4, np.inf),
        ("auto", 120, 1, np.nan),
    ],
)
def test_what_is_no_number_stays_with_its_head(
    array: Library, kind: str, head_size: int, group: int, number: float, head: int, cache: str
) -> None:
    long, token, element = 4, 237, 5  # of the sequence of 400 tokens
    for room, count in ((0, 1), (10_000, 1), (10_000, 12)):
        b = batch(kind, head_size, group, 4, room, "bfloat16")
        want, _ = inputs.expected(b)
        elements = (b.key_cache if cache == "key" else b.value_cache).view(inputs.ONE_BYTE.get(kind, b.query.dtype))
        elements[b.block_tables[long, token // 16], token % 16, head, element] = number
        mine = np.zeros(want.shape, bool)  # where the number may be seen
        mine[long, head * group : (head + 1) * group, slice(None) if cache == "key" else element] = True
        check_elsewhere(array, b, want, mine, is_seen=cache == "value" or np.isnan(number), count=count)


SEVERAL = [(4, 4), (5, 3), (8, 2), (4, 8), (8, 3), (1, 17), (20, 1)]  # heads in a group, query tokens


def several_tokens(kind: str, group: int, tokens: Sequence[int], kv_heads: int, dtype: str = "bfloat16") -> Batch:
    lens = [(n, max(n, context)) for n, context in zip(tokens, (1, 63, 64, 65, 129, 700, 0, 300), strict=True)]
    sizes = Sizes(group * kv_heads, kv_heads, 64)
    b = inputs.batch(rng(group + kv_heads), lens, sizes, kind=kind, dtype=dtype, room=10_000)
    return b.changed(options=scales_of_heads(kind, kv_heads))


@pytest.mark.parametrize("kind", inputs.ONE_BYTE)
@pytest.mark.parametrize(("group", "tokens"), SEVERAL)
def test_several_tokens(array: Library, kind: str, group: int, tokens: int) -> None:
    for kv_heads, dtype in ((2, "float16"), (4, "bfloat16"), (6, "bfloat16")):
        b = several_tokens(kind, group, (tokens,) * 8, kv_heads, dtype)
        check(array, b)
        check_many(array, b, 5)


@pytest.mark.parametrize("kind", inputs.ONE_BYTE)
@pytest.mark.parametrize("group", [4, 5, 8])
def test_one_token_of_many_sequences(array: Library, kind: str, group: int) -> None:
    """More than eight columns of a pair go where several tokens go."""
    for kv_heads, dtype in ((2, "float16"), (6, "bfloat16")):
        b = batch(kind, 64, group, kv_heads, 10_000, dtype)
        check_many(array, b.changed(options=scales_of_heads(kind, kv_heads)), 20)


@pytest.mark.parametrize("tokens", [4, 8])
def test_queries_of_several_tokens_far_apart(array: Library, tokens: int) -> None:
    """Two heads in a tile, of which the queries of one are so much smaller that they have a scale of their own."""
    b = several_tokens("fp8_e4m3", 4, (tokens,) * 8, 4)
    small = np.arange(16) // 4 % 2 == 1
    query = inputs.scaled_query(b, np.where(small, 2.0**-17, 1))
    for scale in (0.1, 0.1 * 2.0**17):
        check(array, b.changed(query=query, options=b.options | {"scale": scale}))


@pytest.mark.parametrize("tokens", [4, 8])
def test_long_shares_of_several_tokens(array: Library, tokens: int) -> None:
    """Each of few pairs has a line of blocks of its own."""
    lens = [(tokens, n) for n in LONG_SHARES]
    b = inputs.batch(rng(), lens, Sizes(16, 4, 64), kind="fp8_e4m3", room=10_000)
    check_many(array, b.changed(options=scales_of_heads("fp8_e4m3", 4)), 32)


@pytest.mark.parametrize("group", [4, 8])
@pytest.mark.parametrize(
    "options",
    [
        {"sinks": np.linspace(-2, 3, 32, dtype=np.float32)},
        {"softcap": 3.0},
        {"alibi_slopes": np.geomspace(0.01, 2, 32, dtype=np.float32)},
        {"window": 50},
        {"causal": False},
        {"scale": -0.1},
    ],
    ids=str,
)
def test_options_of_several_tokens(array: Library, options: dict[str, Any], group: int) -> None:
    for tokens in ((4,) * 8, (2, 1, 4, 3, 1, 2, 4, 0), (1, 1, 9, 2, 1, 30, 1, 1)):
        b = several_tokens("fp8_e4m3", group, tokens, 4)
        only = {k: v[: 4 * group] if isinstance(v, np.ndarray) else v for k, v in options.items()}
        check(array, b.changed(options=b.options | only))


@pytest.mark.parametrize("cache", ["key", "value"])
@pytest.mark.parametrize("head", [0, 3])
@pytest.mark.parametrize("tokens", [4, 8])
def test_what_is_no_number_among_several_tokens(array: Library, tokens: int, head: int, cache: str) -> None:
    long, token, element, group = 5, 237, 5, 4
    b = several_tokens("fp8_e4m3", group, (tokens,) * 8, 4)
    want, _ = inputs.expected(b)
    elements = (b.key_cache if cache == "key" else b.value_cache).view(inputs.ONE_BYTE["fp8_e4m3"])
    elements[b.block_tables[long, token // 16], token % 16, head, element] = np.nan
    mine = np.zeros(want.shape, bool)  # where the number may be seen
    rows = slice(long * tokens, (long + 1) * tokens)
    mine[rows, head * group : (head + 1) * group, slice(None) if cache == "key" else element] = True
    check_elsewhere(array, b, want, mine, is_seen=True)
