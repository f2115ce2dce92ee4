"""Each operation gives the recorded results wherever and however one of its arrays lies: backwards, with gaps, with its
axes in another order, or an element further on.  Or it refuses that.  What lies between the elements stays as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from pykv._schema import all_ops
from pykv._tools import check, devices
from pykv._tools.samples import ADDRESSED, ON_HOST, sample

# what they copy are bytes, gaps too
NAMES = sorted(set(all_ops()) - ADDRESSED - {"swap_blocks", "swap_blocks_layers"})
BETWEEN = 0x5B  # every byte there

recorded = functools.cache(check.recorded)


class Layout:
    """Memory of ``count`` elements, and the view of it where the array lies."""

    def __init__(self, name: str, count: int, view: Callable[[Any], Any]) -> None:
        self.name, self.count, self.view = name, count, view

    def __repr__(self) -> str:
        return self.name


def layouts(x: np.ndarray) -> Iterator[Layout]:
    yield Layout("offset", x.size + 1, lambda m: m[1:].reshape(x.shape))
    if x.ndim == 0 or x.size == 0:
        return
    if x.ndim > 1:
        yield Layout("order", x.size, lambda m: m.reshape(x.shape[::-1]).transpose(*range(x.ndim)[::-1]))
        rows = (*x.shape[:-1], x.shape[-1] + 3)
        yield Layout("rows apart", int(np.prod(rows)), lambda m: m.reshape(rows)[..., : x.shape[-1]])
    for axis in range(x.ndim):
        before = (slice(None),) * axis
        yield Layout(
            f"axis {axis} backwards",
            x.size,
            lambda m, before=before: m.reshape(x.shape)[(*before, slice(None, None, -1))],
        )
        twice = tuple(2 * n if i == axis else n for i, n in enumerate(x.shape))
        yield Layout(
            f"axis {axis} apart",
            2 * x.size,
            lambda m, before=before, twice=twice: m.reshape(twice)[(*before, slice(None, None, 2))],
        )


def moved(x: np.ndarray, layout: Layout, device: devices.Device) -> tuple[Any, Any, np.ndarray]:
    """The array there, all its memory, and bytes that are 1 where none of its elements lies."""
    host = np.full(layout.count * x.itemsize, BETWEEN, np.uint8).view(x.dtype)
    layout.view(host)[...] = x
    free = np.ones((layout.count, x.itemsize), np.uint8)
    places = layout.view(np.arange(layout.count))
    free[places.reshape(-1)] = 0
    memory = device.array(host)
    return layout.view(memory), memory, free.reshape(-1)


def results(name: str, given: dict[str, Any], key: str, device: devices.Device) -> check.Recorded | None:
    """None where the call is refused for this argument, or another because of it."""
    try:
        return check.results(name, device, given=given)
    except (TypeError, ValueError, NotImplementedError) as error:
        if not str(error).startswith(f"{name}: ") or key not in str(error):
            raise
        return None


@pytest.mark.parametrize("name", NAMES)
def test_wherever_an_array_lies(name: str, device: devices.Device) -> None:
    wanted, taken = recorded()[name], 0
    for key, value in sample(name).items():
        first = value[0] if isinstance(value, list) and value else value
        if not isinstance(first, np.ndarray) or key in ON_HOST:
            continue
        for layout in layouts(first):
            given = check.arguments(name, (), device)
            made = [moved(x, layout, device) for x in (value if isinstance(value, list) else [value])]
            given[key] = [view for view, _, _ in made] if isinstance(value, list) else made[0][0]
            if (found := results(name, given, key, device)) is None:
                continue
            taken += 1
            _, wrong = check.compare(found, {k: v for k, v in wanted.items() if k in found})
            assert not wrong, f"{key}, {layout}: {wrong}"
            for _, memory, free in made:
                between = device.read(memory).view(np.uint8)[free == 1]
                assert (between == BETWEEN).all(), f"{key}, {layout}: wrote between its elements"
    assert taken
