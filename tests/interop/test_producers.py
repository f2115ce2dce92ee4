"""Objects of other libraries that misbehave: what they raise, what they run while a call fails, and what they hold."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import sys
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from libraries import Library

import pykv

OUT, X = np.zeros((2, 4), np.float32), np.ones((2, 4), np.float32)


class Producer:
    """Gives a NumPy array by __dlpack__, or whatever `instead` does."""

    def __init__(self, array: np.ndarray = X, instead: Callable[[], Any] | None = None, where: str = "") -> None:
        self.array, self.instead, self.where = array, instead, where

    def __dlpack_device__(self) -> Any:
        return self.instead() if self.instead and self.where == "device" else (1, 0)

    def __dlpack__(self, **options: Any) -> Any:
        return self.instead() if self.instead and self.where == "array" else self.array.__dlpack__(**options)


class Number:
    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __float__(self) -> float:
        raise self.error

    __index__ = __float__  # type: ignore[assignment]


def raises(error: type[BaseException]) -> Callable[[], Any]:
    def function() -> Any:
        raise error("as it is")

    return function


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError])
@pytest.mark.parametrize("where", ["device", "array"])
def test_what_is_no_complaint_stays_what_it_is(where: str, error: type[BaseException]) -> None:
    with pytest.raises(error, match=r"^as it is$"):
        pykv.gelu_new(OUT, Producer(instead=raises(error), where=where))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_numbers_and_streams_too(error: type[BaseException]) -> None:
    class Stream:
        @property
        def cuda_stream(self) -> int:
            raise error

    with pytest.raises(error):
        pykv.gelu_new(OUT, Number(error))  # type: ignore[arg-type]
    with pytest.raises(error):
        pykv.rms_norm(OUT, X, None, Number(error))  # type: ignore[arg-type]
    with pytest.raises(error):
        pykv.silu_and_mul_with_clamp(OUT[:, :2], X, Number(error))  # type: ignore[arg-type]
    with pytest.raises(error):
        pykv.gelu_new(OUT, X, stream=Stream())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "becomes"),
    [(RuntimeError, RuntimeError), (BufferError, ValueError), (KeyError, ValueError), (TypeError, TypeError)],
)
def test_complaints_name_the_argument(error: type[Exception], becomes: type[Exception]) -> None:
    with pytest.raises(becomes, match=r"^gelu_new: input: .*as it is"):
        pykv.gelu_new(OUT, Producer(instead=raises(error), where="array"))


@pytest.mark.parametrize("device", [None, "cpu", (1,), ("cpu", 0), 1])
def test_devices_that_are_none(device: Any) -> None:
    with pytest.raises(TypeError, match=r"^gelu_new: input: "):
        pykv.gelu_new(OUT, Producer(instead=lambda: device, where="device"))


def test_an_error_without_a_text() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise self

    with pytest.raises(ValueError, match=r"^gelu_new: input: has an error without a text"):
        pykv.gelu_new(OUT, Producer(instead=raises(Mute), where="array"))


@pytest.mark.parametrize("stream", ["0", 1.5, object()])
def test_streams_that_are_none(stream: Any) -> None:
    class Named:
        def __cuda_stream__(self) -> Any:
            return stream

    for given in (stream, Named()):
        with pytest.raises(TypeError, match=r"^gelu_new: stream: "):
            pykv.gelu_new(OUT, X, stream=given)


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Managed(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_NAME = b"dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class InPython:
    """Its deleter is a function of Python, as in DLPack's own example for NumPy."""

    deleted = 0
    _kept: dict[int, Any] = {}  # noqa: RUF012

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **_: Any) -> Any:
        shape = (ctypes.c_int64 * self.array.ndim)(*self.array.shape)
        managed = _Managed(self.array.ctypes.data, (1, 0), self.array.ndim, _Type(2, 32, 1), ctypes.addressof(shape))
        managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
        self._kept[ctypes.addressof(managed)] = managed, shape, self.array
        return _new_capsule(ctypes.addressof(managed), _NAME, None)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int) -> None:
    InPython._kept.pop(address)
    InPython.deleted += 1


def test_errors_outlive_deleters_in_python() -> None:
    before = InPython.deleted
    with pytest.raises(ValueError, match=r"^gelu_new: input: must have the shape|^gelu_new: out"):  # by C
        pykv.gelu_new(OUT, InPython(np.ones((2, 5), np.float32)))
    with pytest.raises(TypeError, match=r"^rms_norm: epsilon: must be real number"):  # by the binding
        pykv.rms_norm(OUT, InPython(X), None, "small")  # type: ignore[arg-type]
    pykv.gelu_new(OUT, InPython(X))
    assert InPython.deleted >= before + 2
    assert not InPython._kept


def test_dtypes_of_pickles_take_no_room() -> None:
    """Each float16 array out of a pickle has a dtype object of its own, and so has whatever asks for a byte order."""
    x = np.ones((2, 4), np.float16)
    pickled, out = pickle.dumps(x), np.zeros_like(x)
    small = np.ones((2, 4), ml_dtypes.bfloat16)
    for _ in range(300):
        array = pickle.loads(pickled)
        before = sys.getrefcount(array.dtype)
        pykv.gelu_new(out, array)
        after = sys.getrefcount(array.dtype)
        assert after == before
        other = small.view(small.dtype.newbyteorder("="))
        before = sys.getrefcount(other.dtype)
        pykv.gelu_new(np.zeros_like(small), other)
        after = sys.getrefcount(other.dtype)
        assert after == before


def test_classes_derived_from_numpys_take_no_room() -> None:
    import gc
    import weakref

    alive = []
    for _ in range(300):
        derived = type("Derived", (np.ndarray,), {})
        pykv.gelu_new(OUT, X.view(derived))
        alive.append(weakref.ref(derived))
        del derived
    gc.collect()
    assert sum(ref() is not None for ref in alive) < 10


def test_dtypes_that_only_look_right() -> None:
    for wrong in (">f2", np.dtype(ml_dtypes.bfloat16).newbyteorder(">")):
        with pytest.raises(TypeError, match=r"^gelu_new: input: dtype .* is not in native byte order"):
            pykv.gelu_new(OUT, np.zeros((2, 4), wrong))
    for wrong in ("c8", "S4", "O", "M8[s]", [("a", "f4")], ml_dtypes.float8_e4m3b11fnuz):
        with pytest.raises(TypeError, match=r"^gelu_new: input: dtype '.*' is not supported"):
            pykv.gelu_new(OUT, np.zeros((2, 4), wrong))


def test_elements_at_odd_addresses(array: Library) -> None:
    """A kernel that loads such elements on a GPU would take all of the process's CUDA with it."""
    if array.name not in ("numpy", "cupy"):
        pytest.skip("raw addresses are read from NumPy and CuPy")
    where = "cuda:0" if array.device == "cuda" else "cpu"
    memory = array.output(np.zeros(256, np.uint8))
    address = memory.data.ptr if array.device == "cuda" else memory.ctypes.data
    for dtype, offset in (("float16", 1), ("bfloat16", 3), ("float32", 2), ("float32", 4 + 1)):
        right = pykv.from_pointer(address + 64, (2, 4), dtype, where, owner=memory)
        wrong = pykv.from_pointer(address + offset, (2, 4), dtype, where, owner=memory)
        for out, x, name in ((right, wrong, "input"), (wrong, right, "out")):
            with pytest.raises(ValueError, match=rf"^rms_norm: {name}: must be aligned to its elements of [24] bytes"):
                pykv.rms_norm(out, x, None)
        empty = pykv.from_pointer(address + offset, (0, 4), dtype, where, owner=memory)
        pykv.rms_norm(empty, empty, None)
    ids = pykv.from_pointer(address + 4, (1,), "int64", where, owner=memory)
    cache = pykv.from_pointer(address + 64, (1, 4, 1, 4), "float32", where, owner=memory)
    key = pykv.from_pointer(address + 128, (1, 1, 4), "float32", where, owner=memory)
    with pytest.raises(ValueError, match=r"^reshape_and_cache_flash: slot_mapping: must be aligned to its"):
        pykv.reshape_and_cache_flash(key, key, cache, cache, ids)
    pykv.relu2(right, right)  # CUDA is as well as before
    pykv.check_errors()


def test_negative_views_of_torch() -> None:
    torch = pytest.importorskip("torch")
    minus = torch._neg_view(torch.full((2, 4), 3.0))
    imaginary = torch.complex(torch.ones(2, 4), torch.full((2, 4), 3.0)).conj().imag
    for view in (minus, imaginary):
        assert view.is_neg()
        with pytest.raises(ValueError, match=r"^relu2: input: is a negative view.*resolve_neg"):
            pykv.relu2(torch.zeros(2, 4), view)
        with pytest.raises(ValueError, match=r"^relu2: out: is a negative view"):
            pykv.relu2(view, torch.zeros(2, 4))
        out = torch.zeros(2, 4)
        pykv.relu2(out, view.resolve_neg())
        assert (out == torch.relu(view) ** 2).all()
    with pytest.raises(TypeError, match=r"^relu2: input: "):
        pykv.relu2(torch.zeros(2, 4), torch.ones(2, 4, dtype=torch.complex64).conj())


def test_negative_views_through_torchs_dispatcher() -> None:
    """torch may resolve them on the way; signs are right, or the call is refused."""
    program = """
        import torch, pykv.torch
        x, out = torch._neg_view(torch.full((2, 4), -3.0)), torch.zeros(2, 4)
        try:
            torch.ops.pykv.relu2(out, x)
            assert (out == 9).all(), out
        except (ValueError, RuntimeError) as error:
            assert "negative" in str(error), error
    """
    pytest.importorskip("torch")
    run(program)


def run(program: str) -> str:
    isolated = "-P" if sys.version_info >= (3, 11) else "-I"
    done = subprocess.run(
        [sys.executable, isolated, "-c", dedent(program)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
