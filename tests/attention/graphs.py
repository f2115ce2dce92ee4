"""Calls of paged_attention captured in a CUDA graph, by CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np
from attention import inputs
from attention.inputs import Batch
from cache import inputs as cache_inputs
from tolerance import assert_attention

import pykv


class CapturedCalls:
    """So many calls for a batch, one after another; replays have other lengths."""

    def __init__(self, cupy: Any, b: Batch, calls: int = 1, batch_invariant: bool = False) -> None:
        self.cupy, self.batch = cupy, b
        query, tables = cupy.asarray(b.query), cupy.asarray(b.block_tables)
        self.seq_lens = cupy.asarray(b.seq_lens)
        self.cu_query_lens = None if b.cu_query_lens is None else cupy.asarray(b.cu_query_lens)
        # CuPy has no fp8 of its own.
        memories = [cupy.asarray(m.view(np.uint8) if b.kind.startswith("fp8") else m) for m in b.memories]
        caches = (cache_inputs.view(memories[0], b.layout.key), cache_inputs.view(memories[-1], b.layout.value))
        self.out = cupy.zeros_like(query)
        num_tokens, heads, head_size = b.query.shape
        kv_heads = b.key_cache.shape[1 if b.layout.packed else 2]
        num_bytes = pykv.paged_attention_workspace_size(
            num_tokens, len(b.seq_lens), heads, kv_heads, head_size, batch_invariant=batch_invariant
        )
        self.kept = (query, tables, memories, cupy.full(num_bytes, 255, np.uint8))
        self.stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with self.stream:
            self.stream.begin_capture()
            for _ in range(calls):
                pykv.paged_attention(
                    self.out,
                    query,
                    *caches,
                    tables,
                    self.seq_lens,
                    cu_query_lens=self.cu_query_lens,
                    kv_cache_dtype=b.kind,
                    batch_invariant=batch_invariant,
                    workspace=self.kept[-1],
                    stream=self.stream,
                    **b.options,
                )
            self.graph = self.stream.end_capture()

    def check(self, seq_lens: Any, queries: Any = None) -> None:
        """A replay with these lengths and, of each sequence, so many query tokens."""
        b = self.batch.changed(seq_lens=np.array(seq_lens, self.batch.seq_lens.dtype))
        if queries is not None:
            assert b.cu_query_lens is not None
            assert self.cu_query_lens is not None
            b = b.changed(cu_query_lens=np.cumsum([0, *queries]).astype(b.cu_query_lens.dtype))
            self.cu_query_lens.set(b.cu_query_lens)
        self.seq_lens.set(b.seq_lens)
        self.out[:] = inputs.SENTINEL
        self.cupy.cuda.Device().synchronize()
        self.graph.launch(self.stream)
        self.stream.synchronize()
        want, _ = inputs.expected(b)
        assert_attention(self.cupy.asnumpy(self.out), want)


def check_what_the_kernel_before_wrote(cupy: Any, lens: np.ndarray, b: Batch) -> None:
    """Calls for a batch of such lengths, with lengths and tables that a kernel writes in front of each."""
    versions = [
        (b.block_tables, lens),
        (np.roll(b.block_tables, 1, 0), np.roll(lens, 1)),
        (b.block_tables, lens // 2),
    ]
    both = np.stack([np.column_stack((lens, table)) for table, lens in [versions[-1], *versions]]).astype(np.int32)
    now = cupy.asarray(both)  # the first, which the kernels before write, and the versions
    query = cupy.asarray(b.query)
    memories = [cupy.asarray(m.view(np.uint8) if b.kind.startswith("fp8") else m) for m in b.memories]
    caches = (cache_inputs.view(memories[0], b.layout.key), cache_inputs.view(memories[-1], b.layout.value))
    outs = [cupy.zeros_like(query) for _ in versions]
    mappings = [cupy.array([[i + 1, 0]]) for i in range(len(versions))]
    cu_query_lens = None if b.cu_query_lens is None else cupy.asarray(b.cu_query_lens)
    options = {"cu_query_lens": cu_query_lens, "kv_cache_dtype": b.kind, **b.options}

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        pykv.paged_attention(outs[0], query, *caches, now[0, :, 1:], now[0, :, 0], stream=stream, **options)
        stream.begin_capture()
        for out, mapping in zip(outs, mappings, strict=True):
            pykv.copy_blocks_mla([now], mapping, stream=stream)
            pykv.paged_attention(out, query, *caches, now[0, :, 1:], now[0, :, 0], stream=stream, **options)
        graph = stream.end_capture()
        for _ in range(20):
            graph.launch(stream)
    stream.synchronize()
    for out, (table, these) in zip(outs, versions, strict=True):
        want, _ = inputs.expected(
            b.changed(block_tables=table.astype(b.block_tables.dtype), seq_lens=these.astype(b.seq_lens.dtype))
        )
        assert_attention(cupy.asnumpy(out), want)
