"""rotary_and_cache, and "apart", the two operations that it stands for: tokens as in bench_reshape_and_cache."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_reshape_and_cache import BLOCK_SIZE, HEAD_SIZE, TOKENS, itemsize, slots
from timing import Call, Case, Device, main

HEADS, KV_HEADS = 32, 8
MAX_POSITION = 8192
# name -> (packed, kv_cache_dtype, NeoX style, in one launch)
OPS = {
    "rotary_and_cache": (False, "auto", True, True),
    "apart": (False, "auto", True, False),
    "rotary_and_cache gptj": (False, "auto", False, True),
    "rotary_and_cache fp8": (False, "fp8_e4m3", True, True),
    "apart fp8": (False, "fp8_e4m3", True, False),
    "rotary_and_cache packed": (True, "auto", True, True),
    "apart packed": (True, "auto", True, False),
    "rotary_and_cache packed fp8": (True, "fp8_e4m3", True, True),
}


@functools.cache
def cos_sin_cache(dtype: str, device: Device) -> Any:
    """One for all calls, as in a model."""
    return device.random((MAX_POSITION, HEAD_SIZE), dtype)


def call(name: str, tokens: int, dtype: str, device: Device) -> Call:
    packed, kv_cache_dtype, is_neox, fused = OPS[name]
    stored = dtype if kv_cache_dtype == "auto" else "float8_e4m3fn"
    blocks = tokens if tokens <= 256 else tokens // BLOCK_SIZE
    x = 16 // itemsize(stored)
    key_shape: tuple[int, ...] = (blocks, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    value_shape: tuple[int, ...] = key_shape
    if packed:
        key_shape = (blocks, KV_HEADS, HEAD_SIZE // x, BLOCK_SIZE, x)
        value_shape = (blocks, KV_HEADS, HEAD_SIZE, BLOCK_SIZE)
    query = device.random((tokens, HEADS, HEAD_SIZE), dtype)
    key, value = (device.random((tokens, KV_HEADS, HEAD_SIZE), dtype) for _ in range(2))
    caches = [device.random(shape, stored) for shape in (key_shape, value_shape)]
    positions = device.array(np.random.default_rng(0).integers(0, MAX_POSITION, tokens))
    slot_mapping, cos_sin = device.array(slots(tokens)), cos_sin_cache(dtype, device)
    if fused:
        return lambda: pykv.rotary_and_cache(
            positions, query, key, value, cos_sin, is_neox, *caches, slot_mapping, kv_cache_dtype, 0.5, 0.5
        )
    write = pykv.reshape_and_cache if packed else pykv.reshape_and_cache_flash

    def apart() -> None:
        pykv.rotary_embedding(positions, query, key, HEAD_SIZE, cos_sin, is_neox)
        write(key, value, *caches, slot_mapping, kv_cache_dtype, 0.5, 0.5)

    return apart


def cases(dtypes: list[str]) -> Iterator[Case]:
    for name, (_, kv_cache_dtype, _, _) in OPS.items():
        for dtype in dtypes:
            given, stored = itemsize(dtype), itemsize(dtype) if kv_cache_dtype == "auto" else 1
            rotated, cached = (HEADS + KV_HEADS) * given, 2 * KV_HEADS * stored
            read, written = rotated + KV_HEADS * given, rotated + cached
            for tokens in TOKENS:
                yield Case(
                    name,
                    {"tokens": tokens},
                    dtype,
                    tokens * ((read + written) * HEAD_SIZE + 16),
                    lambda device, arguments=(name, tokens, dtype): call(*arguments, device),
                    tokens * written * HEAD_SIZE,
                )


if __name__ == "__main__":
    main(cases)
