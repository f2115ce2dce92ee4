"""What every operation takes and gives, for the frameworks that want to know.

Nothing is said twice: the C declaration says what each parameter is (``_C.ops``, deduced by the compiler), the Python
definition its name, its default and whether it may be None.  What neither can tell, the shape of an output, the
decorator :func:`operation` is told, which makes a callable of C of the definition.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, update_wrapper
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
    transposed_if: str = ""  # a parameter: where it is true, the memory is that of the transpose


@dataclass(frozen=True)
class NoneIs:
    """A converter of numbers: C takes ``sentinel`` for None.

    Numbers that must be ``positive`` are: 0, the sentinel, would silently mean None.  Those that must be a ``number``
    are not NaN, for the same reason.
    """

    sentinel: float
    positive: bool = False
    number: bool = False
    name: str = ""  # of the operation and its parameter: `operation` says it

    def __call__(self, value: float | None) -> float:
        if value is None:
            return self.sentinel
        if self.positive:
            try:
                is_positive = bool(value > 0)
            except (TypeError, ValueError):  # that of an array: not one truth
                got = type(value).__name__
                raise TypeError(f"{self.name}: must be a positive number or None, got {got}") from None
            if not is_positive:
                raise ValueError(f"{self.name}: must be positive, got {value}")
        if self.number:
            try:
                is_nan = bool(value != value)
            except ValueError:
                raise TypeError(f"{self.name}: must be a number or None, got {type(value).__name__}") from None
            if is_nan:
                raise ValueError(f"{self.name}: must be a number, got {value}")
        return value


_Definition = TypeVar("_Definition", bound=Callable[..., None])
_defined: dict[str, tuple[_C.Function, _How]] = {}


def operation(
    *, has_body: bool = False, converters: Mapping[str, Callable[[Any], Any]] | None = None, **rules: Rule
) -> Callable[[_Definition], _Definition]:
    """Makes an operation of its definition, which gives it names, defaults, types and text, but no body.

    The result is a callable of C: no frame of Python lies between a call and its checks.

    Args:
        has_body: the definition calls ``_C`` itself, and takes all calls.
        converters: what makes of an argument the one that C takes: a :class:`NoneIs`, or an array of a list.
        rules: the outputs, those parameters that are written and never read, and what each is like.
    """

    def make(definition: _Definition) -> _Definition:
        named = {
            name: replace(convert, name=f"{definition.__name__}: {name}") if isinstance(convert, NoneIs) else convert
            for name, convert in (converters or {}).items()
        }
        how = _How(definition, has_body, named, rules)
        function = how.function()
        _defined[definition.__name__] = function, how
        return cast(_Definition, function)

    return make


class _How(NamedTuple):
    """How an operation was declared."""

    definition: Any  # a function of Python
    has_body: bool
    converters: Mapping[str, Callable[[Any], Any]]
    rules: Mapping[str, Rule]

    def function(self) -> _C.Function:
        definition, code = self.definition, self.definition.__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        positional = definition.__defaults__ or ()
        defaults = dict(zip(names[code.co_argcount - len(positional) :], positional, strict=False))
        defaults |= definition.__kwdefaults__ or {}
        entry = None if self.has_body else getattr(_C, definition.__name__)
        function = _C.make_function(definition, entry, names, code.co_argcount, defaults, dict(self.converters))
        update_wrapper(function, definition)
        return function


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
    convert: Callable[[Any], Any]  # to what C takes

    @property
    def is_array(self) -> bool:
        return self.kind in ("read", "written", "written list")


@dataclass(frozen=True)
class Op:
    name: str
    function: _C.Function  # what pykv has under this name
    direct: _C.Function  # another one, which always goes to C, wherever pykv.dispatch sends the first
    parameters: tuple[Parameter, ...]  # without `stream`
    rules: Mapping[str, Rule]
    has_body: bool  # the definition makes something of the arguments before C sees them

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        """The positional parameters of the forms that make the outputs themselves."""
        return tuple(p.name for p in self.parameters if p.name not in self.rules and not p.keyword_only)

    def signature(self, returned: Sequence[str], *more: inspect.Parameter) -> inspect.Signature:
        """That of such a form; an output is made where it is None."""
        hints, shown = self.function.__annotations__, []
        for p in self.parameters:
            if p.name in self.rules:
                hint = "Array | bool | None" if p.optional else "Array | None"
                shown.append(inspect.Parameter(p.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint))
            else:
                kind = inspect.Parameter.KEYWORD_ONLY if p.keyword_only else inspect.Parameter.POSITIONAL_OR_KEYWORD
                shown.append(inspect.Parameter(p.name, kind, default=p.default, annotation=hints[p.name]))
        may_be_left_out = [p.name for p in self.parameters if p.name in returned and p.optional]
        if len(returned) == 1:
            result = "Array"
        elif len(returned) - len(may_be_left_out) == 1:
            result = "Array | tuple[Array, ...]"
        else:
            result = "tuple[Array, ...]"
        shown = sorted([*shown, *more], key=lambda p: p.kind)  # which keeps their order otherwise
        return inspect.Signature(shown, return_annotation=result)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any], *more: str) -> dict[str, Any]:
        """The arguments of a call of such a form by name, without the outputs that it leaves out.

        Raises:
            TypeError: an argument is missing, unknown, or not what its parameter is.
        """
        if len(args) > len(self.inputs):
            raise TypeError(f"{self.name}: takes at most {len(self.inputs)} positional arguments, got {len(args)}")
        given = dict(zip(self.inputs, args, strict=False))
        if twice := given.keys() & kwargs.keys():
            raise TypeError(f"{self.name}: {min(twice)}: given twice")
        given |= kwargs
        names = {p.name for p in self.parameters}
        if unknown := given.keys() - names - set(more):
            raise TypeError(f"{self.name}: {min(unknown)}: is no parameter, as these are: {', '.join(sorted(names))}")
        for p in self.parameters:
            if p.name in self.rules and (given.get(p.name) is None or (p.optional and given[p.name] is False)):
                given.pop(p.name, None)
            elif p.name in given:
                self._check_kind(p, given[p.name])
            elif p.default is REQUIRED:
                raise TypeError(f"{self.name}: {p.name}: is required")
        return given

    def _check_kind(self, p: Parameter, value: Any) -> None:
        wanted = _wanted(p, value, p.name in self.rules)
        if wanted and not (value is None and p.optional):
            raise TypeError(f"{self.name}: {p.name}: must be {wanted}, got {type(value).__name__}")

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
        """What the C entry is called with: sentinels for None, defaults for what is left out."""
        return {p.name: p.convert(arguments.get(p.name, p.default)) for p in self.parameters}


def _wanted(p: Parameter, value: Any, is_output: bool) -> str:
    """What a parameter takes, if that is no such value; of arrays, a framework knows more."""
    if isinstance(p.convert, NoneIs) and value is None:
        return ""
    if p.kind == "int":
        return "" if hasattr(value, "__index__") else "an integer"
    if p.kind == "float":
        return "" if hasattr(value, "__float__") or hasattr(value, "__index__") else "a number"
    if p.kind == "str":
        return "" if isinstance(value, str) else "a string"
    if not p.is_array or (value is True and is_output and p.optional):
        return ""
    if p.kind == "written list":
        return "" if isinstance(value, (list, tuple)) else "a list of arrays"
    if p.may_be_number and isinstance(value, (int, float)):
        return ""
    return "an array" if value is None or isinstance(value, (bool, int, float, str)) else ""


def _parameters(how: _How) -> tuple[Parameter, ...]:
    hints = get_type_hints(how.definition)
    signature = inspect.signature(how.definition).parameters.values()
    return tuple(
        Parameter(
            name=p.name,
            kind=cast(Kind, kind),
            default=p.default,
            optional=type(None) in get_args(hints[p.name]),
            may_be_number=kind == "read" and float in get_args(hints[p.name]),
            keyword_only=p.kind is p.KEYWORD_ONLY,
            convert=how.converters.get(p.name, _as_it_is),
        )
        for p, kind in zip(signature, _C.ops[how.definition.__name__], strict=True)
        if kind != "stream"
    )


@cache
def all_ops() -> Mapping[str, Op]:
    """Every operation by its name; those of modules that were imported."""
    ops = {}
    for name in _C.ops:
        if name not in _defined:
            raise ImportError(f"pykv_{name} is declared in C, and no module that is imported here defines {name}")
        function, how = _defined[name]
        ops[name] = Op(name, function, how.function(), _parameters(how), how.rules, how.has_body)
    return ops


def _as_it_is(value: Any) -> Any:
    return value
