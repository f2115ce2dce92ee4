"""Rotary embedding in float64."""

from __future__ import annotations

import numpy as np


def cos_sin_cache(max_position: int, rotary_dim: int, dtype: np.dtype, base: float = 10000.0) -> np.ndarray:
    angles = np.outer(np.arange(max_position), base ** (-np.arange(0, rotary_dim, 2) / max(rotary_dim, 1)))
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=-1).astype(dtype)


def rotary_embedding(
    positions: np.ndarray, x: np.ndarray, cache: np.ndarray, is_neox: bool, offset: int = 0, inverse: bool = False
) -> np.ndarray:
    """Heads ``x [<positions>, num_heads, head_size]`` rotated, not yet rounded to their dtype."""
    half = cache.shape[1] // 2
    rows = cache.astype(np.float64)[positions][..., None, :]
    cosines, sines = rows[..., :half], rows[..., half:] * (-1 if inverse else 1)
    if is_neox:
        first, second = slice(offset, offset + half), slice(offset + half, offset + 2 * half)
    else:
        first, second = slice(offset, offset + 2 * half, 2), slice(offset + 1, offset + 2 * half, 2)
    wide = x.astype(np.float64)
    rotated = wide.copy()
    rotated[..., first] = wide[..., first] * cosines - wide[..., second] * sines
    rotated[..., second] = wide[..., second] * cosines + wide[..., first] * sines
    return rotated
