"""The C interface is the recorded one, or more; docs/abi.md says how to announce anything else."""

from __future__ import annotations

import platform
import shutil
from pathlib import Path

import pytest
from abi.interface import breaks, differences

import pykv

pytestmark = [
    pytest.mark.skipif(shutil.which("abidiff") is None, reason="abidiff (Debian: abigail-tools) is not installed"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the interface is recorded on x86-64"),
]
HEADERS = Path(pykv.get_include())


def test_nothing_is_broken(tmp_path: Path) -> None:
    assert breaks(HEADERS, tmp_path) == "", "see docs/abi.md"
    if more := differences(HEADERS, tmp_path):
        print(f"New, and not recorded yet (python tests/abi/interface.py):\n{more}")


def edited(folder: Path, header: str, old: str, new: str) -> Path:
    headers = shutil.copytree(HEADERS, folder / "include")
    path = headers / "pykv" / header
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    return headers


@pytest.mark.parametrize(
    ("header", "old", "new", "told"),
    [
        ("base.h", "pykv_set_num_threads(int32_t num_threads)", "pykv_set_num_threads(int64_t num_threads)", "int32_t"),
        ("base.h", "PYKV_API int32_t pykv_get_num_threads(void);", "", "pykv_get_num_threads"),
        (
            "base.h",
            "DLTensor* const* tensors;\n  int64_t size;",
            "int64_t size;\n  DLTensor* const* tensors;",
            "offset",
        ),
        ("base.h", "PYKV_NOT_IMPLEMENTED = 3", "PYKV_NOT_IMPLEMENTED = 5", "PYKV_NOT_IMPLEMENTED"),
        ("attention.h", "  double softcap;\n", "  double softcap;\n  int64_t one_more;\n", "one_more"),
        ("attention.h", "  DLTensor* workspace;\n", "", "workspace"),
    ],
    ids=[
        "type of a parameter",
        "function gone",
        "struct turned round",
        "value of a constant",
        "option between others",
        "option gone",
    ],
)
def test_a_break_is_found(tmp_path: Path, header: str, old: str, new: str, told: str) -> None:
    assert told in breaks(edited(tmp_path, header, old, new), tmp_path)


def test_an_addition_is_told_and_breaks_nothing(tmp_path: Path) -> None:
    known = "PYKV_API int32_t pykv_version(void);"
    headers = edited(tmp_path, "base.h", known, known + "\nPYKV_API int32_t pykv_one_more(void);")
    assert breaks(headers, tmp_path) == ""
    assert "pykv_one_more" in differences(headers, tmp_path)


def test_another_status_breaks_nothing(tmp_path: Path) -> None:
    headers = edited(tmp_path, "base.h", "PYKV_RUNTIME_ERROR = 4", "PYKV_RUNTIME_ERROR = 4, PYKV_ONE_MORE = 5")
    assert breaks(headers, tmp_path) == ""
