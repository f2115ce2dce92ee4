"""Type checkers and a user's programs."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shutil
import site
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hints import stubs

import pykv
from pykv._schema import Op, all_ops
from pykv._tools.samples import sample

HERE = Path(__file__).parent
NEEDS = {"program_torch.py": "torch", "program_jax.py": "jax"}
PROGRAMS = sorted([*HERE.glob("program*.py"), HERE / "mistakes.py"])
INSTALLED = Path(pykv.__file__).parent.parent


Errors = dict[str, dict[int, str]]  # file -> line -> the first of it


def by_mypy(folder: Path, files: list[str]) -> Errors:
    options = ["--strict", "--hide-error-context", "--no-pretty", f"--cache-dir={folder / 'cache'}"]
    told = _python("mypy", *options, *files, cwd=folder)
    return _first_errors(re.findall(r"^(\w+\.py):(\d+): error: (.*)", told, flags=re.MULTILINE))


def by_pyright(folder: Path, files: list[str]) -> Errors:
    settings = {"typeCheckingMode": "strict", "extraPaths": [str(INSTALLED)]}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    told = _python("pyright", "--outputjson", "--pythonpath", sys.executable, *files, cwd=folder)
    found = json.loads(told[told.index("{") :])
    assert found["summary"]["filesAnalyzed"] == len(files), told
    errors = [
        (Path(d["file"]).name, d["range"]["start"]["line"] + 1, d["message"]) for d in found["generalDiagnostics"]
    ]
    return _first_errors(errors)


CHECKERS = {"mypy": by_mypy, "pyright": by_pyright}


def _python(module: str, *arguments: str, cwd: Path) -> str:
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    if str(INSTALLED) not in site.getsitepackages():  # which mypy knows
        environment["MYPYPATH"] = str(INSTALLED)
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


def _first_errors(told: list[tuple[str, str, str]]) -> Errors:
    found: Errors = {}
    for file, line, message in told:
        found.setdefault(file, {}).setdefault(int(line), message)
    return found


def call_of(op: Op, prefix: str, left_out: set[str]) -> str:
    def written(value: object) -> str:
        if isinstance(value, np.ndarray):
            return "array"
        return "[array]" if isinstance(value, list) else repr(value)

    given = [f"{name}={written(v)}" for name, v in sample(op.name).items() if name not in left_out]
    return f"{prefix}.{op.name}({', '.join(given)})"


def every_operation() -> str:
    """Calls each in both of its forms, by keyword, and names all that the package has."""
    lines = ["import numpy as np", "import numpy.typing as npt", "import pykv", "import pykv.functional"]
    lines += ["def program(array: npt.NDArray[np.float32]) -> None:"]
    lines += [f"    print(pykv.{name})" for name in pykv.__all__]
    for op in all_ops().values():
        lines.append("    " + call_of(op, "pykv", set()))
        if op.rules:
            lines.append(f"    print({call_of(op, 'pykv.functional', set(op.rules))})")
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="module", params=sorted(CHECKERS))
def checked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Errors]:
    """All programs in a folder away from the sources, and what a checker says of them; in one run, for it is slow."""
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    for path in PROGRAMS:
        if path.name not in NEEDS or importlib.util.find_spec(NEEDS[path.name]):
            shutil.copy(path, folder)
    (folder / "every.py").write_text(every_operation())
    return folder, CHECKERS[request.param](folder, sorted(path.name for path in folder.glob("*.py")))


@pytest.mark.parametrize("name", [*(path.name for path in PROGRAMS), "every.py"])
def test_what_is_wrong_is_refused_and_nothing_else(checked: tuple[Path, Errors], name: str) -> None:
    folder, errors = checked
    if not (folder / name).exists():
        pytest.skip(f"{NEEDS[name]} is not installed")
    lines = (folder / name).read_text().splitlines()
    expected = {i for i, line in enumerate(lines, 1) if "# wrong" in line}
    found = errors.get(name, {})
    assert set(found) == expected, {lines[i - 1]: found.get(i, "not refused") for i in expected ^ set(found)}


def declarations(text: str) -> list[str]:
    return [ast.dump(node) for node in ast.parse(text).body if isinstance(node, (ast.FunctionDef, ast.ImportFrom))]


@pytest.mark.parametrize("name", sorted(stubs.STUBS))
def test_stubs_are_those_of_the_operations(name: str) -> None:
    """Else: python tests/derived.py"""
    if name == "jax":
        pytest.importorskip("jax")
    shipped = (Path(pykv.__file__).parent / "_hints" / f"{name}.pyi").read_text()
    assert sorted(declarations(shipped)) == sorted(declarations(stubs.STUBS[name]()))  # ruff has an order of its own


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(pykv.__file__).parent / "py.typed").exists()
