"""Random calls of operations, each made from one number: ``Case(seed)`` is the same call wherever it is made.

Each begins with the operation's sample (``pykv/_tools/samples``), so that a new one is called without a line here.
Sizes, dtypes, memory layouts, options, ids and values are then changed one after another.  A change after which the
call would be refused is mostly taken back, so that what is left are right calls far from the sample; in half of the
cases one or two arguments become at last what they must not be.  Values are not compared here: the other tests do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from formats import MADE, STRINGS, other_format

from pykv import _C, _schema
from pykv._shapes import _CHECK_ONLY
from pykv._tools.samples import ADDRESSED, sample
from pykv._tools.samples import _sizes as sizes_of_samples

Array = np.ndarray[Any, Any]

DIMENSIONS = {
    "NUM_BLOCKS": (6, 7, 19),
    "BLOCK_SIZE": (1, 4, 5, 16),
    "KV_HEADS": (1, 2, 3),
    "HEADS": (2, 4, 6, 12),
    "HEAD_SIZE": (8, 16, 24, 64, 80, 128, 256),
}
FLOATS = [np.dtype(t) for t in (np.float32, np.float16, ml_dtypes.bfloat16)]
OTHER_DTYPES = [
    np.dtype(t)
    for t in ("f8", "g", ">f4", ">f2", ">i8", ">u4", "i1", "u1", "i2", "u2", "u4", "u8", "i4", "i8", "?", "c8", "c16")
    + ("O", "S3", "U2", "V4", "M8[s]", "f4, i4", ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.int4)
    + (ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu, ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e3m2fn)
] + FLOATS
SPECIAL = [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-40, 3e38, -3e38, 1e-7, 65504.0, 448.0, -0.5]
EXTREMES = [-(2**63), 2**63 - 1, 2**31, -(2**31), 2**31 - 1, 2**62, 2**40, -(2**40), 65536, -1, 0, 1]
WRONG_STRINGS = ["", "fp9", "auto\0x", "x" * 3000, "\ud800", "%s%n", b"auto", None, 3]
WRONG_SCALARS = [
    *(None, True, -1, 0, 1, 2**31, -(2**31), 2**63 - 1, -(2**63), 2**63, 10**400, float("nan"), float("inf"), -0.5),
    *("x", b"x", [], (), {}, object(), 1j, np.float32(2), np.int8(3), np.array(3), np.array([1, 2])),
]
# AddressSanitizer ends a process where memcpy copies between overlapping rows: their contents are undefined, no more.
OVERLAPS = "libasan" not in os.environ.get("LD_PRELOAD", "")
# What is there is what these say (SECURITY.md): they are given right, or not as what they must be.
BELIEVED = ADDRESSED


class Case:
    """A call: ``name``, ``arguments``, and ``changes``, which tells what was made of the sample."""

    def __init__(self, seed: int, op: str | None = None) -> None:
        self.rng = rng = np.random.default_rng(seed)
        names = sorted(_schema.all_ops())
        self.name = op or names[seed % len(names)]
        self.op = _schema.all_ops()[self.name]
        self.changes: list[str] = []
        self.arguments = self._sample()
        if self.name not in BELIEVED:
            changes = ((self._resize, 0.5), (self._dtypes, 0.5), (self._options, 0.4), (self._ids, 0.4))
            for change, chance in (*changes, (self._values, 0.3)):
                for _ in range(int(rng.integers(1, 4))):
                    if rng.random() < chance:
                        self._try(change)
            for name, value in list(self.arguments.items()):
                if isinstance(value, (np.ndarray, list)):
                    self._try(lambda name=name: self._each_array(self._layout, [name]))
        else:  # what says nothing of the memory may be another
            for p in self.op.parameters:
                if p.kind == "bool" and rng.random() < 0.5:
                    self._option(p)
        if rng.random() < 0.5:
            for i in rng.permutation(len(self.op.parameters))[: rng.integers(1, 3)]:
                self._wrong(self.op.parameters[i])

    def _choose(self, values: Any) -> Any:
        return values[self.rng.integers(len(values))]

    def _sample(self) -> dict[str, Any]:
        if self.name in MADE and self.rng.random() < 0.5:
            self.changes.append("made")
            return MADE[self.name](self.rng)
        before = {name: getattr(sizes_of_samples, name) for name in DIMENSIONS}
        try:
            if self.rng.random() < 0.7:
                for name, sizes in DIMENSIONS.items():
                    setattr(sizes_of_samples, name, int(self._choose(sizes)))
            try:
                return sample(self.name)
            except ValueError:  # records of a fixed number of bytes
                for name, size in before.items():
                    setattr(sizes_of_samples, name, size)
                return sample(self.name)
        finally:
            for name, size in before.items():
                setattr(sizes_of_samples, name, size)

    def _try(self, change: Callable[[], None]) -> None:
        arguments, changes = dict(self.arguments), list(self.changes)
        change()
        if self.rng.random() < 0.95 and not self._fits():
            self.arguments, self.changes = arguments, changes

    def _fits(self) -> bool:
        """Whether the call would not be refused.  Its arrays are told without their memory, and nothing runs."""

        def told(value: Any) -> Any:
            if isinstance(value, list):
                return [told(v) for v in value]
            if not isinstance(value, np.ndarray):
                return value
            strides = [s // value.itemsize for s in value.strides]
            return _C.Pointer(value.ctypes.data, list(value.shape), value.dtype, _CHECK_ONLY, 0, strides)

        try:
            self.op.direct(**{name: told(value) for name, value in self.arguments.items()})
        except (TypeError, ValueError, NotImplementedError):
            return False
        return True

    def _each_array(self, make: Any, names: list[str] | None = None) -> None:
        for name, value in self.arguments.items():
            if names is not None and name not in names:
                continue
            if isinstance(value, np.ndarray):
                self.arguments[name] = make(value)
            elif isinstance(value, list):
                self.arguments[name] = [make(v) if isinstance(v, np.ndarray) else v for v in value]

    def _arrays(self) -> list[Array]:
        found: list[Array] = []
        self._each_array(lambda array: (found.append(array), array)[1])
        return found

    def _resize(self) -> None:
        """All axes of one size, and their multiples, become as many times larger, or those of that size another."""
        sizes = sorted({n for array in self._arrays() for n in array.shape if n > 0})
        if not sizes:
            return
        size, to = self._choose(sizes), int(self._choose((0, 1, 2, 5, 8, 17, 64, 130)))
        multiples = to > 0 and self.rng.random() < 0.5

        def new(n: int) -> int:
            return n // size * to if n == size or (multiples and n % size == 0) else n

        def make(array: Array) -> Array:
            shape = [new(n) for n in array.shape]
            if np.prod(shape) > 1 << 20:
                return array
            return np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)

        self._each_array(make)
        if self.rng.random() < 0.5:
            for name, value in self.arguments.items():
                if type(value) is int:
                    self.arguments[name] = new(value)
        self.changes.append(f"sizes {size} -> {to}{' and multiples' if multiples else ''}")

    def _dtypes(self) -> None:
        to, ids = self._choose(FLOATS), np.dtype(self._choose(("i4", "i8")))
        every = self.rng.random() < 0.5

        def make(array: Array) -> Array:
            if array.dtype == np.float32 and (every or self.rng.random() < 0.7):
                return array.astype(to)
            return array.astype(ids) if array.dtype.kind == "i" and array.itemsize > 1 else array

        self._each_array(make)
        self.changes.append(f"dtypes {to}, {ids}")

    def _options(self) -> None:
        """What a call may leave out, or say in another way."""
        for p in self.rng.permutation(len(self.op.parameters))[: self.rng.integers(1, 4)]:
            self._option(self.op.parameters[p])

    def _option(self, p: _schema.Parameter) -> None:
        value = self.arguments.get(p.name, p.default)
        if p.kind == "bool":
            self.arguments[p.name] = not value
        elif p.name.endswith("format"):
            self.arguments[p.name] = other_format(self.rng, value)
        elif p.kind == "str":
            self.arguments[p.name] = self._choose(STRINGS.get(p.name, [value]))
        elif p.kind == "int" and type(value) is int:
            self.arguments[p.name] = int(self._choose((0, 1, value, value + 1, 2 * value, 128)))
        elif p.kind == "float" and isinstance(value, float):
            self.arguments[p.name] = float(self._choose((0.0, 0.5, -1.0, 1e30, float("inf"), float("nan"))))
        elif p.optional and p.name in self.arguments:
            self.arguments[p.name] = None
        else:
            return
        self.changes.append(f"{p.name}={self.arguments[p.name]!r}")

    def _ids(self) -> None:
        bad = self.rng.random() < 0.5

        def make(array: Array) -> Array:
            if array.dtype.kind != "i" or array.itemsize == 1 or array.size == 0:
                return array
            ids = array.copy()
            where = self.rng.random(ids.shape) < 0.3
            some = (
                self.rng.choice(EXTREMES, ids.shape)
                if bad
                else self.rng.integers(-1, min(max(int(ids.max()), 0), 2**20) + 2, ids.shape)
            )
            ids[where] = some.astype(ids.dtype)[where]
            return ids

        self._each_array(make)
        self.changes.append("ids: extremes" if bad else "ids")

    def _values(self) -> None:
        """Numbers that are none, or as large or small as can be, and bytes that are any."""

        def make(array: Array) -> Array:
            if array.dtype.kind == "i" and array.itemsize > 1:
                return array
            made = array.copy()
            where = self.rng.random(made.shape) < self._choose((0.02, 0.3, 1.0))
            if array.dtype.itemsize == 1 and array.dtype.kind in "iu":
                made[where] = self.rng.integers(0, 256, made.shape, np.uint8).view(array.dtype)[where]
            elif array.dtype.kind != "b":
                made[where] = self.rng.choice(SPECIAL, made.shape)[where]
            return made

        self._each_array(make)
        self.changes.append("values")

    def _layout(self, array: Array) -> Array:
        """The same values with gaps between rows, with axes in another order, or backwards."""
        how = self.rng.integers(8)
        if array.ndim == 0 or how > 3:
            return array
        axis = int(self.rng.integers(array.ndim))
        if how == 0:  # a gap at the end of each row
            gap = int(self._choose((1, 3, 8, 16)))
            wide = np.zeros((*array.shape[:-1], array.shape[-1] + gap), array.dtype)
            new = wide[..., : array.shape[-1]]
        elif how == 1:  # every other one
            shape = list(array.shape)
            shape[axis] *= 2
            new = np.zeros(shape, array.dtype)[(slice(None),) * axis + (slice(None, None, 2),)]
        elif how == 2:
            new = np.moveaxis(np.zeros([array.shape[axis], *np.delete(array.shape, axis)], array.dtype), 0, axis)
        else:
            new = np.flip(np.zeros(array.shape, array.dtype), axis)
        new[...] = array
        self.changes.append(f"layout {array.shape} {('gap', 'every other', 'order', 'backwards')[how]} {axis}")
        return new

    def _wrong(self, p: _schema.Parameter) -> None:
        value = self.arguments.get(p.name)
        if isinstance(value, list) and value and self.rng.random() < 0.7:
            i = self.rng.integers(len(value))
            made = list(value)
            made[i], how = self._wrong_array(p, value[i])
        elif isinstance(value, list):
            made, how = self._choose([(value[:-1], "one less"), (value * 2, "twice"), ([], "empty"), (None, "None")])
        elif isinstance(value, np.ndarray) and self.name not in BELIEVED and self.rng.random() < 0.85:
            made, how = self._wrong_array(p, value)
        elif p.kind == "str":
            made = self._choose(WRONG_STRINGS)
            if p.name.endswith("format") and isinstance(value, str) and self.rng.random() < 0.7:
                made = other_format(self.rng, value)
            how = repr(made)[:20]
        else:
            made = self._choose(WRONG_SCALARS)
            if self.name in BELIEVED and isinstance(made, (int, float, np.generic, np.ndarray)):
                made = None
            how = repr(made)[:20]
        self.arguments[p.name] = made
        self.changes.append(f"WRONG {p.name}: {how}")

    def _wrong_array(self, p: _schema.Parameter, array: Any) -> tuple[Any, str]:
        if not isinstance(array, np.ndarray):
            return None, "None"
        how = self._choose(
            ("dtype", "flat", "axis more", "no axis", "size", "no elements", "huge", "misaligned", "odd stride")
            + ("read-only", "overlap", "another", "beside another", "None", "list")
        )
        shape, axis = list(array.shape), int(self.rng.integers(max(1, array.ndim)))
        if how == "dtype":
            dtype = self._choose(OTHER_DTYPES)
            return np.zeros(shape, dtype), f"dtype {dtype}"
        if how == "flat":
            return array.reshape(-1), how
        if how == "axis more":
            return array[(None,) * int(self.rng.integers(1, 12))], how
        if how == "no axis":
            return np.zeros((), array.dtype), how
        if how in ("size", "no elements") and shape:
            shape[axis] = 0 if how == "no elements" else max(0, shape[axis] + int(self._choose((-1, 1, 2, 5))))
            return np.zeros(shape, array.dtype), f"{how} of axis {axis}"
        if how == "huge" and shape and array.size:  # all in the same place: only the numbers are large
            sizes = (2**20, 2**31, 2**40, 2**62 // array.size // array.itemsize)
            # of pairs there may be any number, and they are copied: no memory for them is not an error of the call
            shape[axis] = 2**20 if p.name == "block_mapping" else int(self._choose(sizes))
            first = array[(slice(None),) * axis + (slice(0, 1),)]
            strides = [0 if i == axis else s for i, s in enumerate(array.strides)]
            try:
                return np.lib.stride_tricks.as_strided(first, shape, strides), f"{how} {shape[axis]} of axis {axis}"
            except ValueError:  # more than an array may have
                return None, "None"
        if how == "misaligned" and array.itemsize > 1:
            made: Array = np.ndarray(shape, array.dtype, bytearray(array.nbytes + 64), 1)
            made[...] = array
            return made, how
        if how == "odd stride" and array.itemsize > 1 and shape and array.size:
            memory = bytearray((array.nbytes + 1) * shape[0])
            strides = list(np.zeros(shape, array.dtype).strides)
            strides[0] += 1
            return np.ndarray(shape, array.dtype, memory, 0, strides), how
        if how == "read-only":
            made = array.copy()
            made.flags.writeable = False
            return made, how
        # what is written into elements that overlap is undefined, though never outside of them
        if how == "overlap" and p.kind == "read" and shape and array.size:
            first = np.ascontiguousarray(array)
            strides = [min(s, array.itemsize) for s in first.strides]
            return np.lib.stride_tricks.as_strided(first, shape, strides), how
        others = [other for other in self._arrays() if other is not array]
        if how == "another":
            return self._choose(others or [None]) if OVERLAPS else None, how
        others = [other for other in others if other.nbytes < 1 << 20 and not other.dtype.hasobject]
        if how == "beside another" and OVERLAPS and others and array.size and array.nbytes < 1 << 20:
            return self._beside(array, self._choose(others)), how
        if how == "list":
            return array.tolist(), how
        return None, "None"

    def _beside(self, array: Array, other: Array) -> Array:
        """Both in the same memory, one of them some elements further on: ``other`` is moved there, too."""
        step = max(array.itemsize, other.itemsize)
        at = step * int(self._choose((0, 1, 2, 7)))
        memory = bytearray(max(array.nbytes, other.nbytes + at) + step)
        twins = [np.ndarray(a.shape, a.dtype, memory, start) for a, start in ((array, 0), (other, at))]
        for twin, a in zip(twins, (array, other), strict=True):
            twin[...] = a
        self._each_array(lambda a: twins[1] if a is other else a)
        return twins[0]
