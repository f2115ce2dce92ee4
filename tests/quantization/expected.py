"""What the samples of quantization must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from activation import reference as act
from activation.expected import halves
from dequantization.reference import spread
from quantization import reference as codes_ref
from quantization import reference_blocks as blocks_ref

Results = dict[str, Any]


def per_token_group_fp8_quant_packed(a: Any) -> Results:
    codes, scales = codes_ref.groups(a.input, a.group_size, ue8m0=True)
    return {"output_q": codes, "output_s_packed": codes_ref.packed(scales)}


def silu_and_mul32(a: Any) -> np.ndarray:
    gate, up = halves(a)
    return np.float32(np.float32(act.silu(gate)) * np.float64(up))


def fp4_codes(a: Any, codes: np.ndarray, scales: np.ndarray) -> Results:
    return {"output": codes, "output_scale": blocks_ref.swizzled(scales.view(np.uint8))}


def fp4_experts(a: Any, x: np.ndarray) -> Results:
    """Two experts: of the first two rows, and of the last."""
    of = [x[:2], x[2:]]
    if hasattr(a, "input_global_scale"):
        made = [blocks_ref.nvfp4(rows, g) for rows, g in zip(of, a.input_global_scale, strict=True)]
    else:
        made = [blocks_ref.mx(rows, 4, "ocp") for rows in of]
    scales = np.concatenate([blocks_ref.swizzled(s.view(np.uint8)) for _, s in made])
    return {"output": np.concatenate([c for c, _ in made]), "output_scale": scales}


def mxfp8_experts_quant(a: Any) -> Results:
    made = [blocks_ref.mx(rows, codes_ref.E4M3, "ceil") for rows in (a.input[:2], a.input[2:])]
    scales = np.concatenate([blocks_ref.swizzled(s) for _, s in made])
    return {"quant_output": np.concatenate([c for c, _ in made]), "scale_factor": scales}


def situ_and_mul_quant(a: Any) -> Results:
    gate, up = halves(a)
    y = np.tanh(gate) / (1 + np.exp(-gate)) * up
    return dict(zip(("out", "scale"), codes_ref.groups(y.astype(np.float32), a.group_size), strict=True))


def persistent_masked_m_silu_mul_quant(a: Any) -> Results:
    codes, scales = codes_ref.groups(silu_and_mul32(a), a.group_size)
    valid = (np.arange(a.input.shape[1]) < a.counts[:, None])[..., None]
    return {"y_q": np.where(valid, codes, 0).astype(codes.dtype), "y_s": np.where(valid, scales, a.y_s)}


EXPECTED: dict[str, Callable[[Any], Results]] = {
    "static_scaled_int8_quant": lambda a: {"result": codes_ref.static_int8(a.input, a.scale, a.azp[0])},
    "dynamic_scaled_int8_quant": lambda a: dict(
        zip(("result", "scale", "azp"), codes_ref.dynamic_int8_azp(a.input), strict=True)
    ),
    "per_token_quant_int8": lambda a: dict(zip(("result", "scale"), codes_ref.per_token_int8(a.input), strict=True)),
    "static_scaled_fp8_quant": lambda a: {
        "result": codes_ref.static_fp8(a.input, spread(a.scale, a.input.shape, 1, 32))
    },
    "dynamic_scaled_fp8_quant": lambda a: dict(zip(("result", "scale"), codes_ref.dynamic_fp8(a.input), strict=True)),
    "dynamic_per_token_scaled_fp8_quant": lambda a: dict(
        zip(("result", "scale"), codes_ref.per_token_fp8(a.input, scale_ub=a.scale_ub), strict=True)
    ),
    "per_token_group_fp8_quant": lambda a: dict(
        zip(("output_q", "output_s"), codes_ref.groups(a.input, a.group_size), strict=True)
    ),
    "per_token_group_fp8_quant_packed": per_token_group_fp8_quant_packed,
    "per_token_group_quant_int8": lambda a: dict(
        zip(("output_q", "output_s"), codes_ref.groups(a.input, a.group_size, codes_ref.INT8), strict=True)
    ),
    "scaled_fp4_quant": lambda a: fp4_codes(a, *blocks_ref.nvfp4(a.input, a.input_scale)),
    "silu_and_mul_nvfp4_quant": lambda a: dict(
        zip(
            ("result", "result_block_scale"),
            fp4_codes(a, *blocks_ref.nvfp4(silu_and_mul32(a), a.input_global_scale)).values(),
            strict=True,
        )
    ),
    "scaled_fp4_experts_quant": lambda a: fp4_experts(a, a.input),
    "silu_and_mul_scaled_fp4_experts_quant": lambda a: fp4_experts(a, silu_and_mul32(a)),
    "mxfp8_quantize": lambda a: dict(
        zip(("output", "output_scale"), blocks_ref.mx(a.input, codes_ref.E4M3, a.scale_mode), strict=True)
    ),
    "mxfp4_quantize": lambda a: dict(
        zip(("output", "output_scale"), blocks_ref.mx(a.input, 4, a.scale_mode), strict=True)
    ),
    "mxfp4_experts_quant": lambda a: fp4_experts(a, a.input),
    "silu_and_mul_mxfp4_experts_quant": lambda a: fp4_experts(a, silu_and_mul32(a)),
    "mxfp8_experts_quant": mxfp8_experts_quant,
    "situ_and_mul_quant": situ_and_mul_quant,
    "persistent_masked_m_silu_mul_quant": persistent_masked_m_silu_mul_quant,
}
