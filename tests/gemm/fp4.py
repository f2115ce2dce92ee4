"""nvfp4 with scales in tiles of 128 rows and four groups, in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
NUMBERS = np.concatenate([E2M1, -E2M1])


def tiled(scales: np.ndarray, fill: int = 0) -> np.ndarray:
    """``[rows, groups]`` as tiles; the padding is ``fill``."""
    rows, groups = scales.shape
    padded = np.full((-(-rows // 128) * 128, -(-groups // 4) * 4), fill, np.uint8)
    padded[:rows, :groups] = scales
    parts = padded.reshape(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return np.ascontiguousarray(parts.transpose(0, 3, 2, 1, 4)).reshape(-1)


def untiled(tiles: np.ndarray, rows: int, groups: int) -> np.ndarray:
    parts = tiles.view(np.uint8).reshape(-(-rows // 128), -(-groups // 4), 32, 4, 4)
    return parts.transpose(0, 3, 2, 1, 4).reshape(-(-rows // 128) * 128, -(-groups // 4) * 4)[:rows, :groups]


def decoded(codes: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    rows, pairs = codes.shape
    x = NUMBERS[np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows, 2 * pairs)]
    scales = untiled(tiles, rows, pairs // 8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return x * np.repeat(scales, 16, axis=1)
