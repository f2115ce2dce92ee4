"""The devices that commands run on, and arrays there."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv import _C
from pykv._libraries import array_like, numpy_dtype
from pykv._tools.errors import CommandError


@dataclass(frozen=True)
class Device:
    name: str  # "cpu", "cuda:0"
    library: str
    like: Any  # an array there, or None for NumPy
    read: Callable[[Any], npt.NDArray[Any]]
    current: Callable[[], AbstractContextManager[Any]] = nullcontext

    def array(self, values: npt.NDArray[Any]) -> Any:
        return array_like(values.copy(), values.dtype.name, self.like)


CPU = Device("cpu", "NumPy", None, np.asarray)


def names() -> list[str]:
    return ["cpu", *(f"cuda:{i}" for i in range(_C.cuda_device_count()))]


def _cupy(name: str) -> Device:
    cupy = importlib.import_module("cupy")

    def read(array: Any) -> npt.NDArray[Any]:
        """CuPy moves small floats as integers alone."""
        bits = array.view(np.uint16) if array.dtype.name == "bfloat16" else array
        return np.asarray(cupy.asnumpy(bits)).view(array.dtype)

    place = cupy.cuda.Device(int(name.removeprefix("cuda:")))
    with place:
        return Device(name, "CuPy", cupy.empty(0), read, lambda: place)


def of_torch(tensor: Any) -> npt.NDArray[Any]:
    torch = importlib.import_module("torch")
    if tensor.dtype != torch.bfloat16:  # which NumPy does not have
        return np.asarray(tensor.cpu().numpy())
    return np.asarray(tensor.view(torch.int16).cpu().numpy()).view(numpy_dtype("bfloat16"))


def _torch(name: str) -> Device:
    torch = importlib.import_module("torch")
    like = torch.empty(0, device=name)
    return Device(name, "torch", like, of_torch, lambda: torch.cuda.device(like.device))


def device(name: str) -> Device:
    """By CuPy or torch on CUDA, whichever is usable."""
    name = "cuda:0" if name == "cuda" else name
    if name not in names():
        why = "" if _C.has_cuda() else "; this pykv was built without CUDA"
        raise CommandError(f"no device is called {name!r}; there are: {', '.join(names())}{why}")
    if name == "cpu":
        return CPU
    reasons = []
    for library, make in (("CuPy", _cupy), ("torch", _torch)):
        try:
            return make(name)
        except Exception as error:  # not installed, or built for another CUDA
            reasons.append(f"{library}: {error}")
    raise CommandError(f"{name}: arrays need CuPy or torch; {'; '.join(reasons)}")
