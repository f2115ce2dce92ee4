"""How CuPy's arrays are read, told where there is no GPU: by a module of its name whose arrays have its attributes."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

STAND_IN = """
import sys, types
import numpy as np

class Stream:
    asked = 0
    def __init__(self):
        self.ptr = 0  # of the object: the class has none

class Memory:
    def __init__(self, host):
        self.ptr, self.device_id = host.ctypes.data, 0

class ndarray:
    def __init__(self, host):
        self.host, self.data, self.dtype = host, Memory(host), host.dtype
        self.shape, self.strides = host.shape, host.strides

def get_current_stream():
    Stream.asked += 1
    return Stream()

ndarray.__module__ = "cupy"
cupy = sys.modules["cupy"] = types.ModuleType("cupy")
cupy.ndarray, cupy.cuda = ndarray, types.SimpleNamespace(get_current_stream=get_current_stream)

import pykv
"""


@pytest.fixture
def run(tmp_path: Path) -> Callable[[str], None]:
    def run(program: str) -> None:
        (tmp_path / "program.py").write_text(STAND_IN + textwrap.dedent(program))
        command = [sys.executable, tmp_path / "program.py"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    return run


def test_they_are_read_and_the_stream_is_asked_for_once_a_call(run: Callable[[str], None]) -> None:
    run("""
    def array(*shape):
        return ndarray(np.zeros(shape, np.float32))

    assert pykv._C.way_in(ndarray) == "attributes of cupy.ndarray"
    for calls in (1, 2):
        pykv.rms_norm(array(0, 8), array(0, 8), array(8))  # no row, so nothing is launched
        assert Stream.asked == calls
    """)


def test_shapes_strides_dtypes_and_devices_are_theirs(run: Callable[[str], None]) -> None:
    run("""
    def message(*arguments):
        try:
            pykv.rms_norm(*arguments)
        except (ValueError, TypeError) as e:
            return str(e)

    host = np.zeros((4, 8), np.float32)
    x = ndarray(host)
    y = ndarray(np.zeros((3, 8), np.float32))
    assert message(x, y, None) == "rms_norm: out: must have the shape of input, [3, 8], got [4, 8]"
    assert "(stride 1), got stride 2" in message(ndarray(host[:, ::2]), ndarray(host[:, ::2]), None)
    integers = ndarray(np.zeros((4, 8), np.int32))
    assert "dtype must be float32 or float16 or bfloat16, got int32" in message(x, integers, None)
    assert "must lie on cpu like the arguments before it, got cuda:0" in message(x, host, None)
    """)
