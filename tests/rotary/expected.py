"""What the samples of rotary must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from rotary.reference import rotary_embedding
from rotary.test_dual_chunk_rotary_embedding import positions_of_copies
from rotary.test_mrope import mixed_cache

Results = dict[str, Any]


def rotated(x: np.ndarray, positions: np.ndarray, a: Any, table: np.ndarray | None = None) -> np.ndarray:
    heads = x.reshape(len(x), -1, a.cos_sin_cache.shape[1])  # the samples rotate whole heads
    return rotary_embedding(positions, heads, a.cos_sin_cache if table is None else table, a.is_neox).reshape(x.shape)


def rotary(a: Any, positions: np.ndarray, table: np.ndarray | None = None) -> Results:
    return {name: rotated(getattr(a, name), positions, a, table) for name in ("query", "key")}


def mrope(a: Any) -> Results:
    table = mixed_cache(a.positions, a.cos_sin_cache, a.mrope_section.tolist(), False)
    return rotary(a, np.arange(len(table)), table)


def dual_chunk_rotary_embedding(a: Any) -> Results:
    where = positions_of_copies(a.positions, a.chunk_size, a.local_size)
    copies = [rotated(a.query, at, a) for at in where]
    return {"query_out": np.concatenate(copies, axis=1), "key": rotated(a.key, where[0], a)}


EXPECTED: dict[str, Callable[[Any], Results]] = {
    "rotary_embedding": lambda a: rotary(a, a.positions),
    "batched_rotary_embedding": lambda a: rotary(a, a.positions + a.cos_sin_cache_offsets),
    "mrope": mrope,
    "dual_chunk_rotary_embedding": dual_chunk_rotary_embedding,
}
