"""The recorded figures become a picture: the cases of the benchmark are still those of the record."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention" / "plot_roofline.py"


def test_the_picture_is_made(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("rich")
    picture = tmp_path / "roofline.png"
    results = SCRIPT.parents[1] / "results" / "paged_attention.json"
    subprocess.run([sys.executable, SCRIPT, results, picture], check=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
