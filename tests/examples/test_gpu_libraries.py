"""The examples for libraries that live on the GPU alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pykv

EXAMPLES = Path(__file__).parents[2] / "examples"


def _numba_compiles() -> bool:
    program = "from numba import cuda; cuda.jit('void(float32[:])')(lambda x: None)"
    return (
        subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=300, check=False).returncode == 0
    )


@pytest.mark.parametrize(("library", "most"), [("cupy", 0.01), ("numba", 0.001)])
def test_example(request: pytest.FixtureRequest, library: str, most: float) -> None:
    if request.config.getoption("--device") == "cpu":
        pytest.skip("--device cpu")
    if not pykv.has_cuda() or pykv._C.cuda_device_count() == 0:
        pytest.skip("no CUDA device")
    pytest.importorskip(library)
    if library == "numba" and not _numba_compiles():
        pytest.skip("numba cannot compile kernels with what is installed beside it")
    program = EXAMPLES / f"with_{library}.py"
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    errors = [float(error) for error in re.findall(r"(\S+) off at most", done.stdout)]
    assert errors
    assert max(errors) < most
