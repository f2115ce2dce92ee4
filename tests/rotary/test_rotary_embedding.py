from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rotary import reference
from rows import FLOATS, assert_rounded_once, name_of, padded, random, turned

import pykv

MAX_POSITION = 97

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
styles = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])


def some_positions(shape, dtype=np.int64, seed=0):
    return np.random.default_rng(seed).integers(0, MAX_POSITION, shape).astype(dtype)


def rotate(array, positions, query, key, cache, is_neox, offset=0, inverse=False, *, head_size=None, offsets=(0, 0, 0)):
    """What NumPy arrays become: query, key."""
    made_query = array.output(query, offset=offsets[0])
    made_key = None if key is None else array.output(key, offset=offsets[1])
    pykv.rotary_embedding(
        array.input(positions),
        made_query,
        made_key,
        query.shape[-1] if head_size is None else head_size,
        array.input(cache, offset=offsets[2]),
        is_neox,
        offset,
        inverse,
    )
    return array.numpy(made_query), None if key is None else array.numpy(made_key)


def check(actual, positions, x, cache, is_neox, offset=0, inverse=False):
    """``actual`` is ``x`` rotated; both with an axis of heads.  What is not rotated has kept its bits."""
    expected = reference.rotary_embedding(positions, x, cache, is_neox, offset, inverse)
    # terms of up to some 5 may cancel
    assert_rounded_once(actual, expected, atol=2e-6)
    rotated = slice(offset, offset + cache.shape[1])
    np.testing.assert_array_equal(np.delete(actual, rotated, axis=-1), np.delete(x, rotated, axis=-1))


# head_size, rotary_dim, offset
DIMS = [
    (64, 64, 0),
    (80, 80, 0),
    (120, 120, 0),
    (128, 128, 0),
    (128, 96, 0),
    (256, 32, 0),
    (256, 256, 0),
    (192, 64, 128),
    (64, 32, 16),
    (72, 40, 8),
    (40, 20, 3),
    (10, 6, 1),
    (3, 2, 0),
    (640, 640, 0),
    (1100, 1090, 5),
]


@dtypes
@styles
@pytest.mark.parametrize("dims", DIMS, ids=name_of)
def test_dimensions(array, dtype, is_neox, dims):
    head_size, rotary_dim, offset = dims
    positions = some_positions(11)
    query, key = random((11, 17, head_size), dtype), random((11, 3, head_size), dtype, 1)
    cache = reference.cos_sin_cache(MAX_POSITION, rotary_dim, dtype)
    rotated_query, rotated_key = rotate(array, positions, query, key, cache, is_neox, offset)
    check(rotated_query, positions, query, cache, is_neox, offset)
    check(rotated_key, positions, key, cache, is_neox, offset)


@styles
@pytest.mark.parametrize(("dtype", "heads", "kv_heads"), [(FLOATS[2], 32, 8), (FLOATS[1], 9, 1), (FLOATS[0], 32, 8)])
@pytest.mark.parametrize("head_size", [128, 120, 66])
def test_many_tokens(array, dtype, is_neox, heads, kv_heads, head_size):
    tokens = 500 if heads == 32 else 2000
    positions = some_positions(tokens)
    query, key = random((tokens, heads, head_size), dtype), random((tokens, kv_heads, head_size), dtype, 1)
    cache = reference.cos_sin_cache(MAX_POSITION, head_size, dtype)
    rotated_query, rotated_key = rotate(array, positions, query, key, cache, is_neox)
    check(rotated_query, positions, query, cache, is_neox)
    check(rotated_key, positions, key, cache, is_neox)


@dtypes
@pytest.mark.parametrize("cache_dtype", FLOATS, ids=name_of)
@styles
def test_the_cache_has_a_dtype_of_its_own(array, dtype, cache_dtype, is_neox):
    positions, query = some_positions(9), random((9, 4, 64), dtype)
    for rotary_dim in (64, 24, 6):
        cache = reference.cos_sin_cache(MAX_POSITION, rotary_dim, cache_dtype)
        check(rotate(array, positions, query, None, cache, is_neox)[0], positions, query, cache, is_neox)


@dtypes
@styles
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("lead", [(13,), (2, 5), (1, 7), (4, 1)], ids=name_of)
@pytest.mark.parametrize("flat", ["query", "key", "both", "neither"])
def test_forms(array, dtype, is_neox, index, lead, flat):
    positions = some_positions(lead, index)
    query, key = random((*lead, 6, 48), dtype), random((*lead, 2, 48), dtype, 1)
    cache = reference.cos_sin_cache(MAX_POSITION, 32, dtype)
    given_query = query.reshape(*lead, -1) if flat in ("query", "both") else query
    given_key = key.reshape(*lead, -1) if flat in ("key", "both") else key
    rotated_query, rotated_key = rotate(array, positions, given_query, given_key, cache, is_neox, head_size=48)
    check(rotated_query.reshape(query.shape), positions, query, cache, is_neox)
    check(rotated_key.reshape(key.shape), positions, key, cache, is_neox)


@dtypes
@styles
def test_strides_of_query_and_key_are_their_own(array, dtype, is_neox):
    positions = some_positions((3, 5))
    query, key = random((3, 5, 4, 64), dtype), random((3, 5, 2, 64), dtype, 1)
    cache = reference.cos_sin_cache(MAX_POSITION, 64, dtype)
    views = [
        (padded(query, 8), padded(key, 3, 0)),
        (padded(query, 1, 2, 1), key),
        (turned(query), padded(key, 16)),
        (query, turned(key)),
    ]
    for view_query, view_key in views:
        rotated_query, rotated_key = rotate(array, positions, view_query, view_key, cache, is_neox)
        check(rotated_query, positions, query, cache, is_neox)
        check(rotated_key, positions, key, cache, is_neox)


@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_strides_of_positions_and_cache(array, index):
    query = random((4, 6, 2, 32), FLOATS[0])
    cache = reference.cos_sin_cache(MAX_POSITION, 32, FLOATS[0])
    plain = some_positions((4, 6), index)
    views = [
        some_positions((4, 12), index)[:, ::2],
        np.ascontiguousarray(plain.T).T,
        np.broadcast_to(np.arange(6, dtype=index), (4, 6)),
        np.broadcast_to(np.arange(4, dtype=index)[:, None], (4, 6)),
    ]
    for positions in views:
        check(rotate(array, positions, query, None, padded(cache, 5), True)[0], positions, query, cache, True)


@dtypes
@styles
def test_query_and_key_of_one_buffer(array, dtype, is_neox):
    if array.name == "interface":
        pytest.skip("its arrays cannot be sliced")
    positions, qkv = some_positions(21), random((21, (8 + 2 + 2) * 64), dtype)
    cache = reference.cos_sin_cache(MAX_POSITION, 64, dtype)
    buffer = array.output(qkv)
    pykv.rotary_embedding(array.input(positions), buffer[:, :512], buffer[:, 512:640], 64, array.input(cache), is_neox)
    result = array.numpy(buffer).reshape(21, 12, 64)
    heads = qkv.reshape(21, 12, 64)
    check(result[:, :10], positions, heads[:, :10], cache, is_neox)
    np.testing.assert_array_equal(result[:, 10:], heads[:, 10:])


@dtypes
@styles
def test_inverse_turns_back(array, dtype, is_neox):
    positions, query = some_positions(11), random((11, 3, 80), dtype)
    cache = reference.cos_sin_cache(MAX_POSITION, 64, FLOATS[0])
    there, _ = rotate(array, positions, query, None, cache, is_neox, 16)
    check(
        rotate(array, positions, there, None, cache, is_neox, 16, True)[0], positions, there, cache, is_neox, 16, True
    )
    back, _ = rotate(array, positions, there, None, cache, is_neox, 16, True)
    step = np.finfo(np.float32).eps * 4 if dtype == np.float32 else 0.02
    np.testing.assert_allclose(back.astype(np.float64), query.astype(np.float64), atol=step)


@dtypes
@styles
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("bad", [MAX_POSITION, -1, 2**31 - 1])
def test_a_position_outside_is_reported_and_its_token_left_alone(array, dtype, is_neox, index, bad):
    positions = some_positions(40, index)
    positions[17] = bad
    query, key = random((40, 4, 64), dtype), random((40, 2, 64), dtype, 1)
    cache = reference.cos_sin_cache(MAX_POSITION, 64, dtype)
    made_query, made_key = array.output(query), array.output(key)
    made_positions, made_cache = array.input(positions), array.input(cache)
    with array.reports(rf"rotary_embedding: positions: {bad} is out of range \[0, {MAX_POSITION}\)"):
        pykv.rotary_embedding(made_positions, made_query, made_key, 64, made_cache, is_neox)
    rest = np.delete(np.arange(40), 17)
    for made, given_heads in ((made_query, query), (made_key, key)):
        result = array.numpy(made)
        np.testing.assert_array_equal(result[17], given_heads[17])
        check(result[rest], positions[rest], given_heads[rest], cache, is_neox)


def test_a_wide_position_is_not_cut_to_32_bits(array):
    positions = np.array([3, 2**32 + 3], np.int64)
    query = array.output(random((2, 1, 8), FLOATS[0]))
    with array.reports(rf"{2**32 + 3} is out of range"):
        pykv.rotary_embedding(
            array.input(positions), query, None, 8, array.input(reference.cos_sin_cache(8, 8, FLOATS[0])), True
        )


@dtypes
@styles
def test_nan_stays_in_its_pair(array, dtype, is_neox):
    query = random((2, 2, 16), dtype)
    query[0, 1, 5] = np.nan
    cache = reference.cos_sin_cache(MAX_POSITION, 16, dtype)
    result, _ = rotate(array, np.array([3, 4]), query, None, cache, is_neox)
    assert np.flatnonzero(np.isnan(result[0, 1])).tolist() == ([5, 13] if is_neox else [4, 5])
    assert np.isnan(result).sum() == 2


@dtypes
@styles
@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF], ids=hex)
def test_nan_has_any_bits(array, dtype, is_neox, bits):
    cache = np.full((8, 16), bits, np.uint32).view(np.float32)
    result, _ = rotate(array, np.array([3, 4]), random((2, 2, 16), dtype), None, cache, is_neox)
    assert np.isnan(result.astype(np.float32)).all()


@given(
    dtype=st.sampled_from(FLOATS),
    cache_dtype=st.sampled_from(FLOATS),
    is_neox=st.booleans(),
    inverse=st.booleans(),
    tokens=st.integers(0, 9),
    heads=st.tuples(st.integers(0, 5), st.integers(0, 3)),
    dims=st.tuples(st.integers(0, 80), st.integers(0, 9), st.integers(0, 9)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 9)),
    offsets=st.tuples(*[st.integers(0, 9)] * 3),
)
def test_any_width_stride_and_alignment(
    array, dtype, cache_dtype, is_neox, inverse, tokens, heads, dims, padding, offsets
):
    half, offset, rest = dims
    head_size = max(1, offset + 2 * half + rest)
    positions = some_positions(tokens)
    query, key = (random((tokens, n, head_size), dtype, n) for n in heads)
    cache = reference.cos_sin_cache(MAX_POSITION, 2 * half, cache_dtype)
    rotated_query, rotated_key = rotate(
        array,
        positions,
        padded(query, *padding),
        key,
        padded(cache, padding[1]),
        is_neox,
        offset,
        inverse,
        offsets=offsets,
    )
    check(rotated_query, positions, query, cache, is_neox, offset, inverse)
    check(rotated_key, positions, key, cache, is_neox, offset, inverse)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": (5, 6, 33)}, ValueError, r"query: dimension 2 must equal head_size = 32, got shape \[5, 6, 33\]"),
        ({"query": (5, 33)}, ValueError, r"query: the last dimension must be a multiple of head_size = 32, got shape"),
        ({"key": (5, 33)}, ValueError, r"key: the last dimension must be a multiple of head_size = 32, got shape"),
        ({"query": (4, 6, 32)}, ValueError, r"query: dimension 0 must be that of positions, 5, got shape \[4, 6, 32\]"),
        ({"key": (4, 6, 32)}, ValueError, r"key: dimension 0 must be that of positions, 5, got shape \[4, 6, 32\]"),
        ({"query": (5,)}, ValueError, r"query: must have 2 to 3 dimensions, got shape \[5\]"),
        ({"query": (5, 1, 6, 32)}, ValueError, r"query: must have 2 to 3 dimensions"),
        ({"positions": (5, 1, 1)}, ValueError, r"positions: must have 1 to 2 dimensions"),
        (
            {"cache": (8, 31)},
            ValueError,
            r"cos_sin_cache: the last dimension holds .* must be even, got shape \[8, 31\]",
        ),
        (
            {"cache": (8, 34)},
            ValueError,
            r"cos_sin_cache: rotary_dim 34 \+ rope_dim_offset 0 must not exceed head_size = 32",
        ),
        ({"offset": 1}, ValueError, r"rotary_dim 32 \+ rope_dim_offset 1 must not exceed"),
        ({"offset": -1}, ValueError, r"rope_dim_offset: must not be negative, got -1"),
        ({"cache": (32,)}, ValueError, r"cos_sin_cache: must have 2 dimensions, got shape \[32\]"),
        ({"head_size": 0}, ValueError, r"head_size: must be positive, got 0"),
        ({"positions_dtype": np.float32}, TypeError, r"positions: dtype must be int64 or int32, got float32"),
        ({"key_dtype": np.float16}, TypeError, r"key: dtype must be that of query, float32, got float16"),
        ({"query_dtype": np.int32}, TypeError, r"query: dtype must be float32 or float16 or bfloat16, got int32"),
        (
            {"cache_dtype": np.int32},
            TypeError,
            r"cos_sin_cache: dtype must be float32 or float16 or bfloat16, got int32",
        ),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    shapes = {"positions": (5,), "query": (5, 6, 32), "key": (5, 2, 32), "cache": (8, 32)} | change
    made = {
        name: np.zeros(shapes[name], shapes.get(f"{name}_dtype", np.int32 if name == "positions" else np.float32))
        for name in ("positions", "query", "key", "cache")
    }
    with pytest.raises(error, match=f"rotary_embedding: .*{message}"):
        pykv.rotary_embedding(
            array.input(made["positions"]),
            array.output(made["query"]),
            array.output(made["key"]),
            change.get("head_size", 32),
            array.input(made["cache"]),
            True,
            change.get("offset", 0),
        )


def test_query_and_key_are_two_arrays(array):
    query = array.output(np.zeros((2, 3, 8), np.float32))
    cache = array.input(np.zeros((4, 8), np.float32))
    with pytest.raises(ValueError, match="key: must not share memory with query"):
        pykv.rotary_embedding(array.input(np.zeros(2, np.int32)), query, query, 8, cache, True)
