"""A change of many parts that happens at once, wherever an exception comes from.

The change is worked out first, as a list of writes that touches nothing yet.  One assignment in ``commit`` makes it
happen.  The writes follow; where an exception (Ctrl-C, no memory) stops them, ``settle`` does all of them again before
anybody looks.  So each write must be harmless to repeat: it puts a known value into a known place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

Write = tuple[Callable[..., object], tuple[Any, ...]]  # a function and its arguments
Writes = list[Write]


class Journal:
    """The change that has happened and may not be written yet."""

    def __init__(self) -> None:
        self._pending: Writes = []

    def commit(self, writes: Writes) -> None:
        """Let the change happen.  Everything before it must be settled."""
        self._pending = writes
        self.settle()

    def settle(self) -> None:
        """Finish a commit that an exception stopped.  Call it before reading what the writes change."""
        if self._pending:
            for write, arguments in self._pending:
                write(*arguments)
            self._pending = []


def drop(mapping: dict[Any, Any], keys: Iterable[Any]) -> None:
    """Remove what is still there of these keys; a write."""
    for key in keys:
        mapping.pop(key, None)
