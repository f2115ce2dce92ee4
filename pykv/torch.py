"""The operations as ``torch.ops.pykv.*``, for ``torch.compile`` and all else that goes through torch's dispatcher.

They are registered where torch was imported before pykv, else at its first use of one of them, or by
``import pykv.torch``: as kernels of C, by the stable shim of the torch that is there, or, where something of it is
missing, as functions of Python.  Nothing is compiled, so one build is for every torch.  From then on the functions of
``pykv``, which are in this module too, put ``torch.ops.pykv.*`` into the graph while torch compiles or exports;
otherwise they call the library directly, which is the quickest way.

Arguments that are written are declared as mutated, so that graphs keep their order; the operations have no derivatives,
and refuse to write a tensor that requires grad.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pykv import _C, dispatch
from pykv._schema import REQUIRED, NoneIs, Op, Parameter, all_ops

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
        default = "" if p.default is REQUIRED else f"={_literal(p)}"
        parts.append(f"{kind}{'?' if _is_optional(p) else ''} {p.name}{default}")
    return f"{op.name}({', '.join(parts)}) -> ()"


def _is_optional(p: Parameter) -> bool:
    # a number in place of an array becomes a tensor on the way in, and 1.0 is what the library takes None for
    return p.optional or (p.may_be_number and p.default is not REQUIRED)


def _default(p: Parameter) -> Any:
    return None if p.may_be_number else p.default


def _literal(p: Parameter) -> str:
    default = _default(p)
    return f'"{default}"' if isinstance(default, str) else str(default)


def _as_tensor(value: Any) -> Any:
    """What stands for an array, a number (a scale) or a list of integers, as a tensor on the host.

    For a schema has one type for each parameter.
    """
    if isinstance(value, (int, float)):
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    if isinstance(value, (list, tuple)):
        return torch.tensor(value, dtype=torch.int64, device="cpu")
    return value


def _fake(*args: Any, **kwargs: Any) -> None:
    """What an operation does to shapes: it returns nothing and allocates nothing."""


class _Kernels:
    """What torch calls for an operation: the C function itself, or the Python one where it has to be."""

    def __init__(self) -> None:
        self.in_c: set[str] = set()
        self._in_python: dict[str, torch.library.Library] = {}

    def add(self, op: Op) -> None:
        # the operation itself refuses what autograd would not see
        _library.impl(op.name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
        if _is_plain(op) and _C.implement_in_torch(op.name, _described(op)):
            self.in_c.add(op.name)
            setattr(torch.ops.pykv, op.name, _packet(op))
        else:
            _library.impl(op.name, op.function, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]

    def route(self, op: Op, elsewhere: bool) -> None:
        """Sends calls by way of Python while :mod:`pykv.dispatch` has a choice to make: these keys come first."""
        self._in_python.pop(op.name, None)
        _C.call_directly(getattr(torch.ops.pykv, op.name), not elsewhere)
        if not elsewhere:
            return
        library = torch.library.Library("pykv", "IMPL")  # type: ignore[no-untyped-call]
        for key in ("CPU", "CUDA"):
            library.impl(op.name, op.function, key)  # type: ignore[no-untyped-call]
        self._in_python[op.name] = library

    def work(self) -> bool:
        """Whether C sees and says what it should, in whatever torch this is."""
        out, x = torch.empty(0, 8), torch.empty(0, 8)
        wrong = ((x.detach().requires_grad_(), ValueError, "out: requires grad"), (x.int(), TypeError, "dtype"))
        try:
            torch.ops.pykv.rms_norm(out, x, None)
            for argument, error, text in wrong:
                try:
                    torch.ops.pykv.rms_norm(argument, x, None)
                except error as e:
                    if text not in str(e):
                        return False
                else:
                    return False
        except Exception:
            return False
        return True


def _is_plain(op: Op) -> bool:
    """Whether C can take a call as torch hands it over: tensors and numbers need nothing of Python."""
    if op.has_body:
        return False
    any_tensor = torch.empty(0)
    return all(
        isinstance(p.convert, NoneIs) or (p.convert(any_tensor) is any_tensor and (p.is_array or not p.optional))
        for p in op.parameters
    )


def _described(op: Op) -> list[tuple[str, bool, float | None, bool]]:
    """For C: kind, whether it may be None, what number then counts, whether others have to be positive."""
    described: list[tuple[str, bool, float | None, bool]] = []
    for p in op.parameters:
        number = p.convert if isinstance(p.convert, NoneIs) else None
        sentinel, positive = (number.sentinel, bool(number.positive)) if number else (None, False)
        described.append((p.kind, _is_optional(p), sentinel, positive))
    return described


def _packet(op: Op) -> Any:
    """``torch.ops.pykv.f``, whose calls from Python come to the dispatcher without torch's matching of arguments."""
    names = tuple(p.name for p in op.parameters)
    num_positional = sum(not p.keyword_only for p in op.parameters)
    defaults = {p.name: _default(p) for p in op.parameters if p.default is not REQUIRED}
    return _C.torch_packet(getattr(torch.ops.pykv, op.name), op.name, names, num_positional, defaults)


def _register(op: Op) -> Callable[..., None]:
    """Makes an operation known to torch; returns what calls it there, with numbers for tensors and a stream as here."""
    _library.define(_schema_of(op))  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"pykv::{op.name}", _fake, lib=_library)
    _kernels.add(op)
    registered = getattr(torch.ops.pykv, op.name)
    positional = tuple(p.name for p in op.parameters if not p.keyword_only)
    read = tuple(p.name for p in op.parameters if p.kind == "read")

    def function(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(positional, args, strict=False))
        given.update(kwargs)
        given.pop("stream", None)
        for name in read:
            if name in given:
                given[name] = _as_tensor(given[name])
        # By position: torch.compile takes a keyword `out` for that of its own operations, and wants it contiguous.
        first = []
        for name in positional:
            if name not in given:
                break
            first.append(given.pop(name))
        registered(*first, *args[len(positional) :], **given)

    op.function.dispatch(function)
    return function


def _traced_call(self: Any, *args: Any, **kwargs: Any) -> None:
    """A call of any operation, for those who look into it."""
    if torch.compiler.is_compiling():
        _registered[self.__name__](*args, **kwargs)
    else:
        self(*args, **kwargs)


# lives as long as its registrations are wanted
_library = torch.library.Library("pykv", "DEF")  # type: ignore[no-untyped-call]
_kernels = _Kernels()
_registered = {name: _register(op) for name, op in all_ops().items()}
if _kernels.work():
    dispatch._watch(_kernels.route)
else:
    for _op in all_ops().values():
        _kernels.route(_op, True)
_C.set_traced_call(_traced_call)
globals().update({name: op.function for name, op in all_ops().items()})
__all__ = sorted(_registered)
