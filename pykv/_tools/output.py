"""Tables: by rich where it is installed, else in plain text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from typing import TextIO, TypeVar

_T = TypeVar("_T")
STYLES = {"pass": "green", "FAIL": "bold red", "skipped": "dim"}  # of cells, on a terminal


def show(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    right: int | None = None,
    file: TextIO | None = None,
) -> None:
    """Prints a table, to stdout where no file is said; columns from number ``right`` on are numbers."""
    file = file or sys.stdout
    right = len(headings) if right is None else right
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _show_plain(title, headings, rows, right, file)
        return
    table = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="right" if i >= right else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    # what is written to a file is as wide as it needs to be
    Console(file=file, width=None if file.isatty() else 140).print(table)


def _show_plain(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], right: int, file: TextIO) -> None:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    print(title, file=file)
    for row in (headings, ["-" * w for w in widths], *rows):
        cells = [c.rjust(w) if i >= right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        print("  ".join(cells).rstrip(), file=file)


def progress(items: Sequence[_T], what: str, name: Callable[[_T], str] = str) -> Generator[_T, None, None]:
    """The items, with a bar that names the one at work, on a terminal where rich is installed."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            pass
        else:
            with Progress(console=Console(stderr=True), transient=True) as bar:
                task = bar.add_task(what, total=len(items))
                for item in items:
                    bar.update(task, description=f"{what} {name(item)}")
                    yield item
                    bar.advance(task)
            return
    yield from items
