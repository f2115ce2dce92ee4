"""Which kernels calls of paged attention launch: pykv.explain."""

from __future__ import annotations

from itertools import count, takewhile
from typing import Any

import numpy as np
import pytest
from attention.plans import TABLE, call, plan, table
from libraries import Cupy

import pykv
from pykv._libraries import numpy_dtype

KERNELS = tuple(takewhile(bool, map(pykv._C.paged_attention_kernel, count())))

# Calls on an H100, by a kernel that they launch, others than the defaults of plan().
CALLS: dict[str, dict[str, Any]] = {
    "simple": {"dtype": "float32"},
    "mma": {"layout": "packed", "seqs": 8, "tokens": 4},
    "mma_invariant": {"kind": "fp8_e4m3", "tokens": 2048, "room": 2048, "batch_invariant": True},
    "decode_line": {"seqs": 64, "room": 8192},
    "decode_cluster": {},
    "decode_spans": {"heads": 8, "kv_heads": 1, "room": 32768},
    "decode_either": {"seqs": 8, "room": 32768},
    "window_cluster": {"seqs": 8, "room": 8192, "window": 1024},
    "folded_line": {"seqs": 64, "room": 8192, "head_size": 64},
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
    "verify_line": {"seqs": 64, "tokens": 8, "room": 8192},
    "verify_block": {"seqs": 32, "tokens": 8, "room": 2048},
    "verify_cluster": {"seqs": 8, "tokens": 8, "room": 2048},
    "verify_spans": {"heads": 4, "kv_heads": 1, "tokens": 8, "room": 32768},
    "prefill": {"tokens": 2048, "room": 2048},
    "prefill_invariant": {"tokens": 2048, "room": 2048, "batch_invariant": True},
    "clear": {"tokens": 2048, "room": 2048},
    "combine": {"seqs": 64, "tokens": 8, "room": 8192},
}


def names(plan: Any) -> list[str]:
    """Of the kernels of a plan, without their sizes; the last line is the workspace."""
    assert plan[-1].startswith("workspace ")
    return [line.partition(":")[0].partition("<")[0] for line in plan[:-1]]


def test_names_are_many_and_differ() -> None:
    assert len(set(KERNELS)) == len(KERNELS) > 20
    assert pykv._C.paged_attention_kernel(-1) is None


def test_every_kernel_is_reached() -> None:
    found = {name: names(plan(device="H100", **call)) for name, call in CALLS.items()}
    assert {name: kernels for name, kernels in found.items() if name not in kernels} == {}
    assert {"cpu", *CALLS} == set(KERNELS)


def test_plans_are_those_of_the_table() -> None:
    """After a change that is meant: python tests/attention/plans.py."""
    assert table() == TABLE.read_text(encoding="utf-8")


def test_the_gpu_takes_what_is_planned_for_its_kind(cupy: Any) -> None:
    if int(cupy.cuda.Device().compute_capability) != 90:
        pytest.skip("the calls are those of compute capability 9.0")
    found = {name: names(plan(**call)) for name, call in CALLS.items()}
    assert {name: kernels for name, kernels in found.items() if name not in kernels} == {}


@pytest.mark.parametrize("name", CALLS)
def test_every_kernel_is_launched(cupy: Any, name: str) -> None:
    """Of values that are all alike, whatever the weights: so are the results.  Tables are wider than lengths."""
    if int(cupy.cuda.Device().compute_capability) != 90:
        pytest.skip("the calls are those of compute capability 9.0")
    sizes = CALLS[name]
    tokens, kind = sizes.get("tokens", 1), sizes.get("kind", "auto")
    seqs = sizes.get("seqs", 1)
    # of each byte: 1 in e4m3; 1 in e2m1, and 5 / 32 as a scale
    byte, wanted = {"auto": (None, 1.0), "fp8_e4m3": (0x38, 1.0), "nvfp4": (0x22, 5 / 32)}[kind]
    lens = np.minimum(tokens + 41 * np.arange(seqs), sizes.get("room", 1024)).astype(np.int32)
    assert lens.min() >= tokens, "tokens before the first key see nothing, and give 0"

    def array(parameter: str, shape: tuple[int, ...], dtype: str) -> Any:
        if parameter == "seq_lens":
            return Cupy().input(lens)
        if parameter == "cu_query_lens":
            return Cupy().input(np.arange(seqs + 1, dtype=np.int32) * tokens)
        if parameter == "block_tables":
            return Cupy().input((np.arange(np.prod(shape)) % 64).reshape(shape).astype(np.int32))
        value = 7.0 if parameter == "out" else 1.0 if byte is None or parameter == "query" else byte
        return Cupy().output(np.full(shape, value, numpy_dtype(dtype)))

    arguments = call(array, **sizes)
    pykv.paged_attention(**arguments)
    assert name in names(pykv._C.paged_attention_plan().splitlines())
    np.testing.assert_allclose(Cupy().numpy(arguments["out"]).astype(np.float32), wanted, rtol=1e-2)


def test_an_unknown_device_is_named() -> None:
    with pytest.raises(ValueError, match="device: must be one of 'A100', 'H100' and 'H200', got 'Z80'"):
        plan(device="Z80")
    assert plan(device="A100") != plan(device="H100")
    call = np.zeros((1, 4, 64), np.float32), np.zeros((4, 16, 2, 64), np.float32)
    explanation = pykv.explain(
        "paged_attention", call[0], call[0], call[1], call[1], np.zeros((1, 4), np.int32), np.array([3])
    )
    assert explanation.plan == ("cpu", "workspace 0"), "the thread plans for another device"


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


def test_a_plan_for_another_device_says_so() -> None:
    q, cache = np.zeros((1, 4, 64), np.float16), np.zeros((4, 16, 2, 64), np.float16)
    call = q, q, cache, cache, np.zeros((1, 4), np.int32), np.array([3], np.int32)
    assert "\n  on H100 it would be\n  decode_cluster<" in str(pykv.explain("paged_attention", *call, device="H100"))
    with pytest.raises(ValueError, match="device: must be None for relu2, of which there is no plan, got 'H100'"):
        pykv.explain("relu2", q, q, device="H100")
