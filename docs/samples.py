"""The sample of an operation as a program: arrays of its shapes and dtypes, and the call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pykv._schema import Op
from pykv._tools.samples import ADDRESSED, sample

WIDTH = 90
WORDS = 1 << 24  # integers beyond are codes, packed


def example(op: Op) -> str | None:
    """The program; none of an operation that takes addresses.

    Most take any numbers.  Where they do not, the sample's own are shown.
    """
    if op.name in ADDRESSED:
        return None
    program = _program(op, _made)
    try:
        exec(program, {})
    except ValueError:
        return _program(op, _as_it_is)
    return program


def _program(op: Op, made: Callable[[Any, bool], str]) -> str:
    given = sample(op.name)
    written = {name for name, rule in op.rules.items() if not rule.is_scratch}
    arrays = [f"{name} = {made(value, name in written)}" for name, value in given.items() if _is_array(value)]
    random = ["rng = np.random.default_rng(0)"] if any("rng." in line for line in arrays) else []
    arguments, by_position = [], True
    for p in op.parameters:
        by_position &= p.name in given and not p.keyword_only  # what follows one that is left out goes by name
        if p.name in given:
            value = p.name if _is_array(given[p.name]) else _literal(given[p.name])
            arguments.append(value if by_position else f"{p.name}={value}")
    return "\n".join(["import numpy as np", "import pykv", "", *random, *arrays, *_call(f"pykv.{op.name}", arguments)])


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _call(function: str, arguments: Iterable[str]) -> list[str]:
    lines, line = [], f"{function}("
    for argument in arguments:
        if len(line) + len(argument) > WIDTH:
            lines.append(line.rstrip())
            line = "    "
        line += f"{argument}, "
    return [*lines, line.removesuffix(", ") + ")"]


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, list))


def _made(value: Any, is_written: bool) -> str:
    if isinstance(value, list):
        return f"[{_made(value[0], is_written)} for _ in range({len(value)})]"
    shape, dtype = value.shape, "bool" if value.dtype == bool else f"np.{value.dtype.name}"
    if is_written:
        return f"np.empty({shape}, {dtype})"
    if value.dtype.kind == "f":
        made = f"rng.random({shape}, np.float32)"
        return made if value.dtype == np.float32 else f"{made}.astype({dtype})"
    low, high = int(value.min()), int(value.max())
    if low == high:
        return f"np.full({shape}, {low}, {dtype})" if low else f"np.zeros({shape}, {dtype})"
    if len(shown := f"np.array({value.tolist()}, {dtype})") < WIDTH:
        return shown
    if value.dtype == bool:
        return f"rng.random({shape}) < 0.5"
    return f"rng.integers({f'{low}, {high + 1}' if high < WORDS else '1 << 31'}, size={shape}, dtype={dtype})"


def _as_it_is(value: Any, is_written: bool) -> str:
    if is_written or isinstance(value, list):
        return _made(value, is_written)
    shown = value.astype(np.float64).round(2) if value.dtype.kind == "f" else value
    return f"np.array({shown.tolist()}, np.{value.dtype.name})".replace("np.bool", "bool")
