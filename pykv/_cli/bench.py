"""``python -m pykv bench``: throughput of the operations on rows, beside a plain copy of as many bytes on this machine.

A case is the operation's sample with more and wider rows.  What has caches, angles or sequences has benchmarks of its
own in the repository, where their sizes mean something.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pykv import _C
from pykv._cli import devices, output
from pykv._cli.errors import CommandError, known_ops
from pykv._libraries import numpy_dtype
from pykv._samples import sample
from pykv._schema import Op, Spec, all_ops
from pykv._timing import Call, Case, Cpu, Cuda, Device, Figure, about, lines, measure, table

HIDDEN, GROUP = 4096, 128
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

    return sorted(name for name, op in all_ops().items() if on_rows(op))


def specs(op: Op, tokens: int, dtype: str) -> dict[str, Any]:
    """The sample's arguments at that size, arrays as :class:`Spec`; what is written comes from the schema."""
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
    # the libraries' arrays of fp8 are bytes
    outputs = {
        k: Spec(s.shape, "uint8" if s.dtype.startswith("float8") else s.dtype) for k, s in op.infer(given).items()
    }
    return given | outputs


def num_bytes(op: Op, arguments: Mapping[str, Any]) -> int:
    """That a call must move: what it reads, what it writes, and both of what it changes."""
    total = 0
    for p in op.parameters:
        spec = arguments.get(p.name)
        if isinstance(spec, Spec):
            ways = 2 if p.kind == "written" and p.name not in op.rules else 1
            total += ways * math.prod(spec.shape) * numpy_dtype(spec.dtype).itemsize
    return total


def _make(op: Op, arguments: Mapping[str, Any], device: Device) -> Call:
    def array(spec: Spec) -> Any:
        if spec.dtype == "uint8":
            return device.array(np.zeros(spec.shape, np.uint8))
        return device.random(spec.shape, spec.dtype)

    return partial(op.direct, **{k: array(v) if isinstance(v, Spec) else v for k, v in arguments.items()})


def cases(ops: Sequence[str], tokens: Sequence[int], dtype: str) -> Iterator[Case]:
    for name in ops:
        op = all_ops()[name]
        for n in tokens:
            arguments = specs(op, n, dtype)
            size = {"tokens": n, "hidden": HIDDEN}
            yield Case(name, size, dtype, num_bytes(op, arguments), partial(_make, op, arguments))


def matplotlib_figure() -> Any:
    try:
        return importlib.import_module("matplotlib.figure").Figure
    except ImportError:
        raise CommandError("--plot needs matplotlib: pip install 'pykv[cli]'") from None


def plot(path: Path, title: str, figures: Sequence[Figure]) -> None:
    """Throughput over the bytes of a call, under the roof that a copy of as many bytes gives."""
    figure = matplotlib_figure()(figsize=(7, 6), layout="constrained")
    axes = figure.subplots()
    roof = sorted({(f.num_bytes, f.num_bytes / f.copy_us / 1e3) for f in figures})
    axes.plot(*zip(*roof, strict=True), color="black", label="copy")
    for op in dict.fromkeys(f.op for f in figures):
        points = sorted((f.num_bytes, f.gb_per_s) for f in figures if f.op == op)
        axes.plot(*zip(*points, strict=True), "o-", linewidth=0.7, markersize=4, label=op)
    axes.set(xscale="log", yscale="log", xlabel="bytes read and written by a call", ylabel="GB/s", title=title)
    figure.legend(fontsize="x-small", ncols=3, loc="outside lower center")
    figure.savefig(path)


def _device(name: str) -> tuple[AbstractContextManager[Any], Callable[[], Device]]:
    found = devices.device(name)
    if found is devices.CPU:
        return nullcontext(), Cpu
    if found.library != "CuPy":
        raise CommandError(f"{found.name}: timing on CUDA needs CuPy, with which its graphs are captured")
    return found.current(), Cuda


def run(ops: Sequence[str], device: str | None, tokens: Sequence[int], dtype: str, json_to: Path | None,
        plot_to: Path | None) -> int:  # fmt: skip
    known_ops(ops)
    timed = row_ops()
    others = [op for op in ops if op not in timed]
    if others:
        raise CommandError(
            f"{', '.join(others)}: not timed here, for it is no operation on rows; see benchmarks/ of pykv"
        )
    for path in filter(None, (json_to, plot_to)):
        if not path.absolute().parent.is_dir():
            raise CommandError(f"{path}: there is no folder {path.absolute().parent}")
    if plot_to:
        matplotlib_figure()  # it is missing before anything is measured
    try:
        wanted = list(cases(list(ops) or timed, tokens, dtype))
    except ImportError as error:
        raise CommandError(f"{error}; or try --dtype float16") from None
    context, make = _device(device or ("cuda:0" if _C.cuda_device_count() else "cpu"))
    with context:
        place = make()
        figures = list(measure(place, output.progress(wanted, "measuring")))
        facts = about(place)
        title = f"{place.describe()['name']}, {dtype}"
    output.show(title, *table(figures), right=2)
    if json_to:
        json_to.write_text(json.dumps(facts | {"figures": lines(figures)}, indent=1) + "\n")
    if plot_to:
        plot(plot_to, title, figures)
    return 0
