"""One test body for all array libraries and devices: the ``array`` fixture."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
from libraries import LIBRARIES, Library

import pykv

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the GPU's memory for itself

hypothesis.settings.register_profile("pykv", deadline=None, derandomize=True, max_examples=40, print_blob=False)
hypothesis.settings.load_profile("pykv")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=["cpu", "cuda"], help="run on this device alone (default: whatever is there)")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "array" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--device")
        chosen = [kind for kind in LIBRARIES if wanted in (None, kind.device)]
        metafunc.parametrize(
            "array", chosen, ids=[f"{k.name}-{k.device}" for k in chosen], indirect=True, scope="session"
        )


@pytest.fixture(scope="session")
def array(request: pytest.FixtureRequest) -> Library:
    kind: type[Library] = request.param
    if importlib.util.find_spec(kind.module) is None:
        pytest.skip(f"{kind.module} is not installed")
    if kind.device == "cuda":
        if not pykv.has_cuda():
            pytest.skip("this pykv was built without CUDA")
        if pykv._C.cuda_device_count() == 0:
            pytest.skip("no CUDA device")
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
