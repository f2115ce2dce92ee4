"""mrope and batched_rotary_embedding: other ways to the angles of the same kernel."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rotary import reference
from rows import FLOATS, assert_rounded_once, name_of, padded, random

import pykv

MAX_POSITION = 61

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
styles = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])


def axes_of(sections, interleaved):
    """The axis of each frequency."""
    if not interleaved:
        return np.repeat(np.arange(len(sections)), sections)
    axes = []
    for i in range(sum(sections)):
        axis = i % len(sections)
        axes.append(axis if i < len(sections) * sections[axis] else 0)
    return np.array(axes, int)


def mixed_cache(positions, cache, sections, interleaved):
    """A table of its own row for each token: every frequency from the row of its axis."""
    half = cache.shape[1] // 2
    rows = np.moveaxis(cache[positions], 0, -1)  # [..., rotary_dim, axis]
    axes = np.concatenate([axes_of(sections, interleaved)] * 2) if half else np.zeros(0, int)
    mixed = np.take_along_axis(rows, axes.reshape((1,) * (rows.ndim - 2) + (-1, 1)), -1)[..., 0]
    return mixed.reshape(positions[0].size, cache.shape[1])


def check(array, positions, query, key, cache, is_neox, sections, interleaved, *, offsets=(0, 0, 0), given=None):
    made = [array.output(query, offset=offsets[0]), array.output(key, offset=offsets[1])]
    pykv.mrope(
        array.input(positions),
        *made,
        query.shape[-1],
        array.input(cache, offset=offsets[2]),
        is_neox,
        sections if given is None else given,
        interleaved,
    )
    table = mixed_cache(positions, cache, sections, interleaved)
    rows = np.arange(len(table)).reshape(positions.shape[1:])
    for result, given_heads in zip(made, (query, key), strict=True):
        expected = reference.rotary_embedding(rows, given_heads, table, is_neox)
        assert_rounded_once(array.numpy(result), expected, atol=2e-6)


@dtypes
@styles
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("head_size", "sections", "interleaved"),
    [
        (128, (16, 24, 24), False),
        (128, (24, 20, 20), True),
        (128, (11, 11, 10), True),
        (64, (8, 12, 12), False),
        (80, (10, 30), False),
        (96, (8, 16, 8, 16), False),
        (40, (3, 9, 7), True),
        (40, (0, 19, 0), False),
        (32, (16,), False),
    ],
    ids=str,
)
def test_sections(array, dtype, is_neox, index, head_size, sections, interleaved):
    positions = np.random.default_rng(1).integers(0, MAX_POSITION, (len(sections), 23)).astype(index)
    query, key = random((23, 12, head_size), dtype), random((23, 2, head_size), dtype, 1)
    cache = reference.cos_sin_cache(MAX_POSITION, 2 * sum(sections), dtype)
    check(array, positions, query, key, cache, is_neox, sections, interleaved)


@styles
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_sections_may_be_an_array(array, is_neox, interleaved, index):
    positions = np.random.default_rng(1).integers(0, MAX_POSITION, (3, 23))
    query, key = random((23, 4, 64), FLOATS[1]), random((23, 2, 64), FLOATS[1], 1)
    cache, sections = reference.cos_sin_cache(MAX_POSITION, 64, FLOATS[1]), (12, 11, 9)
    for own in (np.array(sections, index), array.input(np.array(sections, index))):
        check(array, positions, query, key, cache, is_neox, sections, interleaved, given=own)


@dtypes
@styles
def test_many_tokens_in_a_batch(array, dtype, is_neox):
    positions = np.random.default_rng(1).integers(0, MAX_POSITION, (3, 4, 200))
    query, key = random((4, 200, 16, 128), dtype), random((4, 200, 4, 128), dtype, 1)
    cache = reference.cos_sin_cache(MAX_POSITION, 128, np.dtype(np.float32))
    check(array, positions, query, key, cache, is_neox, (16, 24, 24), False)


@dtypes
@styles
@pytest.mark.parametrize("sections", [(50, 50, 51), (301, 2, 250)])
def test_more_frequencies_than_threads_of_a_block(array, dtype, is_neox, sections):
    """Odd ones, of which a thread takes one at a time."""
    size = 2 * sum(sections)
    positions = np.random.default_rng(1).integers(0, MAX_POSITION, (3, 3))
    query, key = random((3, 2, size), dtype), random((3, 1, size), dtype, 1)
    cache = reference.cos_sin_cache(MAX_POSITION, size, np.dtype(np.float32))
    check(array, positions, query, key, cache, is_neox, sections, False)


@given(
    dtype=st.sampled_from(FLOATS),
    cache_dtype=st.sampled_from(FLOATS),
    is_neox=st.booleans(),
    interleaved=st.booleans(),
    tokens=st.integers(0, 9),
    heads=st.tuples(st.integers(0, 5), st.integers(0, 3)),
    sections=st.lists(st.integers(0, 20), min_size=1, max_size=4),
    rest=st.integers(0, 9),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 9)),
    offsets=st.tuples(*[st.integers(0, 9)] * 3),
)
def test_any_width_stride_and_alignment(
    array, dtype, cache_dtype, is_neox, interleaved, tokens, heads, sections, rest, padding, offsets
):
    head_size = max(1, 2 * sum(sections) + rest)
    positions = np.random.default_rng(1).integers(0, MAX_POSITION, (len(sections), tokens))
    query, key = (random((tokens, n, head_size), dtype, n) for n in heads)
    cache = reference.cos_sin_cache(MAX_POSITION, 2 * sum(sections), cache_dtype)
    check(array, positions, padded(query, *padding), key, cache, is_neox, tuple(sections), interleaved, offsets=offsets)


@dtypes
def test_one_position_for_all_axes_is_plain_rope(array, dtype):
    positions, cache = np.arange(7), reference.cos_sin_cache(MAX_POSITION, 64, dtype)
    heads = random((7, 3, 64), dtype)
    plain, once, thrice = (array.output(heads) for _ in range(3))
    pykv.rotary_embedding(array.input(positions), plain, None, 64, array.input(cache), True)
    pykv.mrope(array.input(positions), once, None, 64, array.input(cache), True, [8, 12, 12])
    pykv.mrope(array.input(np.stack([positions] * 3)), thrice, None, 64, array.input(cache), True, [8, 12, 12], True)
    np.testing.assert_array_equal(array.numpy(once), array.numpy(plain))
    np.testing.assert_array_equal(array.numpy(thrice), array.numpy(plain))


@styles
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("bad", [-1, MAX_POSITION, 2**40])
def test_a_position_outside_is_reported_and_its_token_left_alone(array, is_neox, axis, bad):
    positions = np.random.default_rng(1).integers(0, MAX_POSITION, (3, 20))
    positions[axis, 9] = bad
    heads = random((20, 3, 32), FLOATS[1])
    made, given_positions = array.output(heads), array.input(positions)
    cache = reference.cos_sin_cache(MAX_POSITION, 32, FLOATS[1])
    made_cache = array.input(cache)
    with array.reports(rf"mrope: positions: {bad} is out of range \[0, {MAX_POSITION}\)"):
        pykv.mrope(given_positions, made, None, 32, made_cache, is_neox, [4, 6, 6])
    result, rest = array.numpy(made), np.delete(np.arange(20), 9)
    np.testing.assert_array_equal(result[9], heads[9])
    assert (result[rest] != heads[rest]).any(axis=(1, 2)).all()


@pytest.mark.parametrize(
    ("positions", "sections", "message"),
    [
        ((3, 5), [4, 6, 5], "mrope_section: must add up to rotary_dim / 2 = 16, got 15"),
        ((3, 5), [4, 6, 7], "mrope_section: must add up to rotary_dim / 2 = 16, got 7 in section 2"),
        ((3, 5), [4, -6, 18], "mrope_section: must add up to rotary_dim / 2 = 16, got -6 in section 1"),
        ((3, 5), [4, 6.5, 6], r"mrope_section: must be integers that fit int64, got \[4, 6.5, 6\]"),
        ((3, 5), [4, 6, 2**63], "mrope_section: must be integers that fit int64"),
        ((3, 5), "xy", "mrope_section: must be integers that fit int64, got 'xy'"),
        ((5, 5), [4, 3, 3, 3, 3], r"mrope_section: must have 1 to 4 sections, got shape \[5\]"),
        ((2, 5), [4, 6, 6], r"positions: dimension 0 must be the number of sections, 3, got shape \[2, 5\]"),
        ((3, 1, 5, 1), [4, 6, 6], "positions: must have 1 to 3 dimensions"),
        ((3, 6), [4, 6, 6], r"query: dimension 0 must be that of positions, 6, got shape \[5, 6, 32\]"),
    ],
)
def test_what_does_not_fit_is_named(array, positions, sections, message):
    query, cache = array.output(np.zeros((5, 6, 32), np.float32)), array.input(np.zeros((8, 32), np.float32))
    with pytest.raises((TypeError, ValueError), match=f"mrope: {message}"):
        pykv.mrope(array.input(np.zeros(positions, np.int32)), query, None, 32, cache, True, sections)


@dtypes
@styles
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("lead", [(30,), (5, 6)], ids=name_of)
def test_tables_one_below_the_other(array, dtype, is_neox, index, lead):
    tables = [reference.cos_sin_cache(n, 48, dtype, base) for n, base in ((20, 1e4), (33, 5e5), (11, 100.0))]
    starts = np.array([0, 20, 53])
    rng = np.random.default_rng(3)
    table = rng.integers(0, 3, lead)
    positions = rng.integers(0, 11, lead).astype(index)
    query, key = random((*lead, 4, 64), dtype), random((*lead, 2, 64), dtype, 1)
    made = [array.output(query), array.output(key)]
    pykv.batched_rotary_embedding(
        array.input(positions),
        *made,
        64,
        array.input(np.concatenate(tables)),
        is_neox,
        48,
        array.input(starts[table].reshape(-1).astype(index)),
    )
    for result, given_heads in zip(made, (query, key), strict=True):
        expected = np.empty(given_heads.shape)
        for k in range(3):
            expected[table == k] = reference.rotary_embedding(
                positions[table == k], given_heads[table == k], tables[k], is_neox
            )
        assert_rounded_once(array.numpy(result), expected, atol=2e-6)


@pytest.mark.parametrize(("position", "offset"), [(3, 5), (7, 1), (-4, 3), (2**62, 2**62), (2**63 - 1, 2**63 - 1)])
def test_a_row_outside_all_tables_is_reported(array, position, offset):
    heads = random((2, 3, 16), FLOATS[0])
    made, cache = array.output(heads), array.input(reference.cos_sin_cache(8, 16, FLOATS[0]))
    positions, offsets = array.input(np.array([1, position])), array.input(np.array([2, offset]))
    with array.reports(r"batched_rotary_embedding: positions \+ cos_sin_cache_offsets: -?\d+ is out of range \[0, 8\)"):
        pykv.batched_rotary_embedding(positions, made, None, 16, cache, True, 16, offsets)
    np.testing.assert_array_equal(array.numpy(made)[1], heads[1])


def test_offsets_that_do_not_fit_are_named(array):
    heads, cache = array.output(np.zeros((5, 2, 16), np.float32)), array.input(np.zeros((8, 16), np.float32))
    positions = array.input(np.zeros(5, np.int32))
    with pytest.raises(ValueError, match=r"cos_sin_cache_offsets: dimension 0 must equal num_tokens = 5, got shape"):
        pykv.batched_rotary_embedding(positions, heads, None, 16, cache, True, 16, array.input(np.zeros(4, np.int32)))
    with pytest.raises(ValueError, match="rot_dim: must be the width of cos_sin_cache, 16, got 8"):
        pykv.batched_rotary_embedding(positions, heads, None, 16, cache, True, 8, positions)
