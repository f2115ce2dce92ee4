"""MLA caches (512 + 64) and the indexer's (128), written and gathered; queries, rotated and concatenated.

Pages of 64 in random order.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

TOKENS = [1, 64, 4096, 16384, 65536]
LATENT, ROPE, RECORD, BLOCK_SIZE, HEADS = 512, 64, 656, 64, 128
INDEXER, INDEXER_ENTRY = 128, 132
WIDTH = LATENT + ROPE
ROTATED, MAX_POSITION = (HEADS + 1) * ROPE, 8192


def itemsize(dtype: str) -> int:
    return np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize


@functools.cache
def pages(tokens: int) -> np.ndarray:
    return np.random.default_rng(0).permutation(-(-tokens // BLOCK_SIZE))


@functools.cache
def slots(tokens: int) -> np.ndarray:
    return (pages(tokens)[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[:tokens]


def cache(tokens: int, kind: str, dtype: str, device: Device) -> Any:
    width = {"fp8_ds_mla": RECORD, "nvfp4": WIDTH * 9 // 16}.get(kind, WIDTH)
    made = device.random((-(-tokens // BLOCK_SIZE), BLOCK_SIZE, width), dtype if kind == "auto" else "float8_e4m3fn")
    return made.view(np.uint8) if kind in ("int8", "nvfp4") else made


def write(kind: str, tokens: int, dtype: str, device: Device) -> Call:
    kv_c, k_pe = device.random((tokens, LATENT), dtype), device.random((tokens, ROPE), dtype)
    kv_cache, slot_mapping = cache(tokens, kind, dtype, device), device.array(slots(tokens))
    return lambda: pykv.concat_and_cache_mla(kv_c, k_pe, kv_cache, slot_mapping, kind, 0.5)


@functools.cache
def cos_sin_cache(dtype: str, device: Device) -> Any:
    """One for all calls, as in a model."""
    return device.random((MAX_POSITION, ROPE), dtype)


def rotate_and_write(kind: str, tokens: int, dtype: str, device: Device) -> Call:
    q_pe, k_pe = device.random((tokens, HEADS, ROPE), dtype), device.random((tokens, ROPE), dtype)
    kv_c, kv_cache = device.random((tokens, LATENT), dtype), cache(tokens, kind, dtype, device)
    positions = device.array(np.random.default_rng(0).integers(0, MAX_POSITION, tokens))
    slot_mapping, cos_sin = device.array(slots(tokens)), cos_sin_cache(dtype, device)
    return lambda: pykv.concat_and_cache_mla_rope_fused(
        positions, q_pe, k_pe, kv_c, cos_sin, False, slot_mapping, kv_cache, kind, 0.5
    )


def requests(tokens: int, device: Device) -> tuple[object, object, int]:
    """A block table and ends of rows: one request a page, or as many as there are tokens."""
    ends = np.minimum(np.arange(len(pages(tokens)) + 1) * BLOCK_SIZE, tokens).astype(np.int32)
    return device.array(pages(tokens)[:, None].astype(np.int32)), device.array(ends), len(ends) - 1


def gather(kind: str, tokens: int, dtype: str, device: Device) -> Call:
    src, dst = cache(tokens, kind, dtype, device), device.random((tokens, WIDTH), dtype)
    table, cu_seq_lens, batch = requests(tokens, device)
    if kind == "auto":
        return lambda: pykv.cp_gather_cache(src, dst, table, cu_seq_lens, batch)
    return lambda: pykv.gather_and_maybe_dequant_cache(src, dst, table, cu_seq_lens, None, tokens, kind, 0.5)


def indexer_cache(tokens: int, device: Device) -> object:
    return device.random((-(-tokens // BLOCK_SIZE), BLOCK_SIZE, INDEXER_ENTRY), "float8_e4m3fn")


def write_indexer(kind: str, tokens: int, dtype: str, device: Device) -> Call:
    k, kv_cache, slot_mapping = (
        device.random((tokens, INDEXER), dtype),
        indexer_cache(tokens, device),
        device.array(slots(tokens)),
    )
    return lambda: pykv.indexer_k_quant_and_cache(k, kv_cache, slot_mapping, INDEXER, kind)


def gather_indexer(_: str, tokens: int, dtype: str, device: Device) -> Call:
    src, dst_k = indexer_cache(tokens, device), device.random((tokens, INDEXER), "float8_e4m3fn")
    dst_scale, (table, cu_seq_lens, _batch) = device.random((tokens, 1), "float32"), requests(tokens, device)
    return lambda: pykv.cp_gather_indexer_k_quant_cache(src, dst_k, dst_scale, table, cu_seq_lens)


def queries(_: str, tokens: int, dtype: str, device: Device) -> Call:
    arrays = [device.random((tokens, HEADS, d), dtype) for d in (LATENT, ROPE, WIDTH)]
    return lambda: pykv.concat_mla_q(*arrays)


def convert(kind: str, tokens: int, dtype: str, device: Device) -> Call:
    arrays = device.random((tokens, 4096), "float8_e4m3fn"), device.random((tokens, 4096), dtype)
    if kind == "from fp8":
        arrays = arrays[::-1]
    return lambda: pykv.convert_fp8(*arrays, 0.5)


# name -> (what makes the call, its kind, bytes of a token that are read and written, given those of an element)
OPS: dict[str, tuple[Callable[[str, int, str, Device], Call], str, Callable[[int], tuple[int, int]]]] = {
    "concat_and_cache_mla": (write, "auto", lambda e: (WIDTH * e + 8, WIDTH * e)),
    "concat_and_cache_mla fp8": (write, "fp8_e4m3", lambda e: (WIDTH * e + 8, WIDTH)),
    "concat_and_cache_mla int8": (write, "int8", lambda e: (WIDTH * e + 8, WIDTH)),
    "concat_and_cache_mla nvfp4": (write, "nvfp4", lambda e: (WIDTH * e + 8, WIDTH * 9 // 16)),
    "concat_and_cache_mla fp8_ds_mla": (write, "fp8_ds_mla", lambda e: (WIDTH * e + 8, RECORD)),
    "concat_and_cache_mla_rope_fused": (
        rotate_and_write,
        "auto",
        lambda e: ((ROTATED + LATENT) * e + 16, (ROTATED + WIDTH) * e),
    ),
    "concat_and_cache_mla_rope_fused fp8": (
        rotate_and_write,
        "fp8_e4m3",
        lambda e: ((ROTATED + LATENT) * e + 16, ROTATED * e + WIDTH),
    ),
    "concat_and_cache_mla_rope_fused fp8_ds_mla": (
        rotate_and_write,
        "fp8_ds_mla",
        lambda e: ((ROTATED + LATENT) * e + 16, ROTATED * e + RECORD),
    ),
    "cp_gather_cache": (gather, "auto", lambda e: (WIDTH * e, WIDTH * e)),
    "gather_and_maybe_dequant fp8": (gather, "fp8_e4m3", lambda e: (WIDTH, WIDTH * e)),
    "gather_and_maybe_dequant int8": (gather, "int8", lambda e: (WIDTH, WIDTH * e)),
    "gather_and_maybe_dequant nvfp4": (gather, "nvfp4", lambda e: (WIDTH * 9 // 16, WIDTH * e)),
    "gather_and_maybe_dequant fp8_ds_mla": (gather, "fp8_ds_mla", lambda e: (RECORD, WIDTH * e)),
    "indexer_k_quant_and_cache": (write_indexer, "ue8m0", lambda e: (INDEXER * e + 8, INDEXER_ENTRY)),
    "cp_gather_indexer_k_quant_cache": (gather_indexer, "", lambda e: (INDEXER_ENTRY, INDEXER_ENTRY)),
    "concat_mla_q": (queries, "", lambda e: (HEADS * WIDTH * e, HEADS * WIDTH * e)),
    "convert_fp8": (convert, "to fp8", lambda e: (4096 * e, 4096)),
    "convert_fp8, from fp8": (convert, "from fp8", lambda e: (4096, 4096 * e)),
}


def cases(dtypes: list[str]) -> Iterator[Case]:
    for name, (make, kind, bytes_of_token) in OPS.items():
        for dtype in dtypes:
            if kind == "fp8_ds_mla" and itemsize(dtype) != 2:
                continue
            read, written = bytes_of_token(itemsize(dtype))
            for tokens in TOKENS:
                if tokens * (read + written) > 4 << 30:
                    continue
                yield Case(
                    name,
                    {"tokens": tokens},
                    dtype,
                    tokens * (read + written),
                    lambda device, make=make, arguments=(kind, tokens, dtype): make(*arguments, device),
                    tokens * written,
                )


if __name__ == "__main__":
    main(cases)
