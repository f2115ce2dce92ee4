"""Quantisers and decoders on the CPU: their share of a copy past the caches, and the share that arithmetic allows.

    python benchmarks/bench_cpu_codes.py [--seconds S] [--json FILE] [operation ...]

Rows of 4096 in bf16, far more than caches hold.  ``bound`` is what the share would be if all data were in the caches:
by how much longer a call takes for a few more rows that are there, on all threads at once.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pykv
from pykv._tools import output
from pykv.dequantization import GGUF_BLOCKS

sys.path.insert(0, str(Path(__file__).parent / "quantization"))
sys.path.insert(0, str(Path(__file__).parent / "dequantization"))
sys.path.insert(0, str(Path(__file__).parent))

import bench_dequantize as decoders
import bench_quantise as quantisers
from timing import Call, Cpu, write_json

ROWS, WIDTH, DTYPE = 16384, 4096, "bfloat16"

# what makes a call of so many rows on such arrays, and the bytes it reads and writes for a number
Operation = tuple[Callable[[int, Cpu], Call], float, float]


class Pool(Cpu):
    """Arrays that operations share, for making them takes longer than timing; two sets, so that caches do not help."""

    def __init__(self) -> None:
        super().__init__()
        self._arrays: dict[Any, Any] = {}
        self._counts: dict[Any, int] = {}
        self._set = 0

    def calls(self, make: Callable[[int, Cpu], Call], rows: int, sets: int) -> list[Call]:
        made = []
        for self._set in range(sets):
            self._counts = {}
            made.append(make(rows, self))
        return made

    def _kept(self, kind: str, shape: tuple[int, ...], dtype: str, make: Callable[..., Any]) -> Any:
        key = kind, shape, dtype, self._set
        self._counts[key] = self._counts.get(key, 0) + 1
        place = *key, self._counts[key]
        if place not in self._arrays:
            self._arrays[place] = make(shape, dtype)
        return self._arrays[place]

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._kept("random", shape, dtype, super().random)

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self._kept("zeros", shape, dtype, super().zeros)


def time_of(calls: list[Call], seconds: float) -> float:
    """Microseconds, the median."""
    for call in calls:
        call()
    times: list[float] = []
    while len(times) < 8 or (sum(times) < seconds and len(times) < 3000):
        for call in calls:
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def quantiser(make: quantisers.Make, halves: int, rows: int, device: Cpu) -> Call:
    return make(quantisers.Arrays(rows, WIDTH, DTYPE, device, halves))


def rows_int8(a: quantisers.Arrays) -> Call:
    return partial(pykv.per_token_quant_int8, a.int8(), a.input, a.floats(a.tokens, 1))


def operations() -> Iterator[tuple[str, Operation]]:
    for name, (make, reads, per_byte, scales) in quantisers.OPERATIONS.items():
        halves = 2 if "silu" in name or "situ" in name else 1
        yield name, (partial(quantiser, make, halves), 2 * reads, 1 / per_byte + scales)
    yield "per_token_quant_int8", (partial(quantiser, rows_int8, 1), 2, 1)

    def decoder(make: Callable[..., Call], *more: Any) -> Callable[[int, Cpu], Call]:
        return lambda rows, device: make(rows, WIDTH, *more, DTYPE, device)

    for name, kind in decoders.FORMATS.items():
        elements, size = GGUF_BLOCKS[kind]
        yield f"ggml_dequantize {name}", (decoder(decoders.ggml_dequantize, kind), size / elements, 2)
    yield "awq_dequantize", (decoder(decoders.awq_dequantize), 1 / 2, 2)
    for bits in (2, 3, 4, 8):
        yield f"gptq_dequantize {bits} bits", (decoder(decoders.gptq_dequantize, bits, False), bits / 8, 2)
    yield "gptq_dequantize 4 bits, act-order", (decoder(decoders.gptq_dequantize, 4, True), 1 / 2, 2)
    for what, of in {"blocks": (128, 128), "groups": (1, 128)}.items():
        yield f"fp8_dequantize {what}", (decoder(decoders.fp8_dequantize, of), 1, 2)
    for name, per_byte, block in (("mxfp8", 1, 32), ("mxfp4", 2, 32), ("nvfp4", 2, 16)):
        make = decoder(decoders.mx_dequantize, f"{name}_dequantize", block, False)
        yield f"{name}_dequantize", (make, 1 / per_byte + 1 / block, 2)
    for name, op in (("permute_cols", decoders.permute_cols), ("hadacore_transform", decoders.hadacore_transform)):
        yield name, (decoder(op), 2, 2)


def copies(num_bytes: int, sets: int) -> list[Call]:
    half = num_bytes // 2
    source = np.resize(np.arange(1 << 22, dtype=np.uint32).view(np.uint8), sets * half).reshape(sets, half)
    target = np.ones_like(source)
    places = [([source[s].ctypes.data], [target[s].ctypes.data], [half]) for s in range(sets)]
    return [partial(lambda *args, _kept: pykv.swap_blocks_batch(*args), *p, _kept=(source, target)) for p in places]


def main() -> None:
    parser = argparse.ArgumentParser(description="Times quantisers and decoders on the CPU")
    parser.add_argument("ops", nargs="*", metavar="operation", help="these alone, with all that follows their name")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each of three times of an operation, at least")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    device = Pool()
    few = math.ceil(16 * device.threads / 128) * 128
    more = few + math.ceil(24 * device.threads / 128) * 128
    copy_us: dict[int, float] = {}
    figures: list[dict[str, object]] = []
    for name, (make, read, written) in operations():
        if arguments.ops and name.split()[0] not in arguments.ops:
            continue
        num_bytes = int(ROWS * WIDTH * read) + int(ROWS * WIDTH * written)
        if num_bytes not in copy_us:
            copy_us[num_bytes] = time_of(copies(num_bytes, 2), arguments.seconds)
        us = time_of(device.calls(make, ROWS, 2), arguments.seconds)
        inside = [time_of(device.calls(make, rows, 1), arguments.seconds) for rows in (few, more)]
        cached_us = (inside[1] - inside[0]) / (more - few) * ROWS
        copy = copy_us[num_bytes]
        sizes = {"tokens": ROWS, "width": WIDTH}
        figures.append(
            {"op": name, "size": sizes, "dtype": DTYPE, "num_bytes": num_bytes, "us": us, "copy_us": copy}
            | {"cached_us": cached_us, "of_copy": copy / us, "bound": copy / cached_us}
        )
    rows_ = [
        [str(f["op"])]
        + [f"{f[k]:.0f}" for k in ("us", "copy_us", "cached_us")]
        + [f"{f[k]:.0%}" for k in ("of_copy", "bound")]
        for f in figures
    ]
    headings = ["op", "us", "copy us", "cached us", "of copy", "bound"]
    output.show(f"{device.describe()['name']}, {device.threads} threads", headings, rows_, right=1)
    if arguments.json:
        write_json(arguments.json, device, figures)


if __name__ == "__main__":
    main()
