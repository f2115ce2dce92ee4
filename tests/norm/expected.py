"""What the samples of norm must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from activation.expected import in_groups
from norm import reference as norm
from rotary.reference import rotary_embedding

Results = dict[str, Any]
EPSILON = 1e-6


def fused_add(weight: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Results]:
    def expected(a: Any) -> Results:
        total = norm.add(a.input, a.residual)
        return {"input": norm.rms_norm(total, weight(a.weight), EPSILON), "residual": total}

    return expected


def fused_add_rms_norm_static_fp8_quant(a: Any) -> Results:
    total = norm.add(a.input, a.residual)
    return {"result": norm.e4m3(norm.rms_norm(total, a.weight, EPSILON) / a.scale), "residual": total}


def rms_norm_in_groups(a: Any) -> Results:
    y = norm.rms_norm(a.input, a.weight, EPSILON)
    size = getattr(a, "group_size", y.shape[1])
    largest = np.inf if a.scale_ub is None else a.scale_ub
    return dict(zip(("result", "scale"), in_groups(y, size, largest), strict=True))


def fused_qk_norm_rope(a: Any) -> Results:
    heads = a.qkv.reshape(3, 4, a.head_dim).astype(np.float64)
    heads[:, :2] = norm.rms_norm(heads[:, :2], a.q_weight, a.eps)
    heads[:, 2:3] = norm.rms_norm(heads[:, 2:3], a.k_weight, a.eps)
    heads[:, :3] = rotary_embedding(a.position_ids, heads[:, :3], a.cos_sin_cache, a.is_neox)
    return {"qkv": heads}


EXPECTED: dict[str, Callable[[Any], Results]] = {
    "rms_norm": lambda a: {"out": norm.rms_norm(a.input, a.weight, EPSILON)},
    "fused_add_rms_norm": fused_add(lambda weight: weight),
    "gemma_rms_norm": lambda a: {"out": norm.rms_norm(a.input, a.weight + 1, EPSILON)},
    "gemma_fused_add_rms_norm": fused_add(lambda weight: weight + 1),
    "layer_norm": lambda a: {"out": norm.layer_norm(a.input, a.weight, a.bias, 1e-5)},
    "rms_norm_gated": lambda a: {
        "out": norm.rms_norm_gated(a.input, a.weight, a.z, 1e-5, a.group_size, False, "swish")
    },
    "rms_norm_static_fp8_quant": lambda a: {"result": norm.e4m3(norm.rms_norm(a.input, a.weight, EPSILON) / a.scale)},
    "fused_add_rms_norm_static_fp8_quant": fused_add_rms_norm_static_fp8_quant,
    "rms_norm_dynamic_per_token_quant": rms_norm_in_groups,
    "rms_norm_per_block_quant": rms_norm_in_groups,
    "fused_qk_norm_rope": fused_qk_norm_rope,
}
