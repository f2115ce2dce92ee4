"""Products with packed weights: matrices of large models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import numpy as np

import pykv
from pykv.gemm import pack_fp8, pack_integers, pack_nvfp4
from pykv.packed_weight import PackedWeight

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192)]
ROWS = [1, 8, 16, 64, 256, 4096]


def integers(bits: int, zeros: bool, n: int, k: int) -> PackedWeight:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    scales = rng.uniform(0.01, 0.03, (n, k // 128)).astype(np.float16)
    z = rng.integers(0, 1 << bits, scales.shape) if zeros else None
    return pack_integers(codes, scales, z, group_size=128, bits=bits)


def fp8(n: int, k: int) -> PackedWeight:
    codes = np.random.default_rng(0).integers(0, 0x70, (n, k), dtype=np.uint8)
    return pack_fp8(codes, np.full((n // 128, k // 128), 0.01, np.float32), block=(128, 128))


def nvfp4(n: int, k: int) -> PackedWeight:
    rng = np.random.default_rng(0)
    return pack_nvfp4(
        rng.integers(0, 256, (n, k // 2), dtype=np.uint8), rng.integers(0x20, 0x40, (n, k // 16), dtype=np.uint8)
    )


# name -> (what packs, bits of an element with its part of scales and zero points)
FORMATS: dict[str, tuple[Callable[[int, int], PackedWeight], float]] = {
    "int4": (partial(integers, 4, False), 4 + 16 / 128),
    "int4 with zeros": (partial(integers, 4, True), 4 + 24 / 128),
    "int8": (partial(integers, 8, False), 8 + 16 / 128),
    "fp8 in blocks": (fp8, 8 + 32 / 128),
    "nvfp4": (nvfp4, 4 + 8 / 16),
}


@cache
def packed(name: str, n: int, k: int) -> PackedWeight:
    return FORMATS[name][0](n, k)


def product(name: str, n: int, k: int, rows: int, dtype: str, device: Device) -> Call:
    w = packed(name, n, k)
    data, out, x = device.array(w.data), device.random((rows, n), dtype), device.random((rows, k), dtype)
    return lambda: pykv.packed_gemm(out, x, data, w.format)


def cases(dtypes: list[str]) -> Iterator[Case]:
    for dtype in dtypes:
        if dtype == "float32":
            continue
        for n, k in SHAPES:
            for name, (_, bits) in FORMATS.items():
                if name != "int4" and n == 28672:
                    continue
                for rows in ROWS:
                    if name != "int4" and rows > 64:
                        continue
                    moved = round(n * k * bits / 8) + 2 * rows * (n + k)
                    make = partial(product, name, n, k, rows, dtype)
                    yield Case(
                        f"packed_gemm {name}", {"n": n, "k": k, "tokens": rows}, dtype, moved, make, 2 * rows * n
                    )


if __name__ == "__main__":
    main(cases)
