"""silu_and_mul."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

TOKENS = [1, 64, 4096, 65536]
WIDTHS = [4096, 8192]  # of the result


def silu_and_mul(tokens: int, width: int, dtype: str, device: Device) -> Call:
    x, result = device.random((tokens, 2 * width), dtype), device.random((tokens, width), dtype)
    return lambda: pykv.silu_and_mul(result, x)


def cases(dtypes: list[str]) -> Iterator[Case]:
    for dtype in dtypes:
        itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
        for width in WIDTHS:
            for tokens in TOKENS:
                yield Case(
                    "silu_and_mul",
                    {"tokens": tokens, "hidden": width},
                    dtype,
                    3 * tokens * width * itemsize,
                    lambda device, sizes=(tokens, width, dtype): silu_and_mul(*sizes, device),
                )


if __name__ == "__main__":
    main(cases)
