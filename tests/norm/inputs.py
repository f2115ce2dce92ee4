"""What the tests of all norms run over."""

from __future__ import annotations

import pytest
from rows import FLOATS, name_of

EPSILON = 1e-5

# What each mapping of rows to threads begins and ends with: packs are 4 or 8 elements, and go up to 16 ... 4096.
WIDTHS = [1, 7, 8, 64, 128, 129, 256, 257, 769, 1024, 1025, 2048, 4096, 4104, 5125, 8192, 16384, 16385, 20008, 40000]

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
