"""What a wheel holds of others' code, in the wheel: ``.dist-info/sboms/pykv.cdx.json`` (PEP 770, CycloneDX)."""

from __future__ import annotations

import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

from split_wheels import Wheel, write

# Distribution that brings it, licence, and what of it is in the wheel.
PYBIND11 = ("pybind11", "BSD-3-Clause", "headers, compiled into pykv/_C")
CUDA = (
    ("nvidia-cuda-runtime", "LicenseRef-NVIDIA-CUDA-EULA", "cudart, linked statically into libkernels"),
    ("nvidia-cuda-nvcc", "LicenseRef-NVIDIA-CUDA-EULA", "the compiler of the CUDA kernels"),
)


def _component(name: str, licence: str, what: str, version: str | None, purl: str) -> dict[str, Any]:
    found = {"type": "library", "name": name, "description": what, "licenses": [_licence(licence)]}
    return found | ({"version": version, "purl": f"{purl}@{version}"} if version else {"purl": purl})


def _licence(name: str) -> dict[str, Any]:
    return {"license": {"name" if name.startswith("LicenseRef-") else "id": name}}


def _of_pypi(name: str, licence: str, what: str) -> dict[str, Any]:
    """Without a version where pip did not bring it: then it is the machine's own."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    return _component(name, licence, what, version, f"pkg:pypi/{name}")


def bill(version: str, contents: dict[str, bytes], with_cuda: bool) -> dict[str, Any]:
    """The document: nothing in it depends on the time, so that equal wheels stay equal."""
    header = contents.get("pykv/include/dlpack/dlpack.h", b"").decode()
    numbers = re.findall(r"#define DLPACK_M(?:AJOR|INOR)_VERSION (\d+)", header)
    what = "dlpack.h, compiled in and installed"
    dlpack = _component("dlpack", "Apache-2.0", what, ".".join(numbers) or None, "pkg:github/dmlc/dlpack")
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "name": "pykv-kernels",
                "version": version,
                "purl": f"pkg:pypi/pykv-kernels@{version}",
                "licenses": [_licence("Apache-2.0")],
            }
        },
        "components": [dlpack, _of_pypi(*PYBIND11), *(_of_pypi(*c) for c in CUDA if with_cuda)],
    }


def add(path: Path, with_cuda: bool) -> None:
    """Writes the wheel anew, with its bill."""
    with Wheel(path) as wheel:
        contents, info, version = wheel.contents(), wheel.info, wheel.version
    contents[f"{info}sboms/pykv.cdx.json"] = (json.dumps(bill(version, contents, with_cuda), indent=1) + "\n").encode()
    write(path, contents, info)
