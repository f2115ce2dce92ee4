from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache import inputs, reference
from cache.inputs import DTYPES
from libraries import Library

import pykv

KINDS = ["fp8", "fp8_e4m3", "fp8_e5m2"]
View = Callable[[Any], Any]


def same(x: Any) -> Any:
    return x


def dequantise(codes: np.ndarray, scale: np.float32, kind: str, dtype: np.dtype[Any]) -> np.ndarray:
    with np.errstate(all="ignore"):
        return (codes.view(reference.FP8[kind]).astype(np.float32) * scale).astype(dtype)


def check(
    array: Library,
    shape: tuple[int, ...],
    *,
    dtype: str = "bfloat16",
    kind: str = "fp8",
    scale: np.float32 = np.float32(0.37),  # noqa: B008
    as_scale: Callable[[Any], Any] = float,
    take_input: View = same,
    take_output: View = same,
    typed: bool = False,
) -> None:
    """Both directions; ``take_*`` take the arrays from memory of that shape."""
    rng = np.random.default_rng(0)
    code_type = np.dtype(reference.FP8[kind] if typed else np.uint8)

    source = inputs.floats(rng, shape, DTYPES[dtype])
    expected = inputs.bits(rng, shape, np.dtype(np.uint8))
    actual = array.output(expected.view(code_type))
    take_output(expected)[...] = reference.quantise(take_input(source), scale, kind)
    pykv.convert_fp8(
        inputs.view(actual, take_output), inputs.view(array.output(source), take_input), as_scale(scale), kind
    )
    np.testing.assert_array_equal(array.numpy(actual).view(np.uint8), expected)

    codes = inputs.bits(rng, shape, np.dtype(np.uint8))
    back = np.zeros(shape, DTYPES[dtype])
    actual = array.output(back)
    take_output(back)[...] = dequantise(take_input(codes), scale, kind, back.dtype)
    pykv.convert_fp8(
        inputs.view(actual, take_output),
        inputs.view(array.output(codes.view(code_type)), take_input),
        as_scale(scale),
        kind,
    )
    np.testing.assert_array_equal(array.numpy(actual).astype(np.float32), back.astype(np.float32))  # NaN equals NaN


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("typed", [False, True])
def test_directions(array: Library, dtype: str, kind: str, typed: bool) -> None:
    check(array, (5, 7, 64), dtype=dtype, kind=kind, typed=typed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (3,), (8,), (1000,), (4097,), (2, 3, 4, 5, 6), (1, 1, 16), (70000, 3)])
def test_shapes(array: Library, shape: tuple[int, ...], dtype: str) -> None:
    check(array, shape, dtype=dtype)


STRIDED: dict[str, View] = {
    "every other row": lambda m: m[::2],
    "columns": lambda m: m[..., 8:40],
    "columns, not aligned": lambda m: m[..., 3:41],
    "every other element": lambda m: m[..., ::2],
    "axes in another order": lambda m: m.swapaxes(0, 2),
    "rows and columns swapped": lambda m: m.swapaxes(2, 3),
    "pieces of everything": lambda m: m[1:, :3, ::2, 8:24],
}


@pytest.mark.parametrize("name", STRIDED)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strides(array: Library, name: str, dtype: str) -> None:
    take = STRIDED[name]
    shape = (6, 4, 6, 64)
    check(array, shape, dtype=dtype, take_input=take, take_output=take)
    cube = (6, 6, 6, 6)
    if "swapped" in name or "order" in name:
        check(array, cube, dtype=dtype, take_input=take)
        check(array, cube, dtype=dtype, take_output=take)


def test_broadcast_input(array: Library) -> None:
    row = np.arange(64, dtype=np.float32)
    wide = np.lib.stride_tricks.as_strided(row, (5, 64), (0, 4))
    out = array.output(np.zeros((5, 64), np.uint8))
    pykv.convert_fp8(out, array.output(wide))
    np.testing.assert_array_equal(array.numpy(out), reference.quantise(wide, 1.0, "fp8"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1.0, 1 / 3, 300.0, 1e-30, 3e38])
def test_scales(array: Library, kind: str, scale: float) -> None:
    for dtype in DTYPES:
        check(array, (256, 256), kind=kind, dtype=dtype, scale=np.float32(scale))


@pytest.mark.parametrize("where", ["host", "with the arrays"])
def test_scale_as_an_array(array: Library, where: str) -> None:
    check(array, (9, 64), as_scale=np.atleast_1d if where == "host" else lambda x: array.input(np.atleast_1d(x)))


def test_every_code_survives(array: Library) -> None:
    """To the wider type and back: the same codes, NaN in its one form."""
    for kind in KINDS:
        codes = np.arange(256, dtype=np.uint8)
        for dtype in DTYPES.values():
            wide, back = array.output(np.zeros(256, dtype)), array.output(codes)
            pykv.convert_fp8(wide, array.input(codes), 1.0, kind)
            pykv.convert_fp8(back, wide, 1.0, kind)
            values = codes.view(reference.FP8[kind]).astype(np.float32)
            finite = np.isfinite(values)
            np.testing.assert_array_equal(array.numpy(back)[finite], codes[finite])
            assert np.isnan(array.numpy(back).view(reference.FP8[kind]).astype(np.float32)[np.isnan(values)]).all()


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 64)])
def test_nothing_to_do(array: Library, shape: tuple[int, ...]) -> None:
    check(array, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("apart", [0, 16, 3])
def test_other_shapes_of_equal_blocks(array: Library, dtype: str, apart: int) -> None:
    """Packed key caches, whose chunks depend on the dtype: blocks are taken as they lie, also where they lie apart."""
    blocks, heads, head_size, block_size = 5, 3, 32, 8
    size, x = heads * head_size * block_size, 16 // DTYPES[dtype].itemsize
    rng = np.random.default_rng(0)
    wide = inputs.floats(rng, (blocks, size + apart), DTYPES[dtype])
    codes = inputs.bits(rng, (blocks, size + apart), np.dtype(np.uint8))

    def packed(m: Any, x: int) -> Any:
        return m[:, :size].reshape(blocks, heads, head_size // x, block_size, x) if not apart else m[:, apart:]

    shaped: tuple[View, View] = (lambda m: packed(m, x), lambda m: packed(m, 16)[:, None])
    to_codes, to_wide = array.output(codes), array.output(wide)
    pykv.convert_fp8(inputs.view(to_codes, shaped[1]), inputs.view(array.output(wide), shaped[0]), 0.37)
    pykv.convert_fp8(inputs.view(to_wide, shaped[0]), inputs.view(array.output(codes), shaped[1]), 0.37)
    part = slice(apart, size + apart)
    expected_codes, expected_wide = codes.copy(), wide.copy()
    expected_codes[:, part] = reference.quantise(wide[:, part], np.float32(0.37), "fp8")
    expected_wide[:, part] = dequantise(codes[:, part], np.float32(0.37), "fp8", wide.dtype)
    np.testing.assert_array_equal(array.numpy(to_codes), expected_codes)
    got, wanted = array.numpy(to_wide).astype(np.float32), expected_wide.astype(np.float32)
    np.testing.assert_array_equal(got, wanted)


F, B = np.zeros((4, 8), np.float16), np.zeros((4, 8), np.uint8)


@pytest.mark.parametrize(
    ("output", "input", "kind", "error", "message"),
    [
        (B, F[:3], "fp8", ValueError, r"input: must have the shape of output, \[4, 8\], or as many .* got \[3, 8\]"),
        (B, np.zeros((4, 2, 8), np.float16)[..., ::2], "fp8", ValueError, "input: must have the shape of output"),
        (B, np.zeros((4, 9), np.float16), "fp8", ValueError, "input: must have the shape of output"),
        (B, F, "auto", ValueError, "kv_dtype: must be 'fp8', 'fp8_e4m3' or 'fp8_e5m2', got 'auto'"),
        (F, F, "fp8", TypeError, "output: dtype must be float8_e4m3fn or uint8"),
        (B, B, "fp8", TypeError, "output: dtype must be float32 or float16 or bfloat16, got uint8"),
        (B, np.zeros((4, 8), np.int32), "fp8", TypeError, "input: dtype must be float32 or float16 or bfloat16"),
        (None, F, "fp8", TypeError, "output: an array is required"),
    ],
)
def test_errors(output: Any, input: Any, kind: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^convert_fp8: {message}"):
        pykv.convert_fp8(output, input, 1.0, kind)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2"])
def test_every_value_by_many_scales(array: Library, dtype: str, kind: str) -> None:
    """Much at once may be worked out another way (the CPU's tables) than the reference's division."""
    values = np.arange(65536, dtype=np.uint16).view(DTYPES[dtype])
    source = array.output(values)
    rng = np.random.default_rng(0)
    scales = [1.0, 0.37, 2.0**-9, 2.0**-20, 2.0**30, 2.0**-130, 448.0, *2.0 ** rng.uniform(-18, 18, 60)]
    for scale in np.array(scales, np.float32):
        actual = array.output(np.zeros(65536, np.uint8))
        pykv.convert_fp8(actual, source, float(scale), kind)
        np.testing.assert_array_equal(array.numpy(actual), reference.quantise(values, scale, kind), f"by {scale!r}")
