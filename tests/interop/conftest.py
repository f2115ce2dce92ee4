"""What tests that go over all operations share."""

from __future__ import annotations

from typing import Any

import pytest

from pykv._tools import devices


@pytest.fixture
def device(array: Any) -> devices.Device:
    """The host with NumPy, or a GPU with CuPy: libraries whose arrays lie anywhere, and are written."""
    if array.name not in ("numpy", "cupy"):
        pytest.skip("NumPy and CuPy stand for all libraries")
    return devices.CPU if array.name == "numpy" else devices.device("cuda")
