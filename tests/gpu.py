"""Everything that a GPU has to show for a commit: ``tests/gpu.sh benchmarks/results/gpu.json``.

Tests by folder and array library, the larger folders in parts; every operation, by family, under each tool of
compute-sanitizer; and, if GATE names another build's ``libkernels.so.0``, attention against that
(benchmarks/attention/gate.py).  Wants pykv installed with CUDA kernels, pytest, CuPy, torch, JAX and
compute-sanitizer.  COMMIT says the commit where this is no git checkout.

Steps that passed, by the record, for the same commit are not made again.  With ``--minutes 9`` all ends after that
time: what still runs is stopped and stays left, and the same command goes on another time.  The longest steps, by what
the record says of them for any commit, come first.  Exits with 0 if all passed, with 1 if a step failed, with 3 if
some are left.  Logs: build/gpu/.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # under PYTHONSAFEPATH, too

from libraries import LIBRARIES

from pykv._tools.samples import FAMILIES

TESTS = Path(__file__).resolve().parent
ROOT = TESTS.parent
LOGS = ROOT / "build" / "gpu"
WITHOUT_GPU = {"abi", "fuzz", "hints"}
BESIDES = {"interop": ["test_dispatch.py"]}  # folder -> what is tested with it
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# Kernels in which one lane arrives at an mbarrier for its warp, after __syncwarp.  racecheck does not follow that, and
# reports what is in order (docs/log/packed_gemm.md).
NOT_FOR_RACECHECK = ["packed_gemm_sm90_kernel"]
OTHER = "other"  # tests without an array of some library
# folder -> parts of its tests with each library, and of its other tests
PARTS = {"attention": (6, 2), "cache": (2, 1), "norm": (2, 1), "paged_kv_cache": (1, 3), "interop": (1, 4)}
GUESS = {"attention": 120.0, "cache": 90.0, "norm": 80.0, "": 60.0}  # seconds of steps that no record knows
STOPPED = 124

PASSED = re.compile(r"\b(\d+) passed")
ENDED = r"\b\d+ (?:passed|skipped|deselected)|no tests ran"  # pytest, whatever it found
CLOSING = re.compile(r"^.*(?:passed|failed|skipped|deselected|no tests ran|SUMMARY|slower).*$", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    kind: str  # what its passed tests are counted under: a library, OTHER, a tool
    name: str
    command: list[str]
    proof: tuple[str, ...]  # patterns that its log has where it passed
    alone: bool = False


def pytest(device: str, *arguments: str | Path) -> list[str]:
    fixed = ["-q", "-p", "no:cacheprovider", "--tb=short", "-rfE", "--maxfail=30", "--device", device]
    hangs = ["-o", "faulthandler_timeout=100"]  # the log says where
    return [sys.executable, "-m", "pytest", *fixed, *hangs, *map(str, arguments)]


def tests(device: str, folder: str) -> Iterator[Step]:
    paths = [TESTS / name for name in (folder, *BESIDES.get(folder, []))]
    names = [kind.name for kind in LIBRARIES if kind.device == device]
    with_arrays, others = PARTS.get(folder, (1, 1))
    chosen = [(name, f"{name}-{device}", with_arrays) for name in names]
    chosen.append((OTHER, " and ".join(f"not {name}-{device}" for name in names), others))
    for kind, expression, parts in chosen:
        for k in range(1, parts + 1):
            name, part = f"{folder}/{kind}", []
            if parts > 1:
                name, part = f"{name}/{k}of{parts}", ["--part", f"{k}/{parts}"]
            yield Step(kind, name, pytest(device, "-k", expression, *part, *paths), (ENDED,))


def checks(device: str, tool: str, family: str) -> Step:
    ops = import_module(f"pykv._tools.samples.{family}").SAMPLES
    left_out = NOT_FOR_RACECHECK if tool == "racecheck" else []
    command = ["compute-sanitizer", "--error-exitcode", "9"]
    command += [part for name in left_out for part in ("--kernel-name-exclude", f"kns={name}")] + ["--tool", tool]
    clean = r"RACECHECK SUMMARY: 0 hazards" if tool == "racecheck" else r"ERROR SUMMARY: 0 errors"
    return Step(
        tool,
        f"{tool}/{family}",
        [*command, sys.executable, "-m", "pykv", "check", "-q", "--device", device, *ops],
        (clean, r"\b\d+ passed, 0 failed"),
    )


def steps(device: str) -> Iterator[Step]:
    folders = sorted({p.parent.name for p in TESTS.glob("*/test_*.py")} - WITHOUT_GPU)
    for folder in folders:
        yield from tests(device, folder)
    yield Step(OTHER, "cli", pytest(device, "-k", "on_cuda", TESTS / "test_cli.py"), (ENDED,))
    yield Step(OTHER, "examples of C and C++", pytest(device, TESTS / "abi/test_examples.py"), (ENDED,))
    for tool in TOOLS:
        for family in FAMILIES:
            yield checks(device, tool, family)
    if other := os.environ.get("GATE"):
        gate = [sys.executable, str(ROOT / "benchmarks/attention/gate.py"), other]
        yield Step("gate", "gate", gate, ("slower",), alone=True)


def said(*command: str) -> str:
    if not shutil.which(command[0]):
        return ""
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def judged(step: Step, code: int, log: str) -> dict[str, Any]:
    """What the record says of a step that ended: exit 0 is not enough, its log has to show what it should."""
    closing, passed = CLOSING.findall(log), PASSED.findall(log)
    says = closing[-1].strip() if closing else ""
    if code == 5 and "pytest" in step.command:  # there are no tests of this kind
        code = 0
    if code == 0 and (lacking := [p for p in step.proof if not re.search(p, log)]):
        code, says = 1, f"the log lacks {lacking[0]!r}"
    return {"exit": code, "passed": int(passed[-1]) if passed else 0, "says": says}


class Running:
    """A step in a process group of its own, on one of the GPUs."""

    def __init__(self, step: Step, gpu: int, limit: float) -> None:
        self.step, self.gpu, self.began, self.limit = step, gpu, time.monotonic(), limit
        self.log = LOGS / f"{re.sub(r'[/ +]+', '-', step.name)}.log"
        environment = os.environ | {
            "CUDA_VISIBLE_DEVICES": str(gpu),
            "PYTHONSAFEPATH": "1",  # `import pykv` finds what is installed, not the source folder
            "OMP_NUM_THREADS": "1",  # as many steps run beside each other as there are cores
            "OPENBLAS_NUM_THREADS": "1",
        }
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                step.command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
                env=environment, preexec_fn=os.setpgrp,
            )  # fmt: skip

    def stop(self) -> None:
        """With all that it started: compute-sanitizer's program, a test's subprocesses."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver that is busy with its kernel
            self.process.wait(timeout=5)

    def result(self) -> dict[str, Any] | None:
        """None while it runs."""
        seconds, code = time.monotonic() - self.began, self.process.poll()
        if code is None and seconds < self.limit:
            return None
        self.stop()  # and what an ended one left behind
        log = self.log.read_text(errors="replace")
        found = judged(self.step, STOPPED if code is None else code, log)
        if code is None:
            found["says"] = f"stopped after {self.limit:.0f} s"
        if found["exit"]:
            found["log"] = log[-4000:].splitlines()
        return found | {"seconds": round(seconds)}


def guess(step: Step) -> float:
    return next((s for name, s in GUESS.items() if name in step.name.split("/")), GUESS[""])


def run(
    wanted: list[Step], seconds: Mapping[str, float], gpus: int, at_once: int, limit: float, minutes: float
) -> Iterator[tuple[Step, dict[str, Any]]]:
    """Each step with its result, when it has one; those that the time does not suffice for have none."""
    LOGS.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    waiting = sorted(wanted, key=lambda step: (step.alone, -seconds.get(step.name, guess(step))))
    running: list[Running] = []
    try:
        while (waiting or running) and (left := end - time.monotonic()) > 0:
            while len(running) < gpus * at_once:
                possible = (step for step in waiting if seconds.get(step.name, 0) <= left)
                if (step := next(possible, None)) is None or (running and (step.alone or running[0].step.alone)):
                    break
                waiting.remove(step)
                used = [other.gpu for other in running]
                running.append(Running(step, min(range(gpus), key=used.count), limit))
            if not running:
                return
            time.sleep(0.1)
            for one in list(running):
                if (found := one.result()) is not None:
                    running.remove(one)
                    yield one.step, found
    finally:
        for one in running:
            one.stop()


def write(path: Path, record: Any) -> None:
    """The whole of it or what was there before: this may be killed at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".tmp")
    beside.write_text(json.dumps(record, indent=1) + "\n")
    beside.replace(path)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("record", type=Path)
    parser.add_argument("only", nargs="*", help="names of steps, with * and ?; default: all")
    parser.add_argument("--minutes", type=float, default=600, help="end after so many")
    parser.add_argument("--at-once", type=int, help="processes on one GPU (default: a core each, at most 14)")
    parser.add_argument("--limit", type=float, default=300, help="seconds of one step")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: to try this script itself")
    parser.add_argument("--list", action="store_true", help="print the names, and what of them the record has")
    return parser.parse_intermixed_args()


def counted(done: Mapping[str, Any]) -> dict[str, int]:
    """Tests, or calls under a tool, that passed."""
    passed: Counter[str] = Counter()
    for result in done.values():
        passed[result["kind"]] += result["passed"]
    return dict(sorted(passed.items()))


def told(every: list[Step], done: Mapping[str, Any]) -> int:
    """Prints what there is to say in the end; the exit status."""
    left = [step.name for step in every if step.name not in done]
    failed = [step.name for step in every if done.get(step.name, {"exit": 0})["exit"] != 0]
    print(f"{len(every) - len(left) - len(failed)} of {len(every)} steps passed: {counted(done)}")
    print(f"failed: {', '.join(failed)}\n" * bool(failed) + f"left: {', '.join(left)}\n" * bool(left), end="")
    # a library that is not there has no tests
    without = {step.kind for step in every if not step.alone} - {kind for kind, n in counted(done).items() if n}
    if without and not left:
        print(f"nothing passed with {', '.join(sorted(without))}")
        return 1
    return 1 if failed else 3 if left else 0


def main() -> int:
    asked = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))
    cards = said("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines()
    commit = os.environ.get("COMMIT") or said("git", "rev-parse", "HEAD")
    record = json.loads(asked.record.read_text()) if asked.record.exists() else {}
    done: dict[str, Any] = record.get("steps", {}) if record.get("commit") == commit else {}
    seconds = record.get("seconds", {}) | {name: step["seconds"] for name, step in record.get("steps", {}).items()}
    every = [s for s in steps(asked.device) if not asked.only or any(fnmatch(s.name, o) for o in asked.only)]
    wanted = [step for step in every if done.get(step.name, {"exit": 1})["exit"] != 0]
    if asked.list:
        print("\n".join(f"{'left' if step in wanted else 'passed':7} {step.name}" for step in every))
        return 0
    if not cards:
        sys.exit("there is no GPU here: nvidia-smi names none")
    at_once = asked.at_once or max(1, min(14, (os.cpu_count() or 1) // len(cards)))
    for step, found in run(wanted, seconds, len(cards), at_once, asked.limit, asked.minutes):
        tries = done.get(step.name, {"tries": 0})["tries"] + 1
        done[step.name] = {"kind": step.kind} | found | {"card": cards[0], "tries": tries}
        seconds[step.name] = found["seconds"]
        whole = {"commit": commit, "device": asked.device, "date": time.strftime("%Y-%m-%d"), "passed": counted(done)}
        write(asked.record, whole | {"steps": dict(sorted(done.items())), "seconds": dict(sorted(seconds.items()))})
        print(f"{found['exit']:4} {found['seconds']:5} s  {step.name}: {found['says']}", flush=True)
    return told(every, done)


if __name__ == "__main__":
    sys.exit(main())
