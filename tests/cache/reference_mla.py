"""The ops on MLA caches in their plainest form: NumPy, one token after another."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from cache.reference import CODES, quantise


def record_bytes(latent: int, rope: int) -> int:
    return latent + latent // 128 * 4 + 2 * rope


def pack_record(latent: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """fp8_ds_mla: e4m3 codes, float32 scales of tiles of 128, 16-bit rope."""
    tiles = latent.astype(np.float32).reshape(-1, 128)
    amax = np.fmax.reduce(np.abs(tiles), axis=1, initial=0)
    scales = np.fmax(amax / np.float32(448), np.finfo(np.float32).tiny).astype("<f4")
    codes = quantise(tiles, scales[:, None], "fp8_e4m3")
    parts = [codes, scales, np.ascontiguousarray(rope)]
    return np.concatenate([p.view(np.uint8).reshape(-1) for p in parts])


def unpack_record(record: np.ndarray, latent: int, dtype: np.dtype) -> np.ndarray:
    codes, rest = np.split(record.view(np.uint8), [latent])
    scales, rope = np.split(rest, [latent // 32])
    values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32).reshape(-1, 128)
    with np.errstate(all="ignore"):
        values = (values * np.ascontiguousarray(scales).view("<f4")[:, None]).astype(dtype).reshape(-1)
    return np.concatenate([values, np.ascontiguousarray(rope).view(dtype)])


def entry(latent: np.ndarray, rope: np.ndarray, kind: str, scale: float, cache: np.ndarray) -> np.ndarray:
    if kind == "fp8_ds_mla":
        return pack_record(latent, rope).view(cache.dtype)
    row = np.concatenate([latent, rope])
    return quantise(row, scale, kind).view(cache.dtype) if kind in CODES else row


def concat_and_cache_mla(
    kv_c: np.ndarray, k_pe: np.ndarray, cache: np.ndarray, slots: np.ndarray, kind: str = "auto", scale: float = 1.0
) -> None:
    blocks, block_size = cache.shape[:2]
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < blocks * block_size:
            cache[divmod(slot, block_size)] = entry(kv_c[token], k_pe[token], kind, scale, cache)


def gather(
    cache: np.ndarray,
    out: np.ndarray,
    block_table: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    positions: np.ndarray | None = None,
    decode: Callable[[np.ndarray], np.ndarray] = lambda entry: entry,
) -> None:
    """Writes the rows of each request; a token that is not in the cache leaves its row as it is."""
    blocks, block_size = cache.shape[:2]
    for request, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        first = 0 if positions is None else int(positions[request])
        for i in range(min(length, len(out) - start)):
            column, offset = divmod(first + i, block_size)
            if 0 <= column < block_table.shape[1] and 0 <= block_table[request, column] < blocks:
                out[start + i] = decode(cache[block_table[request, column], offset])
