"""The cache ops in their plainest form: NumPy, one token or one block after another."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

FP8 = {
    "fp8": ml_dtypes.float8_e4m3fn,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
CODES = {**FP8, "int8": np.int8}  # caches of one byte an element, with a scale


def quantise(x: np.ndarray, scale: np.ndarray | float, kind: str) -> np.ndarray:
    """Codes of x / scale: rounded to nearest even, saturated; NaN keeps its sign, or is 0 where there is none."""
    if kind == "int8":
        with np.errstate(all="ignore"):
            quotient = x.astype(np.float32) / np.asarray(scale, np.float32)
        return np.clip(np.rint(np.nan_to_num(quotient, nan=0.0)), -128, 127).astype(np.int8).view(np.uint8)
    dtype = FP8[kind]
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / np.asarray(scale, np.float32)
        codes = np.clip(quotient, -largest, largest).astype(dtype).view(np.uint8)
    nan = 0x7F if dtype is ml_dtypes.float8_e4m3fn else 0x7E
    sign = np.where(np.signbit(x), 0x80, 0)
    return np.where(np.isnan(quotient), nan | sign, codes).astype(np.uint8)


def stored(x: np.ndarray, kind: str, scale: np.ndarray | float, cache: np.ndarray) -> np.ndarray:
    """What a cache holds for tokens x ``[..., heads, head_size]``: the elements themselves, or codes."""
    if kind not in CODES:
        return x
    return quantise(x, np.reshape(scale, (-1, 1)), kind).view(cache.dtype)


def reshape_and_cache(
    key: np.ndarray,
    value: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    slot_mapping: np.ndarray,
    kind: str = "auto",
    k_scale: np.ndarray | float = 1.0,
    v_scale: np.ndarray | float = 1.0,
) -> None:
    blocks, heads, chunks, block_size, x = key_cache.shape
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < blocks * block_size:
            block, offset = divmod(slot, block_size)
            key_cache[block, :, :, offset, :] = stored(key[token], kind, k_scale, key_cache).reshape(heads, chunks, x)
            place = (offset // x, slice(None), offset % x) if value_cache.ndim == 5 else (slice(None), offset)
            value_cache[(block, slice(None), *place)] = stored(value[token], kind, v_scale, value_cache)


def reshape_and_cache_flash(
    key: np.ndarray,
    value: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    slot_mapping: np.ndarray,
    kind: str = "auto",
    k_scale: np.ndarray | float = 1.0,
    v_scale: np.ndarray | float = 1.0,
) -> None:
    blocks, block_size = key_cache.shape[:2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if 0 <= slot < blocks * block_size:
            block, offset = divmod(slot, block_size)
            key_cache[block, offset] = stored(key[token], kind, k_scale, key_cache)
            value_cache[block, offset] = stored(value[token], kind, v_scale, value_cache)


def copy_blocks(caches: Sequence[np.ndarray], block_mapping: np.ndarray) -> None:
    for cache in caches:
        for source, target in block_mapping.tolist():
            cache[target] = cache[source]


def swap_blocks(src: np.ndarray, dst: np.ndarray, size: int, block_mapping: np.ndarray) -> None:
    """``src`` and ``dst`` are flat bytes."""
    for source, target in block_mapping.tolist():
        dst[target * size : (target + 1) * size] = src[source * size : (source + 1) * size]
