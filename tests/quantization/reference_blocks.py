"""nvfp4, mxfp4 and mxfp8, to the bit: every step is one of fp32, rounded as IEEE says."""

from __future__ import annotations

import numpy as np
from quantization.reference import E4M3, F, fp8, largest, quiet

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LARGEST_EXPONENT = {4: 2, E4M3: 8}
LARGEST_CODE = {4: F(6), E4M3: F(448)}


def e2m1(v: np.ndarray) -> np.ndarray:
    """The nearest code, ties to the even one; NaN is the largest.  The sign is that of the number, zeros' too."""
    a = np.abs(np.where(np.isnan(v), 6, v).astype(np.float64))
    middle = (E2M1[1:] + E2M1[:-1]) / 2
    code = np.searchsorted(middle, a, side="left")
    tie = (code < 7) & (a == middle[np.minimum(code, 6)]) & (code % 2 == 1)
    return ((code + tie) | np.where(np.signbit(v), 8, 0)).astype(np.uint8)


def nibbles(codes: np.ndarray) -> np.ndarray:
    return codes[..., ::2] | codes[..., 1::2] << 4


def blocks_of(x: np.ndarray, size: int) -> np.ndarray:
    return x.astype(F).reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _nvfp4_by(of: np.ndarray, g: np.ndarray, code: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and by what values of codes are multiplied."""
    wanted = g * (largest(of) * (F(1) / F(code)))
    scale = fp8(np.abs(np.nan_to_num(wanted, nan=0)), E4M3).astype(F)
    unit = scale * (F(1) / np.abs(g))
    factor = np.where(scale == 0, F(0), np.fmin(F(1) / unit, np.finfo(F).max))
    # the sign of NaN, which a product may lose
    v = np.copysign(np.where(np.isnan(of), F(6), np.abs(of) * factor), of)
    return e2m1(v), np.where((scale > 0) & (g < 0), -scale, scale), unit


@quiet
def nvfp4(x: np.ndarray, g: np.ndarray | float, *, four_over_six: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and scales (E4M3).  ``g``: the global scale, or one for each row."""
    of, g = blocks_of(x, 16), np.asarray(g, F)
    g = g.reshape(*g.shape, *(1,) * (of.ndim - g.ndim))
    codes, scale, unit = _nvfp4_by(of, g, 6)
    if four_over_six:

        def error(codes: np.ndarray, unit: np.ndarray) -> np.ndarray:
            d = (np.abs(of) - E2M1[codes & 7] * unit.astype(float)).astype(F).astype(float)
            sums = np.zeros((*of.shape[:-1], 4), F)  # of every fourth square, each step rounded once
            for i in range(0, 16, 4):
                sums = (sums + d[..., i : i + 4] * d[..., i : i + 4]).astype(F)
            return (sums[..., 0] + sums[..., 2]) + (sums[..., 1] + sums[..., 3])

        others, scale4, unit4 = _nvfp4_by(of, g, 4)
        better = (error(others, unit4) < error(codes, unit))[..., None]
        codes, scale = np.where(better, others, codes), np.where(better, scale4, scale)
    return nibbles(codes.reshape(x.shape)), scale[..., 0].astype(E4M3)


@quiet
def mx(x: np.ndarray, kind: object, mode: str) -> tuple[np.ndarray, np.ndarray]:
    """Codes (packed ones of ``kind`` 4) and exponents."""
    of = blocks_of(x, 32)
    most = np.fmin(largest(of), np.finfo(F).max)
    code = LARGEST_CODE[kind]
    floor = (most.view(np.uint32) >> 23).astype(np.int64)
    if mode == "ocp":
        exponent = np.maximum(floor - LARGEST_EXPONENT[kind], 0)
    elif mode == "ceil":
        bits = (most * (F(1) / code)).view(np.uint32)
        exponent = np.where(most == 0, 0, np.maximum((bits >> 23) + ((bits & 0x7FFFFF) != 0), 1)).astype(np.int64)
    elif kind == 4:
        exponent = ((most * (F(1) / code)).view(np.uint32) >> 23).astype(np.int64)
    else:
        exponent = np.maximum(floor, 1)
    factor = np.where(exponent == 0, F(0), np.ldexp(F(1), 127 - exponent))
    with np.errstate(all="ignore"):
        v = of * factor
    stored = exponent[..., 0].astype(np.uint8)
    if kind == 4:
        signed = np.copysign(np.where(np.isnan(v), F(6), np.abs(v)), of)
        return nibbles(e2m1(signed).reshape(x.shape)), stored
    return fp8(v, E4M3).reshape(x.shape), stored


def swizzled(scales: np.ndarray, tile_rows: int = 128) -> np.ndarray:
    """``[rows, blocks]`` of bytes in tiles of so many rows and 4 blocks, padded with 0."""
    rows, count = scales.shape
    tiles = -(-count // 4)
    out = np.zeros(-(-rows // tile_rows) * tile_rows * tiles * 4, scales.dtype)
    r, b = np.meshgrid(np.arange(rows), np.arange(count), indexing="ij")
    within = r % 32 * 16 + r % 128 // 32 * 4 if tile_rows == 128 else r % 8 * 4
    out[((r // tile_rows) * tiles + b // 4) * 4 * tile_rows + within + b % 4] = scales
    return out.reshape(-1, tiles * 4)
