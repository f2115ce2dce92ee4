from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, assert_rounded_once, name_of, padded, random
from sampling import reference

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def masks(shape, seed=0, share=0.05):
    rng = np.random.default_rng(seed)
    return rng.random(shape) < share, rng.random(shape) < share


def penalise(array, x, prompt, output, penalties, offset=0):
    logits = array.output(x, offset=offset)
    pykv.apply_repetition_penalties_(
        logits, array.input(prompt, offset=offset), array.input(output, offset=offset), array.input(penalties)
    )
    return array.numpy(logits)


@dtypes
@pytest.mark.parametrize("shape", [(1, 1), (3, 1000), (2, 32000), (70, 130)], ids=name_of)
@pytest.mark.parametrize("of_fp32", [False, True])
def test_shapes(array, dtype, shape, of_fp32):
    x, (prompt, output) = random(shape, dtype), masks(shape)
    penalties = np.linspace(0.6, 1.9, shape[0]).astype(np.float32 if of_fp32 else dtype)
    result = penalise(array, x, prompt, output, penalties)
    assert_rounded_once(result, reference.apply_repetition_penalties(x, prompt, output, penalties))
    same = ~(prompt | output)
    np.testing.assert_array_equal(result[same], x[same])


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 5),
    cols=st.integers(0, 300) | st.integers(1, 9000),
    padding=st.integers(0, 33),
    offset=st.integers(0, 17),
    share=st.sampled_from([0.0, 0.01, 0.7, 1.0]),
)
def test_any_rows(array, dtype, rows, cols, padding, offset, share):
    x, (prompt, output) = random((rows, cols), dtype), masks((rows, cols), cols, share)
    penalties = np.linspace(0.5, 2, rows).astype(np.float32)
    wide = [np.zeros((rows, cols + padding), bool) for _ in range(2)]
    for w, mask in zip(wide, (prompt, output), strict=True):
        w[:, :cols] = mask
    result = penalise(array, padded(x, padding), wide[0][:, :cols], wide[1][:, :cols], penalties, offset)
    assert_rounded_once(result, reference.apply_repetition_penalties(x, prompt, output, penalties))


@dtypes
def test_special_values(array, dtype):
    x = np.array([[0, -0.0, np.inf, -np.inf, np.nan, 3, 3, -3]], dtype)
    prompt = np.array([[1, 1, 1, 1, 1, 0, 1, 1]], np.uint8)
    result = penalise(array, x, prompt, np.zeros_like(prompt), np.array([2], dtype)).astype(np.float32)
    np.testing.assert_array_equal(result, [[0, -0.0, np.inf, -np.inf, np.nan, 3, 1.5, -6]])
    zero = penalise(array, x, prompt, np.zeros_like(prompt), np.array([0], dtype)).astype(np.float32)
    assert np.isposinf(zero[0, 6])


def test_wrong_arguments():
    x, mask, p = np.zeros((2, 5), np.float32), np.zeros((2, 5), bool), np.ones(2, np.float32)
    for arguments, error, message in [
        ((x, mask[:, :4], mask, p), ValueError, "prompt_mask: "),
        ((x, mask, mask.astype(np.int32), p), TypeError, "output_mask: "),
        ((x, mask, mask, p.astype(np.float16)), TypeError, "repetition_penalties: "),
        ((x, mask, mask, p[:1]), ValueError, "repetition_penalties: "),
    ]:
        with pytest.raises(error, match=message):
            pykv.apply_repetition_penalties_(*arguments)
