"""What fused operations give is to the bit what their parts give one after another."""

from __future__ import annotations

import numpy as np
import pytest
from quantization.inputs import F, assert_same_bits
from quantization.reference import E4M3, INT8
from rows import FLOATS, name_of, random

import pykv

DTYPES = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
KINDS = pytest.mark.parametrize("kind", [E4M3, INT8], ids=name_of)
EPSILON = 1e-6
LEAST = {E4M3: 1 / 512, INT8: 127 * 2.0**-23}  # the largest magnitude counts as that at least


class Chain:
    """Rows, and what the parts make of them."""

    def __init__(self, array, shape, dtype, *, with_residual=False):
        self.array, self.shape = array, shape
        self.x = random(shape, dtype) * dtype.type(3)
        self.residual = random(shape, dtype, 2) if with_residual else None
        self.weight = random((shape[-1],), dtype, 1)
        self.weight[1::13], self.weight[2::17] = -0.0, 0.0  # whose products have signs, too

    def codes(self, kind, shape=None):
        return self.array.output(np.zeros(shape or self.shape, kind))

    def numbers(self, *shape):
        return self.array.output(np.zeros(shape, F))

    def given(self):
        return None if self.residual is None else self.array.output(self.residual)

    def normed(self):
        weight = self.array.input(self.weight)
        if self.residual is None:
            out = self.array.output(np.zeros(self.shape, self.x.dtype))
            pykv.rms_norm(out, self.array.input(self.x), weight, EPSILON)
            return out, None
        out, residual = self.array.output(self.x), self.array.output(self.residual)
        pykv.fused_add_rms_norm(out, residual, weight, EPSILON)
        return out, residual

    def activated(self):
        out = self.array.output(np.zeros((self.shape[0], self.shape[1] // 2), self.x.dtype))
        pykv.silu_and_mul(out, self.array.input(self.x))
        return out

    def assert_equal(self, *pairs):
        for actual, wanted in pairs:
            if actual is not None:
                assert_same_bits(self.array.numpy(actual), self.array.numpy(wanted))


SHAPES = pytest.mark.parametrize(
    "shape", [(1, 8), (5, 100), (7, 128), (33, 1024), (9, 4096), (5, 8192), (3, 16384), (3, 20000)], ids=name_of
)
RESIDUALS = pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "with residual"])


@DTYPES
@SHAPES
@RESIDUALS
def test_norm_by_a_scale_that_is_known(array, dtype, shape, with_residual):
    c = Chain(array, shape, dtype, with_residual=with_residual)
    fused, chained, residual = c.codes(E4M3), c.codes(E4M3), c.given()
    if with_residual:
        pykv.fused_add_rms_norm_static_fp8_quant(
            fused, array.input(c.x), residual, array.input(c.weight), 0.013, EPSILON
        )
    else:
        pykv.rms_norm_static_fp8_quant(fused, array.input(c.x), array.input(c.weight), 0.013, EPSILON)
    y, total = c.normed()
    pykv.static_scaled_fp8_quant(chained, y, 0.013)
    c.assert_equal((residual, total), (fused, chained))


@DTYPES
@KINDS
@SHAPES
@RESIDUALS
def test_norm_by_the_scale_of_a_row(array, dtype, kind, shape, with_residual):
    c = Chain(array, shape, dtype, with_residual=with_residual)
    for bound in (None, 1.5) if kind == E4M3 else (None,):
        fused, chained, residual = c.codes(kind), c.codes(kind), c.given()
        scale, wanted = c.numbers(shape[0], 1), c.numbers(shape[0], 1)
        pykv.rms_norm_dynamic_per_token_quant(
            fused, array.input(c.x), array.input(c.weight), scale, EPSILON, bound, residual
        )
        y, total = c.normed()
        if kind == E4M3:
            pykv.dynamic_per_token_scaled_fp8_quant(chained, y, wanted, bound)
        else:
            pykv.per_token_group_quant_int8(y, chained, wanted, shape[-1], LEAST[INT8])
        c.assert_equal((residual, total), (scale, wanted), (fused, chained))


@DTYPES
@KINDS
@RESIDUALS
@pytest.mark.parametrize(
    ("shape", "size"),
    [((5, 100), 20), ((7, 128), 128), ((33, 1024), 64), ((9, 4096), 128), ((600, 4096), 128)]
    + [((5, 8192), 256), ((3, 16384), 128), ((3, 20480), 2048), ((3, 768), 96)],
    ids=str,
)
def test_norm_by_the_scales_of_groups(array, dtype, kind, shape, size, with_residual):
    c = Chain(array, shape, dtype, with_residual=with_residual)
    groups = shape[-1] // size
    fused, chained, residual = c.codes(kind), c.codes(kind), c.given()
    scale, wanted = c.numbers(shape[0], groups), c.numbers(shape[0], groups)
    pykv.rms_norm_per_block_quant(fused, array.input(c.x), array.input(c.weight), scale, EPSILON, None, residual, size)
    y, total = c.normed()
    if kind == E4M3:
        pykv.per_token_group_fp8_quant(y, chained, wanted, size, LEAST[E4M3])
    else:
        pykv.per_token_group_quant_int8(y, chained, wanted, size, LEAST[INT8])
    c.assert_equal((residual, total), (scale, wanted), (fused, chained))


@DTYPES
@KINDS
@SHAPES
def test_silu_by_a_scale_that_is_known(array, dtype, kind, shape):
    c = Chain(array, shape, dtype)
    half = (shape[0], shape[1] // 2)
    fused, chained = c.codes(kind, half), c.codes(kind, half)
    pykv.silu_and_mul_quant(fused, array.input(c.x), 0.07)
    if kind == E4M3:
        pykv.static_scaled_fp8_quant(chained, c.activated(), 0.07)
    else:
        pykv.static_scaled_int8_quant(chained, c.activated(), 0.07, array.input(np.zeros(1, np.int32)))
    c.assert_equal((fused, chained))


@DTYPES
@KINDS
@pytest.mark.parametrize(
    ("shape", "size"),
    [((5, 200), 20), ((7, 256), 128), ((33, 2048), 64), ((300, 8192), 128), ((3, 4096), 2048)],
    ids=str,
)
def test_silu_by_the_scales_of_groups(array, dtype, kind, shape, size):
    c = Chain(array, shape, dtype)
    half, groups = (shape[0], shape[1] // 2), shape[1] // 2 // size
    fused, chained = c.codes(kind, half), c.codes(kind, half)
    scale, wanted = c.numbers(shape[0], groups), c.numbers(shape[0], groups)
    pykv.silu_and_mul_per_block_quant(fused, array.input(c.x), scale, size)
    if kind == E4M3:
        pykv.per_token_group_fp8_quant(c.activated(), chained, wanted, size, LEAST[E4M3])
    else:
        pykv.per_token_group_quant_int8(c.activated(), chained, wanted, size, LEAST[INT8])
    c.assert_equal((scale, wanted), (fused, chained))
