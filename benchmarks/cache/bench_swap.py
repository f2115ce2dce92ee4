"""Moving 1000 blocks of 32 layers between a GPU and pinned host memory: one call of swap_blocks_layers or of
swap_blocks_batch, beside the link itself (one large copy), one batched driver call, and a copy for each block.

    python benchmarks/cache/bench_swap.py [--blocks 1000] [--layers 32] [--block-bytes 32768] [--json FILE]

Host time is that of the call; the time of the copies is taken by events and holds waiting for the host, where the host
cannot issue fast enough.  Figures are medians; the best of the link's times counts as the link.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import cupy
import numpy as np
from rich.console import Console
from rich.table import Table

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Cuda, write_json

IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM


@dataclass
class Figure:
    method: str
    direction: str
    mapping: str
    gb_per_s: float
    of_link: float
    host_us: float


def driver_batch() -> Callable[..., int] | None:
    """cuMemcpyBatchAsync of this machine's driver, without the index of failure that older ones return."""
    driver = ctypes.CDLL("libcuda.so.1")
    if hasattr(driver, "cuMemcpyBatchAsync_v2"):
        return driver.cuMemcpyBatchAsync_v2  # type: ignore[no-any-return]
    if not hasattr(driver, "cuMemcpyBatchAsync"):
        return None
    index = ctypes.c_size_t()
    return lambda *arguments: driver.cuMemcpyBatchAsync(*arguments[:-1], ctypes.byref(index), arguments[-1])


class Swap:
    """Caches on the device and pool on the host, and the ways to exchange blocks between them."""

    def __init__(self, blocks: int, layers: int, block_bytes: int) -> None:
        self.bytes, self.blocks = block_bytes, blocks
        self.on_device = [cupy.zeros((2 * blocks, block_bytes), np.uint8) for _ in range(2 * layers)]
        size = 2 * blocks * block_bytes
        self.memory = cupy.cuda.alloc_pinned_memory(size * 2 * layers)
        pool = np.frombuffer(self.memory, np.uint8, size * 2 * layers)
        pool[:] = 1  # touched: every page is there
        self.on_host = list(pool.reshape(2 * layers, 2 * blocks, block_bytes))
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.moved = 2 * layers * blocks * block_bytes
        self.flat = cupy.empty(min(self.moved, 1 << 30), np.uint8)
        self.batch = driver_batch()
        self.batches: dict[tuple[str, int], Any] = {}

    def sides(self, direction: str) -> tuple[list[Any], list[Any]]:
        return (self.on_device, self.on_host) if direction == "out" else (self.on_host, self.on_device)

    def link(self, direction: str, rows: np.ndarray) -> None:
        """As many bytes as one or a few large copies."""
        pairs = (self.flat.data.ptr, self.memory.ptr)
        to, source = pairs if direction == "in" else pairs[::-1]
        kind = cupy.cuda.runtime.memcpyHostToDevice if direction == "in" else cupy.cuda.runtime.memcpyDeviceToHost
        for first in range(0, self.moved, self.flat.nbytes):
            n = min(self.flat.nbytes, self.moved - first)
            cupy.cuda.runtime.memcpyAsync(to, source, n, kind, self.stream.ptr)

    def layers(self, direction: str, rows: np.ndarray) -> None:
        pykv.swap_blocks_layers(*self.sides(direction), self.bytes, rows, stream=self.stream.ptr)

    def layer_by_layer(self, direction: str, rows: np.ndarray) -> None:
        for source, to in zip(*self.sides(direction), strict=True):
            pykv.swap_blocks(source, to, self.bytes, rows, stream=self.stream.ptr)

    def addresses(self, arrays: list[Any], ids: np.ndarray) -> np.ndarray:
        bases = np.array([a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr for a in arrays], np.uint64)
        return (bases[:, None] + ids.astype(np.uint64) * np.uint64(self.bytes)).reshape(-1)

    def by_addresses(self, direction: str, rows: np.ndarray) -> None:
        """The addresses are there already, as a caller has them who made them while blocks were allocated."""
        key = direction, id(rows)
        if key not in self.batches:
            source, to = self.sides(direction)
            columns = [self.addresses(a, rows[:, i]).view(np.int64) for i, a in enumerate((source, to))]
            self.batches[key] = rows, [*columns, np.full(columns[0].size, self.bytes)]
        pykv.swap_blocks_batch(*self.batches[key][1], stream=self.stream.ptr)

    def one_driver_call(self, direction: str, rows: np.ndarray) -> None:
        source, to = self.sides(direction)
        sources, targets = self.addresses(source, rows[:, 0]), self.addresses(to, rows[:, 1])
        sizes = np.full(sources.size, self.bytes, np.uint64)
        attributes = np.array([IN_STREAM_ORDER, 0, 0, 0, 0, 0], np.uint32)
        first = np.zeros(1, np.uint64)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (targets, sources, sizes)]
        assert self.batch
        status = self.batch(
            *pointers,
            ctypes.c_size_t(sources.size),
            ctypes.c_void_p(attributes.ctypes.data),
            ctypes.c_void_p(first.ctypes.data),
            ctypes.c_size_t(1),
            ctypes.c_void_p(self.stream.ptr),
        )
        assert status == 0, f"cuMemcpyBatchAsync failed: {status}"

    def a_copy_for_each_block(self, direction: str, rows: np.ndarray) -> None:
        source, to = self.sides(direction)
        copy, kind = cupy.cuda.runtime.memcpyAsync, 4  # cudaMemcpyDefault
        sources, targets = self.addresses(source, rows[:, 0]).tolist(), self.addresses(to, rows[:, 1]).tolist()
        for a, b in zip(sources, targets, strict=True):
            copy(b, a, self.bytes, kind, self.stream.ptr)

    def check(self, call: Callable[[str, np.ndarray], None], direction: str, rows: np.ndarray) -> None:
        """What is timed also arrives."""
        rng = np.random.default_rng(0)
        for device, host in zip(self.on_device, self.on_host, strict=True):
            mark = rng.integers(2, 256, (2 * self.blocks, 1), np.uint8)
            if direction == "out":
                device[...], host[...] = cupy.asarray(mark), 0
            else:
                device[...], host[...] = 0, mark
        cupy.cuda.Device().synchronize()
        call(direction, rows)
        self.stream.synchronize()
        source, to = self.sides(direction)
        for a, b in zip(source, to, strict=True):
            assert (cupy.asarray(b)[cupy.asarray(rows[:, 1])] == cupy.asarray(a)[cupy.asarray(rows[:, 0])]).all()

    def time(self, call: Callable[[str, np.ndarray], None], direction: str, rows: np.ndarray) -> tuple[float, float]:
        """Seconds until all is copied, and of the host alone."""
        device, host = [], []
        for turn in range(8):
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            cupy.cuda.Device().synchronize()
            start.record(self.stream)
            begin = time.perf_counter()
            call(direction, rows)
            issued = time.perf_counter() - begin
            end.record(self.stream)
            end.synchronize()
            if turn >= 2:
                device.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
                host.append(issued)
        return statistics.median(device), statistics.median(host)


def mappings(blocks: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    runs = np.concatenate([np.arange(10 * i, 10 * i + 10) for i in rng.permutation(blocks // 10)])
    return {
        "scattered": np.stack([rng.permutation(2 * blocks)[:blocks], rng.permutation(2 * blocks)[:blocks]], 1),
        "runs of 10": np.stack([runs, runs], 1),
        "adjacent": np.stack([np.arange(blocks), np.arange(blocks) + blocks // 2], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Moving blocks between a GPU and pinned memory")
    parser.add_argument("--blocks", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--block-bytes", type=int, default=32768, help="of one layer's keys: 16 tokens x 8 heads x 128")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()

    swap = Swap(arguments.blocks, arguments.layers, arguments.block_bytes)
    methods = {
        "swap_blocks_layers": swap.layers,
        "swap_blocks, layer by layer": swap.layer_by_layer,
        "swap_blocks_batch": swap.by_addresses,
        "one driver call": swap.one_driver_call,
        "a copy for each block": swap.a_copy_for_each_block,
    }
    if not swap.batch:
        del methods["one driver call"]
    figures = []
    for direction in ("out", "in"):
        link = min(swap.time(swap.link, direction, np.empty((0, 2)))[0] for _ in range(3))
        figures.append(Figure("the link", direction, "", swap.moved / link / 1e9, 1.0, 0.0))
        for mapping, rows in mappings(arguments.blocks).items():
            for method, call in methods.items():
                if mapping != "scattered" and method not in ("swap_blocks_layers", "swap_blocks_batch"):
                    continue
                swap.check(call, direction, rows)
                seconds, host = swap.time(call, direction, rows)
                share = len(rows) / swap.blocks  # rounded to whole runs
                gb_per_s, of_link = share * swap.moved / seconds / 1e9, share * link / seconds
                figures.append(Figure(method, direction, mapping, gb_per_s, of_link, 1e6 * host))

    device = Cuda()
    table = Table("method", "direction", "mapping", title=f"{device.describe()['name']}, {swap.moved / 1e9:.2f} GB")
    for heading in ("GB/s", "of link", "host us"):
        table.add_column(heading, justify="right")
    for f in figures:
        table.add_row(f.method, f.direction, f.mapping, f"{f.gb_per_s:.1f}", f"{f.of_link:.1%}", f"{f.host_us:.0f}")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if arguments.json:
        sizes = {name: getattr(arguments, name) for name in ("blocks", "layers", "block_bytes")}
        write_json(arguments.json, device, [asdict(f) for f in figures], **sizes)


if __name__ == "__main__":
    main()
