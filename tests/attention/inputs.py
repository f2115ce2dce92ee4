"""Batches over paged caches whose unused memory is poisoned with NaN.

The caches come from the layouts of the cache tests, with guard blocks around them: a block id that is one too small or
too large would read NaN from a guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
from attention import reference
from cache import inputs as cache_inputs
from cache.inputs import DTYPES, PACKED
from libraries import Library

import pykv

LAYOUTS = [name for name in cache_inputs.FLASH if name not in ("elements apart", "tokens adjacent")] + PACKED
FP8 = {"fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2)}
KINDS = ["auto", *FP8]


@dataclass(frozen=True)
class Sizes:
    heads: int = 8
    kv_heads: int = 2
    head_size: int = 64
    block_size: int = 16


@dataclass
class Batch:
    """NumPy arrays of one call.  ``memories``: what the caches are views of, keys first; one if they share it."""

    query: np.ndarray
    layout: cache_inputs.Layout
    memories: list[np.ndarray]
    block_tables: np.ndarray
    seq_lens: np.ndarray
    cu_query_lens: np.ndarray | None
    kind: str = "auto"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def key_cache(self) -> np.ndarray:
        return np.asarray(self.layout.key(self.memories[0]))

    @property
    def value_cache(self) -> np.ndarray:
        return np.asarray(self.layout.value(self.memories[-1]))

    def changed(self, **changes: Any) -> Batch:
        return replace(self, **changes)


def cache_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(dtype)


def batch(
    rng: np.random.Generator,
    lens: Sequence[tuple[int, int]],
    sizes: Sizes = Sizes(),
    *,
    layout: str = "NHD",
    dtype: str = "bfloat16",
    kind: str = "auto",
    decode: bool = False,
    ids: Any = np.int32,
    arrangement: str = "compact",
    extra_rows: int = 0,
    spare_blocks: int = 2,
    as_bytes: bool = False,
) -> Batch:
    """``lens``: (queries, length with them) of each sequence.  Pages are dealt out at random."""
    page = sizes.block_size
    pages = [-(-length // page) for _, length in lens]
    element = DTYPES[dtype] if kind == "auto" else FP8[kind]
    cache = cache_inputs.Sizes(max(1, sum(pages) + spare_blocks), page, sizes.kv_heads, sizes.head_size)
    made = cache_inputs.layout(layout, cache, element.itemsize)
    shapes = [made.key_shape] if made.one_memory else [made.key_shape, made.value_shape]
    memories = [np.full(shape, np.nan, element) for shape in shapes]

    deck = rng.permutation(cache.blocks)
    tables = np.full((len(lens), max(pages, default=0) + 1), -1)
    used = np.zeros((cache.blocks, page, 1, 1), bool)
    for s, (_, length) in enumerate(lens):
        mine, deck = deck[: pages[s]], deck[pages[s] :]
        tables[s, : pages[s]] = mine
        used[mine] = (np.arange(pages[s] * page) < length).reshape(pages[s], page, 1, 1)

    shape = (cache.blocks, page, sizes.kv_heads, sizes.head_size)
    keys, values = (np.where(used, cache_values(rng, shape, element), np.array(np.nan, element)) for _ in range(2))
    if made.packed:
        x = 16 // element.itemsize
        keys = keys.reshape(*shape[:3], sizes.head_size // x, x).transpose(0, 2, 3, 1, 4)
        values = values.transpose(0, 2, 3, 1)
    made.key(memories[0])[...] = keys
    made.value(memories[-1])[...] = values

    rows = sum(queries for queries, _ in lens) + extra_rows
    query = cache_inputs.tokens(
        lambda shape: cache_values(rng, shape, DTYPES[dtype]), rows, sizes.heads, sizes.head_size, arrangement
    )
    return Batch(
        query,
        made,
        [m.view(np.uint8) for m in memories] if as_bytes else memories,
        tables.astype(ids),
        np.array([length for _, length in lens], ids),
        None if decode else np.cumsum([0, *(queries for queries, _ in lens)]).astype(ids),
        kind,
    )


SENTINEL = 7.0  # what an output holds that was not written


def outputs(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    out = np.full(b.query.shape, SENTINEL, b.query.dtype)
    return out, np.full((b.query.shape[1], b.query.shape[0]), SENTINEL, np.float32)


def run(array: Library, b: Batch, out: Any, lse: Any = None) -> None:
    """``pykv.paged_attention`` with the arrays of this library."""
    memories = [array.input(m) for m in b.memories]
    pykv.paged_attention(
        out,
        array.input(b.query),
        cache_inputs.view(memories[0], b.layout.key),
        cache_inputs.view(memories[-1], b.layout.value),
        array.input(b.block_tables),
        array.input(b.seq_lens),
        cu_query_lens=None if b.cu_query_lens is None else array.input(b.cu_query_lens),
        kv_cache_dtype=b.kind,
        lse=lse,
        **{k: array.input(v) if isinstance(v, np.ndarray) else v for k, v in b.options.items()},
    )


def expected(b: Batch, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """By the reference; rows of no sequence hold the sentinel."""
    element = FP8.get(b.kind, b.query.dtype)
    out, lse = reference.paged_attention(
        b.query,
        b.key_cache.view(element),
        b.value_cache.view(element),
        b.block_tables,
        b.seq_lens,
        cu_query_lens=b.cu_query_lens,
        **{**b.options, **more},
    )
    return np.where(np.isnan(out), SENTINEL, out), np.where(np.isnan(lse), SENTINEL, lse)
