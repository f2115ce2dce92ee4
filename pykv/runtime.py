"""Everything that is not an operation: errors, raw memory, threads, and where the C library lies."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pykv import _C

_CPU, _CUDA = 1, 2  # DLDeviceType
_INT32_MAX, _INT64_MAX, _ADDRESS_MAX = 2**31 - 1, 2**63 - 1, 2**64 - 1


def _integer(name: str, value: Any, low: int, high: int) -> int:
    """The value as an ``int`` within bounds; the error names the parameter."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: must be an integer, got {value!r}") from None
    if number < low:
        raise ValueError(f"{name}: must be at least {low}, got {number}")
    if number > high:
        raise ValueError(f"{name}: must be at most {high}, got {number}")
    return number


def _device(device: str | int | None) -> tuple[int, int]:
    """(DLDeviceType, ordinal) of "cpu", "cuda", "cuda:1", 1."""
    if isinstance(device, int) and not isinstance(device, bool):
        return _CUDA, _integer("device", device, 0, _INT32_MAX)
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", str(device))
    if not found:
        raise ValueError(f"device: must be 'cpu', 'cuda', 'cuda:<n>' or an int, got {device!r}")
    return (_CPU, 0) if device == "cpu" else (_CUDA, _integer("device", int(found[1] or 0), 0, _INT32_MAX))


def check_errors(device: str | int | None = None) -> None:
    """Raise ``ValueError`` if a call met an id (slot, block, position, length) outside its array, and forget it.

    Operations on a GPU cannot look at their ids before they run: they skip or mask what is out of range, and the device
    keeps the first such id.  This waits for the device.  On the CPU the call itself has raised.

    device: ``"cuda:<n>"`` or ``n``; ``None`` asks every CUDA device.
    """
    if device is not None:
        _C.check_errors(*_device(device))
        return
    for ordinal in range(_C.cuda_device_count()):
        _C.check_errors(_CUDA, ordinal)


def from_pointer(
    address: int,
    shape: Sequence[int],
    dtype: Any,
    device: str | int = "cuda:0",
    strides: Sequence[int] | None = None,
    owner: object = None,
    *,
    read_only: bool = False,
) -> _C.Pointer:
    """Describe memory that other code owns, as an array that every operation takes.

    address: of the first element.  shape, strides: in elements (strides default to compact).
    dtype: a NumPy dtype or its name; with ml_dtypes also ``"bfloat16"``, ``"float8_e4m3fn"`` and ``"float8_e5m2"``.
    owner: kept alive as long as the result.  read_only: operations and other libraries must not write.

    The result exports ``__dlpack__``, so that other libraries can look at the same memory; ``copy=True`` copies what
    lies on the host.

    Raises:
        ValueError: a number is out of range, or ``strides`` are not as many as ``shape``.
        TypeError: something is no integer or no dtype.
    """
    try:
        known = np.dtype(dtype)
    except TypeError:
        import ml_dtypes  # the names that NumPy itself does not know

        if not hasattr(ml_dtypes, str(dtype)):
            raise TypeError(f"dtype: must be a dtype of NumPy or ml_dtypes, or its name, got {dtype!r}") from None
        known = np.dtype(getattr(ml_dtypes, str(dtype)))
    return _C.Pointer(
        _integer("address", address, 0, _ADDRESS_MAX),
        _integers("shape", shape, 0),
        known,
        *_device(device),
        None if strides is None else _integers("strides", strides, -_INT64_MAX),
        owner,
        bool(read_only),
    )


def _integers(name: str, values: Sequence[int], low: int) -> list[int]:
    try:
        items = list(values)
    except TypeError:
        raise TypeError(f"{name}: must be a sequence of integers, got {values!r}") from None
    return [_integer(name, value, low, _INT64_MAX) for value in items]


def get_num_threads() -> int:
    """Threads that operations on the CPU use: ``PYKV_NUM_THREADS``, else the CPUs this process may run on."""
    return _C.get_num_threads()


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads that operations on the CPU use; of more than 1024, 1024 do."""
    _C.set_num_threads(_integer("num_threads", num_threads, 1, _INT32_MAX))


def has_cuda() -> bool:
    """Whether this build of pykv holds CUDA kernels."""
    return _C.has_cuda()


def _installed() -> Path:
    # beside the extension, which in an editable install lies in another tree than the Python files; or in
    # pykv-libkernels, the wheel that those for each Python share
    beside = Path(_C.__file__).parent
    return beside if (beside / "lib").is_dir() else beside.parent / "pykv_libkernels"


def get_include() -> str:
    """Folder of ``pykv/kernels.h`` and ``dlpack/dlpack.h``."""
    return str(_installed() / "include")


def get_library_dir() -> str:
    """Folder of ``libkernels.so.0``."""
    return str(_installed() / "lib")


def get_cmake_dir() -> str:
    """Folder of ``pykvConfig.cmake``, for ``find_package(pykv)``."""
    return str(_installed() / "lib" / "cmake" / "pykv")


def get_pkgconfig_dir() -> str:
    """Folder of ``pykv.pc``, for ``PKG_CONFIG_PATH``."""
    return str(_installed() / "lib" / "pkgconfig")
