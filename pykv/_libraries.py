"""The array libraries that a cache can live in.  Only the one that the caller uses is touched."""

from __future__ import annotations

import importlib
import mmap
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import ModuleType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pykv._schema import Spec
from pykv._side_stream import CupySideStream, SideStream, TorchSideStream
from pykv._types import Stream


class ReplacedBlocks(Protocol):
    """Copies of blocks in lists of arrays that never change: each list gets new arrays in their place, all at once.

    Pairs are (source, destination); arrays on the host, [blocks, bytes], are written as they are.
    """

    def copy_blocks(self, caches: list[Any], pairs: npt.NDArray[np.int64]) -> None:
        """From block to block of each cache."""

    def get_blocks(self, caches: list[Any], host: list[Any], pairs: npt.NDArray[np.int64]) -> None:
        """From each cache to an array on the host."""

    def put_blocks(self, host: list[Any], caches: list[Any], pairs: npt.NDArray[np.int64]) -> None:
        """The other way round."""


class Library(Protocol):
    """Where arrays are made: an array library and one of its devices.  It can be pickled."""

    @property
    def has_strides(self) -> bool:
        """Whether an array may be a view whose dimensions are in another order in memory."""

    @property
    def replaces(self) -> ReplacedBlocks | None:
        """How blocks are copied where arrays never change; None where pykv's operations write into them."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array of zeros; ``dtype`` is the NumPy or ml_dtypes name."""

    def from_host(self, array: npt.NDArray[Any], stream: Stream) -> Any:
        """``array`` on the device, ordered on ``stream`` (None: the library's current stream)."""

    def host_memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Memory of the host for copies from and to the device, pinned where there is one."""

    def side_stream(self) -> SideStream | None:
        """A stream for copies beside the caller's work, or None where everything is done at once."""


class _WritesInPlace:
    has_strides = True
    replaces = None


class NumpyLibrary(_WritesInPlace):
    def __init__(self, device: Any) -> None:
        if device not in (None, "cpu"):
            raise ValueError(f"PagedKVCache: device: NumPy arrays live on 'cpu', got {device!r}")

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return np.zeros(shape, numpy_dtype(dtype))

    def from_host(self, array: npt.NDArray[Any], stream: Stream) -> Any:
        return array

    def host_memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        return np.zeros(num_bytes, np.uint8)

    def side_stream(self) -> SideStream | None:
        return None


class _RawStream:
    """A cudaStream_t by the protocol that CuPy asks for."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._pointer


class CupyLibrary(_WritesInPlace):
    def __init__(self, cupy: Any, device: Any) -> None:
        self._cupy = cupy
        if isinstance(device, str):
            kind, _, index = device.partition(":")
            if kind != "cuda" or not (index or "0").isdigit():
                raise ValueError(f"PagedKVCache: device: CuPy arrays live on 'cuda' or 'cuda:N', got {device!r}")
            device = int(index) if index else None
        self._device = cupy.cuda.Device(device)  # None: the current one

    def __reduce__(self) -> tuple[Any, ...]:
        return open_library, ("cupy", f"cuda:{self._device.id}")

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        with self._device:
            return self._cupy.zeros(shape, numpy_dtype(dtype))

    def from_host(self, array: npt.NDArray[Any], stream: Stream) -> Any:
        with self._on(stream):
            return self._cupy.asarray(array)

    def host_memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        runtime = self._cupy.cuda.runtime
        with self._device:
            return _pinned(num_bytes, runtime.hostRegister, runtime.hostUnregister)

    def side_stream(self) -> SideStream | None:
        return CupySideStream(self._cupy, self._on)

    def _on(self, stream: Stream) -> AbstractContextManager[Any]:
        contexts = ExitStack()
        contexts.enter_context(self._device)
        if stream is not None:
            contexts.enter_context(self._external_stream(stream_pointer(stream)))
        return contexts

    def _external_stream(self, pointer: int) -> AbstractContextManager[Any]:
        cuda = self._cupy.cuda
        if not hasattr(cuda.Stream, "from_external"):  # before CuPy 14
            return cuda.ExternalStream(pointer)  # type: ignore[no-any-return]
        return cuda.Stream.from_external(_RawStream(pointer))  # type: ignore[no-any-return]


class TorchLibrary(_WritesInPlace):
    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        self._device = torch.empty(0, device=device).device  # with its index, which "cuda" leaves open

    def __reduce__(self) -> tuple[Any, ...]:
        return open_library, ("torch", str(self._device))

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._torch.zeros(shape, dtype=getattr(self._torch, dtype), device=self._device)

    def from_host(self, array: npt.NDArray[Any], stream: Stream) -> Any:
        with self._on(stream):
            return self._torch.from_numpy(array).to(self._device, non_blocking=True)

    def host_memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        if self._device.type != "cuda":
            return np.zeros(num_bytes, np.uint8)
        cudart, check = self._torch.cuda.cudart(), self._torch.cuda.check_error
        with self._torch.cuda.device(self._device):
            return _pinned(num_bytes, lambda *where: check(cudart.cudaHostRegister(*where)), cudart.cudaHostUnregister)

    def side_stream(self) -> SideStream | None:
        return TorchSideStream(self._torch, self._device, self._on) if self._device.type == "cuda" else None

    def _on(self, stream: Stream) -> AbstractContextManager[Any]:
        if stream is None or self._device.type != "cuda":
            return nullcontext()
        cuda, pointer = self._torch.cuda, stream_pointer(stream)
        if pointer == 2:  # cudaStreamPerThread
            raise NotImplementedError("PagedKVCache: stream: torch has no per-thread default stream")
        legacy_default = pointer in (0, 1)
        chosen = cuda.default_stream(self._device) if legacy_default else cuda.ExternalStream(pointer, self._device)
        context: AbstractContextManager[Any] = cuda.stream(chosen)
        return context


def torch_stream(*arrays: Any) -> Stream:
    """torch's current stream if one of these arrays, which may all lie on the host, is torch's; else None."""
    if not any(_root_name(a) == "torch" for a in arrays):
        return None
    cuda = sys.modules["torch"].cuda
    return cuda.current_stream() if cuda.is_initialized() else None


def choose_library(like: Any, device: Any) -> Library:
    """The library that ``like``, an array or a module, belongs to (None: NumPy), on ``device`` or else like's own."""
    name = _root_name(like)
    if name == "numpy" and (like is None or isinstance(like, ModuleType) or _is_array(like)):
        return NumpyLibrary(device)
    is_module = isinstance(like, ModuleType)
    if name not in ("cupy", "torch", "jax", "jaxlib") or not (is_module or _is_array(like)):
        got = f"module {like.__name__}" if is_module else _type_name(like)
        raise TypeError(f"PagedKVCache: like: must be an array or the module of NumPy, CuPy, torch or JAX, got {got}")
    if device is None and not is_module:
        device = like.device
    return open_library("jax" if name == "jaxlib" else name, device)


def open_library(name: str, device: Any) -> Library:
    module = importlib.import_module(name)
    if name == "jax":
        from pykv._jax_library import JaxLibrary

        return JaxLibrary(module, device)
    return (CupyLibrary if name == "cupy" else TorchLibrary)(module, device)


def _is_array(like: Any) -> bool:
    """No dtype, device or other object of an array library."""
    return hasattr(like, "shape") and hasattr(like, "dtype")


def _type_name(like: Any) -> str:
    kind = type(like)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def spec_of(array: Any) -> Spec:
    """Shape and dtype of an array of NumPy, CuPy, torch, JAX, Paddle or MLX."""
    dtype = getattr(array, "dtype", "")
    name = getattr(dtype, "name", None)
    return Spec(tuple(array.shape), name.lower() if isinstance(name, str) else str(dtype).rpartition(".")[2])


def empty_beside(array: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """A new array of the library of ``array`` on its device, not initialised; CuPy has no fp8, there it is of bytes.

    MLX's arrays cannot be written: beside one it is NumPy's, of which ``handed_back`` makes one of MLX.
    """
    name = _root_name(array)
    if name == "torch":
        return array.new_empty(shape, dtype=getattr(sys.modules[name], dtype))
    if name == "cupy":
        with array.device:
            return sys.modules[name].empty(shape, np.uint8 if dtype.startswith("float8") else numpy_dtype(dtype))
    if name == "paddle":
        return sys.modules[name].empty(shape, dtype=dtype, device=array.place)
    if name in ("numpy", "mlx"):
        return np.empty(shape, numpy_dtype(dtype))
    if name in ("jax", "jaxlib"):
        raise TypeError("JAX arrays are immutable: pykv.jax has the operations as pure functions")
    raise TypeError(f"outputs are made in NumPy, CuPy, torch, Paddle or MLX, got {type(array).__name__}")


def in_rows(array: Any) -> Any:
    """``array``, or a copy where the elements of its rows do not lie side by side."""
    name = _root_name(array)
    if name == "torch":
        return array if array.stride(-1) == 1 else array.contiguous()
    if name in ("numpy", "cupy"):
        return array if array.strides[-1] == array.itemsize else array.copy("C")
    return array


def handed_back(array: Any, beside: Any) -> Any:
    """``array``, which was made beside ``beside``, in the library of that one; MLX has no fp8, there it is of bytes."""
    if _root_name(beside) != "mlx" or not isinstance(array, np.ndarray):
        return array
    return sys.modules["mlx.core"].array(array.view(np.uint8) if array.dtype.name.startswith("float8") else array)


def array_like(values: npt.NDArray[Any], dtype: str, like: Any) -> Any:
    """``values`` as an array of the library of ``like``, an array or a module, on its device (None: NumPy)."""
    name = _root_name(like)
    device = None if isinstance(like, ModuleType) else getattr(like, "device", None)
    if name == "torch":
        values = values.astype(np.float32) if values.dtype.name == "bfloat16" else values  # which torch does not know
        return sys.modules[name].tensor(values, dtype=getattr(sys.modules[name], dtype), device=device)
    host = np.ascontiguousarray(values, numpy_dtype(dtype))
    if name == "numpy":
        return host
    if name == "cupy":
        with device or nullcontext():  # CuPy moves small floats as integers alone
            return sys.modules[name].asarray(host.view(f"u{host.itemsize}")).view(host.dtype)
    if name in ("jax", "jaxlib"):
        return sys.modules["jax"].device_put(host, device)
    raise TypeError(f"like: must be an array or the module of NumPy, CuPy, torch or JAX, got {type(like).__name__}")


def stream_pointer(stream: Stream) -> int:
    """The cudaStream_t of an integer or of a CuPy, torch or cuda.core stream."""
    if isinstance(stream, int):
        return stream
    for attribute in ("cuda_stream", "ptr"):  # torch, CuPy
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    if hasattr(stream, "__cuda_stream__"):  # (protocol version, pointer)
        return int(stream.__cuda_stream__()[1])
    raise TypeError(
        f"PagedKVCache: stream: must be an integer or a CuPy, torch or cuda.core stream, got {type(stream).__name__}"
    )


def _pinned(
    num_bytes: int, register: Callable[[int, int, int], object], unregister: Callable[[int], object]
) -> npt.NDArray[np.uint8]:
    """Memory of exactly this size: the libraries' own allocators of pinned memory round up to a power of two."""
    if num_bytes == 0:
        return np.empty(0, np.uint8)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # no other memory's pages
    memory = np.frombuffer(pages, np.uint8)
    register(memory.ctypes.data, num_bytes, 0)
    weakref.finalize(memory, unregister, memory.ctypes.data).atexit = False
    return memory


_ROOTS = ("numpy", "cupy", "torch", "jax", "jaxlib", "paddle", "mlx")


def _root_name(like: Any) -> str:
    if like is None:
        return "numpy"
    if isinstance(like, ModuleType):
        return like.__name__.partition(".")[0]
    if not hasattr(like, "shape"):  # torch.float32 is of torch, too
        return ""
    roots = [base.__module__.partition(".")[0] for base in type(like).__mro__]  # subclasses count as their library's
    return next((root for root in roots if root in _ROOTS), "")


def numpy_dtype(name: str) -> np.dtype[Any]:
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        try:
            import ml_dtypes
        except ImportError:
            raise ImportError(f"{name} in NumPy or CuPy needs the package ml_dtypes") from None
        small: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return small
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype
