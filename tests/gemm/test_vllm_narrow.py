"""``pykv.vllm``'s products of activations of 8 and 4 bits with weights of 4 bits, against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gemm import fp4
from gemm.weights import words
from libraries import Library

from pykv import vllm as ops

BF16, F16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(ml_dtypes.float8_e4m3fn)
K, N, GROUP = 256, 48, 64


@pytest.fixture(autouse=True)
def _allocates(array: Library) -> None:
    if array.name in ("interface", "jax"):
        pytest.skip("the functions of vLLM allocate what they return, like what they are given")


def close(array: Library, out: Any, a: np.ndarray, decoded: np.ndarray, factor: Any = 1.0, lost: float = 1e-5) -> None:
    """Of rows ``a`` and a weight ``[k, n]``, both in float64."""
    out = array.numpy(out)
    exact, size = a @ decoded * factor, np.abs(a) @ np.abs(decoded) * np.abs(factor)
    half_ulp = float(ml_dtypes.finfo(out.dtype).eps) / 2
    assert (np.abs(out.astype(np.float64) - exact) <= half_ulp * 1.01 * np.abs(exact) + lost * size).all()


def lost_by_fp8(array: Library) -> float:
    """Tensor cores add products of fp8 with fewer bits than fp32 has."""
    return 2e-4 if array.device == "cuda" else 1e-5


def int4_weight(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words ``[k / 8, n]``, scales of groups, and what a code times its scale is in fp8."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(-8, 8, (K, N))
    fields = (codes & 15).astype(np.uint32).reshape(K // 8, 8, N) << (4 * np.arange(8, dtype=np.uint32))[:, None]
    scales = rng.uniform(0.01, 56, (K // GROUP, N)).astype(E4M3)  # 8 times the largest is the largest of fp8
    products = (codes * np.repeat(scales.astype(np.float32), GROUP, axis=0)).astype(np.float32).astype(E4M3)
    return fields.sum(1, dtype=np.uint32).view(np.int32), scales, products.astype(np.float64)


@pytest.mark.parametrize("out_type", [None, "float16", "bfloat16"], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_w4a8(array: Library, rows: int, out_type: Any) -> None:
    w, scales, decoded = int4_weight()
    b = ops.cutlass_encode_and_reorder_int4b(array.input(np.asfortranarray(w)))
    packed = ops.cutlass_pack_scale_fp8(array.input(np.asfortranarray(scales)))
    np.testing.assert_array_equal(array.numpy(b), w)
    rng = np.random.default_rng(1)
    a = rng.standard_normal((rows, K)).astype(E4M3)
    of_channels, of_tokens = (rng.uniform(0.01, 0.02, (n, 1)).astype(np.float32) for n in (N, rows))
    given = (array.input(a), b, packed, GROUP, array.input(of_channels), array.input(of_tokens))
    out = ops.cutlass_w4a8_mm(*given, out_type)
    assert (tuple(out.shape), array.numpy(out).dtype) == ((rows, N), F16 if out_type == "float16" else BF16)
    factor = of_tokens.astype(np.float64) * of_channels.reshape(-1)
    close(array, out, a.astype(np.float64), decoded, factor, lost_by_fp8(array))


def test_w4a8_takes_dtypes_of_torch(array: Library) -> None:
    if array.name != "torch":
        pytest.skip("torch alone")
    import torch

    w, scales, _ = int4_weight()
    ones = array.input(np.ones(N, np.float32))
    given = (array.input(np.zeros((3, K), E4M3)), array.input(w), array.input(scales), GROUP, ones, ones[:3])
    assert ops.cutlass_w4a8_mm(*given, torch.float16).dtype == torch.float16


def test_w4a8_of_experts(array: Library) -> None:
    """Two of them have no rows, and behind all are rows of none."""
    sizes, experts = [3, 0, 5, 0], 4
    weights = [int4_weight(e) for e in range(experts)]
    b, strides = ops.cutlass_encode_and_reorder_int4b_grouped(array.input(np.stack([w.T for w, _, _ in weights])))
    assert array.numpy(strides).dtype == np.int32
    packed = ops.cutlass_pack_scale_fp8(array.input(np.stack([s for _, s, _ in weights])))
    rng = np.random.default_rng(2)
    a = rng.standard_normal((10, K)).astype(E4M3)
    of_tokens, of_channels = (rng.uniform(0.01, 0.02, s).astype(np.float32) for s in ((10, 1), (experts, N, 1)))
    begins = np.cumsum([0, *sizes[:-1]])
    scales = (array.input(of_tokens), array.input(of_channels))
    for columns in ((1, 0), (0, 1)):  # (n, rows, k) and (rows, n, k)
        problems = np.full((experts, 3), K, np.int32)
        problems[:, columns[0]], problems[:, columns[1]] = sizes, N
        out = array.output(np.full((10, N), 7, BF16))
        given = (array.input(begins), array.input(problems), strides, strides, strides, strides)
        ops.cutlass_w4a8_moe_mm(out, array.input(a), b, *scales, packed, GROUP, *given)
        made = array.numpy(out)
        assert (made[8:] == 7).all()
        for e, (begin, count) in enumerate(zip(begins, sizes, strict=True)):
            rows = slice(begin, begin + count)
            factor = of_tokens[rows].astype(np.float64) * of_channels[e].reshape(-1)
            close(array, out[rows], a[rows].astype(np.float64), weights[e][2], factor, lost_by_fp8(array))


def test_w4a8_wrong_arguments(array: Library) -> None:
    w, scales, _ = int4_weight()
    words, octets = array.input(w), array.input(scales)
    a, ones, of_channels = (array.input(x) for x in (np.zeros((1, K), E4M3), *(np.ones(n, np.float32) for n in (1, N))))
    with pytest.raises(ValueError, match=r"b_group_scales: must have shape .* = \[256 / 128, 48\], got \[4, 48\]"):
        ops.cutlass_w4a8_mm(a, words, octets, 128, of_channels, ones)
    with pytest.raises(ValueError, match=r"b_group_scales: must have shape .* got \[4, 48\]"):
        ops.cutlass_w4a8_mm(a, words, octets, 0, of_channels, ones)
    with pytest.raises(TypeError, match="b_group_scales: dtype must be float8_e4m3fn, uint8 or int8, got float32"):
        ops.cutlass_w4a8_mm(a, words, array.input(scales.astype(np.float32)), GROUP, of_channels, ones)
    with pytest.raises(TypeError, match="b_channel_scales: must be an array, got NoneType"):
        ops.cutlass_w4a8_mm(a, words, octets, GROUP, None, ones)
    with pytest.raises(ValueError, match="b_group_scales: must be of 2 experts"):
        ops.cutlass_w4a8_moe_mm(
            array.output(np.zeros((1, N), BF16)), a, array.input(np.stack([w.T, w.T])), ones, ones,
            array.input(scales[None]), GROUP, ones, ones, ones, ones, ones, ones,
        )  # fmt: skip


SIZES, BEGINS, SCALES_BEGIN = [3, 0, 130, 1], [0, 3, 3, 133], [0, 128, 128, 384]
ROWS, EXPERTS, WIDTH = 137, 4, 96  # the last rows are of no expert


def fp4_case(kind: str, dtype: np.dtype) -> tuple[dict[str, Any], np.ndarray, list[np.ndarray]]:
    """Arguments, rows in float64 and the weights in float64."""
    rng = np.random.default_rng(3)
    block = 16 if kind == "nvfp4" else 32
    codes, weights = words(rng, ROWS, WIDTH // 8).view(np.uint8), words(rng, EXPERTS * N, WIDTH // 8).view(np.uint8)
    if kind == "nvfp4":
        of_rows, of_weights = (
            rng.uniform(0.25, 4, (n, WIDTH // block)).astype(E4M3).view(np.uint8) for n in (ROWS, EXPERTS * N)
        )
        value = lambda s: s.view(E4M3).astype(np.float64)  # noqa: E731
    else:
        of_rows, of_weights = (
            rng.integers(122, 130, (n, WIDTH // block)).astype(np.uint8) for n in (ROWS, EXPERTS * N)
        )
        value = lambda s: 2.0 ** (s.astype(np.float64) - 127)  # noqa: E731

    def decode(pairs: np.ndarray, scales: np.ndarray) -> np.ndarray:
        numbers = fp4.NUMBERS[np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(pairs), -1)]
        return numbers * np.repeat(value(scales), block, axis=1)

    placed = np.zeros((512, WIDTH // block), np.uint8)
    for begin, size, at in zip(BEGINS, SIZES, SCALES_BEGIN, strict=True):
        placed[at : at + size] = of_rows[begin : begin + size]
    columns = -(-WIDTH // block // 4) * 4
    tiles = fp4.tiled(placed, 255).reshape(512, columns)
    each = np.split(of_weights, EXPERTS)
    weight_tiles = np.stack([fp4.tiled(s, 255).reshape(128, columns) for s in each])
    arguments = {
        "out_tensors": np.full((ROWS, N), 7, dtype),
        "a_tensors": codes,
        "b_tensors": weights.reshape(EXPERTS, N, -1),
        "a_scales": tiles.view(E4M3) if kind == "nvfp4" else tiles,
        "b_scales": weight_tiles.view(E4M3) if kind == "nvfp4" else weight_tiles,
        "problem_sizes": np.array([(m, N, WIDTH) for m in SIZES], np.int32),
        "expert_offsets": np.array(BEGINS, np.int32),
        "sf_offsets": np.array(SCALES_BEGIN, np.int32),
    }
    if kind == "nvfp4":
        arguments["alphas"] = np.array([0.5, 9, 0.03, 2], np.float32)
    decoded = [decode(w, s).T for w, s in zip(arguments["b_tensors"], each, strict=True)]
    return arguments, decode(codes, of_rows), decoded


def on(array: Library, arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: (array.output if k == "out_tensors" else array.input)(x) for k, x in arguments.items()}


def product_of(kind: str) -> Any:
    return ops.cutlass_fp4_moe_mm if kind == "nvfp4" else ops.cutlass_mxfp4_moe_mm


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_fp4_of_experts(array: Library, kind: str, dtype: np.dtype) -> None:
    arguments, rows, weights = fp4_case(kind, dtype)
    given = on(array, arguments)
    product_of(kind)(**given)
    out, alphas = given["out_tensors"], np.asarray(arguments.get("alphas", np.ones(EXPERTS))).astype(np.float64)
    assert (array.numpy(out)[sum(SIZES) :] == 7).all()
    for e, (begin, size) in enumerate(zip(BEGINS, SIZES, strict=True)):
        some = slice(begin, begin + size)
        close(array, out[some], rows[some], weights[e], alphas[e])


def test_few_rows_of_fp4_and_none(array: Library) -> None:
    arguments, _, _ = fp4_case("nvfp4", BF16)
    whole = on(array, arguments)
    ops.cutlass_fp4_moe_mm(**whole)
    sizes = np.array([(m, N, WIDTH) for m in (3, 0, 4, 0)], np.int32)
    few = on(array, {n: x[:7] if n in ("a_tensors", "out_tensors") else x for n, x in arguments.items()} | {
        "out_tensors": np.full((7, N), 7, BF16), "problem_sizes": sizes
    })  # fmt: skip
    ops.cutlass_fp4_moe_mm(**few)
    np.testing.assert_array_equal(array.numpy(few["out_tensors"]), array.numpy(whole["out_tensors"])[:7])
    none = on(array, {n: x[:0] if n in ("a_tensors", "out_tensors") else x for n, x in arguments.items()})
    ops.cutlass_fp4_moe_mm(**none)


def test_offsets_that_lead_outside_are_reported(array: Library) -> None:
    arguments, _, _ = fp4_case("nvfp4", BF16)
    arguments["sf_offsets"] = np.array([0, 128, 128, 1 << 20], np.int32)
    with array.reports(r"shuffle_rows: dst2src_map: .* is out of range"):
        ops.cutlass_fp4_moe_mm(**on(array, arguments))
