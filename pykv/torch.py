"""The operations as ``torch.ops.pykv.*``, for ``torch.compile`` and all else that goes through torch's dispatcher.

``import pykv.torch`` registers them; nothing is compiled, so one build serves every torch.  The functions of this
module have the signatures of ``pykv``: ``pykv.torch.rms_norm(out, x, w)`` calls the library directly, which is the
quickest way, except while torch compiles: then it puts ``torch.ops.pykv.rms_norm`` into the graph.

Arguments that are written are declared as mutated, so that graphs keep their order; the operations have no derivatives,
and refuse to write a tensor that requires grad.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pykv._schema import REQUIRED, Op, Parameter, all_ops

if TYPE_CHECKING:
    from pykv._hints.torch import *  # noqa: F403  # what is made below

_TYPES = {"int": "int", "float": "float", "bool": "bool", "str": "str", "read": "Tensor"}


def _schema_of(op: Op) -> str:
    """The signature in torch's language; each array that is written has an alias set of its own."""
    sets = iter("abcdefghijklmnop")
    parts: list[str] = []
    for p in op.parameters:
        if p.keyword_only and "*" not in parts:
            parts.append("*")
        if p.kind == "written":
            kind = f"Tensor({next(sets)}!)"
        elif p.kind == "written list":
            kind = f"Tensor({next(sets)}!)[]"
        else:
            kind = _TYPES[p.kind]
        # a number in place of an array becomes a tensor on the way in, and 1.0 is what the library takes None for
        optional = p.optional or (p.may_be_number and p.default is not REQUIRED)
        default = "" if p.default is REQUIRED else f"={_literal(p)}"
        parts.append(f"{kind}{'?' if optional else ''} {p.name}{default}")
    return f"{op.name}({', '.join(parts)}) -> ()"


def _literal(p: Parameter) -> str:
    if p.default is None or p.may_be_number:
        return "None"
    return f'"{p.default}"' if isinstance(p.default, str) else str(p.default)


def _as_tensors(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Numbers that stand for arrays (scales) as tensors on the host: a schema has one type for each parameter."""
    numbers = {p.name for p in op.parameters if p.may_be_number}

    def convert(name: str, value: Any) -> Any:
        if name in numbers and isinstance(value, (int, float)):
            return torch.tensor(float(value), dtype=torch.float32, device="cpu")
        return value

    names = [p.name for p in op.parameters]
    return (
        tuple(convert(name, value) for name, value in zip(names, args, strict=False)),
        {name: convert(name, value) for name, value in kwargs.items() if name != "stream"},
    )


def _fake(*args: Any, **kwargs: Any) -> None:
    """What an operation does to shapes: it returns nothing and allocates nothing."""


def _register(library: torch.library.Library, op: Op) -> Callable[..., None]:
    library.define(_schema_of(op))  # type: ignore[no-untyped-call]
    library.impl(op.name, op.function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"pykv::{op.name}", _fake, lib=library)
    registered = getattr(torch.ops.pykv, op.name)
    direct = op.function

    def function(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            tensors, named = _as_tensors(op, args, kwargs)
            registered(*tensors, **named)
        else:
            direct(*args, **kwargs)

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = direct.__doc__
    function.__wrapped__ = direct  # type: ignore[attr-defined]  # its signature
    return function


# lives as long as its registrations are wanted
_library = torch.library.Library("pykv", "DEF")  # type: ignore[no-untyped-call]
_functions = {name: _register(_library, op) for name, op in all_ops().items()}
globals().update(_functions)
__all__ = sorted(_functions)
