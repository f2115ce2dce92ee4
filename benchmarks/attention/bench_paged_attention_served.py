"""What else paged attention serves when it decodes: other layouts, pages, heads, groups and options.

    python benchmarks/attention/bench_paged_attention_served.py [--json FILE] [--only WORDS] [--kinds KINDS]

Four workloads, timed as in bench_paged_attention.py: 32 sequences of 8k tokens, 8 of 2k, with several query tokens or
many heads in a group also 64 of random lengths, and with few KV heads, as each of several devices has them, one of 32k.
A call is set against a plain read of as many bytes as it sees of keys and values, which is its floor, and against the
fast case: 32 query and 8 KV heads of size 128 in pages of 16, NHD, without options, of the same kind of elements, with
so many tokens that it sees as many bytes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_paged_attention import BLOCK_SPARSE, Case, call, read, uniform
from timing import Call, Cuda, write_json

WORKLOADS = ((32, 8192), (8, 2048))
KINDS = ("auto", "fp8_e4m3", "nvfp4")  # in all variants; others in some layouts
FEW_KV_HEADS = (1, 2, 4)
RANDOM_LENGTHS = tuple(int(n) for n in np.random.default_rng(0).integers(128, 32769, 64))


@dataclass(frozen=True)
class Figure:
    case: Case
    kv_bytes: int  # that are seen
    us: float
    read_us: float
    fast_us: float  # what the fast case takes for as many bytes


def variants(fast: Case) -> Iterator[Case]:
    """Of the fast case of one kind and workload, each named by what it differs in."""
    wide = fast.kind == "auto"

    def but(name: str, **changes: object) -> Case:
        return replace(fast, name=name, **changes)

    for layout in ("NHD", "HND", "packed"):
        for page in (8, 16, 32, 64, 128):
            if (layout, page) != ("NHD", 16) and not (layout == "packed" and page == 8 and not wide):
                yield but(f"{layout}, pages of {page}", layout=layout, page=page)
    for page in (1, 4, 24, 1024):
        yield but(f"pages of {page}", page=page)
    for size, kv_heads in ((64, 16), (80, 8), (96, 8), (112, 8), (120, 8), (192, 4), (256, 4)):
        if wide or size % 16 == 0:
            yield but(f"heads of {size}", head_size=size, kv_heads=kv_heads, heads=4 * kv_heads)
    for kv_heads in FEW_KV_HEADS:
        yield but(f"{kv_heads} KV heads", kv_heads=kv_heads, heads=8 * kv_heads, room=32768)
    few = {"head_size": 64, "kv_heads": 8, "heads": 64}
    yield but("heads of 64, 8 in a group", **few)
    yield but("heads of 64, 8 in a group, window of 128, sinks", **few, window=128, extras=("sinks",))
    for size in (64, 256):
        changes = {"head_size": size, "kv_heads": 1024 // size, "heads": 4096 // size, "layout": "packed"}
        yield but(f"packed, heads of {size}", **changes)
    for group in (1, 2, 3, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32):
        yield but(f"{group} heads in a group", heads=8 * group)
    for queries in (2, 4, 8, 16):
        yield but(f"{queries} queries", queries=(queries,) * len(fast.lens))
    for queries in (1, 2, 4, 8, 16):
        yield but(f"tables for 32k, {queries} queries", room=32768, queries=(queries,) * len(fast.lens))
    for room in (0, 32768):
        yield but(
            "tables for 32k, query lengths given" if room else "query lengths given",
            extras=("query lengths",),
            room=room,
        )
    yield but("tables for 32k, 16 heads in a group", room=32768, heads=8 * 16)
    for queries in (2, 4, 8):
        yield but(
            f"tables for 32k, {queries} queries, packed",
            room=32768,
            layout="packed",
            queries=(queries,) * len(fast.lens),
        )
    yield but("tables for 32k, heads of 64, 8 in a group", room=32768, **few)
    large = {"head_size": 256, "kv_heads": 4, "heads": 16, "queries": (4,) * len(fast.lens)}
    yield but("tables for 32k, heads of 256, 4 queries", room=32768, **large)
    yield but("2 queries, HND", queries=(2,) * len(fast.lens), layout="HND")
    yield but("2 queries, packed", queries=(2,) * len(fast.lens), layout="packed")
    for name in ("alibi", "int64", "lse", "sinks", "soft cap", *(() if wide else ("scale per head",))):
        yield but(name, extras=(name,))
    for window in (128, 1024):
        yield but(f"window of {window}", window=window)
    yield but("window of 1024, 2 queries", window=1024, queries=(2,) * len(fast.lens))
    for op in ("paged_attention_v1", "paged_attention_v2"):
        yield but(op, op=op, layout="packed")
    yield but("block-sparse", op="paged_attention_v1", layout="packed", extras=("block-sparse",))
    if wide:
        yield but("float16", dtype="float16")
        yield but("float32 not on tensor cores", dtype="float32")


def is_served(case: Case) -> bool:
    """nvfp4 is not packed, and its blocks of scales want whole groups of tokens and of dimensions."""
    return case.kind != "nvfp4" or (case.page % 4 == 0 and case.head_size % 64 == 0 and case.layout != "packed")


def cases() -> Iterator[tuple[Case, Case]]:
    """Each with the fast case beside it."""
    for batch, length in WORKLOADS:
        for kind in KINDS:
            fast = Case("fast case", **uniform(batch, length), kind=kind)
            yield fast, fast
            usual = filter(is_served, variants(fast))
            yield from ((case, fast) for case in usual if case.dtype != "float32" or batch == 8)
        for kind in ("fp8_e5m2", "int8"):
            fast = Case("fast case", **uniform(batch, length), kind=kind)
            yield fast, fast
            for layout in ("NHD", "HND", "packed"):
                for page in (16, 32, 64):
                    if (layout, page) != ("NHD", 16):
                        yield replace(fast, name=f"{layout}, pages of {page}", layout=layout, page=page), fast
    for kind in KINDS:
        fast = Case("fast case", **uniform(1, 32768), kind=kind)
        for kv_heads, queries, room in product(FEW_KV_HEADS, (1, 4), (0, 131072)):
            name = f"{kv_heads} KV heads, {queries} queries" + (", tables for 128k" if room else "")
            heads = {"kv_heads": kv_heads, "heads": 8 * kv_heads}
            yield replace(fast, name=name, queries=(queries,), room=room, **heads), fast
    for kind in KINDS:
        fast = Case("fast case", RANDOM_LENGTHS, (1,) * len(RANDOM_LENGTHS), kind=kind)
        yield fast, fast
        for queries in (2, 4, 8, 16):
            yield replace(fast, name=f"{queries} queries", queries=(queries,) * len(fast.lens)), fast
        for group in (16, 32):
            yield replace(fast, name=f"{group} heads in a group", heads=8 * group), fast
        small = replace(fast, head_size=64, kv_heads=16, heads=64, queries=(4,) * len(fast.lens))
        yield replace(small, name="heads of 64, 4 queries"), fast


def as_long(fast: Case, num_bytes: int) -> Case:
    """The fast case of so many bytes."""
    if num_bytes == seen_bytes(fast):
        return fast
    of_token = fast.kv_bytes // sum(fast.lens)
    return replace(fast, **uniform(len(fast.lens), num_bytes // (of_token * len(fast.lens))))


def seen_bytes(case: Case) -> int:
    """Of keys and values, on the average of the heads."""
    whole = case.kv_bytes * (2 if case.dtype == "float32" else 1)
    if "block-sparse" not in case.extras:
        return whole
    _, local, stride, size, _ = BLOCK_SPARSE
    length = case.lens[0]
    blocks = np.arange(length // size)
    seen = (blocks % stride == 0) | (blocks > (length - 1) // size - local)  # as many for each offset, about
    return int(whole * seen.mean())


def length_of(case: Case) -> int | str:
    return "random" if len(set(case.lens)) > 1 else case.lens[0]


def attend(case: Case, device: Cuda) -> Call:
    return call(case, device)[0]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--only", help="cases that have one of these words, separated by |, in their names")
    parser.add_argument("--kinds", help="of cache elements, separated by commas (default: all)")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",") if arguments.kinds else None
    device = Cuda()
    reads: dict[int, float] = {}
    fast_times: dict[Case, float] = {}
    figures = []

    def time(num_bytes: int, make: Callable[[Any, Cuda], Call], what: object) -> float:
        """Calls that see so many bytes each, of what make() makes of it."""
        copies = min(64, -(-3 * device.cache_bytes // num_bytes))
        us = 1e6 * device.time([make(what, device) for _ in range(copies)])
        device.cupy.get_default_memory_pool().free_all_blocks()
        return us

    for case, fast in cases():
        if kinds and case.kind not in kinds:
            continue
        if arguments.only and case is not fast and not any(word in case.name for word in arguments.only.split("|")):
            continue
        num_bytes = seen_bytes(case)
        us = time(num_bytes, attend, case)
        if num_bytes not in reads:
            reads[num_bytes] = time(num_bytes, read, num_bytes)
        like = as_long(fast, num_bytes)
        if like not in fast_times:
            fast_times[like] = us if case is fast else time(num_bytes, attend, like)
        figures.append(Figure(case, num_bytes, us, reads[num_bytes], fast_times[like]))

    table = Table("case", "sequences", "cache")
    for heading in ("us", "read", "of read", "of fast"):
        table.add_column(heading, justify="right")
    for f in figures:
        size = f"{len(f.case.lens)} x {length_of(f.case)}"
        shown = (f"{f.us:.1f}", f"{f.read_us:.1f}", f"{f.read_us / f.us:.0%}", f"{f.us / f.fast_us:.2f}")
        table.add_row(f.case.name, size, f.case.kind, *shown)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    if arguments.json:
        lines = [asdict(f) | {"of_fast": f.us / f.fast_us} for f in figures]
        for line, f in zip(lines, figures, strict=True):
            line["case"] = {k: v for k, v in line["case"].items() if k not in ("queries", "peer", "lens")} | {
                "sequences": len(f.case.lens),
                "length": length_of(f.case),
            }
        write_json(arguments.json, device, lines)


if __name__ == "__main__":
    main()
