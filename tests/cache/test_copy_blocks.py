from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache import inputs, reference
from hypothesis import given
from hypothesis import strategies as st
from libraries import Library

import pykv

# Memory of a layer, and where the key and the value cache lie in it.
LAYOUTS: dict[str, tuple[tuple[int, ...], inputs.View, inputs.View]] = {
    "K then V": ((2, 11, 4, 3, 24), lambda m: m[0, 1:], lambda m: m[1, 1:]),
    "blocks of K and V in turn": ((10, 2, 4, 3, 24), lambda m: m[:, 0], lambda m: m[:, 1]),
    "tokens of K and V in turn": ((10, 4, 2, 3, 24), lambda m: m[:, :, 0], lambda m: m[:, :, 1]),
    "heads of K and V in turn": ((10, 4, 3, 2, 24), lambda m: m[:, :, :, 0], lambda m: m[:, :, :, 1]),
    "elements of K and V in turn": ((10, 4, 3, 24, 2), lambda m: m[..., 0], lambda m: m[..., 1]),
    "heads first": ((2, 10, 3, 4, 24), lambda m: m[0].swapaxes(1, 2), lambda m: m[1].swapaxes(1, 2)),
    "blocks last": ((2, 3, 4, 24, 10), lambda m: m[0].swapaxes(0, 3), lambda m: m[1].swapaxes(0, 3)),
    "rows with gaps": ((2, 10, 4, 3, 29), lambda m: m[0, ..., 3:27], lambda m: m[1, ..., :24]),
    "three gaps": ((2, 10, 5, 4, 4, 9), lambda m: m[0, :, 1:, :3, 1:, :8], lambda m: m[1, :, :4, 1:, :3, 1:]),
    "one-dimensional": ((2, 10), lambda m: m[0], lambda m: m[1]),
}
ALL_DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.uint8]


def memories(array: Library, layout: str, layers: int, dtype: Any = np.float16, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    expected = [inputs.bits(rng, LAYOUTS[layout][0], np.dtype(dtype)) for _ in range(layers)]
    return expected, [array.output(m) for m in expected]


def views(all_memory: list[Any], layout: str) -> tuple[list[Any], list[Any]]:
    _, key, value = LAYOUTS[layout]
    return [inputs.view(m, key) for m in all_memory], [inputs.view(m, value) for m in all_memory]


def assert_same(array: Library, actual: list[Any], expected: list[np.ndarray]) -> None:
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(
            np.ascontiguousarray(array.numpy(got)).reshape(-1).view(np.uint8), wanted.reshape(-1).view(np.uint8)
        )


def check(
    array: Library, mapping: np.ndarray, layout: str, layers: int = 2, on_device: bool = False, **kwargs: Any
) -> None:
    expected, actual = memories(array, layout, layers, **kwargs)
    keys, values = views(expected, layout)
    reference.copy_blocks(keys + values, mapping)
    pykv.copy_blocks(*views(actual, layout), array.input(mapping) if on_device else mapping)
    assert_same(array, actual, expected)


INDEPENDENT = np.array([[0, 9], [3, 1], [0, 2], [5, 4], [8, 6]])
IN_ORDER = np.array([[0, 1], [1, 2], [2, 3], [4, 0], [3, 4], [4, 4], [5, 2], [6, 2], [2, 7], [7, 6], [9, 5]])


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_layouts(array: Library, dtype: Any, layout: str, on_device: bool) -> None:
    check(array, INDEPENDENT, layout, dtype=dtype, on_device=on_device)


@pytest.mark.parametrize("layout", ["K then V", "tokens of K and V in turn"])
@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_rows_on_the_host_take_effect_in_order(array: Library, ids: type, layout: str) -> None:
    check(array, IN_ORDER.astype(ids), layout)
    check(array, IN_ORDER[::-1].astype(ids), layout)


@given(data=st.data())
def test_any_order(array: Library, data: st.DataObject) -> None:
    block = st.integers(0, 9)
    mapping = data.draw(st.lists(st.tuples(block, block), max_size=30))
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)))
    check(array, np.array(mapping, np.int64).reshape(-1, 2), layout, layers=1)


@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_strides_of_the_mapping(array: Library, ids: type) -> None:
    wide = np.full((10, 6), 77, ids)
    wide[::2, 1], wide[::2, 4] = INDEPENDENT.T
    strided = wide[::2, 1::3]
    check(array, strided, "K then V", on_device=True)
    check(array, strided, "K then V")


def test_many_layers(array: Library) -> None:
    """More arrays than one launch holds."""
    check(array, INDEPENDENT, "K then V", layers=70)
    check(array, IN_ORDER, "K then V", layers=70)


@pytest.mark.parametrize("on_device", [False, True])
def test_many_pairs(array: Library, on_device: bool) -> None:
    """More pairs than one launch holds."""
    rng = np.random.default_rng(0)
    blocks = rng.permutation(1000)
    pairs = np.stack([blocks[:300], blocks[300:600]], 1)
    expected = inputs.bits(rng, (1000, 3, 5), np.dtype(np.float32))
    actual = [array.output(expected), array.output(expected)]
    reference.copy_blocks([expected], pairs)
    pykv.copy_blocks(actual[:1], actual[1:], array.input(pairs) if on_device else pairs)
    assert_same(array, actual, [expected, expected])


def test_large_blocks(array: Library) -> None:
    rng = np.random.default_rng(0)
    expected = inputs.bits(rng, (3, 700_001), np.dtype(np.float32))
    actual = [array.output(expected), array.output(expected)]
    pairs = np.array([[0, 2]])
    reference.copy_blocks([expected], pairs)
    pykv.copy_blocks(actual[:1], actual[1:], pairs)
    assert_same(array, actual, [expected, expected])


def test_layers_of_different_shapes(array: Library) -> None:
    rng = np.random.default_rng(0)
    shapes = [(10, 4, 8), (10, 4, 8), (10, 2, 3, 5), (10, 4, 8)]
    expected = [inputs.bits(rng, shape, np.dtype(np.float16)) for shape in shapes]
    actual = [array.output(m) for m in expected]
    reference.copy_blocks(expected, INDEPENDENT)
    pykv.copy_blocks(actual[:2], tuple(actual[2:]), INDEPENDENT)
    assert_same(array, actual, expected)


@pytest.mark.parametrize("on_device", [False, True])
def test_nothing_to_do(array: Library, on_device: bool) -> None:
    check(array, np.zeros((0, 2), np.int64), "K then V", on_device=on_device)
    check(array, np.array([[3, 3]]), "K then V", on_device=on_device)
    pykv.copy_blocks([], [], INDEPENDENT)
    empty = array.output(np.zeros((10, 0, 4), np.float32))
    pykv.copy_blocks([empty], [empty], INDEPENDENT)


@pytest.mark.parametrize(
    ("row", "block"),
    [((2, 10), "destination block 10"), ((-1, 2), "source block -1"), ((2**40, 0), f"source block {2**40}")],
)
def test_a_row_on_the_host_that_is_out_of_range(array: Library, row: tuple[int, int], block: str) -> None:
    expected, actual = memories(array, "K then V", 2)
    mapping = np.array([[0, 1], row, [3, 4]])
    message = rf"^copy_blocks: block_mapping: row 1: {block} is out of range \[0, 10\)$"
    with pytest.raises(ValueError, match=message):
        pykv.copy_blocks(*views(actual, "K then V"), mapping)
    assert_same(array, actual, expected)


def test_a_row_on_the_device_that_is_out_of_range(array: Library) -> None:
    if array.device == "cpu":
        pytest.skip("a mapping of CPU caches lies on the host")
    for row in [(2, 10), (-1, 2), (2**40, 0), (0, -(2**63)), (2**63 - 1, 1)]:
        check_row_on_the_device(array, row)


def check_row_on_the_device(array: Library, row: tuple[int, int]) -> None:
    expected, actual = memories(array, "K then V", 2)
    keys, values = views(expected, "K then V")
    reference.copy_blocks(keys + values, np.array([[0, 1], [3, 4]]))
    wrong = next(i for i in row if not 0 <= i < 10)
    with array.reports(rf"^copy_blocks: block_mapping: {wrong} is out of range \[0, 10\); it was not used$"):
        pykv.copy_blocks(*views(actual, "K then V"), array.input(np.array([[0, 1], row, [3, 4]])))
    assert_same(array, actual, expected)


CACHE = np.zeros((10, 4), np.float32)


@pytest.mark.parametrize(
    ("keys", "values", "mapping", "error", "message"),
    [
        ([CACHE], [], INDEPENDENT, ValueError, "value_caches: must have 1 arrays like key_caches, got 0"),
        ([CACHE], [CACHE[:9].copy()], INDEPENDENT, ValueError, "value_caches: dimension 0 must equal num_blocks = 10"),
        ([CACHE], [CACHE], INDEPENDENT[:, :1], ValueError, r"block_mapping: dimension 1 must equal 2 \(source, dest"),
        ([CACHE], [CACHE], INDEPENDENT[0], ValueError, "block_mapping: must have 2 dimensions"),
        ([CACHE], [CACHE], INDEPENDENT.astype(np.float32), TypeError, "block_mapping: dtype must be int64 or int32"),
        ([CACHE], [None], INDEPENDENT, TypeError, "value_caches: an array is required"),
        (CACHE, [CACHE], INDEPENDENT, TypeError, "key_caches: a list or tuple of arrays is required"),
        ([np.zeros((), np.float32)], [CACHE], INDEPENDENT, ValueError, "key_caches: must have 1 to 8 dimensions"),
    ],
)  # fmt: skip
def test_errors(keys: Any, values: Any, mapping: np.ndarray, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^copy_blocks: {message}"):
        pykv.copy_blocks(keys, values, mapping)
