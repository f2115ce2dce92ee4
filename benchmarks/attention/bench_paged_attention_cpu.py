"""Decode attention on the CPU: random pages of a cache far larger than the last-level cache.

    python benchmarks/attention/bench_paged_attention_cpu.py [--megabytes 512] [--threads 2] [--json FILE]

Each case is set against two yardsticks that are timed in turn with it, so that a busy machine slows all three alike:
reading as many bytes in one piece (NumPy's max, one piece a thread), and, where torch is installed, its
scaled_dot_product_attention over as many keys and values lying contiguous.  Figures are the best of some rounds: what
is slower was shared with other processes.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Cpu, write_json

try:
    import torch
except ImportError:
    torch = None

PAGE, HEAD_SIZE = 16, 128


@dataclass(frozen=True)
class Case:
    layout: str
    dtype: str
    kind: str = "auto"
    heads: int = 32
    kv_heads: int = 8
    sequences: int = 4

    @property
    def element(self) -> np.dtype[Any]:
        names = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int8": "int8", "nvfp4": "uint8"}
        name = names.get(self.kind, self.dtype)
        return np.dtype(getattr(ml_dtypes, name, name))

    @property
    def row(self) -> int:
        """Elements of a head: values, or bytes of nvfp4."""
        return HEAD_SIZE * 9 // 16 if self.kind == "nvfp4" else HEAD_SIZE


@dataclass(frozen=True)
class Figure:
    case: Case
    tokens: int
    num_bytes: int
    ms: float
    read_ms: float
    torch_ms: float | None

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.ms / 1e6

    @property
    def of_read(self) -> float:
        return self.read_ms / self.ms


def cases() -> Iterator[Case]:
    for layout in ("NHD", "HND", "packed"):
        for dtype in ("bfloat16", "float16", "float32"):
            yield Case(layout, dtype)
        for kind in ("fp8_e4m3", "fp8_e5m2", "int8"):
            yield Case(layout, "bfloat16", kind)
    for layout in ("NHD", "HND"):
        yield Case(layout, "bfloat16", "nvfp4")
    yield Case("NHD", "bfloat16", heads=8)
    yield Case("NHD", "bfloat16", heads=64)
    yield Case("NHD", "bfloat16", sequences=1)
    yield Case("NHD", "bfloat16", sequences=64)


def caches(case: Case, blocks: int, some: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    shape = (blocks, PAGE, case.kv_heads, case.row)
    memories = [np.resize(values, math.prod(shape)) for values in (some, some[::-1])]
    if case.layout == "packed":
        x = 16 // case.element.itemsize
        key = memories[0].reshape(blocks, case.kv_heads, HEAD_SIZE // x, PAGE, x)
        return key, memories[1].reshape(blocks, case.kv_heads, HEAD_SIZE, PAGE)
    if case.layout == "HND":
        key, value = (m.reshape(blocks, case.kv_heads, PAGE, case.row).swapaxes(1, 2) for m in memories)
        return key, value
    return memories[0].reshape(shape), memories[1].reshape(shape)


def reader(arrays: tuple[np.ndarray, ...], pool: ThreadPoolExecutor, threads: int) -> Callable[[], object]:
    memories = [a.reshape(-1, order="A") if a.flags.c_contiguous else a.swapaxes(1, 2).reshape(-1) for a in arrays]
    parts = [p for m in memories for p in np.array_split(m.view(np.uint8).view(np.float32), threads)]
    return lambda: list(pool.map(np.max, parts))


def torch_call(case: Case, query: np.ndarray, tokens: int) -> Callable[[], object] | None:
    if torch is None or case.kind != "auto" or case.layout != "NHD":
        return None
    dtype = getattr(torch, case.dtype)
    shape = (case.sequences, case.kv_heads, tokens, HEAD_SIZE)
    key, value = (torch.empty(shape, dtype=dtype).normal_() for _ in range(2))
    q = torch.from_numpy(query.astype(np.float32)).to(dtype).unsqueeze(2)
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, key, value, enable_gqa=case.heads != case.kv_heads)


def in_turn(calls: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of each, the best of rounds in which every one has its turn."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(7):
        for call, mine in zip(calls, times, strict=True):
            time.sleep(0.02)  # until the threads of the one before have stopped spinning
            start = time.perf_counter()
            call()
            mine.append(1e3 * (time.perf_counter() - start))
    return [min(mine) for mine in times]


def measure(case: Case, megabytes: int, pool: ThreadPoolExecutor, threads: int) -> Figure:
    rng = np.random.default_rng(0)
    block_bytes = PAGE * case.kv_heads * case.row * case.element.itemsize
    pages = max(1, (megabytes << 20) // (2 * block_bytes * case.sequences))  # of each sequence
    if case.element.kind in "iu":
        some = rng.integers(0, 0x50, 1 << 20).astype(case.element)  # numbers also as the scales of nvfp4
    else:
        some = rng.standard_normal(1 << 20, np.float32).astype(case.element)
    key, value = caches(case, pages * case.sequences, some)
    tables = rng.permutation(pages * case.sequences).astype(np.int32).reshape(case.sequences, pages)
    lens = np.full(case.sequences, pages * PAGE, np.int32)
    query = rng.standard_normal((case.sequences, case.heads, HEAD_SIZE), np.float32)
    query = query.astype(np.dtype(getattr(ml_dtypes, case.dtype, case.dtype)))
    out = np.empty_like(query)
    calls: list[Callable[[], object]] = [
        lambda: pykv.paged_attention(out, query, key, value, tables, lens, kv_cache_dtype=case.kind),
        reader((key, value), pool, threads),
    ]
    if other := torch_call(case, query, pages * PAGE):
        calls.append(other)
    ms, read_ms, *torch_ms = in_turn(calls)
    return Figure(case, pages * PAGE, key.nbytes + value.nbytes, ms, read_ms, torch_ms[0] if torch_ms else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="of keys and values together")
    parser.add_argument("--threads", type=int, default=pykv.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    pykv.set_num_threads(arguments.threads)
    if torch is not None:
        torch.set_num_threads(arguments.threads)

    device = Cpu()
    table = Table(title=f"{device.describe()}, {arguments.megabytes} MB, page {PAGE}, head size {HEAD_SIZE}")
    for heading in ("layout", "dtype", "cache", "heads", "sequences", "ms", "GB/s", "read GB/s", "of read", "torch ms"):
        table.add_column(heading)
    figures = []
    with ThreadPoolExecutor(arguments.threads) as pool:
        for case in cases():
            f = measure(case, arguments.megabytes, pool, arguments.threads)
            figures.append(f)
            table.add_row(
                case.layout,
                case.dtype,
                case.kind,
                f"{case.heads}/{case.kv_heads}",
                f"{case.sequences} x {f.tokens}",
                f"{f.ms:.1f}",
                f"{f.gb_per_s:.1f}",
                f"{f.num_bytes / f.read_ms / 1e6:.1f}",
                f"{f.of_read:.0%}",
                "" if f.torch_ms is None else f"{f.torch_ms:.1f} ({f.torch_ms / f.ms:.1f}x)",
            )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if arguments.json:
        lines = [asdict(f) | {"gb_per_s": f.gb_per_s, "of_read": f.of_read} for f in figures]
        write_json(arguments.json, device, lines, megabytes=arguments.megabytes)


if __name__ == "__main__":
    main()
