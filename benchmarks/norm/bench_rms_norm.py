"""The norms."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

TOKENS = [1, 64, 4096, 65536]
HIDDEN_SIZES = [4096, 8192]
GROUP_SIZE = 128  # elements that share a scale


def rms_norm(tokens: int, hidden_size: int, dtype: str, device: Device) -> Call:
    x, out = (device.random((tokens, hidden_size), dtype) for _ in range(2))
    weight = device.random((hidden_size,), dtype)
    return lambda: pykv.rms_norm(out, x, weight)


def fused_add_rms_norm(tokens: int, hidden_size: int, dtype: str, device: Device) -> Call:
    x, residual = (device.random((tokens, hidden_size), dtype) for _ in range(2))
    weight = device.random((hidden_size,), dtype)
    return lambda: pykv.fused_add_rms_norm(x, residual, weight)


def layer_norm(tokens: int, hidden_size: int, dtype: str, device: Device) -> Call:
    x, out = (device.random((tokens, hidden_size), dtype) for _ in range(2))
    weight, bias = (device.random((hidden_size,), dtype) for _ in range(2))
    return lambda: pykv.layer_norm(out, x, weight, bias)


def rms_norm_gated(tokens: int, hidden_size: int, dtype: str, device: Device) -> Call:
    x, z, out = (device.random((tokens, hidden_size), dtype) for _ in range(3))
    weight = device.random((hidden_size,), dtype)
    return lambda: pykv.rms_norm_gated(out, x, weight, z)


def codes(tokens: int, hidden_size: int, device: Device) -> Any:
    return device.array(np.zeros((tokens, hidden_size), np.uint8))


def rms_norm_static_fp8_quant(tokens: int, hidden_size: int, dtype: str, device: Device) -> Call:
    x, result = device.random((tokens, hidden_size), dtype), codes(tokens, hidden_size, device)
    weight, scale = device.random((hidden_size,), dtype), device.array(np.full(1, 0.02, np.float32))
    return lambda: pykv.rms_norm_static_fp8_quant(result, x, weight, scale)


def rms_norm_dynamic_per_token_quant(tokens: int, hidden_size: int, dtype: str, device: Device) -> Call:
    x, result = device.random((tokens, hidden_size), dtype), codes(tokens, hidden_size, device)
    weight, scales = device.random((hidden_size,), dtype), device.array(np.zeros((tokens, 1), np.float32))
    return lambda: pykv.rms_norm_dynamic_per_token_quant(result, x, weight, scales)


def rms_norm_per_block_quant(
    tokens: int, hidden_size: int, dtype: str, device: Device, transposed: bool = False
) -> Call:
    x, result = device.random((tokens, hidden_size), dtype), codes(tokens, hidden_size, device)
    weight, groups = device.random((hidden_size,), dtype), hidden_size // GROUP_SIZE
    scales = device.array(np.zeros((groups, tokens) if transposed else (tokens, groups), "f4"))
    scales = scales.T if transposed else scales
    return lambda: pykv.rms_norm_per_block_quant(result, x, weight, scales, group_size=GROUP_SIZE)


def fused_qk_norm_rope(tokens: int, hidden_size: int, dtype: str, device: Device) -> Call:
    """Heads of 128: for eight of queries two each of keys and values."""
    queries, others = hidden_size // 128, hidden_size // 512
    qkv = device.random((tokens, (queries + 2 * others) * 128), dtype)
    weight, cache = device.random((128,), dtype), device.random((4096, 128), dtype)
    positions = device.array(np.arange(tokens) % 4096)
    return lambda: pykv.fused_qk_norm_rope(
        qkv, queries, others, others, 128, 1e-6, weight, weight, cache, True, positions
    )


# name -> (operation, what a call reads and writes for each element: as many of the input's size, and so many bytes of
# codes and scales)
OPS: dict[str, tuple[Callable[[int, int, str, Device], Call], float, float, float]] = {
    "rms_norm": (rms_norm, 1, 1, 0),
    "fused_add_rms_norm": (fused_add_rms_norm, 2, 2, 0),
    "layer_norm": (layer_norm, 1, 1, 0),
    "rms_norm_gated": (rms_norm_gated, 2, 1, 0),
    "rms_norm_static_fp8_quant": (rms_norm_static_fp8_quant, 1, 0, 1),
    "rms_norm_dynamic_per_token_quant": (rms_norm_dynamic_per_token_quant, 1, 0, 1),
    "rms_norm_per_block_quant": (rms_norm_per_block_quant, 1, 0, 1 + 4 / GROUP_SIZE),
    "rms_norm_per_block_quant, scales transposed": (
        partial(rms_norm_per_block_quant, transposed=True),
        1,
        0,
        1 + 4 / GROUP_SIZE,
    ),
    "fused_qk_norm_rope": (fused_qk_norm_rope, 1.25, 1.25, 0),
}


def cases(dtypes: list[str]) -> Iterator[Case]:
    for name, (op, read, elements, num_bytes) in OPS.items():
        for dtype in dtypes:
            itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
            written = elements * itemsize + num_bytes
            for hidden_size in HIDDEN_SIZES:
                for tokens in TOKENS:
                    yield Case(
                        name,
                        {"tokens": tokens, "hidden": hidden_size},
                        dtype,
                        int((read * itemsize + written) * tokens * hidden_size),
                        partial(op, tokens, hidden_size, dtype),
                        int(written * tokens * hidden_size),
                    )


if __name__ == "__main__":
    main(cases)
