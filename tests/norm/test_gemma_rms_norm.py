from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from norm import reference
from norm.inputs import EPSILON, WIDTHS, dtypes
from rows import assert_rounded_once, random

import pykv

weight_dtypes = pytest.mark.parametrize("wide_weight", [False, True], ids=["weight like input", "weight in float32"])


def offset(weight):
    return weight.astype(np.float64) + 1


@dtypes
@weight_dtypes
@pytest.mark.parametrize("width", WIDTHS)
def test_norm(array, dtype, wide_weight, width):
    x, weight = random((5, width), dtype), random((width,), np.dtype(np.float32) if wide_weight else dtype, 1)
    out = array.output(np.full_like(x, np.nan))
    pykv.gemma_rms_norm(out, array.input(x), array.input(weight), EPSILON)
    # the sum 1 + weight is rounded to fp32
    exact = reference.rms_norm(x, None, EPSILON) * (weight.astype(np.float32) + np.float32(1)).astype(np.float64)
    assert_rounded_once(array.numpy(out), exact)


@dtypes
@weight_dtypes
@pytest.mark.parametrize("width", [1, 100, 128, 1000, 4096, 16384, 20008])
def test_fused_add(array, dtype, wide_weight, width):
    weight = random((width,), np.dtype(np.float32) if wide_weight else dtype, 2) - np.float32(0.5).astype(dtype)
    x, residual = random((5, width), dtype), random((5, width), dtype, 1)
    made, total = array.output(x), array.output(residual)
    pykv.gemma_fused_add_rms_norm(made, total, array.input(weight), EPSILON)
    np.testing.assert_array_equal(array.numpy(total), reference.add(x, residual))
    z = x.astype(np.float32) + residual.astype(np.float32)  # what is normed is not rounded
    assert_rounded_once(array.numpy(made), reference.rms_norm(z, None, EPSILON) * offset(weight), atol=1e-6)


def test_what_does_not_fit_is_named(array):
    x = array.output(np.zeros((3, 8), np.float16))
    with pytest.raises(TypeError, match="gemma_rms_norm: weight: an array is required, got None"):
        pykv.gemma_rms_norm(x, x, None)
    with pytest.raises(TypeError, match="gemma_fused_add_rms_norm: weight: an array is required, got None"):
        pykv.gemma_fused_add_rms_norm(x, array.output(np.zeros((3, 8), np.float16)), None)
    with pytest.raises(TypeError, match="weight: dtype must be that of input, float16, got bfloat16"):
        pykv.gemma_rms_norm(x, x, array.input(np.zeros(8, ml_dtypes.bfloat16)))
    with pytest.raises(TypeError, match="residual: dtype must be that of input, float16, got float32"):
        pykv.gemma_fused_add_rms_norm(
            x, array.output(np.zeros((3, 8), np.float32)), array.input(np.zeros(8, np.float16))
        )
    wide = array.output(np.zeros((3, 8), np.float32))
    with pytest.raises(TypeError, match="residual: dtype must be that of input, float32, got float16"):
        pykv.gemma_fused_add_rms_norm(wide, x, array.input(np.zeros(8, np.float32)))
