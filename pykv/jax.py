"""The operations as pure functions of JAX arrays: eager, under ``jax.jit``, ``lax.scan``, ``vmap`` and ``shard_map``.

Each has the parameters of the operation in ``pykv`` without its outputs, and returns what the operation writes, in the
order of its parameters: outputs, and arrays that it changes, such as caches.  ``cache = pykv.jax.f(..., cache, ...)``
under ``jax.jit`` with the cache donated updates it in place; without donation XLA copies it first.  An optional output,
such as an LSE, is asked for by ``True``.  Scalars and strings are static.  What does not fit is an error when the call
is traced; ids out of range are errors when it runs on the CPU, and kept for ``pykv.check_errors()`` on CUDA.

Missing here are ``swap_blocks`` and its like, which move blocks between devices: JAX has ``device_put`` for that.

The calls go through XLA's FFI to the C library; nothing is compiled, so one build serves every JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pykv import _C
from pykv._libraries import numpy_dtype, spec_of
from pykv._schema import Op, Parameter, Spec, all_ops
from pykv._shapes import check_made, outputs

if TYPE_CHECKING:
    from pykv._hints.jax import *  # noqa: F403  # what is made below


def _array_of(op: Op, name: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError):
        raise TypeError(f"{op.name}: {name}: must be an array, got {type(value).__name__}") from None


def _attribute(kind: str, value: Any) -> Any:
    if kind == "str":
        return value
    return np.float64(value) if kind == "float" else np.int64(value)


class _Call:
    """One call on its way to XLA: buffers, results and attributes in the order that ``src/bindings/xla.h`` reads."""

    def __init__(self) -> None:
        self.modes = ""
        self.attributes: dict[str, Any] = {}
        self.buffers: list[Any] = []
        self.changed: list[tuple[str, int]] = []  # parameter, position among the buffers
        self.made: list[str] = []

    def add(self, p: Parameter, value: Any, made: bool) -> None:
        key = f"p{len(self.modes):02d}"
        if made:
            self.modes += "w"
            self.made.append(p.name)
        elif p.kind == "written list":
            self.modes += "l"
            self.attributes[key] = np.int64(len(value))
            for array in value:
                self._change(p, array)
        elif not p.is_array:
            self.modes += "a"
            self.attributes[key] = value
        elif value is None:
            self.modes += "-"
        elif p.may_be_number and isinstance(value, (int, float)):
            self.modes += "n"
            self.attributes[key] = np.float64(value)
        elif p.kind == "written":
            self.modes += "m"
            self._change(p, value)
        else:
            self.modes += "r"
            self.buffers.append(value)

    def _change(self, p: Parameter, array: Any) -> None:
        self.changed.append((p.name, len(self.buffers)))
        self.buffers.append(array)


def _function(op: Op) -> Callable[..., Any]:
    arrays = {p.name: p for p in op.parameters if p.is_array}
    scratch = {name for name, rule in op.rules.items() if rule.is_scratch}
    returned = [p.name for p in op.parameters if p.kind.startswith("written") and p.name not in scratch]
    target = f"pykv.{op.name}"
    for platform, handler in zip(("cpu", "CUDA"), _C.xla_handlers[op.name], strict=True):
        jax.ffi.register_ffi_target(target, handler, platform=platform, api_version=1)

    def function(*args: Any, **kwargs: Any) -> Any:
        arguments = op.bind(args, kwargs)
        for rule in op.rules.values():
            if rule.transposed_if:
                arguments[rule.transposed_if] = False  # XLA chooses strides, and nobody sees them
        for name in arguments.keys() & arrays.keys():
            value, p = arguments[name], arrays[name]
            if isinstance(value, (list, tuple)) and p.kind == "written list":
                arguments[name] = [_array_of(op, name, v) for v in value]
            elif not (value is None or value is True or (p.may_be_number and isinstance(value, (int, float)))):
                arguments[name] = _array_of(op, name, value)
        specs = {name: _specs(value) if name in arrays else value for name, value in arguments.items()}
        made = outputs(op, specs)
        check_made(op, made, specs)

        call, values = _Call(), op.c_arguments(arguments | made)
        for p in op.parameters:
            value = values[p.name]
            call.add(p, value if p.is_array else _attribute(p.kind, value), p.name in made)
        results = [_specs(call.buffers[at]) for _, at in call.changed] + [made[name] for name in call.made]
        run = jax.ffi.ffi_call(
            target,
            [_struct(spec) for spec in results],
            vmap_method="sequential",
            input_output_aliases={at: i for i, (_, at) in enumerate(call.changed)},
        )
        return _in_order(op, call, run(*call.buffers, modes=call.modes, **call.attributes))

    function.__signature__ = op.signature(returned)  # type: ignore[attr-defined]
    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = f"``pykv.{op.name}`` as a pure function of {', '.join(op.inputs)}.\n\n{op.function.__doc__}"
    return function


def _specs(value: Any) -> Any:
    if isinstance(value, list):
        return [spec_of(v) for v in value]
    return spec_of(value) if hasattr(value, "shape") else value


def _struct(spec: Spec) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(spec.shape, numpy_dtype(spec.dtype))  # type: ignore[no-untyped-call]


def _in_order(op: Op, call: _Call, results: Sequence[Any]) -> Any:
    """What is written, by parameter: one array, or a tuple; a list where the parameter is one."""
    names = [name for name, _ in call.changed] + call.made
    returned: list[Any] = []
    for p in op.parameters:
        own = [result for name, result in zip(names, results, strict=True) if name == p.name]
        if own and not (p.name in op.rules and op.rules[p.name].is_scratch):
            returned.append(own if p.kind == "written list" else own[0])
    return returned[0] if len(returned) == 1 else tuple(returned)


# these move blocks between the memories of devices, by a mapping on the host (an XLA computation has one device), or
# write where addresses point to, of which it knows nothing
_NOT_PURE = {"swap_blocks", "swap_blocks_batch", "swap_blocks_layers", "concat_and_cache_mla_grouped"}

_functions = {name: _function(op) for name, op in all_ops().items() if name not in _NOT_PURE}
globals().update(_functions)
__all__ = sorted(_functions)
