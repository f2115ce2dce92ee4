"""What each code of a one-byte cache stands for."""

from __future__ import annotations

import numpy as np
import pytest
from attention import inputs
from attention.inputs import ONE_BYTE, Sizes
from attention.test_paged_attention import rng
from cache.inputs import DTYPES
from libraries import Library
from tolerance import assert_attention, assert_close

import pykv


@pytest.mark.parametrize("head_size", [96, 128])
@pytest.mark.parametrize(("heads", "room"), [(1, 1), (2, 1), (4, 1), (16, 1), (32, 10_000), (64, 10_000)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ONE_BYTE)
def test_every_code(array: Library, kind: str, dtype: str, heads: int, room: int, head_size: int) -> None:
    """Of a lone key the value comes out as it is; and for a query of one 1, an element of the key as ``lse``."""
    element = ONE_BYTE[kind]
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


@pytest.mark.parametrize("room", [1, 10_000])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize(("group", "queries"), [(4, 1), (8, 1), (16, 1), (4, 4), (4, 8), (4, 16), (4, 40)])
@pytest.mark.parametrize("kind", ONE_BYTE)
def test_scale_that_rounds_to_zero(array: Library, kind: str, group: int, queries: int, layout: str, room: int) -> None:
    """From halves of the query to logits: all keys that are seen have the same weight then, and others none."""
    lens = [(queries, n) for n in (queries, 100, 57)]
    places = {"kind": kind, "layout": layout, "room": room, "decode": queries == 1}
    b = inputs.batch(rng(), lens, Sizes(2 * group, 2, 128), dtype="bfloat16", **places)
    query = inputs.scaled_query(b, np.full(b.query.shape[:2], 2.0**-110))
    b = b.changed(query=query, options=inputs.scales(kind, 2.0**-40, 1.3) | {"scale": 0.1})
    want_out, want_lse = inputs.expected(b)
    for invariant in (False, True):
        out, lse = (array.output(x) for x in inputs.outputs(b))
        inputs.run(array, b.changed(options=b.options | {"batch_invariant": invariant}), out, lse)
        assert_attention(array.numpy(out), want_out)
        assert_close(array.numpy(lse), want_lse, atol=2e-5, rtol=1e-5)
