"""The headers are the documentation of C: what they say by way of example runs."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from abi.building import run

import pykv
from pykv._tools.samples import FAMILIES

HEADERS = sorted(Path(pykv.get_include(), "pykv").glob("*.h"))


def example_of(header: Path) -> str | None:
    """The code below "Example" in the first comment."""
    about = header.read_text().split("*/")[0]
    found = re.search(r"^ \* Example.*:\n \*\n((?: \*   .*\n)+)", about, flags=re.MULTILINE)
    return found and re.sub(r"^ \* ", "", found[1], flags=re.MULTILINE)


def test_every_family_has_one() -> None:
    assert {h.stem for h in HEADERS if example_of(h)} >= {"base", *FAMILIES}


@pytest.mark.parametrize("header", [h for h in HEADERS if example_of(h)], ids=lambda h: h.stem)
def test_example(header: Path, tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    code = (
        f"#include <math.h>\n#include <pykv/kernels.h>\n#include <stdio.h>\nint main(void) {{\n{example_of(header)}}}\n"
    )
    (tmp_path / "example.c").write_text(code)
    library = next(Path(pykv.get_library_dir()).glob("libkernels.so.?"))
    options = ["-std=c99", "-Wall", "-Wextra", "-Werror", f"-I{pykv.get_include()}"]
    run("cc", *options, "example.c", library, f"-Wl,-rpath,{library.parent}", "-lm", "-o", "example", cwd=tmp_path)
    assert run(tmp_path / "example", cwd=tmp_path) == ""  # an error would be printed
