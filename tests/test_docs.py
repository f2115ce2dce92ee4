"""What the documents show runs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from abi.building import build, run
from documents import LANGUAGES, MARKS, PAGES, ROOT, Block, Missing, as_program, blocks, name_of, pages_with, run_python

import pykv
from pykv._schema import all_ops
from pykv._tools.samples import ADDRESSED

sys.path.insert(0, str(ROOT / "docs"))
from samples import example

PROGRAMS = [b for page in PAGES for b in blocks(page, "c", "cpp") if not b.after("not run: ")]
COMPILERS = {"c": ("cc", "-std=c11", "-Wno-unused"), "cpp": ("c++", "-std=c++17")}


def ids(found: list[Block]) -> list[str]:
    return [f"{name_of(b.page)}:{b.line}" for b in found]


def test_every_block_says_what_it_is() -> None:
    found = [b for page in PAGES for b in blocks(page)]
    assert len(found) > 20
    unknown = [
        f"{name_of(b.page)}:{b.line}: {b.language} {b.mark}"
        for b in found
        if b.language not in LANGUAGES or (b.mark and not b.mark.startswith(MARKS))
    ]
    assert not unknown


@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_python(page: Path) -> None:
    try:
        run_python(page)
    except Missing as missing:
        pytest.skip(f"{missing} is not installed")


@pytest.mark.parametrize("block", PROGRAMS, ids=ids(PROGRAMS))
def test_c_and_cpp(block: Block, tmp_path: Path) -> None:
    command = COMPILERS[block.language]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    source = tmp_path / f"program.{block.language}"
    source.write_text(as_program(block))
    options = ["-Wall", "-Wextra", "-Werror", f"-I{pykv.get_include()}", source]
    if "main(" not in block.code:
        assert block.after("given: "), "neither a program, nor a piece that says what is given"
        run(*command, *options, "-fsyntax-only", cwd=tmp_path)
        return
    library = next(Path(pykv.get_library_dir()).glob("libkernels.so.?"))
    run(*command, *options, library, f"-Wl,-rpath,{library.parent}", "-lm", "-o", "program", cwd=tmp_path)
    run(tmp_path / "program", cwd=tmp_path)


@pytest.mark.parametrize("page", pages_with("cmake"), ids=name_of)
def test_cmake(page: Path, tmp_path: Path) -> None:
    (lists,) = blocks(page, "cmake")
    program = next(b for b in blocks(page, "c", "cpp") if "main(" in b.code)
    (tmp_path / "CMakeLists.txt").write_text(lists.code)
    (tmp_path / f"main.{program.language}").write_text(program.code)
    run(build(tmp_path, tmp_path) / "engine", cwd=tmp_path)


@pytest.mark.parametrize("page", pages_with("sh"), ids=name_of)
def test_shell(page: Path, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONSAFEPATH": "1",
    }
    for program in (b for b in blocks(page, "c", "cpp") if "main(" in b.code):
        (tmp_path / f"main.{program.language}").write_text(program.code)
    for block in blocks(page, "sh"):
        if block.mark:
            continue
        if "pkg-config" in block.code and shutil.which("pkg-config") is None:
            pytest.skip("pkg-config is not installed")
        done = subprocess.run(
            ["bash", "-euc", block.code], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{name_of(page)}:{block.line}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("name", sorted(all_ops()))
def test_examples_of_the_operations(name: str) -> None:
    program = example(all_ops()[name])
    assert (program is None) == (name in ADDRESSED)
    if program:
        exec(program, {})


def test_every_variable_is_on_its_page() -> None:
    """What Python, C++, Rust and the build ask of the environment, and the options of CMake."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    tops = {"CMakeLists.txt", "cmake", "packaging", "pykv", "rust", "src"}
    paths = [ROOT / name for name in listed.stdout.splitlines() if name.split("/")[0] in tops]
    asking = (
        r"option\((PYKV_\w+)|set\((PYKV_\w+) \S* CACHE|(?:getenv\(|environ\.get\(|environ\[|env::var\()\"(PYKV_\w+)"
    )
    texts = [p.read_text() for p in paths if p.suffix in (".cc", ".cmake", ".cu", ".h", ".py", ".rs", ".txt")]
    found = {name for text in texts for names in re.findall(asking, text) for name in names if name}
    assert {"PYKV_CHECK", "PYKV_ISA", "PYKV_OPS", "PYKV_CUDA", "PYKV_SANITIZE", "PYKV_LIBRARY_DIR"} <= found
    page = (ROOT / "docs" / "environment.md").read_text()
    assert not {name for name in found if f"`{name}`" not in page}
