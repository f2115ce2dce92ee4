from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from examples.checkpoints import write_checkpoint
from libraries import Library

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without what the examples need (`pip install pykv-kernels[examples]`) there is nothing to test here."""
    needed = ("ml_dtypes", "rich", "safetensors", "tokenizers")
    return True if any(importlib.util.find_spec(name) is None for name in needed) else None


@pytest.fixture(autouse=True)
def programs_find_their_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples import one another, which this variable forbids; ``tests/gpu.py`` sets it."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of a checkpoint of the given variant (and number of parts), written once."""
    made: dict[str, Path] = {}

    def folder(variant: str, parts: int = 1) -> Path:
        name = f"{variant}-{parts}"
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            write_checkpoint(made[name], variant, parts)
        return made[name]

    return folder


@pytest.fixture
def arrays(array: Library) -> Iterator[Any]:
    """What the examples see of the array library; in float32, so that libraries can be compared."""
    from arrays import open_arrays

    if array.name == "interface":
        pytest.skip("Numba's arrays have no products")
    opened = open_arrays(array.name, array.device, "float32")
    if array.name != "torch":
        yield opened
        return
    threads = opened.namespace.get_num_threads()
    opened.namespace.set_num_threads(1)  # products this small only wait for one another
    yield opened
    opened.namespace.set_num_threads(threads)
