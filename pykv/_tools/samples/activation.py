"""Small right calls of the operations of activation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pykv._tools.samples._arrays import Sample, floats, ungated


def gated(output: str, **options: float) -> Sample:
    return {output: floats(3, 8), "input": floats(3, 16), **options}


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "silu_and_mul": lambda: gated("result"),
    "silu_and_mul_quant": lambda: {"result": np.zeros((3, 8), np.uint8), "input": floats(3, 16), "scale": 0.5},
    "silu_and_mul_per_block_quant": lambda: {
        "out": np.zeros((3, 8), np.uint8),
        "input": floats(3, 16),
        "scales": floats(3, 2, seed=1),
        "group_size": 4,
    },
    "silu_and_mul_with_clamp": lambda: gated("result", limit=0.7, alpha=1.702, beta=1.0),
    "mul_and_silu": lambda: gated("out"),
    "gelu_and_mul": lambda: gated("out"),
    "gelu_tanh_and_mul": lambda: gated("out"),
    "gelu_and_mul_sparse": lambda: gated("out", activation_sparsity=0.5),
    "fatrelu_and_mul": lambda: gated("out", threshold=0.1),
    "swigluoai_and_mul": lambda: gated("out"),
    "swiglustep_and_mul": lambda: gated("out"),
    "situ_and_mul": lambda: gated("out", beta=2.0, linear_beta=1.5),
    "masked_moe_activation": lambda: {
        "out": floats(2, 3, 8, seed=1),
        "input": floats(2, 3, 16),
        "valid_token_counts": np.array([2, 5], np.int32),
        "activation": "silu",
    },
    "gelu_new": ungated,
    "gelu_fast": ungated,
    "gelu_quick": ungated,
    "relu2": ungated,
    "relu_squared": ungated,
    "xielu": lambda: ungated(alpha_p=floats(1), alpha_n=floats(1)),
}
