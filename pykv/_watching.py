"""What ``PYKV_LOG`` asks for: calls as lines of text, as NVTX ranges, and as ranges of torch's profiler."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final, TextIO

from pykv._schema import Op, Parameter

_DEVICES: Final = {1: "cpu", 2: "cuda", 3: "cuda_host", 13: "cuda_managed"}  # DLDeviceType

Range = Callable[[str], AbstractContextManager[Any]]  # of a name


class Watcher:
    """Lines go to ``file``, where there is one; calls run within all of ``ranges``."""

    def __init__(self, file: TextIO | None, ranges: list[Range]) -> None:
        self._file, self._ranges = file, ranges

    def around(self, op: Op, call: Callable[..., None]) -> Callable[..., None]:
        """The call, watched."""

        def watched(*args: Any, **kwargs: Any) -> None:
            if self._file is not None:  # before the call: of one that crashes the line is there
                self._file.write(line(op, args, kwargs) + "\n")
                self._file.flush()
            with ExitStack() as ranges:
                for make in self._ranges:
                    ranges.enter_context(make(f"pykv.{op.name}"))
                call(*args, **kwargs)

        return watched


def watcher(entries: str) -> Watcher | None:
    """Of ``stderr``, ``nvtx``, ``torch`` and the path of a file, joined by commas; None: nothing is asked for.

    Raises:
        ValueError: an entry is none of these, two say where lines go, or nvtx is not installed.
        OSError: the file cannot be opened.
    """
    lines_to: list[str] = []
    ranges: list[Range] = []
    for entry in filter(None, (e.strip() for e in entries.split(","))):
        if entry == "nvtx":
            ranges.append(_nvtx())
        elif entry == "torch":
            ranges.append(_torch_range)
        elif entry == "stderr" or "/" in entry or "." in entry:
            lines_to.append(entry)
        else:
            raise ValueError(f"PYKV_LOG: must be 'stderr', 'nvtx', 'torch' or a path with / or ., got {entry!r}")
    if len(lines_to) > 1:
        raise ValueError(f"PYKV_LOG: lines go to one place, got {' and '.join(lines_to)}")
    if not lines_to and not ranges:
        return None
    file = None if not lines_to else sys.stderr if lines_to == ["stderr"] else Path(lines_to[0]).open("a")  # noqa: SIM115
    return Watcher(file, ranges)


def _nvtx() -> Range:
    try:
        annotate = importlib.import_module("nvtx").annotate
    except ImportError:
        raise ValueError("PYKV_LOG: the package nvtx is not installed: pip install nvtx") from None
    return partial(annotate, domain="pykv")


def _torch_range(name: str) -> AbstractContextManager[Any]:
    """Imported at a call: torch imports pykv's part of it, which wants a pykv that is whole."""
    made: AbstractContextManager[Any] = importlib.import_module("torch").profiler.record_function(name)
    return made


def line(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The call: arrays by dtype, shape and device, everything else by its value."""
    parameters = {p.name: p for p in op.parameters}
    given = dict(zip(parameters, args, strict=False)) | kwargs
    stream = given.pop("stream", None)
    shown = [f"{name}={_described(parameters.get(name), value)}" for name, value in given.items()]
    return f"pykv.{op.name}({', '.join([*shown, f'stream={_stream(stream)}'])})"


def _described(p: Parameter | None, value: Any) -> str:
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "shape"):
        return f"{len(value)} x {_described(p, value[0])}"
    if p is None or not p.is_array or value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    dtype = str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")
    return f"{dtype}{list(getattr(value, 'shape', ()))} {_device(value)}"


def _device(value: Any) -> str:
    if not hasattr(value, "__dlpack_device__"):
        return "cuda" if hasattr(value, "__cuda_array_interface__") else "?"
    kind, ordinal = value.__dlpack_device__()
    name = _DEVICES.get(int(kind), f"device {int(kind)}")
    return name if name == "cpu" else f"{name}:{int(ordinal)}"


def _stream(stream: Any) -> str:
    if stream is None:
        return "current"
    handle = next((getattr(stream, a) for a in ("cuda_stream", "ptr") if hasattr(stream, a)), stream)
    return hex(handle) if isinstance(handle, int) else repr(handle)
