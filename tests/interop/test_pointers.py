"""What from_pointer takes, and all that DLPack lets a consumer ask of its result."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pykv


@pytest.fixture
def x() -> np.ndarray:
    return np.arange(12, dtype=np.float32).reshape(3, 4)


def of(x: np.ndarray, **options: Any) -> pykv._C.Pointer:
    strides = [s // x.itemsize for s in x.strides]
    return pykv.from_pointer(x.ctypes.data, x.shape, x.dtype, "cpu", strides, x, **options)


def test_copies_are_copies(x: np.ndarray) -> None:
    for view in (x, x.T, x[::2, ::-1], x[:0], x[1, 2:3]):
        copy = np.from_dlpack(of(view), copy=True)
        np.testing.assert_array_equal(copy, view)
        assert not np.shares_memory(copy, x)
        copy[...] = 99
    assert (x != 99).all()
    scalar = pykv.from_pointer(x.ctypes.data + 8, (), "float32", "cpu")
    assert np.from_dlpack(scalar, copy=True) == 2
    torch = pytest.importorskip("torch")
    torch.from_dlpack(of(x), copy=True)[...] = 99
    assert (x != 99).all()
    torch.from_dlpack(of(x))[0, 0] = 7
    assert x[0, 0] == 7


def test_a_copy_outlives_what_it_was_made_of() -> None:
    copy = np.from_dlpack(of(np.full(1000, 3.0, np.float32)), copy=True)
    assert (copy == 3).all()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({}, "dltensor"),
        ({"max_version": None}, "dltensor"),
        ({"max_version": (0, 8)}, "dltensor"),
        ({"max_version": (1, 0)}, "dltensor_versioned"),
        ({"max_version": (2, 0)}, "dltensor_versioned"),
        ({"copy": False, "dl_device": (1, 0), "stream": None}, "dltensor"),
        ({"copy": True, "max_version": (1, 3)}, "dltensor_versioned"),
    ],
)
def test_capsules(x: np.ndarray, options: dict[str, Any], name: str) -> None:
    assert f'"{name}"' in str(of(x).__dlpack__(**options))


@pytest.mark.parametrize("device", [(2, 0), (1, 1), (13, 0)])
def test_no_other_device(x: np.ndarray, device: tuple[int, int]) -> None:
    with pytest.raises(BufferError, match="lies on another device"):
        of(x).__dlpack__(dl_device=device)


def test_no_copy_on_a_gpu() -> None:
    there = pykv.from_pointer(4096, (2,), "float32", "cuda:1")
    with pytest.raises(BufferError, match="is not copied on a GPU"):
        there.__dlpack__(copy=True)
    assert there.__dlpack_device__() == (2, 1)
    there.__dlpack__(dl_device=(2, 1), stream=1)


def test_options_that_dlpack_has_not(x: np.ndarray) -> None:
    with pytest.raises(TypeError):
        of(x).__dlpack__(versions=1)
    with pytest.raises(TypeError):
        of(x).__dlpack__((1, 0))


def test_jax_reads_it(x: np.ndarray) -> None:
    jnp = pytest.importorskip("jax.numpy")
    np.testing.assert_array_equal(jnp.from_dlpack(of(x)), x)


def test_read_only(x: np.ndarray) -> None:
    fixed = of(x, read_only=True)
    assert fixed.read_only
    assert not of(x).read_only
    with pytest.raises(ValueError, match="relu2: out: is read-only, but it is written"):
        pykv.relu2(fixed, x)
    out = np.zeros_like(x)
    pykv.relu2(out, fixed)
    np.testing.assert_array_equal(out, x**2)
    with pytest.raises(BufferError, match="is read-only, which DLPack can say from version"):
        fixed.__dlpack__()
    assert not np.from_dlpack(fixed).flags.writeable
    copy = np.from_dlpack(fixed, copy=True)
    copy[...] = 1
    assert np.from_dlpack(of(x)).flags.writeable


def test_shapes_that_no_memory_has(x: np.ndarray) -> None:
    for shape in ((2**62, 4), (2**61,), (2**40, 2**40)):
        huge = pykv.from_pointer(x.ctypes.data, shape, "float32", "cpu", (0,) * len(shape))
        with pytest.raises(BufferError, match="more bytes than int64 can count"):
            huge.__dlpack__(max_version=(1, 0))
        with pytest.raises(ValueError, match=r"relu2: input: shape .* has more bytes than int64 can count"):
            pykv.relu2(x, huge)
    nowhere = pykv.from_pointer(0, (2,), "float32", "cpu")
    with pytest.raises(BufferError, match="has a shape, but no memory"):
        nowhere.__dlpack__()
    assert np.from_dlpack(pykv.from_pointer(0, (0, 2), "float32", "cpu")).shape == (0, 2)


def test_all_elements_at_one_address(x: np.ndarray) -> None:
    """A shape whose product wraps around to 0 has elements nevertheless."""
    memory = np.zeros(64, np.float32)
    shape = (2**62, 1, 4)
    out = pykv.from_pointer(memory.ctypes.data, shape, "float32", "cpu", (0, 0, 0))
    query = pykv.from_pointer(x.ctypes.data, shape, "float32", "cpu", (0, 0, 1))
    cache = np.ones((1, 4, 1, 4), np.float32)
    with pytest.raises(ValueError, match=r"paged_attention: \w+: shape .* has more bytes than int64 can count"):
        pykv.paged_attention(out, query, cache, cache, np.zeros((1, 1), np.int64), np.array([1]))
    assert not memory.any()


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"address": -1}, ValueError, "address: must be at least 0, got -1"),
        ({"address": 2**64}, ValueError, f"address: must be at most {2**64 - 1}, got {2**64}"),
        ({"address": 1.5}, TypeError, "address: must be an integer, got 1.5"),
        ({"address": None}, TypeError, "address: must be an integer, got None"),
        ({"shape": (-1,)}, ValueError, "shape: must be at least 0, got -1"),
        ({"shape": (2**63,)}, ValueError, "shape: must be at most"),
        ({"shape": (2.7,)}, TypeError, r"shape: must be an integer, got 2\.7"),
        ({"shape": ("2",)}, TypeError, "shape: must be an integer, got '2'"),
        ({"shape": 3}, TypeError, "shape: must be a sequence of integers, got 3"),
        ({"shape": (1,) * 9}, ValueError, "shape: at most 8 dimensions are supported, got 9"),
        ({"strides": (1, 2)}, ValueError, "strides: must have one entry for each dimension"),
        ({"strides": (2**63,)}, ValueError, "strides: must be at most"),
        ({"dtype": "O"}, TypeError, "dtype 'object' is not supported"),
        ({"dtype": ">f4"}, TypeError, "dtype '>f4' is not in native byte order"),
        ({"device": "tpu"}, ValueError, "device: must be 'cpu', 'cuda', 'cuda:<n>' or an int, got 'tpu'"),
        ({"device": "cuda:99999999999"}, ValueError, "device: must be at most 2147483647, got 99999999999"),
        ({"device": -5}, ValueError, "device: must be at least 0, got -5"),
        ({"device": True}, ValueError, "device: must be 'cpu', 'cuda', .*, got True"),
    ],
)
def test_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given: dict[str, Any] = {"address": 4096, "shape": (2,), "dtype": "float32", "device": "cpu"} | changed
    with pytest.raises(error, match=message):
        pykv.from_pointer(**given)


def test_a_pointer_that_was_never_made(x: np.ndarray) -> None:
    kind = pykv._C.Pointer
    nothing = kind.__new__(kind)
    with pytest.raises(ValueError, match=r"^relu2: input: is a Pointer to nothing"):
        pykv.relu2(x, nothing)
    for name in ("shape", "strides", "address", "read_only"):
        with pytest.raises(ValueError, match="is a Pointer to nothing"):
            getattr(nothing, name)
    for function in (nothing.__dlpack__, nothing.__dlpack_device__):
        with pytest.raises(ValueError, match="is a Pointer to nothing"):
            function()


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (0, ValueError, "must be at least 1, got 0"),
        (2**40, ValueError, "must be at most 2147483647, got"),
        (1.5, TypeError, r"must be an integer, got 1\.5"),
        (None, TypeError, "must be an integer, got None"),
    ],
)
def test_numbers_of_threads(number: Any, error: type[Exception], message: str) -> None:
    before = pykv.get_num_threads()
    with pytest.raises(error, match=f"^num_threads: {message}"):
        pykv.set_num_threads(number)
    assert pykv.get_num_threads() == before
