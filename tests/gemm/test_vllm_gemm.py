"""The products of ``pykv.vllm``, against float64; what repacks, against the places of Marlin's fragments."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
from dequantization import reference
from gemm.weights import awq_codes_and_scales, gguf_blocks, scales_of, words
from rows import random

import pykv
from pykv import _vllm_gemm, _vllm_packed
from pykv import vllm as ops

BF16, F16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
K, N = 256, 128


def close(out, x, decoded, bias=0.0) -> None:
    """Decoded: [k, n]."""
    assert out.dtype == x.dtype
    exact = x.astype(np.float64) @ decoded + bias
    size = np.abs(x.astype(np.float64)) @ np.abs(decoded)
    half_ulp = float(ml_dtypes.finfo(x.dtype).eps) / 2
    assert (np.abs(out.astype(np.float64) - exact) <= half_ulp * 1.01 * np.abs(exact) + 1e-5 * size).all()


def gptq_weight(bits: int, groups: int = 4, v2: bool = False, seed: int = 0):
    """Words, zeros, scales, and [k, n] codes less their zero points in groups' order."""
    rng = np.random.default_rng(seed)
    q, z, s = words(rng, K * bits // 32, N), words(rng, groups, N * bits // 32), scales_of(rng, (groups, N))
    zeros = reference.stream(np.ascontiguousarray(z.T), bits).T.astype(np.int64) + (0 if v2 else 1)
    return q, z, s, reference.stream(q, bits).astype(np.int64), zeros


def test_awq_gemm() -> None:
    q, z, s, decoded = awq_codes_and_scales(N, K, 64)
    x = random((5, K), F16)
    close(ops.awq_gemm(x, q, s, z, 8), x, decoded)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("v2", [False, True])
def test_gptq_gemm(bits: int, v2: bool) -> None:
    q, z, s, codes, zeros = gptq_weight(bits, v2=v2)
    x, group = random((5, K), F16), np.arange(K) // (K // 4)
    close(ops.gptq_gemm(x, q, z, s, False, v2, bits, b_g_idx=group.astype("i4")), x, (codes - zeros[group]) * s[group])
    close(ops.gptq_gemm(x, q, z, s, False, v2, bits), x, (codes - zeros[group]) * s[group])
    group = np.random.default_rng(1).permutation(group)
    decoded = (codes - zeros[group]) * s.astype(np.float64)[group]
    close(ops.gptq_gemm(x, q, z, s, False, v2, bits, b_g_idx=group.astype("i4")), x, decoded)
    order = np.argsort(group, kind="stable").astype("i4")
    plain = q.copy()
    ops.gptq_shuffle(q, bits, q_perm=order)
    close(ops.gptq_gemm(x, q, z, s, True, v2, bits, b_g_idx=order), x, decoded)
    ops.gptq_shuffle(plain, bits)
    group = np.arange(K) // (K // 4)
    close(ops.gptq_gemm(x, plain, z, s, True, v2, bits), x, (codes - zeros[group]) * s.astype(np.float64)[group])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("words_of_codes", [1, 2, 5])
def test_gptq_shuffle_of_few_rows(bits: int, words_of_codes: int) -> None:
    rng, rows = np.random.default_rng(0), words_of_codes * (3 if bits == 3 else 1)
    q, s = words(rng, rows, N), scales_of(rng, (1, N))
    z, k = words(rng, 1, N * bits // 32), rows * 32 // bits
    zeros = reference.stream(np.ascontiguousarray(z.T), bits).T.astype(np.int64) + 1
    x, decoded = random((3, k), F16), (reference.stream(q, bits).astype(np.int64) - zeros) * s.astype(np.float64)
    ops.gptq_shuffle(q, bits)
    close(ops.gptq_gemm(x, q, z, s, True, False, bits), x, decoded)


def test_gptq_shuffle_puts_even_codes_into_the_lower_half() -> None:
    """Of 3 bits, five even and five odd ones in each word, besides a bit of each of the last two."""
    codes = np.arange(8)[:, None]
    four = np.repeat((codes << 4 * codes).sum(0, keepdims=True).astype(np.uint32).view(np.int32), 4, axis=0)
    ops.gptq_shuffle(four, 4)
    assert (four.view(np.uint32) == 0x75316420).all()
    rng = np.random.default_rng(0)
    three = words(rng, 3, 1)
    v = reference.stream(three, 3)[:, 0].astype(np.int64)
    ops.gptq_shuffle(three, 3)
    for w in range(3):
        word = int(three.view(np.uint32)[w, 0])
        assert [word >> 3 * i & 7 for i in range(5)] == list(v[10 * w : 10 * w + 10 : 2])
        assert [word >> 16 + 3 * i & 7 for i in range(5)] == list(v[10 * w + 1 : 10 * w + 10 : 2])
        assert (word >> 15 & 1, word >> 31) == (v[30] >> w & 1, v[31] >> w & 1)


def marlin_words(codes: np.ndarray, bits: int) -> np.ndarray:
    """Of each 16 rows and 64 columns, lane by lane: rows 2 c, 2 c + 1 and 8 more of columns g and g + 8."""
    k, n = codes.shape
    order = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3, 4, 6, 5, 7)}[bits]
    out = []
    for row in range(0, k, 16):
        stream = []
        for column in range(0, n, 64):
            for lane in range(32):
                g, c = lane // 4, lane % 4
                for tile in range(4):
                    part = codes[row : row + 16, column + 16 * tile : column + 16 * tile + 16]
                    eight = [part[r, col] for col in (g, g + 8) for r in (2 * c, 2 * c + 1, 2 * c + 8, 2 * c + 9)]
                    stream += [int(eight[i]) for i in order]
        per_word = 32 // bits
        out.append(
            [
                sum(v << bits * i for i, v in enumerate(stream[at : at + per_word]))
                for at in range(0, len(stream), per_word)
            ]
        )
    return np.array(out, np.uint32).view(np.int32)


@pytest.mark.parametrize("bits", [4, 8])
def test_repacks(bits: int) -> None:
    q, _, _, codes, _ = gptq_weight(bits)
    np.testing.assert_array_equal(ops.gptq_marlin_repack(q, K, N, bits), marlin_words(codes, bits))
    order = np.random.default_rng(0).permutation(K).astype("i4")
    np.testing.assert_array_equal(ops.gptq_marlin_repack(q, K, N, bits, perm=order), marlin_words(codes[order], bits))
    assert ops.gptq_marlin_repack(q, K, N, bits, True).shape == (K // 16, N * bits // 2)
    columns = np.array({4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits])  # that of each field of a word
    fields = codes.reshape(K, -1, len(columns))[..., columns].astype(np.uint64)
    packed = (fields << np.uint64(bits) * np.arange(len(columns), dtype=np.uint64)).sum(-1).astype(np.uint32)
    np.testing.assert_array_equal(ops.awq_marlin_repack(packed.view(np.int32), K, N, bits), marlin_words(codes, bits))
    with pytest.raises(ValueError, match="b_q_weight: must hold"):
        ops.gptq_marlin_repack(q, K, N + 64, bits)


def marlin_words_for_8_bits(codes: np.ndarray, bits: int) -> np.ndarray:
    """Of each 32 rows and 32 columns, lane by lane: rows 4 c to 4 c + 3 and 16 more of columns g and g + 8."""
    k, n = codes.shape
    order = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: range(8)}[bits]
    stream = []
    for row in range(0, k, 32):
        for column in range(0, n, 32):
            for lane in range(32):
                g, c = lane // 4, lane % 4
                for tile in range(2):
                    part = codes[row : row + 32, column + 16 * tile : column + 16 * tile + 16]
                    for col in (g, g + 8):
                        eight = [part[4 * c + r + 16 * half, col] for half in (0, 1) for r in range(4)]
                        stream += [int(eight[i]) for i in order]
    fields = np.array(stream, np.uint64).reshape(k // 16, -1, 32 // bits)
    shifts = np.uint64(bits) * np.arange(32 // bits, dtype=np.uint64)
    return (fields << shifts).sum(-1).astype(np.uint32).view(np.int32)


SCALES = np.arange(64).reshape(8, 8).T.ravel()
SINGLE = np.array([2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)])


def permuted(values: np.ndarray, order: np.ndarray) -> np.ndarray:
    return values.reshape(-1, len(order))[:, order].reshape(values.shape)


def marlin_zeros(zeros: np.ndarray, bits: int) -> np.ndarray:
    order = np.array({4: [0, 2, 4, 6, 1, 3, 5, 7], 8: [0, 2, 1, 3]}[bits])
    z = permuted(permuted(zeros, SCALES), order).reshape(len(zeros), -1, 32 // bits).astype(np.uint64)
    return (z << np.uint64(bits) * np.arange(32 // bits, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("kind", ["uint4b8", "uint8b128", "uint4", "uint8", "float zeros", "one group", "act-order"])
def test_marlin_gemm(dtype: np.dtype, kind: str) -> None:
    bits = 8 if "8" in kind.removesuffix("b8") else 4
    groups = 1 if kind == "one group" else 4
    rng = np.random.default_rng(0)
    q, _, _, codes, _ = gptq_weight(bits)
    s = scales_of(rng, (groups, N), dtype)
    group, middle = np.arange(K) // (K // groups), 1 << (bits - 1)
    zeros: np.ndarray = np.full((groups, N), middle)
    given, order, of_rows = None, None, None
    if kind in ("uint4", "uint8"):
        zeros = rng.integers(0, 2 * middle, (groups, N))
        given = marlin_zeros(zeros, bits)
    if kind == "float zeros":
        zeros = rng.uniform(0, 15, (groups, N)).astype(dtype).astype(np.float32)
        given = permuted(zeros.astype(dtype), SCALES)
    if kind == "act-order":
        group = rng.permutation(group)
        order = np.argsort(group, kind="stable").astype("i4")
        of_rows = group[order].astype("i4")
    repacked = ops.gptq_marlin_repack(q, K, N, bits, perm=order)
    x, bias = random((5, K), dtype), random((N,), dtype, 1)
    c = np.zeros((5, N), dtype) if kind == "uint4" else None
    name = {"float zeros": "uint4", "one group": "uint4b8", "act-order": "uint4b8"}.get(kind, kind)
    out = ops.marlin_gemm(
        x, c, repacked, permuted(bias[None], SINGLE)[0], permuted(s, SINGLE if groups == 1 else SCALES), None, None,
        given, None, name, 5, N, K, is_zp_float=kind == "float zeros", g_idx=of_rows, perm=order,
    )  # fmt: skip
    assert c is None or out is c
    close(out, x, (codes - zeros[group]) * s.astype(np.float64)[group], bias.astype(np.float64))


def narrow(shape: tuple[int, int], kind: str) -> np.ndarray:
    rng = np.random.default_rng(5)
    if kind == "int8":
        return rng.integers(-128, 128, shape, np.int8)
    return rng.uniform(-3, 3, shape).astype(ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("kind", "groups"), [("uint4b8", 4), ("uint4b8", 1), ("uint8b128", 2), ("uint4", 4)])
def test_marlin_gemm_of_int8(dtype: np.dtype, kind: str, groups: int) -> None:
    bits = 8 if "8" in kind.removesuffix("b8") else 4
    rng = np.random.default_rng(0)
    q, _, _, codes, _ = gptq_weight(bits)
    repacked = ops.gptq_marlin_repack(q, K, N, bits, True)
    np.testing.assert_array_equal(repacked, marlin_words_for_8_bits(codes, bits))
    group = np.arange(K) // (K // groups)
    zeros, given = np.full((groups, N), 1 << (bits - 1)), None
    if kind == "uint4":
        zeros = rng.integers(0, 16, (groups, N))
        fields = permuted(zeros, SCALES).reshape(groups, -1, 8).astype(np.uint64)
        given = (fields << np.uint64(4) * np.arange(8, dtype=np.uint64)).sum(-1).astype(np.uint32).view(np.int32)
    s = scales_of(rng, (1, N), dtype) if groups == 1 else rng.integers(1, 4097, (groups, N)).astype(np.int16)
    a, of_tokens = narrow((5, K), "int8"), rng.uniform(1e-5, 2e-5, (5, 1)).astype(np.float32)
    bias, c = random((N,), dtype, 1), np.zeros((5, N), dtype) if groups == 2 else None
    out = ops.marlin_gemm(
        a, c, repacked, permuted(bias[None], SINGLE)[0], permuted(s, SINGLE).view(dtype), of_tokens, None, given, None,
        kind, 5, N, K,
    )  # fmt: skip
    x = a.astype(dtype)  # exact
    decoded = (codes - zeros[group]) * s.astype(np.float64)[group]
    exact = of_tokens * (x.astype(np.float64) @ decoded) + bias.astype(np.float64)
    size = of_tokens * (np.abs(x.astype(np.float64)) @ np.abs(decoded))
    assert out.dtype == dtype
    half_ulp = float(ml_dtypes.finfo(dtype).eps) / 2
    assert (np.abs(out.astype(np.float64) - exact) <= 1.01 * half_ulp * np.abs(exact) + 1e-5 * size).all()


@pytest.mark.parametrize("kind", ["uint4b8", "mxfp4"])
def test_marlin_gemm_of_fp8(kind: str) -> None:
    rng = np.random.default_rng(0)
    a, of_tokens = narrow((5, K), "fp8"), rng.uniform(0.01, 0.02, (5, 1)).astype(np.float32)
    if kind == "uint4b8":
        q, _, _, codes, _ = gptq_weight(4)
        s = scales_of(rng, (4, N), BF16)
        decoded = (codes - 8) * np.repeat(s.astype(np.float64), K // 4, 0)
        again = q.copy()
        assert ops.marlin_int4_fp8_preprocess(again, inplace=True) is again
        np.testing.assert_array_equal(reference.stream(again, 4), np.where(codes < 8, 15 - codes, codes - 8))
        w, scales, name = ops.gptq_marlin_repack(again, K, N, 4, True), permuted(s * BF16.type(512), SINGLE), kind
    else:
        codes, table = rng.integers(0, 16, (K, N)), np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
        exponents = rng.integers(120, 130, (K // 32, N)).astype(np.uint8)
        decoded = table.astype(np.float64)[codes] * np.repeat(2.0 ** (exponents.astype(int) - 127), 32, axis=0)
        w, scales, name = marlin_words_for_8_bits(codes, 4), permuted(exponents + np.uint8(6), SINGLE), "float4_e2m1f"
    out = ops.marlin_gemm(a, None, w, None, scales, of_tokens, None, None, None, name, 5, N, K)
    assert out.dtype == BF16
    exact = of_tokens * (a.astype(np.float64) @ decoded)
    size = of_tokens * (np.abs(a.astype(np.float64)) @ np.abs(decoded))
    half_ulp = float(ml_dtypes.finfo(BF16).eps) / 2
    assert (np.abs(out.astype(np.float64) - exact) <= 1.01 * half_ulp * np.abs(exact) + 1e-5 * size).all()
    with pytest.raises(ValueError, match="b_q_type: beside fp8 must be uint4b8 or float4_e2m1f"):
        ops.marlin_gemm(a, None, w, None, scales, of_tokens, None, None, None, "uint4", 5, N, K)


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("with_zeros", [False, True])
def test_allspark(dtype: np.dtype, with_zeros: bool) -> None:
    rng, n = np.random.default_rng(0), 50
    codes, s = rng.integers(0, 256, (K, n), np.uint8), scales_of(rng, (1, n), dtype)
    z = rng.integers(-20, 20, (1, n)).astype(dtype) if with_zeros else None
    decoded = (codes.astype(np.float64) - 128 - (0 if z is None else z.astype(np.float64))) * s.astype(np.float64)
    w, scales, zeros = ops.allspark_repack_weight(codes, s, z, with_zeros)
    assert (w.shape, scales.shape) == ((64, K), (1, 64))
    x, machine = random((5, K), dtype), (-1, 132, 90, 1024)
    close(ops.allspark_w8a16_gemm(x, w, scales, zeros, n, *machine, with_zeros, True), x, decoded)
    close(ops.allspark_w8a16_gemm(x, codes, s, z, n, *machine, with_zeros, False), x, decoded)


def marlin_floats(kind: str, dtype: np.dtype, groups: int, seed: int = 0):
    """Words, scales, global scale and the weight itself."""
    rng, bias = np.random.default_rng(seed), {F16: 15, BF16: 127}[dtype]
    order = SINGLE if groups == 1 else SCALES
    if kind == "fp8":
        values = rng.uniform(-2, 2, (K, N)).astype(ml_dtypes.float8_e4m3fn)
        scales = rng.uniform(0.5, 1, (groups, N)).astype(dtype)
        given = (permuted(scales, order).astype(np.float32) * 2.0 ** (bias - 7)).astype(dtype)
        decoded = values.astype(np.float64) * np.repeat(scales.astype(np.float64), K // groups, axis=0)
        return marlin_words(values.view(np.uint8).astype(np.int64), 8), given, None, decoded
    codes, table = rng.integers(0, 16, (K, N)), np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    values = table.astype(np.float64)[codes]
    pairs = np.array([0, 2, 1, 3])
    if kind == "mxfp4":
        exponents = rng.integers(120, 130, (groups, N)).astype(np.uint8)
        decoded = values * np.repeat(2.0 ** (exponents.astype(int) - 127), 32, axis=0)
        return marlin_words(codes, 4), permuted(permuted(exponents, order), pairs), None, decoded
    scales = rng.uniform(1, 448, (groups, N)).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    halves = permuted(permuted(scales, order), pairs).astype(np.float16) * np.float16(2**7)
    given = (halves.view(np.uint16) << 1 >> 8).astype(np.uint8)
    number = np.float32(1 / 512)
    return (
        marlin_words(codes, 4),
        given,
        np.array([number * np.float32(2.0) ** (bias - 8)], np.float32),
        (values * np.repeat(scales, 16, axis=0) * number),
    )


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize(("kind", "groups"), [("fp8", 1), ("fp8", 2), ("mxfp4", 8), ("nvfp4", 16)])
def test_marlin_gemm_of_floats(dtype: np.dtype, kind: str, groups: int) -> None:
    w, scales, number, decoded = marlin_floats(kind, dtype, groups)
    x = random((5, K), dtype)
    name = "float8_e4m3fn" if kind == "fp8" else "float4_e2m1f"
    out = ops.marlin_gemm(x, None, w, None, scales, None, number, None, None, name, 5, N, K)
    close(out, x, decoded)


@pytest.mark.parametrize("kind", ["uint4b8", "uint4", "fp8", "nvfp4"])
@pytest.mark.parametrize("times_weights", [False, True])
def test_marlin_gemm_of_experts(kind: str, times_weights: bool) -> None:
    experts, block, dtype = 3, 8, F16
    words_of, scales, others, decoded = [], [], [], []
    for e in range(experts):
        if kind in ("fp8", "nvfp4"):
            parts = marlin_floats(kind, dtype, 2 if kind == "fp8" else 16, e)
        else:
            rng = np.random.default_rng(e)
            q, _, _, codes, _ = gptq_weight(4, seed=e)
            s = scales_of(rng, (4, N), dtype)
            zeros = rng.integers(0, 16, (4, N)) if kind == "uint4" else np.full((4, N), 8)
            group = np.arange(K) // (K // 4)
            given = marlin_zeros(zeros, 4) if kind == "uint4" else None
            parts = (q, permuted(s, SCALES), given, (codes - zeros[group]) * s.astype(np.float64)[group])
        for into, part in zip((words_of, scales, others, decoded), parts, strict=True):
            into.append(part)
    q = np.stack(words_of)
    if kind in ("uint4b8", "uint4"):
        q = ops.gptq_marlin_moe_repack(q, K, N, 4)
        np.testing.assert_array_equal(q[1], ops.gptq_marlin_repack(words_of[1], K, N, 4))
    more = None if others[0] is None else np.stack(others)
    number, zeros = (more, None) if kind == "nvfp4" else (None, more)
    bias = random((experts, N), dtype, 3)
    x, ids = random((4, K), dtype), np.array([[0, 2], [1, 0], [2, 1], [0, 1]], np.int32)
    places, blocks = np.zeros(8 + experts * 7, np.int32), np.zeros(4, np.int32)
    taken = np.zeros(1, np.int32)
    ops.moe_align_block_size(ids, experts, block, places, blocks, taken)
    weights = np.random.default_rng(1).uniform(0, 1, (4, 2)).astype(np.float32)
    name = {"fp8": "float8_e4m3fn", "nvfp4": "float4_e2m1f"}.get(kind, kind)
    out = ops.moe_wna16_marlin_gemm(
        x, None, q, permuted(bias, SINGLE), np.stack(scales), None, number, zeros, None, places, blocks, taken,
        weights, block, 2, times_weights, name, 4, N, K, False, True, False,
    )  # fmt: skip
    for pair, e in enumerate(ids.ravel()):
        row = pair // 2
        wanted = (x[row].astype(np.float64) @ decoded[e] + bias[e]) * (weights.ravel()[pair] if times_weights else 1)
        np.testing.assert_allclose(out[pair].astype(np.float64), wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())


def test_awq_marlin_moe_repack() -> None:
    q = words(np.random.default_rng(0), 2 * K, N // 8).reshape(2, K, N // 8)
    found = ops.awq_marlin_moe_repack(q, K, N, 4)
    np.testing.assert_array_equal(found, np.stack([ops.awq_marlin_repack(w, K, N, 4) for w in q]))


@pytest.mark.parametrize("kind", ["uint4b8", "uint8b128", "uint4", "uint8"])
@pytest.mark.parametrize("of_channels", [False, True])
def test_machete(kind: str, of_channels: bool) -> None:
    rng = np.random.default_rng(0)
    bits = 8 if "8" in kind.removesuffix("b8") else 4
    centred = "b" in kind
    q, _, s, codes, _ = gptq_weight(bits)
    group = np.arange(K) // (K // 4)
    z = None if centred else rng.uniform(-0.3, 0, (4, N)).astype(np.float16)
    b = ops.machete_prepack_B(np.asfortranarray(q), F16, kind, F16)
    assert b.shape == q.shape
    channels = rng.uniform(0.5, 2, N).astype(np.float32) if of_channels else None
    decoded = (codes - ((1 << (bits - 1)) if centred else 0)) * s.astype(np.float64)[group]
    decoded += 0 if z is None else z.astype(np.float64)[group]
    decoded *= 1 if channels is None else channels
    x = random((5, K), F16)
    close(ops.machete_mm(x, b, kind, None, s, z, 64, channels), x, decoded)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_machete_of_8_bits(kind: str) -> None:
    q, _, s, codes, _ = gptq_weight(4)
    a, of_tokens = narrow((5, K), kind), np.random.default_rng(1).uniform(0.01, 0.02, (5, 1)).astype(np.float32)
    decoded = (codes - 8) * np.repeat(s.astype(np.float64), K // 4, 0)
    out = ops.machete_mm(a, q, "uint4b8", "bfloat16", s, None, 64, None, of_tokens)
    assert out.dtype == BF16
    exact = of_tokens * (a.astype(np.float64) @ decoded)
    np.testing.assert_allclose(out.astype(np.float64), exact, rtol=4e-3, atol=1e-3 * np.abs(exact).max())


@pytest.mark.parametrize("quant_type", [2, 12, 14, 22])
def test_ggml(quant_type: int) -> None:
    blocks, decoded = gguf_blocks(quant_type)
    x = random((3, decoded.shape[1]), F16)
    for op in (ops.ggml_mul_mat_vec_a8, ops.ggml_mul_mat_a8):
        close(op(blocks, x, quant_type, len(blocks)), x, decoded.T)


def test_ggml_of_float32(array) -> None:
    """In the range of float32: activations become bfloat16, and so does the product."""
    if array.name in ("interface", "jax"):
        pytest.skip("the functions of vLLM allocate what they return, like what they are given")
    blocks, decoded = gguf_blocks(12)
    x = (random((3, decoded.shape[1]), np.dtype(np.float32)) * np.float32(1e6)).astype(np.float32)
    out = array.numpy(ops.ggml_mul_mat_a8(array.input(blocks), array.input(x), 12, len(blocks)))
    assert out.dtype == np.float32
    rounded = x.astype(BF16).astype(np.float64)
    error, size = np.abs(out - rounded @ decoded.T), np.abs(rounded) @ np.abs(decoded).T
    assert (
        error <= 2.0**-8 * (np.abs(rounded @ decoded.T) + (2 * size if array.device == "cuda" else 0.01 * size))
    ).all()
    ids = np.zeros((3, 1), np.int32)
    of_expert = ops.ggml_moe_a8_vec(array.input(x), array.input(blocks[None]), array.input(ids), 1, 12, len(blocks), 3)
    np.testing.assert_array_equal(array.numpy(of_expert), out)


def test_what_is_not_there_is_refused() -> None:
    q, x = np.zeros((K // 16, N * 2), np.int32), np.zeros((1, K), F16)
    s = np.ones((4, N), F16)
    with pytest.raises(ValueError, match=r"b_q_type: must be uint4, uint8, uint4b8, uint8b128, .*, got uint3"):
        ops.marlin_gemm(x, None, q, None, s, None, None, None, None, "uint3", 1, N, K)
    with pytest.raises(ValueError, match="b_scales: must have"):
        ops.marlin_gemm(x, None, q, None, s.view(np.uint8), None, None, None, None, "float4_e2m1f", 1, N, K)
    with pytest.raises(ValueError, match="group_size: must be -1, one scale for a column, got 128"):
        ops.allspark_w8a16_gemm(x, np.zeros((N, K), np.uint8), s[:1], None, N, 128, 132, 90, 1024, False, True)
    with pytest.raises(ValueError, match="qzeros_or_none: must be None"):
        ops.marlin_int4_fp8_preprocess(q, q)
    with pytest.raises(ValueError, match="out_type: must be that of a, float16, got float32"):
        ops.machete_mm(x, np.zeros((K // 8, N), np.int32), "uint4b8", "float32", s)


def test_a_weight_stays_packed_as_long_as_it_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(_vllm_gemm, "pack_awq", lambda *given: calls.append(0) or pykv.gemm.pack_awq(*given))
    before = len(_vllm_packed._made)
    q, z, s, _ = awq_codes_and_scales(N, K, 64)
    x = random((5, K), F16)
    first = ops.awq_gemm(x, q, s, z, 8)
    np.testing.assert_array_equal(ops.awq_gemm(x, q, s, z, 8), first)
    assert len(calls) == 1
    assert len(_vllm_packed._made) == before + 1
    del q
    gc.collect()
    assert len(_vllm_packed._made) == before


def test_weights_of_inference_mode() -> None:
    """Those tensors do not count their changes."""
    torch = pytest.importorskip("torch")
    q, z, s, decoded = awq_codes_and_scales(N, K, 64)
    x = random((5, K), F16)
    with torch.inference_mode():
        tensors = [torch.from_numpy(a).clone() for a in (q, s, z)]
        assert tensors[0].is_inference()
        for _ in range(2):
            close(ops.awq_gemm(torch.from_numpy(x), *tensors, 8).numpy(), x, decoded)


def test_scales_that_are_no_more_are_not_taken_for_new_ones() -> None:
    """New arrays may have the address of old ones."""
    q, z, s, decoded = awq_codes_and_scales(N, K, 64)
    x = random((5, K), F16)
    for power in range(8):
        close(ops.awq_gemm(x, q, s * np.float16(2.0**-power), z, 8), x, decoded * 2.0**-power)


def test_what_would_be_another_weight_is_refused():
    words, scales = np.ones((K // 8, N), np.int32), np.ones((4, N), np.float16)
    zeros, x = np.ones((4, N // 8), np.int32), random((3, K), F16)
    for wrong, message in (
        ({"b_q_weight": words.astype(np.float32)}, "b_q_weight: dtype must be int32 or uint32, got float32"),
        ({"b_gptq_scales": scales[:3].copy(), "b_gptq_qzeros": zeros[:3].copy()}, "scales: must have as many rows"),
        ({"b_gptq_qzeros": zeros[:2].copy()}, r"b_gptq_qzeros: must have shape \[4, 16\], got \[2, 16\]"),
        ({"b_gptq_qzeros": None}, "b_gptq_qzeros: must be an array, got NoneType"),
        ({"b_gptq_scales": scales.T}, r"b_gptq_scales: must have shape \[any, 128\], got \[128, 4\]"),
        ({"bit": 5}, "bit: must be 2, 3, 4 or 8, got 5"),
        ({"b_g_idx": np.arange(5)}, f"g_idx: must have a group for each of the {K} rows, got 5"),
        ({"bit": 3, "b_q_weight": words[:4].copy()}, "b_q_weight: dimension 0 must be a multiple of 3"),
        ({"use_exllama": True, "b_g_idx": np.full(K, K)}, f"b_g_idx: must have each of the {K} rows once"),
    ):
        right = dict(b_q_weight=words, b_gptq_qzeros=zeros, b_gptq_scales=scales, use_exllama=False, bit=4)
        with pytest.raises((TypeError, ValueError), match=message):
            ops.gptq_gemm(x, use_v2_format=False, **right | wrong)


def test_what_would_be_another_weight_of_marlin_is_refused() -> None:
    s, x = np.ones((4, N), F16), random((3, K), F16)
    q = ops.gptq_marlin_repack(np.ones((K // 8, N), np.int32), K, N, 4)
    right = dict(a=x, c=None, b_q_weight=q, b_bias=None, b_scales=s, a_scales=None, global_scale=None, b_zeros=None)
    right |= dict(workspace=None, b_q_type="uint4b8", size_m=3, size_n=N, size_k=K)
    assert ops.marlin_gemm(**right).shape == (3, N)
    for wrong, message in (
        ({"a": x.astype(np.float32)}, "a: dtype must be float16 or bfloat16, got float32"),
        ({"a": x.astype(np.int8)}, "a: dtype must be float16 or bfloat16, got int8"),
        ({"size_m": 4}, r"a: must have shape \[size_m, size_k\] = \[4, 256\], got \[3, 256\]"),
        ({"b_q_weight": q.astype(np.float32)}, "dtype must be int32"),
        ({"b_q_weight": q.T}, r"b_q_weight: must have shape \[16, 256\], got \[256, 16\]"),
        ({"b_scales": s.T}, r"b_scales: must have shape \[any, 128\], got \[128, 4\]"),
        ({"b_scales": None}, "b_scales: must be an array, got NoneType"),
        ({"b_q_type": "uint4"}, "b_zeros: must be given with weights of uint4"),
        ({"b_zeros": np.ones((4, N // 8), np.int32)}, "b_zeros: must not be given with weights of uint4b8"),
        (
            {"b_q_type": "uint4", "b_zeros": np.ones((2, 8), np.int32)},
            r"b_zeros: must have shape \[4, 16\], got \[2, 8\]",
        ),
        ({"b_bias": s[0, :64]}, "b_bias: must have size_n = 128 elements, got 64"),
        ({"c": np.zeros((1, N), F16)}, r"c: must be .* \[3, 128\] of float16, got \[1, 128\] of float16"),
        ({"c": np.zeros((3, N), BF16)}, r"c: must be .* of float16, got \[3, 128\] of bfloat16"),
        (
            {"g_idx": np.zeros(5, np.int32), "perm": np.arange(K, dtype=np.int32)},
            "g_idx: must have size_k = 256 elements",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ops.marlin_gemm(**right | wrong)
    for wrong, message in (
        ({"num_bits": 3}, "num_bits: must be 4 or 8, got 3"),
        ({"b_q_weight": np.ones((K // 8, N), np.float32)}, "b_q_weight: dtype must be int32 or uint32, got float32"),
        ({"perm": np.zeros(K, np.int32)}, f"perm: must have each of the {K} rows once"),
    ):
        given = dict(b_q_weight=np.ones((K // 8, N), np.int32), size_k=K, size_n=N, num_bits=4)
        with pytest.raises((TypeError, ValueError), match=message):
            ops.gptq_marlin_repack(**given | wrong)


def test_what_would_be_another_weight_of_others_is_refused() -> None:
    s, x, q = np.ones((4, N), F16), random((3, K), F16), np.ones((K // 8, N), np.int32)
    numbers = np.ones(N, np.float32)
    for given, message in (
        ((x.astype(np.float32), q, "uint4b8", None, s), "a: dtype must be float16, bfloat16, int8 or float8_e4m3fn"),
        ((x, q.astype(np.float32), "uint4b8", None, s), "b_q: dtype must be int32 or uint32, got float32"),
        ((x, q, "uint4b8", None, s[:3]), "b_group_scales: its 3 groups must divide 256 rows of b_q"),
        ((x, q, "uint4b8", None, s, None, 32), r"b_group_scales: must have shape \[8, 128\], got \[4, 128\]"),
        ((x, q, "uint4b8", None, s, None, 100), "b_group_size: must be -1, or divide 256 rows of b_q, got 100"),
        ((x, q, "uint4", None, s, s[:2]), r"b_group_zeros: must have the shape .* \[4, 128\], got \[2, 128\]"),
        ((x, q, "uint4b8", None, s, None, None, numbers[:5]), "b_channel_scales: must have 128 elements, got 5"),
        ((x[:, :64], q, "uint4b8", None, s), r"a: must have shape \[any, 256\], .* got \[3, 64\]"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ops.machete_mm(*given)
    w, machine = np.ones((N, K), np.uint8), (132, 90, 1024)
    for given, message in (
        ((x, w.view(np.int8), s[:1], None, N, -1, *machine, False, True), "b_qweight: dtype must be uint8, got int8"),
        ((x, w, s[:1], None, N + 1, -1, *machine, False, True), "b_qweight: must have n = 129 columns, got 128"),
        ((x, w, s[:1, :9], None, N, -1, *machine, False, True), "b_scales: must have n = 128 columns, got 9"),
        ((x, w, s[:1], None, N, -1, *machine, True, True), "b_qzeros: must be a number or an array, got NoneType"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ops.allspark_w8a16_gemm(*given)
    with pytest.raises(TypeError, match="q_weight: dtype must be int32 or uint32, got float32"):
        ops.gptq_shuffle(q.astype(np.float32), 4)
    with pytest.raises(ValueError, match=f"q_perm: must have each of the {K} rows once, got 5 elements"):
        ops.gptq_shuffle(q.copy(), 4, q_perm=np.arange(5, dtype=np.int32))
    blocks, _ = gguf_blocks(12)
    y = random((3, 512), F16)
    with pytest.raises(ValueError, match=r"W: must have shape \[41, any\], got \[40, 288\]"):
        ops.ggml_mul_mat_a8(blocks, y, 12, 41)
    with pytest.raises(TypeError, match="X: dtype must be float16 or bfloat16, got uint8"):
        ops.ggml_mul_mat_a8(y, blocks, 12, 40)  # the other way round
    with pytest.raises(TypeError, match="input: dtype must be float16 or bfloat16, got float32"):
        ops.awq_gemm(x.astype(np.float32), np.ones((K, N // 8), np.int32), s, np.ones((4, N // 8), np.int32), 8)
