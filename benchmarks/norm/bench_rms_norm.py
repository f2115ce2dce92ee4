"""rms_norm and fused_add_rms_norm."""

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
HIDDEN_SIZES = [4096, 8192]


def rms_norm(tokens: int, hidden_size: int, dtype: str, device: Device) -> Call:
    x, out = (device.random((tokens, hidden_size), dtype) for _ in range(2))
    weight = device.random((hidden_size,), dtype)
    return lambda: pykv.rms_norm(out, x, weight)


def fused_add_rms_norm(tokens: int, hidden_size: int, dtype: str, device: Device) -> Call:
    x, residual = (device.random((tokens, hidden_size), dtype) for _ in range(2))
    weight = device.random((hidden_size,), dtype)
    return lambda: pykv.fused_add_rms_norm(x, residual, weight)


def cases(dtypes: list[str]) -> Iterator[Case]:
    for op, passes in ((rms_norm, 2), (fused_add_rms_norm, 4)):
        for dtype in dtypes:
            itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
            for hidden_size in HIDDEN_SIZES:
                for tokens in TOKENS:
                    yield Case(
                        op.__name__,
                        {"tokens": tokens, "hidden": hidden_size},
                        dtype,
                        passes * tokens * hidden_size * itemsize,
                        lambda device, op=op, sizes=(tokens, hidden_size, dtype): op(*sizes, device),
                    )


if __name__ == "__main__":
    main(cases)
