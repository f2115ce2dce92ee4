"""``pykv info``: what is installed, what it runs on, and how arrays come in."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pykv
from pykv import _C
from pykv._tools import output

# Name, distributions that bring it (the first that is installed counts), and the class of its arrays.
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
FRAMEWORKS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("NumPy", ("numpy",), "numpy:ndarray"),
    ("CuPy", _CUPY, "cupy:ndarray"),
    ("torch", ("torch",), "torch:Tensor"),
    ("JAX", ("jax",), "jax._src.array:ArrayImpl"),
    ("Numba", ("numba",), "numba.cuda.cudadrv.devicearray:DeviceNDArray"),
)

# What `config` answers: flags, what they stand for, and how to know.
FOLDERS: dict[str, tuple[str, Callable[[], str]]] = {
    "includes": ("compiler flags for <pykv/kernels.h>", lambda: f"-I{pykv.get_include()}"),
    "libdir": ("folder of libkernels.so.0", pykv.get_library_dir),
    "cmakedir": ("folder of pykvConfig.cmake, for pykv_DIR", pykv.get_cmake_dir),
    "pkgconfigdir": ("folder of pykv.pc, for PKG_CONFIG_PATH", pykv.get_pkgconfig_dir),
}


def cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())


def version_of(*distributions: str) -> str | None:
    for name in distributions:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def way_in(path: str) -> str:
    """How arrays of a class come in.  Only the class itself tells, so its module is imported."""
    try:
        found = _class(path)
    except Exception as error:  # a framework may fail to load in ways of its own; the others are still told
        return f"cannot be imported: {type(error).__name__}: {error}".splitlines()[0]
    way = _C.way_in(found)
    return f"{way}, read only" if path.startswith("jax") else way


def frameworks() -> Iterator[tuple[str, str, str]]:
    """Name, version and way in of those that are installed; those that are not are not imported."""
    for name, distributions, path in FRAMEWORKS:
        version = version_of(*distributions)
        yield name, version or "-", way_in(path) if version else "not installed"
    version = version_of("ml_dtypes")
    yield "ml_dtypes", version or "-", "bfloat16 and fp8 of NumPy and CuPy" if version else "not installed"


def cuda_device_name(ordinal: int) -> str:
    """As CuPy or torch calls it: the library itself knows its devices by number alone."""
    try:
        cupy = importlib.import_module("cupy")
        return str(cupy.cuda.runtime.getDeviceProperties(ordinal)["name"].decode())
    except Exception:  # not installed, or built for another CUDA
        pass
    try:
        torch = importlib.import_module("torch")
        return str(torch.cuda.get_device_name(ordinal))
    except Exception:
        return "named by CuPy or torch, of which neither is usable"


def commit() -> str | None:
    """Of the checkout that pykv is imported from, if it is one: ``PYKV_COMMIT``, else what git says."""
    if "PYKV_COMMIT" in os.environ:
        return os.environ["PYKV_COMMIT"]
    source = Path(pykv.__file__).parent
    if not (source.parent / ".git").exists():
        return None  # installed; a repository around it is another one
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def compilers() -> str | None:
    """Those that name themselves in the library."""
    library = next(Path(pykv.get_library_dir()).glob("libkernels.so.?"), None)
    if library is None:
        return None
    found = re.findall(rb"(?:GCC: \([^)\0]+\) |clang version )[\d.]+", library.read_bytes())
    return ", ".join(sorted({f.decode() for f in found})) or None


def driver() -> str | None:
    try:
        first, *_ = Path("/proc/driver/nvidia/version").read_text().splitlines()
    except (OSError, ValueError):
        return None
    return first.partition(":")[2].strip()


def environment() -> dict[str, str]:
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith("PYKV_")}


def machine() -> Iterator[tuple[str, str]]:
    v = _C.version()
    yield "pykv", pykv.__version__
    yield "libkernels", f"{v // 10000}.{v // 100 % 100}.{v % 100}, {pykv.get_library_dir()}"
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    yield "system", platform.platform()
    yield "CUDA kernels", f"for {_C.cuda_architectures()}" if _C.has_cuda() else "none"
    yield "build", _C.build_note()
    yield "compiler", compilers() or "unknown"
    lowered = f", PYKV_ISA={os.environ['PYKV_ISA']}" if "PYKV_ISA" in os.environ else ""
    yield "cpu", f"{cpu_model()}; {_C.get_num_threads()} threads; kernels for {_C.cpu_isa()}{lowered}"
    for ordinal in range(_C.cuda_device_count()):
        yield f"cuda:{ordinal}", "; ".join(filter(None, (cuda_device_name(ordinal), _C.device_note(ordinal))))
    if _C.cuda_device_count() == 0:
        yield "cuda", "no device"
    if found := driver():
        yield "driver", found


def config(flags: Sequence[str]) -> int:
    """One line for each flag, in their order; all of them, named, without any."""
    for flag in flags:
        print(FOLDERS[flag][1]())
    if not flags:
        output.show("pykv", ("flag", "is"), [(f"--{flag}", find()) for flag, (_, find) in FOLDERS.items()])
    return 0


def _report() -> str:
    """Markdown, with places for what only the reader knows."""
    facts = [*machine(), ("commit", commit() or "unknown")]
    arrays = [(name, f"{version}, {way}") for name, version, way in frameworks() if version != "-"]
    variables = list(environment().items()) or [("PYKV_*", "none is set")]
    sections = (("Machine", facts), ("Arrays", arrays), ("Environment", variables))
    asked = ("What I did (a few lines that show it)", "What I expected", "What happened (the whole message)")
    parts = [f"### {question}\n\n" for question in asked]
    parts += [f"### {title}\n\n" + "".join(f"- {k}: {v}\n" for k, v in pairs) for title, pairs in sections]
    return "\n".join(parts)


def _json() -> str:
    arrays = [{"library": n, "version": None if v == "-" else v, "way_in": w} for n, v, w in frameworks()]
    facts = dict(machine()) | {"commit": commit()}
    return json.dumps({"machine": facts, "arrays": arrays, "environment": environment()}, indent=1)


def run(form: str = "") -> int:
    """Tables, or in the form ``"json"`` or ``"report"``."""
    if form:
        print(_json() if form == "json" else _report())
        return 0
    output.show("pykv", ("what", "is"), list(machine()))
    output.show("Arrays", ("library", "version", "arrays come in by"), list(frameworks()))
    return 0
