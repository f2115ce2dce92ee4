"""What was asked for cannot be done: told in a line, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pykv._schema import all_ops


class CommandError(Exception):
    pass


def known_ops(names: Sequence[str], among: Sequence[str] | None = None) -> list[str]:
    """``names``, or all where there are none; unknown ones are refused."""
    known = sorted(all_ops()) if among is None else list(among)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise CommandError(f"no operation is called {name!r}" + (f"; did you mean {near[0]}?" if near else ""))
    return list(names) or known
