"""Writes all that follows from the operations: ``python tests/derived.py``, when one was added or changed.

- ``pykv/__init__.py``: the names that it imports, and ``__all__``
- ``pykv/_hints``: the types of the other forms, for type checkers
- ``pykv/_tools/expected``: what ``pykv check`` compares with
- ``src/kernels/exports.abi``: the C interface (docs/abi.md), where libabigail is installed and nothing is broken

It imports pykv, and so builds what changed where it is installed editable (CONTRIBUTING.md).
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import expected
from abi import interface
from hints import stubs

import pykv
from pykv._schema import all_ops

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pykv" / "__init__.py"


def by_module() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, op in all_ops().items():
        found.setdefault(op.function.__module__, set()).add(name)
    return found


def with_all_names(text: str) -> str:
    """``pykv/__init__.py`` with each operation among the names that it imports, and in ``__all__``."""
    lines = text.splitlines(keepends=True)
    exported = set(all_ops())
    for node in reversed(ast.parse(text).body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = sorted(exported | set(ast.literal_eval(node.value)))
            made = f"__all__ = {names!r}\n"
        elif isinstance(node, ast.ImportFrom) and node.module in by_module():
            names = sorted(by_module()[node.module] | {a.name for a in node.names})
            made = f"from {node.module} import ({', '.join(names)})\n"
        else:
            continue
        lines[node.lineno - 1 : node.end_lineno] = [made]
    return "".join(lines)


def ruff(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "ruff", *arguments], check=True, cwd=ROOT)


def write() -> None:
    PACKAGE.write_text(with_all_names(PACKAGE.read_text()))
    stubs.write()
    ruff("check", "-q", "--fix", "--select", "I,RUF022", PACKAGE, stubs.FOLDER)
    ruff("format", "-q", PACKAGE, stubs.FOLDER)
    expected.write()
    headers = Path(pykv.get_include())
    if shutil.which("abidw") is None:
        print("abidw (Debian: abigail-tools) is not installed: exports.abi stays as it was")
        return
    with tempfile.TemporaryDirectory() as folder:
        broken = interface.breaks(headers, Path(folder))
    if broken:
        print(f"The C interface is broken, and exports.abi stays as it was: see docs/abi.md\n{broken}")
    else:
        interface.record(headers)


if __name__ == "__main__":
    write()
