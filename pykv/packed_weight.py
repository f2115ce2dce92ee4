"""One form for weights of all kinds: codes, with a scale and a minimum for each row and group of columns.

Where what lies is said in ``src/kernels/gemm/packed_weight.h``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from pykv._libraries import array_like, spec_of

Bytes = npt.NDArray[np.uint8]
Host = npt.NDArray[Any]

HEADER: Final = 256  # bytes
WORDS: Final = ["int32", "uint32"]  # dtypes of words of codes
_MAGIC: Final = b"pykv packed 1\n"
_TABLE_AT, _GLOBAL_SCALE_AT, _UNIT = 128, 192, 64
_TOO_LARGE: Final = 2.0**118  # for a scale: kernels multiply it by up to 512
_BITS: Final = {"u2": 4, "u3": 4, "u4": 4, "u5": 8, "u6": 8, "u8": 8, "e4m3": 8, "t4": 4}  # as stored
_BYTES: Final = {"none": 0, "zero": 1, "e4m3": 1, "e8m0": 1, "f16u8": 1, "f16i8": 1, "f16": 2, "bf16": 2, "f32": 4}


@dataclass(frozen=True)
class PackedWeight:
    """A weight ``[n, k]`` for :func:`pykv.packed_gemm`.

    Attributes:
        data: ``[bytes]`` uint8, of any array library: header and all sections.  It can be saved, mapped and copied to a
            device as it is; CPU and CUDA read the same bytes.  ``[E, bytes]`` of :func:`pykv.gemm.stack_packed`.
        format: what it is, as text; the header holds it, too.
    """

    data: Any
    format: str

    @property
    def shape(self) -> tuple[int, int]:
        """``(n, k)``."""
        found = re.search(r"\.n(\d+)\.k(\d+)\.", self.format)
        if not found:
            raise ValueError(f"format: no rows and columns in {self.format!r}")
        return int(found[1]), int(found[2])

    def to(self, like: Any) -> PackedWeight:
        """The same weight as an array of the library of ``like``, an array or a module, on its device."""
        return PackedWeight(array_like(host(self.data), "uint8", like), self.format)

    @staticmethod
    def of(data: Any) -> PackedWeight:
        """What was saved: ``PackedWeight.of(numpy.load("w.npy", mmap_mode="r"))``; a stack ``[E, bytes]``, too.

        Raises:
            ValueError: there is no header of this version, or those of a stack differ.
            TypeError: it is no array of bytes.
        """
        array = an_array("data", data)
        rank = len(array.shape)
        if rank not in (1, 2):
            raise ValueError(f"data: must have 1 or 2 dimensions, got shape {list(array.shape)}")
        octets = checked("data", array[..., :HEADER], ["uint8"], (None,) * rank)
        headers = [row.tobytes() for row in np.atleast_2d(octets)]
        if not headers or len(headers[0]) < HEADER or not headers[0].startswith(_MAGIC):
            raise ValueError("data: does not begin with the header of a packed weight")
        if any(header[:_TABLE_AT] != headers[0][:_TABLE_AT] for header in headers):
            raise ValueError("data: weights of a stack must have one format")
        text = headers[0][len(_MAGIC) : _TABLE_AT].rstrip(b"\0")
        if not text.isascii() or not text.decode().isprintable():
            raise ValueError(f"data: its header names no format, but {text!r}")
        return PackedWeight(data, text.decode())


class Factor(NamedTuple):
    """Scales or minima: how they are stored, ``[n, groups]``, and those of 256 columns, ``[n, blocks]`` float16."""

    kind: str
    values: Host
    of_256: Host | None = None

    def in_float32(self) -> Host:
        if self.kind == "bf16":
            return (self.values.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return self.values.astype(np.float32)


def assemble(
    codes: Host,
    kind: str,
    scales: Factor,
    minima: Factor | None,
    group_size: int,
    *,
    columns: npt.NDArray[np.int64] | None = None,
    table: Host | None = None,
    global_scale: float = 1.0,
) -> PackedWeight:
    """Put the sections together.

    Args:
        codes: ``[n, k]`` uint8, with all columns in groups of ``group_size``, the last of which may be shorter.
        kind: of codes.
        scales: for each row and group.
        minima: the same; ``None``: zeros.
        group_size: any; where it is no multiple of 16, groups are padded.
        columns: those of the groups in order, ``-1`` for padding, where that is not the order of ``codes``.
        table: the 16 numbers of kind ``t4``.
        global_scale: multiplies all scales.

    Raises:
        ValueError: there is NaN among codes or scales of one byte, which kernels take for numbers; or a scale that is
            too large for what kernels multiply it by; or there are not as many scales or minima as groups.
    """
    if (kind == "e4m3" and _has_nan_e4m3(codes)) or (scales.kind == "e4m3" and _has_nan_e4m3(scales.values)):
        raise ValueError(f"{'weight' if kind == 'e4m3' else 'scales'}: must not hold NaN")
    if scales.kind == "e8m0" and (scales.values == 0xFF).any():
        raise ValueError("scales: must not hold NaN, which 255 is")
    if scales.kind in ("f32", "bf16"):
        sizes = np.abs(scales.in_float32())
        if (too_large := np.isfinite(sizes) & (sizes >= _TOO_LARGE)).any():
            raise ValueError(f"scales: must be less than 2**118 = {_TOO_LARGE:.3g}, got {sizes[too_large].max():.3g}")
    n, k = codes.shape
    groups = -(-(k if columns is None else len(columns)) // group_size)
    for name, factor in (("scales", scales), ("zero points", minima)):
        if factor and groups and factor.values.shape != (n, groups):
            raise ValueError(f"{name}: must have {n} rows of {groups} groups, got {list(factor.values.shape)}")
    if group_size % 16 and group_size < k:  # each group padded to a multiple of 16
        step = -(-group_size // 16) * 16
        places = np.arange(-(-k // group_size))[:, None] * group_size + np.arange(step)
        inside = (np.arange(step) < group_size) & (places < k)
        columns, group_size = np.where(inside, places, -1).reshape(-1), step
    count = k if columns is None else len(columns)
    padded = -(-count // _UNIT) * _UNIT
    group_size = max(16, min(-(-group_size // 16) * 16, padded))
    if columns is not None:
        columns = np.concatenate([columns, np.full(padded - count, -1)])
    rows = -(-n // 32) * 32
    filled = np.zeros((rows, padded), np.uint8)
    if columns is None:
        filled[:n, :k] = codes
    else:
        filled[:n] = np.where(columns >= 0, codes[:, columns] if k else np.uint8(0), np.uint8(0))
    groups = -(-padded // group_size)
    sections = [_tiles_of_4(filled) if _BITS[kind] == 4 else _tiles_of_8(filled)]
    for factor in (scales, minima):
        sections.append(_by_32_rows(factor.values, rows, groups) if factor else b"")
        of_256 = factor.of_256 if factor else None
        sections.append(b"" if of_256 is None else _by_32_rows(of_256, rows, -(-padded // 256)))
    sections.append(b"" if columns is None else columns.astype("<i4").tobytes())
    fields = [kind, scales.kind, minima.kind if minima else "none", f"n{n}", f"k{k}", f"g{group_size}", f"p{padded}"]
    text = ".".join(fields + ["columns"] * (columns is not None))
    header = bytearray(HEADER)
    header[: len(_MAGIC) + len(text)] = _MAGIC + text.encode()
    numbers = np.concatenate([np.zeros(16) if table is None else table, [global_scale]]).astype("<f4")
    header[_TABLE_AT : _GLOBAL_SCALE_AT + 4] = numbers.tobytes()
    whole = bytearray().join([bytes(header), *(s + b"\0" * (-len(s) % 256) for s in sections)])
    return PackedWeight(np.frombuffer(whole, np.uint8), text)


def _has_nan_e4m3(codes: Host) -> bool:
    return bool(((codes & 0x7F) == 0x7F).any())


def _words(tiles: Host) -> bytes:
    """[16 rows][64 columns][...][g][c][j] words: lane (g, c) stands at place 8 c + g."""
    return np.ascontiguousarray(np.moveaxis(tiles, -3, -2)).tobytes()


def _tiles(codes: Bytes) -> Host:
    """[16 rows][64 columns][g][c][j][e][h][half]."""
    rows, columns = codes.shape
    shape = (rows // 16, 2, 8, columns // _UNIT, 4, 4, 2, 2)  # half, g, unit, j, c, h, e
    return codes.reshape(shape).transpose(0, 3, 2, 5, 4, 7, 6, 1)


def _tiles_of_4(codes: Bytes) -> bytes:
    nibbles = _tiles(codes).reshape(codes.shape[0] // 16, codes.shape[1] // _UNIT, 8, 4, 4, 4, 2)
    return _words(np.ascontiguousarray(nibbles[..., 0] | nibbles[..., 1] << 4).view("<u4")[..., 0])


def _tiles_of_8(codes: Bytes) -> bytes:
    planes = np.moveaxis(_tiles(codes), -2, 2)  # [16 rows][64 columns][h][g][c][j][e][half]
    return _words(np.ascontiguousarray(planes).reshape(*planes.shape[:-2], 4).view("<u4")[..., 0])


def _by_32_rows(values: Host, rows: int, groups: int) -> bytes:
    """[32 rows][groups][g][r][half]; what is missing is zero."""
    n, given = values.shape
    filled = np.zeros((rows, groups), values.dtype)
    filled[:n, : min(given, groups)] = values[:, :groups]
    return np.ascontiguousarray(filled.reshape(rows // 32, 2, 2, 8, groups).transpose(0, 4, 3, 1, 2)).tobytes()


def _stored(weight: PackedWeight) -> tuple[list[str], int, int, int]:
    """Kinds of codes, scales and minima; rows and columns with those of padding; columns of a group."""
    *kinds, n, _, group, padded = weight.format.split(".")[:7]
    return kinds, -(-int(n[1:]) // 32) * 32, int(padded[1:]), int(group[1:])


def in_order_of_rows(weight: PackedWeight, order: Host) -> PackedWeight:
    """All rows of a weight in another order, on the host; what is padded stays behind them."""
    (kind, scales, minima), rows, columns, group = _stored(weight)
    whole = np.concatenate([order, np.arange(len(order), rows)])
    data = np.array(host(weight.data))
    at = HEADER

    def take(shape: tuple[int, ...], axes: tuple[int, ...], nibbles: bool = False) -> None:
        """The next section, as bytes of this shape: the axes together number its rows."""
        nonlocal at
        section = data[at : at + int(np.prod(shape))].reshape(shape)
        at += -(-section.size // 256) * 256
        parts = np.stack([section & 15, section >> 4], axis=-1) if nibbles else section
        front = np.moveaxis(parts, axes, range(len(axes)))
        moved = np.moveaxis(front.reshape(rows, -1)[whole].reshape(front.shape), range(len(axes)), axes)
        section[:] = moved[..., 0] | moved[..., 1] << 4 if nibbles else moved

    if _BITS[kind] == 4:  # [c][g][j][byte], and the half of a byte
        take((rows // 16, columns // _UNIT, 4, 8, 4, 4), (0, 6, 3), nibbles=True)
    else:  # [plane][c][g][j][e][half]
        take((rows // 16, columns // _UNIT, 2, 4, 8, 4, 2, 2), (0, 7, 4))
    for factor in (scales, minima):
        sizes = [(-(-columns // group), _BYTES[factor])]
        if factor in ("f16u8", "f16i8"):
            sizes.append((-(-columns // 256), 2))
        for groups, size in sizes:
            take((rows // 32, groups, 8, 2, 2, size), (0, 3, 4, 2))
    return PackedWeight(data, weight.format)


def host(array: Any) -> Host:
    """An array of any library in NumPy; dtypes that NumPy does not have as the unsigned integers of their size."""
    if isinstance(array, np.ndarray):
        return array.view(f"u{array.itemsize}") if array.dtype.name in _SMALL else array
    if hasattr(array, "detach"):  # torch
        array = array.detach().cpu().contiguous()
        if str(array.dtype).removeprefix("torch.") in _SMALL:
            return host(array.view(getattr(__import__("torch"), {1: "uint8", 2: "int16"}[array.element_size()])))
        return np.asarray(array.numpy())
    if hasattr(array, "get"):  # CuPy
        return host(array.get())
    if hasattr(array, "__array__"):  # JAX
        return host(np.asarray(array))
    return np.from_dlpack(array)


_SMALL: Final = {"bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"}


def checked(name: str, array: Any, dtypes: Sequence[str], shape: Sequence[int | None] | None) -> Host:
    """:func:`host` of an array that must have one of these dtypes, and this shape.  ``None``: any shape, or size.

    Raises:
        TypeError: it is no array, or has another dtype.
        ValueError: it has another shape.
    """
    array = an_array(name, array)
    given = spec_of(array)
    if given.dtype not in dtypes:
        others, last = ", ".join(dtypes[:-1]), dtypes[-1]
        raise TypeError(f"{name}: dtype must be {f'{others} or {last}' if others else last}, got {given.dtype}")
    if shape is not None and (
        len(given.shape) != len(shape)
        or any(wanted not in (None, size) for wanted, size in zip(shape, given.shape, strict=True))
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: must have shape [{wanted}], got {list(given.shape)}")
    if getattr(array, "is_meta", False):
        raise ValueError(f"{name}: must be on a device, got an array of torch on meta")
    return host(array)


def an_array(name: str, array: Any) -> Any:
    """The array as it is, or in NumPy what has no more than ``__dlpack__``.

    Raises:
        TypeError: it is no array.
    """
    if hasattr(array, "dtype") and hasattr(array, "shape"):
        return array
    if hasattr(array, "__dlpack__"):  # pykv.from_pointer
        return np.from_dlpack(array)
    raise TypeError(f"{name}: must be an array, got {type(array).__name__}")


def in_float16(scales: Factor) -> Factor:
    """Scales of bfloat16 as float16, for which Hopper has quicker kernels, where float16 holds all of them exactly."""
    if scales.kind != "bf16":
        return scales
    numbers = scales.in_float32()
    with np.errstate(over="ignore"):
        halves = numbers.astype(np.float16)
    return Factor("f16", halves) if (halves == numbers).all() else scales


def in_bfloat16(weight: PackedWeight) -> PackedWeight:
    """A weight with its scales of float16 as bfloat16, where that holds all of them exactly; others as they are."""
    (kind, scales, _), rows, columns, group = _stored(weight)
    if scales != "f16":
        return weight
    at = HEADER + -(-rows * columns * _BITS[kind] // 8 // 256) * 256
    data = np.array(host(weight.data))
    section = data[at : at + 2 * rows * -(-columns // group)]
    wide = section.view(np.float16).astype(np.float32).view(np.uint32)
    if (wide & 0xFFFF).any():
        return weight
    section[:] = (wide >> 16).astype(np.uint16).view(np.uint8)
    text = weight.format.replace(".f16.", ".bf16.", 1)
    data[len(_MAGIC) : _TABLE_AT] = np.frombuffer(text.encode().ljust(_TABLE_AT - len(_MAGIC), b"\0"), np.uint8)
    return PackedWeight(data, text)


def whole(name: str, number: Any) -> int:
    """An integer of Python or NumPy."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"{name}: must be an integer, got {type(number).__name__}")
    return operator.index(number)


def plain_scales(name: str, scales: Any, shape: Sequence[int | None] | None = None) -> Factor:
    """Scales of float16, bfloat16 or float32 as they are."""
    kinds = {"float16": "f16", "bfloat16": "bf16", "float32": "f32"}
    values = checked(name, scales, list(kinds), shape)
    return Factor(kinds[spec_of(scales).dtype], values)


def integers(
    codes: Host, scales: Factor, minima: Factor | None, group_size: int, bits: int, **more: Any
) -> PackedWeight:
    """:func:`assemble` for ``code - 2 ** (bits - 1)``, with codes moved to the middle of the bits that hold them."""
    stored = 4 if bits <= 4 else 8
    moved = codes.astype(np.uint8) + np.uint8((1 << (stored - 1)) - (1 << (bits - 1)))
    return assemble(moved, f"u{bits}", in_float16(scales), minima, group_size, **more)


def zero_points(zeros: Host, bits: int, scales: Factor) -> Factor | None:
    """``[n, groups]`` integers that codes have too much; nothing where all are in the middle.

    They are bytes, up to 16 where codes have up to four bits.  That of an 8-bit GPTQ weight may be 256: then minima are
    numbers.
    """
    if (zeros == 1 << (bits - 1)).all():
        return None
    if zeros.size and zeros.min() >= 0 and zeros.max() <= (16 if bits <= 4 else 255):
        return Factor("zero", zeros.astype(np.uint8))
    return Factor("f32", -scales.in_float32() * zeros.astype(np.float32))


def float32(name: str, values: Any) -> Host:
    """A number, or floats of any library and size."""
    if isinstance(values, (int, float)) and not isinstance(values, bool):
        return np.full(1, values, np.float32)
    if values is None or isinstance(values, (str, bool)):
        raise TypeError(f"{name}: must be a number or an array, got {type(values).__name__}")
    values = an_array(name, values)
    dtype, plain = spec_of(values).dtype, host(values)
    if dtype == "bfloat16":
        return (plain.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype not in ("float16", "float32", "float64"):
        raise TypeError(f"{name}: dtype must be float32, float16 or bfloat16, got {dtype}")
    return plain.astype(np.float32)
