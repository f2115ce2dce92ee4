"""Caches in JAX, whose arrays never change: what is written is a new array, in the donated one's memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pykv._libraries import numpy_dtype, open_library
from pykv._types import Stream

Pairs = npt.NDArray[np.int64]


class JaxLibrary:
    """JAX and one of its devices, or shardings.  It also is the ``ReplacedBlocks`` of its arrays.

    Each shape is compiled once, so that numbers of blocks are rounded up to a power of two.
    """

    has_strides = False

    def __init__(self, jax: Any, device: Any) -> None:
        if isinstance(device, str):
            kind, _, index = device.partition(":")
            device = jax.devices(kind)[int(index or 0)]
        self._jax, self._device = jax, device  # None: JAX's default
        self._copy = jax.jit(_copy, donate_argnums=0)
        self._get = jax.jit(_get)
        self._put = jax.jit(_put, donate_argnums=0)

    def __reduce__(self) -> tuple[Any, ...]:
        device = self._device
        if isinstance(device, self._jax.Device):
            device = f"{device.platform}:{self._jax.devices(device.platform).index(device)}"
        return open_library, ("jax", device)

    @property
    def replaces(self) -> JaxLibrary:
        return self

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._jax.numpy.zeros(shape, numpy_dtype(dtype), device=self._device)

    def from_host(self, array: npt.NDArray[Any], stream: Stream) -> Any:
        return array  # jitted functions take it as it is

    def host_memory(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        return np.zeros(num_bytes, np.uint8)

    def side_stream(self) -> None:
        return None

    def copy_blocks(self, caches: list[Any], pairs: Pairs) -> None:
        caches[:] = self._copy(caches, _padded(pairs))

    def get_blocks(self, caches: list[Any], host: list[Any], pairs: Pairs) -> None:
        blocks = self._get(caches, _padded(pairs[:, 0]))
        for target, found in zip(host, blocks, strict=True):
            target[pairs[:, 1]] = np.asarray(found)[: len(pairs)].reshape(len(pairs), -1).view(np.uint8)

    def put_blocks(self, host: list[Any], caches: list[Any], pairs: Pairs) -> None:
        sources, targets = _padded(pairs).T
        values = [
            source[sources].view(cache.dtype).reshape(-1, *cache.shape[1:])
            for source, cache in zip(host, caches, strict=True)
        ]
        caches[:] = self._put(caches, values, targets)


def _copy(caches: list[Any], pairs: Any) -> list[Any]:
    return [cache.at[pairs[:, 1]].set(cache[pairs[:, 0]]) for cache in caches]


def _get(caches: list[Any], blocks: Any) -> list[Any]:
    return [cache[blocks] for cache in caches]


def _put(caches: list[Any], values: list[Any], blocks: Any) -> list[Any]:
    return [cache.at[blocks].set(value) for cache, value in zip(caches, values, strict=True)]


def _padded(rows: Pairs) -> npt.NDArray[np.int32]:
    """The last row again and again: what is copied twice to one place is the same."""
    more = (1 << (len(rows) - 1).bit_length()) - len(rows)
    return np.concatenate([rows, np.repeat(rows[-1:], more, axis=0)]).astype(np.int32)
