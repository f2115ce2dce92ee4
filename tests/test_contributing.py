"""CONTRIBUTING.md's example of a new operation: what is written by hand, and that all else follows."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "docs" / "adding_an_operation.diff"
NOT_SOURCE = shutil.ignore_patterns("build", ".*", "__pycache__", "*.so", "results")
TOOLS = [tool for tool in ("cmake", "git", "g++", "ninja") if shutil.which(tool) is None]
MODULES = [name for name in ("pybind11", "ruff", "tvm_ffi") if importlib.util.find_spec(name) is None]
# the tests that ask something of every operation or family
CHECKS = ["test_contract.py", "test_dependencies.py", "test_readme.py", "activation/test_soft_cap.py"]


def touched() -> list[str]:
    return re.findall(r"^\+\+\+ b/(.+)$", EXAMPLE.read_text(), flags=re.MULTILINE)


def test_at_most_ten_files_are_written_by_hand() -> None:
    assert len(touched()) <= 10


def test_the_table_has_each_of_them() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("| Place | What |") : text.index("The rest follows")]
    named = {"family": "activation", "stem": "soft_cap"}
    places = re.sub(r"<(family|stem)>", lambda m: named[m[1]], table)
    folder = "src/kernels/activation/"
    assert set(touched()) == {
        folder + place if place.startswith("soft_cap") else place
        for place in re.findall(r"`((?:[\w/]+/)?\w+\.(?:h|cc|cu|py|md))`", places)
    } - {"pykv/_schema.py"}


@pytest.mark.skipif(bool(TOOLS or MODULES), reason=f"there is no {', no '.join([*TOOLS, *MODULES])}")
def test_it_builds_and_passes(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(ROOT, tree, ignore=NOT_SOURCE)

    def run(*command: str | Path, **environment: str) -> str:
        done = subprocess.run(
            command, cwd=tree, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    run("git", "apply", "-C1", EXAMPLE)
    # What ccache has of the build of this tree is taken, if compiler, flags and the depth of the folder are the same.
    options = ["-GNinja", "-DCMAKE_BUILD_TYPE=Release", "-DPYKV_PYTHON=ON", "-DPYKV_CUDA=OFF"]
    options.append(f"-DPYKV_WERROR={os.environ.get('PYKV_WERROR', 'OFF')}")
    if shutil.which("ccache") is None:
        options.append("-DPYKV_ONE_ISA=base")
    pybind11 = run(sys.executable, "-m", "pybind11", "--cmakedir").strip()
    run("cmake", "-S.", "-Bbuild/tree", *options, f"-Dpybind11_DIR={pybind11}", f"-DPython_EXECUTABLE={sys.executable}",
        CXX="g++")  # fmt: skip
    run("cmake", "--build", "build/tree")
    run("cmake", "--install", "build/tree", "--prefix", "pykv")
    # -S: an editable installation of pykv would come first
    path = ":".join([str(tree), str(tree / "tests"), *filter(None, sys.path)])
    python = [sys.executable, "-S"]
    run(*python, "tests/derived.py", PYTHONPATH=path)
    assert "2 passed, 0 failed" in run(*python, "-m", "pykv", "check", "soft_cap", "--device", "cpu", PYTHONPATH=path)
    checks = [tree / "tests" / name for name in CHECKS]
    run(*python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "cpu", *checks, PYTHONPATH=path)
