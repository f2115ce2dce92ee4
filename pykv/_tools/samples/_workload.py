"""Calls of a size that means something, for ``pykv bench``: those of a decoder layer with so many tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv._libraries import numpy_dtype
from pykv._schema import Spec

HEADS, KV_HEADS, HEAD, BLOCK = 32, 8, 128, 16
POSITIONS, CONTEXT, LAYERS = 4096, 1024, 4

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    arguments: Mapping[str, Any]  # without outputs; a Spec is an array of random numbers, an array is taken as it is
    touched: Mapping[str, int] = field(default_factory=dict)  # bytes of an array, where a call does not touch all of it


@dataclass(frozen=True)
class Tokens:
    """So many tokens of a dtype, and what operations say of them."""

    count: int
    dtype: str

    def rows(self, *shape: int) -> Spec:
        return Spec((self.count, *shape), self.dtype)

    def bytes(self, elements: int) -> int:
        """Of so many elements for each token."""
        return self.count * elements * numpy_dtype(self.dtype).itemsize

    @property
    def blocks(self) -> int:
        return math.ceil(self.count / BLOCK)

    def cache(self, *shape: int) -> Spec:
        return Spec((self.blocks, *shape), self.dtype)

    @property
    def slots(self) -> Ids:
        """Of whole sequences, as a prefill writes them: block after block, each anywhere in the cache."""
        return (shuffled(self.blocks)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[: self.count]

    @property
    def positions(self) -> Ids:
        return np.arange(self.count, dtype=np.int64) % POSITIONS

    @property
    def lengths(self) -> Ids:
        """Of sequences that have all tokens together."""
        return np.array([len(part) for part in np.array_split(np.arange(self.count), max(1, self.count // CONTEXT))])

    @property
    def tables(self) -> Ids:
        """Blocks of these sequences, anywhere in a cache of ``blocks_of_sequences``."""
        width = math.ceil(self.lengths.max() / BLOCK)
        return shuffled(len(self.lengths) * width).reshape(-1, width)

    @property
    def starts(self) -> Ids:
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def angles(self, width: int) -> dict[str, Any]:
        """Of rotations: calls turn the same numbers again and again, which others would make infinite or subnormal."""
        angles = np.arange(POSITIONS)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return {"cos_sin_cache": table.astype(numpy_dtype(self.dtype)), "is_neox": True}


def shuffled(n: int) -> Ids:
    return np.random.default_rng(0).permutation(n)


def caches(t: Tokens, blocks: int, packed: bool) -> dict[str, Any]:
    key: tuple[int, ...] = (blocks, BLOCK, KV_HEADS, HEAD)
    value = key
    if packed:
        x = 16 // numpy_dtype(t.dtype).itemsize
        key, value = (blocks, KV_HEADS, HEAD // x, BLOCK, x), (blocks, KV_HEADS, HEAD, BLOCK)
    return {"key_cache": Spec(key, t.dtype), "value_cache": Spec(value, t.dtype)}


def rotated_workload(t: Tokens, **more: Any) -> Workload:
    heads = {"query": t.rows(HEADS * HEAD), "key": t.rows(KV_HEADS * HEAD), "head_size": HEAD}
    return Workload({"positions": t.positions, **heads, **t.angles(HEAD), **more}, {"cos_sin_cache": t.bytes(HEAD)})


def size_of(spec: Spec) -> int:
    """Bytes."""
    return math.prod(spec.shape) * numpy_dtype(spec.dtype).itemsize
