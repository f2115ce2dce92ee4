"""Batches over paged caches whose unused memory is poisoned: with NaN, or with the largest code where there is none.

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
ONE_BYTE = {
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
}
KINDS = ["auto", *ONE_BYTE]
NVFP4_LAYOUTS = ["NHD", "HND", "NHD, blocks of K and V in turn", "HND, blocks of K and V in turn", "K NHD, V HND"]
OPTIONS_OF_8_HEADS: list[dict[str, Any]] = [  # of several query tokens
    {"causal": False},
    {"window": 1},
    {"window": 130},
    {"window": 100, "causal": False},
    {"sinks": np.linspace(-4, 4, 8, dtype=np.float32)},
    {"softcap": 5.0},
    {"alibi_slopes": np.linspace(0.01, 0.5, 8, dtype=np.float32)},
    {"scale": -0.1},
]
UNIT = {"int8": 1 / 32}  # the scale with which the elements of a batch are normal numbers; 1 for all others


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
    values = rng.standard_normal(shape, np.float32)
    return np.clip(values / UNIT["int8"], -128, 127).astype(dtype) if dtype == np.int8 else values.astype(dtype)


def scales(kind: str, k_scale: Any = 1.0, v_scale: Any = 1.0) -> dict[str, Any]:
    """The options for these scales of what a batch of this kind holds."""
    unit = np.float32(UNIT.get(kind, 1))
    return {} if kind == "auto" else {"k_scale": k_scale * unit, "v_scale": v_scale * unit}


def scaled_query(b: Batch, by: np.ndarray) -> np.ndarray:
    """Its query, each row times a number of ``by``: ``[token, head]`` or ``[head]``."""
    return (b.query.astype(np.float32) * by[..., None]).astype(b.query.dtype)


def fill_nvfp4(
    rng: np.random.Generator, cache: np.ndarray, used: np.ndarray, heads_first: bool, swizzled: bool
) -> None:
    """Random codes everywhere, and random scales, or NaN where a token is not ``used`` (``[block, token]``)."""
    pages = cache.swapaxes(1, 2) if heads_first else cache  # as they lie in memory
    blocks, tokens, heads, num_bytes = cache.shape
    num_scales = num_bytes // 9
    scales = rng.uniform(0.1, 0.5, (blocks, tokens, heads, num_scales)).astype(ONE_BYTE["fp8_e4m3"]).view(np.uint8)
    scales[~used] = 0x7F
    if swizzled:  # rows of 4 tokens, columns [s / quarter][s % quarter]; turned: [s / quarter][..][t % 4]
        quarter = num_scales // 4
        scales = scales.reshape(blocks, tokens // 4, 4, heads, 4, quarter).transpose(0, 1, 4, 3, 5, 2)
        scales = scales.reshape(blocks, tokens, heads, num_scales)
    if heads_first:
        scales = scales.swapaxes(1, 2)
    codes = rng.integers(0, 256, (blocks, tokens * heads * num_scales * 8), np.uint8)
    pages[...] = np.concatenate([codes, scales.reshape(blocks, -1)], axis=1).reshape(pages.shape)


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
    room: int = 0,
    begins: Sequence[int] = (),
) -> Batch:
    """``lens``: (queries, length with them) of each sequence.  Pages are dealt out at random; tables have room for so
    many tokens, or just enough.  ``begins``: of each sequence the first token that a query sees; for most pages
    in front of it the table names no block of the cache."""
    page = sizes.block_size
    pages = [-(-length // page) for _, length in lens]
    nvfp4 = kind == "nvfp4"
    element = DTYPES[dtype] if kind == "auto" else ONE_BYTE.get(kind, np.dtype(np.uint8))
    poison = np.array(127 if element.kind in "iu" else np.nan).astype(element)
    row = sizes.head_size * 9 // 16 if nvfp4 else sizes.head_size
    cache = cache_inputs.Sizes(max(1, sum(pages) + spare_blocks), page, sizes.kv_heads, row)
    made = cache_inputs.layout(layout, cache, element.itemsize)
    shapes = [made.key_shape] if made.one_memory else [made.key_shape, made.value_shape]
    memories = [np.full(shape, poison, element) for shape in shapes]

    deck = rng.permutation(cache.blocks)
    tables = np.full((len(lens), max(max(pages, default=0) + 1, -(-room // page))), -1)
    used = np.zeros((cache.blocks, page, 1, 1), bool)
    for s, (_, length) in enumerate(lens):
        mine, deck = deck[: pages[s]], deck[pages[s] :]
        tables[s, : pages[s]] = mine
        first = begins[s] if begins else 0
        hidden = np.arange(first // page)
        tables[s, : len(hidden)] = np.choose(hidden % 3, (mine[: len(hidden)], -1, 2**30))
        token = np.arange(pages[s] * page)
        used[mine] = ((first <= token) & (token < length)).reshape(pages[s], page, 1, 1)

    if nvfp4:
        fill_nvfp4(rng, made.key(memories[0]), used[:, :, 0, 0], layout.startswith("HND"), swizzled=False)
        fill_nvfp4(rng, made.value(memories[-1]), used[:, :, 0, 0], "HND" in layout, swizzled=True)
    else:
        shape = (cache.blocks, page, sizes.kv_heads, sizes.head_size)
        keys, values = (np.where(used, cache_values(rng, shape, element), poison) for _ in range(2))
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
        scales(kind) if kind in UNIT else {},
    )


SENTINEL = 7.0  # what an output holds that was not written


def outputs(b: Batch) -> tuple[np.ndarray, np.ndarray]:
    out = np.full(b.query.shape, SENTINEL, b.query.dtype)
    return out, np.full((b.query.shape[1], b.query.shape[0]), SENTINEL, np.float32)


def caches(array: Library, b: Batch) -> tuple[Any, Any]:
    """Key and value cache in this library.  JAX makes every array compact, which would turn pages of nvfp4 around."""
    memories = [(array.output if b.kind == "nvfp4" else array.input)(m) for m in b.memories]
    return cache_inputs.view(memories[0], b.layout.key), cache_inputs.view(memories[-1], b.layout.value)


def run(array: Library, b: Batch, out: Any, lse: Any = None) -> None:
    """``pykv.paged_attention`` with the arrays of this library."""
    pykv.paged_attention(
        out,
        array.input(b.query),
        *caches(array, b),
        array.input(b.block_tables),
        array.input(b.seq_lens),
        cu_query_lens=None if b.cu_query_lens is None else array.input(b.cu_query_lens),
        kv_cache_dtype=b.kind,
        lse=lse,
        **{k: array.input(v) if isinstance(v, np.ndarray) else v for k, v in b.options.items()},
    )


def expected(b: Batch, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """By the reference, which finds no NaN; rows of no sequence hold the sentinel."""
    out, lse = expected_or_nan(b, **more)
    return np.where(np.isnan(out), SENTINEL, out), np.where(np.isnan(lse), SENTINEL, lse)


def expected_or_nan(b: Batch, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """By the reference; rows of no sequence hold NaN."""
    if b.kind == "nvfp4":
        values = [reference.nvfp4_values(b.key_cache, False), reference.nvfp4_values(b.value_cache, True)]
    else:
        values = [c.view(ONE_BYTE.get(b.kind, b.query.dtype)) for c in (b.key_cache, b.value_cache)]
    return reference.paged_attention(
        b.query,
        *values,
        b.block_tables,
        b.seq_lens,
        cu_query_lens=b.cu_query_lens,
        **{**b.options, **more},
    )
