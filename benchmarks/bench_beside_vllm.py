"""Operations on rows and caches beside vLLM's own kernels, in one run on one card, on the same arrays.

    VLLM_LIBRARIES=folder python benchmarks/bench_beside_vllm.py [--tokens 4096 --tokens 65536] [--json FILE]

Times are those of CUDA graphs with a cold L2 (pykv/_tools/timing.py), beside a plain copy that reads and writes as many
bytes.  A result that differs from vLLM's by more than a rounding is said.  See vllm_libraries.py for what is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import pykv
from pykv._tools import output

sys.path.insert(0, str(Path(__file__).parent))

from timing import Call, Cuda, on_cupys_stream, write_json
from vllm_libraries import load

BLOCK, HEADS, KV_HEADS, HEAD, HIDDEN = 16, 32, 8, 128, 4096
BF16, FP8 = "bfloat16", "float8_e4m3fn"


def on_torch(array: Any, dtype: str | None = None) -> Any:
    import torch

    tensor = torch.from_dlpack(array)
    return tensor if dtype is None else tensor.view(getattr(torch, dtype))


@dataclass(frozen=True)
class Pair:
    """Two calls that do the same, and what each of them leaves behind."""

    read: int  # bytes
    written: int
    ours: Call
    theirs: Call
    results: tuple[list[Any], list[Any]]


def slots(tokens: int, device: Cuda) -> Any:
    pages = np.random.default_rng(0).permutation(tokens // BLOCK)
    return device.array((pages[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1))


def reshape_and_cache_flash(tokens: int, device: Cuda) -> Pair:
    key, value = (device.random((tokens, KV_HEADS, HEAD), BF16) for _ in range(2))
    caches = [[device.random((tokens // BLOCK, BLOCK, KV_HEADS, HEAD), BF16) for _ in range(2)] for _ in range(2)]
    places, one = slots(tokens, device), device.array(np.ones(1, np.float32))
    given = [on_torch(a) for a in (key, value, *caches[1], places)]
    theirs = load("_C_stable_libtorch", "_C_cache_ops").reshape_and_cache_flash
    scale = on_torch(one)
    return Pair(
        2 * key.nbytes + places.nbytes, 2 * key.nbytes,
        lambda: pykv.reshape_and_cache_flash(key, value, *caches[0], places),
        lambda: theirs(*given, "auto", scale, scale), (caches[0], caches[1]),
    )  # fmt: skip


def concat_and_cache_mla(tokens: int, device: Cuda) -> Pair:
    latent, rope = device.random((tokens, 512), BF16), device.random((tokens, 64), BF16)
    caches = [device.random((tokens // BLOCK, BLOCK, 576), BF16) for _ in range(2)]
    places, one = slots(tokens, device), device.array(np.ones(1, np.float32))
    given = [on_torch(a) for a in (latent, rope, caches[1], places)]
    theirs, scale = load("_C_stable_libtorch", "_C_cache_ops").concat_and_cache_mla, on_torch(one)
    moved = latent.nbytes + rope.nbytes
    return Pair(
        moved + places.nbytes, moved, lambda: pykv.concat_and_cache_mla(latent, rope, caches[0], places, "auto", 1.0),
        lambda: theirs(*given, "auto", scale), ([caches[0]], [caches[1]]),
    )  # fmt: skip


def rms_norm(tokens: int, device: Cuda) -> Pair:
    x, weight = device.random((tokens, HIDDEN), BF16), device.random((HIDDEN,), BF16)
    outs = [device.random(x.shape, BF16) for _ in range(2)]
    given = [on_torch(a) for a in (outs[1], x, weight)]
    theirs = load("_C_stable_libtorch", "_C").rms_norm
    return Pair(
        x.nbytes, x.nbytes, lambda: pykv.rms_norm(outs[0], x, weight, 1e-6), lambda: theirs(*given, 1e-6),
        ([outs[0]], [outs[1]]),
    )  # fmt: skip


def rms_norm_dynamic_per_token_quant(tokens: int, device: Cuda) -> Pair:
    x, weight = device.random((tokens, HIDDEN), BF16), device.random((HIDDEN,), BF16)
    codes = [device.zeros(x.shape, "uint8") for _ in range(2)]
    scales = [device.zeros((tokens, 1), "float32") for _ in range(2)]
    given = [on_torch(codes[1], FP8), *(on_torch(a) for a in (x, weight, scales[1]))]
    theirs = load("_C_stable_libtorch", "_C").rms_norm_dynamic_per_token_quant
    return Pair(
        x.nbytes, x.nbytes // 2 + 4 * tokens,
        lambda: pykv.rms_norm_dynamic_per_token_quant(codes[0], x, weight, scales[0], 1e-6),
        lambda: theirs(*given, 1e-6, None, None), ([scales[0]], [scales[1]]),
    )  # fmt: skip


def silu_and_mul(tokens: int, device: Cuda) -> Pair:
    x = device.random((tokens, 2 * HIDDEN), BF16)
    outs = [device.random((tokens, HIDDEN), BF16) for _ in range(2)]
    given, theirs = [on_torch(a) for a in (outs[1], x)], load("_C_stable_libtorch", "_C").silu_and_mul
    return Pair(
        x.nbytes, x.nbytes // 2, lambda: pykv.silu_and_mul(outs[0], x), lambda: theirs(*given), ([outs[0]], [outs[1]])
    )


def rotary_embedding(tokens: int, device: Cuda) -> Pair:
    sides = [[device.random((tokens, n * HEAD), BF16) for n in (HEADS, KV_HEADS)] for _ in range(2)]
    angles = device.random((8192, HEAD), BF16)
    positions = device.array(np.random.default_rng(0).integers(0, 8192, tokens))
    given, theirs = [on_torch(a) for a in (positions, *sides[1])], load("_C_stable_libtorch", "_C").rotary_embedding
    cache, moved = on_torch(angles), sum(a.nbytes for a in sides[0])
    return Pair(
        moved, moved, lambda: pykv.rotary_embedding(positions, *sides[0], HEAD, angles, True),
        lambda: theirs(*given, HEAD, cache, True, 0, False), (sides[0], sides[1]),
    )  # fmt: skip


OPERATIONS: list[Callable[[int, Cuda], Pair]] = [
    reshape_and_cache_flash, concat_and_cache_mla, rms_norm, rms_norm_dynamic_per_token_quant, silu_and_mul,
    rotary_embedding,
]  # fmt: skip


def difference(pair: Pair, device: Cuda) -> float:
    """The largest, of one call of each, relative to the largest number."""
    pair.ours()
    device.cupy.cuda.Device().synchronize()
    on_cupys_stream(pair.theirs)()
    device.cupy.cuda.Device().synchronize()
    largest = 0.0
    for ours, theirs in zip(*pair.results, strict=True):
        a, b = ours.astype("f"), theirs.astype("f")
        largest = max(largest, float(abs(a - b).max()) / (float(abs(b).max()) or 1.0))
    return largest


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, action="append")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    asked = parser.parse_args()
    device, figures = Cuda(), []
    for make in OPERATIONS:
        for tokens in asked.tokens or [4096, 65536]:
            first = make(tokens, device)
            copies = -(-3 * device.cache_bytes // (first.read + first.written))
            pairs = [first, *(make(tokens, device) for _ in range(copies - 1))]
            differs = difference(first, device)
            times = {
                "us": device.time([p.ours for p in pairs]),
                "vllm_us": device.time([on_cupys_stream(p.theirs) for p in pairs]),
                "copy_us": device.time([device.copy(first.read, first.written, BF16) for _ in pairs]),
            }
            figures.append(
                {"op": make.__name__, "tokens": tokens, "difference": differs, **{k: 1e6 * v for k, v in times.items()}}
            )
            del first, pairs
            device.cupy.get_default_memory_pool().free_all_blocks()
    rows = [
        [
            str(f["op"]), str(f["tokens"]), *(f"{f[k]:.1f}" for k in ("us", "vllm_us", "copy_us")),
            f"{f['copy_us'] / f['us']:.0%}", f"{f['difference']:.1e}",
        ]
        for f in figures
    ]  # fmt: skip
    heads = ("operation", "tokens", "us", "vLLM, us", "copy, us", "of copy", "difference")
    output.show(f"{device.describe()['name']}, beside vLLM's kernels", heads, rows, right=1)
    if asked.json:
        write_json(asked.json, device, figures)


if __name__ == "__main__":
    main()
