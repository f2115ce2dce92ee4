"""Rows of tokens, sorted by expert and summed again."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from moe import reference
from moe.inputs import FLOATS, random

import pykv

TOLERANCE = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 2e-2}
E4M3 = ml_dtypes.float8_e4m3fn


def rows(*shape: int, dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    if np.dtype(dtype).kind in "iu":
        return random(seed).integers(0, 100, shape).astype(dtype)
    return random(seed).standard_normal(shape).astype(dtype)


def chosen(tokens: int, k: int, experts: int, seed: int = 0) -> np.ndarray:
    return np.argsort(random(seed).random((tokens, experts)), axis=1)[:, :k].astype(np.int32)


def permuted(ids: np.ndarray, experts: int, local: int, expert_map: np.ndarray | None) -> tuple[np.ndarray, ...]:
    """Pairs in order, where experts begin, and the place of each pair."""
    flat = ids.reshape(-1).astype(np.int64)
    known = (flat >= 0) & (flat < experts)
    here = flat if expert_map is None else np.where(known, expert_map[np.where(known, flat, 0)], -1)
    here = np.where((here >= 0) & (here < local) & known, here, local + flat)
    key = np.where(known, here, local + experts)
    order = np.argsort(key, kind="stable")
    place = np.empty(flat.size, np.int64)
    place[order] = np.arange(flat.size)
    return order, np.searchsorted(key[order], np.arange(local + 1)), place.reshape(ids.shape)


def permute(array: Any, x: np.ndarray, ids: np.ndarray, experts: int, expert_map: Any = None, local: int = 0) -> Any:
    local = local or experts
    tokens, k = ids.shape
    made = [
        array.output(np.full((tokens * k, x.shape[1]), 3).astype(x.dtype)),
        array.output(np.full(local + 1, 99, np.int64)),
        array.output(np.full(ids.shape, 99, np.int32)),
        array.output(np.full(ids.size, 99, np.int32)),
    ]
    source_rows = array.input(np.arange(ids.size, dtype=np.int32).reshape(ids.shape))
    given = None if expert_map is None else array.input(expert_map)
    pykv.moe_permute(array.input(x), array.input(ids), source_rows, given, experts, local, k, *made)
    return [array.numpy(a) for a in made]


def check_permuted(found: Any, x: np.ndarray, ids: np.ndarray, experts: int, expert_map: Any, local: int) -> None:
    order, first, place = permuted(ids, experts, local, expert_map)
    valid = first[-1]
    np.testing.assert_array_equal(found[0][:valid].view(np.uint8), x[order[:valid] // ids.shape[1]].view(np.uint8))
    assert (found[0][valid:] == np.full(1, 3).astype(x.dtype)).all()  # not written
    np.testing.assert_array_equal(found[1], first)
    np.testing.assert_array_equal(found[2], place)
    np.testing.assert_array_equal(found[3], np.where(np.arange(ids.size) < valid, order, ids.size))


@pytest.mark.parametrize("dtype", [*FLOATS, np.uint8, np.int64])
@pytest.mark.parametrize(("tokens", "k", "width", "experts"), [(0, 2, 8, 4), (1, 8, 7168, 256), (9, 2, 33, 8)])
def test_permute(array, dtype, tokens, k, width, experts):
    x, ids = rows(tokens, width, dtype=dtype), chosen(tokens, k, experts)
    check_permuted(permute(array, x, ids, experts), x, ids, experts, None, experts)


def test_more_than_65535_tokens(array):
    """There and back again; the sum of a token's two rows is twice its own."""
    x, ids = rows(70000, 8, dtype=np.float16), chosen(70000, 2, 60)
    found = permute(array, x, ids, 60)
    check_permuted(found, x, ids, 60, None, 60)
    moved, place = array.input(found[0]), array.input(found[2])
    out = [array.output(np.zeros_like(x)) for _ in range(2)]
    pykv.moe_unpermute(moved, array.input(np.ones((70000, 2), np.float32)), place, None, 2, out[0])
    pykv.moe_sum(array.input(np.stack([x, x], 1)), out[1])
    for sums in out:
        np.testing.assert_array_equal(array.numpy(sums), 2 * x)
    back = array.output(np.zeros_like(x))
    pykv.shuffle_rows(moved, array.input(found[2][:, 1].copy()), back)
    np.testing.assert_array_equal(array.numpy(back), x)


@pytest.mark.parametrize("tokens", [40, 1500])
@pytest.mark.parametrize("with_map", [False, True])
def test_permute_some_experts(array, tokens, with_map):
    """Every fourth expert is here; ids of -1 stand for none."""
    x, ids = rows(tokens, 48, dtype=np.float16), chosen(tokens, 6, 64)
    ids[::3, 1] = -1
    expert_map = np.where(np.arange(64) % 4 == 2, np.arange(64) // 4, -1).astype(np.int32) if with_map else None
    local = 16 if with_map else 64
    check_permuted(permute(array, x, ids, 64, expert_map, local), x, ids, 64, expert_map, local)


def test_permute_strided_rows(array):
    wide, ids = rows(30, 100), chosen(30, 4, 8)
    x = wide[::2, 3:35]
    check_permuted(permute(array, x, ids[:15], 8), np.ascontiguousarray(x), ids[:15], 8, None, 8)


def test_permute_with_int32_offsets(array):
    x, ids = rows(10, 8), chosen(10, 2, 4)
    shapes = ((20, 8), np.float32), ((5,), np.int32), ((10, 2), np.int32), ((20,), np.int32)
    made = [array.output(np.zeros(shape, dtype)) for shape, dtype in shapes]
    pykv.moe_permute(array.input(x), array.input(ids), None, None, 4, 4, 2, *made)
    check_permuted([array.numpy(a) for a in made], x, ids, 4, None, 4)


def test_permute_ids_out_of_range(array):
    x, ids = rows(10, 8), chosen(10, 2, 4)
    ids[4, 1] = 4
    shapes = ((20, 8), np.float32), ((5,), np.int64), ((10, 2), np.int32), ((20,), np.int32)
    made = [array.output(np.full(shape, 3, dtype)) for shape, dtype in shapes]
    with array.reports("moe_permute: topk_ids: 4 is out of range"):
        pykv.moe_permute(array.input(x), array.input(ids), None, None, 4, 4, 2, *made)
    check_permuted([array.numpy(a) for a in made], x, ids, 4, None, 4)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "k", "width"), [(0, 2, 8), (1, 8, 7168), (7, 1, 5), (65, 6, 264), (300, 11, 40)])
@pytest.mark.parametrize("with_offsets", [np.int64, np.int32, None])
def test_unpermute(array, dtype, tokens, k, width, with_offsets):
    y, weights = rows(tokens * k, width, dtype=dtype), rows(tokens, k, seed=1)
    place = random(2).permutation(tokens * k).reshape(tokens, k).astype(np.int32)
    valid = tokens * k if with_offsets is None else tokens * k * 2 // 3
    offsets = None if with_offsets is None else array.input(np.array([0, valid // 2, valid], with_offsets))
    if with_offsets:
        y[valid:] = np.nan  # not read
    out = array.output(np.full((tokens, width), 3).astype(dtype))
    flat = place.reshape(-1) if tokens == 7 else place  # vLLM has either
    pykv.moe_unpermute(array.input(y), array.input(weights), array.input(flat), offsets, k, out)
    terms = np.where((place < valid)[..., None], y[place].astype(np.float64), 0) * weights[..., None].astype(np.float64)
    wanted, bound = terms.sum(1), TOLERANCE[np.dtype(dtype).name]
    np.testing.assert_allclose(array.numpy(out).astype(np.float64), wanted, rtol=bound, atol=bound * np.sqrt(k))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [1, 2, 3, 11])
def test_sums_of_many_tokens(array, dtype, k):
    """More than find room at once; some rows are not there."""
    tokens, width = 34001, 32
    y = np.resize(rows(1009, width, dtype=dtype), (tokens * k, width))
    weights = np.resize(rows(1013, k, seed=1), (tokens, k))
    place = random(2).permutation(tokens * k).reshape(tokens, k).astype(np.int32)
    place[::5, 0] = -1
    y.reshape(tokens, k, width)[::7, -1] = np.nan
    ids = np.where(np.arange(k) == k - 1, np.where(np.arange(tokens) % 7 == 0, -1, 3)[:, None], 5).astype(np.int32)
    valid = np.isfinite(y[:, 0].astype(np.float64)).reshape(tokens, k)
    place[(place >= 0) & ~valid.reshape(-1)[place]] = -1
    x = array.input(y.reshape(tokens, k, width))
    made = [array.output(np.full((tokens, width), 3).astype(dtype)) for _ in range(2)]
    pykv.moe_unpermute(array.input(y), array.input(weights), array.input(place), None, k, made[0])
    pykv.moe_sum(x, made[1], array.input(ids))
    exact, bound = y.astype(np.float64), TOLERANCE[np.dtype(dtype).name]
    terms = np.where((place >= 0)[..., None], exact[place], 0) * weights[..., None].astype(np.float64)
    plain = np.where(valid[..., None], exact.reshape(tokens, k, width), 0)
    for out, wanted in ((made[0], terms.sum(1)), (made[1], plain.sum(1))):
        np.testing.assert_allclose(array.numpy(out).astype(np.float64), wanted, rtol=bound, atol=bound * np.sqrt(k))


def test_unpermute_without_rows(array):
    """Negative places are none, and those beyond the rows are reported."""
    y, weights = rows(6, 16), np.ones((3, 2), np.float32)
    out = array.output(np.zeros((3, 16), np.float32))
    place = np.array([[0, 5], [-1, 3], [6, 2]], np.int64)
    with array.reports("moe_unpermute: inv_permuted_idx: 6 is out of range"):
        pykv.moe_unpermute(array.input(y), array.input(weights), array.input(place), None, 2, out)
    np.testing.assert_allclose(array.numpy(out), [y[0] + y[5], y[3], y[2]], rtol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("tokens", "k", "width"), [(0, 2, 8), (1, 8, 2048), (9, 2, 33), (65, 3, 256), (40, 9, 520)])
@pytest.mark.parametrize("known", ["nothing", "ids", "ids and map"])
def test_sum(array, dtype, tokens, k, width, known):
    x, ids = rows(tokens, k, width, dtype=dtype), chosen(tokens, k, 16)
    ids[::2, 0] = -1
    expert_map = np.where(np.arange(16) % 3 == 0, -1, np.arange(16)).astype(np.int32)
    read = np.ones((tokens, k), bool)
    given: dict[str, Any] = {}
    if known != "nothing":
        read, given["topk_ids"] = ids >= 0, array.input(ids)
    if known == "ids and map":
        read, given["expert_map"] = read & (expert_map[ids] >= 0), array.input(expert_map)
    x[~read] = np.nan  # not read
    out = array.output(np.full((tokens, width), 3).astype(dtype))
    pykv.moe_sum(array.input(x), out, **given)
    wanted, bound = np.where(read[..., None], x.astype(np.float64), 0).sum(1), TOLERANCE[np.dtype(dtype).name]
    np.testing.assert_allclose(array.numpy(out).astype(np.float64), wanted, rtol=bound, atol=bound * np.sqrt(k))


@pytest.mark.parametrize("dtype", FLOATS)
def test_sum_rounds_once(array, dtype):
    """vLLM rounds after each addition of two, three and four rows."""
    step = np.finfo(np.float32).eps if dtype is np.float32 else float(ml_dtypes.finfo(dtype).eps)
    x = np.array([[1], [step / 2], [step / 2], [step / 2]]).astype(dtype) * np.ones((1, 4, 8), dtype)
    out = array.output(np.zeros((1, 8), dtype))
    pykv.moe_sum(array.input(x), out)
    wanted = np.float32(1) if dtype is np.float32 else np.float32(1 + 2 * step)  # of 1 + 1.5 steps, ties to even
    np.testing.assert_array_equal(array.numpy(out).astype(np.float32), np.full((1, 8), wanted))


@pytest.mark.parametrize("offset", [0, 1])
def test_sum_strides(array, offset):
    wide = rows(10, 6, 80, dtype=np.float16)
    x = wide[::2, 1::2, offset : offset + 64]
    for view in (x, x.transpose(1, 0, 2)):
        out = array.output(np.zeros((view.shape[0], 80), np.float16)[:, :64])
        pykv.moe_sum(array.input(view), out)
        wanted = view.astype(np.float64).sum(1)
        np.testing.assert_allclose(array.numpy(out).astype(np.float64), wanted, rtol=2e-3, atol=4e-3)


def test_rows_that_lie_backwards(array):
    """They begin before the first one, which is where the array does."""
    if array.module == "torch":
        pytest.skip("torch has no negative strides")
    x, place = rows(6, 3, 16), np.array([[3, -1], [5, 0], [1, 2]], np.int32)
    for backwards in (x[::-1], x[:, ::-1], x[::-1, ::-1]):
        out = array.output(np.zeros((6, 16), np.float32))
        pykv.moe_sum(array.input(backwards), out)
        np.testing.assert_allclose(array.numpy(out), backwards.astype(np.float64).sum(1), rtol=1e-5, atol=1e-6)
    y, weights = x[::-1, 0], np.ones((3, 2), np.float32)
    out = array.output(np.zeros((3, 16), np.float32)[::-1])
    pykv.moe_unpermute(array.input(y), array.input(weights), array.input(place), None, 2, out)
    np.testing.assert_allclose(array.numpy(out), [y[3], y[5] + y[0], y[1] + y[2]], rtol=1e-6)


def test_sum_id_out_of_range(array):
    x, ids = rows(2, 2, 8), np.array([[0, 3], [1, 2]], np.int64)
    out = array.output(np.zeros((2, 8), np.float32))
    with array.reports("moe_sum: topk_ids: 3 is out of range"):
        pykv.moe_sum(array.input(x), out, array.input(ids), array.input(np.array([0, 1, 2], np.int64)))
    np.testing.assert_allclose(array.numpy(out), [x[0, 0], x[1].sum(0)], rtol=1e-6)


@pytest.mark.parametrize("dtype", [*FLOATS, E4M3, np.uint8, np.int8, np.int64])
@pytest.mark.parametrize(("sources", "targets", "width"), [(5, 0, 8), (1, 9, 4096), (70, 33, 17), (30, 200, 264)])
@pytest.mark.parametrize("id_dtype", [np.int32, np.int64])
def test_shuffle(array, dtype, sources, targets, width, id_dtype):
    x, where = rows(sources, width, dtype=dtype), random(3).integers(-1, sources, targets).astype(id_dtype)
    out = array.output(np.full((targets, width), 3).astype(dtype))
    given = array.input(x)
    if dtype is E4M3 and str(getattr(given, "dtype", "")) != str(getattr(out, "dtype", "")):
        pytest.skip("JAX has fp8 on CUDA, what is written for it is of CuPy, which has not")
    pykv.shuffle_rows(given, array.input(where), out)
    wanted = np.where((where >= 0)[:, None], x.view(f"u{x.itemsize}")[where], 0)
    np.testing.assert_array_equal(np.ascontiguousarray(array.numpy(out)).view(wanted.dtype), wanted)


def test_shuffle_out_of_range_and_strides(array):
    x = rows(12, 40, dtype=np.float16)[::2, 1:33]
    out = array.output(np.ones((8, 40), np.float16)[::2, :32])
    with array.reports("shuffle_rows: dst2src_map: 6 is out of range"):
        pykv.shuffle_rows(array.input(x), array.input(np.array([5, 6, -1, 0])), out)
    np.testing.assert_array_equal(array.numpy(out), np.stack([x[5], 0 * x[0], 0 * x[0], x[0]]))


def test_there_and_back(array):
    """Permuting and summing with weights of 1 / k gives the tokens again."""
    x, ids = rows(200, 128), chosen(200, 4, 32)
    moved, first, place, _ = permute(array, x, ids, 32)
    weights, out = np.full((200, 4), 0.25, np.float32), array.output(np.zeros((200, 128), np.float32))
    given = [array.input(np.ascontiguousarray(a)) for a in (moved, weights, place, first)]
    pykv.moe_unpermute(*given, 4, out)
    np.testing.assert_array_equal(array.numpy(out), x)
    assert reference.bins_of(ids, 32).min() >= 0


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda x, i: pykv.shuffle_rows(x, i[:3], np.zeros((4, 8), "f4")),
            "dst2src_map: dimension 0 must equal rows of",
        ),
        (
            lambda x, i: pykv.shuffle_rows(x, i[:4], np.zeros((4, 7), "f4")),
            "output_tensor: dimension 1 must equal width",
        ),
        (lambda x, i: pykv.moe_sum(x[:, None], x, None, i), "topk_ids: an array is required beside expert_map"),
        (
            lambda x, i: pykv.moe_unpermute(x, x[:, :2], i.reshape(-1, 2), None, -1, x.copy()),
            "topk: must equal the col",
        ),
        (
            lambda x, i: pykv.moe_permute(x, i.reshape(-1, 2), None, None, 4, 3, 2, x, i, i, i),
            "n_local_expert: must be 1 to n_expert = 4, or without expert_map equal it, got 3",
        ),
        (lambda x, i: pykv.moe_permute(x, i.reshape(-1, 2), None, None, 4, 4, 3, x, i, i, i), "topk: must equal the"),
    ],
)
def test_wrong_arguments(call, match):
    with pytest.raises((ValueError, TypeError), match=match):
        call(np.zeros((6, 8), np.float32), np.zeros(12, np.int32))
