"""Every operation on rows and caches on the CPU, beside a copy past the caches by as many threads: the table of
docs/performance.md.

    PYKV_NUM_THREADS=2 python benchmarks/bench_cpu.py [--seconds S] [--json FILE] [operation ...]

8192 tokens in bf16, for writes into caches 65536; the least time of some calls each, since other work on the machine
only ever adds to it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "cache"))
sys.path.insert(0, str(Path(__file__).parent))

import bench_reshape_and_cache as writes
from timing import Call, Case, Cpu, lines, measure, table, write_json

from pykv._tools import bench, output
from pykv._tools.samples import WORKLOADS


class Least(Cpu):
    def time(self, calls: list[Call]) -> float:
        for call in calls:
            call()
        times: list[float] = []
        end = time.perf_counter() + self._seconds
        while len(times) < 4 or time.perf_counter() < end:
            for call in calls:
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
        return min(times)


def cases() -> Iterator[Case]:
    yield from (c for c in writes.cases(["bfloat16"]) if c.size == {"tokens": 65536, "kv heads": 8})
    yield from bench.cases(sorted({*bench.row_ops(), *WORKLOADS}), [8192], "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description="Times operations on the CPU")
    parser.add_argument("ops", nargs="*", metavar="operation", help="these alone, and their kin")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each of them, at least")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    device = Least(arguments.seconds)
    wanted = [c for c in cases() if not arguments.ops or c.op.split()[0] in arguments.ops]
    figures = list(measure(device, output.progress(wanted, "measuring")))
    output.show(f"{device.describe()['name']}, {device.threads} threads", *table(figures), right=2)
    if arguments.json:
        write_json(arguments.json, device, lines(figures))


if __name__ == "__main__":
    main()
