"""The signatures of the forms that are made when they are imported, for type checkers.

``python tests/derived.py`` writes them.

Where a parameter that may be left out decides what is returned, there is an overload for each case.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pykv._schema import REQUIRED, Op, Parameter, Spec, all_ops
from pykv._tools.samples import sample

FOLDER = Path(__file__).parents[2] / "pykv" / "_hints"
OVERLOADED = "from typing import Any, Literal, TypeVar, overload"
FUNCTIONAL = f'''"""Written by tests/derived.py."""

{OVERLOADED}

from pykv._types import Array, ScalarOrArray, Stream

_Array = TypeVar("_Array", bound=Array)
'''
JAX = f'''"""Written by tests/derived.py."""

from collections.abc import Sequence
{OVERLOADED.replace("Any, ", "").replace(", TypeVar", "")}

from jax import Array
from jax.typing import ArrayLike
'''


class Form(NamedTuple):
    """One signature: parameters by position, then by keyword, each as it is written; and the result."""

    positional: list[str]
    keyword: list[str]
    result: str

    def written(self, name: str) -> str:
        star = ["*"] if self.keyword else []
        return f"def {name}({', '.join([*self.positional, *star, *self.keyword])}) -> {self.result}: ..."


def _parameter(p: Parameter, kind: str, required: bool = False) -> str:
    return f"{p.name}: {kind}" + ("" if required or p.default is REQUIRED else f" = {p.default!r}")


def _specs(op: Op, dtype: str) -> dict[str, Any]:
    """The sample's arguments with all floats of another dtype."""

    def spec(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return Spec(value.shape, dtype if value.dtype == np.float32 else str(value.dtype))
        return value

    return {name: spec(value) for name, value in sample(op.name).items()}


def _is_like_the_first(op: Op, output: str, first: str) -> bool:
    """Whether an output has dtype and number of dimensions of the first array, so that its type is known."""
    given = _specs(op, "float16")
    defaults = {p.name: p.default for p in op.parameters if p.default is not REQUIRED}
    try:
        made = op.rules[output].make({**defaults, **given})
    except TypeError:  # the dtype cannot be known
        return False
    own = given[first]
    return isinstance(own, Spec) and (made.dtype, len(made.shape)) == (own.dtype, len(own.shape)) == (
        "float16",
        len(own.shape),
    )


def _hints(op: Op) -> Mapping[str, str]:
    return op.function.__annotations__


def functional(op: Op) -> Iterator[Form]:
    hints = _hints(op)
    inputs = [p for p in op.parameters if p.name in op.inputs]
    first = next(p.name for p in inputs if p.is_array)
    outputs = [p for p in op.parameters if p.name in op.rules and not op.rules[p.name].is_scratch]
    types = {p.name: "_Array" if _is_like_the_first(op, p.name, first) else "Any" for p in outputs}
    known = "_Array" in types.values()
    positional = [_parameter(p, "_Array" if known and p.name == first else hints[p.name]) for p in inputs]
    rest = [_parameter(p, hints[p.name]) for p in op.parameters if p.keyword_only and p.name not in op.rules]
    always = [f"{name}: Array | None = None" for name in op.rules if not _by_name(op)[name].optional]
    asked = [p for p in outputs if p.optional]
    for chosen in itertools.product((False, True), repeat=len(asked)):
        returned = [p for p in outputs if not p.optional] + [p for p, yes in zip(asked, chosen, strict=True) if yes]
        choices = [
            f"{p.name}: Array | Literal[True]" if yes else f"{p.name}: Literal[False] | None = None"
            for p, yes in zip(asked, chosen, strict=True)
        ]
        names = [types[p.name] for p in op.parameters if p in returned]
        yield Form(positional, [*choices, *always, *rest, "stream: Stream = None"], _tuple(names))


def _by_name(op: Op) -> dict[str, Parameter]:
    return {p.name: p for p in op.parameters}


def _tuple(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"tuple[{', '.join(names)}]"


_OF_JAX = {
    "Array": "ArrayLike",
    "Array | None": "ArrayLike | None",
    "ScalarOrArray": "float | ArrayLike",
    "ScalarOrArray | None": "float | ArrayLike | None",
    "Sequence[Array]": "Sequence[ArrayLike]",
}


def jax(op: Op) -> Iterator[Form]:
    hints = {name: _OF_JAX.get(hint, hint) for name, hint in _hints(op).items()}
    inputs = [p for p in op.parameters if p.name in op.inputs]
    written = [
        p
        for p in op.parameters
        if p.kind.startswith("written") and not (p.name in op.rules and op.rules[p.name].is_scratch)
    ]
    asked = [p for p in written if p.optional]
    for chosen in itertools.product((False, True), repeat=len(asked)):
        there = dict(zip((p.name for p in asked), chosen, strict=True))
        results = [
            "list[Array]" if p.kind == "written list" else "Array" for p in written if there.get(p.name, not p.optional)
        ]

        def hint(p: Parameter, there: dict[str, bool] = there) -> str:
            if p.name not in there:
                return _parameter(p, hints[p.name])
            if there[p.name]:
                return f"{p.name}: ArrayLike" + (" | Literal[True]" if p.name in op.rules else "")
            return _parameter(p, "None")  # False, too: but that is an ArrayLike

        # what is given must have no default: if one of those before it has, it goes by keyword
        late = [p for p in inputs if there.get(p.name) and p.default is not REQUIRED]
        positional = [hint(p) for p in inputs if p not in late]
        keyword = [hint(p) for p in op.parameters if p in late or (p.keyword_only and p.name not in op.rules)]
        keyword += [
            hint(p) if p.optional else f"{p.name}: ArrayLike | None = None"
            for p in map(_by_name(op).get, op.rules)
            if p
        ]
        yield Form(positional, keyword, _tuple(results))
        if late:  # or by position, with all before it
            last = max(inputs.index(p) for p in late)
            filled = [hint(p).split(" = ")[0] if i <= last else hint(p) for i, p in enumerate(inputs)]
            yield Form(filled, [k for k in keyword if k.split(":")[0] not in {p.name for p in late}], _tuple(results))


def text(head: str, forms: Mapping[str, list[Form]]) -> str:
    parts = [head]
    for name, own in forms.items():
        for form in own:
            parts.append(("@overload\n" if len(own) > 1 else "") + form.written(name))
    return "\n".join(parts) + "\n"


def stub_of_functional() -> str:
    return text(FUNCTIONAL, {name: list(functional(op)) for name, op in sorted(all_ops().items()) if op.rules})


def stub_of_jax() -> str:
    import pykv.jax

    return text(JAX, {name: list(jax(op)) for name, op in sorted(all_ops().items()) if name in pykv.jax.__all__})


def stub_of_torch() -> str:
    """The functions have the signatures of those that they call."""
    names = "\n".join(f"from pykv import {name} as {name}" for name in sorted(all_ops()))
    return f'"""Written by tests/derived.py."""\n\n{names}\n'


STUBS = {"functional": stub_of_functional, "jax": stub_of_jax, "torch": stub_of_torch}


def write() -> None:
    """They are as ``ruff format`` leaves them, which is the caller's to run (tests/derived.py)."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / "__init__.pyi").touch()
    for name, stub in STUBS.items():
        (FOLDER / f"{name}.pyi").write_text(stub())
