"""Programs outside the tree, built against the installed package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pykv

# cmake and ninja lie beside the interpreter whose package is tested
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    """What the command prints; it must succeed."""
    environment = {**os.environ, "PATH": PATH, **(env or {})}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def build(source: Path, folder: Path, *options: str) -> Path:
    """The folder of the programs of a CMake project that does find_package(pykv)."""
    definitions = [*options, f"-Dpykv_DIR={pykv.get_cmake_dir()}", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"]
    run("cmake", "-G", "Ninja", "-S", source, "-B", folder / "build", *definitions, cwd=folder)
    run("cmake", "--build", "build", cwd=folder)
    return folder / "build"
