"""A call of paged_attention stays within the workspace that it asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import pykv

GUARD = 1 << 20
LENGTH, BLOCK, KV_HEADS, GROUP = 36000, 16, 8, 4  # long enough that every block of the grid leaves pieces behind


@pytest.mark.parametrize("queries", [(1, 1), (4, 4), (64, 64), (64, 1), (4000, 1)], ids=str)
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_nothing_beside_the_workspace_is_written(
    cupy: Any, batch_invariant: bool, head_size: int, queries: tuple[int, int]
) -> None:
    random = cupy.random.RandomState(0)
    shape = (LENGTH // BLOCK, BLOCK, KV_HEADS, head_size)
    k, v = (random.standard_normal(shape, dtype=np.float32).astype(np.float16) for _ in "kv")
    table = cupy.asarray(np.tile(np.arange(shape[0], dtype=np.int32), (2, 1)))
    lens = cupy.array([LENGTH, LENGTH - 100], np.int32)
    cu = cupy.asarray(np.cumsum([0, *queries]).astype(np.int32))
    num_tokens, num_heads = sum(queries), KV_HEADS * GROUP
    q = random.standard_normal((num_tokens, num_heads, head_size), dtype=np.float32).astype(np.float16)
    size = pykv.paged_attention_workspace_size(
        num_tokens, 2, num_heads, KV_HEADS, head_size, batch_invariant=batch_invariant
    )

    memory = cupy.full(GUARD + size + GUARD, 0xA5, np.uint8)
    results = []
    for workspace in (memory[GUARD : GUARD + size], None):
        results.append(cupy.empty_like(q))
        pykv.paged_attention(
            results[-1],
            q,
            k,
            v,
            table,
            lens,
            cu_query_lens=None if num_tokens == 2 else cu,
            workspace=workspace,
            batch_invariant=batch_invariant,
        )
    assert (memory[:GUARD] == 0xA5).all()
    assert (memory[GUARD + size :] == 0xA5).all()
    assert (results[0].view(np.uint16) == results[1].view(np.uint16)).all()
