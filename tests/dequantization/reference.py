"""What packed weights stand for, in NumPy: blocks of GGUF, AWQ's and GPTQ's words."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

F = np.float32
Blocks = np.ndarray  # [number, bytes] uint8

# id: (name, elements of a block, bytes)
FORMATS = {
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 36),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], F)
E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], F)  # twice


def half(b: Blocks, at: int) -> np.ndarray:
    return np.ascontiguousarray(b[:, at : at + 2]).view(np.float16).astype(F)


def words(b: Blocks, at: int, count: int, dtype: str) -> np.ndarray:
    size = np.dtype(dtype).itemsize
    return np.ascontiguousarray(b[:, at : at + size * count]).view(dtype)


def planes(b: Blocks, at: int, count: int, bits: int, bytes_of_plane: int) -> np.ndarray:
    """Fields of some bits: the lowest ones of a run of bytes come first, then the next ones of the same bytes."""
    runs = b[:, at : at + count * bits // 8].reshape(len(b), -1, 1, bytes_of_plane)
    return (runs >> np.arange(0, 8, bits, dtype=np.uint8)[:, None] & ((1 << bits) - 1)).reshape(len(b), -1).astype(F)


def in_order(b: Blocks, at: int, count: int, bits: int) -> np.ndarray:
    """Fields of some bits, those of a byte one after another."""
    some = b[:, at : at + count * bits // 8]
    fields = some[..., None] >> np.arange(0, 8, bits, dtype=np.uint8) & ((1 << bits) - 1)
    return fields.reshape(len(b), -1).astype(np.int64)


def groups(scales: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Each scale times as many neighbours as there are for it."""
    return (scales[..., None] * values.reshape(*scales.shape, -1)).reshape(len(scales), -1)


def offsets(minimums: np.ndarray, count: int) -> np.ndarray:
    return np.repeat(minimums, count // minimums.shape[1], axis=1)


def six_bits(b: Blocks) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minimums of Q4_K and Q5_K."""
    low, middle, high = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minimums = np.concatenate([middle & 63, (high >> 4) | (middle >> 6 << 4)], axis=1)
    return half(b, 0) * scales.astype(F), half(b, 2) * minimums.astype(F)


def q3_k(b: Blocks) -> np.ndarray:
    scales = planes(b, 96, 16, 4, 8) + 16 * planes(b, 104, 16, 2, 4) - 32
    codes = planes(b, 32, 256, 2, 32) + 4 * planes(b, 0, 256, 1, 32) - 4
    return groups(half(b, 108) * scales.astype(F), codes)


def tq1_0(b: Blocks) -> np.ndarray:
    parts = []
    for begin, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = (3 ** np.arange(digits)).astype(np.uint8)[:, None]
        shifted = b[:, None, begin:end] * powers  # modulo 256
        parts.append((shifted.astype(np.int64) * 3 >> 8).reshape(len(b), -1))
    return half(b, 52) * (np.concatenate(parts, axis=1) - 1).astype(F)


def mxfp4(b: Blocks) -> np.ndarray:
    scales = np.ldexp(1.0, b[:, :1].astype(np.int64) - 128).astype(F)
    with np.errstate(over="ignore"):
        return scales * E2M1[planes(b, 1, 32, 4, 16).astype(int)]


def nvfp4(b: Blocks) -> np.ndarray:
    exponent, mantissa = (b[:, :4] >> 3 & 15).astype(int), (b[:, :4] & 7).astype(float)
    scales = np.where(exponent == 0, np.ldexp(mantissa, -10), np.ldexp(8 + mantissa, exponent - 11))
    scales[b[:, :4] == 0x7F] = 0
    return groups(scales.astype(F), E2M1[planes(b, 4, 64, 4, 8).astype(int)])


def iq4_xs(b: Blocks) -> np.ndarray:
    high = words(b, 2, 1, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales = in_order(b, 4, 8, 4) + 16 * high.astype(np.int64) - 32
    return groups(half(b, 0) * scales.astype(F), IQ4[planes(b, 8, 256, 4, 16).astype(int)])


def k45(b: Blocks, codes: np.ndarray) -> np.ndarray:
    scales, minimums = six_bits(b)
    return groups(scales, codes) - offsets(minimums, 256)


# formats without a code book
DECODE: dict[str, Callable[[Blocks], np.ndarray]] = {
    "Q4_0": lambda b: half(b, 0) * (planes(b, 2, 32, 4, 16) - 8),
    "Q4_1": lambda b: half(b, 0) * planes(b, 4, 32, 4, 16) + half(b, 2),
    "Q5_0": lambda b: half(b, 0) * (planes(b, 6, 32, 4, 16) + 16 * in_order(b, 2, 32, 1).astype(F) - 16),
    "Q5_1": lambda b: half(b, 0) * (planes(b, 8, 32, 4, 16) + 16 * in_order(b, 4, 32, 1).astype(F)) + half(b, 2),
    "Q8_0": lambda b: half(b, 0) * words(b, 2, 32, "i1").astype(F),
    "Q8_1": lambda b: half(b, 0) * words(b, 4, 32, "i1").astype(F),
    "Q2_K": lambda b: (
        groups(half(b, 80) * (b[:, :16] & 15).astype(F), planes(b, 16, 256, 2, 32))
        - offsets(half(b, 82) * (b[:, :16] >> 4).astype(F), 256)
    ),
    "Q3_K": q3_k,
    "Q4_K": lambda b: k45(b, planes(b, 16, 256, 4, 32)),
    "Q5_K": lambda b: k45(b, planes(b, 48, 256, 4, 32) + 16 * planes(b, 16, 256, 1, 32)),
    "Q6_K": lambda b: groups(
        half(b, 208) * words(b, 192, 16, "i1").astype(F),
        planes(b, 0, 256, 4, 64) + 16 * planes(b, 128, 256, 2, 32) - 32,
    ),
    "Q8_K": lambda b: words(b, 0, 1, "<f4") * words(b, 4, 256, "i1").astype(F),
    "IQ4_NL": lambda b: half(b, 0) * IQ4[planes(b, 2, 32, 4, 16).astype(int)],
    "IQ4_XS": iq4_xs,
    "TQ1_0": tq1_0,
    "TQ2_0": lambda b: half(b, 64) * (planes(b, 0, 256, 2, 32) - 1),
    "MXFP4": mxfp4,
    "NVFP4": nvfp4,
    "Q1_0": lambda b: half(b, 0) * (2 * in_order(b, 2, 128, 1) - 1).astype(F),
}


def stream(packed: np.ndarray, bits: int) -> np.ndarray:
    """Codes along the first axis, the lowest bits of the first word first."""
    single = packed.view(np.uint32)[:, None] >> np.arange(32, dtype=np.uint32)[None, :, None] & 1
    digits = single.reshape(len(packed) * 32 // bits, bits, packed.shape[1]).astype(np.int64)
    return (digits << np.arange(bits)[:, None]).sum(axis=1)


def awq_codes(packed: np.ndarray) -> np.ndarray:
    nibble_of_column = np.array([0, 4, 1, 5, 2, 6, 3, 7], np.uint32)
    return (packed.view(np.uint32)[..., None] >> 4 * nibble_of_column & 15).reshape(len(packed), -1).astype(np.int64)


def scaled(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group: np.ndarray) -> np.ndarray:
    return ((codes - zeros[group]) * scales.astype(np.float64)[group]).astype(scales.dtype)


def awq(qweight: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    group = np.arange(len(qweight)) // (len(qweight) // len(scales))
    return scaled(awq_codes(qweight), awq_codes(zeros), scales, group)


def gptq(
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    g_idx: np.ndarray | None = None,
    bits: int = 4,
    use_v2_format: bool = False,
) -> np.ndarray:
    codes = stream(qweight, bits)
    zeros = stream(np.ascontiguousarray(qzeros.T), bits).T + (not use_v2_format)
    group = np.arange(len(codes)) // (len(codes) // len(scales)) if g_idx is None or not g_idx.size else g_idx
    return scaled(codes, zeros, scales, group)


E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], F)


def e2m1_values(packed: np.ndarray) -> np.ndarray:
    return E2M1_VALUES[np.stack([packed & 15, packed >> 4], axis=-1)].reshape(*packed.shape[:-1], -1)


def e8m0_values(scales: np.ndarray) -> np.ndarray:
    return np.where(scales == 255, np.nan, np.ldexp(1.0, scales.astype(np.int64) - 127)).astype(F)


def spread(scales: np.ndarray, shape: tuple[int, ...], group_rows: int, group_columns: int) -> np.ndarray:
    """A scale for each element."""
    rows, columns = np.arange(shape[-2]) // group_rows, np.arange(shape[-1]) // group_columns
    return scales[..., rows, :][..., columns]


def swizzled(scales: np.ndarray) -> np.ndarray:
    """``[..., rows, groups]`` in tiles of 128 rows and 4 groups: 32 x 4 x 4 of them; 0 where there is padding."""
    *lead, rows, columns = scales.shape
    padded = np.zeros((*lead, -(-rows // 128) * 128, -(-columns // 4) * 4), scales.dtype)
    padded[..., :rows, :columns] = scales
    tiles = padded.reshape(*lead, padded.shape[-2] // 128, 4, 32, padded.shape[-1] // 4, 4)
    n = len(lead)
    order = (*range(n), n, n + 3, n + 2, n + 1, n + 4)
    return np.ascontiguousarray(tiles.transpose(order)).reshape(padded.shape)
