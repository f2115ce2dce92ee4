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


def _as_tensor(value: Any) -> Any:
    """A number that stands for an array (a scale) as a tensor on the host: a schema has one type for each parameter."""
    if isinstance(value, (int, float)):
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    return value


def _fake(*args: Any, **kwargs: Any) -> None:
    """What an operation does to shapes: it returns nothing and allocates nothing."""


def _register(library: torch.library.Library, op: Op) -> Callable[..., None]:
    library.define(_schema_of(op))  # type: ignore[no-untyped-call]
    library.impl(op.name, op.function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"pykv::{op.name}", _fake, lib=library)
    registered = getattr(torch.ops.pykv, op.name)
    direct = op.function
    names = tuple(p.name for p in op.parameters)
    numbers = tuple(p.name for p in op.parameters if p.may_be_number)

    def function(*args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            given = dict(zip(names[: len(args)], args, strict=True))
            given.update(kwargs)
            given.pop("stream", None)
            for name in numbers:
                if name in given:
                    given[name] = _as_tensor(given[name])
            registered(**given)
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
