"""What C must refuse with a status and a message: descriptions of arrays, lists and strings that are none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pykv
from pykv._schema import Op, Parameter, all_ops
from pykv._tools.samples import sample

LIBRARY = ctypes.CDLL(str(next(Path(pykv.get_library_dir()).glob("libkernels.so.?"))))
LIBRARY.pykv_last_error.restype = ctypes.c_char_p
CODES = {"f": 2, "i": 0, "u": 1, "b": 6}


class Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class TensorList(ctypes.Structure):
    _fields_ = (("tensors", ctypes.POINTER(ctypes.POINTER(Tensor))), ("size", ctypes.c_int64))


def numbers(values: Any) -> Any:
    return (ctypes.c_int64 * max(1, len(values)))(*values)


def tensor(array: np.ndarray) -> Tensor:
    kind = Type(CODES[array.dtype.kind], 8 * array.itemsize, 1)
    strides = numbers([s // array.itemsize for s in array.strides])
    return Tensor(array.ctypes.data, Device(1, 0), array.ndim, kind, numbers(array.shape), strides, 0)


def arguments(op: Op) -> tuple[list[Any], list[Any]]:
    """Those of a right call, and what they need to stay alive."""
    values, kept = op.c_arguments(sample(op.name)), []
    made: list[Any] = []
    for p in op.parameters:
        value = values[p.name]
        if p.is_array and isinstance(value, (int, float)):
            value = np.array(value, np.float32)
        kept.append(value)
        if p.kind == "written list":
            pointers = (ctypes.POINTER(Tensor) * len(value))(*(ctypes.pointer(tensor(v)) for v in value))
            kept.append(pointers)
            made.append(TensorList(pointers, len(value)))
        elif p.is_array:
            made.append(None if value is None else tensor(value))
        else:
            kinds: dict[str, Callable[[Any], Any]] = {
                "int": ctypes.c_int64,
                "float": ctypes.c_double,
                "bool": ctypes.c_bool,
                "str": lambda text: ctypes.c_char_p(text.encode()),
            }
            made.append(kinds[p.kind](value))
    return made, kept


def options(made: list[Any]) -> ctypes.Structure:
    """A struct of them, behind its size."""
    pointers = [ctypes.cast(ctypes.pointer(m), ctypes.c_void_p) if isinstance(m, Tensor) else m for m in made]
    values = [ctypes.c_void_p() if m is None else m for m in pointers]
    fields = [("struct_size", ctypes.c_size_t), *((f"field_{i}", type(v)) for i, v in enumerate(values))]
    struct = type("Options", (ctypes.Structure,), {"_fields_": fields})
    return struct(ctypes.sizeof(struct), *values)


def call(op: Op, made: list[Any]) -> str:
    """The message of the call, or "" if it went well."""
    passed = [ctypes.byref(m) if isinstance(m, Tensor) else m for m in made]
    if op.name == "paged_attention":
        first = [p.name for p in op.parameters].index("cu_query_lens")
        passed[first:] = [ctypes.byref(options(made[first:]))]
    status = getattr(LIBRARY, f"pykv_{op.name}")(*passed, None)
    return LIBRARY.pykv_last_error().decode() if status else ""


ops = pytest.mark.parametrize("op", [pytest.param(op, id=name) for name, op in all_ops().items()])


def each(op: Op, *kinds: str) -> Iterator[tuple[int, Parameter]]:
    return ((i, p) for i, p in enumerate(op.parameters) if p.kind in kinds)


@ops
def test_the_right_call_is_taken(op: Op) -> None:
    made, kept = arguments(op)
    assert call(op, made) == ""
    del kept


def without_shape(t: Tensor) -> None:
    t.ndim, t.shape = 2, ctypes.POINTER(ctypes.c_int64)()


def wraps_around(t: Tensor) -> None:
    t.ndim, t.shape, t.strides = 2, numbers((2**32, 2**32)), numbers((0, 0))


def wraps_around_to_more(t: Tensor) -> None:
    t.ndim, t.shape, t.strides = 3, numbers((2**61 + 1, 4, 2)), numbers((0, 0, 1))


def fits_only_without_its_elements_size(t: Tensor) -> None:
    t.ndim, t.shape, t.strides = 2, numbers((2**32, 2**31 - 1)), numbers((0, 1))
    t.dtype = Type(2, 32, 1)


def hides_behind_no_elements(t: Tensor) -> None:
    t.ndim, t.shape, t.strides = 3, numbers((2**40, 0, 2**40)), numbers((0, 0, 1))


def reaches_too_far(t: Tensor) -> None:
    t.ndim, t.shape, t.strides = 1, numbers((3,)), numbers((2**62,))


def reaches_too_far_back(t: Tensor) -> None:
    t.ndim, t.shape, t.strides = 1, numbers((2,)), numbers((-(2**63),))


def has_a_negative_size(t: Tensor) -> None:
    t.ndim, t.shape, t.strides = 2, numbers((-(2**63), 0)), numbers((1, 1))


def is_not_aligned(t: Tensor) -> None:
    t.byte_offset += 1


MESSAGES = {
    without_shape: "has 2 dimensions, but its shape is NULL",
    wraps_around: "shape [4294967296, 4294967296] has more bytes than int64 can count",
    wraps_around_to_more: "has more bytes than int64 can count",
    fits_only_without_its_elements_size: "has more bytes than int64 can count",
    hides_behind_no_elements: "has more bytes than int64 can count",
    reaches_too_far: "stride 4611686018427387904 of dimension 0 of shape [3] leads beyond what int64 can count",
    reaches_too_far_back: "leads beyond what int64 can count",
    has_a_negative_size: "dimension 0 is negative: -9223372036854775808",
    is_not_aligned: "must be aligned to its elements of ",
}


@ops
@pytest.mark.parametrize("spoil", MESSAGES, ids=lambda f: f.__name__)
def test_arrays(op: Op, spoil: Callable[[Tensor], None]) -> None:
    for i, p in each(op, "read", "written"):
        made, kept = arguments(op)
        if made[i] is None or (spoil is is_not_aligned and made[i].dtype.bits == 8):
            continue
        spoil(made[i])
        message = call(op, made)
        if not message and p.may_be_number:
            continue  # a scale that a copy does not look at
        assert message.startswith(f"{op.name}: {p.name}: "), (p.name, message)
        assert MESSAGES[spoil] in message
        del kept


@ops
@pytest.mark.parametrize("spoil", MESSAGES, ids=lambda f: f.__name__)
def test_arrays_in_lists(op: Op, spoil: Callable[[Tensor], None]) -> None:
    for i, p in each(op, "written list"):
        made, kept = arguments(op)
        spoil(made[i].tensors[made[i].size - 1].contents)
        message = call(op, made)
        assert message.startswith(f"{op.name}: {p.name}: "), message
        assert MESSAGES[spoil] in message
        del kept


@ops
def test_lists(op: Op) -> None:
    lists = list(each(op, "written list"))
    nowhere, empty = ctypes.POINTER(ctypes.POINTER(Tensor))(), (ctypes.POINTER(Tensor) * 2)()
    for wrong, message in (
        (TensorList(nowhere, 2), "a list of 2 arrays is required, got NULL"),
        (TensorList(nowhere, -1), "must not have a negative size, got -1"),
        (TensorList(empty, 2), "an array is required, got None"),
    ):
        made, kept = arguments(op)
        for i, _ in lists:  # all, for they must be as long as one another
            made[i] = wrong
        assert not lists or call(op, made) == f"{op.name}: {lists[0][1].name}: {message}"
        del kept
    for i, p in lists:
        made, kept = arguments(op)
        size = made[i].size
        made[i] = TensorList(nowhere, size)
        assert call(op, made) == f"{op.name}: {p.name}: a list of {size} arrays is required, got NULL"
        del kept


@ops
def test_strings(op: Op) -> None:
    for i, p in each(op, "str"):
        made, kept = arguments(op)
        made[i] = ctypes.c_char_p(None)
        assert call(op, made) == f"{op.name}: {p.name}: a string is required, got NULL"
        made[i] = ctypes.c_char_p(("€" * 3000).encode())  # cut between characters
        assert call(op, made).startswith(f"{op.name}: {p.name}: must be ")
        del kept


def test_options_of_another_size() -> None:
    op = all_ops()["paged_attention"]
    made, kept = arguments(op)
    first = [p.name for p in op.parameters].index("cu_query_lens")
    given = options(made[first:])
    right = given.struct_size
    for wrong in (0, right - 8, right + 8):
        given.struct_size = wrong
        passed = [ctypes.byref(m) for m in made[:first]]
        assert LIBRARY.pykv_paged_attention(*passed, ctypes.byref(given), None) == 1
        message = f"options: struct_size must lie between {right} and {right}, got {wrong}"
        assert LIBRARY.pykv_last_error().decode() == f"paged_attention: {message}"
    del kept


def test_places_for_results() -> None:
    for name, given in (
        ("pykv_mark_stream", (Device(2, 0), None, None)),
        ("pykv_mark_passed", (None, None)),
        ("pykv_paged_attention_workspace_size", (*map(ctypes.c_int64, (1, 1, 1, 1, 8)), ctypes.c_bool(), 0, None)),
    ):
        assert getattr(LIBRARY, name)(*given) != 0
        assert b"a place for the result is required, got NULL" in LIBRARY.pykv_last_error()
