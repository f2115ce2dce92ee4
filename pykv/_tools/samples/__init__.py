"""Calls of every operation, for what goes over all of them: a module for each family, found by its file.

``sample("rms_norm")`` is a small right call: NumPy arrays and plain Python values by parameter name.  An operation
without a sample fails the tests.  ``FURTHER`` are calls by which an operation does quite another thing.  ``WORKLOADS``
are calls of a size that means something, for ``pykv bench``.  Operations on rows need none, for their samples are
widened; what has none is timed on its sample.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module

from pykv._tools.samples._arrays import MEMORY, Sample
from pykv._tools.samples._workload import Tokens, Workload, size_of

__all__ = ["MEMORY", "Sample", "Tokens", "Workload", "size_of"]  # and what is below

# operations that write where addresses among their arguments point to
ADDRESSED = {"swap_blocks_batch", "concat_and_cache_mla_grouped"}
# arguments that lie on the host whatever the device of the others
ON_HOST = {"block_mapping", "src_ptrs", "dst_ptrs", "sizes"}

FAMILIES = sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))
_MODULES = [import_module(f"{__name__}.{family}") for family in FAMILIES]
SAMPLES: dict[str, Callable[[], Sample]] = {k: v for module in _MODULES for k, v in module.SAMPLES.items()}
FURTHER: dict[str, Callable[[], Sample]] = {
    k: v for module in _MODULES for k, v in getattr(module, "FURTHER", {}).items()
}
WORKLOADS: dict[str, Callable[[Tokens], Workload]] = {
    k: v for module in _MODULES for k, v in getattr(module, "WORKLOADS", {}).items()
}


def sample(name: str) -> Sample:
    return SAMPLES[name]()
