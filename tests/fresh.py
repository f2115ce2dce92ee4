"""Programs in a process of their own, in which no cache is filled and no thread was started."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent  # where no folder is called pykv


def fresh(program: str, *options: str, **environment: str) -> str:
    """What the program prints; ``options`` are Python's."""
    command = [sys.executable, *options, "-c", textwrap.dedent(program)]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False, cwd=HERE
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
