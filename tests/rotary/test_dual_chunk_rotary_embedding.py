from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rotary import reference
from rows import FLOATS, assert_rounded_once, name_of, padded, random

import pykv

CHUNK, LOCAL = 32, 9

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
styles = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])


def positions_of_copies(positions, chunk, local):
    stride = chunk - local
    own = positions % stride
    return [
        own,
        np.minimum(own + stride, chunk),
        np.full_like(own, min(2 * stride - 1, chunk)),
        own + stride,
        own + chunk,
    ]


def check(array, positions, query, key, cache, is_neox, *, offsets=None, alignment=(0, 0, 0), out=None):
    tokens, heads, head_size = query.shape
    out = np.full((tokens, 5 * heads, head_size), np.nan, query.dtype) if out is None else out
    made_out = array.output(out, offset=alignment[0])
    made_query = array.input(query, offset=alignment[1])
    made_key = None if key is None else array.output(key, offset=alignment[2])
    pykv.dual_chunk_rotary_embedding(
        made_out,
        array.input(positions),
        made_query,
        made_key,
        head_size,
        array.input(cache),
        is_neox,
        CHUNK,
        LOCAL,
        None if offsets is None else array.input(offsets),
    )
    where = positions_of_copies(positions if offsets is None else positions + offsets, CHUNK, LOCAL)
    result = array.numpy(made_out).reshape(tokens, 5, heads, head_size)
    for k, at in enumerate(where):
        assert_rounded_once(result[:, k], reference.rotary_embedding(at, query, cache, is_neox), atol=2e-6)
    if key is not None:
        expected = reference.rotary_embedding(where[0], key, cache, is_neox)
        assert_rounded_once(array.numpy(made_key), expected, atol=2e-6)


@dtypes
@styles
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(128, 128), (64, 32), (80, 40), (33, 14), (8, 0)])
def test_dimensions(array, dtype, is_neox, index, head_size, rotary_dim):
    positions = np.random.default_rng(0).integers(0, 500, 40).astype(index)
    query, key = random((40, 6, head_size), dtype), random((40, 2, head_size), dtype, 1)
    cache = reference.cos_sin_cache(2 * CHUNK, rotary_dim, dtype)
    check(array, positions, query, key, cache, is_neox)
    check(array, positions, query, None, cache, is_neox, offsets=positions[::-1].copy())


@dtypes
@styles
@pytest.mark.parametrize("alignment", [(0, 0, 0), (1, 0, 0)], ids=["aligned", "shifted"])
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(128, 128), (128, 64), (96, 96)])
def test_many_tokens(array, dtype, is_neox, alignment, head_size, rotary_dim):
    """More than caches should be filled with."""
    positions = np.random.default_rng(0).integers(0, 500, 600)
    query = random((600, 8, head_size), dtype)
    cache = reference.cos_sin_cache(2 * CHUNK, rotary_dim, dtype)
    check(array, positions, query, None, cache, is_neox, alignment=alignment)


@given(
    dtype=st.sampled_from(FLOATS),
    cache_dtype=st.sampled_from(FLOATS),
    is_neox=st.booleans(),
    tokens=st.integers(0, 9),
    heads=st.tuples(st.integers(0, 4), st.integers(0, 3)),
    half=st.integers(0, 40),
    rest=st.integers(0, 20),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 9)),
    alignment=st.tuples(*[st.integers(0, 9)] * 3),
)
def test_any_width_stride_and_alignment(
    array, dtype, cache_dtype, is_neox, tokens, heads, half, rest, padding, alignment
):
    head_size = max(1, 2 * half + rest)
    positions = np.random.default_rng(0).integers(0, 500, tokens)
    query, key = (random((tokens, n, head_size), dtype, n) for n in heads)
    cache = reference.cos_sin_cache(2 * CHUNK, 2 * half, cache_dtype)
    out = padded(np.zeros((tokens, 5 * heads[0], head_size), dtype), *padding)
    check(array, positions, padded(query, *padding), key, cache, is_neox, alignment=alignment, out=out)


def test_flat_heads(array):
    positions, cache = np.arange(30), reference.cos_sin_cache(2 * CHUNK, 16, FLOATS[0])
    query = random((30, 3, 16), FLOATS[0])
    flat, deep = (array.output(np.zeros(shape, np.float32)) for shape in ((30, 240), (30, 15, 16)))
    for out, given_query in ((flat, query.reshape(30, 48)), (deep, query)):
        pykv.dual_chunk_rotary_embedding(
            out, array.input(positions), array.input(given_query), None, 16, array.input(cache), True, CHUNK, LOCAL
        )
    np.testing.assert_array_equal(array.numpy(flat).reshape(30, 15, 16), array.numpy(deep))


@pytest.mark.parametrize("bad", [-5, 20])
def test_a_token_that_reaches_beyond_the_cache_is_left_out(array, bad):
    positions = np.array([1, bad, 3])
    query, key = random((3, 2, 16), FLOATS[0]), random((3, 1, 16), FLOATS[0])
    out, made_key = array.output(np.full((3, 10, 16), 7, np.float32)), array.output(key)
    cache = array.input(reference.cos_sin_cache(CHUNK + 20, 16, FLOATS[0]))
    made_positions, made_query = array.input(positions), array.input(query)
    with array.reports(r"dual_chunk_rotary_embedding: positions: -?\d+ is out of range \[0, 52\)"):
        pykv.dual_chunk_rotary_embedding(out, made_positions, made_query, made_key, 16, cache, True, CHUNK, LOCAL)
    assert ((array.numpy(out) == 7).all(axis=(1, 2)) == [False, True, False]).all()
    np.testing.assert_array_equal(array.numpy(made_key)[1], key[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"local": 32}, "local_size: must lie between 0 and chunk_size = 32, got 32"),
        ({"local": -1}, "local_size: must lie between 0 and chunk_size = 32, got -1"),
        ({"out": (5, 9, 16)}, r"query_out: must have 5 times the heads of query, 2, got shape \[5, 9, 16\]"),
        ({"out": (4, 10, 16)}, "query_out: dimension 0 must be that of positions, 5"),
        ({"positions": (5, 1)}, "positions: must have 1 dimension"),
        ({"offsets": (4,)}, "offsets: dimension 0 must equal num_tokens = 5"),
        ({"head_size": 0}, "head_size: must be positive, got 0"),
    ],
)
def test_what_does_not_fit_is_named(array, change, message):
    shapes = {"out": (5, 10, 16), "positions": (5,), "query": (5, 2, 16), "offsets": (5,)} | change
    made = {k: array.output(np.zeros(shapes[k], np.int32 if k in ("positions", "offsets") else np.float32))
            for k in ("out", "positions", "query", "offsets")}  # fmt: skip
    with pytest.raises(ValueError, match=f"dual_chunk_rotary_embedding: {message}"):
        pykv.dual_chunk_rotary_embedding(
            made["out"],
            made["positions"],
            made["query"],
            None,
            change.get("head_size", 16),
            array.input(np.zeros((64, 16), np.float32)),
            True,
            CHUNK,
            change.get("local", LOCAL),
            made["offsets"],
        )
