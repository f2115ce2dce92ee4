"""Numbers to codes, beside a copy that reads and writes as much: activations of so many tokens.

``--seconds 0.02`` and ``--op`` shorten it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, main

# tokens and widths: few, so that a GPU needs some forty seconds
SIZES = ((1, 4096), (64, 4096), (4096, 4096), (65536, 4096), (4096, 7168))
GROUP = 128
EXPERTS = 8


class Arrays:
    """Of some tokens: an input, twice as wide for activations, and what operations write."""

    def __init__(self, tokens: int, width: int, dtype: str, device: Device, halves: int) -> None:
        self.tokens, self.width, self._device = tokens, width, device
        self.input = device.random((tokens, halves * width), dtype)

    def bytes(self, *shape: int) -> Any:
        return self._device.zeros(shape, "uint8")

    def int8(self) -> Any:
        return self._device.zeros((self.tokens, self.width), "int8")

    def codes(self, per_byte: int = 1) -> Any:
        return self.bytes(self.tokens, self.width // per_byte)

    def floats(self, *shape: int) -> Any:
        return self._device.zeros(shape, "float32")

    def words(self, *shape: int) -> Any:
        return self._device.zeros(shape, "int32")

    def ints(self, *values: int) -> Any:
        return self._device.array(np.array(values, np.int32))

    @property
    def groups(self) -> int:
        return self.width // GROUP

    def column_major(self) -> Any:
        return self.floats(self.groups, -(-self.tokens // 4) * 4)[:, : self.tokens].T

    def tiles(self, block: int, rows: int = 0) -> Any:
        return self.bytes(-(-(rows or self.tokens) // 128) * 128, -(-self.width // block // 4) * 4)

    def offsets(self) -> tuple[Any, Any, int]:
        """Of rows of experts, of their scales, and how many rows these have."""
        first = np.arange(EXPERTS + 1) * self.tokens // EXPERTS
        scales = np.concatenate([[0], np.cumsum(-(-np.diff(first) // 128) * 128)])
        return self.ints(*first), self.ints(*scales), int(scales[-1])


def static_fp8(a: Arrays) -> Call:
    return partial(pykv.static_scaled_fp8_quant, a.codes(), a.input, 0.1)


def static_fp8_blocks(a: Arrays) -> Call:
    scales = a.floats(-(-a.tokens // GROUP), a.groups) + 0.1
    return partial(pykv.static_scaled_fp8_quant, a.codes(), a.input, scales, GROUP, GROUP)


def dynamic_fp8(a: Arrays) -> Call:
    return partial(pykv.dynamic_scaled_fp8_quant, a.codes(), a.input, a.floats(1))


def token_fp8(a: Arrays) -> Call:
    return partial(pykv.dynamic_per_token_scaled_fp8_quant, a.codes(), a.input, a.floats(a.tokens, 1))


def static_int8(a: Arrays) -> Call:
    return partial(pykv.static_scaled_int8_quant, a.int8(), a.input, 0.1)


def token_int8(a: Arrays) -> Call:
    return partial(pykv.dynamic_scaled_int8_quant, a.int8(), a.input, a.floats(a.tokens, 1))


def token_int8_azp(a: Arrays) -> Call:
    zeros = a.words(a.tokens)
    return partial(pykv.dynamic_scaled_int8_quant, a.int8(), a.input, a.floats(a.tokens, 1), zeros)


def group_fp8(a: Arrays, column_major: bool = False, ue8m0: bool = False) -> Call:
    scales = a.column_major() if column_major else a.floats(a.tokens, a.groups)
    return partial(pykv.per_token_group_fp8_quant, a.input, a.codes(), scales, GROUP, scale_ue8m0=ue8m0)


def group_packed(a: Arrays) -> Call:
    words = a.words(-(-a.groups // 4), a.tokens).T
    return partial(pykv.per_token_group_fp8_quant_packed, a.input, a.codes(), words, GROUP)


def group_int8(a: Arrays) -> Call:
    return partial(pykv.per_token_group_quant_int8, a.input, a.int8(), a.floats(a.tokens, a.groups), GROUP)


def nvfp4(a: Arrays, swizzled: bool = True, four_over_six: bool = False) -> Call:
    scales = a.tiles(16) if swizzled else a.bytes(a.tokens, a.width // 16)
    return partial(pykv.scaled_fp4_quant, a.codes(2), scales, a.input, 100.0, swizzled, four_over_six)


def silu_nvfp4(a: Arrays) -> Call:
    return partial(pykv.silu_and_mul_nvfp4_quant, a.codes(2), a.tiles(16), a.input, 100.0)


def nvfp4_experts(a: Arrays, op: Callable[..., None] = pykv.scaled_fp4_experts_quant) -> Call:
    first, scales, rows = a.offsets()
    return partial(op, a.codes(2), a.tiles(16, rows), a.input, a.floats(EXPERTS) + 100, first, scales)


def mxfp4_experts(a: Arrays, op: Callable[..., None] = pykv.mxfp4_experts_quant) -> Call:
    first, scales, rows = a.offsets()
    return partial(op, a.codes(2), a.tiles(32, rows), a.input, first, scales, EXPERTS)


def mxfp8_experts(a: Arrays) -> Call:
    first, scales, rows = a.offsets()
    sizes = np.diff(np.arange(EXPERTS + 1) * a.tokens // EXPERTS)
    problems = a.ints(*np.stack([sizes] * 3, 1).ravel()).reshape(EXPERTS, 3)
    return partial(pykv.mxfp8_experts_quant, a.input, problems, first[:-1], scales[:-1], a.codes(), a.tiles(32, rows))


def mxfp4(a: Arrays, swizzled: bool = False) -> Call:
    scales = a.tiles(32) if swizzled else a.bytes(a.tokens, a.width // 32)
    return partial(pykv.mxfp4_quantize, a.codes(2), scales, a.input, swizzled)


def mxfp8(a: Arrays, swizzled: bool = False) -> Call:
    scales = a.tiles(32) if swizzled else a.bytes(a.tokens, a.width // 32)
    return partial(pykv.mxfp8_quantize, a.codes(), scales, a.input, swizzled)


def silu_group_fp8(a: Arrays) -> Call:
    codes, scales = a.codes().reshape(1, a.tokens, -1), a.floats(1, a.tokens, a.groups)
    return partial(
        pykv.persistent_masked_m_silu_mul_quant,
        a.input.reshape(1, a.tokens, -1),
        a.ints(a.tokens),
        codes,
        scales,
        False,
        GROUP,
    )


def silu_block_fp8(a: Arrays) -> Call:
    scales = a.floats(a.tokens, a.groups)
    return partial(pykv.silu_and_mul_per_block_quant, a.codes(), a.input, scales, GROUP)


def situ_group_fp8(a: Arrays) -> Call:
    return partial(pykv.situ_and_mul_quant, a.codes(), a.floats(a.tokens, a.groups), a.input, 1.0, -1.0, GROUP)


# name: how, what is read for each code, how many codes a byte has, and bytes of scales for how many codes
Make = Callable[[Arrays], Call]
OPERATIONS: dict[str, tuple[Make, int, int, float]] = {
    "static_scaled_fp8_quant": (static_fp8, 1, 1, 0),
    "static_scaled_fp8_quant blocks": (static_fp8_blocks, 1, 1, 0),
    "dynamic_scaled_fp8_quant": (dynamic_fp8, 2, 1, 0),  # which reads all twice
    "dynamic_per_token_scaled_fp8_quant": (token_fp8, 1, 1, 0),
    "static_scaled_int8_quant": (static_int8, 1, 1, 0),
    "dynamic_scaled_int8_quant": (token_int8, 1, 1, 0),
    "dynamic_scaled_int8_quant azp": (token_int8_azp, 1, 1, 0),
    "per_token_group_fp8_quant": (group_fp8, 1, 1, 4 / GROUP),
    "per_token_group_fp8_quant columns": (partial(group_fp8, column_major=True), 1, 1, 4 / GROUP),
    "per_token_group_fp8_quant ue8m0": (partial(group_fp8, ue8m0=True), 1, 1, 4 / GROUP),
    "per_token_group_fp8_quant_packed": (group_packed, 1, 1, 1 / GROUP),
    "per_token_group_quant_int8": (group_int8, 1, 1, 4 / GROUP),
    "scaled_fp4_quant": (nvfp4, 1, 2, 1 / 16),
    "scaled_fp4_quant linear": (partial(nvfp4, swizzled=False), 1, 2, 1 / 16),
    "scaled_fp4_quant four over six": (partial(nvfp4, four_over_six=True), 1, 2, 1 / 16),
    "silu_and_mul_nvfp4_quant": (silu_nvfp4, 2, 2, 1 / 16),
    "scaled_fp4_experts_quant": (nvfp4_experts, 1, 2, 1 / 16),
    "silu_and_mul_scaled_fp4_experts_quant": (
        partial(nvfp4_experts, op=pykv.silu_and_mul_scaled_fp4_experts_quant),
        2,
        2,
        1 / 16,
    ),
    "mxfp4_experts_quant": (mxfp4_experts, 1, 2, 1 / 32),
    "silu_and_mul_mxfp4_experts_quant": (
        partial(mxfp4_experts, op=pykv.silu_and_mul_mxfp4_experts_quant),
        2,
        2,
        1 / 32,
    ),
    "mxfp8_experts_quant": (mxfp8_experts, 1, 1, 1 / 32),
    "mxfp4_quantize": (mxfp4, 1, 2, 1 / 32),
    "mxfp4_quantize swizzled": (partial(mxfp4, swizzled=True), 1, 2, 1 / 32),
    "mxfp8_quantize": (mxfp8, 1, 1, 1 / 32),
    "mxfp8_quantize swizzled": (partial(mxfp8, swizzled=True), 1, 1, 1 / 32),
    "persistent_masked_m_silu_mul_quant": (silu_group_fp8, 2, 1, 4 / GROUP),
    "silu_and_mul_per_block_quant": (silu_block_fp8, 2, 1, 4 / GROUP),
    "situ_and_mul_quant": (situ_group_fp8, 2, 1, 4 / GROUP),
}


def call_of(make: Make, tokens: int, width: int, dtype: str, halves: int, device: Device) -> Call:
    return make(Arrays(tokens, width, dtype, device, halves))


def cases(dtypes: list[str]) -> Iterator[Case]:
    for dtype in dtypes:
        itemsize = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
        for tokens, width in SIZES:
            count, size = tokens * width, {"tokens": tokens, "width": width}
            for name, (make, reads, per_byte, scales) in OPERATIONS.items():
                halves = 2 if "silu" in name or "situ" in name else 1
                written = count // per_byte + int(count * scales)
                call = partial(call_of, make, tokens, width, dtype, halves)
                yield Case(name, size, dtype, count * reads * itemsize + written, call, written)


if __name__ == "__main__":
    main(cases)
