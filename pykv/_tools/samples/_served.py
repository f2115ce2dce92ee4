"""The samples as engines make such calls: bfloat16, heads of 128 in blocks of 16, and then caches of e4m3, too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv._libraries import numpy_dtype
from pykv._tools.samples import FURTHER, sample
from pykv._tools.samples import _sizes as sizes
from pykv._tools.samples._arrays import Sample, some_codes

CODED = "e4m3 cache"
VARIANTS = ("bfloat16", CODED)
NARROW = "(bfloat16)"  # what a file of results calls the list of the arguments of this dtype
SIZES = {"BLOCK_SIZE": 16, "KV_HEADS": 1, "HEAD_SIZE": 128}
CACHES = {"key_cache", "value_cache", "k_cache", "v_cache", "kv_cache", "kv_caches", "src_cache"}

Arrays = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]


def label(name: str, variant: str) -> str:
    return f"{name} ({variant})"


def parts(label: str) -> tuple[str, str]:
    """The operation, and the variant or nothing."""
    name, _, variant = label.partition(" (")
    return name, variant.removesuffix(")")


@contextmanager
def _sizes(variant: str) -> Iterator[None]:
    wanted = SIZES | {"PACK": 16 if variant == CODED else 8}
    before = {name: getattr(sizes, name) for name in wanted}
    try:
        for name, size in wanted.items():
            setattr(sizes, name, size)
        yield
    finally:
        for name, size in before.items():
            setattr(sizes, name, size)


def served(name: str, variant: str, narrow: Collection[str]) -> Sample:
    """A variant of the sample; its arguments ``narrow`` are of bfloat16."""
    if label(name, variant) in FURTHER:
        return FURTHER[label(name, variant)]()
    with _sizes(variant):
        try:
            given = sample(name)
        except ValueError:  # records of a fixed number of bytes
            given = {}
    given = given or sample(name)
    if variant == CODED:
        given = {k: each(v, lambda array: some_codes(*array.shape)) if k in CACHES else v for k, v in given.items()}
        given["kv_cache_dtype"] = "fp8"
    bfloat16 = numpy_dtype("bfloat16")
    return {k: each(v, lambda array: array.astype(bfloat16)) if k in narrow else v for k, v in given.items()}


def each(value: Any, make: Arrays) -> Any:
    """An array, or the arrays of a list."""
    return [each(v, make) for v in value] if isinstance(value, list) else make(value)


def has_coded_cache(name: str, parameters: Collection[str]) -> bool:
    """Whether the cache may be of codes; in some samples it is already, or the option chooses something else."""
    return "kv_cache_dtype" in parameters and sample(name).get("kv_cache_dtype", "auto") == "auto"


def floats_of(given: Sample) -> set[str]:
    """Its arguments of float32."""

    def dtype(value: Any) -> Any:
        return dtype(value[0]) if isinstance(value, list) else getattr(value, "dtype", None)

    return {name for name, value in given.items() if dtype(value) == np.float32}
