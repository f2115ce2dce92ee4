"""What comes after a head of which each rank has some columns."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, assert_rounded_once, name_of, padded, random
from sampling import reference

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def finish(array, x, *columns, offset=0, **more):
    logits = array.output(x, offset=offset)
    pykv.finish_logits_(logits, *columns, **more)
    return array.numpy(logits)


@pytest.mark.parametrize("soft_cap", [1e4, 1e30, 1e300, np.inf])
def test_a_large_cap_changes_nothing(array, soft_cap):
    """The arguments of tanh are small, where it must not lose what they are."""
    x = random((3, 40), np.dtype(np.float32))
    np.testing.assert_allclose(finish(array, x, soft_cap=soft_cap), x, rtol=1e-6)


@dtypes
@pytest.mark.parametrize("columns", [(), (0,), (1000,), (700, 100, 50), (700, 300), (0, 3, 997), (700, 0, 299)])
@pytest.mark.parametrize("more", [{}, {"soft_cap": 30.0}, {"scale": 0.25}, {"soft_cap": 5.0, "scale": -2.0}])
def test_columns_of_any_kind(array, dtype, columns, more):
    x = (10 * random((3, 1000), np.dtype(np.float32))).astype(dtype)
    result = finish(array, x, *columns, **more)
    expected = reference.finish_logits(x, *columns, **more)
    assert_rounded_once(result, expected, atol=1e-6 * more.get("soft_cap", 0) * abs(more.get("scale", 1)))
    if not more:
        there = np.isfinite(expected)
        np.testing.assert_array_equal(result[there], x[there])


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 4),
    sizes=st.tuples(*[st.integers(0, 60)] * 4),
    padding=st.integers(0, 9),
    offset=st.integers(0, 9),
    capped=st.booleans(),
)
def test_any_shard(array, dtype, rows, sizes, padding, offset, capped):
    x, more = padded(random((rows, sum(sizes)), dtype), padding), {"soft_cap": 2.0} if capped else {}
    result = finish(array, x, *sizes[:3], offset=offset, **more)
    assert_rounded_once(result, reference.finish_logits(x, *sizes[:3], **more), atol=2e-6)


def test_special_logits(array):
    x = np.array([[np.nan, np.inf, -np.inf, 0, -0.0, 1e30]], np.float32)
    result = finish(array, x, soft_cap=4.0)
    np.testing.assert_allclose(result, [[np.nan, 4, -4, 0, 0, 4]])


def in_order(rng, shape, dtype):
    """Values with ties in which each list descends, and indices that ascend among equal ones."""
    values = np.sort(rng.integers(-20, 20, shape), -1)[..., ::-1].astype(dtype)
    return np.tile(np.arange(shape[-1], dtype=np.int32), (*shape[:-1], 1)), np.ascontiguousarray(values)


def merge(array, indices, values, k, first=None, offset=0):
    found = array.output(np.full((values.shape[1], k), 7, np.int32))
    kept = array.output(np.zeros((values.shape[1], k), values.dtype))
    shards = array.input(indices, offset=offset), array.input(values, offset=offset)
    pykv.merge_top_k(found, *shards, k, None if first is None else array.input(first), values=kept)
    return array.numpy(found), array.numpy(kept)


@given(
    dtype=st.sampled_from(FLOATS),
    shards=st.integers(0, 9) | st.just(70),
    rows=st.integers(0, 3),
    n=st.integers(0, 40),
    k=st.integers(1, 300),
    gap=st.integers(0, 5),
    offset=st.integers(0, 3),
)
def test_any_lists(array, dtype, shards, rows, n, k, gap, offset):
    """Also empty ones, with fewer entries than room for them."""
    rng = np.random.default_rng(n)
    indices, values = in_order(rng, (shards, rows, n), dtype)
    lengths = rng.integers(0, n + 1, (shards, rows, 1))
    indices = np.where(np.arange(n) < lengths, indices, -1).astype(np.int32)
    first = np.arange(shards) * (n + gap)
    tokens, kept = merge(array, indices, values, k, first, offset)
    expected = reference.merge_top_k(indices, values, k, first)
    np.testing.assert_array_equal(tokens, expected[0])
    np.testing.assert_array_equal(kept.astype(np.float64), expected[1])


@dtypes
def test_special_values_in_lists(array, dtype):
    """NaN first, infinity of either sign, and zeros of either sign as equals."""
    values = np.array([[[np.nan, np.inf, 0.0, -np.inf]], [[np.inf, -0.0, -np.inf, -np.inf]]], dtype)
    indices = np.array([[[3, 1, 0, 2]], [[3, 1, 0, 2]]], np.int32)
    tokens, _ = merge(array, indices, values, 9, np.array([0, 4], np.int32))
    assert tokens.tolist() == [[3, 1, 7, 0, 5, 2, 4, 6, -1]]


@dtypes
def test_shards_find_what_the_whole_has(array, dtype):
    x, k = random((5, 1200), dtype), 50
    parts = np.split(x, 4, axis=1)
    indices, values = np.zeros((4, 5, k), np.int32), np.zeros((4, 5, k), dtype)
    for shard, part in enumerate(parts):
        found, kept = array.output(indices[shard]), array.output(values[shard])
        pykv.top_k_per_row(found, array.input(np.ascontiguousarray(part)), k, sorted=True, values=kept)
        indices[shard], values[shard] = array.numpy(found), array.numpy(kept)
    tokens, _ = merge(array, indices, values, k, np.arange(4) * 300)
    np.testing.assert_array_equal(tokens, reference.top_k_per_row(x, k, ordered=True))


def test_scores_of_shards_give_the_token_of_all(array):
    x, seeds = random((6, 900), FLOATS[0]), np.arange(6)
    options = {"seeds": array.input(seeds), "temperature": 0.8}
    whole = array.output(np.zeros(6, np.int32))
    pykv.sample(whole, array.input(x), **options)
    tokens, scores = np.zeros((3, 6, 1), np.int32), np.zeros((3, 6, 1), np.float32)
    for shard in range(3):
        token, score = array.output(tokens[shard, :, 0]), array.output(scores[shard, :, 0])
        part = array.input(np.ascontiguousarray(x[:, 300 * shard : 300 * (shard + 1)]))
        pykv.sample(token, part, first_token=300 * shard, scores=score, **options)
        tokens[shard, :, 0], scores[shard, :, 0] = array.numpy(token), array.numpy(score)
    assert merge(array, tokens, scores, 1)[0][:, 0].tolist() == array.numpy(whole).tolist()


@pytest.mark.parametrize("first", [2**31 - 3, 2**40, 2**63 - 1, -(2**63), -9])
def test_tokens_that_an_int32_does_not_hold(array, first):
    """They are left out, with the others of their shard behind them."""
    values = np.array([[[3, 2, 1]], [[4, 2, 1]]], np.float32)
    indices = np.array([[[0, 1, 2]], [[5, 3, 4]]], np.int32)
    found = array.output(np.zeros((1, 6), np.int32))
    first_tokens = array.input(np.array([0, first]))
    with array.reports(r"merge_top_k: shard_indices \+ first_tokens: .* is out of range \[0, 2147483648\)"):
        pykv.merge_top_k(found, array.input(indices), array.input(values), 6, first_tokens)
    assert array.numpy(found)[0, :3].tolist() == [0, 1, 2]
    assert (array.numpy(found) >= -1).all()


def test_lists_out_of_order(array):
    values = np.array([[[3, 2, 1, 5]], [[4, 3, 2, 1]]], np.float32)
    indices = np.array([[[0, 1, 2, 3]], [[0, 1, 2, 3]]], np.int32)
    found = array.output(np.zeros((1, 8), np.int32))
    with array.reports(r"merge_top_k: entries in order in shard_values: 3 is out of range \[0, 3\)"):
        pykv.merge_top_k(found, array.input(indices), array.input(values), 8)
    assert set(array.numpy(found).reshape(-1).tolist()) <= {-1, 0, 1, 2, 3}


def test_wrong_arguments():
    x = np.zeros((2, 10), np.float32)
    for arguments, options, error, message in [
        ((x[0],), {}, ValueError, "logits: "),
        ((x.astype(np.int32),), {}, TypeError, "logits: "),
        ((x, 11), {}, ValueError, "logits: "),
        ((x, 5, 6), {}, ValueError, "logits: "),
        ((x, 5, 1, 5), {}, ValueError, "logits: "),
        ((x, 5, -1), {}, ValueError, "logits: "),
        ((x,), {"soft_cap": 0.0}, ValueError, "soft_cap: must be positive"),
        ((x,), {"soft_cap": 1e-50}, ValueError, "soft_cap: must be positive in fp32"),
    ]:
        with pytest.raises(error, match=f"finish_logits_: {message}"):
            pykv.finish_logits_(*arguments, **options)
    found, indices, values = np.zeros((2, 3), np.int32), np.zeros((4, 2, 5), np.int32), np.zeros((4, 2, 5), np.float32)
    for arguments, options, error, message in [
        ((found, indices, values, 0), {}, ValueError, "k: "),
        ((found, indices, values, 4), {}, ValueError, "indices: "),
        ((found, indices, values[:3], 3), {}, ValueError, "shard_values: "),
        ((found, indices.astype(np.int64), values, 3), {}, TypeError, "shard_indices: "),
        ((found, indices, values, 3, np.zeros(3, np.int64)), {}, ValueError, "first_tokens: "),
        ((found, indices, values, 3), {"values": found}, TypeError, "values: "),
    ]:
        with pytest.raises(error, match=f"merge_top_k: {message}"):
            pykv.merge_top_k(*arguments, **options)


def test_more_results_than_int32_counts_are_refused():
    far = pykv.from_pointer(1 << 40, (1, 2**32 + 1), "int32", "cpu")
    shards = np.zeros((1, 1, 3), np.int32), np.zeros((1, 1, 3), np.float32)
    with pytest.raises(NotImplementedError, match=r"merge_top_k: indices: 2\^31 results and more of a row"):
        pykv.merge_top_k(far, *shards, 2**32 + 1)
