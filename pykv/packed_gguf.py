"""Blocks of GGUF as packed weights: codes, scales and minima of their own, without a rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from pykv._types import Array
from pykv.packed_weight import Factor, Host, PackedWeight, assemble, host, integers

E2M1: Final = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_IQ4: Final = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


def pack_gguf(weight: Array, quant_type: int) -> PackedWeight:
    """Pack a weight of GGUF.  Codes of five and six bits are stored in eight, of two and three in four.

    Args:
        weight: ``[n, bytes]`` uint8: the blocks of a row one after another.
        quant_type: Q4_0 2, Q4_1 3, Q5_0 6, Q5_1 7, Q8_0 8, Q2_K 10, Q3_K 11, Q4_K 12, Q5_K 13, Q6_K 14, IQ4_NL 20,
            IQ4_XS 23, TQ2_0 35, MXFP4 39.

    Raises:
        ValueError: it is none of these (:func:`pykv.ggml_dequantize` decodes all), or rows are no whole blocks.
    """
    if quant_type not in GGUF_TYPES:
        raise ValueError(f"quant_type: must be one of {', '.join(map(str, GGUF_TYPES))}, got {quant_type}")
    size, pack = GGUF_TYPES[quant_type]
    rows = host(weight)
    if rows.ndim != 2 or rows.shape[1] % size:
        raise ValueError(f"weight: must be [n, bytes] of whole blocks of {size} bytes, got shape {list(rows.shape)}")
    return pack(np.ascontiguousarray(rows).reshape(rows.shape[0], -1, size))


def _flat(blocks: Host) -> Host:
    """[n, blocks, ...] -> [n, all others]"""
    return blocks.reshape(blocks.shape[0], -1)


def _half(b: Host, at: int) -> Host:
    """A float16 of each block."""
    return np.ascontiguousarray(b[..., at : at + 2]).view(np.float16)[..., 0]


def _planes(b: Host, at: int, count: int, bits: int, run: int) -> Host:
    """Fields of some bits: the lowest ones of a run of bytes come first, then the next ones of the same bytes."""
    octets = b[..., at : at + count * bits // 8].reshape(*b.shape[:2], -1, 1, run)
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
    table = np.arange(-1, 15).astype(np.float32)
    return assemble(_flat(_planes(b, 0, 256, 2, 32)), "t4", Factor("f16", _half(b, 64)), None, 256, table=table)


def _mxfp4(b: Host) -> PackedWeight:
    return assemble(_flat(_planes(b, 1, 32, 4, 16)), "t4", Factor("e8m0", _flat(b[..., 0])), None, 32, table=E2M1)


# bytes of a block, and what packs blocks [n, blocks, bytes]
GGUF_TYPES: Final = {
    2: (18, _plain(4, lambda b: _planes(b, 2, 32, 4, 16), False)),
    3: (20, _plain(4, lambda b: _planes(b, 4, 32, 4, 16), True)),
    6: (22, _plain(5, _five_bits(2), False)),
    7: (24, _plain(5, _five_bits(4), True)),
    8: (34, _plain(8, lambda b: b[..., 2:34] ^ np.uint8(128), False)),
    10: (84, _q2_k),
    11: (110, _q3_k),
    12: (144, _q45_k(4)),
    13: (176, _q45_k(5)),
    14: (210, _q6_k),
    20: (18, _iq4_nl),
    23: (136, _iq4_xs),
    35: (66, _tq2_0),
    39: (17, _mxfp4),
}
