"""The ops on MLA caches in their plainest form: NumPy, one token after another."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from cache import reference_nvfp4
from cache.reference import CODES, quantise


def record_bytes(latent: int, rope: int, kind: str = "fp8_ds_mla") -> int:
    return latent // 2 + rope + latent // 16 if kind == "nvfp4_ds_mla" else latent + latent // 128 * 4 + 2 * rope


def power_of_two_from(x: np.ndarray) -> np.ndarray:
    """The least power of two that is at least x; infinity stays what it is."""
    mantissas, exponents = np.frexp(x)
    with np.errstate(over="ignore"):
        powers = np.ldexp(np.float32(1), np.where(mantissas > 0.5, exponents, exponents - 1))
    return np.where(np.isinf(x), x, powers).astype(np.float32)


def pack_record(latent: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """fp8_ds_mla: e4m3 codes, float32 scales of tiles of 128, 16-bit rope."""
    tiles = latent.astype(np.float32).reshape(-1, 128)
    amax = np.fmax.reduce(np.abs(tiles), axis=1, initial=0)
    scales = power_of_two_from(np.fmax(amax / np.float32(448), np.float32(1e-4))).astype("<f4")
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


def nvfp4_scale_places(latent: int) -> np.ndarray:
    """Where the scale of each block of 16 lies among the scales of a record."""
    s = np.arange(latent // 16)
    return s % 4 * (latent // 64) + s // 4


def pack_nvfp4_record(latent: np.ndarray, rope: np.ndarray) -> np.ndarray:
    """nvfp4_ds_mla: e2m1 codes, e4m3 rope, e4m3 scales of blocks of 16."""
    blocks = latent.astype(np.float32).reshape(-1, 16)
    with np.errstate(all="ignore"):
        largest = np.fmax.reduce(np.abs(blocks), axis=1, initial=0) / np.float32(6)
        scales = np.clip(largest, 2.0**-9, 448).astype(reference_nvfp4.E4M3)
        reciprocals = np.float32(1) / scales.astype(np.float32)
        codes = reference_nvfp4.e2m1(np.abs(blocks) * reciprocals[:, None]) | np.where(np.signbit(blocks), 8, 0)
    codes = codes.reshape(-1).astype(np.uint8)
    placed = np.empty(len(scales), np.uint8)
    placed[nvfp4_scale_places(latent.size)] = scales.view(np.uint8)
    return np.concatenate([codes[0::2] | codes[1::2] << 4, quantise(rope, 1.0, "fp8_e4m3"), placed])


def unpack_nvfp4_record(record: np.ndarray, latent: int, dtype: np.dtype) -> np.ndarray:
    codes, rest = np.split(record.view(np.uint8), [latent // 2])
    rope, placed = np.split(rest, [len(rest) - latent // 16])
    values = reference_nvfp4.dequantise(codes, placed[nvfp4_scale_places(latent)], np.float32(1))
    with np.errstate(all="ignore"):
        return np.concatenate([values, rope.view(ml_dtypes.float8_e4m3fn).astype(np.float32)]).astype(dtype)


def entry(latent: np.ndarray, rope: np.ndarray, kind: str, scale: float, cache: np.ndarray) -> np.ndarray:
    if kind == "nvfp4_ds_mla":
        return pack_nvfp4_record(latent, rope)
    if kind == "fp8_ds_mla":
        record = pack_record(latent, rope)
        return np.pad(record, (0, cache.shape[2] - len(record))).view(cache.dtype)
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
