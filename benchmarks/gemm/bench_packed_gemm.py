"""Products with packed weights: of large models; torch.matmul with weights of 16 bits where there is torch.

What a plain copy of as many bytes takes is the floor of few rows.
"""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
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


# Quantisation types of GGUF: number, elements of a block, its bytes, and where float16 numbers lie among them.
GGUF = {
    "Q4_0": (2, 32, 18, [0]),
    "Q4_1": (3, 32, 20, [0, 2]),
    "Q5_0": (6, 32, 22, [0]),
    "Q5_1": (7, 32, 24, [0, 2]),
    "Q8_0": (8, 32, 34, [0]),
    "Q2_K": (10, 256, 84, [80, 82]),
    "Q3_K": (11, 256, 110, [108]),
    "Q4_K": (12, 256, 144, [0, 2]),
    "Q5_K": (13, 256, 176, [0, 2]),
    "Q6_K": (14, 256, 210, [208]),
    "IQ2_S": (22, 256, 82, [0]),
    "IQ4_XS": (23, 256, 136, [0]),
}


def gguf(name: str, n: int, k: int) -> PackedWeight:
    """32 rows over and over: packing all of a large weight takes longer than timing it."""
    number, elements, size, halves = GGUF[name]
    blocks = np.random.default_rng(0).integers(0, 256, (32, k // elements, size), dtype=np.uint8)
    for at in halves:
        blocks[..., at : at + 2] = np.full(1, 0.01, np.float16).view(np.uint8)
    return repeated(pack_gguf(blocks.reshape(32, -1), number), n // 32)


def repeated(weight: PackedWeight, times: int) -> PackedWeight:
    """A weight of 32 rows, its rows so many times."""
    kind, scales, minima, _, *rest = weight.format.split(".")
    columns, group = (int(re.search(rf"\.{letter}(\d+)", weight.format)[1]) for letter in "pg")  # type: ignore[index]
    bytes_of = {"none": 0, "f16": 2, "bf16": 2, "f32": 4}
    sizes = [columns * (1 if kind in ("u5", "u6", "u8", "e4m3") else 0.5)]
    for factor in (scales, minima):
        sizes += [
            -(-columns // group) * bytes_of.get(factor, 1),
            -(-columns // 256) * 2 * factor.startswith("f16") * (len(factor) > 3),
        ]
    at, sections = 256, [weight.data[:256]]
    for size in (round(32 * s) for s in sizes):
        sections.append(np.tile(weight.data[at : at + size], times))
        sections.append(np.zeros(-sections[-1].size % 256, np.uint8))
        at += -(-size // 256) * 256
    return PackedWeight(np.concatenate(sections), ".".join([kind, scales, minima, f"n{32 * times}", *rest]))


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
    "Q4_K": Weight(partial(gguf, "Q4_K"), 4 + 16 / 32 + 32 / 256, 14336, 4096, [1, 8, 64, 512]),
}
SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192)]


@cache
def packed(name: str) -> PackedWeight:
    w = WEIGHTS[name]
    return w.pack(w.n, w.k)


@lru_cache(1)
def packed_gguf(name: str, n: int, k: int) -> PackedWeight:
    return gguf(name, n, k)


def product(pack: Callable[[], PackedWeight], rows: int, dtype: str, device: Device) -> Call:
    w = pack()
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
                    f"packed_gemm {name}",
                    size,
                    dtype,
                    moved,
                    partial(product, partial(packed, name), rows, dtype),
                    2 * rows * w.n,
                )
        for (n, k), name, rows in itertools.product(SHAPES, GGUF, [1, 8, 512]):
            if name not in ("Q4_K", "Q6_K", "Q8_0", "IQ4_XS") and (n, k) != (14336, 4096):
                continue
            _, elements, block, _ = GGUF[name]
            size = {"n": n, "k": k, "tokens": rows}
            make = partial(product, partial(packed_gguf, name, n, k), rows, dtype)
            moved = n * k * block // elements + 2 * rows * (n + k)
            yield Case(f"packed_gemm GGUF {name}", size, dtype, moved, make, 2 * rows * n)
        for name in ("int4", "Q4_K") if with_torch else ():
            w = WEIGHTS[name]
            for rows in w.rows:
                moved = 2 * (w.n * w.k + rows * (w.n + w.k))
                size = {"n": w.n, "k": w.k, "tokens": rows}
                yield Case("torch.matmul", size, dtype, moved, partial(plain, w.n, w.k, rows, dtype), 2 * rows * w.n)


if __name__ == "__main__":
    main(cases)
