"""Dependencies run one way: pykv -> _C -> C headers -> family -> core, cpu and cuda."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pykv._tools.samples import FAMILIES as SAMPLED

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "src" / "kernels"
SHARED = {"core", "cpu", "cuda", "include"}
FAMILIES = sorted(p.name for p in KERNELS.iterdir() if p.is_dir() and p.name not in SHARED)


def includes(path: Path) -> list[str]:
    return re.findall(r'^#include [<"](.+?)[>"]', path.read_text(), flags=re.MULTILINE)


def parts_used(folder: Path) -> set[str]:
    """First parts of what the files of a folder include from our own tree."""
    found = {i.split("/")[0] for path in folder.rglob("*.*") for i in includes(path) if "/" in i}
    return found & ({*FAMILIES, *SHARED, "pykv"} | {"pybind11"})


USES = {
    "moe": {"activation", "gemm", "quantization"},  # what a layer is made of
    "embedding": {"dequantization"},  # tables in GGUF's blocks
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_knows_no_other_family(family: str) -> None:
    assert parts_used(KERNELS / family) <= {family, "core", "cpu", "cuda", "pykv"} | USES.get(family, set())


@pytest.mark.parametrize(
    ("part", "allowed"),
    [("core", {"core", "pykv"}), ("cpu", {"core", "cpu", "pykv"}), ("cuda", {"core", "cuda", "pykv"})],
)
def test_shared_parts_know_no_operation(part: str, allowed: set[str]) -> None:
    assert parts_used(KERNELS / part) <= allowed


def test_core_is_the_same_with_and_without_cuda() -> None:
    told = {path.name for path in (KERNELS / "core").iterdir() if "PYKV_WITH_CUDA" in path.read_text()}
    assert told == {"call.h"}  # PYKV_CUDA(twin)


def test_the_headers_are_c() -> None:
    for header in (KERNELS / "include" / "pykv").glob("*.h"):
        assert set(includes(header)) <= {
            "math.h",
            "stdbool.h",
            "stddef.h",
            "stdint.h",
            "dlpack/dlpack.h",
            *(f"pykv/{h.name}" for h in header.parent.glob("*.h")),
        }


def test_the_layer_for_cpp_knows_no_op() -> None:
    header = KERNELS / "include" / "pykv" / "kernels.hpp"
    assert [i for i in includes(header) if "/" in i or i.endswith(".h")] == ["pykv/kernels.h"]
    code = re.sub(r"//.*", "", header.read_text())
    names = {"pykv_status", "pykv_last_error", "pykv_tensor_list", "pykv_paged_attention_workspace_size"}
    assert set(re.findall(r"\bpykv_\w+", code)) == names


def test_bindings_see_the_headers_alone() -> None:
    assert parts_used(ROOT / "src" / "bindings") <= {"pykv", "pybind11"}
    assert parts_used(ROOT / "src" / "tvm_ffi") <= {"pykv"}


def test_python_imports_no_framework() -> None:
    for path in (ROOT / "pykv").rglob("*.py"):
        if path.name in ("torch.py", "jax.py"):  # imported by those alone who have them
            continue
        at_import = re.findall(r"^(?:import|from) (\w+)", path.read_text(), flags=re.MULTILINE)
        assert not {"torch", "cupy", "jax", "ml_dtypes"} & set(at_import), path.name


def test_every_family_has_samples() -> None:
    assert FAMILIES == SAMPLED


@pytest.mark.parametrize("family", FAMILIES)
def test_every_op_has_twins(family: str) -> None:
    """A CUDA twin and the header of both lie beside every CPU twin."""
    twins = list((KERNELS / family).rglob("*_cpu.cc"))
    assert twins
    for twin in twins:
        stem = twin.name.removesuffix("_cpu.cc")
        assert list(twin.parent.glob(f"{stem}*.cu")), f"{stem} has no CUDA twin"
        assert (twin.parent / f"{stem}.h").exists()
