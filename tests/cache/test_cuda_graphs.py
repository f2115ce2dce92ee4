"""The cache ops inside a CUDA graph: whatever they need travels with the launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache import reference, reference_indexer, reference_mla

import pykv


def replay(cupy: Any, body: Callable[[Any], None], between: Callable[[], None]) -> None:
    """Captures ``body(stream)``, runs ``between``, then launches the graph."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        body(stream)
        graph = stream.end_capture()
        between()
        graph.launch(stream)
    stream.synchronize()


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("packed", [False, True])
def test_reshape_and_cache(cupy: Any, packed: bool, kind: str) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((40, 4, 64)).astype(np.float16)
    slots = rng.permutation(96)[:40]
    element, x = (np.float16, 8) if kind == "auto" else (np.uint8, 16)
    shapes = ((6, 4, 64 // x, 16, x), (6, 4, 64, 16)) if packed else ((6, 16, 4, 64),) * 2
    expected = [np.zeros(shape, element) for shape in shapes]
    caches = [cupy.zeros(shape, element) for shape in shapes]
    name = "reshape_and_cache" if packed else "reshape_and_cache_flash"
    getattr(reference, name)(tokens, tokens, *expected, slots, kind, 0.5, 2.0)
    key, where = cupy.zeros_like(cupy.asarray(tokens)), cupy.full(40, -1)
    scale = np.full(4, 0.5, np.float32)  # read during the call, not at replay

    def later() -> None:
        scale[:] = 99
        key.set(tokens)
        where.set(slots)

    op = getattr(pykv, name)
    replay(cupy, lambda stream: op(key, key, *caches, where, kind, scale, 2.0, stream=stream), later)
    for got, wanted in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(got), wanted)


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
def test_rotary_and_cache(cupy: Any, kind: str) -> None:
    """Replayed twice, on what has changed in between: it rotates in place, and by nothing that may be rounded."""
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((40, 2, 64)).astype(np.float16)
    cos_sin = np.repeat([[2.0, 0.0]], 32, axis=1).astype(np.float16)  # heads become twice what they are
    expected = [np.zeros((6, 16, 2, 64), np.float16 if kind == "auto" else np.uint8) for _ in range(2)]
    caches = [cupy.asarray(cache) for cache in expected]
    slots = rng.permutation(96)[:40]
    reference.reshape_and_cache_flash(4 * tokens, tokens, *expected, slots, kind, 0.5, 2.0)
    query, key, value = (cupy.zeros((40, 2, 64), np.float16) for _ in range(3))
    positions, where, angles = cupy.zeros(40, np.int64), cupy.full(40, -1), cupy.asarray(cos_sin)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        pykv.rotary_and_cache(positions, query, key, value, angles, True, *caches, where, kind, 0.5, 2.0, stream=stream)
        graph = stream.end_capture()
        for array, now in ((query, tokens), (key, tokens), (value, tokens), (where, slots)):
            array.set(now)
        graph.launch(stream)
        graph.launch(stream)
    stream.synchronize()
    for array in (query, key):
        np.testing.assert_array_equal(cupy.asnumpy(array), 4 * tokens)
    for got, wanted in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(cupy.asnumpy(got), wanted)


@pytest.mark.parametrize("on_device", [False, True])
def test_copy_blocks(cupy: Any, on_device: bool) -> None:
    pairs = np.array([[0, 1], [2, 3]]) if on_device else np.array([[0, 1], [1, 2], [3, 0]])
    expected = np.random.default_rng(0).random((5, 4, 8), np.float32)
    caches = [cupy.zeros((5, 4, 8), np.float32) for _ in range(2)]
    mapping = cupy.asarray(pairs) if on_device else pairs.copy()

    def later() -> None:
        if not on_device:
            mapping[:] = 0
        for cache in caches:
            cache.set(expected)

    replay(cupy, lambda stream: pykv.copy_blocks(caches[:1], caches[1:], mapping, stream=stream), later)
    reference.copy_blocks([expected], pairs)
    for cache in caches:
        np.testing.assert_array_equal(cupy.asnumpy(cache), expected)


def test_swap_blocks(cupy: Any) -> None:
    src = np.random.default_rng(0).integers(0, 256, (8, 32), np.uint8)
    on_device, target = cupy.zeros((8, 32), cupy.uint8), cupy.zeros((8, 32), cupy.uint8)
    pairs = np.array([[0, 3], [1, 4], [7, 0]])
    replay(
        cupy,
        lambda stream: pykv.swap_blocks(on_device, target, 32, pairs, stream=stream),
        lambda: on_device.set(src),
    )
    expected = np.zeros(256, np.uint8)
    reference.swap_blocks(src.reshape(-1), expected, 32, pairs)
    np.testing.assert_array_equal(cupy.asnumpy(target).reshape(-1), expected)


def test_swap_blocks_batch(cupy: Any) -> None:
    """From pinned memory and the device; addresses are read during the call, memory at replay."""
    src = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(4096), np.uint8, 4096)
    on_device, target = cupy.zeros(4096, cupy.uint8), cupy.zeros(8192, cupy.uint8)
    pinned[:] = 0
    rows = np.array(
        [[pinned.ctypes.data + 16, target.data.ptr, 3000], [on_device.data.ptr, target.data.ptr + 4096, 77]]
    )

    def later() -> None:
        rows[:] = 0
        on_device.set(src)
        pinned[:] = src

    replay(cupy, lambda stream: pykv.swap_blocks_batch(*rows.T, stream=stream), later)
    expected = np.zeros(8192, np.uint8)
    expected[:3000], expected[4096:4173] = src[16:3016], src[:77]
    np.testing.assert_array_equal(cupy.asnumpy(target), expected)


@pytest.mark.parametrize("size", [128, 24])
def test_indexer_cache(cupy: Any, size: int) -> None:
    """Written and gathered in one graph."""
    k = np.random.default_rng(0).standard_normal((40, size)).astype(np.float16)
    cache, keys = cupy.zeros((3, 16, size + 4), cupy.uint8), cupy.zeros((40, size), cupy.float16)
    values, scales = cupy.zeros((40, size), cupy.uint8), cupy.zeros((40, 1), cupy.float32)
    slots, table, ends = cupy.full(40, -1), cupy.asarray([[2, 0, 1]]), cupy.asarray([0, 40])

    def body(stream: Any) -> None:
        pykv.indexer_k_quant_and_cache(keys, cache, slots, size, "ue8m0", stream=stream)
        pykv.cp_gather_indexer_k_quant_cache(cache, values, scales, table, ends, stream=stream)

    def later() -> None:
        keys.set(k)
        slots.set(np.concatenate([np.arange(32, 48), np.arange(24)]))

    replay(cupy, body, later)
    own = reference_indexer.scales_of(k, "ue8m0")[:, None]
    np.testing.assert_array_equal(cupy.asnumpy(scales), own)
    np.testing.assert_array_equal(cupy.asnumpy(values), reference.quantise(k, own, "fp8_e4m3"))


@pytest.mark.parametrize("tokens", [40, 3000])
@pytest.mark.parametrize("indexer", [False, True], ids=["entries", "indexer"])
def test_gathers_read_what_the_kernel_before_wrote(cupy: Any, indexer: bool, tokens: int) -> None:
    """They look at ids early; what the kernel before writes is what counts, ids and cache."""
    rng = np.random.default_rng(tokens)
    blocks, block_size, size, requests = 12, 64, 128, 3
    width = -(-tokens // block_size)
    versions = 4  # of ids and of the cache; the first is what the kernels before write
    caches = rng.integers(0, 256, (versions, blocks, block_size, size + 4), np.uint8)
    tables = rng.integers(0, blocks, (versions, requests, width)).astype(np.int32)
    inner = np.sort(rng.integers(0, tokens + 1, (versions, requests - 1)))
    ends = np.column_stack((np.zeros(versions, int), inner, np.full(versions, tokens))).astype(np.int32)
    ids = np.concatenate((tables.reshape(versions, -1), ends), axis=1)
    now, now_ids = cupy.asarray(caches), cupy.asarray(ids)
    table, starts = now_ids[0, : requests * width].reshape(requests, width), now_ids[0, requests * width :]
    mappings = [cupy.array([[i, 0]]) for i in range(1, versions)]
    outs = [
        (cupy.zeros((tokens, size), np.uint8), cupy.zeros((tokens, 1), np.float32))
        if indexer
        else (cupy.zeros((tokens, size + 4), np.uint8),)
        for _ in mappings
    ]
    stream = cupy.cuda.Stream(non_blocking=True)

    def body() -> None:
        for out, mapping in zip(outs, mappings, strict=True):
            pykv.copy_blocks_mla([now], mapping, stream=stream)
            pykv.copy_blocks_mla([now_ids], mapping, stream=stream)
            if indexer:
                pykv.cp_gather_indexer_k_quant_cache(now[0], *out, table, starts, stream=stream)
            else:
                pykv.cp_gather_cache(now[0], *out, table, starts, requests, stream=stream)

    cupy.cuda.Device().synchronize()
    with stream:
        body()  # loads the modules
        stream.begin_capture()
        body()
        graph = stream.end_capture()
        for _ in range(20):
            for out in outs:
                for array in out:
                    array.fill(0)
            graph.launch(stream)
    stream.synchronize()
    for i, out in enumerate(outs, 1):
        want = [np.zeros(array.shape, array.dtype) for array in out]
        if indexer:
            reference_indexer.cp_gather_indexer_k_quant_cache(caches[i], *want, tables[i], ends[i])
        else:
            reference_mla.gather(caches[i], *want, tables[i], ends[i][:-1], np.diff(ends[i]))
        for got, wanted in zip(out, want, strict=True):
            np.testing.assert_array_equal(cupy.asnumpy(got).view(np.uint8), wanted.view(np.uint8))
