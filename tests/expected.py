"""What every sample (``pykv/_tools/samples``) must give, by the references in NumPy: ``pykv check`` compares.

``python tests/derived.py`` writes ``pykv/_tools/expected/<family>.npz``; tests/test_cli.py fails where one is old.
The references of a family are in ``tests/<family>/expected.py``.
An entry of a file is called "<call>/<parameter>", one of a list "<call>/<parameter>/<number>".  A call is the name of
an operation, which stands for its sample, or that with a variant (``pykv/_tools/samples/_served.py``).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from activation.quantised import E4M3, codes
from ml_dtypes import bfloat16

from pykv._schema import all_ops
from pykv._tools.samples import ADDRESSED, FAMILIES, FURTHER, MEMORY, sample
from pykv._tools.samples._served import (
    CACHES,
    CODED,
    NARROW,
    VARIANTS,
    each,
    floats_of,
    has_coded_cache,
    label,
    parts,
    served,
)

FOLDER = Path(__file__).parent.parent / "pykv" / "_tools" / "expected"
BF16 = np.dtype(bfloat16)
Results = dict[str, Any]
BY_FAMILY: dict[str, dict[str, Callable[[Any], Results]]] = {
    family: import_module(f"{family}.expected").EXPECTED for family in FAMILIES
}
EXPECTED = {name: make for family in BY_FAMILY.values() for name, make in family.items()}


def expected(label: str) -> Results:
    """By parameter, of the shape and the dtype that the array has in the call."""
    name, variant = parts(label)
    given = served(name, variant, narrow(label)) if variant else sample(name)
    before = given | {"memory": MEMORY}

    def fit(value: Any, array: Any) -> Any:
        if isinstance(value, list):
            return [fit(*pair) for pair in zip(value, array, strict=True)]
        if array.dtype == np.uint8 and value.dtype.kind == "f" and value.dtype != E4M3:  # a cache
            value = codes(value, E4M3)
        value = value.view(np.uint8) if value.dtype == E4M3 else value
        return value.reshape(array.shape).astype(array.dtype)

    def wide(key: str, value: Any) -> Any:
        """What the reference reads: numbers for codes, and float32 for what is rounded to bfloat16."""
        if variant == CODED and key in CACHES:
            return each(value, lambda a: a.view(E4M3).astype(np.float32))
        return each(value, lambda a: a.astype(np.float32)) if key in narrow(label) else value

    arguments = {k: wide(k, v) for k, v in given.items()} if variant else sample(name)
    return {k: fit(v, before[k]) for k, v in EXPECTED[name](SimpleNamespace(**arguments)).items()}


@cache
def narrow(label: str) -> frozenset[str]:
    """The arguments that may be bfloat16, all together; none where the operation has no such form."""
    name, variant = parts(label)
    if label in FURTHER:
        return frozenset()
    op = all_ops()[name]
    if name in ADDRESSED or (variant == CODED and not has_coded_cache(name, {p.name for p in op.parameters})):
        return frozenset()
    left = floats_of(served(name, variant, ()))
    while left:
        try:
            op.direct(**served(name, variant, left))
        except (TypeError, ValueError) as error:
            refused = re.match(r"\w+: (\w+): dtype", str(error))
            if refused is None or refused[1] not in left:
                return frozenset()
            left.discard(refused[1])
        else:
            break
    return frozenset(left)


def labels(name: str) -> list[str]:
    """The sample, its variants, and further ones."""
    variants = [text for variant in VARIANTS if narrow(text := label(name, variant))]
    return [name, *variants, *(call for call in FURTHER if parts(call)[0] == name)]


def entries(label: str) -> dict[str, np.ndarray]:
    """As they are called in the file; bfloat16 as its bits, and under NARROW what is of it."""
    found = {}
    for k, v in expected(label).items():
        found |= {f"{label}/{k}/{i}": x for i, x in enumerate(v)} if isinstance(v, list) else {f"{label}/{k}": v}
    found = {k: v.view(np.uint16) if v.dtype == BF16 else v for k, v in found.items()}
    return found | ({f"{label}/{NARROW}": np.array(sorted(narrow(label)))} if parts(label)[1] else {})


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for family, operations in BY_FAMILY.items():
        file = FOLDER / f"{family}.npz"
        calls = [label for name in sorted(operations) for label in labels(name)]
        made = {key: value for label in calls for key, value in entries(label).items()}
        if not file.exists() or not same(file, made):  # else it stays, to the byte
            np.savez_compressed(file, **made)


def same(file: Path, made: dict[str, np.ndarray]) -> bool:
    with np.load(file) as old:
        return list(old.files) == list(made) and all(
            (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
            for a, b in ((old[key], value) for key, value in made.items())
        )
