"""One test body for all array libraries and devices: the ``array`` fixture."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import hypothesis
import pytest
from libraries import LIBRARIES, Library, Numpy

import pykv
from pykv._tools.samples import FAMILIES

os.environ.setdefault("SKBUILD_EDITABLE_VERBOSE", "0")  # what programs print is theirs alone, not that of a rebuild
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the GPU's memory for itself

hypothesis.settings.register_profile("pykv", deadline=None, derandomize=True, max_examples=40, print_blob=False)
hypothesis.settings.load_profile("pykv")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], help="run on this device alone (default: whatever is there)")
    parser.addoption(
        "--one-in", type=int, default=1, help="of tests of operations with arrays of other libraries than NumPy"
    )
    parser.addoption("--part", default="1/1", help="K/N: the K-th of N parts of the tests, for calls beside each other")


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of workers, which have all cores: NumPy is here already
    config.addinivalue_line("markers", "of_cuda_kernels: shapes that have CUDA kernels of their own, one to a CPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Some tests stand for all that are alike, always the same.

    How arrays come in does not depend on the operation, and what a CPU does not on the CUDA kernel that would take it.
    """
    one_in: int = config.getoption("--one-in")
    part, parts = map(int, config.getoption("--part").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"--part {part}/{parts}: there is no such part")

    def is_left_out(item: Any) -> bool:
        if crc32(item.nodeid.encode()) % parts != part - 1:
            return True
        kind = item.callspec.params.get("array") if hasattr(item, "callspec") else None
        if kind is None or item.path.parent.name not in FAMILIES:
            return False
        some = one_in if kind is not Numpy else 4 if item.get_closest_marker("of_cuda_kernels") else 1
        return crc32(item.nodeid.encode()) % some != 0

    if left_out := [item for item in items if is_left_out(item)]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_left_out(item)]


@functools.cache
def _missing(kind: type[Library]) -> str | None:
    """What there is not, if arrays of this library cannot be had here."""
    if importlib.util.find_spec(kind.module) is None:
        return kind.module
    if kind.device == "cuda":
        if not pykv.has_cuda():
            return "CUDA in this pykv"
        if pykv._C.cuda_device_count() == 0:
            return "CUDA device"
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "array" not in metafunc.fixturenames:
        return
    wanted = metafunc.config.getoption("--device")
    chosen = [kind for kind in LIBRARIES if wanted in (None, kind.device)]
    kinds = [pytest.param(kind, id=f"{kind.name}-{kind.device}") for kind in chosen if not _missing(kind)]
    # one skipped test for all that is not here: six of each would be most of what a laptop collects
    if absent := {what: None for kind in chosen if (what := _missing(kind))}:
        skip = pytest.mark.skip(reason=f"there is no {', no '.join(absent)}")
        kinds.append(pytest.param(None, id="absent", marks=skip))
    metafunc.parametrize("array", kinds, indirect=True, scope="session")


@pytest.fixture(scope="session")
def array(request: pytest.FixtureRequest) -> Library:
    kind: type[Library] = request.param
    return kind()


@pytest.fixture
def cupy(request: pytest.FixtureRequest) -> Any:
    """CuPy, for what only a GPU can show."""
    if request.config.getoption("--device") == "cpu":
        pytest.skip("--device cpu")
    if not pykv.has_cuda() or pykv._C.cuda_device_count() == 0:
        pytest.skip("no CUDA device")
    return pytest.importorskip("cupy")


@pytest.fixture(autouse=True)
def _no_report_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A call of this test that met an id out of range and did not say so fails it."""
    yield
    if "array" in request.fixturenames and request.getfixturevalue("array").device == "cuda":
        pykv.check_errors()
