"""rotary_embedding of query and key, in both styles; by several positions; five times for dual chunk attention."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

TOKENS = [1, 64, 4096, 65536]
HEADS = [(32, 8), (64, 8)]
HEAD_SIZE = 128
MAX_POSITION = 8192


@functools.cache
def cos_sin_cache(dtype: str, device: Device) -> Any:
    """One for all calls, as in a model."""
    return device.random((MAX_POSITION, HEAD_SIZE), dtype)


def rotary(tokens: int, heads: int, kv_heads: int, dtype: str, is_neox: bool, device: Device) -> Call:
    query = device.random((tokens, heads * HEAD_SIZE), dtype)
    key = device.random((tokens, kv_heads * HEAD_SIZE), dtype)
    positions = device.array(np.random.default_rng(0).integers(0, MAX_POSITION, tokens))
    cache = cos_sin_cache(dtype, device)
    return lambda: pykv.rotary_embedding(positions, query, key, HEAD_SIZE, cache, is_neox)


def mrope(tokens: int, heads: int, kv_heads: int, dtype: str, device: Device) -> Call:
    query = device.random((tokens, heads * HEAD_SIZE), dtype)
    key = device.random((tokens, kv_heads * HEAD_SIZE), dtype)
    positions = device.array(np.random.default_rng(0).integers(0, MAX_POSITION, (3, tokens)))
    cache, sections = cos_sin_cache(dtype, device), np.array([16, 24, 24])
    return lambda: pykv.mrope(positions, query, key, HEAD_SIZE, cache, True, sections)


def dual_chunk(tokens: int, heads: int, kv_heads: int, dtype: str, device: Device) -> Call:
    out = device.random((tokens, 5 * heads * HEAD_SIZE), dtype)
    query = device.random((tokens, heads * HEAD_SIZE), dtype)
    key = device.random((tokens, kv_heads * HEAD_SIZE), dtype)
    positions = device.array(np.random.default_rng(0).integers(0, 1 << 20, tokens))
    cache = cos_sin_cache(dtype, device)
    return lambda: pykv.dual_chunk_rotary_embedding(
        out, positions, query, key, HEAD_SIZE, cache, True, MAX_POSITION // 2, 1024
    )


def cases(dtypes: list[str]) -> Iterator[Case]:
    for is_neox in (True, False):
        for dtype in dtypes:
            itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
            for heads, kv_heads in HEADS:
                for tokens in TOKENS:
                    yield Case(
                        "rotary neox" if is_neox else "rotary gptj",
                        {"tokens": tokens, "heads": heads, "kv_heads": kv_heads},
                        dtype,
                        2 * tokens * (heads + kv_heads) * HEAD_SIZE * itemsize,
                        lambda device, sizes=(tokens, heads, kv_heads, dtype, is_neox): rotary(*sizes, device),
                    )
    for dtype in dtypes:
        itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
        for tokens in TOKENS:
            heads, kv_heads = HEADS[0]
            for op, read, written, make in (
                ("mrope neox", heads + kv_heads, heads + kv_heads, mrope),
                ("dual chunk neox", heads + kv_heads, 5 * heads + kv_heads, dual_chunk),
            ):
                yield Case(
                    op,
                    {"tokens": tokens, "heads": heads, "kv_heads": kv_heads},
                    dtype,
                    tokens * (read + written) * HEAD_SIZE * itemsize,
                    functools.partial(make, tokens, heads, kv_heads, dtype),
                    tokens * written * HEAD_SIZE * itemsize,
                )


if __name__ == "__main__":
    main(cases)
