"""Norms in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np


def rms_norm(x: np.ndarray, weight: np.ndarray | None, epsilon: float) -> np.ndarray:
    """Not yet rounded to the dtype of ``x``."""
    wide = x.astype(np.float64)
    normed = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return normed if weight is None else normed * weight.astype(np.float64)


def add(x: np.ndarray, residual: np.ndarray) -> np.ndarray:
    """Rounded to the dtype, as it is stored.  Exact: float32 holds more than twice the bits of the 16-bit types."""
    return (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)


def layer_norm(x: np.ndarray, weight: np.ndarray | None, bias: np.ndarray | None, epsilon: float) -> np.ndarray:
    """Not yet rounded to the dtype of ``x``."""
    wide = x.astype(np.float64)
    distance = wide - wide.mean(axis=-1, keepdims=True)
    normed = distance / np.sqrt(np.mean(distance * distance, axis=-1, keepdims=True) + epsilon)
    if weight is not None:
        normed = normed * weight.astype(np.float64)
    return normed if bias is None else normed + bias.astype(np.float64)


def gate(z: np.ndarray, activation: str) -> np.ndarray:
    wide = z.astype(np.float64)
    sigmoid = 1 / (1 + np.exp(-wide))
    return sigmoid if activation == "sigmoid" else wide * sigmoid


def rms_norm_gated(
    x: np.ndarray,
    weight: np.ndarray | None,
    z: np.ndarray | None,
    epsilon: float,
    group_size: int,
    norm_before_gate: bool,
    activation: str,
) -> np.ndarray:
    """Not yet rounded to the dtype of ``x``."""
    wide = x.astype(np.float64)
    if z is not None and not norm_before_gate:
        wide = wide * gate(z, activation)
    size = group_size or wide.shape[-1]
    groups = wide.reshape(*wide.shape[:-1], wide.shape[-1] // size, size)
    normed = rms_norm(groups, None, epsilon).reshape(wide.shape)
    if weight is not None:
        normed = normed * weight.astype(np.float64)
    return normed * gate(z, activation) if z is not None and norm_before_gate else normed


def e4m3(y: np.ndarray) -> np.ndarray:
    """Codes of activations: clamped, NaN as well."""
    return np.fmax(np.float32(-448), np.fmin(y.astype(np.float32), np.float32(448))).astype(ml_dtypes.float8_e4m3fn)


def int8(y: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(np.nan_to_num(y.astype(np.float32), nan=0.0)), -128, 127).astype(np.int8)


LOST = 2e-6  # relative, of a normed value: what fp32 arithmetic loses


def normed_once(x: np.ndarray, weight: np.ndarray, epsilon: float) -> tuple[np.ndarray, np.ndarray]:
    """Between what the norm of ``x``, times ``weight`` and rounded to the dtype, lies: mostly they are one."""
    exact = rms_norm(x, weight, epsilon)
    ends = [(exact * (1 + lost)).astype(x.dtype) for lost in (-LOST, LOST)]
    return np.minimum(*ends), np.maximum(*ends)
