"""``pykv check``: every operation against recorded results.

Each is called with its sample, then with bfloat16 and heads of 128, then, where it takes those, with caches of e4m3.
The results come from references in NumPy that share nothing with the kernels; ``expected/<family>.npz`` hold them.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Collection, Mapping, Sequence
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
from pykv._tools.samples._served import NARROW, parts, served

FOLDER = Path(__file__).parent / "expected"
# (absolute, relative): what the arithmetic of float32, in any order, may lose; codes and other integers are exact
TOLERANCE = {"float32": (1e-5, 2e-6), "float16": (1e-3, 1e-3)}
# Of variants, where operations may round between, which the references do not: codes may be neighbours.
ROUNDED = {"float32": (1e-3, 1e-2), "float16": (1e-3, 1e-2), "uint8": (1, 0)}
BFLOAT16 = 2**-7  # of the largest value, and of the value
HOST_ONLY = dict.fromkeys(ADDRESSED, "addresses are those of the host here")

Recorded = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Outcome:
    op: str  # and the variant
    device: str
    result: str  # "pass", "FAIL" or "skipped"
    error: float | None = None  # the largest difference, absolute
    why: str = ""


def recorded() -> dict[str, Recorded]:
    """Call -> what it gives, "parameter" or "parameter/number of the list" -> array."""
    found: dict[str, Recorded] = {}
    for path in sorted(FOLDER.glob("*.npz")):
        with np.load(path) as file:
            for key in file.files:
                name, _, parameter = key.partition("/")
                found.setdefault(name, {})[parameter] = file[key]
    return found


def arguments(call: str, narrow: Collection[str], device: Device) -> dict[str, Any]:
    def convert(key: str, value: Any) -> Any:
        if isinstance(value, list):
            return [convert(key, v) for v in value]
        return device.array(value) if isinstance(value, np.ndarray) and key not in ON_HOST else value

    name, variant = parts(call)
    given = served(name, variant, narrow) if variant else sample(name)
    return {k: convert(k, v) for k, v in given.items()}


def results(
    call: str, device: Device, narrow: Collection[str] = (), given: Mapping[str, Any] | None = None
) -> Recorded:
    """Makes the call, with its own arguments or these; every array that it writes and that others read."""
    name, _ = parts(call)
    op, given = all_ops()[name], arguments(call, narrow, device) if given is None else given
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
        arrays = {f"{p.name}/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {p.name: value}
        found |= {key: device.read(array) for key, array in arrays.items()}
    return found


def _allowed(wanted: npt.NDArray[Any], dtype: str, tolerance: Mapping[str, tuple[float, float]]) -> npt.NDArray[Any]:
    size = np.where(np.isfinite(wanted), np.abs(wanted), 0)
    if dtype == "bfloat16":
        return np.asarray(BFLOAT16 * (size.max(initial=0) + size))
    absolute, relative = tolerance.get(dtype, (0.0, 0.0))
    return absolute + relative * size


def compare(
    got: Recorded, wanted: Recorded, tolerance: Mapping[str, tuple[float, float]] = TOLERANCE
) -> tuple[float, str]:
    """The largest error of numbers, and what is wrong."""
    largest, wrong = 0.0, ""
    for key, expected in wanted.items():
        actual = got[key]
        if actual.dtype.name == "bfloat16":
            expected = expected.view(actual.dtype)  # recorded as its bits
        if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
            came, should = (f"{a.dtype}{list(a.shape)}" for a in (actual, expected))
            return math.inf, f"{key}: {came}, not {should}"
        found, wanted_value = actual.astype(np.float64), expected.astype(np.float64)
        same = found == wanted_value  # infinities, too, which have no difference
        difference = np.abs(np.where(same, 0, found) - np.where(same, 0, wanted_value))
        difference = np.where(np.isnan(difference), np.inf, difference)
        bad = np.argwhere(~(difference <= _allowed(wanted_value, expected.dtype.name, tolerance)))
        if len(bad) and not wrong:
            at = tuple(bad[0].tolist())
            wrong = f"{key}{list(at)}: {actual[at]}, not {expected[at]}; {len(bad)} of {actual.size} are wrong"
        if expected.dtype.kind not in "iub":  # codes that differ by one, where they may, are no measure of an error
            largest = max(largest, float(difference.max(initial=0)))
    return largest, wrong


def check(call: str, device: Device, wanted: Recorded) -> Outcome:
    if call in HOST_ONLY and device is not devices.CPU:
        return Outcome(call, device.name, "skipped", why=HOST_ONLY[call])
    narrow = wanted.get(NARROW, np.array([], str)).tolist()
    if narrow and importlib.util.find_spec("ml_dtypes") is None:
        return Outcome(call, device.name, "skipped", why="bfloat16 in NumPy needs ml_dtypes")
    try:
        with device.current():
            found = results(call, device, narrow)
            error, wrong = compare(
                found, {k: v for k, v in wanted.items() if k != NARROW}, ROUNDED if narrow else TOLERANCE
            )
    except Exception as raised:  # whatever it is: the operation did not work
        return Outcome(call, device.name, "FAIL", why=f"{type(raised).__name__}: {raised}".splitlines()[0])
    return Outcome(call, device.name, "FAIL" if wrong else "pass", error, wrong)


def _as_json(outcomes: Sequence[Outcome]) -> str:
    found = [asdict(o) | {"error": o.error if math.isfinite(o.error or 0) else None} for o in outcomes]
    return json.dumps({"pykv": pykv.__version__, "outcomes": found}, indent=1)


def run(ops: Sequence[str], wanted_devices: Sequence[str], quiet: bool, as_json: bool) -> int:
    everything = recorded()
    wanted = known_ops(ops)
    if missing := set(wanted) - set(everything):
        raise CommandError(f"there are no results of {', '.join(sorted(missing))}")
    made = [call for op in wanted for call in everything if parts(call)[0] == op]
    calls = [(call, devices.device(d)) for d in wanted_devices or devices.names() for call in made]
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
