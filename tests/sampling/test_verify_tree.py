from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sampling import reference

import pykv


def links(parents):
    """First children and next siblings of trees, given the parents ``[requests, nodes]``: that of 0 is -1."""
    first, sibling = np.full(parents.shape, -1), np.full(parents.shape, -1)
    for row, parent in enumerate(parents):
        for node in range(parents.shape[1] - 1, 0, -1):
            sibling[row, node], first[row, parent[node]] = first[row, parent[node]], node
    return first, sibling


def problem(requests, nodes, vocab, seed=0, favour=0.5):
    """Trees of random shape, the tokens of which are likely to be accepted, some twice among siblings."""
    rng = np.random.default_rng(seed)
    parents = np.array([[-1, *(rng.integers(0, node) for node in range(1, nodes))] for _ in range(requests)])
    parents = parents.reshape(requests, nodes)
    probs = reference.softmax(2 * rng.standard_normal((requests * nodes, vocab))).reshape(requests, nodes, vocab)
    ids = rng.integers(0, vocab, (requests, nodes))
    for row in range(requests):
        for node in range(1, nodes):
            if rng.random() < favour:
                ids[row, node] = rng.choice(np.argsort(-probs[row, parents[row, node]])[:3])
    seeds, steps = rng.integers(0, 2**62, requests), rng.integers(0, 99, requests)
    return ids, *links(parents), probs.astype(np.float32), seeds, steps


def verify(array, ids, first, sibling, probs=None, greedy=None, index=None, seeds=None, steps=None, num_out=None):
    requests, nodes = ids.shape
    num_out = nodes if num_out is None else num_out
    out, path = (array.output(np.full((requests, num_out), 7, np.int32)) for _ in range(2))
    accepted = array.output(np.zeros(requests, np.int32))
    given_arrays = [None if a is None else array.input(a) for a in (first, sibling, probs, greedy, index, seeds, steps)]
    pykv.verify_tree(out, array.input(ids), *given_arrays, accepted_index=path, num_accepted=accepted)
    return array.numpy(out), array.numpy(path), array.numpy(accepted)


def check(array, *arguments, **more):
    found, expected = verify(array, *arguments, **more), reference.verify_tree(*arguments, **more)
    rows = expected[3] > 1e-5
    assert len(rows) < 10 or rows.mean() > 0.9
    for a, b in zip(found, expected[:3], strict=True):
        np.testing.assert_array_equal(a[rows], b[rows])


@pytest.mark.parametrize(
    ("requests", "nodes", "vocab"), [(1, 1, 1), (1, 1, 50), (7, 6, 100), (2, 20, 32003), (300, 5, 257), (3, 700, 9)]
)
def test_sizes(array, requests, nodes, vocab):
    ids, first, sibling, probs, seeds, steps = problem(requests, nodes, vocab, nodes)
    index = np.random.default_rng(1).integers(0, 2**31, ids.shape)
    check(array, ids, first, sibling, probs, None, index, seeds, steps)
    narrow = [a.astype(np.int32) for a in (ids, first, sibling)]
    check(array, *narrow, probs, None, None, seeds, steps, num_out=min(nodes, 2))
    check(array, *narrow, None, probs.argmax(-1), index)
    check(array, ids, first, sibling, None, probs.argmax(-1).astype(np.int32), num_out=1)


@given(
    st.integers(0, 5), st.integers(1, 12), st.integers(1, 9) | st.integers(1, 3000), st.integers(0, 999), st.booleans()
)
def test_any_trees(array, requests, nodes, vocab, seed, is_greedy):
    ids, first, sibling, probs, seeds, steps = problem(requests, nodes, vocab, seed)
    if is_greedy:
        check(array, ids, first, sibling, None, probs.argmax(-1))
    else:
        check(array, ids, first, sibling, probs, None, None, seeds, steps)


def test_a_tree_without_branches_is_a_chain(array):
    ids, _, _, probs, seeds, steps = problem(200, 6, 60, 3)
    first = np.tile([1, 2, 3, 4, 5, -1], (200, 1))
    ids[:, 1:] = probs[:, :5].argmax(-1)
    out, path, accepted = verify(array, ids, first, np.full_like(first, -1), probs, None, None, seeds, steps)
    chain = array.output(np.zeros((200, 6), np.int32))
    of_chain = array.input(ids[:, 1:]), array.input(probs), None, None, array.input(seeds), array.input(steps)
    pykv.rejection_sample(chain, *of_chain)
    np.testing.assert_array_equal(out, array.numpy(chain))
    assert len(set(accepted.tolist())) > 3
    np.testing.assert_array_equal(path, np.where(np.arange(6) <= accepted[:, None], np.arange(6), -1))


@pytest.mark.parametrize("children", [[3], [3, 1, 8], [2, 2, 5, 2], list(range(10))])
def test_first_tokens_have_the_distribution_of_the_target(array, children):
    """Chi-square; 50 is passed once in 10^6 runs with 9 degrees of freedom."""
    draws, vocab, nodes = 20000, 10, 1 + len(children)
    p = reference.softmax(np.random.default_rng(5).standard_normal((1, vocab)))[0].astype(np.float32)
    ids = np.tile([0, *children], (draws, 1)).astype(np.int32)
    first, sibling = links(np.tile([-1] + [0] * len(children), (draws, 1)))
    probs = np.broadcast_to(p, (draws, nodes, vocab)).copy()
    out, _, accepted = verify(array, ids, first, sibling, probs, None, None, np.arange(draws), np.full(draws, 3))
    counts = np.bincount(out[:, 0], minlength=vocab)
    wanted = draws * p.astype(np.float64) / p.sum(dtype=np.float64)
    assert ((counts - wanted) ** 2 / wanted).sum() < 50
    assert abs(accepted.mean() - p[sorted(set(children))].sum()) < 0.02


def test_links_in_a_circle_end(array):
    """Siblings of one another, and a path that comes back to where it was."""
    ids, target = np.array([[0, 1, 2, 3]]), np.array([[9, 9, 9, 9]])
    out = array.output(np.zeros((1, 4), np.int32))
    text = r"verify_tree: times that links lead to a node: 2 is out of range \[0, 2\)"
    with array.reports(text):
        pykv.verify_tree(
            out, array.input(ids), array.input(np.array([[1, -1, -1, -1]])), array.input(np.array([[-1, 2, 1, -1]])),
            target_token_ids=array.input(target),
        )  # fmt: skip
    assert array.numpy(out).tolist() == [[9, -1, -1, -1]]
    probs = np.zeros((1, 4, 12), np.float32)
    probs[..., 1:3] = 1
    with array.reports(text):
        pykv.verify_tree(
            out, array.input(ids), array.input(np.array([[1, 2, 1, -1]])), array.input(np.full((1, 4), -1)),
            array.input(probs),
        )  # fmt: skip
    result = array.numpy(out)[0]
    assert set(result.tolist()) <= {1, 2, -1}
    assert result[0] == 1
    with array.reports(text):  # its own child
        pykv.verify_tree(
            out, array.input(ids), array.input(np.array([[0, -1, -1, -1]])), array.input(np.array([[0, -1, -1, -1]])),
            target_token_ids=array.input(target),
        )  # fmt: skip


@pytest.mark.parametrize("bad", [4, 2**31 - 1])
@pytest.mark.parametrize("which", ["next_token", "next_sibling"])
def test_links_out_of_range(array, which, bad):
    ids, greedy = np.array([[0, 1, 2, 3]] * 2), np.array([[1, 3, 0, 0]] * 2)
    given_links = {"next_token": np.array([[1, 3, -1, -1]] * 2), "next_sibling": np.array([[-1, 2, -1, -1]] * 2)}
    given_links[which][1, 1 if which == "next_token" else 2] = bad
    out = array.output(np.zeros((2, 4), np.int32))
    with array.reports(rf"verify_tree: {which}: {bad} is out of range \[0, 4\)"):
        given_arrays = {k: array.input(v) for k, v in given_links.items()}
        pykv.verify_tree(out, array.input(ids), **given_arrays, target_token_ids=array.input(greedy))
    second = [1, 3, -1, -1] if which == "next_token" else [1, 3, 0, -1]
    assert array.numpy(out).tolist() == [[1, 3, 0, -1], second]


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_tokens_out_of_range(array, bad):
    ids, probs = np.array([[0, bad, 4]]), np.full((1, 3, 5), 0, np.float32)
    probs[..., 4] = 1
    out = array.output(np.zeros((1, 3), np.int32))
    with array.reports(rf"verify_tree: draft_token_ids: {bad} is out of range \[0, 5\)"):
        first, sibling = np.array([[1, -1, -1]]), np.array([[-1, 2, -1]])
        pykv.verify_tree(out, array.input(ids), array.input(first), array.input(sibling), array.input(probs))
    assert array.numpy(out).tolist() == [[4, 4, -1]]


@pytest.mark.parametrize(("value", "text"), [(np.nan, "row 1 holds NaN"), (0, "row 1 has nothing to choose from")])
def test_rows_that_have_no_token(array, value, text):
    probs = np.full((2, 2, 40), 0.025, np.float32)
    probs[1] = value
    ids, first = np.array([[0, 3]] * 2), np.array([[1, -1]] * 2)
    out = array.output(np.zeros((2, 2), np.int64))
    with array.reports(rf"verify_tree: target_probs: {text}"):
        pykv.verify_tree(
            out, array.input(ids), array.input(first), array.input(np.full((2, 2), -1)), array.input(probs)
        )
    result = array.numpy(out)
    assert result[1].tolist() == [-1, -1]
    assert result[0, 0] >= 0


def test_all_that_is_left_was_rejected(array):
    """By rounding; then the target's whole row is what is drawn from."""
    probs = np.zeros((50, 2, 8), np.float32)
    probs[..., 5] = 1e-20
    ids, first = np.array([[0, 5]] * 50), np.array([[1, -1]] * 50)
    out, _, accepted = verify(array, ids, first, np.full_like(first, -1), probs, None, None, np.arange(50))
    assert (accepted == 0).all()
    assert (out[:, 0] == 5).all()


def test_wrong_arguments():
    ids, probs, out = np.zeros((2, 4), np.int64), np.ones((2, 4, 9), np.float32), np.zeros((2, 4), np.int32)
    for arguments, options, error, message in [
        ((out, ids, ids, ids), {}, ValueError, "target_probs: either it or target_token_ids must be given"),
        ((out, ids, ids, ids, probs, ids), {}, ValueError, "target_probs: either it or target_token_ids"),
        ((out, ids, ids[:, :3], ids, probs), {}, ValueError, "next_token: "),
        ((out, ids, ids, ids.astype(np.float32), probs), {}, TypeError, "next_sibling: "),
        ((out, ids, ids, ids, probs[:, :3]), {}, ValueError, "target_probs: "),
        ((out, ids, ids, ids, probs.astype(np.float16)), {}, TypeError, "target_probs: "),
        ((np.zeros((2, 5), np.int32), ids, ids, ids, probs), {}, ValueError, "out: must have 1 to num_nodes = 4"),
        ((out[:, :0], ids, ids, ids, probs), {}, ValueError, "out: must have 1 to num_nodes = 4"),
        ((out, ids[:, :0], ids[:, :0], ids[:, :0], probs[:, :0]), {}, ValueError, "draft_token_ids: num_nodes must"),
        ((out, ids, ids, ids, probs), {"accepted_index": out[:, :3]}, ValueError, "accepted_index: "),
        ((out, ids, ids, ids, probs), {"num_accepted": out[:, 0].astype(np.int64)}, TypeError, "num_accepted: "),
    ]:
        with pytest.raises(error, match=f"verify_tree: {message}"):
            pykv.verify_tree(*arguments, **options)
    many = np.zeros((1, 2049), np.int32)
    with pytest.raises(NotImplementedError, match="draft_token_ids: num_nodes must lie between 1, the root, and 2048"):
        pykv.verify_tree(many, many, many, many, None, many)
