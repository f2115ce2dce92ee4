"""Everything that a GPU has to show for a commit: ``tests/gpu.sh benchmarks/results/gpu.json``.

Tests by file; every operation under each tool of compute-sanitizer; and, if GATE names
another build's ``libkernels.so.0``, attention against that (benchmarks/attention/gate.py).  Wants pykv installed with
CUDA kernels, pytest, CuPy and compute-sanitizer.  COMMIT says the commit where this is no git checkout.

Steps that passed, by the record, for the same commit and card are not made again.  With ``--minutes 9`` none begins
after that time, and the same command goes on another time.  Exits with 0 if all passed, with 3 if some are left.
Steps run in processes of their own, for the workers of pytest-xdist do not come up beside CUDA.  Logs: build/gpu/.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
LOGS = ROOT / "build" / "gpu"
WITHOUT_GPU = {"abi", "fuzz", "hints"}
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
CLOSING = re.compile(r"^.*(?:passed|failed|ERROR SUMMARY|no tests ran|cases within).*$", re.MULTILINE)


def steps() -> dict[str, list[str]]:
    """Commands by name, in order; ``gate`` must be alone."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "cuda"]
    check = [sys.executable, "-m", "pykv", "check", "--device", "cuda"]
    files = [p for p in sorted(TESTS.glob("*/test_*.py")) if p.parent.name not in WITHOUT_GPU]
    sanitizer = ["compute-sanitizer", "--error-exitcode", "9", "--tool"]
    found = {tool: [*sanitizer, tool, *check] for tool in TOOLS}
    found |= {f"{p.parent.name}/{p.stem.removeprefix('test_')}": [*pytest, str(p)] for p in files}
    if other := os.environ.get("GATE"):
        found["gate"] = [sys.executable, str(ROOT / "benchmarks/attention/gate.py"), other]
    return found


def said(*command: str) -> str:
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


class Running:
    """A step in a process, on one of the GPUs."""

    def __init__(self, name: str, command: list[str], gpu: int, limit: float) -> None:
        self.name, self.gpu, self.began, self.limit = name, gpu, time.monotonic(), limit
        self.log = LOGS / f"{name.replace('/', '-')}.log"
        # `import pykv` finds what is installed, not the source folder
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(gpu), "PYTHONSAFEPATH": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)

    def result(self) -> dict[str, Any] | None:
        """None while it runs."""
        seconds, code = time.monotonic() - self.began, self.process.poll()
        if code is None and seconds < self.limit:
            return None
        if code is None:
            self.process.kill()
            self.process.wait()
            code = 124
        closing = CLOSING.findall(self.log.read_text(errors="replace"))
        # pytest's 5: none of these tests is for this device
        return {
            "exit": 0 if code == 5 else code,
            "seconds": round(seconds),
            "says": closing[-1].strip() if closing else "",
        }


def run(wanted: dict[str, list[str]], gpus: int, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Each step with its result, when it has one."""
    LOGS.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * arguments.minutes
    waiting = [name for name in wanted if name != "gate"] + ["gate"] * ("gate" in wanted)
    running: list[Running] = []
    while waiting or running:
        while waiting and time.monotonic() < end and len(running) < gpus * arguments.at_once:
            if waiting[0] == "gate" and running:
                break
            name = waiting.pop(0)
            used = [step.gpu for step in running]
            gpu = min(range(gpus), key=used.count)
            running.append(Running(name, wanted[name], gpu, arguments.limit))
        time.sleep(0.2)
        for step in list(running):
            if (found := step.result()) is not None:
                running.remove(step)
                yield step.name, found
                print(f"{found['exit']:4} {found['seconds']:5} s  {step.name}: {found['says']}", flush=True)
        if not running and time.monotonic() >= end:
            break


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("record", type=Path)
    parser.add_argument("only", nargs="*", help="names of steps, with * and ?; default: all")
    parser.add_argument("--minutes", type=float, default=600, help="begin no step after so many")
    parser.add_argument("--at-once", type=int, default=6, help="processes on one GPU")
    parser.add_argument("--limit", type=float, default=1500, help="seconds of one step")
    parser.add_argument("--list", action="store_true", help="print the names, and what of them the record has")
    arguments = parser.parse_args()

    cards = said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    commit = os.environ.get("COMMIT") or said("git", "rev-parse", "HEAD")
    now = {"commit": commit, "card": cards[0] if cards else None}
    record = json.loads(arguments.record.read_text()) if arguments.record.exists() else {}
    done: dict[str, Any] = record.get("steps", {}) if {k: record.get(k) for k in now} == now else {}
    every = {k: v for k, v in steps().items() if not arguments.only or any(fnmatch(k, o) for o in arguments.only)}
    wanted = {name: command for name, command in every.items() if done.get(name, {"exit": 1})["exit"] != 0}
    if arguments.list:
        print("\n".join(f"{'left' if name in wanted else 'passed':7} {name}" for name in every))
        return 0
    if not cards:
        sys.exit("there is no GPU here: nvidia-smi names none")
    for name, result in run(wanted, len(cards), arguments):
        done[name] = result
        whole = now | {"date": time.strftime("%Y-%m-%d"), "steps": dict(sorted(done.items()))}
        arguments.record.write_text(json.dumps(whole, indent=1) + "\n")
    left = [name for name in wanted if name not in done]
    failed = [name for name in every if done.get(name, {"exit": 0})["exit"] != 0]
    print(f"{len(every) - len(left) - len(failed)} of {len(every)} steps passed", end="")
    print(f"; failed: {', '.join(failed)}" if failed else "", end="")
    print(f"; left: {', '.join(left)}" if left else "")
    return 1 if failed else 3 if left else 0


if __name__ == "__main__":
    sys.exit(main())
