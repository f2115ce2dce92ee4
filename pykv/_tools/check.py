"""``pykv check``: every operation against recorded results.

The results come from references in NumPy that share nothing with the kernels; ``expected/<family>.npz`` hold them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pykv
from pykv._schema import all_ops
from pykv._tools import devices, output
from pykv._tools.devices import Device
from pykv._tools.errors import CommandError, known_ops
from pykv._tools.samples import ADDRESSED, MEMORY, ON_HOST, sample

FOLDER = Path(__file__).parent / "expected"
# (absolute, relative): what the arithmetic of float32, in any order, may lose; codes and other integers are exact
TOLERANCE = {"float32": (1e-5, 2e-6), "float16": (1e-3, 1e-3)}
HOST_ONLY = dict.fromkeys(ADDRESSED, "addresses are those of the host here")

Recorded = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Outcome:
    op: str
    device: str
    result: str  # "pass", "FAIL" or "skipped"
    error: float | None = None  # the largest difference, absolute
    why: str = ""


def recorded() -> dict[str, Recorded]:
    """Operation -> what its sample gives, "parameter" or "parameter/number of the list" -> array."""
    found: dict[str, Recorded] = {}
    for path in sorted(FOLDER.glob("*.npz")):
        with np.load(path) as file:
            for key in file.files:
                name, _, parameter = key.partition("/")
                found.setdefault(name, {})[parameter] = file[key]
    return found


def _arguments(name: str, device: Device) -> dict[str, Any]:
    def convert(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [convert(key, v) for v in value]
        return device.array(value) if isinstance(value, np.ndarray) and key not in ON_HOST else value

    return {k: convert(k, v) for k, v in sample(name).items()}


def results(name: str, device: Device) -> Recorded:
    """Runs the sample; every array that it writes and that others than the operation read."""
    op, given = all_ops()[name], _arguments(name, device)
    op.direct(**given)
    if device is not devices.CPU:
        pykv.check_errors(device.name)
    if name in HOST_ONLY:
        return {"memory": MEMORY}
    found: Recorded = {}
    for p in op.parameters:
        value = given.get(p.name)
        if value is None or not p.kind.startswith("written") or (p.name in op.rules and op.rules[p.name].is_scratch):
            continue
        parts = {f"{p.name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {p.name: value}
        found |= {key: device.read(array) for key, array in parts.items()}
    return found


def compare(got: Recorded, wanted: Recorded) -> tuple[float, str]:
    """The largest error, and what is wrong."""
    largest, wrong = 0.0, ""
    for key, expected in wanted.items():
        actual = got[key]
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            came, should = (f"{a.dtype}{list(a.shape)}" for a in (actual, expected))
            return math.inf, f"{key}: {came}, not {should}"
        found, wanted_value = actual.astype(np.float64), expected.astype(np.float64)
        same = found == wanted_value  # infinities, too, which have no difference
        difference = np.abs(np.where(same, 0, found) - np.where(same, 0, wanted_value))
        difference = np.where(np.isnan(difference), np.inf, difference)
        absolute, relative = TOLERANCE.get(expected.dtype.name, (0.0, 0.0))
        allowed = absolute + relative * np.where(np.isfinite(wanted_value), np.abs(wanted_value), 0)
        bad = np.argwhere(~(difference <= allowed))
        if len(bad) and not wrong:
            at = tuple(bad[0].tolist())
            wrong = f"{key}{list(at)}: {actual[at]}, not {expected[at]}; {len(bad)} of {actual.size} are wrong"
        largest = max(largest, float(difference.max(initial=0)))
    return largest, wrong


def check(name: str, device: Device, wanted: Recorded) -> Outcome:
    if name in HOST_ONLY and device is not devices.CPU:
        return Outcome(name, device.name, "skipped", why=HOST_ONLY[name])
    try:
        with device.current():
            error, wrong = compare(results(name, device), wanted)
    except Exception as raised:  # whatever it is: the operation did not work
        return Outcome(name, device.name, "FAIL", why=f"{type(raised).__name__}: {raised}".splitlines()[0])
    return Outcome(name, device.name, "FAIL" if wrong else "pass", error, wrong)


def _as_json(outcomes: Sequence[Outcome]) -> str:
    found = [asdict(o) | {"error": o.error if math.isfinite(o.error or 0) else None} for o in outcomes]
    return json.dumps({"pykv": pykv.__version__, "outcomes": found}, indent=1)


def run(ops: Sequence[str], wanted_devices: Sequence[str], quiet: bool, as_json: bool) -> int:
    everything = recorded()
    calls = [(op, devices.device(d)) for d in wanted_devices or devices.names() for op in known_ops(ops)]
    missing = {op for op, _ in calls} - set(everything)
    if missing:
        raise CommandError(f"there are no results of {', '.join(sorted(missing))}")
    steps = output.progress(calls, "checking", lambda call: f"{call[0]} on {call[1].name}")
    outcomes = [check(op, device, everything[op]) for op, device in steps]
    if as_json:
        print(_as_json(outcomes))
        return 1 if any(o.result == "FAIL" for o in outcomes) else 0
    rows = [
        (o.op, o.device, o.result, "" if o.error is None else "0" if o.error == 0 else f"{o.error:.1e}", o.why)
        for o in outcomes
        if not quiet or o.result == "FAIL"
    ]
    if rows:
        output.show("Every operation against recorded results", ("operation", "device", "result", "error", ""), rows)
    failed = sum(o.result == "FAIL" for o in outcomes)
    skipped = sum(o.result == "skipped" for o in outcomes)
    largest = max((o.error for o in outcomes if o.error is not None), default=0.0)
    print(f"{len(outcomes) - failed - skipped} passed, {failed} failed, {skipped} skipped; largest error {largest:.1e}")
    return 1 if failed else 0
