"""Numbers among the options of every operation: NaN is refused by name, on each device and before anything is written,
and so is what is not finite in float32, but where infinity means something."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from pykv._schema import all_ops
from pykv._tools import check, devices
from pykv._tools.samples import ADDRESSED

OF_KIND = {kind: [] for kind in ("float", "read")}  # type: dict[str, list[tuple[str, str]]]
for _name, _op in all_ops().items():
    for _p in _op.parameters:
        if _p.kind in OF_KIND and _name not in ADDRESSED:
            OF_KIND[_p.kind].append((_name, _p.name))
MAY_BE_INFINITE = {"limit", "clamp_limit", "threshold", "softcap", "soft_cap"}  # then nothing is bounded
# Negative ones are refused anyway.
NOT_NEGATIVE = {"softcap", "soft_cap"}


def refuses(name: str, key: str, value: float, device: devices.Device, *, as_a_number: bool = True) -> bool:
    """Whether the call is refused, then for that number and before anything was written."""
    given = check.arguments(name, (), device)
    written = [p.name for p in all_ops()[name].parameters if p.kind == "written" and given.get(p.name) is not None]
    before = {n: device.read(given[n]).copy() for n in written}
    given[key] = value
    try:
        all_ops()[name].direct(**given)
    except (TypeError, ValueError, NotImplementedError) as refused:
        error = str(refused)
    else:
        return False
    assert re.match(rf"{name}: .*\b{key}\b", error) or not as_a_number, error
    for n, x in before.items():
        assert device.read(given[n]).tobytes() == x.tobytes(), n
    return True


@pytest.mark.parametrize(("name", "key"), OF_KIND["float"])
def test_an_option(name: str, key: str, device: devices.Device) -> None:
    assert refuses(name, key, np.nan, device)
    for infinite in (np.inf, 1e300, -np.inf):
        may_be = key in MAY_BE_INFINITE and not (infinite < 0 and key in NOT_NEGATIVE)
        assert refuses(name, key, infinite, device) == (not may_be), infinite


@pytest.mark.parametrize(("name", "key"), OF_KIND["read"])
def test_a_number_in_place_of_an_array(name: str, key: str, device: devices.Device) -> None:
    """Where there may be one, NaN may not be; or the number is not looked at."""
    if refuses(name, key, 1.0, device, as_a_number=False):
        assert refuses(name, key, np.nan, device, as_a_number=False)
        return
    if refuses(name, key, np.nan, device):
        return
    given: list[dict[str, Any]] = [check.arguments(name, (), device) for _ in range(2)]
    given[0][key] = np.nan
    of_nan, usual = (check.results(name, device, given=g) for g in given)
    for n, x in usual.items():
        np.testing.assert_array_equal(of_nan[n], x)
