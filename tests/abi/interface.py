"""The C interface as libabigail sees it.  ``python tests/abi/interface.py`` records that of the installed package.

The headers are the whole interface: every declaration becomes a function that traps, and the library made of these has
the debug information that libabigail reads, without the C++ behind the real one.  That the real one exports these very
names is tests/test_contract.py's to say.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import pykv

KERNELS = Path(__file__).parents[2] / "src" / "kernels"
RECORDED = KERNELS / "exports.abi"
_BREAKS, _FAILED = 4 | 8, 1 | 2  # bits of abidiff's exit status


def stand_in(headers: Path, folder: Path) -> Path:
    """A library with the interface of the headers."""
    preprocess = ["gcc", "-std=c99", "-E", "-P", "-I", headers, headers / "pykv" / "kernels.h"]
    declared = subprocess.run(preprocess, check=True, capture_output=True, text=True).stdout
    defined = re.sub(r'(visibility\("default"\)\)\)[^;]*\));', r"\1 { __builtin_trap(); }", declared)
    (folder / "kernels.c").write_text(defined)
    exports = KERNELS / "exports.map"
    version = re.search(r"^PYKV_(\d+) \{", exports.read_text(), flags=re.MULTILINE)
    assert version, exports
    link = [f"-Wl,-soname,libkernels.so.{version[1]}", f"-Wl,--version-script={exports}", "-o", "libkernels.so"]
    subprocess.run(["gcc", "-std=c99", "-g", "-shared", "-fPIC", "kernels.c", *link], check=True, cwd=folder)
    return folder / "libkernels.so"


def differences(headers: Path, folder: Path, *options: str) -> str:
    """How the interface of the headers differs from the recorded one; empty if it does not."""
    library = stand_in(headers, folder)
    done = subprocess.run(["abidiff", *options, RECORDED, library], capture_output=True, text=True)
    assert not done.returncode & _FAILED, done.stdout + done.stderr
    return done.stdout if done.returncode & _BREAKS else ""


def breaks(headers: Path, folder: Path) -> str:
    """What a program built against the recorded interface would trip over: all differences but new functions."""
    return differences(headers, folder, "--no-added-syms")


def record(headers: Path) -> None:
    short = ["--no-show-locs", "--no-comp-dir-path", "--no-corpus-path", "--no-elf-needed", "--no-parameter-names"]
    with tempfile.TemporaryDirectory() as folder:
        library = stand_in(headers, Path(folder))
        subprocess.run(["abidw", *short, "--type-id-style", "hash", "--out-file", RECORDED, library], check=True)


if __name__ == "__main__":
    record(Path(pykv.get_include()))
    print(f"recorded {RECORDED}")
