"""Weights of each source: as pykv packs them, and what they stand for in float64."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from dequantization import reference

from pykv import gemm
from pykv.packed_weight import PackedWeight

Weight = tuple[PackedWeight, np.ndarray]  # packed, [n, k]

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(2**31), 2**31, shape, dtype=np.int64).astype(np.int32)


def scales_of(rng: np.random.Generator, shape: tuple[int, ...], dtype: object = np.float16) -> np.ndarray:
    made = (rng.uniform(0.5, 1.5, shape) * 0.02).astype(dtype)
    if dtype == ml_dtypes.bfloat16 and made.size:
        made.flat[0] = 2.0**-30  # which float16 does not hold: otherwise scales would be packed as that
    return made


def groups_of(k: int, group_size: int) -> np.ndarray:
    return np.arange(k) // group_size


def integers(
    n: int, k: int, group_size: int = 128, bits: int = 4, zeros: bool = True, dtype: object = np.float16, seed: int = 0
) -> Weight:
    rng = np.random.default_rng(seed)
    q, group = rng.integers(0, 1 << bits, (n, k)), groups_of(k, group_size)
    groups = -(-k // group_size)
    s = scales_of(rng, (n, groups), dtype)
    z = rng.integers(0, 1 << bits, (n, groups)) if zeros else None
    packed = gemm.pack_integers(q.astype(np.uint8), s, z, group_size=group_size, bits=bits)
    middle = np.full((n, groups), 1 << (bits - 1)) if z is None else z
    return packed, (q - middle[:, group]) * s.astype(np.float64)[:, group]


def awq_codes_and_scales(
    n: int, k: int, group_size: int, dtype: object = np.float16, seed: int = 0
) -> tuple[np.ndarray, ...]:
    """Codes, zero points and scales as they are stored, and [k, n] decoded."""
    rng = np.random.default_rng(seed)
    groups = k // group_size
    q, z, s = words(rng, k, n // 8), words(rng, groups, n // 8), scales_of(rng, (groups, n), dtype)
    group = groups_of(k, group_size)
    decoded = (reference.awq_codes(q) - reference.awq_codes(z)[group]) * s.astype(np.float64)[group]
    return q, z, s, decoded


def awq(n: int, k: int, group_size: int = 128, dtype: object = np.float16, seed: int = 0) -> Weight:
    q, z, s, decoded = awq_codes_and_scales(n, k, group_size, dtype, seed)
    return gemm.pack_awq(q, z, s), decoded.T


def gptq(
    n: int, k: int, groups: int, bits: int = 4, v2: bool = False, group_of: np.ndarray | None = None, seed: int = 0
) -> Weight:
    rng = np.random.default_rng(seed)
    q, z, s = words(rng, k * bits // 32, n), words(rng, groups, n * bits // 32), scales_of(rng, (groups, n))
    group = groups_of(k, -(-k // groups)) if group_of is None else group_of
    zeros = reference.stream(np.ascontiguousarray(z.T), bits).T + (0 if v2 else 1)
    decoded = (reference.stream(q, bits) - zeros[group]) * s.astype(np.float64)[group]
    given = None if group_of is None else group_of.astype(np.int32)
    return gemm.pack_gptq(q, z, s, given, bits=bits, v2=v2), decoded.T


def compressed(
    n: int, k: int, groups: int, bits: int = 4, zeros: bool = False, group_of: np.ndarray | None = None, seed: int = 0
) -> Weight:
    """Codes one by one into words, the lowest bits first."""
    rng = np.random.default_rng(seed)
    half, each = 1 << (bits - 1), 32 // bits
    q, s = rng.integers(-half, half, (n, k)), scales_of(rng, (n, groups), ml_dtypes.bfloat16)
    z = rng.integers(-half, half, (n, groups)) if zeros else np.zeros((n, groups), np.int64)

    def in_words(values: np.ndarray) -> np.ndarray:
        made = np.zeros((len(values), -(-values.shape[1] // each)), np.uint32)
        for column in range(values.shape[1]):
            made[:, column // each] |= (values[:, column] + half).astype(np.uint32) << np.uint32(bits * (column % each))
        return made.view(np.int32)

    group = groups_of(k, k // groups) if group_of is None else group_of
    given = np.full(k, -1, np.int32) if group_of is None else group_of.astype(np.int32)
    points = np.ascontiguousarray(in_words(z.T).T) if zeros else None
    packed = gemm.pack_compressed_tensors(in_words(q), s, points, given, shape=(n, k), bits=bits)
    return packed, (q - z[:, group]) * s.astype(np.float64)[:, group]


def fp8(n: int, k: int, block: tuple[int, int] | None = None, one: bool = False, seed: int = 0) -> Weight:
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((n, k)).astype(np.float32).astype(E4M3)
    if block:
        s = scales_of(rng, (-(-n // block[0]), -(-k // block[1])), np.float32)
        full = np.repeat(np.repeat(s, block[0], 0)[:n], block[1], 1)[:, :k]
    else:
        s = scales_of(rng, (1,) if one else (n, 1), np.float32)
        full = np.broadcast_to(s, (n, k))
    return gemm.pack_fp8(w, s, block=block), w.astype(np.float64) * full


def codes_of_4(rng: np.random.Generator, n: int, k: int) -> np.ndarray:
    return rng.integers(0, 256, (n, k // 2), dtype=np.uint8)


def nvfp4(n: int, k: int, seed: int = 0) -> Weight:
    rng = np.random.default_rng(seed)
    w, s = codes_of_4(rng, n, k), rng.uniform(0.5, 400, (n, k // 16)).astype(np.float32).astype(E4M3)
    decoded = reference.e2m1_values(w).astype(np.float64) * np.repeat(s.astype(np.float64), 16, 1) * 2.0**-12
    return gemm.pack_nvfp4(w, s, 2.0**-12), decoded


def mxfp4(n: int, k: int, seed: int = 0) -> Weight:
    rng = np.random.default_rng(seed)
    w, s = codes_of_4(rng, n, k), rng.integers(116, 124, (n, k // 32)).astype(np.uint8)
    return gemm.pack_mxfp4(w, s), reference.e2m1_values(w) * np.repeat(np.ldexp(1.0, s.astype(int) - 127), 32, 1)


def nf4(n: int, k: int, seed: int = 0) -> Weight:
    rng = np.random.default_rng(seed)
    w, s = codes_of_4(rng, n, k), scales_of(rng, (n * k // 64,), np.float32)
    codes = np.stack([w >> 4, w & 15], -1).reshape(n, k)
    return gemm.pack_nf4(w.reshape(-1), s, (n, k)), gemm.NF4.astype(np.float64)[codes] * np.repeat(s, 64).reshape(n, k)


# where GGUF's blocks have a float16
HALVES = {2: [0], 3: [0, 2], 6: [0], 7: [0, 2], 8: [0], 9: [0], 10: [80, 82], 11: [108], 12: [0, 2], 13: [0, 2]}
HALVES |= {14: [208], 15: [], 16: [0], 17: [0], 18: [0], 19: [0], 20: [0], 21: [0], 22: [0], 23: [0], 29: [], 34: [52]}
HALVES |= {35: [64], 39: [], 40: [], 41: [0]}


def gguf_blocks(
    quant_type: int, n: int = 40, k: int = 512, seed: int = 0, powers: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """[n, bytes] and [n, k] decoded.  Powers: floats of blocks are powers of two."""
    rng = np.random.default_rng(seed)
    name, elements, size = reference.FORMATS[quant_type]
    blocks = rng.integers(0, 256, (n * k // elements, size), dtype=np.uint8)

    def scales(dtype: object = np.float16) -> np.ndarray:
        if powers:
            return np.ldexp(1.0, rng.integers(-7, -4, (len(blocks), 1))).astype(dtype)
        return scales_of(rng, (len(blocks), 1), dtype)

    for at in HALVES[quant_type]:
        blocks[:, at : at + 2] = scales().view(np.uint8)
    if name == "Q8_K":
        blocks[:, :4] = scales(np.float32).view(np.uint8)
    elif name == "IQ1_M":  # four bits in each of four words
        bits = scales().view(np.uint16) >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | bits.astype(np.uint8) << 4
    elif name == "MXFP4":
        blocks[:, 0] = rng.integers(116, 124, len(blocks))
    elif name == "NVFP4":
        blocks[:, :4] &= 0x7F
    if name in reference.DECODE:
        decoded = reference.DECODE[name](blocks)
    else:
        gguf = pytest.importorskip("gguf", reason="has the code books")
        decoded = gguf.dequantize(blocks, gguf.GGMLQuantizationType(quant_type))
    return blocks.reshape(n, -1), decoded.astype(np.float64).reshape(n, k)


def gguf(quant_type: int, n: int = 40, k: int = 512, seed: int = 0) -> Weight:
    blocks, decoded = gguf_blocks(quant_type, n, k, seed)
    return gemm.pack_gguf(blocks, quant_type), decoded


def gptq_of_steps(bits: int, a: int, b: int, seed: int) -> Weight:
    return gptq(32 * a, 32 * b, b, bits, v2=bool(seed % 2), seed=seed)


def gguf_of_steps(quant_type: int, a: int, b: int, seed: int) -> Weight:
    return gguf(quant_type, 3 * a, reference.FORMATS[quant_type][1] * b, seed)


SHARD = np.random.default_rng(7).integers(0, 3, 256)  # groups of any sizes

SOURCES: dict[str, Callable[[], Weight]] = {
    "awq": lambda: awq(72, 512),
    "awq in bf16": lambda: awq(40, 256, 64, ml_dtypes.bfloat16),
    "gptq": lambda: gptq(72, 512, 4),
    "gptq v2": lambda: gptq(40, 256, 8, v2=True),
    "gptq of 2 bits": lambda: gptq(48, 256, 2, 2),
    "gptq of 3 bits": lambda: gptq(32, 256, 2, 3),
    "gptq of 8 bits": lambda: gptq(48, 256, 2, 8),
    "gptq in one group": lambda: gptq(48, 320, 1),
    "gptq with act-order": lambda: gptq(40, 256, 4, group_of=np.random.default_rng(1).permutation(256) // 64),
    "gptq of a shard": lambda: gptq(40, 256, 3, group_of=SHARD),
    "compressed-tensors": lambda: compressed(50, 204, 3),
    "compressed-tensors of 8 bits": lambda: compressed(50, 204, 1, 8),
    "compressed-tensors with zeros": lambda: compressed(50, 256, 4, zeros=True),
    "compressed-tensors with act-order": lambda: compressed(
        40, 256, 4, zeros=True, group_of=np.random.default_rng(1).permutation(256) // 64
    ),
    "int4": lambda: integers(50, 200, 32, zeros=False),
    "int4 with zeros": lambda: integers(50, 200, 32),
    "int8": lambda: integers(50, 200, 200, 8, zeros=False, dtype=ml_dtypes.bfloat16),
    "int8 in float32": lambda: integers(33, 130, 64, 8, dtype=np.float32),
    "groups of 24": lambda: integers(33, 130, 24),
    "groups of 48": lambda: integers(33, 250, 48),
    "fp8": lambda: fp8(50, 200),
    "fp8 with one scale": lambda: fp8(50, 200, one=True),
    "fp8 in blocks": lambda: fp8(200, 300, (128, 128)),
    "nvfp4": lambda: nvfp4(50, 208),
    "mxfp4": lambda: mxfp4(50, 224),
    "nf4": lambda: nf4(50, 192),
    **{f"gguf {reference.FORMATS[t][0]}": partial(gguf, t) for t in HALVES},
}

# of any size: by how many steps of rows and of columns each format allows, and a seed
OF_ANY_SIZE: dict[str, Callable[[int, int, int], Weight]] = {
    "awq": lambda a, b, seed: awq(8 * a, 32 * b, 32, seed=seed),
    **{f"gptq of {bits} bits": partial(gptq_of_steps, bits) for bits in (2, 3, 4, 8)},
    "gptq with act-order": lambda a, b, seed: gptq(
        8 * a, 32 * b, b, group_of=np.random.default_rng(seed).permutation(32 * b) // 32
    ),
    "gptq of a shard": lambda a, b, seed: gptq(
        8 * a, 32 * b, 5, group_of=np.random.default_rng(seed).integers(0, 5, 32 * b)
    ),
    "compressed-tensors": lambda a, b, seed: compressed(
        3 * a, 21 * b, b, bits=4 << seed % 2, zeros=bool(seed % 3), seed=seed
    ),
    "int4": lambda a, b, seed: integers(3 * a, 7 * b, 24, zeros=False, seed=seed),
    "fp8": lambda a, b, seed: fp8(3 * a, 7 * b, one=bool(seed % 2), seed=seed),
    "fp8 in blocks": lambda a, b, seed: fp8(19 * a, 27 * b, (128, 128), seed=seed),
    "nvfp4": lambda a, b, seed: nvfp4(3 * a, 16 * b, seed),
    "mxfp4": lambda a, b, seed: mxfp4(3 * a, 32 * b, seed),
    "nf4": lambda a, b, seed: nf4(3 * a, 64 * b, seed),
    **{f"gguf {reference.FORMATS[t][0]}": partial(gguf_of_steps, t) for t in HALVES},
}

# for many rows of x: each kind of code, of minimum and of group
LARGE: dict[str, Callable[[], Weight]] = {
    "awq": lambda: awq(2072, 1152),
    "int4": lambda: integers(2072, 1152, zeros=False),
    "int4 in groups of 48": lambda: integers(2072, 1152, 48),
    "int8": lambda: integers(2072, 1152, 1152, 8, dtype=np.float32),
    "gptq with act-order": lambda: gptq(2072, 768, 6, group_of=np.random.default_rng(1).permutation(768) // 128),
    "fp8 in blocks": lambda: fp8(2072, 1152, (128, 128)),
    "nvfp4": lambda: nvfp4(2072, 1152),
    "int4 in groups of 32 with zeros": lambda: integers(2072, 1152, 32),
    "int8 in groups of 64": lambda: integers(2072, 1152, 64, 8, zeros=False, dtype=ml_dtypes.bfloat16),
    "nf4": lambda: nf4(2072, 1152),
    "Q3_K": lambda: gguf(11, 2072, 1280),
    "Q4_0": lambda: gguf(2, 2072, 1280),
    "Q8_0": lambda: gguf(8, 2072, 1280),
    "IQ4_XS": lambda: gguf(23, 2072, 1280),
    "Q4_K": lambda: gguf(12, 2072, 1280),
    "Q5_K": lambda: gguf(13, 2072, 1280),
    "Q6_K": lambda: gguf(14, 2072, 1280),
    "Q2_K": lambda: gguf(10, 2072, 1280),
    "Q4_1": lambda: gguf(3, 2072, 1280),
    "mxfp4": lambda: mxfp4(2072, 1184),
    "three units": lambda: integers(2072, 180, 64),
}
