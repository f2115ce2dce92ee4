"""The C declaration is the schema: header, Python functions and exported symbols agree."""

from __future__ import annotations

import inspect
import re
import subprocess
from pathlib import Path

import pytest

import pykv

HEADERS = Path(pykv.get_include()) / "pykv"
# Entries that are not operations: their Python faces are of another shape.
NOT_OPS = {
    "pykv_last_error",
    "pykv_version",
    "pykv_has_cuda",
    "pykv_cuda_architectures",
    "pykv_build_note",
    "pykv_cuda_device_count",
    "pykv_device_note",
    "pykv_check_errors",
    "pykv_mark_passed",
    "pykv_mark_stream",
    "pykv_stream_wait",
    "pykv_cpu_isa",
    "pykv_get_num_threads",
    "pykv_set_num_threads",
    "pykv_paged_attention_kernel",
    "pykv_paged_attention_only_plan",
    "pykv_paged_attention_plan",
    "pykv_paged_attention_plan_for",
    "pykv_paged_attention_workspace_size",
}


def declarations() -> dict[str, list[str]]:
    """Function name -> parameter names, from the installed headers; in place of options, their fields."""
    found = {}
    for header in sorted(HEADERS.glob("*.h")):
        text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.DOTALL)
        for options, fields in re.findall(r"typedef struct (pykv_\w+_options) {(.*?)}", text, flags=re.DOTALL):
            (size_type, size), *rest = [field.rsplit(None, 1) for field in fields.split(";")[:-1]]
            assert (size_type.strip(), size) == ("size_t", "struct_size")
            text = re.sub(rf"const {options}\* options", ",".join(name for _, name in rest), text)
        for name, parameters in re.findall(r"PYKV_API [\w* ]+?\b(pykv_\w+)\((.*?)\);", text, flags=re.DOTALL):
            names = [re.findall(r"\w+", p)[-1] for p in parameters.split(",")]
            found[name] = [] if names == ["void"] else names
    return found


OPS = {name: names for name, names in declarations().items() if name not in NOT_OPS}


def test_headers_are_read() -> None:
    assert len(OPS) >= 12
    assert set(declarations()) >= NOT_OPS


@pytest.mark.parametrize("name", sorted(OPS))
def test_python_signature_is_the_declaration(name: str) -> None:
    function = getattr(pykv, name.removeprefix("pykv_"))
    assert list(inspect.signature(function).parameters) == OPS[name]
    assert function.__doc__, "a public function without a docstring"
    assert name.removeprefix("pykv_") in pykv.__all__


@pytest.mark.parametrize("name", sorted(OPS))
def test_stream_is_the_last_and_a_keyword(name: str) -> None:
    *_, stream = inspect.signature(getattr(pykv, name.removeprefix("pykv_"))).parameters.values()
    assert (stream.name, stream.kind, stream.default) == ("stream", inspect.Parameter.KEYWORD_ONLY, None)


def test_the_library_exports_its_headers_and_nothing_else() -> None:
    library = next(Path(pykv.get_library_dir()).glob("libkernels.so.*"))
    listed = subprocess.run(["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True).stdout
    assert {line.split()[-1] for line in listed.splitlines()} == {"PYKV_0", *(f"{n}@@PYKV_0" for n in declarations())}


def test_the_library_needs_nothing_but_the_system() -> None:
    library = next(Path(pykv.get_library_dir()).glob("libkernels.so.*"))
    listed = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    needed = set(re.findall(r"\(NEEDED\).*\[(.+?)\.so", listed))
    system = {"libstdc++", "libgcc_s", "libc", "libm", "libpthread", "libdl", "librt"}
    assert needed <= system | {"ld-linux-x86-64", "ld-linux-aarch64"}
    assert re.search(r"\(SONAME\).*\[libkernels\.so\.0\]", listed)


def test_all_is_true() -> None:
    assert all(hasattr(pykv, name) for name in pykv.__all__)
