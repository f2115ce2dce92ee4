"""Tables: by rich where it is installed, else in plain text."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: int | None = None) -> None:
    """Prints a table; columns from number ``right`` on are numbers."""
    right = len(headings) if right is None else right
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _show_plain(title, headings, rows, right)
        return
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i >= right else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    # what is written to a file is as wide as it needs to be
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def _show_plain(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], right: int) -> None:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    print(title)
    for row in (headings, ["-" * w for w in widths], *rows):
        cells = [c.rjust(w) if i >= right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip())


def progress(items: Sequence[_T], what: str) -> Iterator[_T]:
    """The items, with a bar on a terminal where rich is installed."""
    found: Iterable[_T] = items
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import track
        except ImportError:
            pass
        else:
            found = track(items, what, console=Console(stderr=True), transient=True)
    yield from found
