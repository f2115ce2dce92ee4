from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import reference

import pykv


def probabilities(rng, *shape):
    return reference.softmax(rng.standard_normal((int(np.prod(shape[:-1])), shape[-1])) * 2).reshape(shape).astype("f4")


def problem(requests, n, vocab, seed=0):
    rng = np.random.default_rng(seed)
    target, draft = probabilities(rng, requests, n + 1, vocab), probabilities(rng, requests, n, vocab)
    draft = (draft + 3 * target[:, :n]) / 4
    uniform = rng.random((requests, n, 1))
    ids = np.minimum((np.cumsum(draft, -1) < uniform).sum(-1), vocab - 1)
    lens = rng.integers(0, n + 1, requests)
    return ids, target, draft.astype("f4"), lens, rng.integers(0, 2**62, requests), rng.integers(0, 1000, requests)


def run(array, *arguments):
    ids = arguments[0]
    out = array.output(np.zeros((ids.shape[0], ids.shape[1] + 1), np.int32))
    accepted = array.output(np.zeros(len(ids), np.int32))
    given = [None if a is None else array.input(a) for a in arguments]
    pykv.rejection_sample(out, *given, num_accepted=accepted)
    return array.numpy(out), array.numpy(accepted)


def check(array, ids, target, draft, lens, seeds, steps):
    out, accepted = run(array, ids, target, draft, lens, seeds, steps)
    wanted, wanted_accepted, clear = reference.rejection_sample(ids, target, draft, lens, seeds, steps)
    rows = clear > 1e-5
    assert len(rows) < 10 or rows.mean() > 0.9
    np.testing.assert_array_equal(out[rows], wanted[rows])
    np.testing.assert_array_equal(accepted[rows], wanted_accepted[rows])


@pytest.mark.parametrize(
    ("requests", "n", "vocab"), [(1, 1, 1), (1, 0, 50), (7, 3, 100), (2, 5, 32003), (300, 2, 257), (3, 700, 9)]
)
@pytest.mark.parametrize("with_draft", [True, False])
def test_sizes(array, requests, n, vocab, with_draft):
    ids, target, draft, lens, seeds, steps = problem(requests, n, vocab, n)
    check(array, ids, target, draft if with_draft else None, np.full(requests, n), seeds, steps)
    check(array, ids.astype(np.int32), target, draft if with_draft else None, lens, seeds, steps)


@given(st.integers(0, 5), st.integers(0, 5), st.integers(1, 200) | st.integers(1, 5000), st.integers(0, 999))
def test_any_sizes(array, requests, n, vocab, seed):
    check(array, *problem(requests, n, vocab, seed))


def test_greedy_rows(array):
    rng = np.random.default_rng(0)
    best = rng.integers(0, 40, (20, 5))
    target = np.eye(40, dtype=np.float32)[best]
    ids = np.where(rng.random((20, 4)) < 0.7, best[:, :4], rng.integers(0, 40, (20, 4)))
    out, accepted = run(array, ids, target, None, None, np.arange(20), np.arange(20))
    same = np.cumprod(ids == best[:, :4], axis=1).sum(1)
    np.testing.assert_array_equal(accepted, same)
    for row in range(20):
        assert out[row].tolist() == best[row, : same[row] + 1].tolist() + [-1] * (4 - same[row])


@pytest.mark.parametrize("with_draft", [True, False])
def test_first_tokens_have_the_distribution_of_the_target(array, with_draft):
    """Chi-square; 50 is passed once in 10^6 runs with 9 degrees of freedom."""
    draws, vocab = 20000, 10
    rng = np.random.default_rng(5)
    target = np.repeat(probabilities(rng, 1, 2, vocab), draws, 0)
    q = probabilities(rng, 1, 1, vocab) if with_draft else np.eye(vocab, dtype="f4")[[[3]]]
    ids = rng.choice(vocab, (draws, 1), p=q[0, 0].astype(np.float64) / q[0, 0].sum(dtype=np.float64))
    draft = np.repeat(q, draws, 0) if with_draft else None
    out, accepted = run(array, ids, target, draft, None, np.arange(draws), np.full(draws, 3))
    wanted = draws * target[0, 0].astype(np.float64) / target[0, 0].sum()
    counts = np.bincount(out[:, 0], minlength=vocab)
    assert ((counts - wanted) ** 2 / wanted).sum() < 50
    after = out[accepted == 1, 1]
    wanted = len(after) * target[0, 1].astype(np.float64) / target[0, 1].sum()
    assert ((np.bincount(after, minlength=vocab) - wanted) ** 2 / wanted).sum() < 50


def test_a_request_does_not_depend_on_the_others(array):
    arguments = problem(300, 3, 5000)
    together = run(array, *arguments)
    for rows in (slice(0, 1), slice(5, 40)):
        for some, all_of_them in zip(run(array, *(a[rows] for a in arguments)), together, strict=True):
            np.testing.assert_array_equal(some, all_of_them[rows])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda ids, target, lens: ids.__setitem__((1, 0), 100), "draft_token_ids: 100"),
        (lambda ids, target, lens: ids.__setitem__((1, 0), -1), "draft_token_ids: -1"),
        (lambda ids, target, lens: lens.__setitem__(1, 4), "draft_lens: 4"),
        (lambda ids, target, lens: target.__setitem__((1, slice(None), 60), np.nan), "target_probs: row 1 holds NaN"),
        (lambda ids, target, lens: target.__setitem__((1, slice(None)), 0), "target_probs: row 1 has nothing"),
    ],
)
def test_what_is_wrong_is_reported(array, change, message):
    ids, target, draft, lens, seeds, steps = problem(3, 3, 100)
    lens[:] = 3
    right, _ = run(array, ids, target, draft, lens, seeds, steps)
    change(ids, target, lens)
    out = array.output(np.zeros((3, 4), np.int64))
    with array.reports(message):
        pykv.rejection_sample(out, *(array.input(a) for a in (ids, target, draft, lens, seeds, steps)))
    np.testing.assert_array_equal(array.numpy(out)[[0, 2]], right[[0, 2]])
    if "target_probs" in message:
        assert (array.numpy(out)[1] < 0).any()


def test_wrong_arguments():
    right = {
        "out": np.zeros((2, 4), np.int32),
        "draft_token_ids": np.zeros((2, 3), np.int32),
        "target_probs": np.ones((2, 4, 5), np.float32),
    }
    for change, error, message in [
        ({"target_probs": np.ones((2, 3, 5), np.float32)}, ValueError, "target_probs: "),
        ({"draft_probs": np.ones((2, 3, 6), np.float32)}, ValueError, "draft_probs: "),
        ({"draft_probs": np.ones((2, 3, 5))}, TypeError, "draft_probs: "),
        ({"out": np.zeros((2, 3), np.int32)}, ValueError, "out: "),
        ({"draft_lens": np.zeros(3, np.int32)}, ValueError, "draft_lens: "),
    ]:
        with pytest.raises(error, match=message):
            pykv.rejection_sample(**right | change)
