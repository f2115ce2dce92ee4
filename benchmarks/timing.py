"""The command line of a benchmark; pykv/_tools/timing.py says how calls are timed.

    python benchmarks/norm/bench_rms_norm.py [--device cpu|cuda] [--dtype bfloat16] [--json FILE]

A benchmark is a function that yields `Case`s, and a call of `main`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pykv
from pykv._tools import output
from pykv._tools.timing import Call, Case, Cpu, Cuda, Device, about, lines, measure, table

__all__ = ["Call", "Case", "Cpu", "Cuda", "Device", "main", "on_cupys_stream", "write_json"]


def has_torch() -> bool:
    """Whether there is a torch that sees a GPU."""
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def on_cupys_stream(call: Callable[[], object]) -> Call:
    """torch's idea of the current stream is its own; the graph is captured on CuPy's."""
    torch, cupy = importlib.import_module("torch"), importlib.import_module("cupy")

    def run() -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)):
            call()

    return run


def _commit() -> str:
    """What was measured.  PYKV_COMMIT says so where the sources travelled without their history."""
    here = Path(__file__).parent
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=False
    )
    return os.environ.get("PYKV_COMMIT") or git.stdout.strip() or "unknown"


def write_json(path: Path, device: Device, figures: list[dict[str, object]], **more: object) -> None:
    """Writes figures with what they were measured on, and ``more`` of the circumstances."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"commit": _commit()} | about(device) | more | {"figures": figures}, indent=1) + "\n")


def main(cases: Callable[[list[str]], Iterable[Case]]) -> None:
    """The command line of a benchmark: ``cases`` gets the dtypes that are wanted."""
    parser = argparse.ArgumentParser(description=f"Times {Path(sys.argv[0]).stem.removeprefix('bench_')}")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if pykv._C.cuda_device_count() else "cpu")
    parser.add_argument("--dtype", action="append", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--op", action="append", help="these operations alone")
    parser.add_argument("--seconds", type=float, help="for each figure, at least; 0.1 on CUDA, 0.2 on the CPU")
    parser.add_argument("--most-tokens", type=int, default=1 << 30, help="skip what is larger")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()

    make: type[Cuda | Cpu] = Cuda if arguments.device == "cuda" else Cpu
    device: Device = make() if arguments.seconds is None else make(arguments.seconds)
    wanted = [
        case
        for case in cases(arguments.dtype or ["bfloat16"])
        if case.size.get("tokens", 0) <= arguments.most_tokens and case.op in (arguments.op or [case.op])
    ]
    figures = list(measure(device, output.progress(wanted, "measuring")))
    output.show(f"{device.describe()['name']}, pykv {_commit()}", *table(figures), right=2)
    if arguments.json:
        write_json(arguments.json, device, lines(figures))
