"""``python -m pykv``, on the CPU."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import pykv
from pykv import _C
from pykv._cli import info, output
from pykv._cli.main import main


@pytest.fixture
def no_rich(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)


def test_the_module_runs():
    done = subprocess.run(
        [sys.executable, "-m", "pykv"],
        env={"PYTHONPATH": ":".join(sys.path), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "the following arguments are required: command" in done.stderr


@pytest.mark.parametrize("rich", [True, False])
def test_info(capsys, request, monkeypatch, rich):
    if rich:
        pytest.importorskip("rich")
    else:
        request.getfixturevalue("no_rich")
    monkeypatch.setattr(info, "FRAMEWORKS", info.FRAMEWORKS[:1])
    assert main(["info"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert pykv.__version__ in text
    assert f"kernels for {_C.cpu_isa()}" in text
    assert np.__version__ in text
    assert "ndarray struct" in text


def test_what_is_not_installed_is_not_imported(monkeypatch):
    monkeypatch.setattr(info, "FRAMEWORKS", (("none", ("no-such-distribution",), "no_such_module:Array"),))
    assert next(info.frameworks()) == ("none", "-", "not installed")


def test_a_framework_that_cannot_be_imported_is_told():
    assert info.way_in("no_such_module:Array").startswith("cannot be imported: ModuleNotFoundError")


def test_way_in_is_the_one_that_calls_take():
    class Exported:
        def __dlpack__(self):
            pass

    class Cuda:
        __cuda_array_interface__ = None

    ways = [_C.way_in(kind) for kind in (np.ndarray, _C.Pointer, Exported, Cuda, dict)]
    assert ways == ["ndarray struct", "raw pointer", "__dlpack__", "__cuda_array_interface__", ""]


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["what"])
    assert "invalid choice: 'what'" in capsys.readouterr().err


def test_plain_tables_line_up(capsys, no_rich):
    output.show("title", ("op", "us"), [("a", "1"), ("long", "10")], right=1)
    assert capsys.readouterr().out == "title\nop    us\n----  --\na      1\nlong  10\n"
