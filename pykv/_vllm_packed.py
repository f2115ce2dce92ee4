"""Weights in the forms of ``vllm._custom_ops``, packed once, for the products of :mod:`pykv.vllm`.

A weight is packed when it is used for the first time, on the host, and stays packed as long as the array of its codes
lives.  It must not be changed in the meantime, nor its scales; of the codes, torch's own changes in place are noticed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from pykv._libraries import spec_of
from pykv._types import Array
from pykv.packed_weight import PackedWeight

_packed: Final[dict[tuple[object, ...], tuple[weakref.ref[Any], PackedWeight]]] = {}


def packed_once(weight: Array, key: tuple[object, ...], pack: Callable[[], PackedWeight]) -> PackedWeight:
    """What ``pack()`` makes of a weight, or made of it before, beside its array; ``key``: what else it depends on."""
    array: Any = weight
    whole = (id(weight), getattr(weight, "_version", 0), *spec_of(weight), *key)
    found = _packed.get(whole)
    if found is None or found[0]() is not weight:
        found = (weakref.ref(array, lambda _: _packed.pop(whole, None)), pack().to(weight))
        _packed[whole] = found
    return found[1]
