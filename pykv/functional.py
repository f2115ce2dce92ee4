"""Operations that make their outputs: ``y = pykv.functional.rms_norm(x, weight)``.

Every operation that has an output (an array it writes and does not read) stands here under its own name, without the
parameters of its outputs: these are allocated through the library of the first array and returned, several as a tuple
in the order of the operation's parameters.  An optional output, such as an LSE, is asked for by ``lse=True``.
An output given by keyword is used as it is.  Arrays that an operation changes in place, such as caches, it changes here
too.

What an output is like the operation itself tells (see ``pykv._schema``); nothing here knows any of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pykv._libraries import empty_beside, spec_of
from pykv._schema import Op, all_ops

if TYPE_CHECKING:
    from pykv._hints.functional import *  # noqa: F403  # what is made below


def _functional(op: Op) -> Callable[..., Any]:
    array_names = {p.name for p in op.parameters if p.is_array}
    returned = [p.name for p in op.parameters if p.name in op.rules and not op.rules[p.name].is_scratch]

    def function(*args: Any, **kwargs: Any) -> Any:
        arguments = op.by_name(args, kwargs)
        beside = next((arguments[name] for name in op.inputs if name in array_names and name in arguments), None)
        specs = {k: spec_of(v) if k in array_names and hasattr(v, "shape") else v for k, v in arguments.items()}
        for name, spec in op.infer(specs).items():
            arguments[name] = empty_beside(beside, spec.shape, spec.dtype)
        op.function(**arguments)
        results = tuple(arguments[name] for name in returned if arguments.get(name) is not None)
        return results[0] if len(results) == 1 else results

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = (
        f"``pykv.{op.name}`` that allocates and returns {', '.join(f'``{name}``' for name in returned)}.\n\n"
        f"Positional arguments: {', '.join(op.inputs)}.\n\n{op.function.__doc__}"
    )
    return function


globals().update({name: _functional(op) for name, op in all_ops().items() if op.rules})
__all__ = sorted(name for name, op in all_ops().items() if op.rules)


if not TYPE_CHECKING:  # which would take any name for right

    def __getattr__(name: str) -> Callable[..., Any]:
        raise AttributeError(f"module 'pykv.functional' has no {name!r}: it has {', '.join(__all__)}")
