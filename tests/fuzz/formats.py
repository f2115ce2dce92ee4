"""Calls whose arrays must have the sizes that a string, or the number of a format, says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pykv._tools.samples.moe import layer, product_by_map

Arguments = dict[str, Any]
Random = np.random.Generator

CODES = {"u2": 4, "u3": 4, "u4": 4, "u5": 8, "u6": 8, "u8": 8, "e4m3": 8, "t4": 4}  # bits as stored
SCALES = {"f16": 2, "bf16": 2, "f32": 4, "e4m3": 1, "e8m0": 1, "f16u8": 1, "f16i8": 1}  # bytes
MINIMA = {"none": 0, "zero": 1, "f16": 2, "f32": 4, "f16u8": 1}
HEADER = 256
# elements and bytes of a block of each format of GGUF
BLOCKS_OF_GGUF = {
    **{2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36), 10: (256, 84), 11: (256, 110)},
    **{12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98)},
    **{19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 29: (256, 56), 34: (256, 54)},
    **{35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18)},
}


def up_to(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def packed(rng: Random, n: int, k: int) -> tuple[str, np.ndarray]:
    """A packed weight of random bytes, of any of its formats."""
    codes, scales, minima = (str(rng.choice(list(names))) for names in (CODES, SCALES, MINIMA))
    in_order = rng.random() < 0.7
    padded = up_to(k, 64) + (0 if in_order else 64 * int(rng.integers(3)))
    group = 16 * int(rng.choice([1, 2, 3, 4, 8, 1000]))
    rows, groups, blocks = up_to(n, 32), up_to(padded, group) // group, up_to(padded, 256) // 256
    sections = [rows * padded * CODES[codes] // 8, rows * groups * SCALES[scales]]
    sections += [rows * blocks * 2 * scales.startswith("f16") * (len(scales) == 5)]
    sections += [rows * groups * MINIMA[minima], rows * blocks * 2 * (minima == "f16u8")]
    sections += [0 if in_order else 4 * padded]
    text = f"{codes}.{scales}.{minima}.n{n}.k{k}.g{group}.p{padded}{'' if in_order else '.columns'}"
    data = rng.integers(0, 256, HEADER + sum(up_to(size, 256) for size in sections), np.uint8)
    if not in_order and rng.random() < 0.7:
        at = len(data) - up_to(4 * padded, 256)
        data[at : at + 4 * padded] = rng.integers(-1, k + 1, padded, np.int32).view(np.uint8)
    return text, data


def packed_gemm(rng: Random) -> Arguments:
    m, n, k = (int(rng.choice(sizes)) for sizes in ((0, 1, 3, 9, 70), (1, 7, 16, 24, 33), (1, 16, 64, 100, 300)))
    form, data = packed(rng, n, k)
    gate, codes = n % 2 == 0 and rng.random() < 0.5, rng.random() < 0.3
    shape = (m, n // 2 if gate else n)
    made = {"out": np.zeros(shape, np.int8 if codes else np.float16), "weight": data, "format": form}
    made |= {"x": rng.standard_normal((m, k)).astype(np.float16), "activation": "gelu" if gate else ""}
    made["out_scale"] = np.ones(1, np.float32) if codes else None
    given = {"bias": np.ones(n, np.float16), "residual": np.ones(shape, np.float16)}
    given |= {"token_scales": np.ones(m, np.float32), "channel_scales": np.ones(n, np.float32)}
    return made | {name: array if rng.random() < 0.5 else None for name, array in given.items()}


def stacked(rng: Random, experts: int, n: int, k: int) -> tuple[str, np.ndarray]:
    form, data = packed(rng, n, k)
    return form, np.stack([data] * experts)


def fused_moe(rng: Random) -> Arguments:
    """Both products of packed weights, or of codes."""
    made = layer()
    if rng.random() < 0.5:
        experts = len(made["w2"])
        made |= {"w1_format": "", "w1_bias": None, "w2_bias": None}
        for i, shape in enumerate([(experts, 48, 64), (experts, 64, 24)], 1):
            made[f"w{i}"] = rng.integers(-99, 100, shape, np.int8)
            made[f"w{i}_scale"] = rng.random(shape[: rng.integers(1, 3)], np.float32)
        return made
    made["w1_format"], made["w1"] = stacked(rng, len(made["w2"]), 48, 64)
    made["w2_format"], made["w2"] = stacked(rng, len(made["w2"]), 64, 24)
    made["activation"] = str(rng.choice(STRINGS["activation"][:8]))
    return made


def fused_moe_gemm(rng: Random) -> Arguments:
    made = product_by_map()
    made["format"], made["w"] = stacked(rng, 3, 24, 16)
    return made


def ggml_dequantize(rng: Random) -> Arguments:
    kind = int(rng.choice(list(BLOCKS_OF_GGUF)))
    elements, size = BLOCKS_OF_GGUF[kind]
    rows, blocks = int(rng.integers(1, 5)), int(rng.integers(1, 4))
    codes = rng.integers(0, 256, (rows, blocks * size), np.uint8)
    return {"out": np.zeros((rows, blocks * elements), np.float32), "W": codes, "quant_type": kind}


MADE: dict[str, Callable[[Random], Arguments]] = {
    "packed_gemm": packed_gemm,
    "fused_moe": fused_moe,
    "fused_moe_gemm": fused_moe_gemm,
    "ggml_dequantize": ggml_dequantize,
}

# What arguments that are strings may be, and some that they may not.
STRINGS: dict[str, list[str]] = {
    "kv_cache_dtype": ["auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "nvfp4", "fp8_ds_mla", "ue8m0", "mxfp8"],
    "activation": ["silu", "silu_with_clamp", "swigluoai_uninterleave", "gelu", "gelu_tanh", "situ", "swigluoai"]
    + ["swiglustep", "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul", "swish", "sigmoid"],
    "scale_mode": ["ceil", "ocp", "vllm"],
    "group_score": ["top2_sum", "max"],
    "approximate": ["none", "tanh"],
}
STRINGS["kv_dtype"] = STRINGS["kv_cache_dtype"]


def other_format(rng: Random, text: str) -> str:
    """A format with a field that is another, is missing, or is nothing that was ever written."""
    fields = text.split(".")
    at = int(rng.integers(len(fields)))
    wild = ["", "n0", "k0", "g0", "p0", "g17", "p-64", "n" + "9" * 30, "k1073741824", "p1073741760", "g1073741808"]
    wild += ["columns", "u4", "f16u8", "e4m3", "zero", "%s%n", "n24 ", "N24", "\u0663", "n24\0"]
    how = rng.integers(4)
    if how == 0:
        fields[at] = str(rng.choice(wild))
    elif how == 1:
        del fields[at]
    elif how == 2:
        fields[at:at] = [fields[at]]
    else:
        digits = fields[at][:1] + str(int(rng.choice([0, 1, 16, 32, 48, 64, 2**20, 2**30, 2**31, 2**62])))
        fields[at] = digits
    return ".".join(fields)
