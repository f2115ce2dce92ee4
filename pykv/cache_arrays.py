"""The arrays of a paged cache: which dtypes and layouts there are, and how one is made or recognised."""

from __future__ import annotations

from typing import Any

import numpy as np

from pykv._libraries import Library

# The dtypes a cache may have, and how their elements are stored.
STORAGE = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8_e4m3": "uint8",
    "fp8_e5m2": "uint8",
    "int8": "uint8",
    "nvfp4": "uint8",
}
_ALIASES = {"fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
LAYOUTS = ("NHD", "HND", "packed")


def dtype_name(dtype: Any) -> str:
    """The name in ``STORAGE`` of a name or of a library's own dtype."""
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__.partition(".")[0] == "torch":
        name = str(dtype).removeprefix("torch.")
    else:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = type(dtype).__name__
    name = _ALIASES.get(name, name)
    if name not in STORAGE:
        raise ValueError(f"PagedKVCache: dtype: must be one of {', '.join(STORAGE)}, got {name!r}")
    return name


def check(layout: Any, dtype: str, block_size: int, head_size: int, library: Library) -> None:
    """Whether there is such a cache."""
    if layout not in LAYOUTS:
        raise ValueError(f"PagedKVCache: layout: must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if layout == "HND" and not library.has_strides:
        raise ValueError(
            "PagedKVCache: layout: JAX arrays have no strides, so their caches are NHD or packed, got 'HND'"
        )
    if dtype == "nvfp4":
        if layout == "packed":
            raise ValueError("PagedKVCache: layout: nvfp4 caches are NHD or HND, got 'packed'")
        for argument, size, step in (("head_size", head_size, 64), ("block_size", block_size, 4)):
            if size % step:
                raise ValueError(f"PagedKVCache: {argument}: must be a multiple of {step} for nvfp4 caches, got {size}")
    x = _packed(dtype)
    if layout == "packed" and head_size % x:
        raise ValueError(
            f"PagedKVCache: head_size: must be a multiple of {x} for packed {dtype} caches, got {head_size}"
        )


def make(layout: str, dtype: str, sizes: tuple[int, int, int, int], layers: int, library: Library) -> list[Any]:
    """Keys of all layers, then values.  ``sizes``: blocks, block size, KV heads, head size."""
    blocks, size, heads, width = sizes
    if dtype == "nvfp4":
        width = width * 9 // 16
    keys: tuple[int, ...] = (blocks, heads, size, width) if layout == "HND" else (blocks, size, heads, width)
    values = keys
    if layout == "packed":
        x = _packed(dtype)
        keys, values = (blocks, heads, width // x, size, x), (blocks, heads, width, size)
    caches = [library.zeros(shape, STORAGE[dtype]) for shape in (keys, values) for _ in range(layers)]
    return [cache.swapaxes(1, 2) for cache in caches] if layout == "HND" else caches


def layout_of(keys: Any) -> str:
    """The layout of a key cache, which its shape and strides say."""
    if keys.ndim == 5:
        return "packed"
    heads, strides = keys.shape[2], strides_of(keys)
    return "NHD" if strides is None or strides[1] == heads * strides[2] else "HND"


def strides_of(array: Any) -> tuple[int, ...] | None:
    """In the library's unit; None if its arrays have none."""
    strides = array.stride() if hasattr(array, "stride") else getattr(array, "strides", None)
    return None if strides is None else tuple(strides)


def _packed(dtype: str) -> int:
    """How many elements have 16 bytes."""
    return 16 // {"float32": 4, "uint8": 1}.get(STORAGE[dtype], 2)
