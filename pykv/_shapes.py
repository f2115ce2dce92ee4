"""What the outputs of a call are like, or why there can be no such call."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import count
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


def outputs(op: Op, arguments: Mapping[str, Any]) -> dict[str, Spec]:
    """The outputs that a call leaves out, where :meth:`Op.bind` had nothing to say.

    Raises:
        ValueError, TypeError: what the library says of the arguments from which no outputs follow.
    """
    try:
        made = op.infer(arguments)
        error: Exception = ValueError("an output would have a negative size")
        if all(map(_is_shape, made.values())):
            return made
    except Exception as refused:
        if str(refused).startswith(f"{op.name}:"):
            raise
        error = refused
    check(op, {name: value for name, value in (_guessed(op, arguments) | dict(arguments)).items() if value is not True})
    raise ValueError(f"{op.name}: arguments do not fit each other: {error}") from error


def _is_shape(spec: Spec) -> bool:
    return all(n >= 0 for n in spec.shape)


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
