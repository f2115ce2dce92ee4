"""Release wheels: the library on its own, and the small wheels that require it."""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import pykv

ROOT = Path(__file__).parent.parent
PLATFORM = "manylinux_2_28_x86_64"
METADATA = """\
Metadata-Version: 2.4
Name: pykv-kernels
Version: 0.1.0
License-Expression: Apache-2.0
License-File: LICENSE
Requires-Dist: numpy>=1.24

A description
"""


def wheel(folder: Path, python: str, library: str = "library", platform: str = PLATFORM) -> Path:
    path = folder / f"pykv_kernels-0.1.0-{python}-{python}-{platform}.whl"
    info = "pykv_kernels-0.1.0.dist-info/"
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
    kernels = f"pykv_libkernels-0.1.0-py3-none-{PLATFORM}.whl"
    bindings = [f"pykv_kernels-0.1.0-{python}-{python}-{PLATFORM}.whl" for python in ("cp310", "cp313")]
    assert sorted(p.name for p in (tmp_path / "dist").iterdir()) == sorted([kernels, *bindings])

    library = read(tmp_path / "dist" / kernels)
    assert library["pykv_libkernels/lib/libkernels.so.0"] == b"library"
    assert library["pykv_libkernels/include/pykv/kernels.h"] == b"header"
    assert not [name for name in library if name.startswith("pykv/")]
    info = "pykv_libkernels-0.1.0.dist-info/"
    about = Parser().parsestr(library[info + "METADATA"].decode())
    assert (about["Name"], about["Version"], about["License-File"]) == ("pykv-libkernels", "0.1.0", "LICENSE")
    assert library[info + "licenses/LICENSE"] == b"license"
    assert f"Tag: py3-none-{PLATFORM}\n" in library[info + "WHEEL"].decode()

    extension = read(tmp_path / "dist" / bindings[1])
    assert extension["pykv/_C.cp313.so"] == b"cp313"
    assert not [name for name in extension if "libkernels" in name]
    about = Parser().parsestr(extension["pykv_kernels-0.1.0.dist-info/METADATA"].decode())
    assert about.get_all("Requires-Dist") == ["numpy>=1.24", "pykv-libkernels==0.1.0"]
    assert "A description" in about.get_payload()


def test_a_wheel_has_its_bill_and_both_halves_keep_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "packaging")
    sbom = importlib.import_module("sbom")
    whole, file = wheel(tmp_path, "cp310"), "pykv_kernels-0.1.0.dist-info/sboms/pykv.cdx.json"
    with zipfile.ZipFile(whole, "a") as out:
        header = (Path(pykv.get_include()) / "dlpack" / "dlpack.h").read_text()
        out.writestr("pykv/include/dlpack/dlpack.h", header)
    before = set(zipfile.ZipFile(whole).namelist())
    names = {}
    for with_cuda in (True, False):
        sbom.add(whole, with_cuda)
        bill = json.loads(read(whole)[file])
        assert bill["metadata"]["component"]["version"] == "0.1.0"
        names[with_cuda] = [c["name"] for c in bill["components"]]
    assert names[False] == ["dlpack", "pybind11"]
    assert names[True] == [*names[False], "nvidia-cuda-runtime", "nvidia-cuda-nvcc"]
    assert re.fullmatch(r"1\.\d+", bill["components"][0]["version"])
    assert before - {"pykv/"} == set(read(whole)) - {file}

    assert split(tmp_path / "dist", whole).returncode == 0
    for made in (tmp_path / "dist").iterdir():
        assert [name for name in read(made) if name.endswith(".dist-info/sboms/pykv.cdx.json")]


@pytest.mark.parametrize(
    ("other", "message"),
    [({"library": "another"}, "differ in pykv/lib/libkernels.so.0"), ({"platform": "linux_x86_64"}, "another version")],
)
def test_wheels_that_do_not_belong_together(tmp_path: Path, other: dict[str, str], message: str) -> None:
    done = split(tmp_path / "dist", wheel(tmp_path, "cp310"), wheel(tmp_path, "cp313", **other))
    assert done.returncode == 2
    assert message in done.stderr


def test_one_version_everywhere() -> None:
    header = (Path(pykv.get_include()) / "pykv" / "base.h").read_text()
    version = ".".join(re.findall(r"#define PYKV_VERSION_\w+ (\d+)", header))
    assert pykv.__version__ == importlib.metadata.version("pykv-kernels") == version
    found = (Path(pykv.get_library_dir()) / "pkgconfig" / "pykv.pc").read_text()
    assert f"Version: {version}\n" in found


def test_what_a_build_fetches_is_known_by_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    requirements, specifiers = (pytest.importorskip(f"packaging.{name}") for name in ("requirements", "utils"))
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(ROOT / "packaging")
    wanted = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert wanted
    of_cmake = re.findall(r'^(cmake|ninja).version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(of_cmake) == 2
    pinned = {}
    for block in re.split(r"\n(?=\w)", (ROOT / "packaging" / "build.txt").read_text())[1:]:
        requirement, *hashes = block.replace("\\\n", "").split("--hash=sha256:")
        made = requirements.Requirement(requirement.strip())
        assert hashes, requirement
        assert all(re.fullmatch(r"[0-9a-f]{64}", one.strip()) for one in hashes), requirement
        (exact,) = made.specifier
        assert exact.operator == "=="
        pinned[specifiers.canonicalize_name(made.name)] = exact.version
    nvcc = importlib.import_module("backend").NVCC
    for text in [*re.findall(r'"([^"]+)"', wanted[1]), nvcc, *map("".join, of_cmake)]:
        requirement = requirements.Requirement(text)
        assert requirement.specifier.contains(pinned[requirement.name], prereleases=True), text


def test_no_file_names_the_other_distribution() -> None:
    """``pykv`` on PyPI is somebody else's: what users are told to install is ``pykv-kernels``."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    wrong = re.compile(r"pip install\s[^`\n]*?['\" ]pykv(?![-\w/])|(?<![-\w])pykv\[\w+[\],]")
    for name in tracked.stdout.split():
        path = ROOT / name
        if path.suffix in (".png", ".npz", ".safetensors", ".json") or path == Path(__file__) or not path.is_file():
            continue
        assert not wrong.findall(path.read_text()), name


class Machine:
    """A root folder with what tells of a GPU."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def file(self, name: str, text: str = "") -> Machine:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return self

    def pci(self, vendor: str, kind: str) -> Machine:
        folder = "sys/bus/pci/devices/0000:01:00.0/"
        return self.file(folder + "vendor", vendor + "\n").file(folder + "class", kind + "\n")


@pytest.fixture
def cuda_choice(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    spec = importlib.util.spec_from_file_location("cuda_choice", ROOT / "packaging" / "cuda_choice.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("mode", "architectures", "choice"),
    [
        ("", "", ("OFF", "no NVIDIA GPU or driver was found")),
        ("auto", "", ("OFF", "no NVIDIA GPU or driver was found")),
        ("AUTO", "90a-real", ("ON", "PYKV_CUDA_ARCHS is set")),
        ("ON", "", ("ON", "PYKV_CUDA=ON")),
        ("1", "", ("ON", "PYKV_CUDA=ON")),
        ("System", "", ("SYSTEM", "PYKV_CUDA=SYSTEM")),
        ("off", "90a-real", ("OFF", "PYKV_CUDA=OFF")),
        ("FALSE", "", ("OFF", "PYKV_CUDA=OFF")),
    ],
)
def test_what_is_built_where_there_is_no_gpu(cuda_choice, tmp_path, mode, architectures, choice) -> None:
    assert cuda_choice.choose(mode, architectures, tmp_path) == choice


def test_what_is_built_where_there_is_a_gpu(cuda_choice, tmp_path) -> None:
    def chosen(name: str, prepare: Callable[[Machine], Machine]) -> Any:
        return cuda_choice.choose("AUTO", "", prepare(Machine(tmp_path / name)).root)

    assert chosen("driver", lambda m: m.file("proc/driver/nvidia/version"))[0] == "ON"
    assert chosen("container", lambda m: m.file("dev/nvidiactl")) == ("ON", "/dev/nvidiactl exists")
    assert chosen("no driver", lambda m: m.pci("0x10de", "0x030200")) == ("ON", "an NVIDIA GPU is at 0000:01:00.0")
    assert chosen("another's GPU", lambda m: m.pci("0x1002", "0x030000"))[0] == "OFF"
    assert chosen("NVIDIA's network card", lambda m: m.pci("0x10de", "0x020000"))[0] == "OFF"


def test_a_wrong_choice_is_named(cuda_choice) -> None:
    with pytest.raises(ValueError, match="PYKV_CUDA: must be AUTO, ON, SYSTEM or OFF, got 'MAYBE'"):
        cuda_choice.choose("maybe", "")


def test_nvcc_is_asked_for_only_where_it_is_needed(monkeypatch) -> None:
    pytest.importorskip("scikit_build_core")
    monkeypatch.syspath_prepend(ROOT / "packaging")
    monkeypatch.chdir(ROOT)
    backend = importlib.import_module("backend")

    def wanted(settings: dict[str, str], **environment: str) -> list[bool]:
        for name in ("PYKV_CUDA", "PYKV_CUDA_ARCHS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        hooks = (backend.get_requires_for_build_wheel, backend.get_requires_for_build_editable)
        return [any("cuda-toolkit" in r for r in hook(settings)) for hook in hooks]

    assert wanted({}, PYKV_CUDA="OFF") == wanted({}, PYKV_CUDA="SYSTEM") == [False, False]
    assert wanted({}, PYKV_CUDA="ON") == wanted({}, PYKV_CUDA_ARCHS="90a-real") == [True, True]
    assert wanted({"cmake.define.PYKV_CUDA": "OFF"}, PYKV_CUDA="ON") == [False, False]
