from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from norm import reference
from norm.inputs import EPSILON, dtypes
from rows import FLOATS, assert_rounded_once, name_of, padded, random

import pykv

F32 = np.dtype(np.float32)
styles = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gpt-j"])


def expected(qkv, counts, head_dim, q_weight, k_weight, cache, is_neox, positions):
    """All heads in float64, not yet rounded."""
    heads = qkv.reshape(*positions.shape, sum(counts), head_dim)
    exact = heads.astype(np.float64)
    q, k = slice(0, counts[0]), slice(counts[0], counts[0] + counts[1])
    for part, weight in ((q, q_weight), (k, k_weight)):
        normed = reference.rms_norm(heads[..., part, :], weight, EPSILON)
        exact[..., part, :] = rotated(normed, cache, is_neox, positions)
    return exact.reshape(qkv.shape)


def rotated(x, cache, is_neox, positions):
    half = cache.shape[1] // 2
    rows = cache.astype(np.float64)[positions][..., None, :]
    first, second = (slice(half), slice(half, 2 * half)) if is_neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    result = x.copy()
    result[..., first] = x[..., first] * rows[..., :half] - x[..., second] * rows[..., half:]
    result[..., second] = x[..., second] * rows[..., :half] + x[..., first] * rows[..., half:]
    return result


def check(array, qkv, counts, head_dim, q_weight, k_weight, cache, is_neox, positions, offset=0):
    made = array.output(qkv, offset=offset)
    weights = [None if w is None else array.input(w, offset=offset) for w in (q_weight, k_weight)]
    cache_made = array.input(cache, offset=offset)
    pykv.fused_qk_norm_rope(made, *counts, head_dim, EPSILON, *weights, cache_made, is_neox, array.input(positions))
    exact = expected(qkv, counts, head_dim, q_weight, k_weight, cache, is_neox, positions)
    # a rotation is a sum that may cancel
    assert_rounded_once(array.numpy(made), exact, atol=2e-6 * np.abs(exact).max(initial=1))


@dtypes
@styles
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(128, 128), (128, 64), (128, 96), (128, 32), (64, 64), (256, 256), (80, 80), (96, 24), (7, 6), (1, 0), (576, 64)],
)
def test_head_sizes(array, dtype, is_neox, head_dim, rotary_dim):
    counts = 16, 4, 4
    qkv = random((9, sum(counts) * head_dim), dtype)
    weights = random((head_dim,), dtype, 1), random((head_dim,), dtype, 2)
    positions = np.random.default_rng(0).integers(0, 50, 9)
    check(array, qkv, counts, head_dim, *weights, random((50, rotary_dim), dtype, 3), is_neox, positions)


@dtypes
@styles
@pytest.mark.parametrize("cache_dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("given", ["both", "q alone", "none", "in float32"])
def test_weights_and_caches(array, dtype, is_neox, cache_dtype, given):
    kind = F32 if given == "in float32" else dtype
    q_weight = None if given == "none" else random((64,), kind, 1)
    k_weight = random((64,), kind, 2) if given in ("both", "in float32") else None
    qkv, positions = random((2, 3, 6, 64), dtype), np.array([[0, 5, 2], [1, 1, 7]], np.int32)
    check(array, qkv, (3, 2, 1), 64, q_weight, k_weight, random((8, 64), cache_dtype, 3), is_neox, positions)


@given(
    dtype=st.sampled_from(FLOATS),
    tokens=st.integers(0, 7),
    counts=st.tuples(*[st.integers(0, 5)] * 3),
    head_dim=st.integers(1, 200) | st.sampled_from([64, 128, 256]),
    rotary_half=st.integers(0, 100),
    is_neox=st.booleans(),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 9)),
    offset=st.integers(0, 9),
)
def test_any_size_stride_and_alignment(array, dtype, tokens, counts, head_dim, rotary_half, is_neox, padding, offset):
    qkv = padded(random((tokens, sum(counts), head_dim), dtype), *padding)
    cache = random((11, 2 * min(rotary_half, head_dim // 2)), dtype, 3)
    positions = np.random.default_rng(1).integers(0, 11, tokens)
    weights = random((head_dim,), dtype, 1), random((head_dim,), dtype, 2)
    check(array, qkv, counts, head_dim, *weights, cache, is_neox, positions, offset=offset)


@dtypes
def test_a_token_does_not_depend_on_the_others(array, dtype):
    qkv, cache = random((300, 6 * 128), dtype), array.input(random((300, 128), dtype, 1))
    weight = array.input(random((128,), dtype, 2))

    def run(part):
        made = array.output(qkv[part])
        positions = array.input(np.arange(300)[part])
        pykv.fused_qk_norm_rope(made, 3, 2, 1, 128, EPSILON, weight, weight, cache, True, positions)
        return array.numpy(made)

    together = run(slice(None))
    for part in (slice(0, 1), slice(7, 9), slice(40, 300)):
        np.testing.assert_array_equal(run(part), together[part])


def test_a_position_out_of_range_leaves_its_token(array):
    qkv, weight = random((3, 4 * 8), F32), array.input(np.ones(8, np.float32))
    for wrong in (5, -1):
        made = array.output(qkv)
        positions = array.input(np.array([1, wrong, 2]))
        cache = array.input(random((5, 8), F32, 1))
        with array.reports(f"fused_qk_norm_rope: position_ids: {wrong} is out of range"):
            pykv.fused_qk_norm_rope(made, 2, 1, 1, 8, EPSILON, weight, weight, cache, True, positions)
        result = array.numpy(made)
        np.testing.assert_array_equal(result[1], qkv[1])
        assert (result[[0, 2], :24] != qkv[[0, 2], :24]).any(1).all()
        np.testing.assert_array_equal(result[:, 24:], qkv[:, 24:])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_heads_v": 2}, ValueError, r"qkv: must have num_heads_q \+ num_heads_k \+ num_heads_v = 5 heads"),
        ({"num_heads_q": -1}, ValueError, "num_heads_q: must lie between 0 and the 4 heads of qkv, got -1"),
        ({"head_dim": 0}, ValueError, "head_dim: must be positive, got 0"),
        ({"head_dim": 7}, ValueError, "qkv: the last dimension must be a multiple of head_dim = 7"),
        ({"q_weight": np.ones(7, np.float32)}, ValueError, "q_weight: dimension 0 must equal head_dim = 8"),
        ({"k_weight": np.ones(8, np.float16)}, TypeError, "k_weight: dtype must be that of qkv, float32, got float16"),
        ({"cos_sin_cache": np.ones((5, 10), np.float32)}, ValueError, "must not exceed head_size = 8"),
        (
            {"cos_sin_cache": np.ones((5, 7), np.float32)},
            ValueError,
            "cos_sin_cache: the last dimension .* even",
        ),
        ({"position_ids": np.zeros(4, np.int64)}, ValueError, "qkv: dimension 0 must be that of positions, 4"),
        ({"position_ids": np.zeros(3, np.float32)}, TypeError, "position_ids: dtype must be int64 or int32"),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    call = {
        "qkv": np.ones((3, 32), np.float32),
        "num_heads_q": 2,
        "num_heads_k": 1,
        "num_heads_v": 1,
        "head_dim": 8,
        "eps": EPSILON,
        "q_weight": np.ones(8, np.float32),
        "k_weight": np.ones(8, np.float32),
        "cos_sin_cache": np.ones((5, 8), np.float32),
        "is_neox": True,
        "position_ids": np.zeros(3, np.int64),
    } | change
    made = {k: array.output(v) if isinstance(v, np.ndarray) else v for k, v in call.items()}
    with pytest.raises(error, match="fused_qk_norm_rope: .*" + message):
        pykv.fused_qk_norm_rope(**made)
