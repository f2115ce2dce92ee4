"""``pykv bench``: throughput of the operations, beside a plain copy of as many bytes on this machine.

A case is a call of a size that means something (``workloads``), or, for operations on rows, the operation's sample with
more and wider rows.  Bytes are those that a call must read and write.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pykv import _C
from pykv._libraries import numpy_dtype
from pykv._schema import Op, Spec, all_ops
from pykv._tools import devices, output
from pykv._tools.errors import CommandError, known_ops
from pykv._tools.samples import ADDRESSED, ON_HOST, WORKLOADS, Tokens, Workload, sample, size_of
from pykv._tools.timing import Call, Case, Cpu, Cuda, Device, Figure, about, lines, measure, table

HIDDEN, GROUP = 4096, 128
MOST_IN_A_PANEL = 16
# What the sizes in the samples of these operations stand for: numbers, rows, a row, a row of two halves.
SIZES: Mapping[int, Callable[[int], int]] = {
    1: lambda _: 1,
    3: lambda n: n,
    8: lambda _: HIDDEN,
    16: lambda _: 2 * HIDDEN,
}


def row_ops() -> list[str]:
    """Operations whose every argument that is read is a row, rows or a number."""

    def on_rows(op: Op) -> bool:
        read = {k: v for k, v in sample(op.name).items() if k not in op.rules}
        arrays = [v for v in read.values() if isinstance(v, np.ndarray)]
        return "input" in read and all(v.dtype == np.float32 and set(v.shape) <= set(SIZES) for v in arrays)

    return sorted(name for name, op in all_ops().items() if name not in WORKLOADS and on_rows(op))


def _on_rows(op: Op, tokens: int, dtype: str) -> Workload:
    """The sample's arguments at that size, without its outputs."""
    given: dict[str, Any] = {}
    numbers = {p.name for p in op.parameters if p.may_be_number}
    for name, value in sample(op.name).items():
        if name in op.rules:
            continue
        if isinstance(value, np.ndarray):
            shape = tuple(SIZES[n](tokens) for n in value.shape)
            given[name] = Spec(shape, "float32" if name in numbers else dtype)
        else:
            given[name] = GROUP if name == "group_size" else value
    return Workload(given)


def with_outputs(op: Op, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with those that the schema knows to be written; the libraries' arrays of fp8 are bytes."""
    known = {k: Spec(v.shape, str(v.dtype)) if isinstance(v, np.ndarray) else v for k, v in arguments.items()}
    made = op.infer(known)
    return {**arguments} | {
        k: Spec(s.shape, "uint8" if s.dtype.startswith("float8") else s.dtype) for k, s in made.items()
    }


def num_bytes(op: Op, workload: Workload) -> int:
    """That a call must move: what it reads, what it writes, and both of what it changes."""
    arguments = with_outputs(op, workload.arguments)
    return sum(
        workload.touched[p.name] if p.name in workload.touched
        # what is changed is read and written
        else _size(arguments.get(p.name)) * (2 if p.kind.startswith("written") and p.name not in op.rules else 1)
        for p in op.parameters
    )  # fmt: skip


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    if isinstance(value, Spec):
        return size_of(value)
    return value.nbytes if isinstance(value, np.ndarray) else 0


def _make(op: Op, workload: Workload, device: Device) -> Call:
    def array(name: str, value: Any) -> Any:
        if isinstance(value, list):
            return [array(name, v) for v in value]
        if isinstance(value, np.ndarray):
            return value if name in ON_HOST else device.array(value)
        if isinstance(value, Spec):
            integers = numpy_dtype(value.dtype).kind in "iu"
            return device.array(np.zeros(value.shape, value.dtype)) if integers else device.random(*value)
        return value

    arguments = with_outputs(op, workload.arguments)
    return partial(op.direct, **{k: array(k, v) for k, v in arguments.items()})


def cases(ops: Sequence[str], tokens: Sequence[int], dtype: str) -> Iterator[Case]:
    rows = row_ops()
    for name in ops:
        op = all_ops()[name]
        if name not in rows and name not in WORKLOADS:  # on what its sample has
            plain = Workload({k: v for k, v in sample(name).items() if k not in op.rules})
            yield Case(name, {}, "float32", num_bytes(op, plain), partial(_make, op, plain))
            continue
        for n in tokens:
            workload = WORKLOADS[name](Tokens(n, dtype)) if name in WORKLOADS else _on_rows(op, n, dtype)
            size = {"tokens": n} | ({"hidden": HIDDEN} if name in rows else {})
            yield Case(name, size, dtype, num_bytes(op, workload), partial(_make, op, workload))


def matplotlib_figure() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise CommandError("--plot needs matplotlib: pip install 'pykv-kernels[cli]'") from None


def _family(op: str) -> str:
    return all_ops()[op].function.__module__.rpartition(".")[2]


def plot(path: Path, title: str, figures: Sequence[Figure]) -> None:
    """Throughput over the bytes of a call, under the roof that a copy of as many bytes gives.

    Many operations have a panel for each family.
    """
    ops = list(dict.fromkeys(f.op for f in figures))
    panels: dict[str, list[str]] = {}
    by_family = len(ops) > MOST_IN_A_PANEL and all_ops().keys() >= set(ops)
    for op in ops:
        panels.setdefault(_family(op) if by_family else "", []).append(op)
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    figure = matplotlib_figure()(figsize=(max(7, 5.5 * columns), 6 * rows), layout="constrained")
    figure.suptitle(title)
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes, (family, members) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, family, [(op, [f for f in figures if f.op == op]) for op in members])
    figure.savefig(path)


def _panel(axes: Any, family: str, by_op: Sequence[tuple[str, Sequence[Figure]]]) -> None:
    roof = sorted({(f.num_bytes, f.num_bytes / f.copy_us / 1e3) for _, figures in by_op for f in figures})
    axes.plot(*zip(*roof, strict=True), color="black", label="copy")
    for i, (op, figures) in enumerate(by_op):
        points = sorted((f.num_bytes, f.gb_per_s) for f in figures)
        marker = "os^Dv"[i // 10 % 5]  # there are ten colors
        axes.plot(*zip(*points, strict=True), f"{marker}-", color=f"C{i % 10}", linewidth=0.7, markersize=4, label=op)
    axes.set(xscale="log", yscale="log", xlabel="bytes read and written by a call", ylabel="GB/s", title=family)
    axes.legend(fontsize="x-small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))


def _device(name: str) -> tuple[AbstractContextManager[Any], Callable[[], Device]]:
    found = devices.device(name)
    if found is devices.CPU:
        return nullcontext(), Cpu
    if found.library != "CuPy":
        raise CommandError(f"{found.name}: timing on CUDA needs CuPy, with which its graphs are captured")
    return found.current(), Cuda


def _measured(place: Device, wanted: Sequence[Case]) -> tuple[list[Figure], bool]:
    """The figures, and whether Ctrl-C ended it: those that are done are kept."""
    figures: list[Figure] = []
    with closing(output.progress(wanted, "measuring")) as steps:
        try:
            for figure in measure(place, steps):
                figures.append(figure)
        except KeyboardInterrupt:
            return figures, True
    return figures, False


def run(ops: Sequence[str], device: str | None, tokens: Sequence[int], dtype: str, json_to: Path | None,
        plot_to: Path | None) -> int:  # fmt: skip
    known_ops(ops)
    if addressed := [op for op in ops if op in ADDRESSED]:
        raise CommandError(f"{', '.join(addressed)}: takes addresses; see benchmarks/cache")
    for path in filter(None, (json_to, plot_to)):
        if not path.absolute().parent.is_dir():
            raise CommandError(f"{path}: there is no folder {path.absolute().parent}")
    if plot_to:
        matplotlib_figure()  # it is missing before anything is measured
    try:
        wanted = list(cases(list(ops) or [name for name in all_ops() if name not in ADDRESSED], tokens, dtype))
    except ImportError as error:
        raise CommandError(f"{error}; or try --dtype float16") from None
    context, make = _device(device or ("cuda:0" if _C.cuda_device_count() else "cpu"))
    with context:
        place = make()
        figures, interrupted = _measured(place, wanted)
        facts = about(place)
        title = f"{place.describe()['name']}, {dtype}"
    to_stdout = str(json_to) == "-"
    if interrupted:
        print(f"interrupted: {len(figures)} of {len(wanted)} figures", file=sys.stderr)
    output.show(title, *table(figures), right=2, file=sys.stderr if to_stdout else None)
    if json_to:
        text = json.dumps(facts | {"figures": lines(figures)}, indent=1) + "\n"
        if to_stdout:
            sys.stdout.write(text)
        else:
            json_to.write_text(text)
    if plot_to and figures:
        plot(plot_to, title, figures)
    return 130 if interrupted else 0
