"""Everything that is not an operation: errors, raw memory, threads, and where the C library lies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pykv import _C

_CPU, _CUDA = 1, 2  # DLDeviceType


def _device(device: str | int | None) -> tuple[int, int]:
    """(DLDeviceType, ordinal) of "cpu", "cuda", "cuda:1", 1."""
    if isinstance(device, int):
        return _CUDA, device
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", str(device))
    if not found:
        raise ValueError(f"device: must be 'cpu', 'cuda', 'cuda:<n>' or an int, got {device!r}")
    return (_CPU, 0) if device == "cpu" else (_CUDA, int(found[1] or 0))


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
) -> _C.Pointer:
    """Describe memory that other code owns, as an array that every operation takes.

    address: of the first element.  shape, strides: in elements (strides default to compact).
    dtype: a NumPy dtype or its name; with ml_dtypes also ``"bfloat16"``, ``"float8_e4m3fn"`` and ``"float8_e5m2"``.
    owner: kept alive as long as the result.

    The result exports ``__dlpack__``, so that other libraries can look at the same memory.
    """
    try:
        known = np.dtype(dtype)
    except TypeError:
        import ml_dtypes  # the names that NumPy itself does not know

        if not hasattr(ml_dtypes, str(dtype)):
            raise TypeError(f"dtype: must be a dtype of NumPy or ml_dtypes, or its name, got {dtype!r}") from None
        known = np.dtype(getattr(ml_dtypes, str(dtype)))
    steps = None if strides is None else [int(s) for s in strides]
    return _C.Pointer(address, [int(n) for n in shape], known, *_device(device), steps, owner)


def get_num_threads() -> int:
    """Threads that operations on the CPU use: ``PYKV_NUM_THREADS``, else the CPUs this process may run on."""
    return _C.get_num_threads()


def set_num_threads(num_threads: int) -> None:
    """Set the number of threads that operations on the CPU use."""
    if num_threads < 1:
        raise ValueError(f"num_threads: must be at least 1, got {num_threads}")
    _C.set_num_threads(num_threads)


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
