"""merge_attn_states and merge_attn_states_n."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

HEADS, HEAD_SIZE = 32, 128
SIZES = [(2, 1), (2, 64), (2, 4096), (2, 65536), (8, 64), (8, 4096), (64, 1), (64, 64)]  # parts, tokens


def merge(parts: int, tokens: int, dtype: str, stacked: bool, device: Device) -> Call:
    outputs = device.random((parts, tokens, HEADS, HEAD_SIZE), dtype)
    lses = device.random((parts, HEADS, tokens), "float32")
    out, lse = device.random((tokens, HEADS, HEAD_SIZE), dtype), device.random((HEADS, tokens), "float32")
    if stacked:
        return lambda: pykv.merge_attn_states_n(out, outputs, lses, lse)
    return lambda: pykv.merge_attn_states(out, outputs[0], lses[0], outputs[1], lses[1], lse)


def cases(dtypes: list[str]) -> Iterator[Case]:
    for stacked in (False, True):
        for dtype in dtypes:
            itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
            for parts, tokens in SIZES:
                if parts > 2 and not stacked:
                    continue
                written = tokens * HEADS * (HEAD_SIZE * itemsize + 4)
                yield Case(
                    "merge_attn_states_n" if stacked else "merge_attn_states",
                    {"parts": parts, "tokens": tokens},
                    dtype,
                    (parts + 1) * written,
                    lambda device, sizes=(parts, tokens, dtype, stacked): merge(*sizes, device),
                    written,
                )


if __name__ == "__main__":
    main(cases)
