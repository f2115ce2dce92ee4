"""reshape_and_cache and reshape_and_cache_flash: tokens of sequences that lie in pages of 16 in random order."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

TOKENS = [1, 64, 4096, 65536]
KV_HEADS = [8, 32]
HEAD_SIZE = 128
BLOCK_SIZE = 16
# name -> (operation, kv_cache_dtype)
OPS = {
    "reshape_and_cache_flash": (pykv.reshape_and_cache_flash, "auto"),
    "reshape_and_cache_flash fp8": (pykv.reshape_and_cache_flash, "fp8_e4m3"),
    "reshape_and_cache_flash int8": (pykv.reshape_and_cache_flash, "int8"),
    "reshape_and_cache_flash nvfp4": (pykv.reshape_and_cache_flash, "nvfp4"),
    "reshape_and_cache": (pykv.reshape_and_cache, "auto"),
    "reshape_and_cache fp8": (pykv.reshape_and_cache, "fp8_e4m3"),
    "reshape_and_cache int8": (pykv.reshape_and_cache, "int8"),
}


def itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


@functools.cache
def slots(tokens: int) -> np.ndarray:
    """Up to 256 tokens: one each for as many sequences.  More: whole sequences, page after page."""
    rng = np.random.default_rng(0)
    if tokens <= 256:
        return rng.permutation(tokens) * BLOCK_SIZE + rng.integers(0, BLOCK_SIZE, tokens)
    pages = rng.permutation(tokens // BLOCK_SIZE)
    return (pages[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)


def call(name: str, tokens: int, heads: int, dtype: str, device: Device) -> Call:
    op, kv_cache_dtype = OPS[name]
    stored = dtype if kv_cache_dtype == "auto" else "float8_e4m3fn"
    blocks = tokens if tokens <= 256 else tokens // BLOCK_SIZE
    x = 16 // itemsize(stored)
    if op is pykv.reshape_and_cache_flash:
        width = HEAD_SIZE * 9 // 16 if kv_cache_dtype == "nvfp4" else HEAD_SIZE
        key_shape = value_shape = (blocks, BLOCK_SIZE, heads, width)
    else:
        key_shape = (blocks, heads, HEAD_SIZE // x, BLOCK_SIZE, x)
        value_shape = (blocks, heads, HEAD_SIZE, BLOCK_SIZE)
    key, value = (device.random((tokens, heads, HEAD_SIZE), dtype) for _ in range(2))
    key_cache, value_cache = (device.random(shape, stored) for shape in (key_shape, value_shape))
    if kv_cache_dtype in ("int8", "nvfp4"):
        key_cache, value_cache = key_cache.view(np.uint8), value_cache.view(np.uint8)
    slot_mapping = device.array(slots(tokens))
    return lambda: op(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, 0.5, 0.5)


def cases(dtypes: list[str]) -> Iterator[Case]:
    for name, (_, kv_cache_dtype) in OPS.items():
        for dtype in dtypes:
            stored = {"auto": itemsize(dtype), "nvfp4": 9 / 16}.get(kv_cache_dtype, 1)
            for heads in KV_HEADS:
                for tokens in TOKENS:
                    yield Case(
                        name,
                        {"tokens": tokens, "kv heads": heads},
                        dtype,
                        int(tokens * (2 * heads * HEAD_SIZE * (itemsize(dtype) + stored) + 8)),
                        lambda device, arguments=(name, tokens, heads, dtype): call(*arguments, device),
                        int(tokens * 2 * heads * HEAD_SIZE * stored),
                    )


if __name__ == "__main__":
    main(cases)
