"""Where the time of steps goes: each operation of pykv and of the array library, timed from outside."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

from engine import Engine
from rich.console import Console
from rich.table import Table

PRODUCTS = "matrix products"
BY_LIBRARY = {"linear": PRODUCTS, "rows": "row lookup", "scale": "scale", "softcap": "soft cap", "put": "put on device"}
BY_CACHE = ("append", "truncate", "free", "fork", "seq_lens", "block_tables")


class Profile:
    """On a GPU each operation is waited for, so that steps take longer than they do without."""

    def __init__(self, engine: Engine):
        arrays = engine.model.arrays
        self._wait = _waiter(arrays.namespace, getattr(arrays, "device", "cpu"))
        self._seconds: Counter[str] = Counter()
        self._calls: Counter[str] = Counter()
        self._steps: list[tuple[float, float]] = []  # all of a step, and what of it is neither products nor pykv
        self._pykv = {"sample", *(f"PagedKVCache.{name}" for name in BY_CACHE)}
        self._depth = 0
        for name, title in BY_LIBRARY.items():
            setattr(arrays, name, self._timed(title, getattr(arrays, name)))
        arrays.sample = self._timed("sample", arrays.sample)  # type: ignore[method-assign]
        arrays.ops = _Operations(arrays.ops, self)  # type: ignore[assignment]
        for name in BY_CACHE:
            setattr(engine.cache, name, self._timed(f"PagedKVCache.{name}", getattr(engine.cache, name)))
        engine.step = self._step(engine.step)  # type: ignore[method-assign]

    def operation(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        self._pykv.add(name)
        return self._timed(name, function)

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                result = function(*args, **options)
                self._wait()
            finally:
                self._depth -= 1
            if self._depth == 0:  # what another operation calls is part of that one
                self._seconds[name] += time.perf_counter() - began
                self._calls[name] += 1
            return result

        return call

    def _step(self, step: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            before, began = self._inside(), time.perf_counter()
            result = step()
            seconds = time.perf_counter() - began
            self._steps.append((seconds, seconds - (self._inside() - before)))
            return result

        return call

    def _inside(self) -> float:
        return sum(self._seconds[name] for name in (PRODUCTS, *self._pykv))

    def report(self, console: Console) -> None:
        total = sum(seconds for seconds, _ in self._steps)
        table = Table(box=None, pad_edge=False)
        for heading in ("operation", "calls", "ms", "share"):
            table.add_column(heading, justify="left" if heading == "operation" else "right")
        for name, seconds in self._seconds.most_common():
            table.add_row(name, str(self._calls[name]), f"{1e3 * seconds:.1f}", f"{seconds / total:.1%}")
        rest = total - sum(self._seconds.values())
        table.add_row("Python between them", "", f"{1e3 * rest:.1f}", f"{rest / total:.1%}")
        console.print(table)
        shares = [outside / seconds for seconds, outside in self._steps]
        share = sum(outside for _, outside in self._steps) / total
        line = f"outside products and pykv: {share:.1%} of all; of a step "
        line += f"{statistics.median(shares):.1%} (median), {max(shares):.1%} (most)"
        console.print(line, highlight=False)


class _Operations:
    """pykv's operations, each timed."""

    def __init__(self, module: ModuleType, profile: Profile):
        self._module, self._profile = module, profile

    def __getattr__(self, name: str) -> Callable[..., Any]:
        timed = self._profile.operation(name, getattr(self._module, name))
        setattr(self, name, timed)
        return timed


def _waiter(namespace: ModuleType, device: str) -> Callable[[], object]:
    if namespace.__name__ == "cupy":
        return namespace.cuda.Device().synchronize  # type: ignore[no-any-return]
    if device.startswith("cuda"):
        return namespace.cuda.synchronize  # type: ignore[no-any-return]
    return lambda: None
