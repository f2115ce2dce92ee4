"""``pytest -p guarded``: what NumPy arrays an operation gets lie between pages that nobody may touch.

A read or write past the end of an array (``GUARD=start``: before its beginning) is then a crash, in the build that
users have and with any PYKV_ISA. AddressSanitizer sees neither masked vectors nor what lies in a larger allocation.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np

import pykv

AT_END = os.environ.get("GUARD", "end") == "end"
LARGEST = 1 << 27  # bytes; what is larger is mapped by itself anyway

libc = ctypes.CDLL(None)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Region:
    """A copy of some memory, from address ``low`` to ``high``, that ends where a page without access begins."""

    def __init__(self, low: int, high: int, align: int) -> None:
        page, size = mmap.PAGESIZE, high - low
        inner = -(-(size + align) // page) * page
        self.pages = mmap.mmap(-1, inner + 2 * page)
        first = np.frombuffer(self.pages, np.uint8).ctypes.data
        for guard in (first, first + page + inner):
            assert libc.mprotect(guard, page, 0) == 0  # PROT_NONE
        at = first + page + (inner - size if AT_END else 0)
        at += -((at - low) % align) if AT_END else (low - at) % align
        self.low, self.memory = low, np.frombuffer(self.pages, np.uint8, size, at - first)
        ctypes.memmove(self.memory.ctypes.data, low, size)

    def twin(self, array: np.ndarray) -> np.ndarray:
        twin = np.ndarray(array.shape, array.dtype, self.memory, array.ctypes.data - self.low, array.strides)
        twin.flags.writeable = array.flags.writeable
        return twin

    def copy_back(self) -> None:
        ctypes.memmove(self.low, self.memory.ctypes.data, self.memory.size)


def bounds(array: np.ndarray) -> tuple[int, int]:
    """The first address, and the one after the last."""
    spans = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    first = array.ctypes.data
    return first + sum(s for s in spans if s < 0), first + sum(s for s in spans if s > 0) + array.itemsize


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    if type(value) is np.ndarray:
        low, high = bounds(value)
        if value.size > 0 and high - low < LARGEST:
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from arrays_in(item)


def swapped(value: Any, twins: dict[int, np.ndarray]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(swapped(item, twins) for item in value)
    return twins.get(id(value), value)


def guarded(operation: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(operation)
    def call(*args: Any, **options: Any) -> Any:
        groups: list[tuple[int, int, list[np.ndarray]]] = []  # arrays that share memory keep doing so
        for array in sorted(arrays_in([*args, *options.values()]), key=bounds):
            low, high = bounds(array)
            if groups and low < groups[-1][1]:
                before = groups.pop()
                low, high, together = before[0], max(high, before[1]), before[2]
            else:
                together = []
            groups.append((low, high, [*together, array]))
        regions = [Region(low, high, max(a.itemsize for a in together)) for low, high, together in groups]
        twins = {id(a): r.twin(a) for r, group in zip(regions, groups, strict=True) for a in group[2]}
        try:
            return operation(*swapped(args, twins), **{name: swapped(value, twins) for name, value in options.items()})
        finally:
            for region, group in zip(regions, groups, strict=True):
                if any(a.flags.writeable for a in group[2]):
                    region.copy_back()

    return call


def pytest_configure() -> None:
    twins = {name: guarded(getattr(pykv, name)) for name in pykv._C.ops}
    modules = [m for m in sys.modules.values() if isinstance(m, ModuleType) and m.__name__.split(".")[0] == "pykv"]
    for module in modules:
        for name, twin in twins.items():
            if getattr(module, name, None) is twin.__wrapped__:
                setattr(module, name, twin)
