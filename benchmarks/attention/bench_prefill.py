"""Prefill of paged attention on CUDA beside cuDNN's and with batch_invariant: bf16, 32 query and 8 KV heads of 128.

    python benchmarks/attention/bench_prefill.py [--json FILE]

A GPU that multiplies matrices is at its power limit, and its clock falls with what it computes: only calls that take
turns, each for a tenth of a second, compare.  cuDNN is torch's scaled_dot_product_attention, whose keys lie in one
piece; pykv's are in pages of 16.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_paged_attention import Case, call
from rich.console import Console
from rich.table import Table
from timing import Call, Cuda, has_torch, on_cupys_stream, write_json

OWN, INVARIANT, CUDNN = "pykv", "batch_invariant", "cuDNN"


@dataclass(frozen=True)
class Figure:
    case: str
    which: str
    us: float
    tflops: float  # of visible pairs
    least_us: float
    most_us: float


def cases() -> Iterator[Case]:
    for name, length, queries in (
        ("1 x 2k", 2048, 2048), ("1 x 8k", 8192, 8192), ("1 x 32k", 32768, 32768), ("2k on 30k", 32768, 2048),
    ):  # fmt: skip
        yield Case(name, (length,), (queries,))


def cudnn(case: Case) -> Call:
    torch = importlib.import_module("torch")
    backend = importlib.import_module("torch.nn.attention")
    query, key, value = (
        torch.randn(1, heads, n, case.head_size, dtype=torch.bfloat16, device="cuda")
        for heads, n in ((case.heads, case.queries[0]), (case.kv_heads, case.lens[0]), (case.kv_heads, case.lens[0]))
    )
    attend: Any = torch.nn.functional.scaled_dot_product_attention

    def run() -> None:
        with backend.sdpa_kernel([backend.SDPBackend.CUDNN_ATTENTION]):
            attend(query, key, value, is_causal=True, enable_gqa=True)

    return on_cupys_stream(run)


def turn(run: Call, device: Cuda, seconds: float) -> float:
    """Microseconds of a call among many that follow one another, without a graph, which torch would have to capture."""
    cuda = device.cupy.cuda
    start, end = cuda.Event(), cuda.Event()

    def time(count: int) -> float:
        start.record()
        for _ in range(count):
            run()
        end.record()
        end.synchronize()
        return float(cuda.get_elapsed_time(start, end)) * 1e3 / count

    time(1)
    count = max(3, int(seconds * 1e6 / time(1)))
    time(count // 2)  # until the clock has followed
    return time(count)


def measure(case: Case, device: Cuda, turns: int, seconds: float) -> Iterator[Figure]:
    calls = {OWN: call(case, device)[0], INVARIANT: call(replace(case, batch_invariant=True), device)[0]}
    if has_torch() and case.lens == case.queries:  # its mask begins at the first key
        calls[CUDNN] = cudnn(case)
    us: dict[str, list[float]] = {which: [] for which in calls}
    with device.cupy.cuda.Stream(non_blocking=True):
        device.cupy.cuda.Device().synchronize()
        for i in range(turns):
            for which in sorted(calls, reverse=i % 2 == 1):
                us[which].append(turn(calls[which], device, seconds))
    for which, found in us.items():
        middle = statistics.median(found)
        yield Figure(case.name, which, middle, case.flops / middle / 1e6, min(found), max(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Times prefill of paged attention")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--turns", type=int, default=5, help="how often each is timed (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=0.1, help="of a turn (default: %(default)s)")
    arguments = parser.parse_args()
    device = Cuda()
    figures = [f for case in cases() for f in measure(case, device, arguments.turns, arguments.seconds)]
    table = Table("case", "", "us", "TFLOP/s", "least us", "most us")
    for f in figures:
        table.add_row(f.case, f.which, *(f"{x:.0f}" for x in (f.us, f.tflops, f.least_us, f.most_us)))
    Console().print(table)
    if arguments.json:
        write_json(arguments.json, device, [asdict(f) for f in figures])


if __name__ == "__main__":
    main()
