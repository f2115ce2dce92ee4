"""Which kernels calls of paged attention launch: pykv.explain."""

from __future__ import annotations

from itertools import count, takewhile
from typing import Any

import numpy as np
import pytest

import pykv

ADDRESS = 1 << 20  # what a plan is made for is never looked at

KERNELS = tuple(takewhile(bool, map(pykv._C.paged_attention_kernel, count())))

# Calls on an H100, by a kernel that they launch, others than the defaults of plan().
CALLS: dict[str, dict[str, Any]] = {
    "simple": {"dtype": "float32"},
    "mma": {"layout": "packed", "seqs": 8, "tokens": 4},
    "mma_invariant": {"kind": "fp8_e4m3", "tokens": 2048, "batch_invariant": True},
    "decode_line": {"seqs": 64, "room": 8192},
    "decode_cluster": {},
    "decode_spans": {"heads": 8, "kv_heads": 1, "room": 32768},
    "decode_either": {"seqs": 8, "room": 32768},
    "window_cluster": {"seqs": 8, "room": 8192, "window": 1024},
    "folded_line": {"seqs": 64, "room": 8192, "head_size": 64},
    "folded_cluster": {"seqs": 8, "head_size": 64},
    "folded_either": {"seqs": 8, "room": 32768, "head_size": 64},
    "small_pages_line": {"seqs": 64, "room": 8192, "page": 1},
    "small_pages_cluster": {"seqs": 8, "page": 1},
    "invariant_line": {"seqs": 64, "room": 8192, "batch_invariant": True},
    "invariant_cluster": {"seqs": 8, "batch_invariant": True},
    "invariant_spans": {"heads": 8, "kv_heads": 1, "room": 32768, "batch_invariant": True},
    "tokens_line": {"kind": "nvfp4", "seqs": 32, "tokens": 4, "room": 8192},
    "tokens_cluster": {"seqs": 8, "tokens": 4, "room": 2048},
    "tokens_spans": {"heads": 8, "kv_heads": 1, "tokens": 2, "room": 32768},
    "tokens_either": {"seqs": 8, "tokens": 2, "room": 32768},
    "warpgroup_line": {"seqs": 64, "tokens": 8, "room": 8192},
    "warpgroup_block": {"seqs": 32, "tokens": 8, "room": 2048},
    "warpgroup_cluster": {"seqs": 8, "tokens": 8, "room": 2048},
    "warpgroup_spans": {"heads": 4, "kv_heads": 1, "tokens": 8, "room": 32768},
    "prefill": {"tokens": 2048, "room": 2048},
    "prefill_invariant": {"tokens": 2048, "room": 2048, "batch_invariant": True},
    "clear": {"tokens": 2048, "room": 2048},
    "combine": {"seqs": 64, "tokens": 8, "room": 8192},
    "combine_invariant": {"kind": "fp8_e4m3", "tokens": 2048, "batch_invariant": True},
}


def names(plan: Any) -> list[str]:
    """Of the kernels of a plan, without their sizes; the last line is the workspace."""
    assert plan[-1].startswith("workspace ")
    return [line.partition(":")[0].partition("<")[0] for line in plan[:-1]]


def plan(
    *,
    seqs: int = 1,
    tokens: int = 1,  # of each sequence
    room: int = 1024,  # tokens of a row of block_tables
    heads: int = 32,
    kv_heads: int = 8,
    head_size: int = 128,
    page: int = 16,
    dtype: str = "bfloat16",
    kind: str = "auto",
    layout: str = "NHD",
    **options: Any,
) -> Any:
    def array(shape: tuple[int, ...], dtype: str = dtype) -> Any:
        return pykv.from_pointer(ADDRESS, shape, dtype)

    element = dtype if kind == "auto" else "uint8"
    row = head_size * 9 // 16 if kind == "nvfp4" else head_size
    shapes = [(64, page, kv_heads, row)] * 2
    if layout == "packed":
        shapes = [(64, kv_heads, head_size // 8, page, 8), (64, kv_heads, head_size, page)]
    return pykv.explain(
        "paged_attention",
        *[array((seqs * tokens, heads, head_size))] * 2,
        *(array(shape, element) for shape in shapes),
        array((seqs, room // page), "int32"),
        array((seqs,), "int32"),
        cu_query_lens=None if tokens == 1 else array((seqs + 1,), "int32"),
        kv_cache_dtype=kind,
        **options,
    ).plan


def test_names_are_many_and_differ() -> None:
    assert len(set(KERNELS)) == len(KERNELS) > 20
    assert pykv._C.paged_attention_kernel(-1) is None


def test_every_kernel_is_reached(cupy: Any) -> None:
    if int(cupy.cuda.Device().compute_capability) != 90:
        pytest.skip("the calls are those of compute capability 9.0")
    found = {name: names(plan(**call)) for name, call in CALLS.items()}
    assert {name: kernels for name, kernels in found.items() if name not in kernels} == {}
    assert {"cpu", *CALLS} == set(KERNELS)


def test_a_plan_is_what_is_launched(cupy: Any) -> None:
    q = cupy.zeros((8, 32, 128), np.float16)
    cache = cupy.zeros((64, 16, 8, 128), np.float16)
    tables, lens = cupy.zeros((8, 64), np.int32), cupy.full(8, 1000, np.int32)
    out = cupy.full_like(q, 7)
    planned = pykv.explain("paged_attention", out, q, cache, cache, tables, lens).plan
    assert (out == 7).all(), "explain() has launched something"
    pykv.paged_attention(out, q, cache, cache, tables, lens)
    assert (out == 0).all()
    assert tuple(pykv._C.paged_attention_plan().splitlines()) == planned
    assert planned[-1] == f"workspace {pykv.paged_attention_workspace_size(8, 8, 32, 8, 128)}"


def test_a_plan_on_the_cpu_computes_nothing() -> None:
    q = np.zeros((1, 4, 64), np.float32)
    cache = np.zeros((4, 16, 2, 64), np.float32)
    out = np.full_like(q, 7)
    call = out, q, cache, cache, np.zeros((1, 4), np.int32), np.array([3], np.int32)
    explanation = pykv.explain("paged_attention", *call)
    assert explanation.plan == ("cpu", "workspace 0")
    assert "\n  cpu\n  workspace 0" in str(explanation)
    assert (out == 7).all()
    with pytest.raises(ValueError, match="window"):
        pykv.explain("paged_attention", *call, window=-1)
    pykv.paged_attention(*call)
    assert (out == 0).all(), "a plan that failed has left the thread planning"
    assert pykv.explain("rms_norm", np.ones((2, 8)), np.ones((2, 8)), None).plan == ()
