"""Operations that make their outputs: ``y = pykv.functional.rms_norm(x, weight)``.

Every operation that has an output (an array it writes and does not read) stands here under its own name, without the
parameters of its outputs.  They are allocated and returned, several as a tuple in the order of the operation's
parameters, as arrays of the library of the first array: NumPy, CuPy, torch, Paddle or MLX.  An optional output, such as
an LSE, is asked for by ``lse=True``.  An output given by keyword is used as it is; None stands for one that is made.
Arrays that an operation changes in place, such as caches, it changes here too; MLX's cannot be changed.

What an output is like the operation itself tells (see ``pykv._schema``); nothing here knows any of them.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pykv._libraries import empty_beside, handed_back, spec_of
from pykv._schema import Op, Spec, all_ops
from pykv._shapes import check_made, of_inputs, outputs

if TYPE_CHECKING:
    from pykv._hints.functional import *  # noqa: F403  # what is made below


def _functional(op: Op) -> Callable[..., Any]:
    array_names = {p.name for p in op.parameters if p.is_array}
    returned = [p.name for p in op.parameters if p.name in op.rules and not op.rules[p.name].is_scratch]

    def function(*args: Any, **kwargs: Any) -> Any:
        arguments = op.bind(args, kwargs, "stream")
        specs = {k: _spec_of(op, k, v) if k in array_names else v for k, v in arguments.items()}
        beside = next(arguments[name] for name in op.inputs if isinstance(specs.get(name), Spec))
        made = outputs(op, specs)
        try:
            for name, (shape, dtype) in made.items():
                if _is_true(arguments.get(op.rules[name].transposed_if)):
                    arguments[name] = empty_beside(beside, shape[::-1], dtype).T
                else:
                    arguments[name] = empty_beside(beside, shape, dtype)
        except Exception:
            check_made(op, made, specs)  # what is too large to allocate is mostly wrong, too
            raise
        try:
            op.function(**arguments)
        except RuntimeError:
            _refuse_transformed(op, arguments)
            raise
        except (TypeError, ValueError) as error:
            raise of_inputs(op, made, specs, error) from None
        for name in made:
            arguments[name] = handed_back(arguments[name], beside)
        results = tuple(arguments[name] for name in returned if arguments.get(name) is not None)
        return results[0] if len(results) == 1 else results

    stream = inspect.Parameter("stream", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="Stream")
    function.__signature__ = op.signature(returned, stream)  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = (
        f"``pykv.{op.name}`` that allocates and returns {', '.join(f'``{name}``' for name in returned)}.\n\n"
        f"Positional arguments: {', '.join(op.inputs)}.\n\n{op.function.__doc__}"
    )
    return function


def _is_true(value: Any) -> bool:
    try:
        return bool(value)
    except Exception:  # the call says what is wrong with it
        return False


def _refuse_transformed(op: Op, arguments: Mapping[str, Any]) -> None:
    torch = sys.modules.get("torch")
    for name, value in arguments.items():
        if torch and isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value):
            what = "must be a plain tensor, got one of torch.vmap or of another transform of torch.func"
            raise TypeError(f"{op.name}: {name}: {what}") from None


def _spec_of(op: Op, name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        got = type(value).__name__
        raise TypeError(
            f"{op.name}: {name}: must be an array, and outputs are made in NumPy, CuPy, torch, Paddle or MLX, got {got}"
        )
    return spec_of(value)


globals().update({name: _functional(op) for name, op in all_ops().items() if op.rules})
__all__ = sorted(name for name, op in all_ops().items() if op.rules)


if not TYPE_CHECKING:  # which would take any name for right

    def __getattr__(name: str) -> Callable[..., Any]:
        raise AttributeError(f"module 'pykv.functional' has no {name!r}: it has {', '.join(__all__)}")
