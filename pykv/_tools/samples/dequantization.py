"""Small right calls of the operations of dequantization, and calls of a size that means something."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv._schema import Spec
from pykv._tools.samples._arrays import Sample, floats, ids, some_codes, together
from pykv._tools.samples._workload import Tokens, Workload, shuffled

WEIGHT, WEIGHT_GROUP = 4096, 128  # columns of a weight with as many rows as there are tokens, and what shares a scale


def gguf_blocks(rows: int, blocks: int) -> npt.NDArray[np.uint8]:
    """Of Q4_0: a scale in float16, and 16 bytes of codes."""
    scales = floats(rows * blocks, 1).astype(np.float16)
    return together(scales, some_codes(rows * blocks, 16)).reshape(rows, blocks * 18)


def codes_of_8_bits() -> Sample:
    return {"out": floats(3, 64).astype(np.float16), "input": some_codes(3, 64)}


def codes_of_4_bits() -> Sample:
    return {"out": floats(3, 64).astype(np.float16), "input": some_codes(3, 32)}


def packed_words(*shape: int) -> npt.NDArray[np.int32]:
    return some_codes(*shape[:-1], 4 * shape[-1]).view(np.int32)


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "ggml_dequantize": lambda: {"out": floats(2, 64).astype(np.float16), "W": gguf_blocks(2, 2), "quant_type": 2},
    "awq_dequantize": lambda: {
        "out": floats(8, 32),
        "qweight": packed_words(8, 4),
        "scales": floats(2, 32, seed=1),
        "zeros": packed_words(2, 4),
    },
    "gptq_dequantize": lambda: {
        "out": floats(32, 32),
        "qweight": packed_words(3, 32),
        "qzeros": packed_words(2, 3),
        "scales": floats(2, 32, seed=1),
        "g_idx": (ids(*range(32)) * 3 % 2).astype(np.int32),
        "bits": 3,
    },
    "fp8_dequantize": lambda: codes_of_8_bits() | {"scale": np.abs(floats(2, 3)), "group_rows": 2, "group_columns": 24},
    "mxfp8_dequantize": lambda: codes_of_8_bits() | {"scale": some_codes(3, 2) + np.uint8(100)},
    "mxfp4_dequantize": lambda: codes_of_4_bits() | {"scale": some_codes(3, 2) + np.uint8(100)},
    "nvfp4_dequantize": lambda: (
        codes_of_4_bits() | {"scale": some_codes(3, 4), "global_scale": 100.0, "is_sf_swizzled_layout": False}
    ),
    "permute_cols": lambda: {"out": floats(3, 8), "A": floats(3, 8, seed=1), "perm": ids(7, 0, 3, 3, 1, 5, 6, 2)},
    "hadacore_transform": lambda: {"out": floats(3, 24), "x": floats(3, 24, seed=1)},
}


def gguf_workload(t: Tokens) -> Workload:
    return Workload({"W": Spec((t.count, WEIGHT // 256 * 144), "uint8"), "quant_type": 12})  # Q4_K


def num_groups(t: Tokens) -> int:
    """Of rows, which are some groups and nothing else."""
    return max(1, t.count // WEIGHT_GROUP)


def awq_workload(t: Tokens) -> Workload:
    groups, scales = num_groups(t), Spec((num_groups(t), WEIGHT), t.dtype)
    rows = groups * WEIGHT_GROUP
    codes, zeros = Spec((rows, WEIGHT // 8), "int32"), Spec((groups, WEIGHT // 8), "int32")
    return Workload({"qweight": codes, "scales": scales, "zeros": zeros})


def gptq_workload(t: Tokens) -> Workload:
    groups, scales = num_groups(t), Spec((num_groups(t), WEIGHT), t.dtype)
    codes = Spec((groups * WEIGHT_GROUP // 8, WEIGHT), "int32")
    return Workload({"qweight": codes, "qzeros": Spec((groups, WEIGHT // 8), "int32"), "scales": scales, "bits": 4})


def scaled_workload(t: Tokens, codes_per_byte: int, block: int, **more: Any) -> Workload:
    codes, scales = Spec((t.count, WEIGHT // codes_per_byte), "uint8"), Spec((t.count, WEIGHT // block), "uint8")
    return Workload({"input": codes, "scale": scales, **more})


def fp8_workload(t: Tokens) -> Workload:
    groups = math.ceil(t.count / WEIGHT_GROUP), WEIGHT // WEIGHT_GROUP
    sizes = {"group_rows": WEIGHT_GROUP, "group_columns": WEIGHT_GROUP}
    return Workload({"input": Spec((t.count, WEIGHT), "uint8"), "scale": Spec(groups, "float32"), **sizes})


WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {
    "ggml_dequantize": gguf_workload,
    "awq_dequantize": awq_workload,
    "gptq_dequantize": gptq_workload,
    "fp8_dequantize": fp8_workload,
    "mxfp8_dequantize": lambda t: scaled_workload(t, 1, 32),
    "mxfp4_dequantize": lambda t: scaled_workload(t, 2, 32),
    "nvfp4_dequantize": lambda t: scaled_workload(t, 2, 16, global_scale=1.0, is_sf_swizzled_layout=False),
    "permute_cols": lambda t: Workload({"A": t.rows(WEIGHT), "perm": shuffled(WEIGHT)}),
    "hadacore_transform": lambda t: Workload({"x": t.rows(WEIGHT)}),
}
