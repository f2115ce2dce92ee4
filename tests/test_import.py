"""Where an import of pykv cannot work, it says why."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pykv import _C

ROOT = Path(__file__).parent.parent


def test_python_started_in_the_clone_is_told(tmp_path: Path) -> None:
    """There the source folder comes before the installed package; -I and -S keep out what makes it an editable one."""
    shutil.copytree(ROOT / "pykv", tmp_path / "pykv", ignore=shutil.ignore_patterns("*.so*", "__pycache__", "lib"))
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pykv"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path}/pykv is the source folder of pykv and has no compiled part")
    assert last.endswith("start it in another folder")


def test_the_extension_exports_its_entries_alone() -> None:
    """What it exported of a static libstdc++ took the place of the shared one's, and torch's import crashed."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("no nm")
    table = subprocess.run([nm, "-D", "--defined-only", _C.__file__], capture_output=True, text=True, check=True).stdout
    strong = [name for _, kind, name in (line.split() for line in table.splitlines()) if kind in "TDBR"]
    assert [name for name in strong if not name.startswith("PyInit__C")] == []


def test_torch_can_be_imported_after_pykv(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", "import pykv, torch; print(torch.device('cpu'))"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (ran.returncode, ran.stdout.strip()[-3:]) == (0, "cpu"), ran.stderr[-2000:]


def test_a_subinterpreter_gets_an_import_error(tmp_path: Path) -> None:
    """It hung for ever.  In a process of its own: subinterpreters leave traces."""
    program = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import {first}
other = interpreters.create()
told = interpreters.run_string(other, '''
try:
    from importlib import machinery, util
    loader = machinery.ExtensionFileLoader("pykv._C", {file!r})
    util.module_from_spec(util.spec_from_file_location("pykv._C", {file!r}, loader=loader))
except ImportError as error:
    print("ImportError:", error, flush=True)
''')
assert told is None, told
"""
    for first in ("sys", "pykv"):
        command = [sys.executable, "-c", program.format(first=first, file=_C.__file__)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
        assert "ImportError: " in ran.stdout, ran.stdout + ran.stderr
        assert "interpreter" in ran.stdout


def test_daemon_threads_in_calls_let_the_process_end(tmp_path: Path) -> None:
    """Python 3.11 ended them by unwinding their stacks, which C++ answered with an abort."""
    program = """
import threading, time, numpy as np, pykv
def loop():
    x = np.ones((64, 4096), np.float32)
    out = np.empty_like(x)
    while True:
        pykv.rms_norm(out, x, None)
for _ in range(4):
    threading.Thread(target=loop, daemon=True).start()
time.sleep(0.2)
"""
    for _ in range(3):
        command = [sys.executable, "-c", program]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
        assert ran.returncode == 0, ran.stderr
