"""Paged attention on CuPy arrays: on a stream of one's own, then in a CUDA graph, replayed with new contents.

python examples/with_cupy.py
"""

from __future__ import annotations

import cupy as cp

import pykv

BLOCK, KV_HEADS, HEADS, SIZE = 16, 8, 32, 128


def main() -> None:
    cache = pykv.PagedKVCache(1, 64, BLOCK, KV_HEADS, SIZE, "float16", like=cp)
    keys, values = cache.key_caches[0], cache.value_caches[0]
    slots = cache.append([0, 1], [5, 300])  # two sequences of 5 and 300 tokens
    tokens = [cp.random.standard_normal((305, KV_HEADS, SIZE)).astype(cp.float16) for _ in range(2)]
    tables, lens = cache.block_tables([0, 1]), cache.seq_lens([0, 1])
    query = cp.zeros((2, HEADS, SIZE), cp.float16)  # scores are all alike: the answer is the mean of the values
    out = cp.empty_like(query)
    size = pykv.paged_attention_workspace_size(2, 2, HEADS, KV_HEADS, SIZE)
    workspace = cp.empty(size, cp.uint8)
    cp.cuda.Device().synchronize()  # what is above ran on the default stream

    stream = cp.cuda.Stream(non_blocking=True)
    with stream:  # CuPy's current stream is the one that pykv takes
        pykv.reshape_and_cache_flash(*tokens, keys, values, slots)
        pykv.paged_attention(out, query, keys, values, tables, lens, workspace=workspace)
        print("mean of the values:", _error(out, tokens[1]))

        stream.begin_capture()
        pykv.reshape_and_cache_flash(*tokens, keys, values, slots)
        pykv.paged_attention(out, query, keys, values, tables, lens, workspace=workspace)
        graph = stream.end_capture()
        tokens[1] *= 2
        graph.launch(stream)
        print("replayed with others:", _error(out, tokens[1]))
    pykv.check_errors()


def _error(out: cp.ndarray, values: cp.ndarray) -> str:
    """How far the second sequence's answer is from the mean of its values."""
    mean = values[5:].astype(cp.float32).mean(0).repeat(HEADS // KV_HEADS, axis=0)
    return f"{float(abs(out[1] - mean).max()):.4f} off at most"


if __name__ == "__main__":
    main()
