"""What every operation takes and gives, for the frameworks that want to know.

Nothing is said twice: the C declaration says what each parameter is (``_C.ops``, deduced by the compiler), the Python
function its name, its default and whether it may be None.  What neither can tell, the shape of an output, the function
states by the decorator :func:`returns`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from threading import get_ident
from types import FunctionType, SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast, get_args, get_type_hints

from pykv import _C

Kind = Literal["read", "written", "written list", "int", "float", "bool", "str", "stream"]

REQUIRED: Final = inspect.Parameter.empty


class Spec(NamedTuple):
    """Shape and dtype (its NumPy or ml_dtypes name) of an array that may not exist yet."""

    shape: tuple[int, ...]
    dtype: str


class Rule(NamedTuple):
    """What an output is like: ``make`` gets the arguments of a call, arrays replaced by their Spec."""

    make: Callable[[Mapping[str, Any]], Spec]
    is_scratch: bool = False  # only the operation itself reads it


_Function = TypeVar("_Function", bound=Callable[..., None])


def returns(**rules: Rule) -> Callable[[_Function], _Function]:
    """States the outputs of an operation, those parameters that are written and never read, and what each is like.

    The function itself stays as it is: a direct call pays nothing for it.
    """

    def attach(function: _Function) -> _Function:
        function.__dict__["__pykv_returns__"] = rules
        return function

    return attach


def like(name: str) -> Rule:
    """Shape and dtype of another argument."""
    return Rule(lambda arguments: cast(Spec, arguments[name]))


def half_rows_of(name: str, dtype: str | None = None) -> Rule:
    """As another argument, with half its last dimension, or of another dtype."""

    def make(arguments: Mapping[str, Any]) -> Spec:
        shape, own = arguments[name]
        return Spec((*shape[:-1], shape[-1] // 2), dtype or own)

    return Rule(make)


@dataclass(frozen=True)
class Parameter:
    name: str
    kind: Kind
    default: Any  # REQUIRED where there is none
    optional: bool  # may be None
    may_be_number: bool  # an array, or a Python number in its place
    keyword_only: bool

    @property
    def is_array(self) -> bool:
        return self.kind in ("read", "written", "written list")


@dataclass(frozen=True)
class Op:
    name: str
    function: FunctionType  # what pykv has under this name
    direct: FunctionType  # the same as it was written, whatever pykv.dispatch makes of the other
    parameters: tuple[Parameter, ...]  # without `stream`
    rules: Mapping[str, Rule]

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The positional parameters of the forms that make the outputs themselves."""
        return tuple(p.name for p in self.parameters if p.name not in self.rules and not p.keyword_only)

    def by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments of a call of such a form."""
        if len(args) > len(self.inputs):
            raise TypeError(f"{self.name}: takes at most {len(self.inputs)} positional arguments, got {len(args)}")
        arguments = dict(zip(self.inputs, args, strict=False))
        if twice := arguments.keys() & kwargs.keys():
            raise TypeError(f"{self.name}: {min(twice)}: given twice")
        return arguments | kwargs

    def infer(self, arguments: Mapping[str, Any]) -> dict[str, Spec]:
        """What the outputs are that a call leaves out; an optional one only where its argument is True.

        Args:
            arguments: by name, arrays as :class:`Spec`; those left out have their defaults.
        """
        known = {p.name: p.default for p in self.parameters if p.default is not REQUIRED} | dict(arguments)
        return {
            p.name: self.rules[p.name].make(known)
            for p in self.parameters
            if p.name in self.rules and (known[p.name] is True if p.optional else p.name not in arguments)
        }

    def c_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """What the Python function would hand to the C entry: sentinels for None, defaults for what is left out."""
        return dict(zip((p.name for p in self.parameters), self._before_the_call(**arguments)[:-1], strict=True))

    @cached_property
    def _before_the_call(self) -> Callable[..., tuple[Any, ...]]:
        """The Python function, with another ``_C`` that only tells what it was called with."""
        told: dict[int, tuple[Any, ...]] = {}  # by thread
        entry = {self.name: lambda *args: told.update({get_ident(): args})}
        copy = _copy(self.direct, {**self.direct.__globals__, "_C": SimpleNamespace(**entry)})

        def call(**arguments: Any) -> tuple[Any, ...]:
            copy(**arguments)
            return told.pop(get_ident())

        return call


def _copy(function: FunctionType, own_globals: dict[str, Any]) -> FunctionType:
    copy = FunctionType(function.__code__, own_globals, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _parameters(name: str, function: Callable[..., None]) -> tuple[Parameter, ...]:
    hints = get_type_hints(function)
    signature = inspect.signature(function).parameters.values()
    return tuple(
        Parameter(
            name=p.name,
            kind=cast(Kind, kind),
            default=p.default,
            optional=type(None) in get_args(hints[p.name]),
            may_be_number=kind == "read" and float in get_args(hints[p.name]),
            keyword_only=p.kind is p.KEYWORD_ONLY,
        )
        for p, kind in zip(signature, _C.ops[name], strict=True)
        if kind != "stream"
    )


@cache
def all_ops() -> Mapping[str, Op]:
    """Every operation by its name."""
    import pykv

    ops = {}
    for name in _C.ops:
        function = getattr(pykv, name)
        rules = getattr(function, "__pykv_returns__", {})
        direct = _copy(function, function.__globals__)
        ops[name] = Op(name, function, direct, _parameters(name, function), rules)
    return ops
