"""rotary_embedding of query and key, in both styles."""

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


if __name__ == "__main__":
    main(cases)
