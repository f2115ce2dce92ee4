"""What the samples of embedding must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from embedding import reference

EXPECTED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "masked_embedding": lambda a: {"out": reference.masked_embedding(**vars(a))}
}
