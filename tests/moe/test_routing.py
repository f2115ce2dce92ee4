from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from moe import reference
from moe.inputs import FLOATS, bias, logits, outputs, random

import pykv

OPS = {"softmax": "topk_softmax", "sigmoid": "topk_sigmoid", "softplus_sqrt": "topk_softplus_sqrt"}
CLOSE = {"rtol": 2e-6, "atol": 1e-7}


def call(array: Any, scoring: str, x: np.ndarray, k: int, id_dtype: Any = np.int32, **options: Any) -> Any:
    """Weights, ids and source rows of an operation."""
    made = [array.output(a) for a in outputs(len(x), k, id_dtype)]
    given = {n: array.input(v) if isinstance(v, np.ndarray) else v for n, v in options.items()}
    getattr(pykv, OPS[scoring])(*made, array.input(x), **given)
    return [array.numpy(a) for a in made]


def assert_chosen(ids: np.ndarray, keys: np.ndarray) -> None:
    """Distinct experts with the largest keys, in their order, but for what fp32 cannot tell apart."""
    ids = ids.astype(np.int64)
    assert all(len(set(row)) == len(row) for row in ids.tolist())
    wanted = np.take_along_axis(keys, reference.best(keys, ids.shape[1]), -1)
    np.testing.assert_allclose(np.take_along_axis(keys, ids, -1), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scoring", OPS)
@pytest.mark.parametrize(
    ("experts", "k"),
    [(1, 1), (2, 2), (8, 2), (8, 8), (9, 3), (16, 4), (17, 5), (32, 8), (60, 4), (64, 6), (72, 6), (128, 8), (160, 6)]
    + [(192, 8), (256, 8), (257, 1), (320, 8), (384, 8), (512, 10), (576, 9), (1000, 40), (1024, 33)],
)
def test_experts(array, scoring, experts, k):
    x = logits(7, experts)
    weights, ids, rows = call(array, scoring, x, k, renormalize=experts % 2 == 0)
    wanted, s = reference.topk(x, k, scoring)
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(weights, reference.weights_of(s, experts % 2 == 0), **CLOSE)
    np.testing.assert_array_equal(rows, np.arange(k) * 7 + np.arange(7)[:, None])


@pytest.mark.parametrize("scoring", OPS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("tokens", [0, 1, 33, 1000])
def test_tokens_and_dtypes(array, scoring, dtype, tokens):
    x = logits(tokens, 64, dtype)
    weights, ids, _ = call(array, scoring, x, 6, renormalize=True)
    wanted, s = reference.topk(x, 6, scoring)
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(weights, reference.weights_of(s, True), **CLOSE)


@pytest.mark.parametrize("scoring", OPS)
@pytest.mark.parametrize("experts", [8, 100])
def test_more_than_65535_tokens(array, scoring, experts):
    x = logits(70000, experts)
    weights, ids, rows = call(array, scoring, x, 2)
    wanted, s = reference.topk(x, 2, scoring)
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(weights, s, **CLOSE)
    np.testing.assert_array_equal(rows, np.arange(2) * 70000 + np.arange(70000)[:, None])


@pytest.mark.parametrize("scoring", OPS)
@pytest.mark.parametrize("experts", [8, 100, 256])
def test_any_logits(array, scoring, experts):
    """No grid: what fp32 cannot tell apart may come in another order."""
    x = (random(experts).standard_normal((200, experts)) * 8).astype(np.float32)
    weights, ids, _ = call(array, scoring, x, 8)
    assert_chosen(ids, reference.keys_of(x, scoring))
    s = np.take_along_axis(reference.scores_of(x, scoring), ids.astype(np.int64), -1)
    np.testing.assert_allclose(weights, s, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("scoring", OPS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("experts", [8, 256])
def test_bias(array, scoring, dtype, experts):
    """It chooses, and does not weigh."""
    x, b = logits(50, experts), bias(experts).astype(dtype)
    weights, ids, _ = call(array, scoring, x, 4, e_score_correction_bias=b)
    assert_chosen(ids, reference.keys_of(x, scoring, b))
    s = np.take_along_axis(reference.scores_of(x, scoring), ids.astype(np.int64), -1)
    np.testing.assert_allclose(weights, s, **CLOSE)


def test_bias_below_all_scores(array):
    """vLLM's kernel for odd numbers of experts emitted expert 0 again and again."""
    _, ids, _ = call(array, "softmax", logits(5, 50), 5, e_score_correction_bias=np.full(50, -3, np.float32))
    assert_chosen(ids, reference.keys_of(logits(5, 50), "softmax", np.full(50, -3.0)))


@pytest.mark.parametrize("scoring", OPS)
@pytest.mark.parametrize("experts", [8, 64, 256])
def test_equal_keys(array, scoring, experts):
    weights, ids, _ = call(array, scoring, np.zeros((5, experts), np.float32), 7, renormalize=True)
    np.testing.assert_array_equal(ids, np.tile(np.arange(7), (5, 1)))
    np.testing.assert_allclose(weights, 1 / 7, rtol=1e-6)


@pytest.mark.parametrize("scoring", OPS)
@pytest.mark.parametrize("experts", [8, 40, 256])
def test_logits_that_are_not_finite(array, scoring, experts):
    x = logits(6, experts)
    x[0, 3] = np.nan
    x[1, :] = np.nan
    x[2, 5] = np.inf
    x[3, :] = -np.inf
    x[4, ::2] = -np.inf
    x[5, 1], x[5, 2] = 30, -30
    weights, ids, _ = call(array, scoring, x, 5)
    wanted, s = reference.topk(x, 5, scoring)
    np.testing.assert_array_equal(ids, wanted)
    np.testing.assert_allclose(weights, s, rtol=2e-6, atol=1e-7)
    if scoring == "softmax":
        np.testing.assert_array_equal(ids[[0, 1, 2, 3]], np.tile(np.arange(5), (4, 1)))
        assert not weights[:4].any()


def test_very_negative_logits_keep_their_softplus(array):
    x = np.array([[-5, -10, -15, -30, -60, -80]], np.float32)
    weights, ids, _ = call(array, "softplus_sqrt", x, 6)
    np.testing.assert_array_equal(ids, [np.arange(6)])
    np.testing.assert_allclose(weights, np.exp(x.astype(np.float64) / 2), rtol=4e-3)


@pytest.mark.parametrize("id_dtype", [np.int32, np.int64, np.uint32])
@pytest.mark.parametrize("flags", [np.bool_, np.uint8])
@pytest.mark.parametrize("experts", [8, 256])
def test_padding(array, id_dtype, flags, experts):
    if id_dtype is np.uint32 and array.module == "torch":
        pytest.skip("the test's arrays of torch have no uint32")
    x, is_padding = logits(40, experts), np.arange(40) % 3 == 1
    weights, ids, rows = call(
        array, "sigmoid", x, 4, id_dtype, is_padding=is_padding.astype(flags), routed_scaling_factor=2.5
    )
    wanted, s = reference.topk(x, 4, "sigmoid")
    np.testing.assert_array_equal(ids, np.where(is_padding[:, None], -1, wanted).astype(id_dtype))
    np.testing.assert_allclose(weights, np.where(is_padding[:, None], 0, s * 2.5), **CLOSE)
    assert (rows >= 0).all()


@pytest.mark.parametrize("experts", [6, 256])
def test_strides(array, experts):
    wide = logits(9, 3 * experts)
    x = wide[:, ::3]
    weights, ids = np.zeros((9, 8), np.float32)[:, ::2], np.zeros((9, 12), np.int32)[:, ::3]
    made = array.output(weights), array.output(ids)
    pykv.topk_softmax(*made, None, array.input(x))
    wanted, s = reference.topk(x, 4, "softmax")
    np.testing.assert_array_equal(array.numpy(made[1]), wanted)
    np.testing.assert_allclose(array.numpy(made[0]), s, **CLOSE)


@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("experts", [8, 256])
@pytest.mark.parametrize("table_dtype", ["int32", "int64"])
def test_hash_routing(array, id_dtype, table_dtype, experts):
    x, r = logits(30, experts), random(3)
    table = r.permuted(np.tile(np.arange(experts), (11, 1)), axis=1)[:, :6].astype(table_dtype)
    tokens = r.integers(0, 11, 30)
    weights, ids, rows = call(
        array,
        "softplus_sqrt",
        x,
        6,
        id_dtype,
        renormalize=True,
        routed_scaling_factor=1.5,
        input_ids=tokens,
        hash_indices_table=table,
    )
    np.testing.assert_array_equal(ids, table[tokens])
    s = np.take_along_axis(reference.scores_of(x, "softplus_sqrt"), table[tokens].astype(np.int64), -1)
    np.testing.assert_allclose(weights, reference.weights_of(s, True, 1.5), **CLOSE)
    assert (rows == -7).all()  # not written


@pytest.mark.parametrize("experts", [8, 64])
def test_hash_routing_out_of_range(array, experts):
    x, table = logits(3, experts), np.array([[0, 1], [2, experts], [-1, 3]], np.int32)
    made = [array.output(a) for a in outputs(3, 2)]
    options = {"hash_indices_table": array.input(table), "is_padding": array.input(np.array([0, 0, 1], np.uint8))}
    for tokens, match in (([0, 3, 9], "input_ids: 3 is out of range"), ([0, 1, 2], f"table: {experts} is out of")):
        with array.reports(match):
            pykv.topk_softplus_sqrt(
                *made, array.input(x), renormalize=True, input_ids=array.input(np.array(tokens)), **options
            )
        ids, weights = array.numpy(made[1]), array.numpy(made[0])
        np.testing.assert_array_equal(ids, [[0, 1], [-1, -1] if tokens[1] == 3 else [2, -1], [-1, -1]])
        np.testing.assert_array_equal(weights == 0, ids == -1)
        assert array.device == "cpu" or weights[0].sum() == pytest.approx(1)


@pytest.mark.parametrize("experts", [8, 64, 256])
@pytest.mark.parametrize("tokens", [30, 2500])
@pytest.mark.parametrize("hashed", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_tokens_of_images(array, experts, tokens, hashed, dtype):
    """They lie among others, whose experts come from a table, or are chosen by the other bias."""
    first, r = 20, random(4)
    x, of_text, of_images = logits(tokens, experts), bias(experts), -2 * bias(experts, seed=2)
    ids_of_tokens = r.integers(0, 30, tokens)
    is_image = (ids_of_tokens >= first) & (ids_of_tokens < first + 5)
    is_padding = r.integers(0, 5, tokens) == 0
    table = r.permuted(np.tile(np.arange(experts, dtype=np.int32), (30, 1)), axis=1)[:, :6]
    options = {"e_score_correction_bias": of_text.astype(dtype), "bias_vl": of_images.astype(dtype)}
    options |= {"image_sentinel_lo": first, "input_ids": ids_of_tokens, "is_padding": is_padding}
    options |= {"hash_indices_table": table} if hashed else {}
    weights, ids, _ = call(array, "softplus_sqrt", x, 6, **options)

    keys = np.where(is_image[:, None], *(reference.keys_of(x, "softplus_sqrt", b) for b in (of_images, of_text)))
    chosen = ~is_padding & (is_image | (not hashed))
    assert_chosen(ids[chosen], keys[chosen])
    if hashed:
        np.testing.assert_array_equal(ids[~chosen & ~is_padding], table[ids_of_tokens[~chosen & ~is_padding]])
    assert (ids[is_padding] == -1).all()
    assert (weights[is_padding] == 0).all()
    s = np.take_along_axis(reference.scores_of(x, "softplus_sqrt"), np.maximum(ids, 0).astype(np.int64), -1)
    np.testing.assert_allclose(weights[~is_padding], s[~is_padding], **CLOSE)


def test_without_a_first_id_no_token_is_one_of_an_image(array):
    x, b = logits(5, 16), bias(16)
    options = {"input_ids": np.arange(5), "bias_vl": b}
    _, ids, _ = call(array, "softplus_sqrt", x, 3, **options)
    np.testing.assert_array_equal(ids, reference.topk(x, 3, "softplus_sqrt")[0])


@pytest.mark.parametrize("scoring", ["none", "sigmoid", "softmax"])
@pytest.mark.parametrize("group_score", ["top2_sum", "max"])
@pytest.mark.parametrize(
    ("experts", "n_group", "topk_group", "k"),
    [(256, 8, 4, 8), (160, 8, 3, 6), (64, 1, 1, 6), (384, 1, 1, 8), (16, 16, 4, 4), (96, 3, 2, 7), (1020, 17, 3, 40)]
    + [(1024, 32, 4, 8), (12, 2, 2, 12), (992, 31, 31, 16)],
)
def test_groups(array, scoring, group_score, experts, n_group, topk_group, k):
    x = random(experts).standard_normal((40, experts)).astype(np.float32)
    b = random(1).standard_normal(experts).astype(np.float32) if n_group % 2 == 0 else None
    weights, ids, _ = outputs(40, k)
    made = array.output(weights), array.output(ids)
    pykv.grouped_topk(
        *made,
        array.input(x),
        n_group,
        topk_group,
        k,
        scoring != "none",
        2.5,
        None if b is None else array.input(b),
        ["none", "sigmoid", "softmax"].index(scoring),
        group_score,
    )
    ids = array.numpy(made[1])
    keys = reference.keys_of(x, scoring, b)
    wanted = reference.best(reference.kept(keys, n_group, topk_group, group_score), k)
    near = [keys * (1 + 1e-6 * random(seed).standard_normal(keys.shape)) for seed in range(4)]
    same = [wanted == reference.best(reference.kept(other, n_group, topk_group, group_score), k) for other in near]
    told_apart = np.all(same, axis=(0, -1))  # by fp32
    assert told_apart.mean() > 0.8
    np.testing.assert_array_equal(ids[told_apart], wanted[told_apart])
    s = np.take_along_axis(reference.scores_of(x, scoring), ids.astype(np.int64), -1)
    np.testing.assert_allclose(array.numpy(made[0]), reference.weights_of(s, scoring != "none", 2.5, 1e-20), rtol=5e-6)


@pytest.mark.parametrize("n_group", [1, 4])
@pytest.mark.parametrize("scoring_func", [0, 1])
def test_groups_of_scores_that_are_not_finite(array, n_group, scoring_func):
    scoring, x = ["none", "sigmoid"][scoring_func], logits(5, 32)
    x[0, :] = np.nan
    x[1, 7] = np.inf
    x[2, 8:] = -np.inf
    x[3, 2:] = np.nan
    made = array.output(outputs(5, 6)[0]), array.output(outputs(5, 6)[1])
    pykv.grouped_topk(*made, array.input(x), n_group, 1, 6, False, 2.0, None, scoring_func)
    ids, s = reference.grouped_topk(x, 6, scoring, None, n_group, 1, "top2_sum")
    np.testing.assert_array_equal(array.numpy(made[1]), ids)
    np.testing.assert_allclose(array.numpy(made[0]), s * 2, **CLOSE)


def test_groups_make_their_outputs(array):
    if array.device == "cuda" or array.name != "numpy":
        pytest.skip("how outputs are made does not depend on the operation")
    import pykv.functional

    weights, ids = pykv.functional.grouped_topk(logits(3, 16), 4, 2, 3, True, 1.0)
    assert (weights.shape, weights.dtype, ids.shape, ids.dtype) == ((3, 3), np.float32, (3, 3), np.int32)


@pytest.mark.parametrize("experts", [8, 256])
def test_a_token_gets_the_same_bits_in_any_batch(array, experts):
    x = random(5).standard_normal((300, experts)).astype(np.float32)
    together, ids, _ = call(array, "softmax", x, 4, renormalize=True)
    alone, own, _ = call(array, "softmax", x[123:124], 4, renormalize=True)
    np.testing.assert_array_equal(together[123], alone[0])
    np.testing.assert_array_equal(ids[123], own[0])


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"gating_output": np.zeros((3, 1025), np.float32)}, ValueError, "gating_output: at most 1024 experts"),
    ({"gating_output": np.zeros((3, 1), np.float32)}, ValueError, "topk_weights: must have at most num_experts = 1"),
    ({"gating_output": np.zeros((3, 8), np.int32)}, TypeError, "gating_output: dtype must be"),
    ({"topk_weights": np.zeros((4, 2), np.float32)}, ValueError, "topk_weights: dimension 0 must equal num_tokens"),
    ({"topk_ids": np.zeros((3, 2), np.uint8)}, TypeError, "topk_ids: dtype must be int32 or int64, got uint8"),
    ({"is_padding": np.zeros(3, np.int32)}, TypeError, "is_padding: dtype must be uint8"),
    ({"input_ids": np.zeros(3, np.int32)}, TypeError, "hash_indices_table: an array is required beside input_ids"),
    ({"bias_vl": np.zeros(8, np.float32)}, TypeError, "input_ids: an array is required beside bias_vl, got None"),
    (
        {"input_ids": np.zeros(3, np.int32), "bias_vl": np.zeros(7, np.float32)},
        ValueError,
        "bias_vl: dimension 0 must equal num_experts = 8",
    ),
    (
        {"input_ids": np.zeros(3, np.int32), "hash_indices_table": np.zeros((5, 2), np.uint8)},
        TypeError,
        "hash_indices_table: dtype must be int32 or int64",
    ),
]


@pytest.mark.parametrize(("wrong", "error", "match"), BAD)
def test_wrong_arguments(wrong, error, match):
    weights, ids, rows = outputs(3, 2)
    right = {"topk_weights": weights, "topk_ids": ids, "token_expert_indices": rows, "gating_output": logits(3, 8)}
    with pytest.raises(error, match=match):
        pykv.topk_softplus_sqrt(**(right | wrong))


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"n_group": 3}, "n_group: must be 1 to 32 and divide num_experts = 8, got 3"),
        ({"topk_group": 5}, "topk_group: must be 1 to n_group = 4, got 5"),
        ({"topk": 3}, "topk: must equal the columns of topk_weights, 2"),
        ({"scoring_func": 3}, "scoring_func: must be 0"),
        ({"group_score": "mean"}, "group_score: must be 'top2_sum' or 'max', got 'mean'"),
    ],
)
def test_wrong_groups(changed, match):
    weights, ids, _ = outputs(3, 2)
    right = {"n_group": 4, "topk_group": 1, "topk": 2, "renormalize": True, "routed_scaling_factor": 1.0}
    with pytest.raises(ValueError, match=match):
        pykv.grouped_topk(weights, ids, logits(3, 8), **(right | changed))
