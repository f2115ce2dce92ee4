"""Layers of experts of three models.  The yardstick reads the weights of those experts that have tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pykv
from pykv.gemm import pack_integers

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

TOKENS = [1, 16, 64, 512, 4096]


class Model(NamedTuple):
    name: str
    hidden: int
    inner: int
    experts: int
    k: int

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return [(2 * self.inner, self.hidden), (self.hidden, self.inner)]


MODELS = {
    Model("qwen3 30b", 2048, 768, 128, 8): ["bf16", "w4a16", "fp8 in blocks"],
    Model("mixtral", 4096, 14336, 8, 2): ["bf16", "w4a16", "fp8 of rows"],
    Model("deepseek v3", 7168, 2048, 256, 8): ["fp8 in blocks"],
}
BITS = {"bf16": 16.0, "w4a16": 4 + 16 / 128, "fp8 in blocks": 8.0, "fp8 of rows": 8.0}  # of an element


@cache
def chosen(tokens: int, m: Model, seed: int = 0) -> np.ndarray:
    """Different experts for each token."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, m.experts), np.float32), axis=1)[:, : m.k].astype("i4")


@cache
def packed(n: int, k: int) -> pykv.PackedWeight:
    """The same 32 rows again and again, which takes less time than packing others."""
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (32, k), dtype=np.uint8)
    w = pack_integers(codes, rng.uniform(0.01, 0.03, (32, k // 128)).astype(np.float16), group_size=128)
    header, codes, scales = np.split(w.data, [256, 256 + 16 * k])
    scales = np.tile(scales[: k // 128 * 64], n // 32)
    data = np.concatenate([header, np.tile(codes, n // 32), np.resize(scales, -(-len(scales) // 256) * 256)])
    return pykv.PackedWeight(data, w.format.replace(".n32.", f".n{n}."))


def codes(n: int, k: int) -> np.ndarray:
    """Of float8_e4m3fn, none of the largest."""
    return np.resize(np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8) & 0xBF, (n, k))


def scales(kind: str, m: Model, device: Device) -> dict[str, object]:
    shapes = [(n // 128, k // 128) if kind == "fp8 in blocks" else (n,) for n, k in m.shapes]
    return {f"w{i}_scale": device.random((m.experts, *shape), "float32") for i, shape in enumerate(shapes, 1)}


_seeds = count()
_arrays: dict[tuple[str, Model], list[object]] = {}


def weights(kind: str, m: Model, dtype: str, device: Device) -> list[object]:
    """Of all experts, once: together they are many times a cache."""
    if (kind, m) not in _arrays:
        _arrays.clear()  # those of one model at a time
        made: list[object] = []
        for n, k in m.shapes:
            if kind == "bf16":
                made.append(device.random((m.experts, n, k), dtype))
            else:
                one = packed(n, k).data if kind == "w4a16" else codes(n, k)
                array = device.array(np.zeros((m.experts, *one.shape), np.uint8))
                array[:] = device.array(one)
                made.append(array)
        _arrays[kind, m] = made
    return _arrays[kind, m]


def layer(kind: str, m: Model, tokens: int, dtype: str, device: Device) -> Call:
    w1, w2 = weights(kind, m, dtype, device)
    seed = next(_seeds) % 16  # calls in turn read other weights
    ids, x = device.array(chosen(tokens, m, seed)), device.random((tokens, m.hidden), dtype)
    routing, out = device.random((tokens, m.k), "float32"), device.random((tokens, m.hidden), dtype)
    more: dict[str, Any] = {}
    if kind == "w4a16":
        more = {f"w{i}_format": packed(n, k).format for i, (n, k) in enumerate(m.shapes, 1)}
    elif kind != "bf16":
        more = scales(kind, m, device)
    w8a8 = "w1_scale" in more
    size = pykv.fused_moe_workspace_size(tokens, m.k, m.experts, 2 * m.inner, m.inner, m.hidden, w8a8=w8a8)
    workspace = device.array(np.zeros(size, np.uint8))
    return lambda: pykv.fused_moe(out, x, w1, w2, routing, ids, workspace=workspace, **more)


def cases(dtypes: list[str]) -> Iterator[Case]:
    for dtype in dtypes:
        if dtype == "float32":
            continue
        for m, kinds in MODELS.items():
            for kind in kinds:
                for tokens in TOKENS:
                    active = len(np.unique(chosen(tokens, m)))
                    read = round(active * 3 * m.inner * m.hidden * BITS[kind] / 8) + 2 * tokens * m.hidden
                    size = {"tokens": tokens, "experts": active}
                    make = partial(layer, kind, m, tokens, dtype)
                    yield Case(f"fused_moe {m.name} {kind}", size, dtype, read, make, 2 * tokens * m.hidden)


if __name__ == "__main__":
    main(cases)
