"""The build backend: scikit-build-core, which also asks for nvcc from PyPI where CUDA kernels are going to be built,
and puts a bill of what is inside into the wheel.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import sbom
from cuda_choice import choose
from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403  # the other hooks, as they are

# nvcc, ptxas, headers and the static runtime (104 MB); this release pins all its parts, see cmake/PykvCuda.cmake.
NVCC = (
    "cuda-toolkit[nvcc,cccl]==13.0.3.0; "
    "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"
)


def _choice(settings: dict[str, Any] | None) -> str:
    mode, architectures = (
        str((settings or {}).get(f"cmake.define.{name}", os.environ.get(name, "")))
        for name in ("PYKV_CUDA", "PYKV_CUDA_ARCHS")
    )
    return choose(mode, architectures)[0]


def _nvcc(settings: dict[str, Any] | None) -> list[str]:
    return [NVCC] if _choice(settings) == "ON" else []


def build_wheel(
    wheel_directory: str, config_settings: dict[str, Any] | None = None, metadata_directory: str | None = None
) -> str:
    name = _build.build_wheel(wheel_directory, config_settings, metadata_directory)
    sbom.add(Path(wheel_directory) / name, with_cuda=_choice(config_settings) != "OFF")
    return name


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_wheel(config_settings), *_nvcc(config_settings)]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_editable(config_settings), *_nvcc(config_settings)]
