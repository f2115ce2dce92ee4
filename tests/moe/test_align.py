from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from moe import reference
from moe.inputs import random

import pykv


def pairs(tokens: int, k: int, experts: int, dtype: Any = np.int32, seed: int = 0) -> np.ndarray:
    """Distinct experts for each token, a few of them far more often than the others."""
    weight = random(seed).random((tokens, experts)) * random(1).random(experts) ** 2
    return np.argsort(-weight, axis=1)[:, :k].astype(dtype)


def least_capacity(num_pairs: int, experts: int, block: int) -> int:
    return num_pairs + min(num_pairs, experts) * (block - 1)


def align(array: Any, ids: np.ndarray, experts: int, block: int, expert_map: Any = None, more: int = 0) -> Any:
    """Places, blocks, places taken, and the place of each pair."""
    capacity = least_capacity(ids.size, experts, block)
    sizes = (capacity + more, capacity // block + more, 1, ids.size)
    made = [array.output(np.full(n, 99, np.int32)) for n in sizes]
    given = None if expert_map is None else array.input(expert_map)
    pykv.moe_align_block_size(array.input(ids), experts, block, *made[:3], given, made[3])
    return [array.numpy(a) for a in made]


def check(found: Any, ids: np.ndarray, experts: int, block: int, expert_map: Any = None) -> None:
    places, blocks, taken, where = found
    bins = reference.bins_of(ids, experts, expert_map)
    wanted = reference.align(reference.rows_of(bins, experts), block, len(places), len(blocks), ids.size)
    np.testing.assert_array_equal(places, wanted[0])
    np.testing.assert_array_equal(blocks, wanted[1])
    assert taken[0] == wanted[2]
    position = np.full(ids.size + 1, -1)
    position[places] = np.arange(len(places))
    np.testing.assert_array_equal(where, np.where(bins >= 0, position[:-1], -1))


@pytest.mark.parametrize("block", [1, 16, 48, 128])
@pytest.mark.parametrize(
    ("tokens", "k", "experts"),
    [(0, 2, 8), (1, 2, 8), (1, 8, 256), (4, 3, 5), (33, 2, 8), (64, 8, 128), (100, 6, 64), (300, 8, 256)]
    + [(513, 4, 33), (4096, 2, 8), (4097, 8, 256), (70000, 1, 1), (70000, 2, 60), (3000, 10, 1024), (200, 1, 2000)]
    + [(16, 2, 8), (32, 1, 40), (11, 3, 3), (8, 4, 700), (2100, 1, 3)],
)
def test_sizes(array, tokens, k, experts, block):
    ids = pairs(tokens, k, experts)
    check(align(array, ids, experts, block), ids, experts, block)


def test_the_example(array):
    ids = np.array([[2, 3, 4], [1, 2, 4], [1, 3, 4], [1, 2, 3]], np.int32)
    places, blocks, taken, _ = align(array, ids, 5, 4)
    np.testing.assert_array_equal(places[:16], [3, 6, 9, 12, 0, 4, 10, 12, 1, 7, 11, 12, 2, 5, 8, 12])
    np.testing.assert_array_equal(blocks[:4], [1, 2, 3, 4])
    assert (places[16:] == 12).all()
    assert (blocks[4:] == -1).all()
    assert taken[0] == 16


@pytest.mark.parametrize("tokens", [5, 900])
def test_more_room_than_wanted(array, tokens):
    ids = pairs(tokens, 4, 16)
    check(align(array, ids, 16, 16, more=20000), ids, 16, 16)


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_dtypes_of_ids(array, dtype):
    if dtype is np.uint32 and array.module == "torch":
        pytest.skip("the test's arrays of torch have no uint32")
    ids = pairs(50, 4, 16, dtype)
    check(align(array, ids, 16, 8), ids, 16, 8)


@pytest.mark.parametrize("tokens", [7, 1500])
def test_strided_ids(array, tokens):
    for ids in (
        pairs(tokens, 8, 16)[:, ::2],
        pairs(2 * tokens, 4, 16)[::2],
        np.ascontiguousarray(pairs(tokens, 4, 16).T).T,
    ):
        check(align(array, ids, 16, 8), ids, 16, 8)


@pytest.mark.parametrize("tokens", [5, 20, 2000])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_expert_map(array, tokens, dtype):
    """Every third expert is here; ids of -1 stand for none."""
    ids = pairs(tokens, 6, 48)
    ids[::5, 2] = -1
    expert_map = np.where(np.arange(48) % 3 == 1, np.arange(48) // 3, -1).astype(dtype)
    check(align(array, ids, 48, 16, expert_map), ids, 48, 16, expert_map)


def test_all_pairs_of_one_expert_and_none_at_all(array):
    for tokens, expert in ((3000, 7), (3000, -1), (10, 7), (10, -1)):
        ids = np.full((tokens, 2), expert, np.int32)
        check(align(array, ids, 64, 32), ids, 64, 32)


@pytest.mark.parametrize("tokens", [6, 10, 1000])
def test_ids_out_of_range(array, tokens):
    ids = pairs(tokens, 4, 16)
    ids[3, 1] = 16
    ids[4] = np.iinfo(np.int32).max
    ids[5] = np.iinfo(np.int32).min
    capacity = least_capacity(ids.size, 16, 8)
    made = [array.output(np.full(n, 99, np.int32)) for n in (capacity, capacity // 8, 1, ids.size)]
    with array.reports("moe_align_block_size: topk_ids: "):
        pykv.moe_align_block_size(array.input(ids), 16, 8, *made[:3], None, made[3])
    check([array.numpy(a) for a in made], ids, 16, 8)


def test_map_out_of_range(array):
    ids = pairs(10, 4, 16)
    expert_map = np.arange(16, dtype=np.int32)
    expert_map[ids[0, 0]] = 16
    made = [array.output(np.full(n, 99, np.int32)) for n in (200, 40, 1)]
    with array.reports("expert_map: 16 is out of range"):
        pykv.moe_align_block_size(array.input(ids), 16, 4, *made, array.input(expert_map))
    bins = reference.bins_of(ids, 16, expert_map)
    wanted = reference.align(reference.rows_of(bins, 16), 4, 200, 40, 40)
    np.testing.assert_array_equal(array.numpy(made[0]), wanted[0])


@pytest.mark.parametrize(
    ("experts", "rows", "block"), [(0, 4, 2), (1, 1, 1), (8, 33, 16), (64, 100, 48), (300, 64, 64)]
)
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_batched(array, experts, rows, block, dtype):
    counts = random(0).integers(0, rows + 1, experts).astype(dtype)
    counts[::3] = 0
    capacity = experts * -(-rows // block) * block
    made = [array.output(np.full(n, 99, np.int32)) for n in (capacity + 5, capacity // block + 2, 1)]
    pykv.batched_moe_align_block_size(rows, block, array.input(counts), *made)
    lists = [b * rows + np.arange(n) for b, n in enumerate(counts)]
    wanted = reference.align(lists, block, capacity + 5, capacity // block + 2, experts * rows)
    for found, value in zip(made, wanted, strict=True):
        np.testing.assert_array_equal(array.numpy(found), np.reshape(value, -1))


def test_batched_counts_out_of_range(array):
    made = [array.output(np.full(n, 99, np.int32)) for n in (24, 6, 1)]
    with array.reports("expert_num_tokens: 9 is out of range"):
        pykv.batched_moe_align_block_size(8, 4, array.input(np.array([9, -1, 3])), *made)
    lists = [np.arange(8), np.arange(0), 16 + np.arange(3)]
    np.testing.assert_array_equal(array.numpy(made[0]), reference.align(lists, 4, 24, 6, 24)[0])


@pytest.mark.parametrize("tokens", [0, 9, 1200, 70000])
@pytest.mark.parametrize("flat", [True, False])
def test_lora(array, tokens, flat):
    experts, block, loras, k = 24, 16, 4, 3
    ids, of_token = pairs(tokens, k, experts), random(2).integers(-1, loras, tokens)
    capacity = least_capacity(tokens * k, experts, block) + 7
    num_blocks = capacity // block
    shapes = [(loras * capacity,), (loras * num_blocks,)] if flat else [(loras, capacity), (loras, num_blocks)]
    made = [array.output(np.full(s, 99, np.int32)) for s in (*shapes, (loras,))]
    enabled = np.array([1, 1, 0, 1, 0], np.int32)
    listed = np.array([3, -1, 0, 2], np.int32)  # 1 is enabled, but not listed; 2 is listed, but not enabled
    expert_map = np.where(np.arange(experts) % 4 == 3, -1, np.arange(experts) * 3 // 4).astype(np.int32)
    pykv.moe_lora_align_block_size(
        array.input(ids), array.input(of_token), experts, block, loras, capacity, num_blocks, *made,
        array.input(enabled), array.input(listed), array.input(expert_map),
    )  # fmt: skip
    places, blocks, taken = (array.numpy(a).reshape(loras, -1) for a in made)
    bins = reference.bins_of(ids, experts, expert_map)
    for lora in range(loras):
        if lora not in (3, 0):
            assert all((a[lora] == 99).all() for a in (places, blocks, taken))
            continue
        rows = reference.rows_of(bins, experts, np.repeat(of_token == lora, k))
        wanted = reference.align(rows, block, capacity, num_blocks, tokens * k)
        np.testing.assert_array_equal(places[lora], wanted[0])
        np.testing.assert_array_equal(blocks[lora], wanted[1])
        assert taken[lora, 0] == wanted[2]


def test_lora_out_of_range(array):
    made = [array.output(np.full(n, 99, np.int32)) for n in (2 * 8, 2 * 4, 2)]
    given = [array.input(np.array(a, np.int32)) for a in ([[0, 1], [1, 0]], [0, 1])]
    with array.reports("lora_ids: 2 is out of range"):
        pykv.moe_lora_align_block_size(
            *given, 3, 2, 2, 8, 4, *made, *(array.input(np.array(a, np.int32)) for a in ([1, 1], [2, 1]))
        )
    np.testing.assert_array_equal(array.numpy(made[0]).reshape(2, 8)[1], [3, 4, 2, 4, 4, 4, 4, 4])


@pytest.mark.parametrize(
    ("tokens", "topk", "experts"), [(0, 2, 4), (1, 2, 8), (8, 8, 16), (9, 8, 64), (700, 8, 256), (70000, 2, 8)]
)
@pytest.mark.parametrize("with_scales", [True, False])
@pytest.mark.parametrize("is_gated", [True, False])
def test_cutlass(array, tokens, topk, experts, with_scales, is_gated):
    ids = pairs(tokens, topk, experts)
    ids[::7, 0] = -1
    wanted = reference.cutlass(ids, experts, 96, 64, is_gated, not with_scales and tokens * topk <= 64)
    made = {name: array.output(np.full(value.shape, 99, np.int32)) for name, value in wanted.items()}
    made["input_permutation"] = array.output(np.full(ids.size, 99, np.int32))
    scales = made["blockscale_offsets"] if with_scales else None
    outputs = [a for name, a in made.items() if name != "blockscale_offsets"]
    pykv.get_cutlass_moe_mm_data(array.input(ids), *outputs, experts, 96, 64, scales, is_gated)
    for name, value in wanted.items():
        if name != "blockscale_offsets" or with_scales:
            np.testing.assert_array_equal(array.numpy(made[name])[: len(value)], value)
    assert (array.numpy(made["input_permutation"])[len(wanted["input_permutation"]) :] == 99).all()


@pytest.mark.parametrize("experts", [0, 1, 300])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("swap", [True, False])
def test_problem_sizes(array, experts, dtype, swap):
    counts = random(0).integers(0, 50, experts)
    made = [array.output(np.full((experts, 3), 99, np.int32)) for _ in range(2)]
    offsets = np.append(0, np.cumsum(counts)).astype(dtype)
    pykv.get_cutlass_moe_mm_problem_sizes_from_expert_offsets(array.input(offsets), *made, 96, 64, swap)
    for found, value in zip(made, reference.problems(counts, 192, 96, 64, swap), strict=True):
        np.testing.assert_array_equal(array.numpy(found), value)


@pytest.mark.parametrize("more", [0, 1])
@pytest.mark.parametrize("experts", [0, 1, 300])
def test_batched_problem_sizes(array, experts, more):
    counts = random(0).integers(0, 50, experts).astype(np.int32)
    made = [array.output(np.full(s, 99, np.int32)) for s in ((experts + more,), (experts, 3), (experts, 3))]
    pykv.get_cutlass_batched_moe_mm_data(*made, array.input(counts), experts, 50, 96, 64)
    np.testing.assert_array_equal(array.numpy(made[0]), np.arange(experts + more) * 50)
    for found, value in zip(made[1:], reference.problems(counts, 192, 96, 64, False), strict=True):
        np.testing.assert_array_equal(array.numpy(found), value)


@pytest.mark.parametrize("experts", [-1, 2])
def test_batched_problem_sizes_of_another_number_of_experts(experts):
    made = [np.zeros(s, np.int32) for s in ((3,), (3, 3), (3, 3))]
    with pytest.raises(ValueError, match=f"num_local_experts: must equal .* 3, got {experts}"):
        pykv.get_cutlass_batched_moe_mm_data(*made, np.zeros(3, np.int32), experts, 50, 96, 64)


RIGHT: dict[str, Any] = {
    "topk_ids": np.zeros((4, 2), np.int32),
    "num_experts": 3,
    "block_size": 4,
    "sorted_token_ids": np.zeros(17, np.int32),
    "experts_ids": np.zeros(4, np.int32),
    "num_tokens_post_pad": np.zeros(1, np.int32),
}


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        ({"num_experts": 0}, ValueError, "num_experts: must be 1 to 65536, got 0"),
        ({"block_size": 0}, ValueError, "block_size: must be positive"),
        ({"sorted_token_ids": np.zeros(16, np.int32)}, ValueError, "sorted_token_ids: must have room for 17 places"),
        ({"experts_ids": np.zeros(3, np.int32)}, ValueError, "experts_ids: must have room for 4 blocks"),
        ({"sorted_token_ids": np.zeros(40, np.int32)[::2]}, ValueError, "sorted_token_ids: .*contiguous"),
        ({"topk_ids": np.zeros((4, 2), np.float32)}, TypeError, "topk_ids: dtype must be int32 or int64"),
        ({"expert_map": np.zeros(4, np.int32)}, ValueError, "expert_map: dimension 0 must equal num_experts = 3"),
        ({"scatter_idx": np.zeros(7, np.int32)}, ValueError, "scatter_idx: must have 8 elements"),
        ({"block_size": 2**31 - 1}, NotImplementedError, "block_size: with padding there are up to"),
    ],
)
def test_wrong_arguments(wrong, error, match):
    pykv.moe_align_block_size(**RIGHT)
    with pytest.raises(error, match=match):
        pykv.moe_align_block_size(**(RIGHT | wrong))
