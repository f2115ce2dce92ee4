"""Calls that are shown: ``pykv.dispatch.log`` and ``PYKV_LOG``."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import pykv
import pykv.functional
from pykv._schema import all_ops

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def quiet():
    yield
    pykv.dispatch.log("")


def arrays(*, rows: int = 2):
    return np.zeros((rows, 8), np.float32), np.ones((rows, 8), np.float32), np.ones(8, np.float32)


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    found = {"PYTHONPATH": ":".join(sys.path), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=os.environ | found | environment, capture_output=True, text=True, check=False)


ARRAYS = "out=float32[2, 8] cpu, input=float32[2, 8] cpu, weight=float32[8] cpu"


def test_a_line_for_each_call(capfd, monkeypatch):
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    pykv.dispatch.log("stderr")
    out, x, weight = arrays()
    pykv.rms_norm(out, x, weight, 1e-5)
    assert (out != 0).all()
    pykv.rms_norm(out, x, None, stream=None)
    pykv.functional.relu2(x)
    pykv.dispatch.log("")
    pykv.rms_norm(out, x, weight)
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"pykv.rms_norm({ARRAYS}, epsilon=1e-05, stream=current)"
    assert "weight=None" in lines[1]
    assert lines[2].startswith("pykv.relu2(")
    assert len(lines) == 3


def test_a_call_that_is_refused_is_shown_and_refused(tmp_path):
    file = tmp_path / "calls"
    pykv.dispatch.log(str(file))
    out, x, weight = arrays()
    with pytest.raises(ValueError, match="weight"):
        pykv.rms_norm(out, x, weight[:3])
    assert "weight=float32[3] cpu" in file.read_text()


def test_lists_and_streams(tmp_path):
    file = tmp_path / "calls"
    pykv.dispatch.log(str(file))
    caches = [np.zeros((2, 3), np.float32) for _ in range(2)]
    pykv.copy_blocks(caches, caches, np.array([[0, 1]], np.int64))
    assert "2 x float32[2, 3] cpu" in file.read_text()


def test_calls_of_what_others_registered_are_shown(tmp_path):
    file = tmp_path / "calls"
    seen = []
    pykv.dispatch.log(str(file))
    pykv.dispatch.register("rms_norm", "mine")(lambda *args, **kwargs: seen.append(args))
    try:
        pykv.rms_norm(*arrays())
    finally:
        pykv.dispatch.unregister("rms_norm", "mine")
    pykv.rms_norm(*arrays())
    assert len(seen) == 1
    assert len(file.read_text().splitlines()) == 2


def test_nvtx(monkeypatch):
    events = []

    @contextlib.contextmanager
    def annotate(name, domain):
        events.append(f"{domain}: {name}")
        yield
        events.append("end")

    monkeypatch.setitem(sys.modules, "nvtx", types.SimpleNamespace(annotate=annotate))
    pykv.dispatch.log("nvtx")
    pykv.rms_norm(*arrays())
    assert events == ["pykv: pykv.rms_norm", "end"]
    monkeypatch.setitem(sys.modules, "nvtx", None)
    with pytest.raises(ValueError, match="pip install nvtx"):
        pykv.dispatch.log("nvtx")


def test_nvtx_itself(tmp_path):
    """Its own package, and what a profiler is told by it."""
    pytest.importorskip("nvtx")
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("no C compiler")
    library = tmp_path / "ranges.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, HERE / "nvtx_ranges.c"], check=True)
    code = "import numpy as np, pykv; x = np.ones((1, 8), np.float32)"
    code += "; pykv.relu2(x.copy(), x); pykv.gelu_new(x.copy(), x)"
    done = python(code, PYKV_LOG="nvtx", NVTX_INJECTION64_PATH=str(library))
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith(("domain", "pykv"))]
    assert told == ["domain pykv", *("pykv: push pykv.relu2", "pykv: pop"), *("pykv: push pykv.gelu_new", "pykv: pop")]


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch says so where it has CUDA
def test_the_profiler_of_torch_sees_calls_and_those_of_the_registered_form():
    torch = pytest.importorskip("torch")
    importlib.import_module("pykv.torch")
    out, x, weight = (torch.from_numpy(a) for a in arrays())
    pykv.dispatch.log("torch")
    with torch.profiler.profile() as profile:
        pykv.rms_norm(out, x, weight)
        torch.ops.pykv.rms_norm(out, x, weight)
    (event,) = [e for e in profile.key_averages() if e.key == "pykv.rms_norm"]
    assert event.count == 2


@pytest.mark.parametrize(
    ("to", "message"),
    [("nvxt", "got 'nvxt'"), ("stderr,./file", "lines go to one place, got stderr and ./file")],
)
def test_wrong_entries(to, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        pykv.dispatch.log(to)
    assert not list(tmp_path.iterdir())


def test_without_it_calls_know_nothing_of_it(monkeypatch):
    """Routes are what calls look at: none is left."""
    routes = []
    op = all_ops()["rms_norm"]
    function = types.SimpleNamespace(route=routes.append)
    known = types.SimpleNamespace(name=op.name, direct=op.direct, function=function)
    ours = pykv.dispatch.Implementation("pykv", op.direct, frozenset(pykv.dispatch.PLATFORMS), 0)
    choices = {op.name: pykv.dispatch._Choice(known, [ours])}
    monkeypatch.setattr(pykv.dispatch, "_choices", lambda: choices)
    monkeypatch.setattr(pykv.dispatch, "_watchers", [])
    pykv.dispatch.log("stderr")
    pykv.dispatch.log("")
    assert [route is None for route in routes] == [False, True]


def test_the_environment_says_so(tmp_path):
    file = tmp_path / "calls.txt"
    code = "import numpy as np, pykv; pykv.relu2(np.zeros((1, 8)), np.ones((1, 8)))"
    code = code.replace("1, 8)", "1, 8), np.float32")
    done = python(code, PYKV_LOG=str(file))
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "pykv.relu2(out=float32[1, 8] cpu, input=float32[1, 8] cpu, stream=current)\n"
