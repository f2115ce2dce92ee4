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

MAPPING = np.array([[0, 3], [1, 4], [2, 5], [9, 0], [8, 1], [5, 9], [5, 8], [0, 9]])


def memory(array: Library, where: str, x: np.ndarray) -> Any:
    """A copy of x, with the library or on the host."""
    return array.output(x) if where == "library" else x.copy()


def contents(array: Library, where: str, a: Any) -> np.ndarray:
    return np.ascontiguousarray(array.numpy(a) if where == "library" else a).reshape(-1).view(np.uint8)


def check(
    array: Library, src: str, dst: str, shape: tuple[int, ...], size: int, mapping: np.ndarray, dtype: Any
) -> None:
    rng = np.random.default_rng(0)
    a, b = (inputs.bits(rng, shape, np.dtype(dtype)) for _ in range(2))
    source, target = memory(array, src, a), memory(array, dst, b)
    expected = b.reshape(-1).view(np.uint8).copy()
    reference.swap_blocks(a.reshape(-1).view(np.uint8), expected, size, mapping)
    pykv.swap_blocks(source, target, size, mapping)
    np.testing.assert_array_equal(contents(array, dst, target), expected)
    np.testing.assert_array_equal(contents(array, src, source), a.reshape(-1).view(np.uint8))


SIDES = [("library", "library"), ("library", "host"), ("host", "library")]


@pytest.mark.parametrize(("src", "dst"), SIDES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.uint8])
def test_directions(array: Library, src: str, dst: str, dtype: Any) -> None:
    check(array, src, dst, (10, 16, 3, 8), 16 * 3 * 8 * np.dtype(dtype).itemsize, MAPPING, dtype)


@pytest.mark.parametrize(("src", "dst"), SIDES)
@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("size", [1, 7, 24, 400, 1000])
def test_blocks_are_bytes(array: Library, src: str, dst: str, size: int, ids: type) -> None:
    """Of any size, whatever the shape; the last bytes that make no full block belong to none."""
    check(array, src, dst, (10, 1003), size, MAPPING.astype(ids), np.uint8)


@given(data=st.data())
def test_any_mapping(array: Library, data: st.DataObject) -> None:
    src, dst = data.draw(st.sampled_from(SIDES))
    block = st.integers(0, 9)
    mapping = data.draw(st.lists(st.tuples(block, block), max_size=20))
    check(array, src, dst, (10, 12), 24, np.array(mapping, np.int64).reshape(-1, 2), np.float16)


@given(data=st.data())
def test_rows_take_effect_in_order(array: Library, data: st.DataObject) -> None:
    """Within one array, and between two that overlap by no whole number of blocks."""
    shift = data.draw(st.sampled_from([0, 5, 16, 21]))
    block = st.integers(0, 9)
    mapping = np.array(data.draw(st.lists(st.tuples(block, block), max_size=20)), np.int64).reshape(-1, 2)
    x = np.random.default_rng(0).integers(0, 256, 200, np.uint8)
    actual = array.output(x)
    # blocks that overlap in part within a row have no defined outcome
    distance = abs(16 * mapping[:, 0] - shift - 16 * mapping[:, 1])
    mapping = mapping[(distance == 0) | (distance >= 16)]
    reference.swap_blocks(x[:160], x[shift : shift + 160], 16, mapping)
    first: inputs.View = lambda m: m[:160]  # noqa: E731
    second: inputs.View = lambda m: m[shift : shift + 160]  # noqa: E731
    pykv.swap_blocks(inputs.view(actual, first), inputs.view(actual, second), 16, mapping)
    np.testing.assert_array_equal(array.numpy(actual), x)


def test_many_rows(array: Library) -> None:
    rng = np.random.default_rng(1)
    mapping = np.stack([rng.permutation(500), rng.permutation(500)], 1)
    for src, dst in SIDES:
        check(array, src, dst, (500, 48), 96, mapping, np.float16)


def test_views_start_at_their_first_element(array: Library) -> None:
    x = np.arange(100, dtype=np.uint8)
    src, dst = array.output(x), array.output(np.zeros(100, np.uint8))
    tail: inputs.View = lambda m: m[20:]  # noqa: E731
    pykv.swap_blocks(inputs.view(src, tail), inputs.view(dst, tail), 10, np.array([[0, 1], [7, 7]]))
    expected = np.zeros(100, np.uint8)
    expected[30:40], expected[90:] = x[20:30], x[90:]
    np.testing.assert_array_equal(array.numpy(dst), expected)


def test_two_devices() -> None:
    torch = pytest.importorskip("torch")
    if not pykv.has_cuda() or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    src = torch.arange(160, dtype=torch.uint8, device="cuda:0")
    dst = torch.zeros(160, dtype=torch.uint8, device="cuda:1")
    torch.cuda.synchronize(0)
    pykv.swap_blocks(src, dst, 16, MAPPING, stream=torch.cuda.current_stream(1))
    expected = np.zeros(160, np.uint8)
    reference.swap_blocks(np.arange(160, dtype=np.uint8), expected, 16, MAPPING)
    np.testing.assert_array_equal(dst.cpu().numpy(), expected)


@pytest.mark.parametrize(("src", "dst"), SIDES)
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((10, 0), r"row 1: source block 10 is out of range \[0, 10\)"),
        ((0, 7), r"row 1: destination block 7 is out of range \[0, 7\)"),
        ((-1, 0), r"row 1: source block -1 is out of range \[0, 10\)"),
        ((0, 2**62), rf"row 1: destination block {2**62} is out of range \[0, 7\)"),
    ],
)
def test_a_row_out_of_range(array: Library, src: str, dst: str, row: tuple[int, int], message: str) -> None:
    source, target = memory(array, src, np.ones((10, 16), np.uint8)), memory(array, dst, np.zeros((7, 16), np.uint8))
    with pytest.raises(ValueError, match=f"^swap_blocks: block_mapping: {message}$"):
        pykv.swap_blocks(source, target, 16, np.array([[0, 1], row]))
    assert not contents(array, dst, target).any()


def test_nothing_to_do(array: Library) -> None:
    for src, dst in SIDES:
        check(array, src, dst, (10, 16), 16, np.zeros((0, 2), np.int64), np.uint8)
    nothing = array.output(np.zeros((0, 16), np.uint8))
    pykv.swap_blocks(nothing, nothing, 16, np.zeros((0, 2), np.int64))
    with pytest.raises(ValueError, match=r"source block 0 is out of range \[0, 0\)"):
        pykv.swap_blocks(nothing, nothing, 16, np.array([[0, 0]]))


def test_a_mapping_on_the_device(array: Library) -> None:
    if array.device == "cpu":
        pytest.skip("needs a device")
    x = array.output(np.zeros((10, 16), np.uint8))
    with pytest.raises(ValueError, match=r"^swap_blocks: block_mapping: must lie on the CPU, got cuda:0$"):
        pykv.swap_blocks(x, x, 16, array.input(MAPPING.astype(np.int32)))


X = np.zeros((10, 16), np.uint8)


@pytest.mark.parametrize(
    ("src", "dst", "size", "mapping", "error", "message"),
    [
        (X, X.copy(), 0, MAPPING, ValueError, "block_size_in_bytes: must be positive, got 0"),
        (X, X.copy(), -8, MAPPING, ValueError, "block_size_in_bytes: must be positive, got -8"),
        (X, X.copy(), 16, MAPPING[:, 0], ValueError, "block_mapping: must have 2 dimensions"),
        (
            X,
            X.copy(),
            16,
            MAPPING.astype(np.uint8),
            TypeError,
            "block_mapping: dtype must be int64 or int32, got uint8",
        ),
        (X, None, 16, MAPPING, TypeError, "dst: an array is required"),
        (X[::-1], X.copy(), 16, MAPPING, ValueError, "src: must have no negative strides"),
    ],
)
def test_errors(src: Any, dst: Any, size: int, mapping: np.ndarray, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^swap_blocks: {message}"):
        pykv.swap_blocks(src, dst, size, mapping)
