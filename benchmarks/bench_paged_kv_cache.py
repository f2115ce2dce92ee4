"""Host time of the cache manager: one decode step, prefills, forks.

    python benchmarks/bench_paged_kv_cache.py [numpy|torch|cupy]

A decode step is what an engine asks for before each pass of its model: one more token for each sequence, block tables
and lengths.  The caches themselves are tiny, because only the bookkeeping is timed; on a GPU the figures include
issuing the uploads of the results, not waiting for them.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable

import pykv

BLOCK_SIZE = 16


def new_cache(num_tokens: int, library: str, device: str | None) -> pykv.PagedKVCache:
    like = importlib.import_module(library)
    return pykv.PagedKVCache(1, num_tokens // BLOCK_SIZE, BLOCK_SIZE, 1, 1, "float16", like=like, device=device)


def time_us(step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median and 99th percentile of the host time of a step."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times), statistics.quantiles(times, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of pykv.PagedKVCache")
    parser.add_argument("library", nargs="?", default="numpy", choices=["numpy", "torch", "cupy"])
    parser.add_argument("--device", help="for torch: cpu (default) or cuda")
    arguments = parser.parse_args()

    def report(what: str, step: Callable[[], object], repeats: int = 500) -> None:
        median, tail = time_us(step, repeats)
        print(f"{what:<58} {median:9.1f} {tail:9.1f}")

    print(f"{arguments.library}: host time in us{'':<33} {'median':>9} {'p99':>9}")
    for num_seqs in (1, 64, 256, 1024):
        for context in (128, 1024, 8192):
            kv = new_cache(num_seqs * (context + 1024), arguments.library, arguments.device)
            ids = list(range(10_000, 10_000 + num_seqs))
            kv.append(ids, context)

            def decode(kv: pykv.PagedKVCache = kv, ids: list[int] = ids) -> None:
                kv.append(ids, 1)
                kv.block_tables(ids)
                kv.seq_lens(ids)

            report(f"decode step, {num_seqs} sequences of {context} tokens", decode)

    kv = new_cache(1 << 20, arguments.library, arguments.device)

    def prefill() -> None:
        kv.append([1, 2, 3, 4], [2048, 4096, 1, 2047])
        kv.free([1, 2, 3, 4])

    report("prefill of 8192 tokens in 4 sequences, and free", prefill)

    kv.append([0], 8193)

    def fork() -> None:
        kv.fork(0, 1)
        kv.append([1], 1)
        kv.free([1])

    report("fork of 8193 tokens, append with copy-on-write, free", fork)


if __name__ == "__main__":
    main()
