"""How nvfp4 rounds: block scales and codes, block by block."""

from __future__ import annotations

import numpy as np
import pytest
from cache import reference_nvfp4
from cache.inputs import DTYPES
from libraries import Library

import pykv


def write_one_block(array: Library, rows: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[rows, 16]`` and scales ``[rows]`` of blocks of 16, of keys of 64."""
    n = len(rows)
    padded = np.zeros((n, 1, 64), rows.dtype)
    padded[:, 0, :16] = rows
    blocks = -(-n // 4)
    caches = [array.output(np.full((blocks, 4, 1, 36), 0xEE, np.uint8)) for _ in range(2)]
    given = array.input(padded)
    pykv.reshape_and_cache_flash(given, given, *caches, array.input(np.arange(n)), "nvfp4", scale, scale)
    pages = array.numpy(caches[0]).reshape(blocks, -1)
    codes = pages[:, :128].reshape(blocks * 4, 32)[:n, :8]
    scales = pages[:, 128:].reshape(blocks * 4, 4)[:n, 0]  # of keys: scale 0 of token t lies at row t, column 0
    return np.stack([codes & 15, codes >> 4], -1).reshape(n, 16), scales


def block(*elements: float, dtype: str = "float32") -> np.ndarray:
    return np.array([*elements, *[0.0] * (16 - len(elements))], np.float32).astype(DTYPES[dtype])[None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_even_code(array: Library, dtype: str) -> None:
    x = block(
        6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -5, -0.0, 0.26, 0.74, 5.03125, 2.484375, dtype=dtype
    )
    codes, scales = write_one_block(array, x, 1.0)
    assert scales[0] == 0x38  # 1
    assert codes[0].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 14, 8, 1, 1, 7, 4]


def test_block_scales_are_rounded_to_even(array: Library) -> None:
    # 6 * (1 + 1/16): between 1 and 1.125; 6 * (1 + 3/16): between 1.125 and 1.25
    ties = np.concatenate([block(6 * 17 / 16), block(6 * 19 / 16), block(-6 * 19 / 16)])
    assert write_one_block(array, ties, 1.0)[1].tolist() == [0x38, 0x3A, 0x3A]


def test_small_and_large_blocks(array: Library) -> None:
    tiny = np.float32(6 * 2.0**-10)  # a tie between 0 and the least scale
    rows = np.concatenate([block(tiny, -tiny), block(np.nextafter(tiny, np.float32(1))), block(2688), block(1e30, -1)])
    codes, scales = write_one_block(array, rows, 1.0)
    assert scales.tolist() == [0, 1, 0x7E, 0x7E]
    assert codes[:, :2].tolist() == [[0, 8], [5, 0], [7, 0], [7, 8]]


def test_blocks_of_what_is_no_number(array: Library) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [block(*[nan] * 16), block(0, -0.0), block(nan, 6, -3), block(inf, -inf, 448 * 3, nan), block(-inf)]
    codes, scales = write_one_block(array, np.concatenate(rows), 1.0)
    assert scales.tolist() == [0, 0, 0x38, 0x7E, 0x7E]
    assert (codes[0] & 7 == 0).all()
    assert codes[1:, :4].tolist() == [[0, 8, 0, 0], [0, 7, 13, 0], [7, 15, 5, 0], [15, 0, 0, 0]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e-4])
def test_every_largest_element(array: Library, dtype: str, scale: float) -> None:
    """All 16-bit floats as the largest of a block, beside random ones."""
    rng = np.random.default_rng(0)
    most = np.arange(65536, dtype=np.uint16).view(DTYPES[dtype]).astype(np.float32)
    with np.errstate(all="ignore"):
        x = (most[:, None] * rng.uniform(-1, 1, (65536, 16))).astype(DTYPES[dtype])
        x[:, 5] = most.astype(DTYPES[dtype])
    codes, scales = write_one_block(array, x, float(np.float32(scale)))
    wanted_codes, wanted_scales = reference_nvfp4.quantise(x, np.float32(scale))
    np.testing.assert_array_equal(codes, np.stack([wanted_codes & 15, wanted_codes >> 4], -1).reshape(65536, 16))
    np.testing.assert_array_equal(scales, wanted_scales[:, 0])
