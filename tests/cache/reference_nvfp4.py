"""nvfp4 in its plainest form: NumPy, after the formulas; one token and head after another where pages are written."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
E4M3 = ml_dtypes.float8_e4m3fn


def e2m1(magnitude: np.ndarray) -> np.ndarray:
    """The code of the nearest value, the even one of two; NaN becomes 0."""
    x = np.minimum(np.where(np.isnan(magnitude), 0, magnitude), 6).astype(np.float64)
    distance = np.abs(x[..., None] - E2M1)
    nearest = distance == distance.min(-1, keepdims=True)
    first, last = nearest.argmax(-1), 7 - nearest[..., ::-1].argmax(-1)
    return np.where(first % 2 == 0, first, last)


def quantise(x: np.ndarray, scale: np.ndarray | float, code: float = 6) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of codes ``[..., D / 2]`` and of block scales ``[..., D / 16]``; ``scale`` fits ``[..., 1]``.

    ``code`` is what the largest magnitude of a block becomes.
    """
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
    g = np.asarray(scale, np.float32)
    with np.errstate(all="ignore"):
        largest = np.fmax.reduce(np.abs(blocks), axis=-1, initial=0)
        scales = np.clip(largest / (np.float32(code) * g), -448, 448)
        scales = np.where(np.isnan(scales), np.copysign(np.float32(np.nan), g), scales)  # infinity / infinity
        scales = np.where(largest == 0, np.float32(0), scales).astype(E4M3)
        value = scales.astype(np.float32)
        reciprocal = np.where(value == 0, np.float32(0), np.float32(1) / (value * g)).astype(np.float32)
        codes = e2m1(np.abs(blocks) * reciprocal[..., None]) | np.where(np.signbit(blocks), 8, 0)
    codes = codes.reshape(x.shape)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8), scales.view(np.uint8)


def dequantise(codes: np.ndarray, scales: np.ndarray, scale: np.ndarray | float) -> np.ndarray:
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(*scales.shape, 16)
    values = np.where(nibbles & 8, -E2M1[nibbles & 7], E2M1[nibbles & 7])
    with np.errstate(all="ignore"):
        blocks = values * scales.view(E4M3).astype(np.float32)[..., None] * np.asarray(scale, np.float32)[..., None]
    return blocks.astype(np.float32).reshape(*codes.shape[:-1], -1)


def parts(page: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a page ``[BS, H, 9 D / 16]``, NHD or HND, as views ``[BS, H, ...]`` of it."""
    heads_first = not page.flags.c_contiguous
    ordered = page.swapaxes(0, 1) if heads_first else page
    assert ordered.flags.c_contiguous
    outer, inner, row = ordered.shape
    flat = ordered.reshape(-1)
    codes, scales = np.split(flat, [outer * inner * row * 8 // 9])
    codes, scales = codes.reshape(outer, inner, row // 9 * 8), scales.reshape(outer, inner, row // 9)
    return (codes.swapaxes(0, 1), scales.swapaxes(0, 1)) if heads_first else (codes, scales)


def places(token: int, num_scales: int, values: bool) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each scale of a token, in a cache of ``values`` or of keys."""
    s = np.arange(num_scales)
    if not values:
        return np.full(num_scales, token), s
    return token // 4 * 4 + s // (num_scales // 4), s % (num_scales // 4) * 4 + token % 4


def store(cache: np.ndarray, slot: int, x: np.ndarray, scale: np.ndarray | float, values: bool = False) -> None:
    """``x [H, D]`` into that slot of a cache ``[NB, BS, H, 9 D / 16]``."""
    block, token = divmod(slot, cache.shape[1])
    codes, scales = parts(cache[block])
    new_codes, new_scales = quantise(x, np.reshape(np.asarray(scale), (-1, 1)))
    codes[token] = new_codes
    rows, columns = places(token, new_scales.shape[-1], values)
    for head in range(len(x)):
        scales[rows, head, columns] = new_scales[head]


def load(cache: np.ndarray, scale: np.ndarray | float, of_values: bool = False) -> np.ndarray:
    """All of a cache, as float32 ``[NB, BS, H, D]``."""
    blocks, block_size, heads, row = cache.shape
    values = np.zeros((blocks, block_size, heads, row * 16 // 9), np.float32)
    for block in range(blocks):
        codes, scales = parts(cache[block])
        for token in range(block_size):
            rows, columns = places(token, row // 9, of_values)
            linear = np.stack([scales[rows, head, columns] for head in range(heads)])
            values[block, token] = dequantise(codes[token], linear, np.reshape(np.asarray(scale), (-1, 1)))
    return values
