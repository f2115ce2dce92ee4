"""A C99 program and a C++ program outside the tree build against the installed package, and run."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

import pykv

SOURCES = Path(__file__).parent


def run(*command: object, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_find_package(tmp_path: Path) -> None:
    source = shutil.copytree(SOURCES, tmp_path / "source")
    run("cmake", "-S", source, "-B", "build", f"-Dpykv_DIR={pykv.get_cmake_dir()}", cwd=tmp_path)
    run("cmake", "--build", "build", cwd=tmp_path)
    assert run("build/consumer_c", cwd=tmp_path) == "ok\n"
    assert run("build/consumer_cc", cwd=tmp_path) == "ok\n"


@pytest.mark.parametrize(
    ("compiler", "standard", "source"), [("gcc", "c99", "consumer.c"), ("g++", "c++17", "consumer.cc")]
)
def test_pkg_config(tmp_path: Path, compiler: str, standard: str, source: str) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    where = {**os.environ, "PKG_CONFIG_PATH": f"{pykv.get_library_dir()}/pkgconfig"}
    flags = run("pkg-config", "--cflags", "--libs", "pykv", cwd=tmp_path, env=where).split()
    run(
        compiler,
        f"-std={standard}",
        "-Wall",
        "-Werror",
        SOURCES / source,
        *flags,
        "-lm",
        "-o",
        "consumer",
        cwd=tmp_path,
    )
    assert run("./consumer", cwd=tmp_path, env={**os.environ, "LD_LIBRARY_PATH": pykv.get_library_dir()}) == "ok\n"
