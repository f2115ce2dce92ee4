from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from attention import inputs, reference
from attention.inputs import KINDS, LAYOUTS, NVFP4_LAYOUTS, Batch, Sizes
from cache import inputs as cache_inputs
from cache.inputs import DTYPES, PACKED, TOKENS
from hypothesis import given
from hypothesis import strategies as st
from libraries import Library
from tolerance import assert_attention, assert_close

import pykv

# (queries, length): decode, speculative decode, the first and a later chunk of a prompt, a whole one, one that waits
MIXED = [(1, 77), (3, 20), (17, 17), (5, 64), (33, 70), (0, 9), (1, 1)]


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def check(array: Library, b: Batch) -> None:
    """Output and lse against the reference; rows of no sequence must stay as they were."""
    out, lse = (array.output(x) for x in inputs.outputs(b))
    inputs.run(array, b, out, lse)
    want_out, want_lse = inputs.expected(b)
    assert_attention(array.numpy(out), want_out)
    assert_close(array.numpy(lse), want_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(array: Library, layout: str, kind: str, dtype: str) -> None:
    b = inputs.batch(rng(), MIXED, layout=layout, dtype=dtype, kind=kind, extra_rows=2)
    check(array, b.changed(options=inputs.scales(kind, 0.7, 1.3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", NVFP4_LAYOUTS)
def test_layouts_nvfp4(array: Library, layout: str, dtype: str) -> None:
    per_head = np.array([0.7, 1.1], np.float32)
    for head_size, block_size in ((64, 16), (128, 4), (192, 12), (256, 64)):
        sizes = Sizes(head_size=head_size, block_size=block_size)
        b = inputs.batch(rng(), MIXED, sizes, layout=layout, dtype=dtype, kind="nvfp4", extra_rows=2)
        check(array, b.changed(options={"k_scale": per_head, "v_scale": 1.3}))


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("sizes", [Sizes(8, 4, 64), Sizes(16, 8, 128)])
def test_long_shares_of_decoding(array: Library, sizes: Sizes, layout: str, kind: str) -> None:
    """Many sequences on the pages of a few: so much to do that each KV head may get blocks of its own."""
    times = 40
    lens = [(1, n) for n in (3000, 2500, 64, 1, 0, 1777)]
    few = inputs.batch(rng(), lens, sizes, layout=layout, kind=kind, decode=True, room=20_000)
    many = few.changed(
        query=np.tile(few.query, (times, 1, 1)),
        block_tables=np.tile(few.block_tables, (times, 1)),
        seq_lens=np.tile(few.seq_lens, times),
    )
    want, want_lse = inputs.expected(few)
    bits = []
    for _ in range(2):
        out, lse = (array.output(x) for x in inputs.outputs(many))
        inputs.run(array, many, out, lse)
        got = array.numpy(out)
        assert_attention(got, np.tile(want, (times, 1, 1)))
        assert_close(array.numpy(lse), np.tile(want_lse, (1, times)), atol=2e-5, rtol=1e-5)
        bits.append(got.tobytes())
    assert bits[0] == bits[1]


@pytest.mark.parametrize("kind", ["int8", "nvfp4"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_what_reshape_and_cache_wrote(array: Library, layout: str, kind: str) -> None:
    """Keys and values go through the op that writes caches, and come out of attention as the reference reads them."""
    lens = [(1, n) for n in (77, 20, 1, 130)]
    b = inputs.batch(rng(), lens, Sizes(head_size=128), layout=layout, kind=kind, decode=True)
    tokens = [(table[i // 16], i % 16) for table, n in zip(b.block_tables, b.seq_lens, strict=True) for i in range(n)]
    blocks, offsets = np.array(tokens).T
    key, value = (rng(seed).standard_normal((len(tokens), 2, 128), np.float32) for seed in (1, 2))
    scales = {"int8": (1 / 32, 1 / 30), "nvfp4": (0.01, 0.02)}[kind]
    b.options = {"k_scale": scales[0], "v_scale": scales[1]}

    memories = [array.output(m) for m in b.memories]
    caches = cache_inputs.view(memories[0], b.layout.key), cache_inputs.view(memories[-1], b.layout.value)
    slots = array.input((blocks * 16 + offsets).astype(np.int64))
    pykv.reshape_and_cache_flash(array.input(key), array.input(value), *caches, slots, kind, *scales)
    b.memories = [array.numpy(m) for m in memories]
    check(array, b)
    for i, (cache, written, scale) in enumerate(zip((b.key_cache, b.value_cache), (key, value), scales, strict=True)):
        read = (reference.nvfp4_values(cache, swizzled=i == 1) if kind == "nvfp4" else cache) * scale
        error = np.abs(read[blocks, offsets] - written)
        assert error.mean() < {"int8": 0.01, "nvfp4": 0.1}[kind]


@pytest.mark.of_cuda_kernels
@pytest.mark.parametrize("room", [0, 10000], ids=["", "long tables"])  # which decide how the work is divided
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_decode_without_query_bounds(array: Library, layout: str, kind: str, dtype: str, room: int) -> None:
    lens = [(1, n) for n in (1, 16, 17, 64, 0, 65, 1300)]
    for sizes in (
        Sizes(),
        Sizes(12, 3, 128),
        Sizes(6, 2, 128),  # up to four heads in a group, up to eight and up to sixteen are kernels of their own
        Sizes(12, 2, 128),
        Sizes(16, 1, 112),
        Sizes(8, 2, 256, 8),
        Sizes(5, 5, 80, 32),
        Sizes(16, 4, 128),  # four KV heads may go together
        Sizes(8, 8, 64),
    ):
        b = inputs.batch(rng(), lens, sizes, layout=layout, kind=kind, dtype=dtype, decode=True, room=room)
        check(array, b)


@pytest.mark.parametrize("room", [0, 10000, 40000], ids=["", "long table", "very long table"])
@pytest.mark.parametrize("kind", [*KINDS, "nvfp4"])
@pytest.mark.parametrize("length", [1, 40, 2000])
def test_decode_of_one_sequence(array: Library, length: int, kind: str, room: int) -> None:
    b = inputs.batch(rng(), [(1, length)], Sizes(8, 2, 128), kind=kind, dtype="bfloat16", decode=True, room=room)
    check(array, b)


@pytest.mark.of_cuda_kernels
@pytest.mark.parametrize("sequences", [70, 110, 150])  # blocks of several sizes
@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
def test_decode_of_many_short_sequences(array: Library, kind: str, layout: str, sequences: int) -> None:
    lens = [(1, int(n)) for n in rng().integers(0, 300, sequences)]
    b = inputs.batch(rng(), lens, Sizes(8, 4, 128), layout=layout, kind=kind, dtype="bfloat16", decode=True)
    check(array, b)


@pytest.mark.parametrize("room", [0, 10000], ids=["", "long tables"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decode_nvfp4(array: Library, dtype: str, room: int) -> None:
    lens = [(1, n) for n in (1, 16, 17, 64, 0, 65, 1300)]
    for layout in ("NHD", "HND"):
        for sizes in (Sizes(), Sizes(16, 4, 128), Sizes(12, 1, 192, 8), Sizes(16, 1, 256)):
            b = inputs.batch(rng(), lens, sizes, layout=layout, kind="nvfp4", dtype=dtype, decode=True, room=room)
            check(array, b)


@pytest.mark.parametrize("room", [0, 10000], ids=["", "long tables"])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_options_of_decode(array: Library, layout: str, room: int) -> None:
    options = {
        "softcap": 5.0,
        "alibi_slopes": np.linspace(0.01, 0.5, 16, dtype=np.float32),
        "sinks": np.linspace(-4, 4, 16, dtype=np.float32),
        "scale": 0.3,
    }
    for kind, sizes in itertools.product(("auto", "fp8_e4m3"), (Sizes(16, 2), Sizes(16, 4, 128))):
        b = inputs.batch(rng(), [(1, n) for n in (33, 700, 1)], sizes, layout=layout, kind=kind, decode=True, room=room)
        check(array, b.changed(options=options))


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize("queries", [2, 5, 9, 16])
def test_a_few_queries_each(array: Library, queries: int, layout: str, kind: str) -> None:
    for head_size in (64, 128):
        lens = [(queries, n) for n in (16, 17, 64, 300, 1100)]
        check(array, inputs.batch(rng(), lens, Sizes(8, 2, head_size), layout=layout, kind=kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [1, 7, 8, 24, 32, 40, 80, 96, 112, 120, 128, 130, 192, 256, 576, 1024])
def test_head_sizes(array: Library, head_size: int, dtype: str) -> None:
    check(array, inputs.batch(rng(), [(1, 50), (6, 19)], Sizes(4, 2, head_size), dtype=dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_size", [16, 80, 112, 128, 256])
def test_head_sizes_packed(array: Library, head_size: int, kind: str) -> None:
    for dtype in DTYPES:
        check(
            array,
            inputs.batch(rng(), [(1, 50), (6, 19)], Sizes(4, 2, head_size), dtype=dtype, kind=kind, layout="packed"),
        )


@pytest.mark.parametrize(
    ("heads", "kv_heads"), [(1, 1), (5, 5), (4, 2), (6, 2), (8, 1), (14, 2), (40, 8), (64, 8), (71, 1)]
)
def test_groups_of_heads(array: Library, heads: int, kv_heads: int) -> None:
    for dtype, kind in (("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "fp8_e4m3")):
        check(array, inputs.batch(rng(), [(1, 70), (3, 40)], Sizes(heads, kv_heads, 32), dtype=dtype, kind=kind))


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 20, 32, 64, 128, 256])
def test_block_sizes(array: Library, block_size: int, layout: str) -> None:
    check(array, inputs.batch(rng(), MIXED, Sizes(block_size=block_size), layout=layout, dtype="float16"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [16, 32, 64, 128])  # by which chunks of values lie side by side
def test_pages_of_packed_caches(array: Library, block_size: int, kind: str) -> None:
    for head_size in (64, 128, 256):
        sizes = Sizes(4, 2, head_size, block_size)
        check(array, inputs.batch(rng(), MIXED, sizes, layout="packed", kind=kind))
        decode = [(1, n) for n in (1, 40, 300, 1000)]
        check(array, inputs.batch(rng(), decode, sizes, layout="packed", kind=kind, decode=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_keys_chunk_by_chunk(array: Library, block_size: int, dtype: str) -> None:
    """In each chunk, blocks side by side: three tokens on in memory may be three tokens on in the sequence, and those
    between them elsewhere."""
    b = inputs.batch(rng(), [(1, 128)], Sizes(4, 2, 64, block_size), layout="packed", dtype=dtype, spare_blocks=0)
    table = rng(1).permutation(128 // block_size)
    first = [0, 9, 5, 3, 2, 7]
    b.block_tables[0, :-1] = [*first, *(i for i in table if i not in first)]
    keys = np.ascontiguousarray(b.key_cache.transpose(1, 2, 0, 3, 4)).transpose(2, 0, 1, 3, 4)
    out = array.output(inputs.outputs(b)[0])
    arrays = [array.input(x) for x in (b.query, keys, b.value_cache, b.block_tables, b.seq_lens)]
    pykv.paged_attention(out, *arrays)
    assert_attention(array.numpy(out), inputs.expected(b)[0])


OPTIONS: list[dict[str, Any]] = [
    {"causal": False},
    {"scale": 0.3},
    {"scale": -0.1},
    {"softcap": 5.0},
    {"alibi_slopes": np.linspace(0.01, 0.5, 8, dtype=np.float32)},
    {"sinks": np.linspace(-4, 4, 8, dtype=np.float32)},
    {"sinks": np.full(8, -np.inf, np.float32)},
    *({"window": n, "causal": causal} for n in (1, 2, 16, 31, 64, 1000) for causal in (True, False)),
]


@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize(
    "options", OPTIONS, ids=lambda o: ", ".join(f"{k} {v}" for k, v in o.items() if np.isscalar(v))
)
def test_options(array: Library, options: dict[str, Any], layout: str) -> None:
    for dtype in ("float32", "bfloat16"):
        check(array, inputs.batch(rng(), MIXED, layout=layout, dtype=dtype).changed(options=options))
    some = [(7, n) for n in (7, 64, 90, 300)]
    check(array, inputs.batch(rng(), some, layout=layout, dtype="bfloat16").changed(options=options))


@pytest.mark.parametrize("sizes", ["odd", "usual"])
@given(data=st.data())
def test_everything_at_once(array: Library, sizes: str, data: st.DataObject) -> None:
    """``usual`` sizes are those that engines have, all of which the quickest kernels take."""
    draw, usual = data.draw, sizes == "usual"
    kind = draw(st.sampled_from([*KINDS, "nvfp4"]), "kind")
    nvfp4 = kind == "nvfp4"
    layout = draw(st.sampled_from(NVFP4_LAYOUTS if nvfp4 else LAYOUTS), "layout")
    kv_heads, group = (
        draw(st.integers(1, 2 if usual else 4), "kv_heads"),
        draw(st.integers(1, 32 if usual else 9), "group"),
    )
    heads = kv_heads * group
    head_sizes = [64, 80, 96, 112, 128, 192, 256] if usual else [16, 64, 80, 128]
    if nvfp4:
        head_sizes = [64, 128, 192, 256]
    some = usual or nvfp4 or layout in PACKED
    head_size = draw(st.sampled_from(head_sizes) if some else st.integers(1, 70), "head_size")
    queries, longest = (16 if draw(st.booleans(), "speculative") else 1, 400) if usual else (40, 90)
    lengths = st.integers(0, longest).flatmap(lambda n: st.tuples(st.integers(0, min(n, queries)), st.just(n)))
    lens = draw(st.lists(lengths, min_size=1, max_size=max(1, 400 // (heads * queries)) if usual else 5), "lens")
    b = inputs.batch(
        rng(draw(st.integers(0, 99), "seed")),
        lens,
        Sizes(
            heads,
            kv_heads,
            head_size,
            draw(
                st.sampled_from([8, 16, 32, 64, 128] if usual else [4, 8, 48] if nvfp4 else [1, 4, 8, 48]), "block_size"
            ),
        ),
        layout=layout,
        dtype=draw(st.sampled_from(list(DTYPES)), "dtype"),
        kind=kind,
        ids=draw(st.sampled_from([np.int32, np.int64]), "ids"),
        extra_rows=draw(st.integers(0, 2), "extra_rows"),
        as_bytes=kind not in ("auto", "nvfp4") and draw(st.booleans(), "as_bytes"),
    )
    per_head = np.linspace(0.5, 2, kv_heads, dtype=np.float32)
    k_scale = draw(st.sampled_from([0.5, per_head]), "k_scale")
    b.options = inputs.scales(kind, k_scale, draw(st.sampled_from([2.0, per_head[::-1]]), "v_scale"))
    b.options |= {
        name: value
        for name, value in {
            "causal": False,
            "window": draw(st.integers(1, longest + 10), "window"),
            "softcap": 10.0,
            "alibi_slopes": np.linspace(0, 0.2, heads, dtype=np.float32),
            "sinks": np.linspace(-2, 2, heads, dtype=np.float32),
        }.items()
        if draw(st.booleans(), name)
    }
    check(array, b)


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_long_sequences(array: Library, layout: str, kind: str) -> None:
    """Long enough to be split over threads or blocks, at lengths around the multiples where that could happen."""
    lens = [(1, 2047), (1, 2048), (1, 2049), (4, 4500), (1, 9), (1, 8192), (40, 2060)]
    for options in ({}, {"window": 2500}, {"sinks": np.array([0.0, 3.0], np.float32), "softcap": 20.0}):
        b = inputs.batch(rng(), lens, Sizes(2, 1, 64), layout=layout, kind=kind)
        check(array, b.changed(options=b.options | options))


@pytest.mark.parametrize("arrangement", TOKENS[:3])
def test_strides_of_query_and_out(array: Library, arrangement: str) -> None:
    """``out`` and ``lse`` are parts of larger arrays, of which nothing else may change."""
    for dtype in DTYPES:
        b = inputs.batch(rng(), MIXED, dtype=dtype, arrangement=arrangement, extra_rows=1)
        tokens, heads, size = b.query.shape
        room = np.full((tokens, heads + 2, size + 6), inputs.SENTINEL, b.query.dtype)
        lse_room = np.full((tokens, heads + 1), inputs.SENTINEL, np.float32)
        out, lse = array.output(room), array.output(lse_room)
        inputs.run(
            array,
            b,
            cache_inputs.view(out, lambda m: m[:, 1:-1, 3:-3]),
            cache_inputs.view(lse, lambda m: m[:, 1:].swapaxes(0, 1)),
        )
        want_out, want_lse = inputs.expected(b)
        expected, expected_lse = room.astype(np.float64), lse_room.astype(np.float64)
        expected[:, 1:-1, 3:-3], expected_lse[:, 1:] = want_out, want_lse.T
        assert_attention(array.numpy(out), expected)
        assert_close(array.numpy(lse), expected_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_index_arrays_with_strides(array: Library, ids: type) -> None:
    b = inputs.batch(rng(), MIXED, ids=ids)
    assert b.cu_query_lens is not None
    apart = np.zeros((*b.block_tables.shape, 2), ids)
    apart[..., 0] = b.block_tables
    check(
        array,
        b.changed(
            block_tables=apart[..., 0],
            seq_lens=np.repeat(b.seq_lens, 3)[::3],
            cu_query_lens=np.repeat(b.cu_query_lens, 2)[::2],
        ),
    )


def test_lse_is_optional(array: Library) -> None:
    b = inputs.batch(rng(), MIXED)
    out = array.output(inputs.outputs(b)[0])
    inputs.run(array, b, out)
    assert_attention(array.numpy(out), inputs.expected(b)[0])


def test_nothing_to_see(array: Library) -> None:
    """Sequences of length 0, and queries before the first token: zeros and -inf, or the sink."""
    b = inputs.batch(rng(), [(2, 0), (4, 2), (1, 40)], dtype="float32")
    assert np.isneginf(inputs.expected(b)[1][:, :4]).all()
    check(array, b)
    check(array, b.changed(options={"sinks": np.linspace(-1, 1, 8, dtype=np.float32)}))


def test_nothing_to_do(array: Library) -> None:
    for lens in ([], [(0, 30)]):
        check(array, inputs.batch(rng(), lens, extra_rows=3))
        check(array, inputs.batch(rng(), lens))
    check(array, inputs.batch(rng(), [], decode=True))


def test_nan_of_the_cache_comes_out(array: Library) -> None:
    """What a query sees is used as it is: NaN in a value reaches the output of its dimension and no other."""
    b = inputs.batch(rng(), [(1, 40)], dtype="float32", decode=True)
    b.value_cache[b.block_tables[0, 1], 3, 1, 5] = np.nan
    out = array.output(inputs.outputs(b)[0])
    inputs.run(array, b, out)
    nan = np.isnan(array.numpy(out))
    assert nan[0, 4:, 5].all()
    assert nan.sum() == 4


@pytest.mark.parametrize("room", [0, 10000], ids=["", "long tables"])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "fp8_e5m2"])
def test_nan_of_long_sequences_comes_out_alone(array: Library, kind: str, layout: str, room: int) -> None:
    """Where MMAs add up several dimensions of a value, or several blocks share a sequence."""
    lens = [(1, n) for n in (3000, 70, 1, 900)]
    b = inputs.batch(rng(), lens, Sizes(16, 4, 128), layout=layout, kind=kind, dtype="bfloat16", decode=True, room=room)
    clean, _ = inputs.expected(b)
    places = [(0, 2000, 1, 5), (1, 69, 3, 126), (3, 3, 0, 0)]  # sequence, token, KV head, dimension
    for sequence, token, head, d in places:
        block, o = b.block_tables[sequence, token // 16], token % 16
        b.value_cache[(block, o, head, d) if layout == "NHD" else (block, head, d, o)] = np.nan
    out = array.output(inputs.outputs(b)[0])
    inputs.run(array, b, out)
    got = array.numpy(out).astype(np.float64)
    for sequence, _, head, d in places:
        group = slice(4 * head, 4 * head + 4)
        assert np.isnan(got[sequence, group, d]).all()
        got[sequence, group, d] = clean[sequence, group, d]
    assert_attention(got.astype(array.numpy(out).dtype), clean)


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31 - 1, "one too large"])
@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_block_ids_out_of_range_are_masked(array: Library, layout: str, bad: int | str) -> None:
    kinds = [(dtype, "auto") for dtype in DTYPES] + [("bfloat16", "int8")]
    for dtype, kind in kinds if layout == "packed" else [*kinds, ("float16", "nvfp4")]:
        b = inputs.batch(rng(), MIXED, layout=layout, dtype=dtype, kind=kind)
        value = b.key_cache.shape[0] if isinstance(bad, str) else bad
        b.block_tables[0, 2] = b.block_tables[4, 0] = value
        out, lse = (array.output(x) for x in inputs.outputs(b))
        with array.reports(rf"paged_attention: block_tables: {value} is out of range \[0, {b.key_cache.shape[0]}\)"):
            inputs.run(array, b, out, lse)
        want_out, want_lse = inputs.expected(b)
        assert_attention(array.numpy(out), want_out)
        assert_close(array.numpy(lse), want_lse, atol=2e-5, rtol=1e-5)


def test_block_ids_behind_the_length_are_not_read(array: Library) -> None:
    b = inputs.batch(rng(), MIXED)
    b.block_tables[b.block_tables < 0] = 2**30
    check(array, b)


def test_blocks_outside_the_window_are_not_read(array: Library) -> None:
    b = inputs.batch(rng(), [(1, 200), (3, 150)]).changed(options={"window": 20})
    want = inputs.expected(b)
    b.block_tables[:, :8] = 2**30  # no report: the fixture would fail the test
    out, lse = (array.output(x) for x in inputs.outputs(b))
    inputs.run(array, b, out, lse)
    assert_attention(array.numpy(out), want[0])


@pytest.mark.parametrize("length", [-3, 10**6])
def test_lengths_out_of_range_are_clamped(array: Library, length: int) -> None:
    b = inputs.batch(rng(), [(1, 20), (1, 64), (1, 33)], decode=True)
    limit = b.block_tables.shape[1] * 16
    b.block_tables[1, 4] = 0
    key = b.key_cache
    key[0], b.value_cache[0] = 1.0, 2.0  # the row of the table is full: all of it may be seen
    wrong = b.changed(seq_lens=np.array([20, length, 33], np.int32))
    out, lse = (array.output(x) for x in inputs.outputs(b))
    with array.reports(rf"paged_attention: seq_lens: {length} is out of range \[0, {limit + 1}\)"):
        inputs.run(array, wrong, out, lse)
    want_out, want_lse = inputs.expected(b.changed(seq_lens=np.array([20, min(max(length, 0), limit), 33], np.int32)))
    assert_attention(array.numpy(out), want_out)
    assert_close(array.numpy(lse), want_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("bounds", [[0, 5, 3, 9], [0, 2, 4, 10**6], [-4, 2, 3, 9], [2**30, -7, 2**31 - 1, 0]])
def test_query_bounds_out_of_range_stay_inside(array: Library, bounds: list[int]) -> None:
    """Whatever the bounds say, only rows of ``out`` are written, with numbers, and the first bad one is named."""
    b = inputs.batch(rng(), [(3, 20), (3, 30), (3, 40)])
    room = np.full((13, 8, 64), inputs.SENTINEL, b.query.dtype)
    memory = array.output(room)
    out = cache_inputs.view(memory, lambda m: m[2:11])
    with array.reports(r"paged_attention: cu_query_lens: .* is out of range \[0, 10\)"):
        inputs.run(array, b.changed(cu_query_lens=np.array(bounds, np.int32)), out)
    got = array.numpy(memory).astype(np.float32)
    assert (got[:2] == inputs.SENTINEL).all()
    assert (got[11:] == inputs.SENTINEL).all()
    assert np.isfinite(got).all()


def test_the_number_of_threads_changes_nothing() -> None:
    """On the CPU the result is the same to the last bit, and so is that of a sequence by itself."""
    b = inputs.batch(rng(), [(1, 5000), *MIXED], dtype="float32")
    before = pykv.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 8):
            pykv.set_num_threads(threads)
            out, lse = inputs.outputs(b)
            pykv.paged_attention(
                out,
                b.query,
                b.key_cache,
                b.value_cache,
                b.block_tables,
                b.seq_lens,
                cu_query_lens=b.cu_query_lens,
                lse=lse,
            )
            results.append((out, lse))
    finally:
        pykv.set_num_threads(before)
    for out, lse in results[1:]:
        np.testing.assert_array_equal(out, results[0][0])
        np.testing.assert_array_equal(lse, results[0][1])
    alone = np.empty_like(b.query[:1])
    pykv.paged_attention(alone, b.query[:1], b.key_cache, b.value_cache, b.block_tables[:1], b.seq_lens[:1])
    np.testing.assert_array_equal(alone, results[0][0][:1])
