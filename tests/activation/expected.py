"""What the samples of activation must give."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import numpy as np
from activation import reference as act
from activation.quantised import E4M3, codes

Results = dict[str, Any]


def halves(a: Any) -> list[np.ndarray]:
    return np.split(a.input.astype(np.float64), 2, axis=-1)


def gated(activation: Callable[[np.ndarray], np.ndarray], output: str = "out") -> Callable[[Any], Results]:
    def expected(a: Any) -> Results:
        gate, up = halves(a)
        return {output: activation(gate) * up}

    return expected


def elementwise(activation: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Results]:
    return lambda a: {"out": activation(a.input.astype(np.float64))}


def silu_and_mul_with_clamp(a: Any) -> Results:
    gate, up = halves(a)
    gate = np.minimum(gate, a.limit)
    return {"result": gate / (1 + np.exp(-a.alpha * gate)) * (np.clip(up, -a.limit, a.limit) + a.beta)}


def masked_moe_activation(a: Any) -> Results:
    gate, up = halves(a)
    valid = np.arange(a.input.shape[1]) < a.valid_token_counts[:, None]
    return {"out": np.where(valid[..., None], act.silu(gate) * up, a.out)}


def gelu_and_mul_sparse(a: Any) -> Results:
    gate, up = halves(a)
    deviations = NormalDist().inv_cdf(a.activation_sparsity)
    cut = gate.mean(-1, keepdims=True) + gate.std(-1, keepdims=True) * deviations
    return {"out": act.gelu(np.maximum(gate - cut, 0)) * up}


def swigluoai_and_mul(a: Any) -> Results:
    x = a.input.astype(np.float64)
    gate, up = np.minimum(x[:, ::2], 7), np.clip(x[:, 1::2], -7, 7)
    return {"out": (up + 1) * gate / (1 + np.exp(-1.702 * gate))}


def swiglustep_and_mul(a: Any) -> Results:
    gate, up = halves(a)
    return {"out": np.minimum(act.silu(gate), 7) * np.clip(up, -7, 7)}


def in_groups(y: np.ndarray, size: int, largest: float = np.inf) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 codes and the scales of groups of ``size``."""
    groups = y.reshape(len(y), -1, size)
    scales = np.minimum(np.abs(groups).max(-1), largest) / 448
    return codes(groups / scales[..., None], E4M3).reshape(y.shape), scales


def silu_and_mul_per_block_quant(a: Any) -> Results:
    gate, up = halves(a)
    return dict(zip(("out", "scales"), in_groups(act.silu(gate) * up, a.group_size), strict=True))


EXPECTED: dict[str, Callable[[Any], Results]] = {
    "silu_and_mul": gated(act.silu, "result"),
    "silu_and_mul_quant": lambda a: {
        "result": codes(np.multiply(act.silu(halves(a)[0]), halves(a)[1]) / a.scale, E4M3)
    },
    "silu_and_mul_per_block_quant": silu_and_mul_per_block_quant,
    "silu_and_mul_with_clamp": silu_and_mul_with_clamp,
    "mul_and_silu": lambda a: {"out": halves(a)[0] * act.silu(halves(a)[1])},
    "gelu_and_mul": gated(act.gelu),
    "gelu_tanh_and_mul": gated(act.gelu_tanh),
    "gelu_and_mul_sparse": gelu_and_mul_sparse,
    "fatrelu_and_mul": lambda a: gated(lambda x: np.where(x > a.threshold, x, 0))(a),
    "swigluoai_and_mul": swigluoai_and_mul,
    "swiglustep_and_mul": swiglustep_and_mul,
    "situ_and_mul": lambda a: {"out": act.situ(*halves(a), a.beta, a.linear_beta)},
    "masked_moe_activation": masked_moe_activation,
    "gelu_new": elementwise(act.gelu_tanh),
    "gelu_fast": elementwise(act.gelu_tanh),
    "gelu_quick": elementwise(act.gelu_quick),
    "relu2": elementwise(act.relu2),
    "relu_squared": elementwise(act.relu2),
    "xielu": lambda a: {"out": act.xielu(a.input.astype(np.float64), a.alpha_p, a.alpha_n)},
}
