"""Sequences that several blocks work on: the pieces they leave for each other are all added up, and no other call's.

Long tables keep these calls on the line of work that borders cut; calls with ``cu_query_lens`` go to other kernels, the
reference here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pykv

HEADS, KV_HEADS, HEAD_SIZE, PAGE, ROOM = 32, 8, 128, 16, 11008
kinds = pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])


def caches(cupy: Any, kind: str, pages: int) -> list[Any]:
    shape = (pages, PAGE, KV_HEADS, HEAD_SIZE)
    if kind == "auto":
        return [cupy.random.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in "kv"]
    return [cupy.random.randint(0, 0x58, shape, dtype=np.uint8) for _ in "kv"]


def assert_close(cupy: Any, got: Any, want: Any) -> None:
    got, want = got.astype(np.float32), want.astype(np.float32)
    assert cupy.linalg.norm(got - want) <= 2e-3 * cupy.linalg.norm(want)
    assert cupy.abs(got - want).max() <= 1e-2 * cupy.abs(want).max()


@kinds
@pytest.mark.parametrize("invariant", [False, True])
def test_graphs_replayed_at_once(cupy: Any, kind: str, invariant: bool) -> None:
    """Two calls share a workspace whose bits are all ones; lengths change between replays that nobody waits for."""
    seqs, replays = 12, 24
    cupy.random.seed(0)
    rng = np.random.default_rng(0)
    kv = caches(cupy, kind, 3000)
    query = cupy.random.standard_normal((seqs, HEADS, HEAD_SIZE), dtype=np.float32).astype(np.float16)
    table = cupy.asarray(rng.integers(0, 3000, (seqs, ROOM // PAGE)).astype(np.int32))
    mixed, one = rng.integers(0, ROOM, (replays, seqs)), np.where(np.eye(replays, seqs), ROOM, 40)
    lens = np.where(np.arange(replays)[:, None] % 2, mixed, one)
    all_lens = cupy.asarray(lens.astype(np.int32))
    now, later = cupy.zeros((2, seqs), np.int32)
    cu = cupy.arange(seqs + 1, dtype=np.int32)
    options = {"kv_cache_dtype": kind, "batch_invariant": invariant}
    size = pykv.paged_attention_workspace_size(seqs, seqs, HEADS, KV_HEADS, HEAD_SIZE, batch_invariant=invariant)
    workspace = cupy.full(size, 255, np.uint8)
    outs = cupy.zeros((replays, 2, *query.shape), np.float16)
    out = cupy.zeros((2, *query.shape), np.float16)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        pykv.paged_attention(out[0], query, *kv, table, now, stream=stream, **options)
        stream.begin_capture()
        for x, seq_lens in zip(out, (now, later), strict=True):
            pykv.paged_attention(x, query, *kv, table, seq_lens, workspace=workspace, stream=stream, **options)
        graph = stream.end_capture()
        for i in range(replays):
            now[:], later[:] = all_lens[i], all_lens[i - 1]
            graph.launch(stream)
            outs[i] = out
    stream.synchronize()
    for i in range(replays):
        assert (outs[i, 0].view(np.uint16) == outs[(i + 1) % replays, 1].view(np.uint16)).all()
        want = cupy.zeros_like(query)
        pykv.paged_attention(want, query, *kv, table, all_lens[i], cu_query_lens=cu, kv_cache_dtype=kind)
        assert_close(cupy, outs[i, 0], want)


@kinds
@pytest.mark.parametrize(("seqs", "length"), [(64, 3300), (128, 1700), (256, 900), (130, 1700), (33, 2500)])
def test_sequences_of_one_length(cupy: Any, seqs: int, length: int, kind: str) -> None:
    """Borders lie at the same places of all heads, in some cases between two sequences."""
    cupy.random.seed(0)
    kv = caches(cupy, kind, 1000)
    query = cupy.random.standard_normal((seqs, HEADS, HEAD_SIZE), dtype=np.float32).astype(np.float16)
    table = cupy.random.randint(0, 1000, (seqs, ROOM // PAGE), dtype=np.int32)
    out, want = cupy.zeros((2, *query.shape), np.float16)
    for last in (length, length - 700):  # alike, but for one
        lens = cupy.full(seqs, length, np.int32)
        lens[-1] = last
        pykv.paged_attention(out, query, *kv, table, lens, kv_cache_dtype=kind)
        cu = cupy.arange(seqs + 1, dtype=np.int32)
        pykv.paged_attention(want, query, *kv, table, lens, cu_query_lens=cu, kv_cache_dtype=kind)
        assert_close(cupy, out, want)
