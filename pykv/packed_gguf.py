"""Blocks of GGUF as packed weights: codes, scales and minima of their own, without a rounding.

A code book of IQ1, IQ2 or IQ3 has rows of three or eight different numbers, which with their signs are at most 16: each
element is an entry of a table, four bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import numpy as np

from pykv._types import Array
from pykv.dequantization import GGUF_BLOCKS, ggml_dequantize
from pykv.packed_weight import Factor, Host, PackedWeight, assemble, checked, integers, whole

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_IQ4: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_TERNARY: Final = np.arange(-1, 15).astype(np.float32)


def _with_signs(*magnitudes: float) -> Host:
    both = np.array([sign * m for m in magnitudes for sign in (1, -1)], np.float32)
    return np.concatenate([both, np.zeros(16 - len(both), np.float32)])


_IQ1: Final = _with_signs(0.125, 0.875, 1.125)  # -1, 0 or 1, and an eighth more or less
_IQ2: Final = _with_signs(1, 3.125, 5.375)
_IQ3: Final = _with_signs(1, 3, 5, 7, 9, 11, 13, 15)
_IQ3_XXS: Final = _with_signs(1, 3, 5, 7, 9, 11, 13, 15.5)


def pack_gguf(weight: Array, quant_type: int) -> PackedWeight:
    """Pack a weight of GGUF.  Codes of five and six bits are stored in eight, of less than four in four.

    Args:
        weight: ``[n, bytes]`` uint8: the blocks of a row one after another.
        quant_type: any that :func:`pykv.ggml_dequantize` knows, such as 12, Q4_K.

    Raises:
        ValueError: it is no such type, or rows are no whole blocks, or (NVFP4) a scale is 0xff, which e4m3 has not.
        TypeError: dtypes do not fit.
    """
    quant_type = whole("quant_type", quant_type)
    if quant_type not in GGUF_TYPES:
        raise ValueError(f"quant_type: must be one of {', '.join(map(str, GGUF_TYPES))}, got {quant_type}")
    _, size = GGUF_BLOCKS[quant_type]
    pack = GGUF_TYPES[quant_type]
    rows = checked("weight", weight, ["uint8"], (None, None))
    if rows.shape[1] % size:
        raise ValueError(f"weight: must be [n, bytes] of whole blocks of {size} bytes, got shape {list(rows.shape)}")
    return pack(np.ascontiguousarray(rows).reshape(rows.shape[0], rows.shape[1] // size, size))


def _flat(blocks: Host) -> Host:
    """[n, blocks, ...] -> [n, all others]"""
    return blocks.reshape(blocks.shape[0], math.prod(blocks.shape[1:]))


def _half(b: Host, at: int) -> Host:
    """A float16 of each block."""
    return np.ascontiguousarray(b[..., at : at + 2]).view(np.float16)[..., 0]


def _planes(b: Host, at: int, count: int, bits: int, run: int) -> Host:
    """Fields of some bits: the lowest ones of a run of bytes come first, then the next ones of the same bytes."""
    octets = b[..., at : at + count * bits // 8].reshape(*b.shape[:2], count * bits // 8 // run, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return (octets >> shifts & np.uint8((1 << bits) - 1)).reshape(*b.shape[:2], count)


def _plain(bits: int, codes: Callable[[Host], Host], has_minimum: bool) -> Callable[[Host], PackedWeight]:
    """Blocks of 32 with a float16, or two."""

    def pack(b: Host) -> PackedWeight:
        minima = Factor("f16", _half(b, 2)) if has_minimum else None
        return integers(_flat(codes(b)), Factor("f16", _half(b, 0)), minima, 32, bits)

    return pack


def _five_bits(at: int) -> Callable[[Host], Host]:
    def codes(b: Host) -> Host:
        high = np.unpackbits(np.ascontiguousarray(b[..., at : at + 4]), axis=-1, bitorder="little")
        both: Host = _planes(b, at + 4, 32, 4, 16) | high << 4
        return both

    return codes


def _q2_k(b: Host) -> PackedWeight:
    both = b[..., :16]
    scales = Factor("f16u8", _flat(both & 15), _half(b, 80))
    return integers(_flat(_planes(b, 16, 256, 2, 32)), scales, Factor("f16u8", _flat(both >> 4), _half(b, 82)), 16, 2)


def _q3_k(b: Host) -> PackedWeight:
    scales = (_planes(b, 96, 16, 4, 8) | _planes(b, 104, 16, 2, 4) << 4).view(np.int8) - np.int8(32)
    codes = _planes(b, 32, 256, 2, 32) | _planes(b, 0, 256, 1, 32) << 2
    return integers(_flat(codes), Factor("f16i8", _flat(scales), _half(b, 108)), None, 16, 3)


def _q45_k(bits: int) -> Callable[[Host], PackedWeight]:
    def pack(b: Host) -> PackedWeight:
        low, middle, high = b[..., 4:8], b[..., 8:12], b[..., 12:16]
        scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
        minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
        codes = _planes(b, 16 if bits == 4 else 48, 256, 4, 32)
        if bits == 5:
            codes = codes | _planes(b, 16, 256, 1, 32) << 4
        factors = (Factor("f16u8", _flat(scales), _half(b, 0)), Factor("f16u8", _flat(minima), _half(b, 2)))
        return integers(_flat(codes), *factors, 32, bits)

    return pack


def _q6_k(b: Host) -> PackedWeight:
    codes = _planes(b, 0, 256, 4, 64) | _planes(b, 128, 256, 2, 32) << 4
    scales = Factor("f16i8", _flat(b[..., 192:208].view(np.int8)), _half(b, 208))
    return integers(_flat(codes), scales, None, 16, 6)


def _iq4_nl(b: Host) -> PackedWeight:
    return assemble(_flat(_planes(b, 2, 32, 4, 16)), "t4", Factor("f16", _half(b, 0)), None, 32, table=_IQ4)


def _iq4_xs(b: Host) -> PackedWeight:
    high = np.ascontiguousarray(b[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    low = np.stack([b[..., 4:8] & 15, b[..., 4:8] >> 4], axis=-1).reshape(*b.shape[:2], 8)
    scales = (low | high.astype(np.uint8) << 4).view(np.int8) - np.int8(32)
    factor = Factor("f16i8", _flat(scales), _half(b, 0))
    return assemble(_flat(_planes(b, 8, 256, 4, 16)), "t4", factor, None, 32, table=_IQ4)


def _tq2_0(b: Host) -> PackedWeight:
    return assemble(_flat(_planes(b, 0, 256, 2, 32)), "t4", Factor("f16", _half(b, 64)), None, 256, table=_TERNARY)


def _mxfp4(b: Host) -> PackedWeight:
    return assemble(_flat(_planes(b, 1, 32, 4, 16)), "t4", Factor("e8m0", _flat(b[..., 0])), None, 32, table=E2M1)


def _nvfp4(b: Host) -> PackedWeight:
    """Scales have no sign; 0x7f is zero."""
    scales = b[..., :4]
    if (scales == 0xFF).any():
        raise ValueError("weight: a scale of NVFP4 must not be 0xff")
    factor = Factor("e4m3", _flat(np.where(scales == 0x7F, np.uint8(0), scales & 0x7F)))
    return assemble(_flat(_planes(b, 4, 64, 4, 8)), "t4", factor, None, 16, table=E2M1)


def _q1_0(b: Host) -> PackedWeight:
    codes = np.unpackbits(np.ascontiguousarray(b[..., 2:18]), axis=-1, bitorder="little")
    table = np.array([-1, 1, *[0] * 14], np.float32)
    return assemble(_flat(codes), "t4", Factor("f16", _half(b, 0)), None, 128, table=table)


def _q8_k(b: Host) -> PackedWeight:
    scales = np.ascontiguousarray(b[..., :4]).view("<f4")[..., 0]
    return integers(_flat(b[..., 4:260] ^ np.uint8(128)), Factor("f32", scales), None, 256, 8)


def _found(b: Host, quant_type: int, table: Host, scales: Factor) -> PackedWeight:
    """Blocks whose scales are one: each element is an entry of the table, a multiple of an eighth."""
    codes = np.empty((b.shape[0], b.shape[1] * 256), np.uint8)
    place = np.zeros(256, np.uint8)
    place[(8 * table).astype(np.int8).view(np.uint8)] = np.arange(16)
    for row, blocks in zip(codes, b, strict=True):
        values = np.empty(len(row), np.float32)
        ggml_dequantize(values, blocks.reshape(-1), quant_type)
        row[:] = place[(8 * values).astype(np.int8).view(np.uint8)]
    return assemble(codes, "t4", scales, None, max(1, 256 * b.shape[1] // max(1, scales.values.shape[1])), table=table)


def _with_one(b: Host, at: int) -> Host:
    plain = b.copy()
    plain[..., at : at + 2] = 0x00, 0x3C  # float16
    return plain


def _tq1_0(b: Host) -> PackedWeight:
    return _found(_with_one(b, 52), 34, _TERNARY, Factor("f16", _half(b, 52)))


def _book(
    quant_type: int, table: Host, fields: slice, clear: int, scales_of: Callable[[Host], Host]
) -> Callable[[Host], PackedWeight]:
    """Blocks with a float16 at their beginning, and scales ``2 * s + 1`` in some bits of some bytes."""

    def pack(b: Host) -> PackedWeight:
        plain = _with_one(b, 0)
        plain[..., fields] &= np.uint8(0xFF ^ clear)
        s = scales_of(b[..., fields] & np.uint8(clear))
        return _found(plain, quant_type, table, Factor("f16u8", _flat(2 * s + 1), _half(b, 0)))

    return pack


def _two_of(octets: Host) -> Host:
    return np.stack([octets & 15, octets >> 4], axis=-1).reshape(*octets.shape[:2], 2 * octets.shape[2])


def _iq1_m(b: Host) -> PackedWeight:
    """The float16 is in the upper four bits of four words, each with four scales of three bits below."""
    words = np.ascontiguousarray(b[..., 48:56]).view("<u2")
    halves = (words >> 12 << np.arange(0, 16, 4, dtype=np.uint16)).sum(-1, dtype=np.uint16).view(np.float16)
    s = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).astype(np.uint8)
    plain = b.copy()
    plain[..., 48:56] = 0, 0, 0, 0, 0, 0xC0, 0, 0x30
    return _found(plain, 29, _IQ1, Factor("f16u8", _flat(2 * s + 1), halves))


# what packs blocks [n, blocks, bytes]
GGUF_TYPES: Final[dict[int, Callable[[Host], PackedWeight]]] = {
    2: _plain(4, lambda b: _planes(b, 2, 32, 4, 16), False),
    3: _plain(4, lambda b: _planes(b, 4, 32, 4, 16), True),
    6: _plain(5, _five_bits(2), False),
    7: _plain(5, _five_bits(4), True),
    8: _plain(8, lambda b: b[..., 2:34] ^ np.uint8(128), False),
    9: _plain(8, lambda b: b[..., 4:36] ^ np.uint8(128), False),
    10: _q2_k,
    11: _q3_k,
    12: _q45_k(4),
    13: _q45_k(5),
    14: _q6_k,
    15: _q8_k,
    16: _book(16, _IQ2, np.s_[9::8], 0xF0, lambda fields: fields >> 4),
    17: _book(17, _IQ2, np.s_[66:74], 0xFF, _two_of),
    18: _book(18, _IQ3_XXS, np.s_[69::4], 0xF0, lambda fields: fields >> 4),
    19: _book(19, _IQ1, np.s_[35::2], 0x70, lambda fields: fields >> 4),
    20: _iq4_nl,
    21: _book(21, _IQ3, np.s_[106:110], 0xFF, _two_of),
    22: _book(22, _IQ2, np.s_[74:82], 0xFF, _two_of),
    23: _iq4_xs,
    29: _iq1_m,
    34: _tq1_0,
    35: _tq2_0,
    39: _mxfp4,
    40: _nvfp4,
    41: _q1_0,
}
