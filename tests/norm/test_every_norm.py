"""What holds for every norm alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from libraries import Library
from norm.inputs import EPSILON, dtypes
from rows import name_of, padded, random

import pykv

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


@dataclass
class Problem:
    """Rows of input, residual and gate; weights; and arrays of one library made of them."""

    array: Library
    rows: list[np.ndarray]
    weights: list[np.ndarray]
    padding: int = 0
    offset: int = 0

    def made(self, k: int) -> Any:
        return self.array.output(padded(self.rows[k], self.padding), offset=self.offset)

    def weight(self, k: int = 0) -> Any:
        return self.array.input(self.weights[k], offset=self.offset)

    def empty(self, dtype: np.dtype | None = None) -> Any:
        memory = padded(np.zeros(self.rows[0].shape, E4M3 if dtype else self.rows[0].dtype), self.padding)
        return self.array.output(memory.view(dtype or memory.dtype), offset=self.offset)

    def scales(self, groups: int) -> Any:
        return self.array.output(np.zeros((int(np.prod(self.rows[0].shape[:-1])), groups), np.float32))


def rms_norm(p: Problem) -> list[Any]:
    out = p.empty()
    pykv.rms_norm(out, p.made(0), p.weight(), EPSILON)
    return [out]


def fused_add_rms_norm(p: Problem) -> list[Any]:
    x, residual = p.made(0), p.made(1)
    pykv.fused_add_rms_norm(x, residual, p.weight(), EPSILON)
    return [x, residual]


def gemma_rms_norm(p: Problem) -> list[Any]:
    out = p.empty()
    pykv.gemma_rms_norm(out, p.made(0), p.weight(), EPSILON)
    return [out]


def gemma_fused_add_rms_norm(p: Problem) -> list[Any]:
    x, residual = p.made(0), p.made(1)
    pykv.gemma_fused_add_rms_norm(x, residual, p.weight(), EPSILON)
    return [x, residual]


def layer_norm(p: Problem) -> list[Any]:
    out, residual = p.empty(), p.made(1)
    pykv.layer_norm(out, p.made(0), p.weight(), p.weight(1), EPSILON, residual)
    return [out, residual]


def rms_norm_gated(p: Problem) -> list[Any]:
    out, first = p.empty(), p.empty()
    pykv.rms_norm_gated(out, p.made(0), p.weight(), p.made(2), EPSILON)
    pykv.rms_norm_gated(first, p.made(0), p.weight(), p.made(2), EPSILON, 4, True, "sigmoid")
    return [out, first]


def rms_norm_static_fp8_quant(p: Problem) -> list[Any]:
    out = p.empty(E4M3)
    pykv.rms_norm_static_fp8_quant(out, p.made(0), p.weight(), 0.02, EPSILON)
    return [out]


def fused_add_rms_norm_static_fp8_quant(p: Problem) -> list[Any]:
    out, residual = p.empty(E4M3), p.made(1)
    pykv.fused_add_rms_norm_static_fp8_quant(out, p.made(0), residual, p.weight(), 0.02, EPSILON)
    return [out, residual]


def rms_norm_dynamic_per_token_quant(p: Problem) -> list[Any]:
    out, scales, residual = p.empty(np.dtype(np.int8)), p.scales(1), p.made(1)
    pykv.rms_norm_dynamic_per_token_quant(out, p.made(0), p.weight(), scales, EPSILON, None, residual)
    return [out, scales, residual]


def rms_norm_per_block_quant(p: Problem) -> list[Any]:
    out, scales, residual = p.empty(E4M3), p.scales(p.rows[0].shape[-1] // 4), p.made(1)
    pykv.rms_norm_per_block_quant(out, p.made(0), p.weight(), scales, EPSILON, None, residual, 4)
    return [out, scales, residual]


def groups_of_64(p: Problem) -> list[Any]:
    out, scales = p.empty(E4M3), p.scales(p.rows[0].shape[-1] // 64)
    pykv.rms_norm_per_block_quant(out, p.made(0), p.weight(), scales, EPSILON, group_size=64)
    return [out, scales]


OPS: list[Callable[[Problem], list[Any]]] = [
    rms_norm,
    fused_add_rms_norm,
    gemma_rms_norm,
    gemma_fused_add_rms_norm,
    layer_norm,
    rms_norm_gated,
    rms_norm_static_fp8_quant,
    fused_add_rms_norm_static_fp8_quant,
    rms_norm_dynamic_per_token_quant,
    rms_norm_per_block_quant,
]
every = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def results(op: Callable[[Problem], list[Any]], array: Library, rows, weights, **options: int) -> list[np.ndarray]:
    made = op(Problem(array, rows, weights, **options))
    return [array.numpy(a) for a in made]


def problem(shape: tuple[int, ...], dtype: np.dtype) -> tuple[list[np.ndarray], list[np.ndarray]]:
    return [random(shape, dtype, k) for k in range(3)], [random(shape[-1:], dtype, k) for k in (3, 4)]


def assert_same_bits(a: list[np.ndarray], b: list[np.ndarray]) -> None:
    for one, other in zip(a, b, strict=True):
        assert np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()


@every
@dtypes
@pytest.mark.parametrize("width", [64, 128, 1000, 4096, 8196, 12288, 17000])
def test_a_row_depends_neither_on_others_nor_on_where_it_lies(array, op, dtype, width):
    rows, weights = problem((133, width), dtype)
    together = results(op, array, rows, weights)
    for part in (slice(0, 1), slice(7, 9), slice(40, 133)):
        alone = results(op, array, [x[part] for x in rows], weights)
        assert_same_bits(alone, [x[part] for x in together])
    assert_same_bits(results(op, array, rows, weights, padding=3, offset=1), together)


@pytest.mark.of_cuda_kernels
@pytest.mark.parametrize("op", [*OPS, groups_of_64], ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    ("rows", "width"),
    [(12001, 64), (1501, 4096), (1501, 8000), (1501, 8192)]
    # whole packs for each of 64, 128, 256 or 512 threads
    + [(601, width) for width in (2048, 2560, 3072, 3584, 5120, 6144, 7168, 12288)],
)
def test_one_of_more_rows_than_a_gpu_holds(array, op, rows, width):
    """Where blocks of threads take several rows, one after the other."""
    inputs, weights = problem((rows, width), np.dtype(ml_dtypes.bfloat16))
    together = results(op, array, inputs, weights)
    for part in (slice(0, 50), slice(rows // 2, rows // 2 + 50), slice(rows - 50, rows)):
        alone = results(op, array, [x[part] for x in inputs], weights)
        assert_same_bits(alone, [x[part] for x in together])


@every
@dtypes
@pytest.mark.parametrize("width", [24, 1028, 20008])
def test_nan_stays_in_its_row(array, op, dtype, width):
    rows, weights = problem((5, width), dtype)
    expected = results(op, array, rows, weights)
    rows[0][2, width // 2] = np.nan
    got = results(op, array, rows, weights)
    others = [0, 1, 3, 4]
    assert_same_bits([x[others] for x in got], [x[others] for x in expected])
    assert got[0][2].tobytes() != expected[0][2].tobytes()


@every
@dtypes
def test_rows_of_zeros(array, op, dtype):
    rows, weights = problem((3, 96), dtype)
    zeros = [np.zeros_like(x) for x in rows]
    normed = results(op, array, zeros, weights)[0]
    normed = (normed.view(E4M3) if normed.dtype == np.uint8 else normed).astype(np.float32)  # CuPy has bytes
    wanted = np.broadcast_to(weights[1].astype(np.float32), normed.shape) if op is layer_norm else 0
    np.testing.assert_array_equal(normed, wanted)


@every
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 8)], ids=name_of)
def test_no_rows(array, op, shape):
    rows, weights = problem(shape, np.dtype(np.float32))
    assert results(op, array, rows, weights)[0].shape == shape


@every
def test_many_leading_dimensions(array, op):
    rows, weights = problem((2, 3, 1, 2, 1, 40), np.dtype(np.float16))
    flat = results(op, array, [x.reshape(-1, 40) for x in rows], weights)
    assert_same_bits(results(op, array, rows, weights), flat)
