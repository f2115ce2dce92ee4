"""The code that documents show: every fenced block is run, or says above itself why not.

A comment in the line above a fence says how:

``<!-- needs: torch -->``   where that module is installed
``<!-- cupy -->``           with NumPy in the place of CuPy
``<!-- gpu -->``            compiled, and not run, for it needs a GPU
``<!-- given: ... -->``     a piece of C or C++, compiled behind these declarations
``<!-- not run: why -->``   not run here

The Python blocks of a page share their names, as in a notebook.  C and C++ with a ``main`` is a program that must exit
with 0, and a block of CMake builds the first program of its page.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
LANGUAGES = {"python", "c", "cpp", "sh", "cmake", "toml"}
MARKS = ("needs: ", "cupy", "gpu", "given: ", "not run: ", "main job", "tests")  # the last two: .ci/run runs them


@dataclass(frozen=True)
class Block:
    page: Path
    line: int  # of the fence
    language: str
    mark: str
    code: str

    def after(self, mark: str) -> str | None:
        """What stands behind a mark, if the block has it."""
        return self.mark.removeprefix(mark) if self.mark.startswith(mark) else None


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[Block]:
    text = page.read_text()
    found = []
    for fence in re.finditer(r"^(?:<!-- (.+?) -->\n)?^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        line = text.count("\n", 0, fence.start(2)) + 1
        found.append(Block(page, line, fence[2], fence[1] or "", fence[3]))
    return [b for b in found if not languages or b.language in languages]


def pages_with(*languages: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, *languages)]


class Missing(Exception):
    """A page needs a module that is not installed."""


def run_python(page: Path) -> dict[str, Any]:
    """Runs the page's blocks, one after the other; what they leave."""
    scope: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page, "python"):
        source = block.code.replace("import cupy as cp", "import numpy as cp") if block.mark == "cupy" else block.code
        # errors name the line of the page
        code = compile("\n" * block.line + source, page, "exec", dont_inherit=True)
        if block.after("not run: ") or block.mark == "gpu":
            continue
        if module := block.after("needs: "):
            try:
                importlib.import_module(module)
            except ImportError:
                raise Missing(module) from None
        exec(code, scope)
    return scope


def as_program(block: Block) -> str:
    """A piece of C or C++ as a whole file: what it includes, then a function of the rest behind what is given."""
    given = block.after("given: ")
    if given is None:
        return block.code
    lines = block.code.splitlines()
    includes = [line for line in lines if line.startswith("#include")]
    rest = [line for line in lines if not line.startswith("#include")]
    extra = ["#include <stdio.h>"] if block.language == "c" else []
    return "\n".join([*extra, *includes, f"void piece({given}) {{", *rest, "}", ""])
