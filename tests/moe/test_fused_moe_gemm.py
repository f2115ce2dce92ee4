"""One product of a layer of experts, and vLLM's names for it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gemm.weights import gguf_blocks, integers
from moe.inputs import random
from rows import name_of, padded

import pykv
from pykv import _vllm_moe
from pykv import vllm as ops
from pykv.gemm import stack_packed
from pykv.packed_weight import plain_scales

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=name_of)


def normal(seed: int, *shape: int, dtype: Any, size: float = 1.0) -> np.ndarray:
    return (random(seed).standard_normal(shape) * size).astype(dtype)


def chosen(tokens: int, k: int, experts: int) -> np.ndarray:
    ids = np.argsort(random(2).random((tokens, experts)), axis=1)[:, :k].astype(np.int32)
    ids[1::4, 0] = -1
    return ids


def aligned(array: Any, ids: np.ndarray, experts: int, block: int) -> list[Any]:
    capacity = ids.size + min(ids.size, experts) * (block - 1)
    made = [array.output(np.zeros(n, np.int32)) for n in (capacity, capacity // block, 1)]
    pykv.moe_align_block_size(array.input(ids), experts, block, *made)
    return [array.input(array.numpy(a)) for a in made]


def compare(
    out: np.ndarray, x: np.ndarray, w: np.ndarray, ids: np.ndarray, factors: Any = 1, bias: Any = None,
    rounded: bool = False,
) -> None:  # fmt: skip
    """Rounded once; or of weights that are rounded before."""
    pairs = ids.reshape(-1)
    there = pairs >= 0
    rows = np.repeat(x.astype(np.float64), ids.shape[1], axis=0)[there]
    exact = np.einsum("pnk,pk->pn", w[pairs[there]].astype(np.float64), rows)
    exact = (exact + (0 if bias is None else bias[pairs[there]])) * np.broadcast_to(factors, pairs.shape)[there, None]
    size = np.linalg.norm(exact) / max(1, exact.size) ** 0.5
    eps = float(ml_dtypes.finfo(out.dtype).eps)
    products = np.einsum("pnk,pk->pn", np.abs(w[pairs[there]]).astype(np.float64), np.abs(rows))
    lost = 1e-5 * size + (eps / 2 * products if rounded else 0)
    error = np.abs(out[there].astype(np.float64) - exact)
    assert (error <= eps * np.abs(exact) + lost).all(), (error / (size + 1e-30)).max()
    np.testing.assert_array_equal(out[~there], 0)


@dtypes
@pytest.mark.parametrize("block", [8, 16, 24, 32, 64, 128, 192])
@pytest.mark.parametrize(("tokens", "k"), [(1, 2), (30, 3), (300, 1)])
def test_plain(array, dtype, block, tokens, k):
    x, ids, w = normal(0, tokens, 136, dtype=dtype), chosen(tokens, k, 5), normal(1, 5, 200, 136, dtype=dtype)
    bias, factors = normal(3, 5, 200, dtype=dtype), random(4).uniform(0.1, 1, ids.shape).astype(np.float32)
    out = array.output(padded(np.zeros((ids.size, 200), dtype), 1, 3))
    maps = aligned(array, ids, 5, block)
    arrays = map(array.input, (x, w, factors))
    pykv.fused_moe_gemm(out, *arrays, *maps, k, block, array.input(bias))
    compare(array.numpy(out), x, w, ids, factors.reshape(-1), bias.astype(np.float64))


@dtypes
@pytest.mark.parametrize("block", [8, 32, 64, 128])
def test_packed(array, dtype, block):
    made = [integers(72, 192, 64, seed=seed) for seed in range(4)]
    w, decoded = stack_packed([p for p, _ in made]), np.stack([d for _, d in made])
    x, ids = normal(0, 40, 192, dtype=dtype), chosen(40, 2, 4)
    out = array.output(np.zeros((80, 72), dtype))
    maps = aligned(array, ids, 4, block)
    pykv.fused_moe_gemm(out, array.input(x), array.input(w.data), None, *maps, 2, block, format=w.format)
    compare(array.numpy(out), x, decoded, ids)


@dtypes
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", [32, 128])
def test_blocks_of_all_sizes_give_the_same_bits(array, dtype, zeros, group):
    """So many rows that a GPU's blocks compute several tiles, and warps several rows of a weight."""
    tokens, n = (800, 1160) if array.device == "cuda" else (90, 72)
    made = [integers(n, 512, group, zeros=zeros, seed=seed) for seed in range(4)]
    w, decoded = stack_packed([p for p, _ in made]), np.stack([d for _, d in made])
    x, ids, bias = normal(0, tokens, 512, dtype=dtype), chosen(tokens, 2, 4), normal(3, 4, n, dtype=dtype)
    factors = random(4).uniform(0.1, 1, ids.shape).astype(np.float32)
    results = []
    for block in (8, 16, 64, 128):
        out = array.output(np.zeros((ids.size, n), dtype))
        arrays, maps = map(array.input, (x, w.data, factors)), aligned(array, ids, 4, block)
        pykv.fused_moe_gemm(out, *arrays, *maps, 2, block, array.input(bias), format=w.format)
        results.append(array.numpy(out))
        np.testing.assert_array_equal(results[-1].view("u2"), results[0].view("u2"))
    some = slice(-50, None)
    of_pairs = factors[some].reshape(-1)
    weights_are_rounded = not zeros and dtype != np.float16 and array.device == "cuda"
    compare(results[0][-100:], x[some], decoded, ids[some], of_pairs, bias.astype(np.float64), weights_are_rounded)


def test_experts_that_are_none(array):
    """Blocks of ids beyond the weights, and those behind the places that count, are left alone."""
    x, w = normal(0, 8, 64, dtype=np.float16), normal(1, 2, 32, 64, dtype=np.float16)
    places, blocks = np.arange(24, dtype=np.int32), np.array([2, 1, 0], np.int32)
    out = array.output(np.zeros((24, 32), np.float16))
    maps = [array.input(a) for a in (places, blocks, np.array([16], np.int32))]
    pykv.fused_moe_gemm(out, array.input(x), array.input(w), None, *maps, 3, 8)
    ids = np.repeat(np.array([-1, 1, -1]), 8).reshape(8, 3)
    compare(array.numpy(out), x, w, ids)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_wna16(array, bits, zeros, monkeypatch):
    if array.name == "interface":
        pytest.skip("the functions of vLLM ask arrays for their shapes")
    rng = random(7)
    codes, scales = rng.integers(0, 1 << bits, (4, 48, 128)), rng.uniform(0.01, 0.03, (4, 48, 2)).astype(np.float16)
    z = rng.integers(0, 1 << bits, scales.shape) if zeros else np.full(scales.shape, 1 << (bits - 1))
    group = np.arange(128) // 64
    decoded = (codes - z[..., group]) * scales.astype(np.float64)[..., group]

    def octets(values: np.ndarray, axis: int) -> np.ndarray:
        if bits == 8:
            return values.astype(np.uint8)
        low, high = (np.take(values, np.arange(i, values.shape[axis], 2), axis) for i in (0, 1))
        return (low | high << 4).astype(np.uint8)

    x, ids = normal(0, 9, 128, dtype=np.float16), chosen(9, 2, 4)
    weights = random(4).uniform(0.1, 1, ids.shape).astype(np.float32)
    out = array.output(np.full((9, 2, 48), 7, np.float16))
    qweight, maps = array.input(octets(codes, 2)), aligned(array, ids, 4, 16)
    qzeros = array.input(octets(z, 1)) if zeros else None
    given = (array.input(x), out, qweight, array.input(scales), qzeros, array.input(weights))
    read = []
    monkeypatch.setattr(_vllm_moe, "plain_scales", lambda *a: read.append(0) or plain_scales(*a))
    for _ in range(2):
        result = ops.moe_wna16_gemm(*given, *maps, 2, 16, 64, 64, bits)
    assert len(read) == 1  # packed once, and of scales nothing comes to the host after that
    assert result is out
    compare(array.numpy(out).reshape(18, 48), x, decoded, ids, weights.reshape(-1))


def test_what_would_be_other_weights_of_experts_is_refused() -> None:
    codes, scales = np.ones((2, 32, 32), np.uint8), np.ones((2, 32, 4), np.float16)
    zeros, x, out = np.ones((2, 16, 4), np.uint8), np.ones((3, 64), np.float16), np.zeros((3, 32), np.float16)
    maps = (np.arange(8, dtype=np.int32), np.zeros(1, np.int32), np.full(1, 8, np.int32))
    for given, bit, message in (
        ((codes.view(np.int8), scales, zeros), 4, "b_qweight: dtype must be uint8, got int8"),
        ((codes, scales[:1], zeros), 4, r"b_scales: must have shape \[2, 32, any\], got \[1, 32, 4\]"),
        ((codes, scales[..., :3], zeros[..., :3]), 4, "b_scales: its 3 groups must divide 64 columns of b_qweight"),
        ((codes, scales, zeros[:, :8]), 4, r"b_qzeros: must have shape \[2, 16, 4\], got \[2, 8, 4\]"),
        ((codes, scales, zeros), 5, "bit: must be 4 or 8, got 5"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            ops.moe_wna16_gemm(x, out, *given, None, *maps, 1, 8, 64, 64, bit)
    ids = np.zeros((3, 1), np.int32)
    with pytest.raises(ValueError, match=r"W: must have shape \[any, 33, any\], got \[2, 32, 36\]"):
        ops.ggml_moe_a8_vec(x, np.ones((2, 32, 36), np.uint8), ids, 1, 2, 33, 3)


@pytest.mark.parametrize("quant_type", [2, 14, 19])
def test_gguf(array, quant_type):
    if array.name in ("interface", "jax"):
        pytest.skip("the functions of vLLM allocate what they return, like what they are given")
    made = [gguf_blocks(quant_type, seed=seed) for seed in range(3)]
    decoded = np.stack([d for _, d in made])
    assert ops.ggml_moe_get_block_size(quant_type) == 8
    assert ops.ggml_moe_get_block_size(30) == 0
    blocks = array.input(np.stack([b for b, _ in made]))
    x, ids = normal(0, 9, 512, dtype=np.float16), chosen(9, 2, 3)
    given = array.input(x)
    out = ops.ggml_moe_a8(given, blocks, *aligned(array, ids, 3, 8), quant_type, 40, 2, 9)
    rounded = array.device == "cuda" and quant_type != 2
    compare(array.numpy(out), x, decoded, ids, rounded=rounded)
    out = ops.ggml_moe_a8_vec(given, blocks, array.input(ids), 2, quant_type, 40, 9)
    compare(array.numpy(out), x, decoded, ids, rounded=rounded)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"out": np.zeros((7, 32), np.float16)}, ValueError, "out: dimension 0 must equal rows of x times top_k = 6"),
        ({"w": np.zeros((2, 32, 63), np.float16)}, ValueError, "w: dimension 2 must equal columns of x = 64"),
        ({"block_size": 12}, ValueError, "block_size: must be a multiple of 8, got 12"),
        ({"top_k": 0}, ValueError, "top_k: must be positive, got 0"),
        ({"topk_weights": np.zeros(5, np.float32)}, ValueError, r"topk_weights: must have 6 elements, got shape \[5\]"),
        ({"experts_ids": np.zeros(2, np.int64)}, TypeError, "experts_ids: dtype must be int32"),
    ],
)
def test_what_does_not_fit_is_named(change, error, message):
    given = {
        "out": np.zeros((6, 32), np.float16),
        "x": np.zeros((3, 64), np.float16),
        "w": np.zeros((2, 32, 64), np.float16),
        "topk_weights": None,
        "sorted_token_ids": np.zeros(16, np.int32),
        "experts_ids": np.zeros(2, np.int32),
        "num_tokens_post_pad": np.zeros(1, np.int32),
        "top_k": 2,
        "block_size": 8,
    }
    with pytest.raises(error, match=message):
        pykv.fused_moe_gemm(**given | change)


def test_pairs_beyond_int64_are_refused():
    """So many tokens that their product with top_k wraps to a small number."""
    far, top_k = 1 << 40, 2**31 - 1
    tokens = 2**64 // top_k + 1
    x = pykv.from_pointer(far, (tokens, 16), "float16", "cpu", strides=(0, 1))
    out = pykv.from_pointer(far, (tokens * top_k - 2**64, 16), "float16", "cpu")
    w, ids = (pykv.from_pointer(far, *a, "cpu") for a in (((1, 16, 16), "float16"), ((8,), "int32")))
    one = np.zeros(1, np.int32)
    with pytest.raises(NotImplementedError, match=r"fused_moe_gemm: x: 2\^31 pairs and more are not supported"):
        pykv.fused_moe_gemm(out, x, w, None, ids, one, one, top_k, 8)
