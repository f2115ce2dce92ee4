"""The build backend: scikit-build-core, which also asks for nvcc from PyPI where CUDA kernels are going to be built."""

from __future__ import annotations

import os
from typing import Any

from cuda_choice import choose
from scikit_build_core import build as _build
from scikit_build_core.build import *  # noqa: F403  # the other hooks, as they are

# nvcc, ptxas, headers and the static runtime (104 MB); this release pins all its parts, see cmake/PykvCuda.cmake.
NVCC = (
    "cuda-toolkit[nvcc,cccl]==13.0.3.0; "
    "sys_platform == 'linux' and (platform_machine == 'x86_64' or platform_machine == 'aarch64')"
)


def _nvcc(settings: dict[str, Any] | None) -> list[str]:
    mode, architectures = (
        str((settings or {}).get(f"cmake.define.{name}", os.environ.get(name, "")))
        for name in ("PYKV_CUDA", "PYKV_CUDA_ARCHS")
    )
    return [NVCC] if choose(mode, architectures)[0] == "ON" else []


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_wheel(config_settings), *_nvcc(config_settings)]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_build.get_requires_for_build_editable(config_settings), *_nvcc(config_settings)]
