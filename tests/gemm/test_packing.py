"""What the functions that pack weights refuse: they take arrays from files, and would read anything as codes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pykv
from pykv.gemm import (
    PackedWeight,
    interleave_halves,
    pack_awq,
    pack_compressed_tensors,
    pack_fp8,
    pack_gguf,
    pack_gptq,
    pack_integers,
    pack_mxfp4,
    pack_nf4,
    pack_nvfp4,
    stack_packed,
)
from pykv.packed_gguf import GGUF_TYPES

N, K = 16, 64

CODES, WORDS, OCTETS = np.ones((N, K), np.uint8), np.ones((K, N // 8), np.int32), np.ones((N, K // 2), np.uint8)
GIVEN: dict[Callable[..., Any], dict[str, Any]] = {
    pack_integers: {"codes": CODES, "scales": np.ones((N, 2), np.float16), "group_size": 32},
    pack_awq: {"qweight": WORDS, "qzeros": WORDS[:2], "scales": np.ones((2, N), np.float16)},
    pack_gptq: {"qweight": WORDS.reshape(8, N), "qzeros": WORDS[:2], "scales": np.ones((2, N), np.float16)},
    pack_fp8: {"weight": CODES, "scale": np.ones(N, np.float32)},
    pack_nvfp4: {"weight": OCTETS, "scales": np.ones((N, K // 16), np.uint8)},
    pack_mxfp4: {"weight": OCTETS, "scales": np.ones((N, K // 32), np.uint8)},
    pack_nf4: {"weight": OCTETS, "absmax": np.ones(N * K // 64, np.float32), "shape": (N, K)},
    pack_gguf: {"weight": np.ones((N, 36), np.uint8), "quant_type": 2},
}  # fmt: skip


@pytest.mark.parametrize("pack", GIVEN)
def test_what_is_given_below_would_do(pack: Callable[..., PackedWeight]) -> None:
    assert pack(**GIVEN[pack]).shape == (N, K)


@pytest.mark.parametrize(
    ("pack", "name", "value", "error", "message"),
    [
        (pack_integers, "codes", CODES.tolist(), TypeError, "must be an array, got list"),
        (pack_integers, "codes", CODES / 2, TypeError, "dtype must be uint8, .* or int64, got float64"),
        (pack_integers, "codes", 16 * CODES, ValueError, "must be 0 to 15, got 16 to 16"),
        (pack_integers, "codes", CODES.astype(int) - 2, ValueError, "must be 0 to 15, got -1 to -1"),
        (pack_integers, "codes", CODES[0], ValueError, r"must have shape \[any, any\], got \[64\]"),
        (pack_integers, "scales", np.ones((N, 1), np.float16), ValueError, r"must have shape \[16, 2\], got \[16, 1\]"),
        (pack_integers, "scales", [1.0], TypeError, "must be an array, got list"),
        (pack_integers, "zeros", np.ones((N, 1), int), ValueError, r"must have shape \[16, 2\], got \[16, 1\]"),
        (pack_integers, "zeros", np.full((N, 2), np.nan), TypeError, "dtype must be uint8, .*, got float64"),
        (pack_integers, "group_size", 0, ValueError, "must be positive, or -1, got 0"),
        (pack_integers, "group_size", 32.0, TypeError, "must be an integer, got float"),
        (pack_integers, "bits", 4.0, TypeError, "must be an integer, got float"),
        (pack_awq, "qweight", WORDS.astype(np.int64), TypeError, "dtype must be int32 or uint32, got int64"),
        (pack_awq, "qzeros", WORDS[:1], ValueError, r"must have shape \[2, 2\], got \[1, 2\]"),
        (pack_awq, "scales", np.ones((2, 24), np.float16), ValueError, r"must have shape \[any, 16\], got \[2, 24\]"),
        (
            pack_awq,
            "scales",
            np.ones((3, N), np.float16),
            ValueError,
            "as there are equal groups of the 64 rows, got 3",
        ),
        (
            pack_awq,
            "scales",
            np.ones((0, N), np.float16),
            ValueError,
            "as there are equal groups of the 64 rows, got 0",
        ),
        (pack_gptq, "qweight", WORDS[:, 0], ValueError, r"must have shape \[any, any\], got \[64\]"),
        (pack_gptq, "qzeros", WORDS[:2].astype(np.int64), TypeError, "dtype must be int32 or uint32, got int64"),
        (
            pack_gptq,
            "scales",
            np.ones((5, N), np.float16),
            ValueError,
            "as there are equal groups of the 64 rows, got 5",
        ),
        (pack_gptq, "g_idx", np.arange(K - 1) % 2, ValueError, "must have a group for each of the 64 rows, got 63"),
        (pack_gptq, "g_idx", np.arange(K) % 3, ValueError, "must be 0 to 1, got 0 to 2"),
        (pack_gptq, "g_idx", np.arange(K) % 2 - 1, ValueError, "must be 0 to 1, got -1 to 0"),
        (pack_gptq, "g_idx", np.arange(K) / K, TypeError, "dtype must be uint8, .*, got float64"),
        (pack_fp8, "weight", CODES.astype(np.float32), TypeError, "dtype must be float8_e4m3fn or uint8, got float32"),
        (pack_fp8, "weight", CODES.view(ml_dtypes.float8_e5m2), TypeError, "uint8, got float8_e5m2"),
        (pack_fp8, "scale", np.ones(N + 1, np.float32), ValueError, r"must have one element or 16, got shape \[17\]"),
        (pack_fp8, "scale", None, TypeError, "must be a number or an array, got NoneType"),
        (pack_fp8, "scale", np.ones(N, int), TypeError, "dtype must be float32, float16 or bfloat16, got int64"),
        (pack_fp8, "block", (0, 128), ValueError, r"must be positive, got \(0, 128\)"),
        (pack_fp8, "block", 128, ValueError, "must be two integers, got 128"),
        (pack_nvfp4, "weight", OCTETS.view(np.int32), TypeError, "dtype must be uint8, got int32"),
        (pack_nvfp4, "scales", np.ones((N, 1), np.float32), TypeError, "dtype must be .* uint8, got float32"),
        (pack_nvfp4, "global_scale", np.ones(2, np.float32), ValueError, r"must have one element, got shape \[2\]"),
        (pack_mxfp4, "scales", np.ones((N, 3), np.uint8), ValueError, r"must have shape \[16, 2\], got \[16, 3\]"),
        (pack_nf4, "weight", OCTETS[:8], ValueError, r"must have 512 elements, got shape \[8, 32\]"),
        (pack_nf4, "absmax", np.ones(16, np.uint8), TypeError, "dtype must be float32, got uint8"),
        (pack_nf4, "absmax", np.ones(32, np.float32), ValueError, r"must have 16 elements, got shape \[32\]"),
        (pack_nf4, "shape", (N,), ValueError, r"must be two integers, got \(16,\)"),
        (pack_nf4, "block_size", 0, ValueError, "must be positive, got 0"),
        (pack_gguf, "weight", np.ones((N, 36), np.int8), TypeError, "dtype must be uint8, got int8"),
        (pack_gguf, "quant_type", "2", TypeError, "must be an integer, got str"),
    ],
)
def test_what_would_be_read_as_something_else_is_refused(
    pack: Callable[..., object], name: str, value: object, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^{name}: .*{message}"):
        pack(**GIVEN[pack] | {name: value})


def test_what_may_be_transposed_is_named_beside_the_other() -> None:
    wrong = GIVEN[pack_awq] | {"qweight": WORDS.T.copy()}
    with pytest.raises(
        ValueError, match=r"scales: must have shape \[any, 512\], got \[2, 16\] beside qweight \[2, 64\]"
    ):
        pack_awq(**wrong)
    with pytest.raises(ValueError, match="shape: must be two integers, got None"):
        pack_compressed_tensors(np.ones((N, 8), np.int32), np.ones((N, 1), np.float16), shape=None)  # type: ignore[arg-type]


def test_groups_that_rows_name_need_not_be_equal() -> None:
    uneven = GIVEN[pack_gptq] | {"scales": np.ones((5, N), np.float16), "qzeros": None, "g_idx": np.arange(K) // 14}
    assert pack_gptq(**uneven).shape == (N, K)


@pytest.mark.parametrize("rows", [0, N])
def test_weights_without_columns(rows: int) -> None:
    empty = np.empty((rows, 0), np.uint8)
    assert pack_integers(empty, np.empty((rows, 0), np.float16)).shape == (rows, 0)
    assert pack_fp8(empty, 1.0).shape == (rows, 0)
    assert pack_nvfp4(empty, empty).shape == (rows, 0)
    for quant_type in GGUF_TYPES:
        assert pack_gguf(empty, quant_type).shape == (rows, 0)
    words, none = np.empty((0, rows), np.int32), np.empty((0, rows), np.float16)
    assert pack_gptq(words, None, none).shape == (rows, 0)
    assert pack_awq(words[:, : rows // 8], words[:, : rows // 8], none).shape == (rows, 0)


@pytest.mark.parametrize("pack", [pack_integers, pack_awq, pack_gptq])
def test_scales_of_bfloat16_that_float16_holds_are_packed_as_such(pack: Callable[..., PackedWeight]) -> None:
    given = GIVEN[pack]
    halves = np.ldexp(1.0 + np.arange(2 * N) % 128 / 128, -17 + np.arange(2 * N)).astype(np.float16)
    halves = np.where(np.isfinite(halves), halves, np.float16(0)).reshape(given["scales"].shape)
    numbers = halves.astype(ml_dtypes.bfloat16)
    assert (numbers.astype(np.float32) == halves).all()
    w = pack(**given | {"scales": numbers})
    assert w.format.split(".")[1] == "f16"
    assert (w.data == pack(**given | {"scales": halves}).data).all()
    for other in (2.0**-18 * 1.0078125, 2.0**16, np.nan):  # one bit too small, too large, no number
        numbers.flat[1] = other
        assert pack(**given | {"scales": numbers}).format.split(".")[1] == "bf16"


def test_experts_whose_scales_float16_holds_stand_beside_others() -> None:
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 16, (3, N, K), np.uint8), np.ones((3, N, 2), ml_dtypes.bfloat16)
    scales[1, 3, 1] = 2.0**-30
    weights = [pack_integers(q, s, group_size=32) for q, s in zip(codes, scales, strict=True)]
    assert [w.format.split(".")[1] for w in weights] == ["f16", "bf16", "f16"]
    stack = stack_packed(weights)
    assert stack.format == weights[1].format
    x = rng.standard_normal((2, K)).astype(np.float32).astype(ml_dtypes.bfloat16)
    for e in range(3):
        assert PackedWeight.of(stack.data[e]).format == stack.format
        outs = np.empty((2, 2, N), x.dtype)
        pykv.packed_gemm(outs[0], x, stack.data[e], stack.format)
        pykv.packed_gemm(outs[1], x, weights[e].data, weights[e].format)
        assert (outs[0] == outs[1]).all()
    narrow = pack_integers(codes[0], np.full((N, 2), 1.0009765625, np.float16), group_size=32)
    of_64 = pack_integers(codes[0], np.ones((N, 1), np.float16), group_size=64)
    for others, message in (
        ([narrow, weights[1]], "weights: must be of one format"),
        ([weights[0], of_64], f"of one format, got .'{weights[0].format}', '{of_64.format}'"),
        ([stack, of_64], r"weights: must have shape \[any\], got \[3, "),
    ):
        with pytest.raises(ValueError, match=message):
            stack_packed(others)


def test_memory_that_another_library_owns_is_packed_as_an_array_is() -> None:
    weight = GIVEN[pack_gguf]["weight"]
    borrowed = pykv.from_pointer(weight.ctypes.data, weight.shape, "uint8", device="cpu", owner=weight)
    assert (pack_gguf(borrowed, 2).data == pack_gguf(weight, 2).data).all()


def test_what_has_no_memory_is_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="weight: must be on a device, got an array of torch on meta"):
        pack_gguf(torch.empty((N, 36), dtype=torch.uint8, device="meta"), 2)


def test_a_stack_can_be_saved(tmp_path: Path) -> None:
    w = pack_gguf(**GIVEN[pack_gguf])
    stack = stack_packed([w, w])
    np.save(tmp_path / "w.npy", stack.data)
    again = PackedWeight.of(np.load(tmp_path / "w.npy", mmap_mode="r"))
    assert (again.format, again.data.shape) == (w.format, stack.data.shape)
    other = pack_fp8(**GIVEN[pack_fp8]).data
    mixed = np.stack([w.data, np.resize(other, w.data.shape)])
    with pytest.raises(ValueError, match="data: weights of a stack must have one format"):
        PackedWeight.of(mixed)
    with pytest.raises(ValueError, match="data: does not begin with the header"):
        PackedWeight.of(stack.data[:0])


def test_stacks_and_halves_want_packed_weights() -> None:
    w = pack_gguf(**GIVEN[pack_gguf])
    with pytest.raises(TypeError, match="weights: must be a sequence of PackedWeight"):
        stack_packed([w.data])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="weight: must be a PackedWeight, got ndarray"):
        interleave_halves(w.data)
    with pytest.raises(ValueError, match=r"weight.data: must have shape \[any\], got \[2, "):
        interleave_halves(stack_packed([w, w]))
    for data, error in (
        (w.data.view(np.int8), TypeError),
        (w.data[None, None], ValueError),
        (w.data[:200], ValueError),
        (w.data[:0], ValueError),
        (w.data[0], ValueError),
        ([1], TypeError),
    ):
        with pytest.raises(error, match="data: "):
            PackedWeight.of(data)
