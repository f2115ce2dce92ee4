"""vLLM's compiled operations without vLLM, which takes gigabytes and wants its own torch.

Its libraries link to a stable part of torch alone.  They are looked for in the folder VLLM_LIBRARIES
(`_C_stable_libtorch`, `_vllm_fa3_C`, ... .so), then in an installed vLLM.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Any


def library(name: str) -> Path | None:
    found = importlib.util.find_spec("vllm")
    folders = [os.environ.get("VLLM_LIBRARIES"), *(found.submodule_search_locations or [] if found else [])]
    for folder in filter(None, folders):
        for path in sorted(Path(folder).rglob(f"{name}.*so")):
            return path
    return None


@functools.cache
def load(name: str, namespace: str | None = None) -> Any:
    """Its operations in ``torch.ops``, as a rule under its own name."""
    import torch

    path = library(name)
    if path is None:
        raise SystemExit(f"{name} was not found: set VLLM_LIBRARIES, or install vLLM")
    torch.ops.load_library(str(path))
    return getattr(torch.ops, namespace or name)
