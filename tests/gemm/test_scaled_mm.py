from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gemm.scaled import E4M3, product, spread
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, name_of, padded, random

import pykv
from pykv import vllm

INT8 = np.dtype(np.int8)
BF16 = np.dtype(ml_dtypes.bfloat16)
codes = pytest.mark.parametrize("codes", [E4M3, INT8], ids=name_of)


def matrix(shape: tuple[int, int], codes: np.dtype, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed + sum(shape))
    if codes == INT8:
        return rng.integers(-128, 128, shape, np.int8)
    return np.clip(rng.standard_normal(shape, np.float32) * 50, -448, 448).astype(codes)


def column_major(shape: tuple[int, int], codes: np.dtype, seed: int = 0) -> np.ndarray:
    """As a layer has its weight: ``[n, k]``, transposed."""
    return matrix(shape[::-1], codes, seed).T


def positive(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).uniform(0.002, 0.02, shape).astype(np.float32)


def powers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed + sum(shape)).integers(116, 124, shape).astype(np.uint8)


def words(exponents: np.ndarray) -> np.ndarray:
    """Four neighbours of the last axis in an int32, the first in its lowest byte; columns one after another."""
    *lead, count = exponents.shape
    padded_bytes = np.zeros((*lead, -(-count // 4) * 4), np.uint8)
    padded_bytes[..., :count] = exponents
    return np.ascontiguousarray(padded_bytes.view("<i4").astype(np.int32).swapaxes(-1, -2)).swapaxes(-1, -2)


def multiply(array, a, b, a_scales, b_scales, bias=None, azp_adj=None, azp=None, *, dtype=BF16, out=None, offset=0):
    made = array.output(np.full((a.shape[0], b.shape[1]), np.nan, dtype) if out is None else out, offset=offset)
    a, b = (array.input(x, offset=offset) for x in (a, b))
    rest = [None if x is None else array.input(x) for x in (bias, azp_adj, azp)]
    scales = array.input(a_scales), array.input(b_scales)
    if azp_adj is None:
        pykv.cutlass_scaled_mm(made, a, b, *scales, rest[0])
    else:
        pykv.cutlass_scaled_mm_azp(made, a, b, *scales, rest[1], rest[2], rest[0])
    return array.numpy(made)


def compare(out, exact, size, is_exact: bool) -> None:
    """``size``: the sum of the magnitudes of all products.  Tensor cores keep 13 bits of an fp8 sum of 128."""
    half_ulp = 2**-24 if out.dtype == np.float32 else float(ml_dtypes.finfo(out.dtype).eps) / 2
    error = np.abs(out.astype(np.float64) - exact)
    lost = 4e-7 * np.abs(exact) if is_exact else 1e-3 * size
    assert (error <= half_ulp * 1.01 * np.abs(exact) + lost + 4e-7 * size + 1e-7).all(), (error / (size + 1e-30)).max()
    if exact.size > 1:
        assert np.linalg.norm(error) <= (half_ulp + (1e-6 if is_exact else 1e-3)) * np.linalg.norm(exact)


def check(array, a, b, a_scales, b_scales, bias=None, azp_adj=None, azp=None, **options) -> None:
    out = multiply(array, a, b, a_scales, b_scales, bias, azp_adj, azp, **options)
    exact = product(a, b, a_scales, b_scales, bias, azp_adj, azp)
    size = product(*(np.abs(x.astype(np.float64)) for x in (a, b)), a_scales, b_scales)
    compare(out, exact, size + (0 if bias is None else np.abs(bias.astype(np.float64))), a.dtype == INT8)


def check_blocks(array, a, b, a_scales, b_scales, bias=None, **options) -> None:
    out = multiply(array, a, b, a_scales, b_scales, bias, **options)
    x, w = spread(a, b, a_scales, b_scales)
    added = 0 if bias is None else bias.astype(np.float64)
    compare(out, x @ w + added, np.abs(x) @ np.abs(w) + np.abs(added), False)


@codes
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("of_rows", [False, True])
@pytest.mark.parametrize("of_columns", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_scales_and_dtypes(array, codes, dtype, of_rows, of_columns, has_bias):
    a, b = matrix((40, 272), codes), column_major((272, 144), codes)
    bias = random((144,), dtype) if has_bias else None
    check(array, a, b, positive(40 if of_rows else 1, 1), positive(1, 144 if of_columns else 1), bias, dtype=dtype)


@codes
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 129, 300])
def test_rows(array, codes, rows):
    a, b = matrix((rows, 1152), codes), column_major((1152, 136), codes)
    check(array, a, b, positive(rows), positive(136), random((136,), BF16))


@codes
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("n", [2040, 2200])
def test_more_tiles_than_multiprocessors(array, codes, n, blocks):
    if array.module == "jax":
        pytest.skip("sizes of a GPU")
    m, n, k = (8440, n, 400 if blocks else 144) if array.device == "cuda" else (500, n // 8, 144)
    a, b = matrix((m, k), codes), column_major((k, n), codes)
    bias = random((n,), BF16)
    if blocks:
        check_blocks(array, a, b, positive(m, -(-k // 128)), positive(-(-k // 128), -(-n // 128)), bias)
    else:
        check(array, a, b, positive(m), positive(n), bias)


@codes
@pytest.mark.parametrize("rows", [5, 40])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_wide_weight(array, codes, rows, blocks):
    n, k = 7700, 272
    a, b = matrix((rows, k), codes), column_major((k, n), codes)
    if blocks:
        check_blocks(array, a, b, positive(rows, 3), positive(3, 61))
    else:
        check(array, a, b, positive(rows), positive(n))


@codes
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("n", [256, 264, 4096])
@pytest.mark.parametrize("m", [300, 2000])
def test_a_row_has_the_same_bits_among_any_others(array, codes, blocks, n, m):
    if m > 300 and (n < 4096 or array.device != "cuda"):
        pytest.skip("sizes of a GPU")
    k = 1536 if n < 4096 else 512
    a, b = matrix((m, k), codes), column_major((k, n), codes)
    a_scales = np.asfortranarray(positive(m, k // 128)) if blocks else positive(m)
    b_scales = positive(k // 128, -(-n // 128)) if blocks else positive(n)
    whole = multiply(array, a, b, a_scales, b_scales)
    for first, rows in ((0, 1), (3, 2), (11, 7), (100, 16), (200, 40), (128, 64), (30, 129)):
        part = slice(first, first + rows)
        of_rows = np.array(a_scales[part], order="F" if rows > 2 else "C")
        some = multiply(array, a[part], b, of_rows, b_scales)
        np.testing.assert_array_equal(some.view(np.uint16), whole[part].view(np.uint16))


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(200, 328, 8336), (2050, 1672, 4240), (8200, 1000, 4240), (8200, 1000, 272), (200, 8600, 400), (139, 8632, 400)],
)
@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16], ids=name_of)
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("padding", [0, 16])
def test_many_rows_have_the_bits_of_float32(array, m, n, k, dtype, blocks, padding):
    """On an H200 tiles of 64, 128 and 256 rows and of 112 columns, which the copy engine writes but not of float32."""
    if array.device != "cuda":
        m, n, k = m // 20, n // 10, k // 16
    elif array.module == "jax":
        pytest.skip("once is enough")
    a, b = matrix((m, k), E4M3), column_major((k, n), E4M3)
    of_a = np.asfortranarray(positive(-(-m // 4) * 4, -(-k // 128)))[:m] if blocks else positive(m)
    of_b = positive(-(-k // 128), -(-n // 128)) if blocks else positive(n)
    out = padded(np.zeros((m, n), dtype), 0, padding)
    some = multiply(array, a, b, of_a, of_b, out=out)
    wanted = multiply(array, a, b, of_a, of_b, dtype=np.dtype(np.float32))
    np.testing.assert_array_equal(some.view(np.uint16), wanted.astype(dtype).view(np.uint16))


@pytest.mark.parametrize("k", [1000, 1001])
@pytest.mark.parametrize("blocks", [False, True])
def test_a_row_of_any_length_has_the_same_bits_alone(array, blocks, k):
    m, n = 48, 136
    a, b = matrix((m, k), E4M3), column_major((k, n), E4M3)
    scales = (positive(m, 8), positive(8, 2)) if blocks else (positive(m), positive(n))
    whole = multiply(array, a, b, *scales, dtype=np.dtype(np.float32))
    for first, rows in ((0, 1), (16, 1), (5, 2), (7, 40)):
        part = slice(first, first + rows)
        some = multiply(array, a[part], b, scales[0][part], scales[1], dtype=np.dtype(np.float32))
        np.testing.assert_array_equal(some.view(np.uint32), whole[part].view(np.uint32))


@codes
@pytest.mark.parametrize("rows", [1, 40, 130, 132])
@pytest.mark.parametrize("make", [positive, powers])
@pytest.mark.parametrize("column_major_scales", [False, True])
@pytest.mark.parametrize("k", [700, 704])
def test_scales_of_blocks(array, codes, rows, make, column_major_scales, k):
    n = 300
    a, b = matrix((rows, k), codes), column_major((k, n), codes)
    a_scales, b_scales = make(rows, 6), make(6, 3)
    if column_major_scales:
        a_scales, b_scales = (np.asfortranarray(x) for x in (a_scales, b_scales))
    check_blocks(array, a, b, a_scales, b_scales)
    check_blocks(array, a, b, a_scales, b_scales, random((n,), BF16))


@codes
@pytest.mark.parametrize("rows", [1, 40, 130])
@pytest.mark.parametrize("k", [100, 512, 704])
def test_exponents_in_words_give_the_bits_of_bytes(array, codes, rows, k):
    n, blocks = 300, -(-k // 128)
    a, b, of_a, of_b = matrix((rows, k), codes), column_major((k, n), codes), powers(rows, blocks), powers(blocks, 3)
    wanted = multiply(array, a, b, of_a, of_b)
    for of_words in (words(of_a), np.ascontiguousarray(words(of_a))):
        np.testing.assert_array_equal(multiply(array, a, b, of_words, of_b).view(np.uint16), wanted.view(np.uint16))
    check_blocks(array, a, b, of_a, of_b)
    some = multiply(array, a, b, words(of_a), positive(blocks, 3))
    x, w = spread(a, b, of_a, positive(blocks, 3))
    compare(some, x @ w, np.abs(x) @ np.abs(w), False)


@pytest.mark.parametrize("rows", [1, 40])
def test_what_a_quantiser_packs_is_taken(array, rows):
    x, w = random((rows, 640), BF16), column_major((640, 136), E4M3)
    made = [array.output(np.zeros(s, t)) for s, t in (((rows, 640), E4M3), ((rows, 2), np.int32))]
    pykv.per_token_group_fp8_quant_packed(array.input(x), *made)
    a, packed = array.numpy(made[0]).view(E4M3), array.numpy(made[1])
    out = multiply(array, a, w, packed, positive(5, 2))
    scales = np.ascontiguousarray(packed).view(np.uint8)[:, :5]
    exact, of_w = spread(a, w, scales, positive(5, 2))
    compare(out, exact @ of_w, np.abs(exact) @ np.abs(of_w), False)
    np.testing.assert_allclose(exact, x.astype(np.float64), rtol=0.07, atol=1e-3)


@codes
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("n", [1, 3, 128])
def test_one_block_has_exponents_too(array, codes, rows, n):
    """Their shapes are those that scales of rows might have."""
    check_blocks(array, matrix((rows, 70), codes), column_major((70, n), codes), powers(rows, 1), powers(1, 1))


@pytest.mark.parametrize("rows", [1, 8, 40, 130])
def test_sums_of_int8_are_exact(array, rows):
    """Below 2^24 in magnitude, which float32 holds."""
    a, b = matrix((rows, 1000), INT8), column_major((1000, 264), INT8)
    one = np.ones(1, np.float32)
    out = multiply(array, a, b, one, one, dtype=np.dtype(np.float32))
    np.testing.assert_array_equal(out.astype(np.int64), a.astype(np.int64) @ b.astype(np.int64))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
@pytest.mark.parametrize("rows", [1, 40, 130])
@pytest.mark.parametrize("of_rows", [False, True])
def test_zero_points(array, dtype, rows, of_rows):
    a, b = matrix((rows, 400), INT8), column_major((400, 200), INT8)
    sums = b.sum(axis=0, dtype=np.int32)
    azp = np.random.default_rng(0).integers(-128, 128, (rows, 1)).astype(np.int32)
    bias = random((200,), dtype)
    if of_rows:
        check(array, a, b, positive(rows), positive(200), bias, sums, azp, dtype=dtype)
        check(array, a, b, positive(rows), positive(200), None, sums, azp[:, 0], dtype=dtype)
        row = None if bias is None else bias[None]
        check(array, a, b, positive(rows), positive(200), row, sums[None], azp, dtype=dtype)  # as vLLM's tests have it
    else:
        check(array, a, b, positive(1), positive(200), bias, sums * 37, dtype=dtype)


def test_a_zero_point_times_a_sum_may_pass_32_bits(array):
    a, b = np.full((2, 64), 127, np.int8), np.full((64, 3), 127, np.int8)
    sums, azp = np.full(3, 2**30, np.int32), np.array([[127], [-128]], np.int32)
    check(array, a, b, positive(1), positive(1), None, sums, azp, dtype=np.dtype(np.float32))


@given(
    codes=st.sampled_from([E4M3, INT8]),
    rows=st.integers(0, 70) | st.integers(0, 200),
    n=st.integers(0, 100) | st.integers(0, 300),
    k=st.integers(0, 300) | st.integers(0, 1500),
    blocks=st.booleans(),
    row_major=st.booleans(),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offset=st.integers(0, 17),
)
def test_any_size_stride_and_alignment(array, codes, rows, n, k, blocks, row_major, padding, offset):
    a = padded(matrix((rows, k), codes), *padding) if codes == E4M3 else matrix((rows, k + padding[1]), codes)[:, :k]
    b = matrix((k, n + padding[1]), codes)[:, :n] if row_major else column_major((k + padding[1], n), codes)[:k]
    out, bias = padded(np.zeros((rows, n), BF16), *padding), random((n,), BF16)
    if blocks:
        scales = positive(rows, -(-k // 128)), positive(-(-k // 128), -(-n // 128))
        check_blocks(array, a, b, *scales, bias, out=out, offset=offset)
    else:
        check(array, a, b, positive(rows), positive(1), bias, out=out, offset=offset)


@codes
@pytest.mark.parametrize("rows", [1, 40, 130])
@pytest.mark.parametrize("blocks", [False, True])
def test_columns_of_a_one_after_another(array, codes, rows, blocks):
    a, b = column_major((rows, 400), codes), column_major((400, 72), codes, 1)
    if blocks:
        check_blocks(array, a, b, positive(rows, 4), positive(4, 1))
    else:
        check(array, a, b, positive(rows), positive(72))


@codes
def test_nothing_to_sum_is_the_bias(array, codes):
    bias = random((40,), BF16)
    out = multiply(array, matrix((3, 0), codes), column_major((0, 40), codes), positive(1), positive(1), bias)
    np.testing.assert_array_equal(out, np.broadcast_to(bias, (3, 40)))


@pytest.mark.parametrize("rows", [1, 20, 100])
def test_a_nan_stays_in_its_row_and_column(array, rows):
    a, b = matrix((rows, 256), E4M3), column_major((256, 40), E4M3)
    a[rows // 2, 100] = b[30, 7] = np.nan
    nan = np.isnan(multiply(array, a, b, positive(1), positive(1)).astype(np.float32))
    assert nan[rows // 2].all()
    assert nan[:, 7].all()
    assert nan.sum() == 40 + rows - 1


@codes
def test_extremes_are_exact(array, codes):
    """The largest sums, and products of which the smallest bits count."""
    largest = -128 if codes == INT8 else 448
    a, b = np.full((17, 4096), largest).astype(codes), np.full((4096, 24), largest).astype(codes)
    a[1:, 1:] = 0
    out = multiply(array, a, b, np.ones(1, np.float32), np.ones(1, np.float32), dtype=np.dtype(np.float32))
    np.testing.assert_array_equal(out[0], np.float32(4096 * largest**2))
    np.testing.assert_array_equal(out[1:], np.float32(largest**2))


@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 96)])
def test_functions_of_vllm(array, shape):
    if array.name in ("jax", "interface"):
        pytest.skip("the functions of vLLM allocate what they return, like what they are given")
    a, b = matrix((int(np.prod(shape[:-1])), 96), E4M3), column_major((96, 40), E4M3)
    scales = positive(a.shape[0], 1), positive(40, 1)
    given = [array.input(x) for x in (a.reshape(shape), b, *scales)]
    out = array.numpy(vllm.cutlass_scaled_mm(*given, "bfloat16"))
    assert out.shape == (*shape[:-1], 40)
    np.testing.assert_array_equal(out.reshape(-1, 40), multiply(array, a, b, *scales))
    a, b = matrix((5, 96), INT8), column_major((96, 40), INT8)
    sums, azp, scales = b.sum(axis=0, dtype=np.int32), np.arange(5, dtype=np.int32), (positive(5), positive(40))
    given = [array.input(x) for x in (a, b, *scales)]
    out = vllm.cutlass_scaled_mm_azp(*given, "float16", array.input(sums), array.input(azp))
    wanted = multiply(array, a, b, *scales, None, sums, azp, dtype=np.dtype(np.float16))
    np.testing.assert_array_equal(array.numpy(out), wanted)


@pytest.mark.parametrize("capability", [75, 80, 86, 89, 90, 100, 120])
def test_what_is_said_of_gpus(capability):
    """All of it runs where pykv's kernels do, from 8.0 on."""
    asked = (
        vllm.cutlass_scaled_mm_supports_fp8,
        vllm.cutlass_scaled_mm_supports_block_fp8,
        vllm.cutlass_scaled_mm_supports_fp4,
        vllm.cutlass_group_gemm_supported,
    )
    assert [ask(capability) for ask in asked] == [capability >= 80] * 4


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"a": (3, 255)}, ValueError, r"b: dimension 0 must equal k = 255, got shape \[256, 40\]"),
        ({"a_dtype": np.float32}, TypeError, "a: dtype must be .*, got float32"),
        ({"b_dtype": np.uint8}, TypeError, "b: dtype must be int8, as of a, got uint8|b: .*int8"),
        ({"out": (3, 41)}, ValueError, "out: dimension 1 must equal n = 40"),
        ({"out": (4, 40)}, ValueError, "out: dimension 0 must equal num_rows = 3"),
        ({"out_dtype": np.int32}, TypeError, "out: dtype must be float32 or float16 or bfloat16, got int32"),
        ({"bias": (41,)}, ValueError, "bias: dimension 0 must equal n = 40"),
        ({"a_scales": (4,)}, ValueError, r"a_scales: must have 1 or num_rows = 3 elements, .*, got shape \[4\]"),
        ({"b_scales": (4,)}, ValueError, r"b_scales: must have 1 or n = 40 elements, .*, got shape \[4\]"),
        ({"a_scales": (3, 2)}, ValueError, r"a_scales: must have 1 or num_rows = 3 elements, .*, got shape \[3, 2\]"),
        ({"a_scales": (3, 2), "b_scales": (2, 2)}, ValueError, "b_scales: dimension 1 must equal blocks of n = 1"),
        ({"a_scales": (3, 3), "b_scales": (2, 1)}, ValueError, "a_scales: dimension 1 must equal blocks of k = 2"),
        (
            {"a_scales": (3, 2), "a_scales_dtype": np.int32, "b_scales": (2, 1)},
            ValueError,
            "a_scales: .* words of four",
        ),
        ({"a_scales_dtype": np.uint8}, TypeError, "a_scales: dtype must be float32, got uint8"),
        ({"a_scales_dtype": np.float16}, TypeError, "a_scales: dtype must be float32, got float16"),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    shapes = {"out": (3, 40), "a": (3, 256), "b": (256, 40), "a_scales": (1,), "b_scales": (40,), "bias": (40,)}
    dtypes = {"out": np.float16, "a": np.int8, "b": np.int8, "bias": np.float16}
    made = {
        k: array.output(np.zeros(change.get(k, shape), change.get(f"{k}_dtype", dtypes.get(k, np.float32))))
        for k, shape in shapes.items()
    }
    with pytest.raises(error, match=message):
        pykv.cutlass_scaled_mm(**made)


def test_zero_points_do_not_fit_blocks(array):
    made = [array.output(np.zeros(s, t)) for s, t in (((3, 40), np.float16), ((3, 256), np.int8), ((256, 40), np.int8))]
    scales = [array.input(positive(3, 2)), array.input(positive(2, 1))]
    with pytest.raises(ValueError, match="a_scales: must be one, or one for each row"):
        pykv.cutlass_scaled_mm_azp(*made, *scales, array.input(np.zeros(40, np.int32)))


@codes
@pytest.mark.parametrize("rows", [3, 200])
def test_a_scale_may_be_a_number_on_the_host(array, codes, rows):
    a, b, of_rows, of_columns = (
        matrix((rows, 272), codes),
        column_major((272, 144), codes),
        positive(rows),
        positive(144),
    )
    number, one = 0.01234, np.full(1, 0.01234, np.float32)
    inputs, arrays = [array.input(x) for x in (a, b)], [array.input(x) for x in (of_rows, of_columns)]
    for scales, wanted in (
        ((number, number), (one, one)),
        ((number, arrays[1]), (one, of_columns)),
        ((arrays[0], number), (of_rows, one)),
    ):
        made = array.output(np.zeros((rows, 144), BF16))
        pykv.cutlass_scaled_mm(made, *inputs, *scales)
        expected = multiply(array, a, b, *wanted)
        np.testing.assert_array_equal(array.numpy(made).view(np.uint16), expected.view(np.uint16))
    if codes == INT8:
        sums = b.astype(np.int32).sum(0, dtype=np.int32)
        made = array.output(np.zeros((rows, 144), BF16))
        pykv.cutlass_scaled_mm_azp(made, *inputs, number, number, array.input(sums))
        expected = multiply(array, a, b, one, one, azp_adj=sums)
        np.testing.assert_array_equal(array.numpy(made).view(np.uint16), expected.view(np.uint16))


def test_a_number_is_no_scale_of_blocks(array):
    made = [array.output(np.zeros(s, t)) for s, t in (((3, 40), np.float16), ((3, 256), np.int8), ((256, 40), np.int8))]
    with pytest.raises(ValueError, match="b_scales: must have 1 or n = 40 elements, or both scales be those of blocks"):
        pykv.cutlass_scaled_mm(*made, 0.5, array.input(positive(2, 1)))
    with pytest.raises(ValueError, match="a_scales: must be a number, got nan"):
        pykv.cutlass_scaled_mm(*made, float("nan"), 1.0)
