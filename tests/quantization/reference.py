"""What quantising operations give, to the bit: every step is one of fp32, rounded as IEEE says."""

from __future__ import annotations

import ml_dtypes
import numpy as np

F = np.float32
E4M3, E5M2, INT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2), np.dtype(np.int8)
LARGEST = {E4M3: F(448), E5M2: F(57344), INT8: F(127)}

quiet = np.errstate(all="ignore")


def largest(x: np.ndarray, axis: int | None = -1) -> np.ndarray:
    """The largest magnitude among numbers; 0 where there is none."""
    return np.fmax.reduce(np.abs(x.astype(F)), axis=axis, keepdims=axis is not None, initial=F(0))


def fp8(v: np.ndarray, kind: np.dtype) -> np.ndarray:
    """Saturated; NaN becomes the largest code."""
    most = LARGEST[kind]
    return np.fmax(np.fmin(v, most), -most).astype(kind)


def int8(v: np.ndarray) -> np.ndarray:
    """Ties to even, saturated; NaN becomes 0."""
    return np.clip(np.rint(np.where(np.isnan(v), F(0), v)), -128, 127).astype(np.int8)


def codes(v: np.ndarray, kind: np.dtype) -> np.ndarray:
    return int8(v) if kind == INT8 else fp8(v, kind)


def shifted_int8(v: np.ndarray, azp: np.ndarray | int) -> np.ndarray:
    whole = np.clip(np.rint(np.where(np.isnan(v), F(0), v)).astype(np.float64), -(2.0**31), 2.0**31 - 1)
    return np.clip(whole + azp, -128, 127).astype(np.int8)


def factor(scale: np.ndarray) -> np.ndarray:
    """1 / scale, but finite."""
    return np.fmin(F(1) / scale, np.finfo(F).max)


@quiet
def static_int8(x: np.ndarray, scale: float, azp: int | None = None) -> np.ndarray:
    x, scale = x.astype(F), F(scale)
    return int8(x / scale) if azp is None else shifted_int8(x * (F(1) / scale), azp)


@quiet
def dynamic_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    most = largest(x)
    inverse = np.where(most == 0, F(0), F(127) / most)
    return int8(x.astype(F) * inverse), most / F(127)


@quiet
def per_token_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    most = np.maximum(largest(x), F(1e-10))
    v = np.clip(np.nan_to_num(x.astype(F) * (F(127) / most), nan=0), -128, 127).astype(np.float64)
    return np.clip(np.trunc(v + np.copysign(0.5, v)), -128, 127).astype(np.int8), most / F(127)


@quiet
def dynamic_int8_azp(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = x.astype(F)
    low, high = np.fmin.reduce(x, -1, keepdims=True), np.fmax.reduce(x, -1, keepdims=True)
    low, high = (np.where(np.isnan(v), F(0), v) for v in (low, high))
    spread = (high - low) / F(255)
    same = spread == 0
    scale = np.where(same, np.where(high == 0, F(1), np.abs(high) / F(127)), spread)
    azp = np.where(same, F(0), np.rint(F(-128) - low / scale)).astype(np.float64)
    azp = np.clip(np.nan_to_num(azp, nan=0.0, posinf=2.0**31, neginf=-(2.0**31)), -(2.0**31), 2.0**31 - 1)
    return shifted_int8(x * (F(1) / scale), azp), scale, azp.astype(np.int32)


@quiet
def static_fp8(x: np.ndarray, scale: np.ndarray | float, kind: np.dtype = E4M3) -> np.ndarray:
    """``scale``: one for each element, or to be broadcast."""
    return fp8(x.astype(F) * (F(1) / np.asarray(scale, F)), kind)


@quiet
def dynamic_fp8(x: np.ndarray, kind: np.dtype = E4M3) -> tuple[np.ndarray, np.ndarray]:
    scale = largest(x, None) / LARGEST[kind]
    return fp8(x.astype(F) * factor(scale), kind), scale


@quiet
def per_token_fp8(x: np.ndarray, kind: np.dtype = E4M3, scale_ub: float | None = None) -> tuple[np.ndarray, np.ndarray]:
    most = largest(x)
    if scale_ub is not None:
        most = np.minimum(most, F(scale_ub))
    scale = np.maximum(most / LARGEST[kind], F(1) / (LARGEST[kind] * F(512)))
    return fp8(x.astype(F) / scale, kind), scale


def power_of_two_from(scale: np.ndarray) -> np.ndarray:
    """The least one that is not below; 2^127 at most."""
    mantissa, exponent = np.frexp(np.fmin(scale, np.ldexp(F(1), 127)))
    return np.ldexp(F(1), exponent - (mantissa == 0.5)).astype(F)


@quiet
def groups(
    x: np.ndarray,
    size: int,
    kind: np.dtype = E4M3,
    *,
    eps: float = 1e-10,
    most: float | None = None,
    ue8m0: bool = False,
    truncates: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    of = x.astype(F).reshape(*x.shape[:-1], x.shape[-1] // size, size)
    scale = np.maximum(largest(of), F(eps)) / F(most or LARGEST[kind])
    if ue8m0:
        scale = power_of_two_from(np.maximum(scale, F(1e-10)))
    v = of * factor(scale)
    return codes(np.trunc(v) if truncates else v, kind).reshape(x.shape), scale[..., 0]


def packed(scale: np.ndarray) -> np.ndarray:
    """Exponents of powers of two ``[rows, groups]``, four in a word."""
    rows, count = scale.shape
    exponents = np.zeros((rows, -(-count // 4) * 4), np.uint8)
    exponents[:, :count] = (scale.view(np.uint32) >> 23).astype(np.uint8)
    return exponents.view("<i4")
