"""Routing of tokens to experts, the maps of pairs, and the rows that move by them.

Experts, choices and widths are those of Mixtral 8x7B, Qwen3 30B and DeepSeek-V3.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

TOKENS = [1, 16, 64, 512, 4096, 32768]
MOST_MOVED = 4096  # tokens whose rows are moved


class Model(NamedTuple):
    experts: int
    k: int
    hidden: int


MODELS = [Model(8, 2, 4096), Model(128, 8, 2048), Model(256, 8, 7168)]
BLOCKS = [16, 128]


def filled(device: Device, *shape: int, dtype: str = "int32") -> Any:
    return device.random(shape, dtype)


# What a case is asked for thousands of times is made once.
@cache
def chosen(tokens: int, m: Model) -> np.ndarray:
    """Different experts for each token."""
    return np.argsort(np.random.default_rng(tokens).random((tokens, m.experts), np.float32), axis=1)[:, : m.k].astype(
        "i4"
    )


@cache
def order(tokens: int, m: Model) -> np.ndarray:
    """The pairs, sorted by expert."""
    return np.argsort(chosen(tokens, m).reshape(-1), kind="stable").astype("i4")


@cache
def places(tokens: int, m: Model) -> np.ndarray:
    return np.argsort(order(tokens, m)).reshape(tokens, m.k).astype("i4")


def routed(op: Callable[..., None], tokens: int, m: Model, dtype: str, device: Device) -> Call:
    weights, ids = filled(device, tokens, m.k, dtype="float32"), filled(device, tokens, m.k)
    rows, logits = filled(device, tokens, m.k), device.random((tokens, m.experts), dtype)
    return lambda: op(weights, ids, rows, logits, True)


def grouped(tokens: int, m: Model, dtype: str, device: Device) -> Call:
    weights, ids = filled(device, tokens, m.k, dtype="float32"), filled(device, tokens, m.k)
    logits, bias = device.random((tokens, m.experts), dtype), device.random((m.experts,), "float32")
    return lambda: pykv.grouped_topk(weights, ids, logits, 8, 4, m.k, True, 2.5, bias, 1)


def align(block: int, tokens: int, m: Model, dtype: str, device: Device) -> Call:
    pairs, ids = tokens * m.k, device.array(chosen(tokens, m))
    capacity = pairs + min(pairs, m.experts) * (block - 1)
    made = [filled(device, n) for n in (capacity, capacity // block + 1, 1)]
    return lambda: pykv.moe_align_block_size(ids, m.experts, block, *made)


def align_bytes(block: int, tokens: int, m: Model, item: int) -> tuple[int, int]:
    pairs = tokens * m.k
    capacity = pairs + min(pairs, m.experts) * (block - 1)
    return 4 * pairs, 4 * (capacity + capacity // block + 1)


def permute(tokens: int, m: Model, dtype: str, device: Device) -> Call:
    x, ids = device.random((tokens, m.hidden), dtype), device.array(chosen(tokens, m))
    out, first = device.random((tokens * m.k, m.hidden), dtype), filled(device, m.experts + 1, dtype="int64")
    to, pairs = filled(device, tokens, m.k), filled(device, tokens * m.k)
    return lambda: pykv.moe_permute(x, ids, None, None, m.experts, m.experts, m.k, out, first, to, pairs)


def unpermute(tokens: int, m: Model, dtype: str, device: Device) -> Call:
    rows, weights = device.random((tokens * m.k, m.hidden), dtype), device.random((tokens, m.k), "float32")
    to, out = device.array(places(tokens, m)), device.random((tokens, m.hidden), dtype)
    return lambda: pykv.moe_unpermute(rows, weights, to, None, m.k, out)


def summed(tokens: int, m: Model, dtype: str, device: Device) -> Call:
    rows, out = device.random((tokens, m.k, m.hidden), dtype), device.random((tokens, m.hidden), dtype)
    return lambda: pykv.moe_sum(rows, out)


def shuffle(tokens: int, m: Model, dtype: str, device: Device) -> Call:
    x, out = device.random((tokens, m.hidden), dtype), device.random((tokens * m.k, m.hidden), dtype)
    where = device.array(order(tokens, m) // m.k)
    return lambda: pykv.shuffle_rows(x, where, out)


Bytes = Callable[[int, Model, int], tuple[int, int]]  # read and written, for elements of so many bytes


def routed_bytes(written: int, tokens: int, m: Model, item: int) -> tuple[int, int]:
    return tokens * m.experts * item, written * tokens * m.k


ROUTING: dict[str, tuple[Callable[..., Call], Bytes]] = {
    "topk_softmax": (partial(routed, pykv.topk_softmax), partial(routed_bytes, 12)),
    "topk_sigmoid": (partial(routed, pykv.topk_sigmoid), partial(routed_bytes, 12)),
    "topk_softplus_sqrt": (partial(routed, pykv.topk_softplus_sqrt), partial(routed_bytes, 12)),
    "grouped_topk": (grouped, partial(routed_bytes, 8)),
    **{f"moe_align_block_size, {b}": (partial(align, b), partial(align_bytes, b)) for b in BLOCKS},
}
ROWS: dict[str, tuple[Callable[..., Call], Bytes]] = {
    "moe_permute": (permute, lambda t, m, item: (t * (m.hidden * item + 4 * m.k), t * m.k * (m.hidden * item + 8))),
    "moe_unpermute": (unpermute, lambda t, m, item: (t * m.k * (m.hidden * item + 8), t * m.hidden * item)),
    "moe_sum": (summed, lambda t, m, item: (t * m.k * m.hidden * item, t * m.hidden * item)),
    "shuffle_rows": (shuffle, lambda t, m, item: (t * (m.hidden * item + 4 * m.k), t * m.k * m.hidden * item)),
}


MODELS_OF = {
    "topk_sigmoid": MODELS[2:],
    "topk_softplus_sqrt": MODELS[2:],
    "grouped_topk": MODELS[2:],
}


def cases(dtypes: list[str]) -> Iterator[Case]:
    for name, (make, bytes_of) in (ROUTING | ROWS).items():
        for dtype in dtypes:
            item = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
            for m in MODELS:
                for tokens in TOKENS:
                    if m not in MODELS_OF.get(name, MODELS) or (name in ROWS and tokens > MOST_MOVED):
                        continue
                    read, written = bytes_of(tokens, m, item)
                    size = {"tokens": tokens, "experts": m.experts, "k": m.k} | (
                        {"hidden": m.hidden} if name in ROWS else {}
                    )
                    yield Case(name, size, dtype, read + written, partial(make, tokens, m, dtype), written)


if __name__ == "__main__":
    main(cases)
