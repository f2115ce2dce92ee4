"""Where an import of pykv cannot work, it says why."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_python_started_in_the_clone_is_told(tmp_path: Path) -> None:
    """There the source folder comes before the installed package; -I and -S keep out what makes it an editable one."""
    shutil.copytree(ROOT / "pykv", tmp_path / "pykv", ignore=shutil.ignore_patterns("*.so*", "__pycache__", "lib"))
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import pykv"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=False)
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: {tmp_path}/pykv is the source folder of pykv and has no compiled part")
    assert last.endswith("start it in another folder")
