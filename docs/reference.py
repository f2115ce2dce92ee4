"""The pages of the C headers and of every operation, from the headers, the docstrings and ``pykv._schema``."""

from __future__ import annotations

import inspect
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent

import numpy as np
from samples import example

import pykv
from pykv._schema import REQUIRED, Op, Parameter, all_ops
from pykv._tools.samples import sample

TITLES = {
    "cache": "KV cache",
    "attention": "Attention",
    "norm": "Norms",
    "quantization": "Quantisation",
    "rotary": "Rotary embedding",
    "activation": "Activations",
    "embedding": "Embedding",
    "moe": "Mixture of experts",
    "dequantization": "Dequantisation",
    "gemm": "Matrix products",
    "sampling": "Sampling",
    "base": "C: conventions and errors",
    "cpu": "C: the CPU",
}
WAYS = {"read": "read", "written": "changed in place", "written list": "changed in place, one for each layer"}


@dataclass(frozen=True)
class Entry:
    """One function of a header, with the comment above it, which it may share with its neighbours.

    Before the comment stands the struct of options that the function takes, if it takes one.
    """

    name: str
    comment: str
    declaration: str


@dataclass(frozen=True)
class Header:
    name: str
    about: str
    entries: tuple[Entry, ...]

    @property
    def ops(self) -> list[Op]:
        found = (all_ops().get(e.name.removeprefix("pykv_")) for e in self.entries)
        return [op for op in found if op]


_COMMENT = r"^/\*(?:(?!\*/).)*\*/\n"


def _entries(text: str) -> Iterator[Entry]:
    options = rf"{_COMMENT}typedef struct (pykv_\w+_options) \{{.*?\}} \1;\n\n#define (?:[^\n]*\\\n)*[^\n]*\n"
    structs = {m[1]: m[0] for m in re.finditer(options, text, flags=re.DOTALL | re.MULTILINE)}
    # a comment and the declarations up to the next comment or empty line
    for block in re.finditer(rf"({_COMMENT})((?:PYKV_API [^;]*;\n)+)", text, flags=re.DOTALL | re.MULTILINE):
        for declaration in re.findall(r"PYKV_API [^;]*;", block[2]):
            name = re.search(r"(pykv_\w+)\(", declaration)
            assert name, declaration
            taken = [struct + "\n" for of, struct in structs.items() if f"{of}*" in declaration]
            yield Entry(name[1], "".join(taken) + block[1].strip(), declaration)


def headers() -> list[Header]:
    """Those that declare something, in the order of the titles."""
    found = []
    for path in Path(pykv.get_include(), "pykv").glob("*.h"):
        text = path.read_text()
        about = re.match(r"/\*(.*?)\*/", text, flags=re.DOTALL)
        assert about, path
        plain = re.sub(r"^ \* ?", "", about[1].strip(), flags=re.MULTILINE)
        entries = tuple(_entries(text))
        without_comments = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
        declared = re.findall(r"PYKV_API [^;]*?(pykv_\w+)\(", without_comments)
        assert [e.name for e in entries] == declared, f"{path}: a declaration without a comment"
        if entries:
            found.append(Header(path.stem, plain, entries))
    places = list(TITLES)
    return sorted(found, key=lambda h: (places.index(h.name) if h.name in places else len(places), h.name))


def _heading(text: str, line: str = "=") -> str:
    return f"{text}\n{line * len(text)}\n"


def _code(text: str, language: str) -> str:
    return f".. code-block:: {language}\n\n{indent(text, '   ')}\n"


def _table(widths: str, rows: list[list[str]], classes: str) -> str:
    lines = [
        ".. list-table::",
        f"   :widths: {widths}",
        "   :header-rows: 1",
        *([f"   :class: {classes}"] * bool(classes)),
        "",
    ]
    for row in rows:
        for i, cell in enumerate(row):
            lines.append(f"   {'*' if i == 0 else ' '} - {cell}")
    return "\n".join(lines) + "\n"


def _is(op: Op, p: Parameter) -> str:
    """What the call does with a parameter."""
    if p.is_array:
        rule = op.rules.get(p.name)
        way = WAYS[p.kind] if rule is None else "scratch" if rule.is_scratch else "written"
        return way + (", or a number" if p.may_be_number else "")
    return f"``{p.kind}``"


def _value(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"{value.dtype} ``{list(value.shape)}``"
    if isinstance(value, list):
        return f"{len(value)} x {_value(value[0])}"
    return f"``{value!r}``"


def _default(p: Parameter) -> str:
    return "" if p.default is REQUIRED else f"``{p.default!r}``"


def _call_of_functional(op: Op) -> str:
    made = [p for p in op.parameters if p.name in op.rules and not op.rules[p.name].is_scratch]
    names = [f"{p.name}" for p in made if not p.optional]
    asked = [f"with ``{p.name}=True`` also ``{p.name}``" for p in made if p.optional]
    returned = ", ".join([*(f"``{n}``" for n in names), *asked])
    return f"``pykv.functional.{op.name}({', '.join(op.inputs)})`` allocates and returns {returned}."


def _operation(op: Op, entry: Entry, header: str) -> str:
    rows = [["Parameter", "Is", "Default", "In a small right call"]]
    given = sample(op.name)
    for p in op.parameters:
        shown = _value(given[p.name]) if p.name in given else ""
        rows.append([f"``{p.name}``", _is(op, p), _default(p), shown])
    forms = [f"- {_call_of_functional(op)}"] if op.rules else []
    forms += [
        f"- It is ``torch.ops.pykv.{op.name}`` where torch compiles or exports.",
        "- It is in :doc:`the library for tvm-ffi </quickstart/tvm_ffi>`.",
    ]
    if "swap" not in op.name:
        forms += [
            f"- ``pykv.jax.{op.name}({', '.join(op.inputs)})`` is a pure function: it returns what is written above."
        ]
    program = example(op)
    return "\n".join(
        [
            _heading(op.name),
            f".. autofunction:: pykv.{op.name}\n",
            *([_heading("Example", "-"), _code(program, "python")] if program else []),
            _heading("Parameters at a glance", "-"),
            _table("22 34 14 30", rows, "parameters"),
            "The call is the one that ``pykv check`` makes.\n",
            _heading("Other forms", "-"),
            "\n".join(forms) + "\n",
            _heading("In C", "-"),
            f"``#include <pykv/{header}.h>``; what all its functions share stands in :doc:`{header}`.\n",
            _code(f"{entry.comment}\n{_wrapped(entry.declaration)}", "c"),
        ]
    )


def _wrapped(declaration: str) -> str:
    """A long one with a line for each parameter."""
    plain = " ".join(declaration.split())
    if len(plain) <= 80:
        return plain
    before, parameters = plain.split("(", 1)
    return f"{before}(\n    " + parameters.replace(", ", ",\n    ")


def _summary(op: Op) -> str:
    """The first sentence of its docstring."""
    paragraph = " ".join((inspect.getdoc(op.function) or "").split("\n\n")[0].split())
    ends = [m.start() for m in re.finditer(r"[.;:](?= |$)", paragraph) if paragraph.count("``", 0, m.start()) % 2 == 0]
    return f"{paragraph[: ends[0]]}." if ends else paragraph


def _title(header: Header) -> str:
    return TITLES.get(header.name, header.name.capitalize())


def _summaries(ops: list[Op]) -> str:
    return _table("40 60", [["Operation", ""], *([f":doc:`{op.name}`", _summary(op)] for op in ops)], "operations")


def _index(found: list[Header]) -> str:
    names = "\n".join(h.name for h in found)
    parts = [
        _heading("Operations"),
        "A page for each operation, with its Python and its C documentation.\n",
        f".. toctree::\n   :hidden:\n\n{indent(names, '   ')}\n",
        ".. currentmodule:: pykv\n",
    ]
    for header in found:
        parts.append(_heading(_title(header), "-"))
        shared = "What they share, and the C header" if header.ops else "The C header"
        parts.append(f":doc:`{shared} <{header.name}>`\n")
        if header.ops:
            parts.append(_summaries(header.ops))
    return "\n".join(parts)


def _header(header: Header) -> str:
    ops = {op.name: op for op in header.ops}
    parts = [_heading(_title(header)), ".. currentmodule:: pykv\n"]
    if ops:
        parts.append(_summaries(header.ops))
        parts.append(f".. toctree::\n   :hidden:\n\n{indent(chr(10).join(ops), '   ')}\n")
        for module in dict.fromkeys(op.function.__module__ for op in ops.values()):
            parts.append(f".. automodule:: {module}\n")
        parts.append(".. currentmodule:: pykv\n")
    parts.append(_heading(f"pykv/{header.name}.h", "-"))
    parts.append(_code(header.about, "text"))
    rest = [e for e in header.entries if e.name.removeprefix("pykv_") not in ops]
    for comment in dict.fromkeys(e.comment for e in rest):
        together = "\n".join(_wrapped(e.declaration) for e in rest if e.comment == comment)
        parts.append(_code(f"{comment}\n{together}", "c"))
    return "\n".join(parts)


def write(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    found = headers()
    (folder / "index.rst").write_text(_index(found))
    for header in found:
        (folder / f"{header.name}.rst").write_text(_header(header))
        for entry in header.entries:
            op = all_ops().get(entry.name.removeprefix("pykv_"))
            if op:
                (folder / f"{op.name}.rst").write_text(_operation(op, entry, header.name))
    missing = all_ops().keys() - {op.name for h in found for op in h.ops}
    assert not missing, f"in no header: {missing}"
