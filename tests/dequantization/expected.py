"""What the samples of dequantization must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from activation.quantised import E4M3
from dequantization import hadamard
from dequantization import reference as packed

Results = dict[str, Any]


def times_scales(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return values * packed.spread(scales, values.shape, 1, values.shape[1] // scales.shape[1])


EXPECTED: dict[str, Callable[[Any], Results]] = {
    "ggml_dequantize": lambda a: {"out": packed.DECODE["Q4_0"](a.W.reshape(-1, 18))},
    "awq_dequantize": lambda a: {"out": packed.awq(a.qweight, a.scales, a.zeros)},
    "gptq_dequantize": lambda a: {"out": packed.gptq(a.qweight, a.qzeros, a.scales, a.g_idx, a.bits)},
    "fp8_dequantize": lambda a: {
        "out": a.input.view(E4M3).astype(np.float32)
        * packed.spread(a.scale, a.input.shape, a.group_rows, a.group_columns)
    },
    "mxfp8_dequantize": lambda a: {
        "out": times_scales(a.input.view(E4M3).astype(np.float32), packed.e8m0_values(a.scale))
    },
    "mxfp4_dequantize": lambda a: {"out": times_scales(packed.e2m1_values(a.input), packed.e8m0_values(a.scale))},
    "nvfp4_dequantize": lambda a: {
        "out": times_scales(packed.e2m1_values(a.input), a.scale.view(E4M3).astype(np.float32) / a.global_scale)
    },
    "permute_cols": lambda a: {"out": a.A[:, a.perm]},
    "hadacore_transform": lambda a: {"out": hadamard.transform(a.x)},
}
