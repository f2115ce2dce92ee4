"""Of what the samples are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from pykv._tools.samples import _sizes as sizes

Sample = dict[str, Any]  # values by the name of the parameter

MEMORY = np.zeros(32, np.float32)  # what addresses point to


def floats(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape, np.float32)


def some_codes(*shape: int) -> npt.NDArray[np.uint8]:
    """Those of finite e4m3 numbers."""
    return (np.arange(np.prod(shape)) % 97).astype(np.uint8).reshape(shape)


def together(*parts: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of each row of several arrays, one after another."""
    return np.concatenate([p.view(np.uint8) for p in parts], axis=1)


def ids(*values: Any) -> npt.NDArray[Any]:
    return np.array(values, np.int64)


def flash_caches() -> Sample:
    shape = (sizes.NUM_BLOCKS, sizes.BLOCK_SIZE, sizes.KV_HEADS, sizes.HEAD_SIZE)
    return {"key_cache": floats(*shape, seed=1), "value_cache": floats(*shape, seed=2)}


def packed_caches() -> Sample:
    key = floats(sizes.NUM_BLOCKS, sizes.KV_HEADS, sizes.HEAD_SIZE // sizes.PACK, sizes.BLOCK_SIZE, sizes.PACK)
    return {
        "key_cache": key,
        "value_cache": floats(sizes.NUM_BLOCKS, sizes.KV_HEADS, sizes.HEAD_SIZE, sizes.BLOCK_SIZE),
    }


def ungated(**options: Any) -> Sample:
    return {"out": floats(3, 8), "input": floats(3, 8), **options}
