"""The runner of what a GPU has to show (gpu.py), here without one: it believes no step by its exit status alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CARD = "A card, 1.2"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder of programs that stand for those of a machine with a GPU."""
    folder = tmp_path / "programs"
    folder.mkdir()
    texts = {
        "nvidia-smi": f"echo '{CARD}'",
        "compute-sanitizer": 'while [ "$1" != --tool ]; do shift; done; tool=$2; shift 2; "$@" || exit\n'
        '[ "$tool" = racecheck ] && echo "RACECHECK SUMMARY: 0 hazards displayed" || echo "ERROR SUMMARY: 0 errors"',
    }
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture
def call(programs: Path, tmp_path: Path):
    def call(*arguments: str, program: str | None = None, commit: str = "abc"):
        environment = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}", "COMMIT": commit, "PYTHONPATH": ":".join(sys.path),
        }  # fmt: skip
        command = [sys.executable, *(["-c", program] if program else [str(HERE / "gpu.py")]), "record.json", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        file = tmp_path / "record.json"
        return done, json.loads(file.read_text()) if file.exists() else None

    return call


def of(**commands: str) -> str:
    """gpu.py with these steps: programs of Python by name, of tests with an array library."""
    steps = ", ".join(
        f"gpu.Step('cupy', {name!r}, [sys.executable, '-c', {text!r}], (gpu.ENDED,))" for name, text in commands.items()
    )
    return (
        f"import sys; sys.path.insert(0, {str(HERE)!r}); import gpu; from pathlib import Path\n"
        f"gpu.LOGS = Path('logs'); gpu.steps = lambda device: iter([{steps}])\nsys.exit(gpu.main())"
    )


def test_steps_of_the_cpu_pass_and_are_not_made_again(call):
    wanted = ("--device", "cpu", "embedding/numpy", "embedding/other", "*check/embedding")
    done, record = call(*wanted)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(record["steps"]) == {"embedding/numpy", "embedding/other"} | {
        f"{tool}/embedding" for tool in ("memcheck", "racecheck", "initcheck", "synccheck")
    }
    assert {step["exit"] for step in record["steps"].values()} == {0}
    assert {step["card"] for step in record["steps"].values()} == {CARD}
    assert record["commit"] == "abc"
    assert all(record["passed"][kind] > 0 for kind in ("numpy", "memcheck", "racecheck"))
    again, _ = call(*wanted)
    assert again.returncode == 0
    assert "6 of 6 steps passed" in again.stdout
    assert " s  " not in again.stdout
    listed, _ = call(*wanted, "--list", commit="def")
    assert listed.stdout.count("left    ") == 6


def test_every_folder_and_operation_is_reached(call):
    listed, _ = call("--list")
    names = {line.removeprefix("left    ") for line in listed.stdout.splitlines() if line.startswith("left    ")}
    names -= {"cli", "examples of C and C++"}
    folders = {p.parent.name for p in HERE.glob("*/test_*.py")} - {"abi", "fuzz", "hints"}
    assert {name.split("/")[0] for name in names} == folders | {"memcheck", "racecheck", "initcheck", "synccheck"}
    assert {
        "attention/cupy/1of6",
        "attention/jax/6of6",
        "attention/other/2of2",
        "norm/interface/2of2",
        "interop/other/4of4",
    } <= names


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [
        ("print('3 passed in 1 s')", 0, "3 passed in 1 s"),
        ("print('nothing to see')", 1, "the log lacks"),
        ("print('1 failed, 3 passed in 1 s'); raise SystemExit(1)", 1, "1 failed, 3 passed in 1 s"),
        ("print('3 passed in 1 s'); raise SystemExit(5)", 5, "3 passed in 1 s"),
        ("import os; print('3 passed in 1 s', flush=True); os.abort()", -6, "3 passed in 1 s"),
    ],
)
def test_a_step_shows_that_it_passed(call, text, status, says):
    done, record = call(program=of(step=text))
    assert done.returncode == (1 if status else 0), done.stdout + done.stderr
    assert record["steps"]["step"]["exit"] == status
    assert says in record["steps"]["step"]["says"]
    assert ("log" in record["steps"]["step"]) == bool(status)
    assert ("failed: step" in done.stdout) == bool(status)


def test_a_library_without_a_test_that_passed_fails(call):
    done, record = call(program=of(step="print('3 skipped in 1 s')"))
    assert done.returncode == 1
    assert record["steps"]["step"]["exit"] == 0
    assert "nothing passed with cupy" in done.stdout


def test_what_hangs_is_stopped_with_what_it_started(call, tmp_path):
    child = f"import time; time.sleep(4); open({str(tmp_path / 'alive')!r}, 'w')"
    hangs = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(99)"
    began = time.monotonic()
    done, record = call("--limit", "1", program=of(hangs=hangs, good="print('1 passed')"))
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert record["steps"]["hangs"]["exit"] == 124
    assert record["steps"]["good"]["exit"] == 0
    time.sleep(max(0.0, 6 - (time.monotonic() - began)))
    assert not (tmp_path / "alive").exists()


def test_what_the_time_does_not_suffice_for_is_left_and_made_the_next_time(call):
    steps = {"slow": "import time; time.sleep(3); print('1 passed')", "good": "print('1 passed')"}
    done, record = call("--minutes", "0.025", "--at-once", "2", program=of(**steps))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "left: slow" in done.stdout
    assert set(record["steps"]) == {"good"}
    done, record = call("--at-once", "2", program=of(**steps))
    assert done.returncode == 0
    assert {name: step["tries"] for name, step in record["steps"].items()} == {"good": 1, "slow": 1}
    # the longest first, by a record of another commit; none that the time does not suffice for
    done, record = call("--at-once", "1", program=of(**steps), commit="def")
    assert done.stdout.index(" slow:") < done.stdout.index(" good:")
    done, record = call("--minutes", "0.04", "--at-once", "1", program=of(**steps), commit="ghi")
    assert set(record["steps"]) == {"good"}
    assert set(record["seconds"]) == {"good", "slow"}
