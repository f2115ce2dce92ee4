"""Small right calls of the operations of norm, and calls of a size that means something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pykv._schema import Spec
from pykv._tools.samples import _sizes as sizes
from pykv._tools.samples._arrays import Sample, floats, ids, ungated
from pykv._tools.samples._workload import HEAD, HEADS, KV_HEADS, Tokens, Workload


def added(**options: Any) -> Sample:
    return {"input": floats(3, 8), "residual": floats(3, 8, seed=1), **options}


def codes(**options: Any) -> Sample:
    return {"result": np.zeros((3, 8), np.uint8), **options}


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "rms_norm": lambda: ungated(weight=floats(8)),
    "fused_add_rms_norm": lambda: added(weight=floats(8)),
    "gemma_rms_norm": lambda: ungated(weight=floats(8)),
    "gemma_fused_add_rms_norm": lambda: added(weight=floats(8)),
    "layer_norm": lambda: ungated(weight=floats(8), bias=floats(8, seed=1)),
    "rms_norm_gated": lambda: ungated(weight=floats(8), z=floats(3, 8, seed=1), group_size=4),
    "rms_norm_static_fp8_quant": lambda: codes(input=floats(3, 8), weight=floats(8), scale=0.5),
    "fused_add_rms_norm_static_fp8_quant": lambda: codes(**added(weight=floats(8), scale=0.5)),
    "rms_norm_dynamic_per_token_quant": lambda: codes(
        input=floats(3, 8), weight=floats(8), scale=floats(3, 1), scale_ub=2.0
    ),
    "rms_norm_per_block_quant": lambda: codes(
        input=floats(3, 8), weight=floats(8), scale=floats(3, 2), scale_ub=None, group_size=4
    ),
    "fused_qk_norm_rope": lambda: {
        "qkv": floats(3, 4 * sizes.HEAD_SIZE),
        "num_heads_q": 2,
        "num_heads_k": 1,
        "num_heads_v": 1,
        "head_dim": sizes.HEAD_SIZE,
        "eps": 1e-6,
        "q_weight": floats(sizes.HEAD_SIZE, seed=1),
        "k_weight": floats(sizes.HEAD_SIZE, seed=2),
        "cos_sin_cache": floats(5, sizes.HEAD_SIZE, seed=3),
        "is_neox": True,
        "position_ids": ids(0, 4, 2),
    },
}


def qk_norm_rope_workload(t: Tokens) -> Workload:
    heads = {"num_heads_q": HEADS, "num_heads_k": KV_HEADS, "num_heads_v": KV_HEADS, "head_dim": HEAD, "eps": 1e-6}
    weights = {"q_weight": Spec((HEAD,), t.dtype), "k_weight": Spec((HEAD,), t.dtype)}
    qkv = {"qkv": t.rows((HEADS + 2 * KV_HEADS) * HEAD), "position_ids": t.positions}
    # heads of v are not touched
    return Workload(
        {**qkv, **heads, **weights, **t.angles(HEAD)},
        {"qkv": 2 * t.bytes((HEADS + KV_HEADS) * HEAD), "cos_sin_cache": t.bytes(HEAD)},
    )


WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {
    "fused_qk_norm_rope": qk_norm_rope_workload,
}
