from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gemm.weights import LARGE, SOURCES, Weight, awq, fp8, integers
from hypothesis import given
from hypothesis import strategies as st
from rows import name_of, padded, random

import pykv
from pykv.gemm import pack_awq, pack_fp8, pack_gguf, pack_gptq, pack_integers, pack_mxfp4, pack_nvfp4
from pykv.packed_weight import PackedWeight

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=name_of)


def multiply(array, w: PackedWeight, x, bias=None, *, offset=0, out=None) -> np.ndarray:
    n, _ = w.shape
    made = array.output(np.full((len(x), n), np.nan, x.dtype) if out is None else out, offset=offset)
    given = None if bias is None else array.input(bias, offset=offset)
    pykv.packed_gemm(made, array.input(x, offset=offset), array.input(w.data), w.format, given)
    return array.numpy(made)


def check(array, weight: Weight, x, bias=None, *, of_table: bool = False, **options) -> None:
    """Sums in fp32 of exact products, rounded once; entries of NF4's table are rounded to the dtype before."""
    w, decoded = weight
    out = multiply(array, w, x, bias, **options)
    exact = x.astype(np.float64) @ decoded.T + (0.0 if bias is None else bias.astype(np.float64))
    size = np.abs(x.astype(np.float64)) @ np.abs(decoded).T  # of all products of a sum
    half_ulp = float(ml_dtypes.finfo(x.dtype).eps) / 2
    lost = half_ulp if of_table else 4e-6
    error = np.abs(out.astype(np.float64) - exact)
    assert (error <= half_ulp * 1.01 * np.abs(exact) + lost * size + 1e-7).all(), (error / (size + 1e-30)).max()
    if exact.size and len(x) > 1:
        assert np.linalg.norm(error) <= 2 * half_ulp * np.linalg.norm(exact)


@dtypes
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_sources(array, dtype, source, rows):
    weight = SOURCES[source]()
    check(array, weight, random((rows, weight[1].shape[1]), dtype), of_table=source == "nf4")


@dtypes
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 16, 17, 32, 33, 64, 65, 130, 300])
def test_rows(array, dtype, rows):
    check(array, awq(136, 1152), random((rows, 1152), dtype), random((136,), dtype, 1))


@dtypes
@pytest.mark.parametrize("rows", [1, 5, 40, 300])
@pytest.mark.parametrize("source", ["awq", "fp8", "gptq with act-order"])
def test_columns_of_x_one_after_another(array, dtype, rows, source):
    weight = SOURCES[source]()
    check(array, weight, np.asfortranarray(random((rows, weight[1].shape[1]), dtype)))


@dtypes
@pytest.mark.parametrize("make", [awq, integers, fp8])
def test_a_row_has_the_same_bits_among_any_others(array, dtype, make):
    w, _ = make(264, 2176)
    x = random((300, 2176), dtype)
    whole = multiply(array, w, x)
    bits = f"u{whole.itemsize}"
    for first, rows in ((0, 1), (3, 2), (11, 7), (100, 16), (200, 40), (128, 64), (30, 129)):
        some = multiply(array, w, x[first : first + rows])
        np.testing.assert_array_equal(some.view(bits), whole[first : first + rows].view(bits))


@dtypes
@pytest.mark.parametrize("source", LARGE)
def test_many_rows(array, dtype, source):
    """So many that all tiles of a GPU come up: the bits of a row are those that it has among fewer."""
    weight = LARGE[source]()
    w, decoded = weight
    x = random((1000 if array.device == "cuda" else 50, decoded.shape[1]), dtype)
    whole = multiply(array, w, x)
    check(array, weight, x[-90:])
    bits = f"u{whole.itemsize}"
    for first, last in ((0, 1), (3, 12), (20, 50), (100, 150), (200, 300), (500, 800), (700, 1000)):
        some = multiply(array, w, x[first:last])
        np.testing.assert_array_equal(some.view(bits), whole[first:last].view(bits))


@given(
    dtype=st.sampled_from(HALVES),
    rows=st.integers(0, 70),
    n=st.integers(1, 100),
    k=st.integers(1, 300) | st.integers(1, 3000),
    group_size=st.sampled_from([16, 32, 64, 128, 48, 7, 100, 10000]),
    bits=st.sampled_from([4, 8]),
    zeros=st.booleans(),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offset=st.integers(0, 9),
)
def test_any_size_stride_and_alignment(array, dtype, rows, n, k, group_size, bits, zeros, padding, offset):
    weight = integers(n, k, group_size, bits, zeros)
    x, out = padded(random((rows, k), dtype, k), *padding), padded(np.zeros((rows, n), dtype), *padding)
    check(array, weight, x, random((n,), dtype, 1), offset=offset, out=out)


@dtypes
def test_nothing_to_sum_is_the_bias(array, dtype):
    w = pack_integers(np.zeros((40, 0), np.uint8), np.zeros((40, 0), np.float16))
    bias = random((40,), dtype)
    out = multiply(array, w, np.zeros((3, 0), dtype), bias)
    np.testing.assert_array_equal(out, np.broadcast_to(bias, (3, 40)))


@dtypes
def test_padding_of_x_is_never_read(array, dtype):
    """What lies beside x may be NaN, which no zero would make disappear."""
    x = padded(random((9, 130), dtype), 2, 60)
    assert np.isfinite(multiply(array, integers(40, 130)[0], x).astype(np.float32)).all()


def test_a_packed_weight_can_be_saved(array, tmp_path):
    w, _ = awq(40, 256)
    np.save(tmp_path / "w.npy", w.data)
    again = PackedWeight.of(np.load(tmp_path / "w.npy", mmap_mode="r"))
    assert (again.format, again.shape) == (w.format, (40, 256))
    x = random((3, 256), np.dtype(np.float16))
    np.testing.assert_array_equal(multiply(array, again, x), multiply(array, w, x))


def test_a_plain_weight_takes_no_more_bytes_than_its_codes_and_scales():
    w, _ = awq(4096, 1024)
    groups = 4096 * 1024 // 128
    assert len(w.data) == 256 + 4096 * 1024 // 2 + 3 * groups


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": (3, 255)}, ValueError, r"x: dimension 1 must equal k of the format = 256, got shape \[3, 255\]"),
        ({"x_dtype": np.float32}, TypeError, "x: dtype must be float16 or bfloat16, got float32"),
        ({"out": (3, 41)}, ValueError, "out: dimension 1 must equal n of the format = 40"),
        ({"out": (4, 40)}, ValueError, "out: dimension 0 must equal num_rows = 3"),
        ({"bias": (41,)}, ValueError, "bias: dimension 0 must equal n of the format = 40"),
        ({"weight": 10}, ValueError, r"weight: must have the \d+ bytes of its format, got shape"),
        (
            {"format": "u7.f16.none"},
            ValueError,
            r"packed_gemm: format: must be .*: codes must be u2, u3, u4, u5, u6, u8, e4m3 or t4, got \"u7",
        ),
        ({"format": "u4.f16.zero.n40.k256.g100.p256"}, ValueError, "the group size must be a multiple of 16"),
        ({"format": "u4.f16.zero.n40.k256.g128.p320"}, ValueError, "padded columns must be the columns, padded"),
        ({"format": "u4.f16.zero.n40.k256.g128.p256.rows"}, ValueError, "the last field must be"),
        ({"format": "u4.f16.zero.n40.k256.g128"}, ValueError, "padded columns must be p<number>"),
    ],
)
def test_what_does_not_fit_is_named(array, change, error, message):
    w, _ = awq(40, 256)
    given = {"out": (3, 40), "x": (3, 256), "bias": (40,)} | change
    made = {k: array.output(np.zeros(given[k], given.get(f"{k}_dtype", np.float16))) for k in ("out", "x", "bias")}
    data = w.data[: given["weight"]] if "weight" in given else w.data
    with pytest.raises(error, match=message):
        pykv.packed_gemm(made["out"], made["x"], array.output(data), given.get("format", w.format), made["bias"])


def test_packing_refuses_what_it_cannot_hold():
    with pytest.raises(ValueError, match="bits: must be 2, 3, 4 or 8, got 5"):
        pack_gptq(np.zeros((5, 8), np.int32), None, np.zeros((1, 8), np.float16), bits=5)
    with pytest.raises(ValueError, match="bits: must be 2 to 6, or 8, got 7"):
        pack_integers(np.zeros((8, 8), np.uint8), np.zeros((8, 1), np.float16), bits=7)
    with pytest.raises(ValueError, match=r"quant_type: must be one of 2, 3, 6, .*, got 16"):
        pack_gguf(np.zeros((8, 66), np.uint8), 16)
    with pytest.raises(
        ValueError, match=r"weight: must be \[n, bytes\] of whole blocks of 18 bytes, got shape \[8, 20\]"
    ):
        pack_gguf(np.zeros((8, 20), np.uint8), 2)
    with pytest.raises(ValueError, match="weight: must not hold NaN"):
        pack_fp8(np.full((8, 64), 0x7F, np.uint8), 1.0)
    for nan in (0x7F, 0xFF):
        with pytest.raises(ValueError, match="scales: must not hold NaN"):
            pack_nvfp4(np.zeros((8, 32), np.uint8), np.full((8, 4), nan, np.uint8))
    with pytest.raises(ValueError, match="scales: must not hold NaN, which 255 is"):
        pack_mxfp4(np.zeros((8, 32), np.uint8), np.full((8, 2), 255, np.uint8))
    with pytest.raises(TypeError, match="scales: dtype must be float16, bfloat16 or float32, got float64"):
        pack_awq(np.zeros((64, 1), np.int32), np.zeros((1, 1), np.int32), np.zeros((1, 8)))
    with pytest.raises(ValueError, match=r"scales: must have shape \[8, 4\], got \[8, 5\]"):
        pack_nvfp4(np.zeros((8, 32), np.uint8), np.zeros((8, 5), np.uint8))
    with pytest.raises(ValueError, match="does not begin with the header of a packed weight"):
        PackedWeight.of(np.zeros(300, np.uint8))
    header = np.frombuffer(b"pykv packed 1\n" + bytes(range(120, 235)) + bytes(171), np.uint8)
    with pytest.raises(ValueError, match="data: its header names no format, but b'xyz"):
        PackedWeight.of(header)
