from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
from dequantization.reference import DECODE, FORMATS
from hypothesis import given
from hypothesis import strategies as st
from libraries import Numpy
from rows import FLOATS, name_of, padded

import pykv

ALL = pytest.mark.parametrize("quant_type", FORMATS, ids=lambda i: FORMATS[i][0] if isinstance(i, int) else None)
CODE_BOOKS = [i for i, (name, _, _) in FORMATS.items() if name not in DECODE]


def blocks(quant_type: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Random bytes; infinite and NaN scales among them."""
    rng = np.random.default_rng(seed + quant_type)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * FORMATS[quant_type][2]), dtype=np.uint8)


def decoded(W: np.ndarray, quant_type: int) -> np.ndarray:
    name, elements, size = FORMATS[quant_type]
    with np.errstate(all="ignore"):
        if name in DECODE:
            values = DECODE[name](W.reshape(-1, size))
        else:
            gguf = pytest.importorskip("gguf", reason="has the code books")
            values = gguf.dequantize(W.reshape(-1, size), gguf.GGMLQuantizationType(quant_type))
    return values.astype(np.float32).reshape(*W.shape[:-1], W.shape[-1] // size * elements)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """NaN is NaN, whatever its bits."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(actual), nan)
    bits = f"u{actual.itemsize}"
    np.testing.assert_array_equal(actual.view(bits)[~nan], expected.view(bits)[~nan])


def check(array: Any, W: np.ndarray, quant_type: int, dtype: np.dtype, *, offset: int = 0) -> None:
    expected = decoded(W, quant_type)
    out = array.output(np.full(expected.shape, 7, dtype), offset=offset)
    pykv.ggml_dequantize(out, array.input(W, offset=offset), quant_type)
    with np.errstate(over="ignore"):
        assert_same_bits(array.numpy(out), expected.astype(dtype))


@ALL
@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_any_format(array, quant_type, dtype):
    check(array, blocks(quant_type, 7, 23), quant_type, dtype)


@ALL
def test_as_gguf_does(quant_type):
    gguf = pytest.importorskip("gguf")
    W = blocks(quant_type, 64, 64, seed=1)
    try:
        with np.errstate(all="ignore"):
            expected = gguf.dequantize(W, gguf.GGMLQuantizationType(quant_type))
    except (NotImplementedError, ValueError):
        pytest.skip("gguf has no decoder")
    out = np.empty(expected.shape, np.float32)
    pykv.ggml_dequantize(out, W, quant_type)
    assert_same_bits(out, expected)


# of the tables as int8 [entries, elements]
SHA256 = {
    "IQ2_XXS": "05826b5d3e472a3a78f196be62ac78acf81df0f909626e12ab9fa2a5d490dd54",
    "IQ2_XS": "06e47aaca60b4dc1d9b5a3f34540437058a6b142b4d7a59d5ded769b4d1bf1de",
    "IQ2_S": "e1aa1473412b0552c2174c30ef22ab4073f6a181b85a17056e8249bd2932fd88",
    "IQ3_XXS": "46e35f5a997efdee6c99ce57854c8a0d4f0ff8ca57e5e8a60c0793ea580acf5d",
    "IQ3_S": "bd1af4945a1717c65610b0284e4628b9a1ba3b306fae3a06f6e5f597356e349f",
    "IQ1_S": "07540ffc1aeaf6ad4d97e96b0fcc765aae39671d4ae4a27bbd0e796fde167c6a",
}


def code_book(name: str) -> np.ndarray:
    """As the decoder has it: blocks whose indices count up, all signs plus and the scale what makes factors 1."""
    _, _, size = FORMATS[next(i for i, f in FORMATS.items() if f[0] == name)]
    index_bits, elements, d = {
        "IQ2_XXS": (8, 8, 8.0),
        "IQ2_XS": (9, 8, 8.0),
        "IQ2_S": (10, 8, 8.0),
        "IQ3_XXS": (8, 4, 4.0),
        "IQ3_S": (9, 4, 1.0),
        "IQ1_S": (11, 8, 1.0),
    }[name]
    count = 256 // elements
    index = np.arange(1 << index_bits).reshape(-1, count)
    W = np.zeros((len(index), size), np.uint8)
    W[:, :2] = np.array([d], np.float16).view(np.uint8)
    low, high = index & 255, index >> 8
    if name == "IQ2_XXS":
        W[:, 2:].reshape(len(W), 8, 8)[:, :, :4] = low.reshape(len(W), 8, 4)
    elif name == "IQ2_XS":
        W[:, 2:66] = index.astype("<u2").view(np.uint8)
    elif name == "IQ2_S":
        W[:, 2:34], W[:, 66:74] = low, (high.reshape(len(W), 8, 4) << np.arange(0, 8, 2)).sum(-1)
    elif name == "IQ3_XXS":
        W[:, 2:66] = low
    elif name == "IQ3_S":
        W[:, 2:66], W[:, 66:74] = low, (high.reshape(len(W), 8, 8) << np.arange(8)).sum(-1)
    else:
        W[:, 2:34] = low
        W[:, 34:] = (high.reshape(len(W), 8, 4) << np.arange(0, 12, 3)).sum(-1).astype("<u2").view(np.uint8)
    return W.reshape(1, -1)


@pytest.mark.parametrize("name", SHA256)
def test_code_books(array, name):
    W = code_book(name)
    quant_type = next(i for i, f in FORMATS.items() if f[0] == name)
    out = array.output(np.zeros((1, W.size // FORMATS[quant_type][2] * 256), np.float32))
    pykv.ggml_dequantize(out, array.input(W), quant_type)
    values = array.numpy(out)
    if name == "IQ1_S":
        values = values - 0.125
    book = values.astype(np.int8)
    np.testing.assert_array_equal(book, values)
    assert hashlib.sha256(book.tobytes()).hexdigest() == SHA256[name]


@pytest.mark.parametrize("quant_type", [2, 12, 14, 22, 39])
def test_strides(array, quant_type):
    W = padded(np.zeros((3, 5, FORMATS[quant_type][2] * 4), np.uint8).view(np.float16), 2, 3).view(np.uint8)
    W[...] = blocks(quant_type, 3, 5, 4).reshape(W.shape)
    expected = decoded(W, quant_type)
    for dtype in FLOATS:
        memory = padded(np.zeros(expected.shape, dtype), 1, 8)
        out = array.output(memory)
        pykv.ggml_dequantize(out, array.output(W), quant_type)
        with np.errstate(over="ignore"):
            assert_same_bits(array.numpy(out), expected.astype(dtype))


@pytest.mark.parametrize("quant_type", [2, 12, 39])
@pytest.mark.parametrize("offset", [1, 3])
def test_alignment(array, quant_type, offset):
    for dtype in FLOATS:
        check(array, blocks(quant_type, 3, 40), quant_type, dtype, offset=offset)


def test_many_tiles(array):
    check(array, blocks(12, 300, 16), 12, np.dtype(np.float16))


def test_rows_and_columns_in_exchange(array):
    """Contiguous arrays need the same number of blocks, as vLLM calls it for embeddings."""
    W = blocks(2, 6, 2)
    out = array.output(np.zeros((64, 6), np.float32))
    pykv.ggml_dequantize(out, array.input(W), 2)
    assert_same_bits(array.numpy(out).reshape(-1), decoded(W, 2).reshape(-1))


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty(array, shape):
    rows, count = shape
    out = array.output(np.zeros((rows, count * 256), np.float16))
    pykv.ggml_dequantize(out, array.output(np.zeros((rows, count * 144), np.uint8)), 12)


@given(
    quant_type=st.sampled_from([i for i in FORMATS if i not in CODE_BOOKS]),
    rows=st.integers(1, 5),
    count=st.integers(1, 40),
    dtype=st.sampled_from(FLOATS),
    offset=st.integers(0, 17),
)
def test_any_shape(quant_type, rows, count, dtype, offset):
    check(Numpy(), blocks(quant_type, rows, count, seed=count), quant_type, dtype, offset=offset)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"quant_type": 0}, ValueError, r"quant_type: must be the id of a block format of GGUF .*, got 0"),
        ({"quant_type": 4}, ValueError, "quant_type: .*got 4"),
        ({"quant_type": -1}, ValueError, "quant_type: .*got -1"),
        ({"quant_type": 1 << 40}, ValueError, "quant_type: .*got 1099511627776"),
        ({"W": np.zeros((2, 35), np.uint8)}, ValueError, "W: .*whole blocks of 18 bytes, got 35"),
        ({"W": np.zeros((2, 54), np.uint8)}, ValueError, r"out: must have 192 elements, 32 for each 18 bytes of W"),
        ({"W": np.zeros((2, 36), np.int8)}, TypeError, "W: .*uint8"),
        ({"W": np.zeros((2, 72), np.uint8)[:, ::2]}, ValueError, "W: .*stride"),
        ({"out": np.zeros((2, 64), np.int32)}, TypeError, "out: "),
        ({"out": np.zeros((2, 63), np.float32)}, ValueError, "out: must have 128 elements"),
        ({"out": np.zeros((4, 40), np.float32)[:, :32]}, ValueError, "out: must have the rows of W, of 64 elements"),
        ({"out": np.broadcast_to(np.zeros((1, 64), np.float32), (2, 64))}, (ValueError, TypeError), "out"),
    ],
)
def test_wrong_arguments(change, error, message):
    wanted = {"out": np.zeros((2, 64), np.float32), "W": np.zeros((2, 36), np.uint8), "quant_type": 2} | change
    with pytest.raises(error, match=message):
        pykv.ggml_dequantize(**wanted)
