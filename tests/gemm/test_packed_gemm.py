from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
from gemm.weights import LARGE, OF_ANY_SIZE, SOURCES, Weight, awq, fp8, gguf_blocks, integers
from hypothesis import given
from hypothesis import strategies as st
from rows import name_of, padded, random

import pykv
from pykv.gemm import (
    interleave_halves,
    pack_awq,
    pack_compressed_tensors,
    pack_fp8,
    pack_gguf,
    pack_gptq,
    pack_integers,
    pack_mxfp4,
    pack_nvfp4,
)
from pykv.packed_weight import PackedWeight, in_order_of_rows

HALVES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=name_of)


def multiply(array, w: PackedWeight, x, bias=None, *, offset=0, out=None, **epilogue) -> np.ndarray:
    n, _ = w.shape
    made = array.output(np.full((len(x), n), np.nan, x.dtype) if out is None else out, offset=offset)
    given = {k: array.input(v, offset=offset) if isinstance(v, np.ndarray) else v for k, v in epilogue.items()}
    given["bias"] = None if bias is None else array.input(bias, offset=offset)
    pykv.packed_gemm(made, array.input(x, offset=offset), array.input(w.data), w.format, **given)
    return array.numpy(made)


def roundings(array, w: PackedWeight, dtype) -> int:
    """To the dtype of x: of entries of NF4's table; on a GPU of scales and weights of GGUF, and what is like them."""
    codes, scales, minima, _, _, group, padded, *_ = w.format.split(".")
    is_small = int(group[1:]) % 128 != 0 and int(group[1:]) < int(padded[1:])
    if codes == "t4":
        is_rounded = scales in ("f16", "f16u8", "f16i8")
    elif codes[0] == "u" and minima == "none":
        is_rounded = is_small and scales in ("f16", "f16u8", "f16i8") and group in ("g16", "g32")
        is_rounded |= codes in ("u2", "u3", "u4") and scales == "f16" and dtype != np.float16
    else:
        is_rounded = codes[0] == "u" and minima != "zero"
    return 1 if (codes, scales) == ("t4", "f32") else 2 if is_rounded and array.device == "cuda" else 0


def check(array, weight: Weight, x, bias=None, **options) -> None:
    """Sums in fp32 of exact products, rounded once; or of weights that are rounded before."""
    w, decoded = weight
    out = multiply(array, w, x, bias, **options)
    exact = x.astype(np.float64) @ decoded.T + (0.0 if bias is None else bias.astype(np.float64))
    size = np.abs(x.astype(np.float64)) @ np.abs(decoded).T  # of all products of a sum
    half_ulp = float(ml_dtypes.finfo(x.dtype).eps) / 2
    lost = roundings(array, w, x.dtype) * half_ulp or 4e-6
    error = np.abs(out.astype(np.float64) - exact)
    assert (error <= half_ulp * 1.01 * np.abs(exact) + lost * size + 1e-7).all(), (error / (size + 1e-30)).max()
    if exact.size and len(x) > 1:
        assert np.linalg.norm(error) <= 2 * half_ulp * np.linalg.norm(exact)


@dtypes
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_sources(array, dtype, source, rows):
    weight = SOURCES[source]()
    check(array, weight, random((rows, weight[1].shape[1]), dtype))


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
@pytest.mark.parametrize("source", SOURCES)
def test_a_row_of_each_source_is_its_own(array, dtype, source):
    """Its bits are those that it has among any others, and its NaN is in no other row."""
    w, decoded = SOURCES[source]()
    x = random((150, decoded.shape[1]), dtype)
    whole = multiply(array, w, x).view("u2")
    for first, rows in ((0, 1), (5, 4), (20, 14), (40, 30), (60, 70)):
        np.testing.assert_array_equal(
            multiply(array, w, x[first : first + rows]).view("u2"), whole[first : first + rows]
        )
    x[7, 3] = np.nan
    for rows in (8, 150):
        out = multiply(array, w, x[:rows])
        assert np.isnan(out[7].astype(np.float32)).all()
        np.testing.assert_array_equal(np.delete(out, 7, 0).view("u2"), np.delete(whole[:rows], 7, 0))


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
    for first, last in ((0, 1), (3, 12), (20, 50), (100, 150), (200, 300), (500, 800), (300, 900)):
        some = multiply(array, w, x[first:last])
        np.testing.assert_array_equal(some.view(bits), whole[first:last].view(bits))


@dtypes
@pytest.mark.parametrize("padding", [(0, 0), (1, 8), (2, 5)])
@pytest.mark.parametrize("source", ["Q4_K", "Q6_K", "IQ4_XS", "nvfp4"])
def test_many_rows_of_any_stride(array, dtype, source, padding):
    weight = LARGE[source]()
    n, k = weight[1].shape
    for rows in (600, 1030) if array.device == "cuda" else (50,):
        x, out = padded(random((rows, k), dtype), *padding), padded(np.zeros((rows, n), dtype), *padding)
        check(array, weight, x, random((n,), dtype, 1), out=out)


@pytest.mark.parametrize("quant_type", [16, 17, 18, 19, 21, 22, 29, 34, 40, 41])
def test_what_a_code_book_holds_is_exact(array, quant_type):
    """With powers of two for scales, what is decoded fits into float16."""
    blocks, decoded = gguf_blocks(quant_type, powers=True, k=256)
    out = multiply(array, pack_gguf(blocks, quant_type), np.eye(256, dtype=np.float16))
    np.testing.assert_array_equal(out.T, decoded)


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


@given(
    source=st.sampled_from(list(OF_ANY_SIZE)),
    steps=st.tuples(st.integers(1, 12), st.integers(1, 9)),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(HALVES),
    rows=st.integers(0, 40),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offset=st.integers(0, 9),
)
def test_any_format_and_size(array, source, steps, seed, dtype, rows, padding, offset):
    weight = OF_ANY_SIZE[source](*steps, seed)
    n, k = weight[1].shape
    x, out = padded(random((rows, k), dtype, seed), *padding), padded(np.zeros((rows, n), dtype), *padding)
    check(array, weight, x, random((n,), dtype, 1), offset=offset, out=out)


GATES = {
    "silu": lambda a: a / (1 + np.exp(np.minimum(-a, 700))),
    "gelu": lambda a: a / 2 * (1 + np.vectorize(math.erf, [float])(a / math.sqrt(2))),
    "gelu_tanh": lambda a: a / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))),
}


def finish(
    array, weight: Weight, x, bias=None, *, token_scales=None, channel_scales=None, activation="", residual=None,
    codes=None, scale=0.05, **options,
) -> None:  # fmt: skip
    """Against float64; what sums in fp32 lose is carried on, and activations of fp32 lose some more."""
    w, decoded = weight
    f = np.float64
    scales = np.ones((len(x), len(decoded)))
    for some in (None if token_scales is None else token_scales.reshape(-1, 1), channel_scales):
        scales *= 1.0 if some is None else some.astype(f)
    exact = scales * (x.astype(f) @ decoded.T) + (0.0 if bias is None else bias.astype(f))
    lost = roundings(array, w, x.dtype) * float(ml_dtypes.finfo(x.dtype).eps) / 2 or 4e-6
    lost = lost * np.abs(scales) * (np.abs(x.astype(f)) @ np.abs(decoded).T) + 3e-7 * np.abs(exact)
    if activation:
        w, (a, b), (lost_a, lost_b) = interleave_halves(w), np.hsplit(exact, 2), np.hsplit(lost, 2)
        bias, channel_scales = (v if v is None or v.size == 1 else turns(v) for v in (bias, channel_scales))
        g = GATES[activation](a)
        exact = g * b
        lost = 1.13 * lost_a * np.abs(b) + np.abs(g) * lost_b + lost_a * lost_b + 1e-6 * (1 + np.abs(a)) * np.abs(b)
    if residual is not None:
        exact = exact + residual.astype(f)
        lost += 1e-7 * np.abs(exact)
    given = {"token_scales": token_scales, "channel_scales": channel_scales, "residual": residual}
    given |= {"activation": activation}
    if codes is None:
        out = multiply(array, w, x, bias, out=np.full(exact.shape, np.nan, x.dtype), **given, **options)
        half_ulp = float(ml_dtypes.finfo(x.dtype).eps) / 2
        assert (np.abs(out.astype(f) - exact) <= 1.01 * half_ulp * np.abs(exact) + 1.01 * lost + 1e-7).all()
        return
    given["out_scale"] = np.full(1, scale, np.float32)
    out = multiply(array, w, x, bias, out=np.full(exact.shape, 3, codes), **given, **options)
    found = (out if codes == np.int8 else out.view(ml_dtypes.float8_e4m3fn)).astype(f)
    wanted, lost = exact / float(np.float32(scale)), lost / scale + 1e-6 * np.abs(exact) / scale
    if codes == np.int8:
        assert (np.abs(found - np.clip(wanted, -128, 127)) <= 0.5 + lost).all()
    else:
        step = np.ldexp(1.0, np.floor(np.log2(np.maximum(np.abs(wanted), 2.0**-6))).astype(int) - 3)
        assert (np.abs(found - np.clip(wanted, -448, 448)) <= step / 2 + 2 * lost).all()


def turns(of_halves: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(of_halves.reshape(2, -1).T).ravel()


def positive(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0.5, 2, shape).astype(np.float32)


def flags(rows: int, n: int, dtype: np.dtype) -> dict[str, dict[str, object]]:
    token, channel = positive((rows, 1), 1), positive((n,), 2)
    whole, half = random((rows, n), dtype, 3), random((rows, n // 2), dtype, 3)
    return {
        "scales of tokens": {"token_scales": token},
        "one scale": {"token_scales": positive((1,), 4), "channel_scales": positive((1, 1), 5)},
        "scales of channels": {"channel_scales": channel},
        "residual": {"residual": whole},
        "silu": {"activation": "silu"},
        "gelu": {"activation": "gelu"},
        "gelu_tanh and residual": {"activation": "gelu_tanh", "residual": half},
        "fp8": {"codes": np.uint8},
        "int8": {"codes": np.int8},
        "all": {"token_scales": token, "channel_scales": channel, "activation": "silu", "residual": half}
        | {"codes": np.uint8},
    }


@dtypes
@pytest.mark.parametrize("rows", [1, 16, 64, 300])
@pytest.mark.parametrize("which", flags(1, 2, HALVES[0]))
@pytest.mark.parametrize("biased", [False, True])
def test_epilogue(array, dtype, rows, which, biased):
    weight = awq(136, 640)
    x, bias = random((rows, 640), dtype), random((136,), dtype, 1) if biased else None
    finish(array, weight, x, bias, **flags(rows, 136, dtype)[which])


@dtypes
@pytest.mark.parametrize("source", ["int8", "fp8 in blocks", "nvfp4", "gguf Q4_K", "gptq with act-order"])
def test_epilogue_of_other_weights(array, dtype, source):
    weight = SOURCES[source]()
    n, k = weight[1].shape
    for rows in (3, 20, 100):
        given = flags(rows, n, dtype)["all"]
        finish(array, weight, random((rows, k), dtype), random((n,), dtype, 1), **given)


@given(
    dtype=st.sampled_from(HALVES),
    rows=st.integers(0, 70),
    pairs=st.integers(1, 80),
    which=st.sampled_from(list(flags(1, 2, HALVES[0]))),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 17)),
    offset=st.integers(0, 9),
)
def test_epilogue_of_any_size_and_stride(array, dtype, rows, pairs, which, padding, offset):
    given = flags(rows, 2 * pairs, dtype)[which]
    if "residual" in given:
        given["residual"] = padded(given["residual"], *padding)
    x = padded(random((rows, 96), dtype), *padding)
    finish(array, integers(2 * pairs, 96, 32), x, random((2 * pairs,), dtype, 1), offset=offset, **given)


@dtypes
def test_a_row_with_an_epilogue_has_the_same_bits_among_any_others(array, dtype):
    w = interleave_halves(awq(264, 640)[0])
    x, bias = random((300, 640), dtype), random((264,), dtype, 1)
    for which in ("gelu_tanh and residual", "silu", "all"):
        given = flags(300, 264, dtype)[which] | {"bias": bias}
        codes = given.pop("codes", None)
        if codes:
            given["out_scale"] = np.full(1, 0.05, np.float32)

        def some(first: int, last: int, given=given, codes=codes) -> np.ndarray:
            rows = {k: v[first:last] if k in ("token_scales", "residual") else v for k, v in given.items()}
            return multiply(array, w, x[first:last], out=np.zeros((last - first, 132), codes or dtype), **rows)

        whole = some(0, 300)
        bits = f"u{whole.itemsize}"
        for first, rows in ((0, 1), (3, 2), (11, 7), (100, 16), (200, 40), (128, 64), (30, 129)):
            found = some(first, first + rows)
            np.testing.assert_array_equal(found.view(bits), whole[first : first + rows].view(bits))


@dtypes
@pytest.mark.parametrize("rows", [1, 100])
def test_a_residual_may_be_the_result(array, dtype, rows):
    w, _ = awq(136, 256)
    x, z = random((rows, 256), dtype), random((rows, 136), dtype, 1)
    expected = multiply(array, w, x, residual=z)
    made = array.output(z)
    pykv.packed_gemm(made, array.input(x), array.input(w.data), w.format, residual=made)
    np.testing.assert_array_equal(array.numpy(made).view("u2"), expected.view("u2"))


def test_codes_saturate_and_nan_is_one(array):
    w = pack_integers(np.full((4, 16), 9, np.uint8), np.ones((4, 1), np.float16))
    x = np.full((3, 16), 1e3, np.float16)
    x[1], x[2] = -1e3, np.nan
    scale = np.full(1, 1e-3, np.float32)
    fp8 = multiply(array, w, x, out=np.zeros((3, 4), np.uint8), out_scale=scale)
    np.testing.assert_array_equal(fp8, np.repeat([[0x7E], [0xFE], [0x7E]], 4, 1))
    int8 = multiply(array, w, x, out=np.zeros((3, 4), np.int8), out_scale=scale)
    np.testing.assert_array_equal(int8, np.repeat([[127], [-128], [0]], 4, 1))


def test_interleaving_moves_whole_rows():
    for make in SOURCES.values():
        w, _ = make()
        n, k = w.shape
        order = np.random.default_rng(0).permutation(n)
        x = np.eye(k, dtype=np.float16)[:40]
        plain, moved = (np.empty((len(x), n), np.float16) for _ in range(2))
        again = in_order_of_rows(w, order)
        pykv.packed_gemm(plain, x, w.data, w.format)
        pykv.packed_gemm(moved, x, again.data, again.format)
        np.testing.assert_array_equal(plain[:, order].view("u2"), moved.view("u2"))
    with pytest.raises(ValueError, match="weight: must have an even number of rows, got 33"):
        interleave_halves(integers(33, 64)[0])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"activation": "relu"}, ValueError, 'activation: must be "", silu, gelu or gelu_tanh, got "relu"'),
        ({"activation": "silu"}, ValueError, "out: dimension 1 must equal half of n of the format = 20"),
        (
            {"token_scales": np.ones(4, "f4")},
            ValueError,
            "token_scales: must have 1 or num_rows = 3 elements",
        ),
        ({"token_scales": np.ones(3, "f2")}, TypeError, "token_scales: dtype must be float32"),
        ({"channel_scales": np.ones((2, 20), "f4")}, ValueError, "channel_scales: must have 1 or n of the format = 40"),
        ({"residual": np.ones((3, 41), "f2")}, ValueError, "residual: dimension 1 must equal n of the format = 40"),
        ({"residual": np.ones((3, 40), "f4")}, TypeError, "residual: dtype must be that of x, float16"),
        ({"out_scale": np.ones(1, "f4")}, TypeError, "out: dtype must be .*float8_e4m3fn.* int8, got float16"),
    ],
)
def test_what_does_not_fit_of_an_epilogue_is_named(array, change, error, message):
    with pytest.raises(error, match=message):
        multiply(array, awq(40, 256)[0], np.zeros((3, 256), np.float16), **change)


def test_an_activation_wants_pairs(array):
    out = np.zeros((3, 16), np.float16)
    with pytest.raises(ValueError, match="activation: wants a weight of an even number of rows, got 33"):
        multiply(array, integers(33, 64)[0], np.zeros((3, 64), np.float16), out=out, activation="silu")


@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16], ids=name_of)
@pytest.mark.parametrize("make", ["int4", "int4 with zeros", "int8", "fp8"])
@pytest.mark.parametrize("rows", [1, 20, 100])
def test_the_largest_and_smallest_scales(array, kind, make, rows):
    rng = np.random.default_rng(0)
    largest = 3.3e35 if kind == np.float32 else np.float32(2.0**118 - 2.0**110)
    for size, of_x in ((largest, 2.0**-100), (2e-38, 2.0**100)):
        scales = (np.float32(size) * rng.choice([-1, 1], (48, 2)).astype(np.float32)).astype(kind)
        x = np.ldexp(random((rows, 256), HALVES[1]).astype(np.float32), round(math.log2(of_x))).astype(HALVES[1])
        if make == "fp8":
            codes = rng.integers(0, 0x70, (48, 256), dtype=np.uint8)
            w = pack_fp8(codes, scales, block=(1, 128))
            decoded = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        else:
            bits = 8 if make == "int8" else 4
            codes = rng.integers(0, 1 << bits, (48, 256), dtype=np.uint8)
            zeros = rng.integers(0, 16, (48, 2)) if make == "int4 with zeros" else np.full((48, 2), 1 << (bits - 1))
            w = pack_integers(codes, scales, zeros, group_size=128, bits=bits)
            decoded = codes - np.repeat(zeros, 128, 1).astype(np.float64)
        decoded *= np.repeat(scales.astype(np.float64), 128, 1)
        out = multiply(array, w, x).astype(np.float64)
        f = x.astype(np.float64)
        error = np.abs(out - f @ decoded.T)
        assert (error <= 2.0**-8 * 1.01 * np.abs(f @ decoded.T) + 4e-6 * (np.abs(f) @ np.abs(decoded).T)).all()


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


@dtypes
def test_an_infinite_x_is_no_nan(array, dtype):
    w = pack_integers(np.full((4, 64), 9, np.uint8), np.ones((4, 1), np.float16))
    x = np.zeros((3, 64), dtype)
    x[0, 3], x[1, 5] = np.inf, -np.inf
    np.testing.assert_array_equal(multiply(array, w, x), np.repeat(x.sum(1, keepdims=True), 4, 1))


def test_a_packed_weight_can_be_saved(array, tmp_path):
    w, _ = awq(40, 256)
    np.save(tmp_path / "w.npy", w.data)
    again = PackedWeight.of(np.load(tmp_path / "w.npy", mmap_mode="r"))
    assert (again.format, again.shape) == (w.format, (40, 256))
    x = random((3, 256), np.dtype(np.float16))
    np.testing.assert_array_equal(multiply(array, again, x), multiply(array, w, x))


@dtypes
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_columns_of_a_damaged_file_lead_nowhere(array, dtype, rows):
    w, _ = SOURCES["gptq with act-order"]()
    x = random((rows, 256), dtype)
    outs = []
    for outside in (-1, -7, 256, 2**31 - 1, -(2**31)):
        data = w.data.copy()
        columns = data[-4 * 256 :].view(np.int32)
        assert sorted(columns) == list(range(256))
        columns[::5] = outside
        outs.append(multiply(array, PackedWeight(data, w.format), x).view("u2"))
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


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
    words, scales = np.zeros((8, 2), np.int32), np.ones((8, 1), np.float16)
    for change, message in (
        ({"bits": 3}, "bits: must be 4 or 8, got 3"),
        ({"shape": (8, 17)}, r"weight_packed: must have shape \[8, 3\], got \[8, 2\]"),
        ({"weight_scale": np.ones((7, 1), np.float16)}, r"weight_scale: must have shape \[8, any\], got \[7, 1\]"),
        ({"weight_scale": np.ones((8, 3), np.float16)}, "weight_scale: its 3 groups must divide 16 columns"),
        ({"weight_zero_point": words}, r"weight_zero_point: must have shape \[1, 1\], got \[8, 2\]"),
        ({"weight_g_idx": np.zeros(15, np.int32)}, r"weight_g_idx: must have shape \[16\], got \[15\]"),
    ):
        with pytest.raises(ValueError, match=message):
            pack_compressed_tensors(**{"weight_packed": words, "weight_scale": scales, "shape": (8, 16)} | change)
    with pytest.raises(ValueError, match="bits: must be 2 to 6, or 8, got 7"):
        pack_integers(np.zeros((8, 8), np.uint8), np.zeros((8, 1), np.float16), bits=7)
    with pytest.raises(ValueError, match=r"quant_type: must be one of 2, 3, 6, .*, got 30"):
        pack_gguf(np.zeros((8, 66), np.uint8), 30)
    with pytest.raises(ValueError, match="weight: a scale of NVFP4 must not be 0xff"):
        pack_gguf(np.full((8, 36), 0xFF, np.uint8), 40)
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
    for kind in (np.float32, ml_dtypes.bfloat16):
        with pytest.raises(ValueError, match=r"scales: must be less than 2\*\*118 = 3.32e\+35, got 3.32e\+35"):
            pack_integers(np.zeros((8, 8), np.uint8), np.full((8, 1), -(2.0**118), kind))
    with pytest.raises(TypeError, match="scales: dtype must be float16, bfloat16 or float32, got float64"):
        pack_awq(np.zeros((64, 1), np.int32), np.zeros((1, 1), np.int32), np.zeros((1, 8)))
    with pytest.raises(ValueError, match=r"scales: must have shape \[8, 4\], got \[8, 5\]"):
        pack_nvfp4(np.zeros((8, 32), np.uint8), np.zeros((8, 5), np.uint8))
    with pytest.raises(ValueError, match="does not begin with the header of a packed weight"):
        PackedWeight.of(np.zeros(300, np.uint8))
    header = np.frombuffer(b"pykv packed 1\n" + bytes(range(120, 235)) + bytes(171), np.uint8)
    with pytest.raises(ValueError, match="data: its header names no format, but b'xyz"):
        PackedWeight.of(header)
