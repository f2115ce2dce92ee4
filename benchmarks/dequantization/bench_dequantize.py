"""Weights that others packed, to floats: matrices of a large model; and activations as such weights want them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import pykv
from pykv.dequantization import GGUF_BLOCKS

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

SHAPES = [(4096, 4096), (14336, 4096)]
FORMATS = {
    "Q4_0": 2,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ2_XXS": 16,
    "IQ2_S": 22,
    "IQ3_S": 21,
    "IQ1_M": 29,
    "IQ4_XS": 23,
    "TQ1_0": 34,
    "MXFP4": 39,
}
GROUP_SIZE = 128


def words(rows: int, columns: int, device: Device) -> Any:
    return device.array(np.random.default_rng(rows).integers(-(2**31), 2**31, (rows, columns)).astype(np.int32))


def ggml_dequantize(rows: int, columns: int, quant_type: int, dtype: str, device: Device) -> Call:
    elements, size = GGUF_BLOCKS[quant_type]
    row_bytes = columns // elements * size
    W = device.array(np.random.default_rng(rows).integers(0, 256, (rows, row_bytes), dtype=np.uint8))
    out = device.random((rows, columns), dtype)
    return lambda: pykv.ggml_dequantize(out, W, quant_type)


def awq_dequantize(rows: int, columns: int, dtype: str, device: Device) -> Call:
    out, scales = device.random((rows, columns), dtype), device.random((rows // GROUP_SIZE, columns), dtype)
    codes, zeros = words(rows, columns // 8, device), words(rows // GROUP_SIZE, columns // 8, device)
    return lambda: pykv.awq_dequantize(out, codes, scales, zeros)


def gptq_dequantize(rows: int, columns: int, bits: int, act_order: bool, dtype: str, device: Device) -> Call:
    out, scales = device.random((rows, columns), dtype), device.random((rows // GROUP_SIZE, columns), dtype)
    codes, zeros = words(rows * bits // 32, columns, device), words(rows // GROUP_SIZE, columns * bits // 32, device)
    order = np.random.default_rng(0).permutation(rows) // GROUP_SIZE
    g_idx = device.array(order.astype(np.int32)) if act_order else None
    return lambda: pykv.gptq_dequantize(out, codes, zeros, scales, g_idx, bits)


def codes(rows: int, columns: int, device: Device) -> Any:
    return device.array(np.random.default_rng(rows).integers(0, 120, (rows, columns), dtype=np.uint8))


def fp8_dequantize(rows: int, columns: int, of: tuple[int, int], dtype: str, device: Device) -> Call:
    """Scales of groups of ``of`` rows and columns."""
    out, scale = device.random((rows, columns), dtype), device.random((rows // of[0], columns // of[1]), "float32")
    x = codes(rows, columns, device)
    return lambda: pykv.fp8_dequantize(out, x, scale, *of)


def mx_dequantize(rows: int, columns: int, name: str, block: int, swizzled: bool, dtype: str, device: Device) -> Call:
    per_byte = 1 if name == "mxfp8_dequantize" else 2
    out, x = device.random((rows, columns), dtype), codes(rows, columns // per_byte, device)
    scale = codes(rows, columns // block, device)  # of whole tiles, too
    more = (1.0,) if name == "nvfp4_dequantize" else ()
    return lambda: getattr(pykv, name)(out, x, scale, *more, swizzled)


def permute_cols(rows: int, columns: int, dtype: str, device: Device) -> Call:
    out, x = (device.random((rows, columns), dtype) for _ in range(2))
    perm = device.array(np.random.default_rng(0).permutation(columns).astype(np.int32))
    return lambda: pykv.permute_cols(out, x, perm)


def hadacore_transform(rows: int, columns: int, dtype: str, device: Device) -> Call:
    out, x = (device.random((rows, columns), dtype) for _ in range(2))
    return lambda: pykv.hadacore_transform(out, x)


def scaled_cases(rows: int, columns: int, dtype: str, itemsize: int) -> Iterator[Case]:
    size, written = {"rows": rows, "columns": columns}, rows * columns * itemsize
    for what, of in {"blocks": (128, 128), "rows": (1, columns), "columns": (rows, 1), "groups": (1, 128)}.items():
        read = rows * columns + 4 * (rows // of[0]) * (columns // of[1])
        make = partial(fp8_dequantize, rows, columns, of, dtype)
        yield Case(f"fp8_dequantize {what}", size, dtype, read + written, make, written)
    for name, per_byte, block in (("mxfp8", 1, 32), ("mxfp4", 2, 32), ("nvfp4", 2, 16)):
        for swizzled in (False, True):
            read = rows * columns // per_byte + rows * columns // block
            make = partial(mx_dequantize, rows, columns, f"{name}_dequantize", block, swizzled, dtype)
            shown = f"{name}_dequantize" + (", swizzled" if swizzled else "")
            yield Case(shown, size, dtype, read + written, make, written)


def activation_cases(dtype: str, itemsize: int) -> Iterator[Case]:
    for tokens in (1, 64, 4096, 65536):
        for columns in (4096, 7168):  # 7168 = 28 * 256
            size, moved = {"tokens": tokens, "columns": columns}, tokens * columns * itemsize
            for name, op in (("permute_cols", permute_cols), ("hadacore_transform", hadacore_transform)):
                yield Case(name, size, dtype, 2 * moved, partial(op, tokens, columns, dtype), moved)


def cases(dtypes: list[str]) -> Iterator[Case]:
    for dtype in dtypes:
        itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
        for rows, columns in SHAPES:
            written, size = rows * columns * itemsize, {"rows": rows, "columns": columns}
            for name, quant_type in FORMATS.items():
                elements, block = GGUF_BLOCKS[quant_type]
                make = partial(ggml_dequantize, rows, columns, quant_type, dtype)
                read = rows * columns // elements * block
                yield Case(f"ggml_dequantize {name}", size, dtype, read + written, make, written)
            groups = rows * columns // GROUP_SIZE
            read = rows * columns // 2 + groups // 2 + groups * itemsize
            yield Case(
                "awq_dequantize", size, dtype, read + written, partial(awq_dequantize, rows, columns, dtype), written
            )
            for bits in (2, 3, 4, 8):
                for act_order in (False, True):
                    read = (rows * columns + groups) * bits // 8 + groups * itemsize + rows * 4 * act_order
                    make = partial(gptq_dequantize, rows, columns, bits, act_order, dtype)
                    name = f"gptq_dequantize {bits} bits" + (", act-order" if act_order else "")
                    yield Case(name, size, dtype, read + written, make, written)
            yield from scaled_cases(rows, columns, dtype, itemsize)
        yield from activation_cases(dtype, itemsize)


if __name__ == "__main__":
    main(cases)
