"""Weights in the forms of ``vllm._custom_ops``, packed once, for the products of :mod:`pykv.vllm`.

A weight is packed when it is used for the first time, on the host, and stays packed as long as the array of its codes
lives.  It must not be changed in the meantime, nor its scales, but that torch's own changes in place are noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from pykv._libraries import spec_of
from pykv._types import Array
from pykv.packed_weight import PackedWeight

_Source = tuple[weakref.ref[Any], int] | None  # an array and its version
_packed: Final[dict[tuple[object, ...], tuple[list[_Source], PackedWeight]]] = {}


def _source(array: Any, forget: Callable[[object], object] | None) -> _Source:
    return None if array is None else (weakref.ref(array, forget), getattr(array, "_version", 0))


def _is(source: _Source, array: Any) -> bool:
    if source is None or array is None:
        return source is None and array is None
    return source[0]() is array and source[1] == getattr(array, "_version", 0)


def packed_once(
    weight: Array, others: tuple[Array | None, ...], key: tuple[object, ...], pack: Callable[[], PackedWeight]
) -> PackedWeight:
    """What ``pack()`` makes of a weight and ``others`` (its scales), or made of the same arrays before.

    ``key``: what else it depends on.
    """
    whole = (id(weight), *spec_of(weight), *key)
    found = _packed.get(whole)
    if found is None or not all(map(_is, found[0], (weight, *others))):
        sources = [_source(weight, lambda _: _packed.pop(whole, None)), *(_source(a, None) for a in others)]
        found = (sources, pack().to(weight))
        _packed[whole] = found
    return found[1]
