"""Prompts beside decodes in one call of paged attention on CUDA, the usual step of a serving engine.

    python benchmarks/attention/bench_paged_attention_mixed.py [--json FILE]

Each batch is timed as one call and split by hand into a call for the decodes and one for the prompts, in the same run
on the same arrays (bf16, heads of 128, 32 query and 8 KV heads, pages of 16 in random order).
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_paged_attention import Arrays, Case, arrays
from rich.console import Console
from rich.table import Table
from timing import Call, Cuda, write_json


@dataclass(frozen=True)
class Figure:
    batch: str
    one_us: float
    split_us: float
    decodes_us: float
    prompts_us: float


def cases() -> Iterator[tuple[Case, int]]:
    """Each with the number of its decodes, which come first."""
    for decodes, keys, prompts, tokens, context in (
        (64, 4096, 1, 512, 0), (64, 8192, 1, 2048, 8192), (255, 1024, 1, 1024, 0), (8, 32768, 1, 512, 32768),
        (32, 2048, 4, 256, 2048), (4, 512, 1, 200, 0), (100, 3072, 1, 8192, 0),
    ):  # fmt: skip
        name = f"{decodes} x {keys} + {prompts} x {tokens} on {context}"
        lens, queries = (keys,) * decodes + (context + tokens,) * prompts, (1,) * decodes + (tokens,) * prompts
        yield Case(name, lens, queries), decodes


def calls(case: Case, decodes: int, made: Arrays, device: Cuda) -> list[Call]:
    """Of the whole batch, of its decodes, and of its prompts."""

    def call(first: int, end: int) -> Call:
        rows = slice(sum(case.queries[:first]), sum(case.queries[:end]))
        queries, pages = case.queries[first:end], math.ceil(max(case.lens[first:end]) / case.page)
        cu = None if max(queries) == 1 else device.array(np.cumsum([0, *queries]).astype(np.int32))
        size = pykv.paged_attention_workspace_size(
            sum(queries), len(queries), case.heads, case.kv_heads, case.head_size
        )
        workspace = device.cupy.empty(size, device.cupy.uint8)
        tables = device.cupy.ascontiguousarray(made.tables[first:end, :pages])
        given: list[Any] = [made.out[rows], made.query[rows], *made.caches, tables, made.lens[first:end]]
        return lambda: pykv.paged_attention(*given, cu_query_lens=cu, workspace=workspace)

    return [call(0, len(case.lens)), call(0, decodes), call(decodes, len(case.lens))]


def measure(case: Case, decodes: int, device: Cuda) -> Figure:
    copies = min(64, math.ceil(3 * device.cache_bytes / case.kv_bytes))
    made = [calls(case, decodes, arrays(case, device), device) for _ in range(copies)]

    def both(first: Call, second: Call) -> Call:
        def call() -> None:
            first()
            second()

        return call

    each = [
        [of[0] for of in made],
        [both(of[1], of[2]) for of in made],
        [of[1] for of in made],
        [of[2] for of in made],
    ]
    return Figure(case.name, *(1e6 * device.time(own) for own in each))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    device = Cuda()
    table = Table(
        "batch", *(f"{name}, us" for name in ("one call", "split by hand", "decodes", "prompts")), "one / split"
    )
    figures = []
    for case, decodes in cases():
        f = measure(case, decodes, device)
        figures.append(f)
        device.cupy.get_default_memory_pool().free_all_blocks()
        us = (f.one_us, f.split_us, f.decodes_us, f.prompts_us)
        table.add_row(f.batch, *(f"{x:.1f}" for x in us), f"{f.one_us / f.split_us:.2f}")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    if arguments.json:
        write_json(arguments.json, device, [asdict(f) for f in figures])


if __name__ == "__main__":
    main()
