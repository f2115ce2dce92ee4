"""gelu_new and the other activations of single elements."""

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
WIDTHS = [4096, 8192]

OPS: dict[str, Callable[[Any, Any], None]] = {
    "gelu_new": pykv.gelu_new,
    "gelu_quick": pykv.gelu_quick,
    "relu2": pykv.relu2,
    "xielu": lambda out, x: pykv.xielu(out, x, 0.2, -0.85),
}


def elementwise(op: str, tokens: int, width: int, dtype: str, device: Device) -> Call:
    x, out = device.random((tokens, width), dtype), device.random((tokens, width), dtype)
    return lambda: OPS[op](out, x)


def cases(dtypes: list[str]) -> Iterator[Case]:
    for dtype, op, width, tokens in itertools.product(dtypes, OPS, WIDTHS, TOKENS):
        yield Case(
            op,
            {"tokens": tokens, "hidden": width},
            dtype,
            2 * tokens * width * np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize,
            functools.partial(elementwise, op, tokens, width, dtype),
        )


if __name__ == "__main__":
    main(cases)
