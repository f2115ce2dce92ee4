"""The two entries with vLLM's signatures: paged_attention_v1 and paged_attention_v2."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import inputs, reference
from attention.inputs import KINDS, Batch, Sizes
from attention.reference import DENSE, BlockSparse
from cache.inputs import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from libraries import Library
from tolerance import assert_attention

import pykv

LENGTHS = (1, 15, 16, 17, 0, 130, 600)
versions = pytest.mark.parametrize("version", ["v1", "v2"])


def batch(
    lengths: tuple[int, ...] = LENGTHS, sizes: Sizes | None = None, *, layout: str = "packed", **kwargs: Any
) -> Batch:
    lens = [(1, n) for n in lengths]
    return inputs.batch(np.random.default_rng(0), lens, sizes or Sizes(), layout=layout, decode=True, **kwargs)


def run(array: Library, b: Batch, version: str, out: Any, sparse: BlockSparse = DENSE, **changes: Any) -> None:
    tokens, heads, head_size = b.query.shape
    kv_heads = b.key_cache.shape[1] if b.layout.packed else b.key_cache.shape[2]
    arguments = {
        "num_kv_heads": kv_heads,
        "scale": 0.1,
        "block_tables": array.input(b.block_tables),
        "seq_lens": array.input(b.seq_lens),
        "block_size": reference.block_size_of(b.key_cache),
        "max_seq_len": int(b.seq_lens.max(initial=0)),
        "alibi_slopes": None,
        "kv_cache_dtype": b.kind,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "tp_rank": sparse.tp_rank,
        "blocksparse_local_blocks": sparse.local_blocks,
        "blocksparse_vert_stride": sparse.vert_stride,
        "blocksparse_block_size": sparse.block_size,
        "blocksparse_head_sliding_step": sparse.head_sliding_step,
    }
    for name, value in {**b.options, **changes}.items():
        arguments[name] = array.input(value) if isinstance(value, np.ndarray) else value
    rest = (array.input(b.query), *inputs.caches(array, b), *arguments.values())
    if version == "v1":
        pykv.paged_attention_v1(out, *rest)
        return
    parts = -(-arguments["max_seq_len"] // 512)
    scratch = np.zeros((tokens, heads, parts), np.float32)
    tmp = np.zeros((tokens, heads, parts, head_size), b.query.dtype)
    pykv.paged_attention_v2(out, array.output(scratch), array.output(scratch), array.output(tmp), *rest)


def check(array: Library, b: Batch, version: str, sparse: BlockSparse = DENSE) -> None:
    out = array.output(inputs.outputs(b)[0])
    run(array, b, version, out, sparse)
    want, _ = inputs.expected(b, **{"scale": 0.1, **b.options}, epsilon=1e-6, sparse=sparse)
    assert_attention(array.numpy(out), want)


@versions
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["packed", "packed, halves of one memory", "NHD", "HND"])
def test_layouts(array: Library, layout: str, kind: str, dtype: str, version: str) -> None:
    b = batch(layout=layout, kind=kind, dtype=dtype)
    check(array, b.changed(options=inputs.scales(kind, 0.6, 1.7)), version)


@versions
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts_nvfp4(array: Library, layout: str, dtype: str, version: str) -> None:
    b = batch(layout=layout, kind="nvfp4", dtype=dtype, sizes=Sizes(head_size=128))
    check(array, b.changed(options=inputs.scales("nvfp4", 0.6, np.array([1.7, 0.2], np.float32))), version)


@versions
@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("head_size", [32, 64, 80, 96, 112, 120, 128, 192, 256])
def test_sizes_of_vllm(array: Library, head_size: int, block_size: int, version: str) -> None:
    check(array, batch(sizes=Sizes(4, 2, head_size, block_size)), version)


@versions
@pytest.mark.parametrize("layout", ["packed", "NHD"])
def test_hundreds_of_sequences(array: Library, layout: str, version: str) -> None:
    lengths = np.random.default_rng(1).integers(0, 290, 300).tolist()
    check(array, batch(tuple(lengths), layout=layout), version)


@versions
def test_alibi(array: Library, version: str) -> None:
    b = batch(dtype="float32")
    b.options = {"alibi_slopes": np.geomspace(0.001, 1, 8, dtype=np.float32)}
    check(array, b, version)


@versions
@given(data=st.data())
def test_block_sparse_with_everything_else(array: Library, version: str, data: st.DataObject) -> None:
    draw = data.draw
    page = draw(st.sampled_from([8, 16, 32]), "block_size")
    sparse = BlockSparse(
        tp_rank=draw(st.integers(0, 3), "tp_rank"),
        local_blocks=draw(st.integers(0, 4), "local_blocks"),
        vert_stride=draw(st.integers(2, 7), "vert_stride"),
        block_size=page * draw(st.integers(1, 4), "pages in a sparsity block"),
        head_sliding_step=draw(st.integers(-3, 3), "head_sliding_step"),
    )
    kind = draw(st.sampled_from([*KINDS, "nvfp4"]), "kind")
    layout = draw(st.sampled_from(["NHD", "HND"] if kind == "nvfp4" else ["packed", "NHD", "HND"]), "layout")
    kv_heads, group = draw(st.integers(1, 3), "kv_heads"), draw(st.integers(1, 32), "group")
    lengths = tuple(
        draw(st.lists(st.integers(0, 700), min_size=1, max_size=max(1, 60 // (kv_heads * group))), "lengths")
    )
    head_size, dtype = (
        draw(st.sampled_from([64, 128, 256] if kind == "nvfp4" else [32, 64, 120, 128, 256]), "head_size"),
        draw(st.sampled_from(list(DTYPES)), "dtype"),
    )
    if kind != "auto" and layout == "packed" and head_size % 16:
        head_size = 112
    b = batch(lengths, Sizes(kv_heads * group, kv_heads, head_size, page), layout=layout, kind=kind, dtype=dtype)
    if draw(st.booleans(), "alibi_slopes"):
        b.options["alibi_slopes"] = np.geomspace(0.001, 1, kv_heads * group, dtype=np.float32)
    check(array, b, version, sparse)


@versions
def test_unseen_blocks_are_not_read(array: Library, version: str) -> None:
    """Of 13 sparsity blocks of one page only the 3 last are seen: the others may name any block."""
    sparse = BlockSparse(local_blocks=3, vert_stride=1000, block_size=16)
    b = batch((200,))
    want, _ = inputs.expected(b, scale=0.1, sparse=sparse)
    b.key_cache[b.block_tables[0, :10]] = np.nan
    b.value_cache[b.block_tables[0, :10]] = np.nan
    out = array.output(inputs.outputs(b)[0])
    run(array, b, version, out, sparse)
    assert_attention(array.numpy(out), want)


def hide(b: Batch, sparse: BlockSparse) -> Batch:
    """What no head of a group sees is poison now."""
    heads, kv_heads = b.query.shape[1], b.key_cache.shape[1 if b.layout.packed else 2]
    page, group = reference.block_size_of(b.key_cache), heads // kv_heads
    for s, n in enumerate(int(n) for n in b.seq_lens):
        seen = np.array([sparse.seen(n, page, h, heads, kv_heads)[::page] for h in range(heads)])
        seen = seen.reshape(kv_heads, group, -1).any(axis=1)
        for kv_head, i in np.argwhere(~seen):
            at = b.block_tables[s, i]
            for cache in (b.key_cache, b.value_cache):
                if b.kind != "nvfp4":
                    poison = np.array(127 if b.kind == "int8" else np.nan).astype(cache.dtype)
                    cache[(at, kv_head) if b.layout.packed else (at, slice(None), kv_head)] = poison
                elif not seen[:, i].any():
                    cache[at] = 0x7F
    return b


@versions
@pytest.mark.parametrize(
    ("sparse", "sizes", "layout", "kind", "dtype"),
    [  # all heads see the same, ...
        (BlockSparse(0, 1, 4, 16, 0), Sizes(8, 2, 128), "NHD", "auto", "bfloat16"),
        (BlockSparse(3, 2, 8, 64, 0), Sizes(16, 1, 64), "packed", "auto", "float16"),
        (BlockSparse(1, 0, 3, 8, 0), Sizes(5, 1, 128, 8), "HND", "fp8_e4m3", "bfloat16"),
        (BlockSparse(2, 4, 5, 128, 0), Sizes(12, 1, 256, 32), "packed", "int8", "float16"),
        (BlockSparse(0, 1, 2, 32, 0), Sizes(4, 1, 128), "HND", "nvfp4", "bfloat16"),
        (BlockSparse(1, 3, 4, 48, 8), Sizes(8, 2, 64), "packed", "fp8_e5m2", "bfloat16"),
        (BlockSparse(0, 0, 7, 16, 0), Sizes(8, 1, 80), "NHD", "auto", "float16"),
        (BlockSparse(-2, 1, 3, 4096, 0), Sizes(8, 2, 64), "NHD", "auto", "float16"),
        (BlockSparse(0, 1, 16, 64, 0), Sizes(2, 2, 128, 64), "packed", "fp8_e4m3", "float16"),
        # all of a group, ...
        (BlockSparse(0, 1, 4, 16, -1), Sizes(8, 2, 128), "packed", "fp8_e4m3", "bfloat16"),
        (BlockSparse(3, 0, 8, 64, -3), Sizes(9, 3, 64), "NHD", "int8", "float16"),
        (BlockSparse(-1, 1, 3, 16, -1), Sizes(8, 4, 128), "packed", "auto", "bfloat16"),
        (BlockSparse(1, 2, 3, 24, -2), Sizes(16, 2, 120, 8), "HND", "auto", "bfloat16"),
        (BlockSparse(2, 1, 5, 128, -1), Sizes(12, 3, 128, 32), "packed", "auto", "float16"),
        (BlockSparse(1, 4, 6, 32, -4), Sizes(8, 2, 128), "NHD", "nvfp4", "bfloat16"),
        (BlockSparse(0, 1, 6, 16, 5), Sizes(4, 4, 128), "HND", "fp8_e5m2", "bfloat16"),
        (BlockSparse(0, 1, 4, 32, 0), Sizes(24, 1, 128), "packed", "fp8_e4m3", "float16"),
        (BlockSparse(1, 2, 6, 64, -1), Sizes(40, 1, 64), "NHD", "auto", "bfloat16"),
        (BlockSparse(0, 1, 3, 16, -1), Sizes(34, 2, 80), "HND", "auto", "float16"),
        # and each head something else
        (BlockSparse(0, 1, 4, 16, 1), Sizes(8, 2, 128), "NHD", "auto", "bfloat16"),
        (BlockSparse(2, 0, 5, 64, 2), Sizes(6, 1, 64), "packed", "fp8_e4m3", "float16"),
        (BlockSparse(1, 2, 8, 32, 3), Sizes(16, 1, 128), "HND", "nvfp4", "bfloat16"),
    ],
    ids=str,
)
def test_block_sparse(
    array: Library, sparse: BlockSparse, sizes: Sizes, layout: str, kind: str, dtype: str, version: str
) -> None:
    """Alone, with few others and with many; long ones among them."""
    lengths = (1, 5000, 64, 0, 700) if version == "v1" else (130, 2049, 15, 3000)
    for some in (lengths, lengths[1:2]):
        check(array, hide(batch(some, sizes, layout=layout, kind=kind, dtype=dtype), sparse), version, sparse)
    few = hide(batch((17, 300, 128, 515), sizes, layout=layout, kind=kind, dtype=dtype), sparse)
    many = few.changed(
        query=np.tile(few.query, (70, 1, 1)),
        block_tables=np.tile(few.block_tables, (70, 1)),
        seq_lens=np.tile(few.seq_lens, 70),
    )
    out = array.output(inputs.outputs(many)[0])
    run(array, many, version, out, sparse)
    want, _ = inputs.expected(few, **{"scale": 0.1, **few.options}, epsilon=1e-6, sparse=sparse)
    assert_attention(array.numpy(out), np.tile(want, (70, 1, 1)))


@versions
@pytest.mark.parametrize("step", [0, -1, 1])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_bad_ids_of_seen_blocks_are_reported(array: Library, layout: str, step: int, version: str) -> None:
    sparse = BlockSparse(1, 1, 4, 32, step)
    b = hide(batch((40, 1000, 300), Sizes(8, 2, 128), layout=layout), sparse)
    seen = sparse.seen(1000, 16, 3, 8, 2)[::16]
    blocks = b.key_cache.shape[0]
    for i in np.flatnonzero(seen)[[0, 5, -1]]:
        one = b.changed(block_tables=b.block_tables.copy())
        one.block_tables[1, i] = blocks
        out = array.output(inputs.outputs(one)[0])
        with array.reports(rf"block_tables: {blocks} is out of range \[0, {blocks}\)"):
            run(array, one, version, out, sparse)
        want, _ = inputs.expected(one, scale=0.1, epsilon=1e-6, sparse=sparse)
        assert_attention(array.numpy(out), want)


@versions
def test_a_sequence_that_sees_nothing_gives_zeros(array: Library, version: str) -> None:
    b = batch((64, 0, 33))
    sparse = BlockSparse(vert_stride=1000, block_size=16)
    assert (inputs.expected(b, sparse=sparse)[0] == 0).all()
    check(array, b, version, sparse)


@versions
def test_no_sequences(array: Library, version: str) -> None:
    check(array, batch(()), version)


@versions
def test_a_length_above_max_seq_len_is_clamped(array: Library, version: str) -> None:
    b = batch((40, 100))
    out = array.output(inputs.outputs(b)[0])
    with array.reports(r"seq_lens: 100 is out of range \[0, 65\)"):
        run(array, b, version, out, max_seq_len=64)
    want, _ = inputs.expected(b.changed(seq_lens=np.array([40, 64], np.int32)), scale=0.1)
    assert_attention(array.numpy(out), want)


@versions
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 4}, "num_kv_heads: must be that of key_cache, 2, got 4"),
        ({"block_size": 32}, "block_size: must be that of key_cache, 16, got 32"),
        ({"max_seq_len": -1}, "max_seq_len: must not be negative, got -1"),
        (
            {"blocksparse_vert_stride": 2, "blocksparse_block_size": 24},
            "blocksparse_block_size: must be a multiple of block_size = 16, got 24",
        ),
        (
            {"blocksparse_vert_stride": 2, "blocksparse_block_size": 16, "tp_rank": 2**63 - 1},
            "tp_rank: must lie between",
        ),
        (
            {"blocksparse_vert_stride": 2, "blocksparse_block_size": 16, "blocksparse_head_sliding_step": -(2**63)},
            "blocksparse_head_sliding_step: is too large, got -9223372036854775808",
        ),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], message: str, version: str) -> None:
    from libraries import Numpy

    b = batch()
    out = inputs.outputs(b)[0]
    with pytest.raises(ValueError, match=message):
        run(Numpy(), b, version, out, **changes)
    assert (out == inputs.SENTINEL).all()


def test_scratch_of_v2_has_a_shape() -> None:
    b = batch()
    out, scratch, tmp = inputs.outputs(b)[0], np.zeros((7, 8, 2), np.float32), np.zeros((7, 8, 2, 64), b.query.dtype)
    good = (scratch, scratch.copy(), tmp)
    for i, name in enumerate(("exp_sum", "max_logits", "tmp_out")):
        arrays = [x[:, :, :1] if k == i else x for k, x in enumerate(good)]
        with pytest.raises(ValueError, match=rf"paged_attention_v2: {name}: .*ceil\(max_seq_len / 512\) = 2"):
            pykv.paged_attention_v2(
                out, *arrays, b.query, b.key_cache, b.value_cache, 2, 0.1, b.block_tables, b.seq_lens, 16, 600,
                None, "auto", 1.0, 1.0,
            )  # fmt: skip
    with pytest.raises(ValueError, match=r"exp_sum: .*ceil\(max_seq_len / 512\) = 18014398509481984"):
        pykv.paged_attention_v2(
            out, *good, b.query, b.key_cache, b.value_cache, 2, 0.1, b.block_tables, b.seq_lens, 16, 2**63 - 1,
            None, "auto", 1.0, 1.0,
        )  # fmt: skip
