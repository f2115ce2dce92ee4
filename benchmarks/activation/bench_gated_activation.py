"""silu_and_mul and its kin, which share a kernel."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

TOKENS = [1, 64, 4096, 65536]
WIDTHS = [4096, 8192]  # of the result
GROUP_SIZE = 128  # elements that share a scale

OPS: dict[str, Callable[[Any, Any], None]] = {
    "silu_and_mul": pykv.silu_and_mul,
    "mul_and_silu": pykv.mul_and_silu,
    "silu_and_mul_with_clamp": lambda result, x: pykv.silu_and_mul_with_clamp(result, x, 7.0),
    "gelu_and_mul": pykv.gelu_and_mul,
    "gelu_tanh_and_mul": pykv.gelu_tanh_and_mul,
    "gelu_and_mul_sparse": lambda out, x: pykv.gelu_and_mul_sparse(out, x, 0.95),
    "fatrelu_and_mul": pykv.fatrelu_and_mul,
    "swigluoai_and_mul": pykv.swigluoai_and_mul,
    "swiglustep_and_mul": pykv.swiglustep_and_mul,
}


def gated(op: str, tokens: int, width: int, dtype: str, device: Device) -> Call:
    x, result = device.random((tokens, 2 * width), dtype), device.random((tokens, width), dtype)
    return lambda: OPS[op](result, x)


def quantised(op: str, tokens: int, width: int, dtype: str, device: Device) -> Call:
    x, result = device.random((tokens, 2 * width), dtype), device.random((tokens, width), "uint8")
    if op == "silu_and_mul_quant":
        scale = device.array(np.array([0.01], np.float32))
        return lambda: pykv.silu_and_mul_quant(result, x, scale)
    scales = device.random((tokens, width // GROUP_SIZE), "float32")
    return lambda: pykv.silu_and_mul_per_block_quant(result, x, scales, GROUP_SIZE)


def cases(dtypes: list[str]) -> Iterator[Case]:
    for dtype, op, width, tokens in itertools.product(dtypes, OPS, WIDTHS, TOKENS):
        written = tokens * width * np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
        yield Case(
            op,
            {"tokens": tokens, "hidden": width},
            dtype,
            3 * written,
            functools.partial(gated, op, tokens, width, dtype),
            written,
        )
    ops = {"silu_and_mul_quant": 0, "silu_and_mul_per_block_quant": 4 / GROUP_SIZE}  # bytes of scales for an element
    for dtype, (op, scale_bytes), width, tokens in itertools.product(dtypes, ops.items(), WIDTHS, TOKENS):
        itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
        yield Case(
            op,
            {"tokens": tokens, "hidden": width},
            dtype,
            int(tokens * width * (2 * itemsize + 1 + scale_bytes)),
            functools.partial(quantised, op, tokens, width, dtype),
            int(tokens * width * (1 + scale_bytes)),
        )


if __name__ == "__main__":
    main(cases)
