"""What the outputs of a call are like, or why there can be no such call."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from operator import index
from typing import Any

from pykv import _C
from pykv._libraries import numpy_dtype
from pykv._schema import Op, Spec

_MAX_RANK = 8
_CHECK_ONLY = 12  # kDLExtDev: arrays without memory, of which the library looks at shape and dtype


def check(op: Op, arguments: Mapping[str, Any]) -> None:
    """Raises what the call would raise before it runs; arrays are :class:`Spec`."""
    addresses = count(1 << 40, 1 << 40)  # nowhere, and far from one another: no two arrays seem to share memory

    def fake(name: str, value: Any) -> Any:
        if isinstance(value, Spec):
            if len(value.shape) > _MAX_RANK:
                got = len(value.shape)
                raise ValueError(f"{op.name}: {name}: at most {_MAX_RANK} dimensions are supported, got {got}")
            return _C.Pointer(next(addresses), list(value.shape), numpy_dtype(value.dtype), _CHECK_ONLY, 0)
        return [fake(name, v) for v in value] if isinstance(value, list) else value

    op.direct(**{name: fake(name, value) for name, value in arguments.items()})


def check_made(op: Op, made: Mapping[str, Spec], arguments: Mapping[str, Any]) -> None:
    """:func:`check` with the outputs that a call leaves out."""
    try:
        check(op, {**arguments, **made})
    except (TypeError, ValueError) as error:
        raise of_inputs(op, made, arguments, error) from None


def outputs(op: Op, arguments: Mapping[str, Any]) -> dict[str, Spec]:
    """The outputs that a call leaves out, where :meth:`Op.bind` had nothing to say.

    Raises:
        ValueError, TypeError: what the library says of the arguments from which no outputs follow.
    """
    try:
        made = op.infer(arguments)
        error: Exception = ValueError("an output would have a negative size, or one that is too large")
        if all(map(_is_shape, made.values())):
            return made
    except Exception as refused:
        if str(refused).startswith(f"{op.name}:"):
            raise
        error = refused
    guessed = _guessed(op, arguments)
    try:
        known = guessed | dict(arguments)
        check(op, {name: value for name, value in known.items() if not (value is True and name in op.rules)})
    except (TypeError, ValueError) as refused:
        raise of_inputs(op, guessed, arguments, refused) from error
    raise ValueError(f"{op.name}: arguments do not fit each other: {error}") from error


def of_inputs(op: Op, made: Mapping[str, Spec], arguments: Mapping[str, Any], error: Exception) -> Exception:
    """The error itself, or where it is about an output that a call leaves out, one that says what that is made for."""
    for name in made:
        head = f"{op.name}: {name}: "
        if not str(error).startswith(head):
            continue
        asked = _Asked({p.name: p.default for p in op.parameters} | dict(arguments))
        with suppress(Exception):
            op.rules[name].make(asked)
        sources = ", ".join(p.name for p in op.parameters if p.name in asked.names and p.name in arguments)
        return type(error)(f"{op.name}: {name}, made for {sources}: {str(error).removeprefix(head)}")
    return error


class _Asked(dict[str, Any]):
    """Arguments that remember which of them were asked for."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__(arguments)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _is_shape(spec: Spec) -> bool:
    return all(0 <= index(n) < 1 << 63 for n in spec.shape)


def _guessed(op: Op, arguments: Mapping[str, Any]) -> dict[str, Spec]:
    """Outputs for a check that comes to what is wrong: those of which nothing follows are like the first array."""
    known = {p.name: p.default for p in op.parameters} | dict(arguments)
    guessed = {}
    for p in op.parameters:
        if p.name in op.rules and not p.optional:
            guessed[p.name] = next(value for value in arguments.values() if isinstance(value, Spec))
            with suppress(Exception):
                spec = op.rules[p.name].make(known)
                guessed[p.name] = spec if _is_shape(spec) else guessed[p.name]
    return guessed
