"""The array libraries that the tests run with, behind one small face."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

import pykv

_SMALL_FLOATS = {"float8_e4m3fn", "float8_e5m2"}


def _span(x: np.ndarray) -> np.ndarray:
    """The flat memory that a view without negative strides covers."""
    if x.size == 0 or x.flags.c_contiguous:
        return np.ascontiguousarray(x).reshape(-1)
    last = sum((n - 1) * (s // x.itemsize) for n, s in zip(x.shape, x.strides, strict=True))
    return np.lib.stride_tricks.as_strided(x, (last + 1,), (x.itemsize,))


class Library:
    """Makes arrays of one library on one device out of NumPy arrays, and NumPy arrays out of them."""

    name: ClassVar[str]
    module: ClassVar[str]
    device: ClassVar[str]

    def output(self, x: np.ndarray, *, offset: int = 0) -> Any:
        """A copy that pykv may write into; a strided view stays one, with the same strides.

        ``offset`` elements lie before it in its memory, which decides how it is aligned.  torch has no negative
        strides.
        """
        turn = tuple(slice(None, None, -1 if s < 0 else 1) for s in x.strides)
        forwards = x[turn]
        flat = _span(forwards)
        strides = tuple(s // x.itemsize for s in forwards.strides)
        made = self._view(self._copy(np.concatenate([np.zeros(offset, x.dtype), flat]))[offset:], x.shape, strides)
        return made[turn] if any(s < 0 for s in x.strides) else made

    def input(self, x: np.ndarray, *, offset: int = 0) -> Any:
        """A copy that pykv reads."""
        return self.output(x, offset=offset)

    def numpy(self, a: Any) -> np.ndarray:
        raise NotImplementedError

    def keeps(self, dtype: np.dtype) -> bool:
        """Whether inputs and outputs have it: CuPy has no fp8, and outputs of JAX on CUDA are those of CuPy."""
        x = np.zeros(1, dtype)
        return all(dtype.name in str(getattr(made, "dtype", "")) for made in (self.input(x), self.output(x)))

    def _copy(self, flat: np.ndarray) -> Any:
        raise NotImplementedError

    def _view(self, flat: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        raise NotImplementedError

    @contextmanager
    def reports(self, match: str) -> Iterator[None]:
        """The call inside meets an id that is out of range: raised at once on the CPU, kept by the device on CUDA."""
        with pytest.raises(ValueError, match=match):  # noqa: PT012 - the body is the caller's
            yield
            pykv.check_errors()


class Numpy(Library):
    name, module, device = "numpy", "numpy", "cpu"

    def _copy(self, flat: np.ndarray) -> np.ndarray:
        return flat.copy()

    def _view(self, flat: np.ndarray, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
        # as_strided does not know ml_dtypes' float8_e5m2
        return np.ndarray(shape, flat.dtype, flat.view(np.uint8), strides=[s * flat.itemsize for s in strides])

    def numpy(self, a: np.ndarray) -> np.ndarray:
        return np.asarray(a)


class Torch(Library):
    name, module, device = "torch", "torch", "cpu"

    def _copy(self, flat: np.ndarray) -> Any:
        import torch

        # torch does not read ml_dtypes: carry the bits over
        bits = {1: np.uint8, 2: np.int16}.get(flat.itemsize)
        if flat.dtype.name == "bfloat16" or flat.dtype.name in _SMALL_FLOATS:
            return torch.from_numpy(flat.view(bits).copy()).view(getattr(torch, flat.dtype.name)).to(self.device)
        return torch.from_numpy(flat.copy()).to(self.device)

    def _view(self, flat: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        return flat.as_strided(shape, strides)

    def numpy(self, a: Any) -> np.ndarray:
        import torch

        a = a.detach().cpu().contiguous()
        name = str(a.dtype).removeprefix("torch.")
        if name == "bfloat16":
            return a.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if name in _SMALL_FLOATS:
            return a.view(torch.uint8).numpy().view(getattr(ml_dtypes, name))
        return a.numpy()


class Jax(Library):
    """JAX arrays are immutable and compact: inputs are JAX arrays, outputs are NumPy arrays."""

    name, module, device = "jax", "jax", "cpu"
    writer: ClassVar[type[Library]] = Numpy

    def output(self, x: np.ndarray, *, offset: int = 0) -> Any:
        return self.writer().output(x, offset=offset)

    def input(self, x: np.ndarray, *, offset: int = 0) -> Any:
        import jax

        if x.dtype.itemsize == 8 or offset:  # JAX has no 64-bit integers unless the whole process is told so
            return self.output(x, offset=offset)
        return jax.device_put(np.ascontiguousarray(x), jax.devices(self.device)[0])

    def numpy(self, a: Any) -> np.ndarray:
        return self.writer().numpy(a) if not type(a).__module__.startswith("jax") else np.asarray(a)


class Cupy(Library):
    name, module, device = "cupy", "cupy", "cuda"

    def _copy(self, flat: np.ndarray) -> Any:
        import cupy

        if flat.dtype.name in _SMALL_FLOATS:  # CuPy has no such types: the op's string says what the bytes are
            return cupy.asarray(flat.view(np.uint8))
        if flat.dtype.name == "bfloat16":
            return cupy.asarray(flat.view(np.uint16)).view(flat.dtype)
        return cupy.asarray(flat)

    def _view(self, flat: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        import cupy

        return cupy.ndarray(shape, flat.dtype, flat.data, tuple(s * flat.itemsize for s in strides))

    def numpy(self, a: Any) -> np.ndarray:
        import cupy

        if a.dtype.name == "bfloat16":
            return cupy.asnumpy(cupy.ascontiguousarray(a.view(np.uint16))).view(ml_dtypes.bfloat16)
        return np.asarray(cupy.asnumpy(a))


class TorchCuda(Torch):
    name, module, device = "torch", "torch", "cuda"


class JaxCuda(Jax):
    name, module, device = "jax", "jax", "cuda"
    writer = Cupy


class _Interface:
    """Nothing but ``__cuda_array_interface__``, as Numba's arrays have it."""

    def __init__(self, array: Any) -> None:
        self.array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.array.__cuda_array_interface__  # type: ignore[no-any-return]


class Interface(Cupy):
    name, module, device = "interface", "cupy", "cuda"

    def output(self, x: np.ndarray, *, offset: int = 0) -> Any:
        # the interface has no name for bfloat16 and fp8
        made = super().output(x, offset=offset)
        return made if x.dtype.name == "bfloat16" or x.dtype.name in _SMALL_FLOATS else _Interface(made)

    def numpy(self, a: Any) -> np.ndarray:
        return super().numpy(a.array if isinstance(a, _Interface) else a)


LIBRARIES: tuple[type[Library], ...] = (Numpy, Torch, Jax, Cupy, TorchCuda, JaxCuda, Interface)
