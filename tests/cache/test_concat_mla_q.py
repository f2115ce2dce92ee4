from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache import inputs
from libraries import Library

import pykv

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.uint8, np.int64]
View = Callable[[Any], Any]


def same(x: Any) -> Any:
    return x


# name -> (a larger shape, how to take the array from it)
STRIDES: dict[str, tuple[Callable[[int, int, int], tuple[int, ...]], View]] = {
    "compact": (lambda n, h, d: (n, h, d), same),
    "heads first": (lambda n, h, d: (h, n, d), lambda m: m.swapaxes(0, 1)),
    "padded": (lambda n, h, d: (n, h, d + 16), lambda m: m[..., :-16]),
    "not aligned": (lambda n, h, d: (n, h, d + 3), lambda m: m[..., 3:]),
    "elements apart": (lambda n, h, d: (n, h, d, 2), lambda m: m[..., 1]),
}


def check(
    array: Library,
    n: int,
    h: int,
    latent: int,
    rope: int,
    *,
    dtype: Any = np.float16,
    nope_in: str = "compact",
    pe_in: str = "compact",
    out_in: str = "compact",
) -> None:
    rng = np.random.default_rng(0)
    sizes = (latent, rope, latent + rope)
    memories = [
        inputs.bits(rng, STRIDES[s][0](n, h, d), np.dtype(dtype))
        for s, d in zip((nope_in, pe_in, out_in), sizes, strict=True)
    ]
    takes = [STRIDES[s][1] for s in (nope_in, pe_in, out_in)]
    copies = [array.output(m) for m in memories]
    nope, pe, out = (take(m) for take, m in zip(takes, memories, strict=True))
    out[...] = np.concatenate([nope, pe], axis=2)
    pykv.concat_mla_q(*(inputs.view(c, take) for c, take in zip(copies, takes, strict=True)))
    for copy, memory in zip(copies, memories, strict=True):
        got = array.numpy(copy).reshape(-1)
        np.testing.assert_array_equal(got.view(np.uint8), memory.reshape(-1).view(np.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (1024, 64), (256, 32), (7, 3), (0, 8), (8, 0), (40, 5)])
def test_sizes(array: Library, latent: int, rope: int, dtype: Any) -> None:
    for n, h in ((1, 1), (3, 7), (2, 128)):
        check(array, n, h, latent, rope, dtype=dtype)


@pytest.mark.parametrize("out_in", STRIDES)
@pytest.mark.parametrize("nope_in", STRIDES)
def test_strides(array: Library, nope_in: str, out_in: str) -> None:
    for pe_in in STRIDES:
        for dtype in (np.float16, np.float32):
            check(array, 5, 3, 64, 16, nope_in=nope_in, pe_in=pe_in, out_in=out_in, dtype=dtype)


def test_many_tokens(array: Library) -> None:
    """More bytes than CPU caches hold."""
    check(array, 700, 32, 512, 64, nope_in="heads first")


@pytest.mark.parametrize("latent", [512, 5])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_more_heads_in_the_result(array: Library, latent: int, dtype: Any) -> None:
    """A workspace of 64 heads: those beyond stay as they are."""
    rng = np.random.default_rng(0)
    nope, pe = (inputs.bits(rng, (5, 8, size), np.dtype(dtype)) for size in (latent, 64))
    expected = inputs.bits(rng, (5, 64, latent + 64), np.dtype(dtype))
    actual = array.output(expected)
    expected[:, :8] = np.concatenate([nope, pe], axis=2)
    pykv.concat_mla_q(array.input(nope), array.input(pe), actual)
    np.testing.assert_array_equal(array.numpy(actual).view(np.uint8), expected.view(np.uint8))
    pykv.concat_mla_q(inputs.view(actual, lambda m: m[:, :8, :latent]), array.input(pe[::-1].copy()), actual)
    expected[:, :8, latent:] = pe[::-1]
    np.testing.assert_array_equal(array.numpy(actual).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("latent", [512, 5, 1])
def test_latent_part_in_its_place(array: Library, latent: int) -> None:
    memory = inputs.bits(np.random.default_rng(0), (5, 4, latent + 8), np.dtype(np.float16))
    pe = inputs.bits(np.random.default_rng(1), (5, 4, 8), np.dtype(np.float16))
    actual = array.output(memory)
    pykv.concat_mla_q(inputs.view(actual, lambda m: m[..., :latent]), array.input(pe), actual)
    memory[..., latent:] = pe
    np.testing.assert_array_equal(array.numpy(actual).view(np.uint16), memory.view(np.uint16))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_nothing_to_do(array: Library, shape: tuple[int, int]) -> None:
    check(array, *shape, 64, 16)
    check(array, 3, 4, 0, 0)


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("nope", "pe", "out", "error", "message"),
    [
        (zeros(2, 8), zeros(2, 3, 4), zeros(2, 3, 12), ValueError, "ql_nope: must have 3 dimensions"),
        (zeros(2, 3, 8), zeros(2, 4, 4), zeros(2, 3, 12), ValueError, "q_pe: dimension 1 must equal num_heads = 3"),
        (zeros(2, 3, 8), zeros(2, 3, 4, dtype=np.int8), zeros(2, 3, 12), TypeError, "q_pe: dtype must be that of"),
        (zeros(2, 3, 8), zeros(2, 3, 4), zeros(2, 3, 11), ValueError, r"q_out: dimension 2 must equal .* = 12, got"),
        (zeros(2, 3, 8), zeros(2, 3, 4), zeros(2, 2, 12), ValueError, "q_out: must have at least num_heads = 3 heads"),
        (zeros(2, 3, 8), zeros(2, 3, 4), None, TypeError, "q_out: an array is required"),
    ],
)  # fmt: skip
def test_errors(nope: Any, pe: Any, out: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^concat_mla_q: {message}"):
        pykv.concat_mla_q(nope, pe, out)
