"""Small right calls of the operations of quantization, and calls of a size that means something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv._tools.samples._arrays import Sample, floats
from pykv._tools.samples._workload import Tokens, Workload

WIDTH, GROUP = 4096, 128


def coded(dtype: Any = np.uint8, **more: Any) -> Sample:
    return {"result": np.zeros((3, 64), dtype), "input": floats(3, 64), **more}


def coded_groups(dtype: Any = np.uint8, **more: Any) -> Sample:
    return {"input": floats(3, 64), "output_q": np.zeros((3, 64), dtype), **more}


def coded_blocks(width: int, scales: npt.NDArray[Any], **more: Any) -> Sample:
    return {"output": np.zeros((3, width), np.uint8), "output_scale": scales, "input": floats(3, 64), **more}


def of_experts(has_scales: bool) -> Sample:
    scales = {"input_global_scale": np.array([9, 5], np.float32)} if has_scales else {}
    offsets = {"input_offset_by_experts": [0, 2, 3], "output_scale_offset_by_experts": [0, 128, 256]}
    return scales | {name: np.array(of, np.int32) for name, of in offsets.items()}


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "static_scaled_int8_quant": lambda: coded(np.int8, scale=0.03, azp=np.array([5], np.int32)),
    "dynamic_scaled_int8_quant": lambda: coded(np.int8, scale=floats(3, 1), azp=np.zeros((3, 1), np.int32)),
    "per_token_quant_int8": lambda: coded(np.int8, scale=floats(3, 1)),
    "static_scaled_fp8_quant": lambda: coded(scale=np.abs(floats(3, 2)) + np.float32(0.01)),
    "dynamic_scaled_fp8_quant": lambda: coded(scale=floats(1)),
    "dynamic_per_token_scaled_fp8_quant": lambda: coded(scale=floats(3, 1), scale_ub=1.5),
    "per_token_group_fp8_quant": lambda: coded_groups(output_s=floats(3, 4), group_size=16),
    "per_token_group_fp8_quant_packed": lambda: coded_groups(output_s_packed=np.zeros((3, 1), np.int32), group_size=16),
    "per_token_group_quant_int8": lambda: coded_groups(np.int8, output_s=floats(3, 4), group_size=16),
    "scaled_fp4_quant": lambda: coded_blocks(32, np.zeros((128, 4), np.uint8), input_scale=9.0),
    "silu_and_mul_nvfp4_quant": lambda: {
        "result": np.zeros((3, 16), np.uint8),
        "result_block_scale": np.zeros((128, 4), np.uint8),
        "input": floats(3, 64),
        "input_global_scale": 9.0,
    },
    "scaled_fp4_experts_quant": lambda: coded_blocks(32, np.zeros((256, 4), np.uint8), **of_experts(True)),
    "silu_and_mul_scaled_fp4_experts_quant": lambda: coded_blocks(16, np.zeros((256, 4), np.uint8), **of_experts(True)),
    "mxfp8_quantize": lambda: coded_blocks(64, np.zeros((3, 2), np.uint8), scale_mode="ocp"),
    "mxfp4_quantize": lambda: coded_blocks(32, np.zeros((3, 2), np.uint8), scale_mode="ceil"),
    "mxfp4_experts_quant": lambda: coded_blocks(32, np.zeros((256, 4), np.uint8), **of_experts(False)),
    "silu_and_mul_mxfp4_experts_quant": lambda: coded_blocks(16, np.zeros((256, 4), np.uint8), **of_experts(False)),
    "mxfp8_experts_quant": lambda: {
        "input": floats(3, 64),
        "problem_sizes": np.array([[2, 0, 0], [1, 0, 0]], np.int32),
        "expert_offsets": np.array([0, 2], np.int32),
        "blockscale_offsets": np.array([0, 128], np.int32),
        "quant_output": np.zeros((3, 64), np.uint8),
        "scale_factor": np.zeros((256, 4), np.uint8),
    },
    "situ_and_mul_quant": lambda: {
        "out": np.zeros((3, 32), np.uint8),
        "scale": floats(3, 2),
        "input": floats(3, 64),
        "group_size": 16,
    },
    "persistent_masked_m_silu_mul_quant": lambda: {
        "input": floats(2, 3, 64),
        "counts": np.array([2, 3], np.int32),
        "y_q": np.zeros((2, 3, 32), np.uint8),
        "y_s": np.ones((2, 3, 2), np.float32),
        "group_size": 16,
    },
}

QUANTISERS = (
    "dynamic_scaled_int8_quant",
    "per_token_quant_int8",
    "dynamic_scaled_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
)

WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {
    **{name: lambda t: Workload({"input": t.rows(WIDTH)}) for name in QUANTISERS},
    "static_scaled_int8_quant": lambda t: Workload({"input": t.rows(WIDTH), "scale": 0.1}),
    "static_scaled_fp8_quant": lambda t: Workload({"input": t.rows(WIDTH), "scale": 0.1}),
    "per_token_group_fp8_quant": lambda t: Workload({"input": t.rows(WIDTH), "group_size": GROUP}),
    "per_token_group_fp8_quant_packed": lambda t: Workload({"input": t.rows(WIDTH), "group_size": GROUP}),
    "per_token_group_quant_int8": lambda t: Workload({"input": t.rows(WIDTH), "group_size": GROUP}),
    "scaled_fp4_quant": lambda t: Workload({"input": t.rows(WIDTH), "input_scale": 100.0}),
    "silu_and_mul_nvfp4_quant": lambda t: Workload({"input": t.rows(2 * WIDTH), "input_global_scale": 100.0}),
    "mxfp8_quantize": lambda t: Workload({"input": t.rows(WIDTH)}),
    "mxfp4_quantize": lambda t: Workload({"input": t.rows(WIDTH)}),
}
