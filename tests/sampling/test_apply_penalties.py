from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, assert_rounded_once, name_of, padded, random
from sampling import reference

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def penalise(array, x, *lists, offset=0, **more):
    logits = array.output(x, offset=offset)
    lists = [None if v is None else array.input(v) for v in lists]
    more = {k: array.input(v) if isinstance(v, np.ndarray) else v for k, v in more.items()}
    pykv.apply_penalties_(logits, *lists, **more)
    return array.numpy(logits)


@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (3, 1000), (2, 32000), (2, 8192), (2, 8193), (70, 130)], ids=name_of)
def test_shapes(array, dtype, shape):
    """Many tokens occur many times; lists have padding of both kinds."""
    rng, (rows, size) = np.random.default_rng(0), shape
    x = random(shape, dtype)
    prompt = rng.integers(-1, size + 1, (rows, 700)).astype(np.int32)
    output = rng.integers(0, max(1, size // 20), (rows, 300))
    output[:, ::7] = size
    more = {
        "presence_penalties": rng.random(rows, np.float32),
        "frequency_penalties": rng.random(rows, np.float32) - 0.5,
        "repetition_penalties": np.linspace(0.6, 1.9, rows).astype(np.float32),
        "prompt_lens": rng.integers(0, 701, rows),
        "output_lens": rng.integers(0, 301, rows).astype(np.int32),
    }
    result = penalise(array, x, prompt, output, **more)
    expected = reference.apply_penalties(x, prompt, output, **more)
    assert_rounded_once(result, expected, atol=1e-5)
    untouched = expected == x.astype(np.float64)
    np.testing.assert_array_equal(result[untouched], x[untouched])


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 4),
    size=st.integers(0, 40) | st.integers(8000, 9000),
    lengths=st.tuples(st.integers(0, 30) | st.none(), st.integers(0, 30) | st.none()),
    padding=st.integers(0, 9),
    offset=st.integers(0, 9),
    numbers=st.booleans(),
)
def test_any_lists(array, dtype, rows, size, lengths, padding, offset, numbers):
    rng = np.random.default_rng(size)
    x = padded(random((rows, size), dtype), padding)
    lists = [None if n is None else rng.integers(-1, size + 1, (rows, n + padding))[:, :n] for n in lengths]
    more = {"presence_penalties": 0.25, "frequency_penalties": -0.5, "repetition_penalties": 1.5}
    if not numbers:
        more = {k: rng.random(rows).astype(np.float32) + np.float32(v) for k, v in more.items()}
    result = penalise(array, x, *lists, offset=offset, **more)
    assert_rounded_once(result, reference.apply_penalties(x, *lists, **more), atol=1e-5)


def test_the_same_as_in_sample(array):
    """Which has bitmaps and counts in place of lists; greedy, so that scores are the logits."""
    rng, rows, size = np.random.default_rng(3), 40, 64
    x = random((rows, size), FLOATS[0])
    prompt, output = rng.integers(0, size, (rows, 20)), rng.integers(0, size, (rows, 90))
    bits, counts = np.zeros((rows, size), np.uint8), np.zeros((rows, size), np.int32)
    np.put_along_axis(bits, prompt, 1, 1)
    np.add.at(counts, (np.arange(rows)[:, None], output), 1)
    bitmap = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    out, scores = array.output(np.zeros(rows, np.int32)), array.output(np.zeros(rows, np.float32))
    pykv.sample(
        out, array.input(x), temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.1, presence_penalty=0.2,
        prompt_bitmap=array.input(bitmap), output_counts=array.input(counts), scores=scores,
    )  # fmt: skip
    more = {"presence_penalties": 0.2, "frequency_penalties": 0.1, "repetition_penalties": 1.3}
    result = penalise(array, x, prompt, output, **more)
    np.testing.assert_array_equal(result.argmax(1), array.numpy(out))
    np.testing.assert_array_equal(result.max(1), array.numpy(scores))


@dtypes
def test_special_values(array, dtype):
    x = np.array([[0, -0.0, np.inf, -np.inf, np.nan, 3, 3, -3]], dtype)
    prompt = np.array([[0, 1, 2, 3, 4, 6, 7]], np.int32)
    result = penalise(array, x, prompt, None, repetition_penalties=2.0).astype(np.float32)
    np.testing.assert_array_equal(result, [[0, -0.0, np.inf, -np.inf, np.nan, 3, 1.5, -6]])


@pytest.mark.parametrize("which", ["prompt", "output"])
def test_out_of_range(array, which):
    x, ids = random((2, 10), FLOATS[0]), np.array([[3, 11, 3], [1, 2, 2**31 - 1]], np.int32)
    lists = (ids, None) if which == "prompt" else (None, ids)
    logits = array.output(x)
    given_lists = [None if v is None else array.input(v) for v in lists]
    with array.reports(rf"apply_penalties_: {which}_token_ids: (11|2147483647) is out of range \[0, 10\)"):
        pykv.apply_penalties_(logits, *given_lists, 0.5, 0.5, 2.0)
    expected = reference.apply_penalties(x, *lists, 0.5, 0.5, 2.0)
    assert_rounded_once(array.numpy(logits), expected, atol=1e-6)
    for lens in ([4, 1], [1, -1]):
        logits = array.output(x)
        bad = max(lens, key=abs) if lens[0] == 4 else -1
        with array.reports(rf"apply_penalties_: {which}_lens: {bad} is out of range \[0, 4\)"):
            pykv.apply_penalties_(
                logits, *(None if v is None else array.input(v[:, :3] % 10) for v in lists),
                **{f"{which}_lens": array.input(np.array(lens, np.int32))},
            )  # fmt: skip
        array.numpy(logits)


def test_ids_that_change_meanwhile_reach_no_other_row():
    """Those of the first row lie among its logits, so that penalties change them."""
    logits = np.ones((2, 64), np.float32)
    ids = logits.view(np.int32)[:, 10:12]
    ids[0] = 11, 20
    ids[1] = 20, 20
    expected, threads = logits[1].copy(), pykv.get_num_threads()
    expected[20] -= 0.5
    pykv.set_num_threads(1)
    try:
        pykv.apply_penalties_(logits, None, ids, 0.0, 0.25, 1.0)
    finally:
        pykv.set_num_threads(threads)
    np.testing.assert_array_equal(logits[1], expected)


def test_wrong_arguments():
    x, ids, p = np.zeros((2, 5), np.float32), np.zeros((2, 3), np.int64), np.ones(2, np.float32)
    for arguments, options, error, message in [
        ((x[0], ids, ids), {}, ValueError, "logits: "),
        ((x, ids[:1], ids), {}, ValueError, "prompt_token_ids: "),
        ((x, ids, ids.astype(np.float32)), {}, TypeError, "output_token_ids: "),
        ((x, ids, ids, np.ones(3, np.float32)), {}, ValueError, "presence_penalties: "),
        ((x, ids, ids, p, p.astype(np.float64)), {}, TypeError, "frequency_penalties: "),
        ((x, ids, ids, p, p, p), {"prompt_lens": ids}, ValueError, "prompt_lens: "),
        ((x, ids, None, p, p, p), {"output_lens": ids[:, 0]}, ValueError, "output_lens: "),
    ]:
        with pytest.raises(error, match=f"apply_penalties_: {message}"):
            pykv.apply_penalties_(*arguments, **options)
