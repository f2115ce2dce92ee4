"""Weights in the forms of ``vllm._custom_ops``, packed or decoded once, for the products of :mod:`pykv.vllm`.

That is done when a weight is used for the first time, on the host, and what was made stays as long as the array of its
codes lives.  It must not be changed in the meantime, nor its scales, but that torch's own changes in place are noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

from pykv._libraries import spec_of
from pykv._types import Array
from pykv.packed_weight import PackedWeight

_Made = TypeVar("_Made")
_Source = tuple[weakref.ref[Any], int] | None  # an array and its version
_made: Final[dict[tuple[object, ...], tuple[list[_Source], Any]]] = {}


def _version(array: Any) -> int:
    """How often torch has changed it in place; 0 for arrays that do not count that, as those of inference mode."""
    try:
        return int(getattr(array, "_version", 0))
    except RuntimeError:
        return 0


def _source(array: Any, forget: Callable[[object], object] | None) -> _Source:
    return None if array is None else (weakref.ref(array, forget), _version(array))


def _is(source: _Source, array: Any) -> bool:
    if source is None or array is None:
        return source is None and array is None
    return source[0]() is array and source[1] == _version(array)


def made_once(
    weight: Array, others: tuple[Array | None, ...], key: tuple[object, ...], make: Callable[[], _Made]
) -> _Made:
    """What ``make()`` makes of a weight and ``others`` (its scales), or made of the same arrays before.

    ``key``: what else it depends on.
    """
    whole = (id(weight), *spec_of(weight), *key)
    found = _made.get(whole)
    if found is None or not all(map(_is, found[0], (weight, *others))):
        sources = [_source(weight, lambda _: _made.pop(whole, None)), *(_source(a, None) for a in others)]
        found = (sources, make())
        _made[whole] = found
    made: _Made = found[1]
    return made


def packed_once(
    weight: Array, others: tuple[Array | None, ...], key: tuple[object, ...], pack: Callable[[], PackedWeight]
) -> PackedWeight:
    """What ``pack()`` makes of them, beside the weight."""
    return made_once(weight, others, key, lambda: pack().to(weight))
