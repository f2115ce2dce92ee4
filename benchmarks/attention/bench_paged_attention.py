"""Decode and prefill of paged attention on CUDA: head size 128, 32 query and 8 KV heads, pages of 16 in random order.

    python benchmarks/attention/bench_paged_attention.py [--json FILE] [--quick] [--peers]

Calls are captured into one CUDA graph and timed by events, on inputs that are rotated so that the L2 cache is cold;
medians (see ../timing.py).  Decode is set against reading as many bytes in one piece, in the same run, which is its
floor; prefill is given in TFLOP/s of visible pairs.

`peer` is the best figure that was measured elsewhere on an H200, in microseconds or TFLOP/s: FlashInfer 0.6.11 and
FlashAttention 3 (bf16), cuDNN 9.19, vLLM 0.22's Triton kernel, all with CUDA 13.0; fp8: the same with fp8 caches.
With --peers those of peers.py that are installed are timed here, on the same arrays, and their results compared.
Calls with batch_invariant are set against the ordinary ones, on such arrays, in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import pykv

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

import peers
from timing import Call, Cuda, write_json

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 32, 8, 128, 16
BLOCK_SPARSE = (0, 16, 8, 64, 0)  # of v1 and v2: the last 16 blocks of 64 tokens, and each eighth


@dataclass(frozen=True)
class Case:
    name: str
    lens: tuple[int, ...]  # of the sequences
    queries: tuple[int, ...]  # of the sequences
    kind: str = "auto"
    layout: str = "NHD"
    peer: float | None = None
    kv_heads: int = KV_HEADS
    op: str = "paged_attention"
    batch_invariant: bool = False  # the ordinary call is timed beside
    heads: int = HEADS
    head_size: int = HEAD_SIZE
    page: int = PAGE
    dtype: str = "bfloat16"
    window: int | None = None
    extras: tuple[str, ...] = ()  # names of more_options()
    room: int = 0  # tokens that block tables have room for, or just enough

    @property
    def decode(self) -> bool:
        return max(self.queries) <= 16

    @property
    def kv_bytes(self) -> int:
        reach = [n if self.window is None else min(n, self.window + q - 1) for n, q in self.sequences]
        itemsize = {"auto": 2, "nvfp4": 9 / 16}.get(self.kind, 1)
        return int(sum(reach) * 2 * self.kv_heads * self.head_size * itemsize)

    @property
    def sequences(self) -> list[tuple[int, int]]:
        return list(zip(self.lens, self.queries, strict=True))

    @property
    def flops(self) -> float:
        pairs = sum(q * (n - q) + q * (q + 1) / 2 for n, q in self.sequences)
        return 4.0 * self.heads * self.head_size * pairs


@dataclass(frozen=True)
class Figure:
    case: Case
    us: float
    read_us: float | None  # of as many bytes in one piece
    tflops: float | None
    here: dict[str, float]  # what other libraries take, in microseconds
    ordinary_us: float | None = None  # of a call with batch_invariant: without it


def uniform(batch: int, length: int, queries: int = 1) -> dict[str, tuple[int, ...]]:
    return {"lens": (length,) * batch, "queries": (queries,) * batch}


def cases() -> Iterator[Case]:
    bf16 = {
        (1, 1024): 7.8, (1, 4096): 12.6, (1, 8192): 16.5, (1, 32768): 40.9, (1, 131072): 131.8, (8, 1024): 15.7,
        (8, 8192): 71.3, (8, 32768): 252.7, (64, 1024): 69.9, (64, 8192): 482.0, (256, 128): 50.0, (256, 1024): 250.0,
        (256, 8192): 1904.0,
    }  # fmt: skip
    fp8 = {
        (1, 1024): 10.9, (1, 8192): 16.8, (1, 131072): 109.0, (8, 8192): 58.8, (64, 1024): 67.8, (64, 8192): 405.0,
        (256, 8192): 1568.0,
    }  # fmt: skip
    for (batch, length), peer in bf16.items():
        yield Case(f"{batch} x {length}", **uniform(batch, length), peer=peer)
    mixed = tuple(int(n) for n in np.random.default_rng(0).integers(128, 32769, 64))
    yield Case("64 x random 128..32k", mixed, (1,) * 64, peer=972.0)
    yield Case("1 x 128k + 63 x 1k", (131072,) + (1024,) * 63, (1,) * 64, peer=202.0)
    for (batch, length), peer in fp8.items():
        yield Case(f"{batch} x {length}", **uniform(batch, length), kind="fp8_e4m3", peer=peer)
    for kind, layout in (("fp8_e5m2", "NHD"), ("int8", "NHD"), ("int8", "packed")):
        yield Case("64 x 8192", **uniform(64, 8192), kind=kind, layout=layout)
    for batch, length in fp8:
        yield Case(f"{batch} x {length}", **uniform(batch, length), kind="nvfp4")
    for layout in ("HND", "packed"):
        yield Case("64 x 8192", **uniform(64, 8192), layout=layout)
    yield Case("8 x 8192", **uniform(8, 8192), layout="packed", op="paged_attention_v1", peer=537.0)
    yield Case("8 x 8192", **uniform(8, 8192), layout="packed", op="paged_attention_v2", peer=248.0)
    yield Case("64 x 8192", **uniform(64, 8192), layout="packed", op="paged_attention_v1", peer=2152.0)
    yield Case("64 x 8192", **uniform(64, 8192), layout="packed", op="paged_attention_v2", peer=1720.0)
    yield Case("8 x 1024", **uniform(8, 1024), kv_heads=32, peer=38.2)
    yield Case("64 x 8192", **uniform(64, 8192), kv_heads=32, peer=1895.0)
    for queries, peer in ((2, 250.0), (4, 250.0), (8, 275.0), (16, 276.0)):
        yield Case(f"32 x 8192, {queries} queries", **uniform(32, 8192, queries), peer=peer)
    for kind in ("auto", "fp8_e4m3"):
        for batch, length in (
            (1, 1024), (1, 8192), (1, 131072), (8, 1024), (8, 8192), (64, 1024), (64, 8192), (256, 1024), (256, 8192),
        ):  # fmt: skip
            name = f"{batch} x {length}, batch_invariant"
            yield Case(name, **uniform(batch, length), kind=kind, batch_invariant=True)
        yield Case("64 x random, batch_invariant", mixed, (1,) * 64, kind=kind, batch_invariant=True)
    for name, lens, queries, peer in (
        ("prefill 1 x 2k", (2048,), (2048,), 467.0),
        ("prefill 1 x 8k", (8192,), (8192,), 564.0),
        ("prefill 4 x 4k", (4096,) * 4, (4096,) * 4, 536.0),
        ("prefill 1 x 32k", (32768,), (32768,), 580.0),
        ("prefill 2k on 30k", (32768,), (2048,), 580.0),
    ):
        yield Case(name, lens, queries, peer=peer)


def codes(shape: tuple[int, ...], device: Cuda) -> object:
    """Random codes of positive finite numbers in fp8, where they are also harmless in the other formats."""
    some = device.cupy.random.randint(0, 0x58, 1 << 22, dtype=device.cupy.uint8)
    return device.cupy.resize(some, math.prod(shape)).reshape(shape)


def more_options(case: Case, device: Cuda) -> dict[str, object]:
    """What `extras` stand for."""
    cupy = device.cupy
    options = {
        "alibi": lambda: {"alibi_slopes": cupy.full(case.heads, 0.01, "f")},
        "lse": lambda: {"lse": cupy.empty((case.heads, sum(case.queries)), "f")},
        "scale per head": lambda: {n: cupy.full(case.kv_heads, 0.5, "f") for n in ("k_scale", "v_scale")},
        "sinks": lambda: {"sinks": cupy.zeros(case.heads, "f")},
        "soft cap": lambda: {"softcap": 30.0},
    }
    return {k: v for name in case.extras if name in options for k, v in options[name]().items()}


@dataclass(frozen=True)
class Arrays:
    """What a call of `paged_attention` is given."""

    out: Any
    query: Any
    caches: list[Any]
    tables: Any
    lens: Any
    cu_query_lens: Any  # None: one query for each sequence


def arrays(case: Case, device: Cuda) -> Arrays:
    cupy = device.cupy
    rng = np.random.default_rng(1)
    page, head_size = case.page, case.head_size
    pages = [math.ceil(n / page) for n in case.lens]
    total = sum(pages)
    table = np.zeros((len(pages), max(*pages, math.ceil(case.room / page))), np.int32)
    ids = rng.permutation(total)
    for row, (start, count) in enumerate(zip(np.cumsum([0, *pages]), pages, strict=False)):
        table[row, :count] = ids[start : start + count]
    itemsize = 2 if case.kind == "auto" else 1
    x = 16 // itemsize
    heads = case.kv_heads
    row = head_size * 9 // 16 if case.kind == "nvfp4" else head_size
    if case.layout == "packed":
        shapes = [(total, heads, head_size // x, page, x), (total, heads, head_size, page)]
    elif case.layout == "HND":
        shapes = [(total, heads, page, row)] * 2
    else:
        shapes = [(total, page, heads, row)] * 2
    caches = [device.random(s, case.dtype) if itemsize == 2 else codes(s, device) for s in shapes]
    if case.layout == "HND":
        caches = [c.transpose(0, 2, 1, 3) for c in caches]
    tokens = sum(case.queries)
    query = device.random((tokens, case.heads, head_size), case.dtype)
    out = cupy.empty_like(query)
    ids_of = np.int64 if "int64" in case.extras else np.int32
    tables, lens = device.array(table.astype(ids_of)), device.array(np.array(case.lens, ids_of))
    cu = (
        None
        if max(case.queries) == 1 and "query lengths" not in case.extras
        else device.array(np.cumsum([0, *case.queries]).astype(np.int32))
    )
    return Arrays(out, query, caches, tables, lens, cu)


def call(case: Case, device: Cuda) -> tuple[Call, peers.Problem | None]:
    """A call on arrays of its own, and those arrays, if other libraries can take them."""
    cupy = device.cupy
    page, head_size, heads, tokens = case.page, case.head_size, case.kv_heads, sum(case.queries)
    made = arrays(case, device)
    out, query, caches, tables, lens, cu = (getattr(made, f.name) for f in fields(made))
    if case.op != "paged_attention":
        longest = max(case.lens)
        shape = (tokens, case.heads, math.ceil(longest / 512))
        scratch = (
            [cupy.empty(shape, "f"), cupy.empty(shape, "f"), cupy.empty((*shape, head_size), out.dtype)]
            if case.op == "paged_attention_v2"
            else []
        )
        scale = head_size**-0.5
        op = getattr(pykv, case.op)
        sparse = BLOCK_SPARSE if "block-sparse" in case.extras else ()
        return lambda: op(
            out, *scratch, query, *caches, heads, scale, tables, lens, page, longest, None, case.kind, 1.0, 1.0, *sparse
        ), None
    invariant = case.batch_invariant
    size = pykv.paged_attention_workspace_size(
        tokens, len(case.lens), case.heads, heads, head_size, batch_invariant=invariant
    )
    workspace = cupy.empty(size, cupy.uint8)
    common = case.layout == "NHD" and case.kind in ("auto", "fp8_e4m3") and not invariant
    common &= not case.extras and case.window is None
    options = {"cu_query_lens": cu, "kv_cache_dtype": case.kind, "batch_invariant": invariant, "workspace": workspace}
    options |= {"window": case.window, **more_options(case, device)}
    return lambda: pykv.paged_attention(out, query, *caches, tables, lens, **options), peers.Problem(
        out, query, *caches, tables, lens, case.lens, case.queries
    ) if common else None


# Sums up what it reads, 8 loads of 16 bytes in flight for each thread.
_READ = r"""
extern "C" __global__ void read(unsigned* to, const uint4* from, long long n) {
  unsigned sum = 0;
  for (long long i = blockIdx.x * 2048ll + threadIdx.x; i < n; i += gridDim.x * 2048ll) {
    uint4 v[8];
    #pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = i + 256 * k < n ? __ldcs(from + i + 256 * k) : make_uint4(0, 0, 0, 0);
    #pragma unroll
    for (int k = 0; k < 8; ++k) sum += v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (sum == 12345) *to = sum;
}
"""


def read(num_bytes: int, device: Cuda) -> Call:
    kernel = device.cupy.RawKernel(_READ, "read")
    source, target = device.random((num_bytes // 2,), "bfloat16"), device.cupy.zeros(1, "uint32")
    n = num_bytes // 16
    return lambda: kernel((min(132 * 8, math.ceil(n / 2048)),), (256,), (target, source, np.int64(n)))


def time_peers(own: list[Call], problems: list[peers.Problem], device: Cuda) -> dict[str, float]:
    """Microseconds of each library's call, where it computes what pykv does."""
    us = {}
    own[0]()
    wanted = problems[0].out.astype("f")
    for name, its in itertools.groupby(
        sorted((c for p in problems for c in peers.calls(p)), key=lambda c: c[0]), key=lambda c: c[0]
    ):
        theirs = [c for _, c in its]
        problems[0].out.fill(0)
        theirs[0]()
        device.cupy.cuda.Device().synchronize()
        right = abs(problems[0].out.astype("f") - wanted).max() <= 0.02 * abs(wanted).max()
        if right:
            us[name] = 1e6 * device.time(theirs)
        else:
            print(f"{name} has other results and is left out", file=sys.stderr)
    return us


def measure(case: Case, device: Cuda, with_peers: bool) -> Figure:
    copies = min(64, math.ceil(3 * device.cache_bytes / case.kv_bytes))
    made = [call(case, device) for _ in range(copies)]
    own, problems = [c for c, _ in made], [p for _, p in made if p]
    us = 1e6 * device.time(own)
    if not case.decode:
        here = time_peers(own, problems, device) if with_peers and problems else {}
        return Figure(case, us, None, case.flops / us / 1e6, here)
    if case.batch_invariant:
        ordinary = 1e6 * device.time([call(replace(case, batch_invariant=False), device)[0] for _ in range(copies)])
        return Figure(case, us, None, None, {}, ordinary)
    here = time_peers(own, problems, device) if with_peers and problems else {}
    return Figure(case, us, 1e6 * device.time([read(case.kv_bytes, device) for _ in range(copies)]), None, here)


def show(figures: list[Figure]) -> None:
    table = Table("op", "case", "cache", "layout", "heads")
    here = list(peers.installed()) if any(f.here for f in figures) else []
    for heading in (
        "us",
        "TB/s or TFLOP/s",
        "of read",
        "of ordinary",
        "peer",
        "x faster",
        *(f"{name} here" for name in here),
    ):
        table.add_column(heading, justify="right")
    for f in figures:
        c = f.case
        rate = f.tflops if f.tflops is not None else c.kv_bytes / f.us / 1e6
        gain = None if c.peer is None else (rate / c.peer if f.tflops is not None else c.peer / f.us)
        table.add_row(
            c.op,
            c.name,
            c.kind,
            c.layout,
            f"{c.heads}/{c.kv_heads}",
            f"{f.us:.1f}",
            f"{rate:.2f}" if f.tflops is None else f"{rate:.0f}",
            "" if f.read_us is None else f"{f.read_us / f.us:.0%}",
            "" if f.ordinary_us is None else f"{f.us / f.ordinary_us:.0%}",
            "" if c.peer is None else f"{c.peer:g}",
            "" if gain is None else f"{gain:.2f}",
            *(f"{f.here[name]:.1f}" if name in f.here else "" for name in here),
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="decode with 8 x 8k and 64 x 8k alone")
    parser.add_argument("--peers", action="store_true", help="time the libraries of peers.py beside pykv")
    arguments = parser.parse_args()
    device = Cuda()
    wanted = [c for c in cases() if not arguments.quick or c.name in ("8 x 8192", "64 x 8192")]
    figures = []
    for case in wanted:
        figures.append(measure(case, device, arguments.peers))
        device.cupy.get_default_memory_pool().free_all_blocks()
    show(figures)
    if arguments.json:
        lines = [asdict(f) for f in figures]
        for line in lines:  # a number for each sequence would be long
            line["case"].pop("lens"), line["case"].pop("queries")
        more = {"peers": peers.installed()} if arguments.peers else {}
        write_json(arguments.json, device, lines, **more)


if __name__ == "__main__":
    main()
