"""What every sample (``pykv/_tools/samples``) must give, by the references in NumPy: ``pykv check`` compares.

``python tests/derived.py`` writes ``pykv/_tools/expected/<family>.npz``; tests/test_cli.py fails where one is old.
The references of a family are in ``tests/<family>/expected.py``.
An entry of a file is called "<operation>/<parameter>", one of a list "<operation>/<parameter>/<number>".
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from activation.quantised import E4M3

from pykv._tools.samples import FAMILIES, MEMORY, sample

FOLDER = Path(__file__).parent.parent / "pykv" / "_tools" / "expected"
Results = dict[str, Any]
BY_FAMILY: dict[str, dict[str, Callable[[Any], Results]]] = {
    family: import_module(f"{family}.expected").EXPECTED for family in FAMILIES
}
EXPECTED = {name: make for family in BY_FAMILY.values() for name, make in family.items()}


def expected(name: str) -> Results:
    """By parameter, of the shape and the dtype that the sample's array has."""
    before = sample(name) | {"memory": MEMORY}

    def fit(value: Any, array: Any) -> Any:
        if isinstance(value, list):
            return [fit(*pair) for pair in zip(value, array, strict=True)]
        value = value.view(np.uint8) if value.dtype == E4M3 else value
        return value.reshape(array.shape).astype(array.dtype)

    return {k: fit(v, before[k]) for k, v in EXPECTED[name](SimpleNamespace(**sample(name))).items()}


def entries(name: str) -> dict[str, np.ndarray]:
    """As they are called in the file."""
    found = {}
    for k, v in expected(name).items():
        found |= {f"{name}/{k}/{i}": x for i, x in enumerate(v)} if isinstance(v, list) else {f"{name}/{k}": v}
    return found


def write() -> None:
    FOLDER.mkdir(exist_ok=True)
    for family, operations in BY_FAMILY.items():
        file = FOLDER / f"{family}.npz"
        made = {key: value for name in sorted(operations) for key, value in entries(name).items()}
        if not file.exists() or not same(file, made):  # else it stays, to the byte
            np.savez_compressed(file, **made)


def same(file: Path, made: dict[str, np.ndarray]) -> bool:
    with np.load(file) as old:
        return list(old.files) == list(made) and all(
            (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
            for a, b in ((old[key], value) for key, value in made.items())
        )
