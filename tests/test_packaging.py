"""Release wheels: the library on its own, and the small wheels that require it."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import pykv

ROOT = Path(__file__).parent.parent
PLATFORM = "manylinux_2_28_x86_64"
METADATA = """\
Metadata-Version: 2.4
Name: pykv
Version: 0.1.0
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Dist: numpy>=1.24

A description
"""


def wheel(folder: Path, python: str, library: str = "library", platform: str = PLATFORM) -> Path:
    path = folder / f"pykv-0.1.0-{python}-{python}-{platform}.whl"
    info = "pykv-0.1.0.dist-info/"
    with zipfile.ZipFile(path, "w") as out:
        out.writestr("pykv/", "")
        out.writestr("pykv/__init__.py", "")
        out.writestr(f"pykv/_C.{python}.so", python)
        out.writestr("pykv/lib/libkernels.so.0", library)
        out.writestr("pykv/lib/pkgconfig/pykv.pc", "pc")
        out.writestr("pykv/include/pykv/kernels.h", "header")
        out.writestr(info + "METADATA", METADATA)
        out.writestr(info + "WHEEL", f"Wheel-Version: 1.0\nTag: {python}-{python}-{platform}\n")
        out.writestr(info + "licenses/LICENSE", "license")
        out.writestr(info + "RECORD", "old")
    return path


def split(out: Path, *wheels: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "packaging" / "split_wheels.py", *wheels, "--out", out]
    return subprocess.run(command, capture_output=True, text=True)


def read(path: Path) -> dict[str, bytes]:
    """Contents of a wheel whose RECORD is right."""
    with zipfile.ZipFile(path) as opened:
        contents = {name: opened.read(name) for name in opened.namelist()}
    (record,) = [name for name in contents if name.endswith(".dist-info/RECORD")]
    lines = [line.split(",") for line in contents[record].decode().splitlines()]
    assert [name for name, *_ in lines] == list(contents)
    for name, digest, size in lines[:-1]:
        made = base64.urlsafe_b64encode(hashlib.sha256(contents[name]).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={made}", str(len(contents[name])))
    assert lines[-1] == [record, "", ""]
    return contents


def test_split(tmp_path: Path) -> None:
    done = split(tmp_path / "dist", wheel(tmp_path, "cp310"), wheel(tmp_path, "cp313"))
    assert done.returncode == 0, done.stderr
    kernels = f"pykv_kernels-0.1.0-py3-none-{PLATFORM}.whl"
    bindings = [f"pykv-0.1.0-{python}-{python}-{PLATFORM}.whl" for python in ("cp310", "cp313")]
    assert sorted(p.name for p in (tmp_path / "dist").iterdir()) == sorted([kernels, *bindings])

    library = read(tmp_path / "dist" / kernels)
    assert library["pykv_kernels/lib/libkernels.so.0"] == b"library"
    assert library["pykv_kernels/include/pykv/kernels.h"] == b"header"
    assert not [name for name in library if name.startswith("pykv/")]
    info = "pykv_kernels-0.1.0.dist-info/"
    about = Parser().parsestr(library[info + "METADATA"].decode())
    assert (about["Name"], about["Version"], about["License-File"]) == ("pykv-kernels", "0.1.0", "LICENSE")
    assert library[info + "licenses/LICENSE"] == b"license"
    assert f"Tag: py3-none-{PLATFORM}\n" in library[info + "WHEEL"].decode()

    extension = read(tmp_path / "dist" / bindings[1])
    assert extension["pykv/_C.cp313.so"] == b"cp313"
    assert not [name for name in extension if "kernels" in name]
    about = Parser().parsestr(extension["pykv-0.1.0.dist-info/METADATA"].decode())
    assert about.get_all("Requires-Dist") == ["numpy>=1.24", "pykv-kernels==0.1.0"]
    assert "A description" in about.get_payload()


@pytest.mark.parametrize(
    ("other", "message"),
    [({"library": "another"}, "differ in pykv/lib/libkernels.so.0"), ({"platform": "linux_x86_64"}, "another version")],
)
def test_wheels_that_do_not_belong_together(tmp_path: Path, other: dict[str, str], message: str) -> None:
    done = split(tmp_path / "dist", wheel(tmp_path, "cp310"), wheel(tmp_path, "cp313", **other))
    assert done.returncode == 2
    assert message in done.stderr


def test_one_version_everywhere() -> None:
    for path, pattern in {
        "pyproject.toml": r'^version = "(.+)"$',
        "CMakeLists.txt": r"^project\(pykv VERSION (\S+) ",
        "packaging/conda/recipe.yaml": r'^  version: "(.+)"$',
    }.items():
        assert re.findall(pattern, (ROOT / path).read_text(), flags=re.MULTILINE) == [pykv.__version__], path
    header = (Path(pykv.get_include()) / "pykv" / "base.h").read_text()
    assert ".".join(re.findall(r"#define PYKV_VERSION_\w+ (\d+)", header)) == pykv.__version__
