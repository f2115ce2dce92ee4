"""Logits whose choices do not hang on a rounding."""

from __future__ import annotations

import ml_dtypes
import numpy as np

GATED = ["silu", "silu_with_clamp", "swigluoai_uninterleave", "gelu", "gelu_tanh", "situ", "swigluoai", "swiglustep"]
ALONE = ["silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul"]
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16)


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def logits(tokens: int, experts: int, dtype: object = np.float32, seed: int = 0) -> np.ndarray:
    """Multiples of 1/16: equal ones are equal, and others differ by more than arithmetic errs."""
    return (random(seed + experts).integers(-64, 65, (tokens, experts)) / 16).astype(dtype)


def bias(experts: int, seed: int = 1) -> np.ndarray:
    """Multiples of 1/4, which make few sums with a score nearly equal."""
    return (random(seed + experts).integers(-2, 3, experts) / 4).astype(np.float32)


def outputs(tokens: int, k: int, id_dtype: object = np.int32) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    weights = np.full((tokens, k), np.nan, np.float32)
    return weights, np.full((tokens, k), 77, id_dtype), np.full((tokens, k), -7, np.int32)
