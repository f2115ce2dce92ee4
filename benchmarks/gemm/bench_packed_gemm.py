"""Products with packed weights: of large models; torch.matmul with weights of 16 bits where there is torch.

What a plain copy of as many bytes takes is the floor of few rows.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

import pykv
from pykv.gemm import pack_fp8, pack_gguf, pack_integers, pack_nvfp4
from pykv.packed_weight import PackedWeight

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Cuda, Device, main, on_cupys_stream


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


def q4_k(n: int, k: int) -> PackedWeight:
    blocks = np.random.default_rng(0).integers(0, 256, (n, k // 256, 144), dtype=np.uint8)
    blocks[..., :4] = np.full(2, 0.01, np.float16).view(np.uint8)
    return pack_gguf(blocks.reshape(n, -1), 12)


class Weight(NamedTuple):
    pack: Callable[[int, int], PackedWeight]
    bits: float  # of an element with its part of scales and zero points
    n: int
    k: int
    rows: list[int]  # of x


WEIGHTS = {
    "int4": Weight(partial(integers, 4, False), 4 + 16 / 128, 8192, 8192, [1, 16, 32, 64, 128, 256, 1024, 4096]),
    "int4 with zeros": Weight(partial(integers, 4, True), 4 + 24 / 128, 8192, 8192, [1, 64, 256, 4096]),
    "int8": Weight(partial(integers, 8, False), 8 + 16 / 128, 8192, 8192, [1, 64, 256, 4096]),
    "fp8 in blocks": Weight(fp8, 8 + 32 / 128, 8192, 8192, [1, 64, 256, 4096]),
    "nvfp4": Weight(nvfp4, 4 + 8 / 16, 8192, 8192, [1, 64, 256, 4096]),
    "Q4_K": Weight(q4_k, 4 + 16 / 32 + 32 / 256, 14336, 4096, [1, 8, 64, 512]),
}


@cache
def packed(name: str) -> PackedWeight:
    w = WEIGHTS[name]
    return w.pack(w.n, w.k)


def product(name: str, rows: int, dtype: str, device: Device) -> Call:
    w = packed(name)
    (n, k), data = w.shape, device.array(w.data)
    out, x = device.random((rows, n), dtype), device.random((rows, k), dtype)
    return lambda: pykv.packed_gemm(out, x, data, w.format)


def plain(n: int, k: int, rows: int, dtype: str, device: Device) -> Call:
    """torch.matmul, of weights of 16 bits."""
    import torch.utils.dlpack

    out, x, w = (device.random(shape, dtype) for shape in ((rows, n), (rows, k), (n, k)))
    if isinstance(device, Cuda):
        there = [torch.utils.dlpack.from_dlpack(a.view(np.int16)).view(getattr(torch, dtype)) for a in (out, x, w)]
        return on_cupys_stream(lambda: torch.matmul(there[1], there[2].T, out=there[0]))
    here = [torch.from_numpy(a.view(np.int16)).view(getattr(torch, dtype)) for a in (out, x, w)]
    return lambda: torch.matmul(here[1], here[2].T, out=here[0])


def cases(dtypes: list[str]) -> Iterator[Case]:
    with_torch = importlib.util.find_spec("torch") is not None
    for dtype in dtypes:
        if dtype == "float32":
            continue
        for name, w in WEIGHTS.items():
            for rows in w.rows:
                moved = round(w.n * w.k * w.bits / 8) + 2 * rows * (w.n + w.k)
                size = {"n": w.n, "k": w.k, "tokens": rows}
                yield Case(
                    f"packed_gemm {name}", size, dtype, moved, partial(product, name, rows, dtype), 2 * rows * w.n
                )
        for name in ("int4", "Q4_K") if with_torch else ():
            w = WEIGHTS[name]
            for rows in w.rows:
                moved = 2 * (w.n * w.k + rows * (w.n + w.k))
                size = {"n": w.n, "k": w.k, "tokens": rows}
                yield Case("torch.matmul", size, dtype, moved, partial(plain, w.n, w.k, rows, dtype), 2 * rows * w.n)


if __name__ == "__main__":
    main(cases)
