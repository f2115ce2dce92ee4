"""rms_norm_dynamic_per_token_quant and rms_norm_per_block_quant."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from norm import reference
from norm.inputs import EPSILON, WIDTHS, dtypes
from norm.quantised import assert_codes
from rows import FLOATS, padded, random

import pykv

E4M3, INT8 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(np.int8)
codes_of = pytest.mark.parametrize("kind", [E4M3, INT8], ids=["e4m3", "int8"])
LARGEST = {E4M3: np.float32(448), INT8: np.float32(127)}
SMALLEST = {E4M3: np.float32(1) / (np.float32(448) * np.float32(512)), INT8: np.float32(2**-23)}


def quantise(
    array, x, weight, kind, group_size=None, scale_ub=None, residual=None, *, scales=None, result=None, offset=0
):
    """What NumPy arrays become: codes, scales (float32), residual.  ``group_size`` None: a scale for each row."""
    rows = int(np.prod(x.shape[:-1]))
    memory = padded(np.zeros(x.shape, E4M3), *(result or (0,)))
    made = array.output(memory.view(kind), offset=offset)
    if scales is None:
        scales = np.full((rows, x.shape[-1] // (group_size or x.shape[-1])), np.nan, np.float32)
    scales = array.output(scales, offset=offset)
    total = None if residual is None else array.output(residual, offset=offset)
    w = None if weight is None else array.input(weight, offset=offset)
    x = array.input(x, offset=offset)
    if group_size is None:
        pykv.rms_norm_dynamic_per_token_quant(made, x, w, scales, EPSILON, scale_ub, total)
    else:
        pykv.rms_norm_per_block_quant(made, x, w, scales, EPSILON, scale_ub, total, group_size)
    return array.numpy(made).view(kind), array.numpy(scales), None if total is None else array.numpy(total)


def assert_quantised(x, weight, kind, group_size, scale_ub, residual, codes, scales):
    weight = np.ones(x.shape[-1], x.dtype) if weight is None else weight
    z = x if residual is None else reference.add(x, residual)
    low, high = reference.normed_once(z, weight, EPSILON)
    groups = (-1, x.shape[-1] // (group_size or x.shape[-1]), group_size or x.shape[-1])
    if x.size == 0:
        return
    low, high = (y.astype(np.float32).reshape(groups) for y in (low, high))
    least, most = np.minimum(np.abs(low), np.abs(high)).max(-1), np.maximum(np.abs(low), np.abs(high)).max(-1)
    bound = np.float32(np.inf if scale_ub is None else scale_ub)
    ends = [np.maximum(np.minimum(m, bound) / LARGEST[kind], SMALLEST[kind]) for m in (least, most)]
    scales = scales.reshape(groups[:2]) if scales.ndim == 1 else scales
    # nothing is lost in a scale but the last bits of a division
    assert (scales >= ends[0] * np.float32(1 - 2e-7)).all()
    assert (scales <= ends[1] * np.float32(1 + 2e-7)).all()
    by = scales[..., None]
    codes_of = reference.e4m3 if kind == E4M3 else reference.int8
    if kind == E4M3 and group_size is None:
        codes_at_ends = [codes_of(y / by) for y in (low, high)]
    else:
        codes_at_ends = [codes_of(y * (np.float32(1) / by)) for y in (low, high)]
    assert_codes(codes.reshape(groups), *codes_at_ends)


def check(array, x, weight, kind, group_size=None, scale_ub=None, residual=None, **options):
    codes, scales, total = quantise(array, x, weight, kind, group_size, scale_ub, residual, **options)
    if residual is not None:
        np.testing.assert_array_equal(total, reference.add(x, residual))
    assert_quantised(x, weight, kind, group_size, scale_ub, residual, codes, scales)
    return codes, scales


@dtypes
@codes_of
@pytest.mark.parametrize("width", WIDTHS)
def test_widths_per_token(array, dtype, kind, width):
    check(array, random((5, width), dtype), random((width,), dtype, 1), kind)


@dtypes
@codes_of
@pytest.mark.parametrize("width", [1, 129, 1024, 4096, 5125, 16384, 20008])
def test_with_residual_per_token(array, dtype, kind, width):
    residual = random((5, width), dtype, 2)
    check(array, random((5, width), dtype), random((width,), dtype, 1), kind, residual=residual)


@dtypes
@codes_of
@pytest.mark.parametrize(
    ("width", "group_size"),
    [
        (128, 128),
        (256, 64),
        (1024, 128),
        (4096, 128),
        (4096, 64),
        (8192, 256),
        (16384, 64),
        (16384, 128),
        (20480, 64),  # more groups than some kernels have threads
        (64, 8),
        (768, 96),
        (1000, 100),
        (4096, 2048),
        (77, 7),
        (40, 1),
    ],
)
@pytest.mark.parametrize("with_residual", [False, True], ids=["alone", "with residual"])
def test_groups(array, dtype, kind, width, group_size, with_residual):
    residual = random((5, width), dtype, 2) if with_residual else None
    check(array, random((5, width), dtype), random((width,), dtype, 1), kind, group_size, residual=residual)


@dtypes
@pytest.mark.parametrize("group_size", [None, 128, 100])
def test_scale_ub_bounds_the_magnitude(array, dtype, group_size):
    x, weight = random((7, 12800), dtype), random((12800,), dtype, 1)
    for bound in (0.5, 3.0, 1e9):
        for made in (bound, array.input(np.array([bound], np.float32))):
            codes, scales, _ = quantise(array, x, weight, E4M3, group_size, made)
            assert_quantised(x, weight, E4M3, group_size, bound, None, codes, scales)
    assert (quantise(array, x, weight, E4M3, group_size, 0.5)[1] <= np.float32(0.5) / np.float32(448)).all()


@dtypes
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("aligned", [False, True], ids=["dense", "for TMA"])
def test_transposed_scales(array, dtype, rows, aligned):
    x, weight = random((rows, 1024), dtype), random((1024,), dtype, 1)
    expected_codes, expected = check(array, x, weight, E4M3, 128)
    length = -(-rows // 4) * 4 if aligned else rows
    memory = array.output(np.full((8, length), -1, np.float32))
    if array.name == "interface":
        pytest.skip("its arrays cannot be sliced")
    made = array.output(np.zeros((rows, 1024), E4M3))
    turned = memory.T[:rows]
    pykv.rms_norm_per_block_quant(made, array.input(x), array.input(weight), turned, EPSILON, None, None, 128, True)
    written = array.numpy(memory)
    np.testing.assert_array_equal(written[:, :rows], expected.T)
    assert (written[:, rows:] == -1).all()
    np.testing.assert_array_equal(array.numpy(made).view(np.uint8), expected_codes.view(np.uint8))


@dtypes
@codes_of
@pytest.mark.parametrize(
    ("width", "group_size", "with_residual"),
    [
        (2048, 128, False),
        (4096, 128, False),
        (4096, 64, True),
        (4096, 32, False),
        (7168, 128, True),
        (8192, 128, False),
    ],
)
def test_transposed_scales_of_many_rows(array, dtype, kind, width, group_size, with_residual):
    """Neighbouring rows may store theirs together, whichever comes first and has something odd."""
    rows, width = 1003 if array.device == "cuda" else 67, width * 2 // dtype.itemsize
    if array.name == "interface":
        pytest.skip("its arrays cannot be sliced")
    x, weight = np.resize(random((59, width), dtype), (rows, width)), random((width,), dtype, 1)
    x[2::8, 5], x[10::10] = np.nan, 0
    weight[300], x[1::3, 300] = ml_dtypes.finfo(dtype).max, 0  # more than others, of some rows
    residual = random((rows, width), dtype, 2) if with_residual else None
    expected_codes, expected, expected_total = quantise(array, x, weight, kind, group_size, residual=residual)
    memory = array.output(np.full((width // group_size, rows + 1), -1, np.float32))
    made = array.output(np.zeros((rows, width), E4M3).view(kind))
    total = None if residual is None else array.output(residual)
    scales = memory.T[:rows]
    given = array.input(x), array.input(weight)
    pykv.rms_norm_per_block_quant(made, *given, scales, EPSILON, None, total, group_size, True)
    written = array.numpy(memory)
    np.testing.assert_array_equal(written[:, :rows], expected.T)
    assert (written[:, rows:] == -1).all()
    np.testing.assert_array_equal(array.numpy(made).view(np.uint8), expected_codes.view(np.uint8))
    if total is not None:
        np.testing.assert_array_equal(array.numpy(total).view(np.uint8), expected_total.view(np.uint8))


@given(
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from([E4M3, INT8]),
    rows=st.integers(0, 9),
    groups=st.integers(1, 40),
    group_size=st.integers(1, 150) | st.sampled_from([8, 16, 32, 64, 128, 256]),
    by_group=st.booleans(),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    result=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offset=st.integers(0, 9),
    with_residual=st.booleans(),
)
def test_any_width_stride_and_alignment(
    array, dtype, kind, rows, groups, group_size, by_group, padding, result, offset, with_residual
):
    width = groups * group_size
    x, weight = random((2, rows, width), dtype, width), random((width,), dtype, 1)
    residual = random((2, rows, width), dtype, width + 1) if with_residual else None
    size = group_size if by_group else None
    options = {"result": result, "offset": offset}
    codes, scales = check(array, padded(x, *padding), weight, kind, size, residual=residual, **options)
    if rows:
        plain_codes, plain_scales = check(array, x, weight, kind, size, residual=residual)
        np.testing.assert_array_equal(codes.view(np.uint8), plain_codes.view(np.uint8))
        np.testing.assert_array_equal(scales, plain_scales)


@dtypes
@codes_of
@pytest.mark.parametrize("group_size", [None, 64, 48])
def test_weights_in_float32(array, dtype, kind, group_size):
    check(array, random((9, 768), dtype), random((768,), np.dtype(np.float32), 1), kind, group_size)
    check(array, random((9, 768), dtype), None, kind, group_size)


@codes_of
@pytest.mark.parametrize("group_size", [None, 64, 48])
def test_zeros_and_nan(array, kind, group_size):
    x, weight = random((4, 768), np.dtype(np.float16)), random((768,), np.dtype(np.float16), 1)
    x[1] = 0
    x[2, 5] = np.nan
    codes, scales, _ = quantise(array, x, weight, kind, group_size)
    values = codes.astype(np.float32)
    assert (scales[1] == SMALLEST[kind]).all()
    assert (values[1] == 0).all()
    assert (scales[2] == SMALLEST[kind]).all()
    assert (values[2] == (448 if kind == E4M3 else 0)).all()
    for row in (0, 3):
        ends = slice(row, row + 1)
        assert_quantised(x[ends], weight, kind, group_size, None, None, codes[ends], scales[ends])
    # NaN in a weight: only its column, and the scale passes it over
    x, weight[7] = random((4, 768), np.dtype(np.float16)), np.nan
    codes, scales, _ = quantise(array, x, weight, kind, group_size)
    assert np.isfinite(scales).all()
    assert (codes.astype(np.float32)[:, 7] == (448 if kind == E4M3 else 0)).all()
    assert (np.delete(np.abs(codes.astype(np.float32)), 7, 1) > 0).mean() > 0.9


@dtypes
@codes_of
@pytest.mark.parametrize("group_size", [None, 128, 1000])
def test_many_rows_of_all_magnitudes_and_nan(array, dtype, kind, group_size):
    """Much at once may be worked out another way (the CPU's tables, where NaN is looked for afterwards)."""
    x, weight = random((70, 4000), dtype), random((4000,), dtype, 1)
    weight = (weight.astype(np.float32) * np.float32(2) ** -(np.arange(4000) % 12)).astype(dtype)
    if group_size == 128:
        x, weight = x[:, :3968].copy(), weight[:3968].copy()
    codes, scales = check(array, x, weight, kind, group_size)
    weight[7] = np.nan
    with_nan, others, _ = quantise(array, x, weight, kind, group_size)
    assert (with_nan.astype(np.float32)[:, 7] == (448 if kind == E4M3 else 0)).all()
    unscathed = np.full(x.shape, True)
    unscathed[:, 7] = False
    unscathed[np.repeat(scales != others, group_size or x.shape[-1], 1)] = False  # its number was the largest
    assert unscathed.mean() > 0.9
    np.testing.assert_array_equal(with_nan.view(np.uint8)[unscathed], codes.view(np.uint8)[unscathed])


@codes_of
def test_the_largest_element_gets_the_largest_code(array, kind):
    x, weight = random((33, 4096), np.dtype(ml_dtypes.bfloat16)), random((4096,), np.dtype(ml_dtypes.bfloat16), 1)
    codes, _, _ = quantise(array, x, weight, kind)
    np.testing.assert_array_equal(np.abs(codes.astype(np.float32)).max(1), LARGEST[kind])


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (2, 0, 8)])
@pytest.mark.parametrize("group_size", [None, 8])
def test_empty(array, shape, group_size):
    rows, groups = int(np.prod(shape[:-1])), shape[-1] // group_size if group_size else 1
    scales = np.full((rows, groups), 5, np.float32)
    _, written, _ = quantise(array, np.zeros(shape, np.float32), None, E4M3, group_size, scales=scales)
    assert (written == 5).all()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"result_dtype": np.float32}, TypeError, "result: dtype must be float8_e4m3fn or uint8 or int8, got float32"),
        ({"scale": (4, 2)}, ValueError, r"scale: dimension 0 must equal num_rows = 3, got shape \[4, 2\]"),
        (
            {"scale": (3, 3)},
            ValueError,
            r"scale: dimension 1 must equal hidden_size / group_size = 2, got shape \[3, 3\]",
        ),
        ({"scale": (3,)}, ValueError, r"scale: must have 2 dimensions, got shape \[3\]"),
        ({"scale_dtype": np.float16}, TypeError, "scale: dtype must be float32, got float16"),
        ({"group_size": 0}, ValueError, "group_size: must divide hidden_size = 64, got 0"),
        ({"group_size": 48}, ValueError, "group_size: must divide hidden_size = 64, got 48"),
        ({"transposed": True}, ValueError, "scale: rows must lie side by side .* got stride 2"),
        ({"result_dtype": np.int8, "scale_ub": 1.0}, ValueError, "scale_ub: is for fp8 codes, but result is int8"),
        ({"residual": (3, 63)}, ValueError, r"residual: must have the shape of input, \[3, 64\], got \[3, 63\]"),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    wanted = {
        "result_dtype": np.uint8,
        "scale": (3, 2),
        "scale_dtype": np.float32,
        "group_size": 32,
        "transposed": False,
        "scale_ub": None,
        "residual": (3, 64),
    } | change
    result = array.output(np.zeros((3, 64), wanted["result_dtype"]))
    scale = array.output(np.zeros(wanted["scale"], wanted["scale_dtype"]))
    x, residual = array.input(np.zeros((3, 64), np.float32)), array.output(np.zeros(wanted["residual"], np.float32))
    with pytest.raises(error, match="rms_norm_per_block_quant: " + message):
        pykv.rms_norm_per_block_quant(
            result,
            x,
            None,
            scale,
            EPSILON,
            wanted["scale_ub"],
            residual,
            wanted["group_size"],
            wanted["transposed"],
        )


def test_scales_of_rows(array):
    x, result = array.input(np.ones((3, 64), np.float32)), array.output(np.zeros((3, 64), np.uint8))
    for shape in ((3,), (3, 1)):
        scale = array.output(np.zeros(shape, np.float32))
        pykv.rms_norm_dynamic_per_token_quant(result, x, None, scale, 0.0)
        np.testing.assert_allclose(array.numpy(scale), 1 / 448, rtol=1e-6)
    with pytest.raises(ValueError, match=r"scale: dimension 1 must equal 1, got shape \[3, 2\]"):
        pykv.rms_norm_dynamic_per_token_quant(result, x, None, array.output(np.zeros((3, 2), np.float32)))
