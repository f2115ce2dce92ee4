"""C99 and C++17 programs outside the tree build against the installed package, and run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from abi.building import build, run

import pykv

SOURCES = Path(__file__).parent


def test_find_package(tmp_path: Path) -> None:
    programs = build(SOURCES, tmp_path)
    for name in ("consumer_c", "consumer_cc", "consumer_hpp"):
        assert run(programs / name, cwd=tmp_path) == "ok\n"


@pytest.mark.parametrize(
    ("compiler", "standard", "source"), [("gcc", "c99", "consumer.c"), ("g++", "c++17", "consumer.cc")]
)
def test_pkg_config(tmp_path: Path, compiler: str, standard: str, source: str) -> None:
    if shutil.which("pkg-config") is None:
        pytest.skip("pkg-config is not installed")
    where = {"PKG_CONFIG_PATH": pykv.get_pkgconfig_dir()}
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
    assert run("./consumer", cwd=tmp_path, env={"LD_LIBRARY_PATH": pykv.get_library_dir()}) == "ok\n"
