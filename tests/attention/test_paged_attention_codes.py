"""What each code of a one-byte cache stands for."""

from __future__ import annotations

import numpy as np
import pytest
from attention import inputs
from cache.inputs import DTYPES
from libraries import Library

import pykv


@pytest.mark.parametrize("head_size", [96, 128])
@pytest.mark.parametrize(("heads", "room"), [(1, 1), (2, 1), (4, 1), (16, 1), (32, 10_000), (64, 10_000)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", inputs.ONE_BYTE)
def test_every_code(array: Library, kind: str, dtype: str, heads: int, room: int, head_size: int) -> None:
    """Of a lone key the value comes out as it is; and for a query of one 1, an element of the key as ``lse``."""
    element = inputs.ONE_BYTE[kind]
    codes = np.arange(256, dtype=np.uint8).view(element)
    numbers = codes.astype(np.float32)
    values, finite = codes[~np.isinf(numbers)], codes[np.isfinite(numbers)]
    s, d = np.arange(256)[:, None], np.arange(head_size)
    at = 37 * s % head_size
    key_cache = finite[(s + d - at) % len(finite)].reshape(256, 1, 1, head_size)
    value_cache = values[(s + 5 * d) % len(values)].reshape(256, 1, 1, head_size)
    query = np.repeat((d == at)[:, None], heads, axis=1).astype(DTYPES[dtype])
    out, lse = array.output(np.zeros_like(query)), array.output(np.zeros((heads, 256), np.float32))
    pykv.paged_attention(
        out,
        array.input(query),
        array.input(key_cache),
        array.input(value_cache),
        array.input(np.repeat(np.arange(256, dtype=np.int32)[:, None], room, axis=1)),
        array.input(np.ones(256, np.int32)),
        kv_cache_dtype=kind,
        scale=1.0,
        lse=lse,
    )
    close = {"rtol": 1e-3, "atol": 1e-3 if kind == "int8" else 1e-6}
    want = np.broadcast_to(value_cache[:, 0].astype(np.float32), query.shape)
    np.testing.assert_allclose(array.numpy(out).astype(np.float32), want, **close)
    np.testing.assert_allclose(
        array.numpy(lse), np.tile(np.resize(finite, 256).astype(np.float32), (heads, 1)), **close
    )
