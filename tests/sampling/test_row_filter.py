"""softmax, top_k_top_p_mask, top_k_top_p_renorm and token_logprobs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, assert_rounded_once, name_of, padded, random
from sampling import reference

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
shapes = pytest.mark.parametrize("shape", [(1, 1), (3, 100), (2, 40001), (300, 33)], ids=name_of)
OPTIONS = [
    {"top_k": 40},
    {"top_p": 0.9},
    {"min_p": 0.0513},
    {"top_k": 2000, "top_p": 0.6},
    {"top_k": 30, "top_p": 0.8, "min_p": 0.001},
    {},
]
options = pytest.mark.parametrize("options", OPTIONS, ids=str)


def inputs(array, **options):
    return {k: array.input(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}


@dtypes
@shapes
@pytest.mark.parametrize("to_fp32", [False, True])
def test_softmax(array, dtype, shape, to_fp32):
    x = random(shape, dtype, shape[1]) * dtype.type(3)
    t = np.linspace(0.3, 2, shape[0]).astype(np.float32)
    out = array.output(np.zeros(shape, np.float32 if to_fp32 else dtype))
    pykv.softmax(out, array.input(x), array.input(t))
    assert_rounded_once(array.numpy(out), reference.softmax(x, t), lost=2e-6)


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 4),
    cols=st.integers(1, 200) | st.integers(1, 60000),
    padding=st.integers(0, 9),
    offset=st.integers(0, 9),
)
def test_softmax_of_any_rows(array, dtype, rows, cols, padding, offset):
    x = random((rows, cols), dtype, cols)
    out = array.output(padded(np.zeros_like(x), padding), offset=offset)
    pykv.softmax(out, array.input(padded(x, padding), offset=offset), 0.9)
    assert_rounded_once(array.numpy(out), reference.softmax(x, np.full(rows, 0.9)), lost=2e-6)


@dtypes
@pytest.mark.parametrize("cols", [128256, 262144, 500001])
def test_softmax_of_wide_rows_in_place(array, dtype, cols):
    """Blocks of a row keep it in shared memory, if it is not too wide for that."""
    x = random((3, cols), dtype)
    out = array.output(x)
    pykv.softmax(out, out)
    assert_rounded_once(array.numpy(out), reference.softmax(x), lost=2e-6)


@pytest.mark.parametrize("scale", [20, 80, 1000])
def test_softmax_of_far_logits(array, scale):
    x = random((3, 500), np.dtype(np.float32)) * np.float32(scale)
    out = array.output(np.zeros(x.shape, np.float32))
    pykv.softmax(out, array.input(x))
    assert_rounded_once(array.numpy(out), reference.softmax(x), lost=2e-5, atol=1e-37)


@dtypes
@shapes
@options
def test_mask(array, dtype, shape, options):
    x = random(shape, dtype, shape[1]) * dtype.type(2)
    out = array.output(np.zeros_like(x))
    pykv.top_k_top_p_mask(out, array.input(x), **options)
    kept, near = reference.mask(x, **options)
    clear = near > 1e-7
    assert clear.mean() >= 0.5  # shares of many tokens lie densely
    np.testing.assert_array_equal(array.numpy(out)[clear], np.where(kept, x, dtype.type(-np.inf))[clear])


@dtypes
@shapes
@options
def test_renorm(array, dtype, shape, options):
    p = reference.softmax(random(shape, np.dtype(np.float32), shape[1]) * 2).astype(dtype)
    out = array.output(np.zeros_like(p))
    pykv.top_k_top_p_renorm(out, array.input(p), **options)
    expected, near = reference.renorm(p, **options)
    clear = near > 1e-7
    assert clear.mean() >= 0.5
    assert_rounded_once(array.numpy(out)[clear], expected[clear], lost=2e-6)


@pytest.mark.parametrize("largest", [1e35, 1e36, 1e37, 3e38])
@pytest.mark.parametrize("options", [{"top_k": 40}, {"top_k": 3000}, {"top_k": 5, "top_p": 0.5}], ids=str)
def test_logits_near_the_largest_float(array, largest, options):
    rng = np.random.default_rng(3)
    x = rng.uniform(-largest, largest, (3, 5000)).astype(np.float32)
    x[1, ::7] = -np.inf
    x[2] = np.abs(x[2]) * np.float32(1e-3)
    x[2, 77], x[2, 78] = largest, -largest
    out = array.output(np.zeros_like(x))
    pykv.top_k_top_p_mask(out, array.input(x), **options)
    expected = np.where(reference.mask(x, **options)[0], x, np.float32(-np.inf))
    np.testing.assert_array_equal(array.numpy(out), expected)


def test_each_row_has_its_own_parameters(array):
    rng = np.random.default_rng(0)
    x = random((64, 3001), np.dtype(np.float32)) * 2
    options = {
        "top_k": rng.choice([0, 1, 50, 2000, 5000], 64),
        "top_p": rng.choice([0.2, 0.9, 1.0], 64).astype(np.float32),
        "min_p": rng.choice([0, 0.01], 64).astype(np.float32),
        "temperature": rng.choice([0.5, 1, 2], 64).astype(np.float32),
    }
    out = array.output(x)
    pykv.top_k_top_p_mask(out, out, **inputs(array, **options))
    kept, near = reference.mask(x, **options)
    assert (near > 1e-7).mean() > 0.9
    for row in np.flatnonzero(near > 1e-7):
        np.testing.assert_array_equal(np.isfinite(array.numpy(out)[row]), kept[row])


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 5),
    cols=st.integers(1, 200) | st.integers(1, 30000),
    padding=st.integers(0, 9),
    offset=st.integers(0, 9),
    option=st.sampled_from(OPTIONS),
    spread=st.sampled_from([0.01, 1.0, 30.0]),
)
def test_any_rows(array, dtype, rows, cols, padding, offset, option, spread):
    x = (random((rows, cols), dtype, cols) * spread).astype(dtype)
    out = array.output(padded(np.zeros_like(x), padding))
    pykv.top_k_top_p_mask(out, array.input(padded(x, padding), offset=offset), **option)
    kept, near = reference.mask(x, **option)
    clear = near > 1e-7
    np.testing.assert_array_equal(array.numpy(out)[clear], np.where(kept, x, dtype.type(-np.inf))[clear])


@pytest.mark.parametrize("levels", [1, 2, 50])
def test_ties_go_to_the_lower_token(array, levels):
    x = np.random.default_rng(1).integers(0, levels, (3, 20011)).astype(np.float32)
    for option in ({"top_k": 77}, {"top_p": 0.4003}, {"top_k": 9000, "top_p": 0.70007}):
        out = array.output(x)
        pykv.top_k_top_p_mask(out, array.input(x), **option)
        np.testing.assert_array_equal(np.isfinite(array.numpy(out)), reference.mask(x, **option)[0])


@pytest.mark.parametrize("options", [{}, {"top_k": 40}, {"top_p": 0.5}], ids=str)
def test_all_are_equally_probable_at_an_infinite_temperature(array, options):
    """min_p then leaves nothing out."""
    x = random((2, 3000), np.dtype(np.float32))
    given = {"min_p": np.ones(2, np.float32), "temperature": np.full(2, np.inf, np.float32), **options}
    out, tokens = array.output(np.zeros_like(x)), array.output(np.zeros(2, np.int32))
    pykv.top_k_top_p_mask(out, array.input(x), **inputs(array, **given))
    kept = np.isfinite(array.numpy(out))
    assert kept.sum(1).tolist() == [options.get("top_k", 1500 if options else 3000)] * 2
    pykv.sample(tokens, array.input(x), **inputs(array, **given))
    assert kept[[0, 1], array.numpy(tokens)].all()


@dtypes
@shapes
def test_token_logprobs(array, dtype, shape):
    x = random(shape, dtype, shape[1])
    ids = np.random.default_rng(0).integers(0, shape[1], (shape[0], 3))
    ids[:, 1] = x.astype(np.float32).argmax(1)
    logprobs, ranks = array.output(np.zeros(ids.shape, np.float32)), array.output(np.zeros(ids.shape, np.int32))
    pykv.token_logprobs(logprobs, array.input(x), array.input(ids), 0.8, ranks=ranks)
    expected = np.log(np.take_along_axis(reference.softmax(x, 0.8), ids, 1))
    np.testing.assert_allclose(array.numpy(logprobs), expected, rtol=1e-6, atol=3e-6)
    places = np.argsort([reference.in_order(row) for row in x], axis=1)
    np.testing.assert_array_equal(array.numpy(ranks), np.take_along_axis(places, ids, 1))


def test_ids_out_of_range_are_reported(array):
    x = random((2, 50), np.dtype(np.float32))
    logprobs, ranks = array.output(np.zeros((2, 2), np.float32)), array.output(np.zeros((2, 2), np.int32))
    with array.reports("token_ids: 50 is out of range"):
        pykv.token_logprobs(logprobs, array.input(x), array.input(np.array([[50, 1], [2, 3]])), ranks=ranks)
    assert np.isnan(array.numpy(logprobs)).tolist() == [[True, False], [False, False]]
    assert array.numpy(ranks)[0, 0] == -1


@dtypes
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("cols", [9, 9000])
def test_bad_rows_are_reported(array, dtype, bad, cols):
    x = random((3, cols), dtype)
    x[1, 2 if np.isnan(bad) else slice(None)] = bad
    message = "logits: row 1 " + ("holds NaN" if np.isnan(bad) else "has nothing to choose from")
    good = [0, 2]
    for operation, option in ((pykv.softmax, {}), (pykv.top_k_top_p_mask, {"top_p": 0.8})):
        out, alone = array.output(np.zeros_like(x)), array.output(np.zeros_like(x[good]))
        with array.reports(message):
            operation(out, array.input(x), **option)
        operation(alone, array.input(x[good]), **option)
        np.testing.assert_array_equal(array.numpy(out)[good], array.numpy(alone))
        wanted = x[1] if option else np.full_like(x[1], np.nan)
        np.testing.assert_array_equal(array.numpy(out)[1].astype(np.float32), wanted.astype(np.float32))


@dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0])
@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}], ids=str)
def test_probabilities_that_are_none_are_reported(array, dtype, bad, options):
    p = reference.softmax(random((3, 500), np.dtype(np.float32))).astype(dtype)
    p[1, 7 if bad else slice(None)] = bad
    out = array.output(np.zeros_like(p))
    with array.reports("probs: row 1 " + ("holds NaN" if bad else "has nothing to choose from")):
        pykv.top_k_top_p_renorm(out, array.input(p), **options)
    assert np.isnan(array.numpy(out)).all(1).tolist() == [False, True, False]
    assert_rounded_once(array.numpy(out)[::2], reference.renorm(p[::2], **options)[0], lost=2e-6)


def test_rows_do_not_depend_on_the_others(array):
    x = random((300, 5001), np.dtype(np.float32))
    for operation in (pykv.softmax, pykv.top_k_top_p_mask):
        option = {"top_p": 0.9} if operation is pykv.top_k_top_p_mask else {"temperature": 0.7}
        together, alone = array.output(np.zeros_like(x)), array.output(np.zeros_like(x[:1]))
        operation(together, array.input(x), **option)
        operation(alone, array.input(x[:1]), **option)
        np.testing.assert_array_equal(array.numpy(together)[:1], array.numpy(alone))


def test_wrong_arguments():
    x = np.zeros((2, 20), np.float32)
    with pytest.raises(TypeError, match="out: "):
        pykv.softmax(np.zeros((2, 20), np.float16), x)
    with pytest.raises(ValueError, match="top_p: must have 1 element"):
        pykv.top_k_top_p_mask(x.copy(), x, top_p=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="token_ids: "):
        pykv.token_logprobs(np.zeros((2, 1), np.float32), x, np.zeros((3, 1), np.int32))


@dtypes
def test_first_tokens_with_their_log_probabilities(array, dtype):
    """top_k_per_row, and of what it found the log-probabilities and ranks."""
    x, n = random((6, 3000), dtype), 20
    found = array.output(np.zeros((6, n), np.int32))
    pykv.top_k_per_row(found, array.input(x), n, sorted=True)
    logprobs, ranks = array.output(np.zeros((6, n), np.float32)), array.output(np.zeros((6, n), np.int32))
    pykv.token_logprobs(logprobs, array.input(x), found, ranks=ranks)
    wanted = -np.sort(-np.log(reference.softmax(x)), axis=1)[:, :n]
    np.testing.assert_allclose(array.numpy(logprobs), wanted, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(array.numpy(ranks), np.tile(np.arange(n), (6, 1)))
