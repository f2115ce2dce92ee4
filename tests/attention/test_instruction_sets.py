"""The CPU twins are compiled three times; the machine's own choice runs in all other tests, the lesser ones here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("isa", ["base", "avx2"])
def test_lesser_instruction_sets(isa: str, tmp_path: Path) -> None:
    """The choice is made once a process, so the tests run in another one."""
    here = Path(__file__).parent
    files = [here / "test_paged_attention.py", here / "test_merge_attn_states.py"]
    which = "numpy and (layouts or options or long_sequences or in_fp8)"
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--device", "cpu", "-k", which]
    done = subprocess.run(
        # whatever plugins the outer run has: this one is alone, and nobody's worker
        [*command, "-p", "no:xdist", "-p", "no:benchmark", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, *files],
        cwd=tmp_path,  # -m puts the working directory on sys.path, and pykv/ in the sources must not be found there
        env={name: value for name, value in os.environ.items() if "XDIST" not in name} | {"PYKV_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout
