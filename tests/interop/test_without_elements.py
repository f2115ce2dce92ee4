"""Arrays without elements, in place of each array of each operation: those without memory, as CuPy and torch have them
on a GPU, are as those that have an address; and a GPU does what the CPU does."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import pykv
from pykv._schema import all_ops
from pykv._tools import check, devices
from pykv._tools.samples import ADDRESSED, ON_HOST, sample

# A GPU wants bytes there, the CPU does not; sections that lie on a GPU are not looked at.
OTHERWISE_ON_A_GPU = {("paged_attention", "workspace"), ("mrope", "cos_sin_cache")}
NAMES = sorted(set(all_ops()) - ADDRESSED)
OTHERWISE = (np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8)  # of arguments that samples have not


def without_elements(value: Any) -> Iterator[np.ndarray]:
    if not isinstance(value, np.ndarray):
        for dtype in OTHERWISE:
            yield np.zeros(0, dtype)
            yield np.zeros((0, 8), dtype)
        return
    shapes = {(0,)} | {(*value.shape[:axis], 0, *value.shape[axis + 1 :]) for axis in range(value.ndim)}
    for shape in sorted(shapes):
        yield np.zeros(shape, value.dtype)


def outcome(name: str, key: str, empty: Any, device: devices.Device) -> check.Recorded | str:
    """What is written beside it, or how that is refused."""
    op, given = all_ops()[name], check.arguments(name, (), device)
    given[key] = empty
    try:
        op.direct(**given)
        if device is not devices.CPU:
            pykv.check_errors(device.name)
    except (TypeError, ValueError, NotImplementedError) as refused:
        # Which id or argument is met first is left open.
        return re.sub(f"{name}: .* is out of range .*", "out of range", f"{type(refused).__name__}: {refused}")
    others = {p.name: given[p.name] for p in op.parameters if p.kind == "written" and p.name in given}
    return {k: device.read(x) for k, x in others.items() if k != key and x is not None}


@pytest.mark.parametrize("name", NAMES)
def test_in_place_of_each_array(name: str, device: devices.Device) -> None:
    usual = sample(name)
    for p in all_ops()[name].parameters:
        if p.kind not in ("read", "written") or (name, p.name) in OTHERWISE_ON_A_GPU:
            continue
        for empty in without_elements(usual.get(p.name)):
            wanted = outcome(name, p.name, empty, devices.CPU)
            if device is devices.CPU or p.name in ON_HOST:
                without_memory = pykv.from_pointer(0, empty.shape, empty.dtype, "cpu")
            else:
                without_memory = device.array(empty)
            found = outcome(name, p.name, without_memory, device)
            what = f"{p.name}: {empty.dtype}{list(empty.shape)}"
            if isinstance(wanted, str) or isinstance(found, str):
                assert found == wanted, what
            else:
                _, wrong = check.compare(found, wanted)
                assert not wrong, f"{what}: {wrong}"
