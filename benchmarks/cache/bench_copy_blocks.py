"""copy_blocks: blocks of 16 tokens, 8 heads of 128, in the key and value caches of 32 layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

PAIRS = [1, 16, 256]
LAYERS = 32
BLOCK = (16, 8, 128)


def call(pairs: int, dtype: str, on_device: bool, device: Device) -> Call:
    keys, values = ([device.random((2 * pairs, *BLOCK), dtype) for _ in range(LAYERS)] for _ in range(2))
    mapping = np.random.default_rng(0).permutation(2 * pairs).reshape(pairs, 2)
    ids = device.array(mapping) if on_device else mapping
    return lambda: pykv.copy_blocks(keys, values, ids)


def cases(dtypes: list[str]) -> Iterator[Case]:
    for name, on_device in (("copy_blocks, mapping on the host", False), ("copy_blocks, mapping with them", True)):
        for dtype in dtypes:
            itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
            for pairs in PAIRS:
                yield Case(
                    name,
                    {"pairs": pairs},
                    dtype,
                    2 * 2 * LAYERS * pairs * int(np.prod(BLOCK)) * itemsize,
                    lambda device, arguments=(pairs, dtype, on_device): call(*arguments, device),
                )


if __name__ == "__main__":
    main(cases)
