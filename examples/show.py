"""What a user sees while texts are made, and at the end."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from engine import Counters, Engine, Request
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text
from text import Growing


class Step(NamedTuple):
    prompt_tokens: int
    decoded_tokens: int
    seconds: float


class Rates:
    """Tokens and seconds.  The time of a step belongs to prompts and to what follows them by the tokens of each."""

    def __init__(self, counters: Counters):
        self._counters, self._before = counters, replace(counters)
        self._last = self.began = time.perf_counter()
        self.steps: list[Step] = []

    def count(self) -> None:
        """What was done since the last call is a step."""
        now, done, before = time.perf_counter(), self._counters, self._before
        prompt, decoded = done.prompt_tokens - before.prompt_tokens, done.decoded_tokens - before.decoded_tokens
        if prompt or decoded:
            self.steps.append(Step(prompt, decoded, now - self._last))
        self._last, self._before = now, replace(done)

    @property
    def seconds(self) -> float:
        return self._last - self.began

    def of_prompts(self) -> Rate:
        return self._rate("prompt_tokens")

    def of_generation(self) -> Rate:
        """Without the first token of each text, which comes of its prompt."""
        return self._rate("decoded_tokens")

    def _rate(self, kind: str) -> Rate:
        counts = [(getattr(step, kind), step.prompt_tokens + step.decoded_tokens, step.seconds) for step in self.steps]
        return Rate(sum(n for n, _, _ in counts), sum(seconds * n / total for n, total, seconds in counts))


@dataclass
class Rate:
    tokens: int
    seconds: float

    def __str__(self) -> str:
        rate = f": {self.tokens / self.seconds:.0f} tokens/s" if self.tokens else ""
        return f"{self.tokens} tokens in {self.seconds:.2f} s{rate}"


@contextmanager
def progress_bar(console: Console, engine: Engine, rates: Rates, total: int) -> Iterator[Callable[[], None]]:
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(16), TextColumn("{task.completed} tokens"),
               TextColumn("{task.fields[rate]:.0f} tokens/s"), TimeElapsedColumn()]  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("prompts", total=total, rate=0)

        def show() -> None:
            done = engine.counters.generated_tokens
            text = f"{len(engine.running)} running, cache {engine.cache.usage:.0%}"
            progress.update(bar, completed=done, rate=done / rates.seconds, description=text)

        yield show


class Stream:
    """Shows each text as it grows, after those before it are whole."""

    def __init__(self, console: Console, prompts: list[str], requests: list[Request], texts: dict[int, Growing]):
        self._console, self._texts = console, texts
        self._due = list(zip(prompts, requests, strict=True))
        self._shown = -1  # characters of the text that grows; -1: not even its prompt

    def __call__(self) -> None:
        while self._due:
            prompt, request = self._due[0]
            text = self._texts[request.id]
            if request.finished:
                text.finish()
            now = text.text if request.finished else text.certain
            if self._shown < 0:
                self._write(prompt, "bold")
                self._shown = 0
            self._write(now[self._shown :])
            self._shown = len(now)
            if not request.finished:
                return
            self._write("\n\n")
            self._due.pop(0)
            self._shown = -1

    def _write(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), end="", soft_wrap=True)
        self._console.file.flush()


def report(console: Console, engine: Engine, library: str, rates: Rates) -> None:
    count, cache = engine.counters, engine.cache
    block_bytes = sum(array.nbytes for array in cache.key_caches + cache.value_caches) / cache.num_blocks
    milliseconds = 1e3 * statistics.median(step.seconds for step in rates.steps)
    once = f", {len(engine.prefix)} of them once for all" if engine.prefix else ""
    lines = [
        f"{library}, {engine.model.arrays.dtype} weights, {cache.dtype} cache",
        f"{count.generated_tokens} new tokens in {count.steps} steps of {milliseconds:.2f} ms (median)",
        f"prompts:    {rates.of_prompts()}{once}",
        f"generation: {rates.of_generation()}",
        f"cache: at most {count.peak_blocks} of {cache.num_blocks} blocks "
        f"({count.peak_blocks * block_bytes / 2**20:.1f} MiB), {count.preemptions} preemptions",
    ]
    console.print("\n".join(lines), highlight=False)
