"""Copies beside the caller's work: a stream of their own, and who has to wait for which of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from pykv._types import Stream


class SideStream(Protocol):
    """A stream that is ordered with the caller's streams by events alone, so that the host never waits."""

    @property
    def pointer(self) -> int:
        """The cudaStream_t."""

    def follow(self, stream: Stream) -> None:
        """What comes next here waits for all work so far on ``stream`` (None: the library's current one)."""

    def mark(self) -> Any:
        """An event behind all work so far."""

    def is_done(self, mark: Any) -> bool:
        """Whether that work is finished."""

    def hold(self, stream: Stream, mark: Any) -> None:
        """What comes next on ``stream`` waits for that work."""

    def synchronize(self) -> None:
        """Wait on the host for all work so far."""


On = Callable[[Stream], AbstractContextManager[Any]]  # makes a stream, or None for the current one, current


class CupySideStream:
    def __init__(self, cupy: Any, on: On) -> None:
        self._cuda, self._on = cupy.cuda, on
        with on(None):
            self._side = cupy.cuda.Stream(non_blocking=True)

    @property
    def pointer(self) -> int:
        return int(self._side.ptr)

    def follow(self, stream: Stream) -> None:
        with self._on(stream):
            event = self._cuda.Event(disable_timing=True)
            event.record()
            self._side.wait_event(event)

    def mark(self) -> Any:
        with self._on(None):
            event = self._cuda.Event(disable_timing=True)
            event.record(self._side)
        return event

    def is_done(self, mark: Any) -> bool:
        return bool(mark.done)

    def hold(self, stream: Stream, mark: Any) -> None:
        with self._on(stream):
            self._cuda.get_current_stream().wait_event(mark)

    def synchronize(self) -> None:
        self._side.synchronize()


class TorchSideStream:
    def __init__(self, torch: Any, device: Any, on: On) -> None:
        self._cuda, self._device, self._on = torch.cuda, device, on
        self._side = torch.cuda.Stream(device)

    @property
    def pointer(self) -> int:
        return int(self._side.cuda_stream)

    def follow(self, stream: Stream) -> None:
        with self._on(stream):
            self._side.wait_stream(self._cuda.current_stream(self._device))

    def mark(self) -> Any:
        return self._side.record_event()

    def is_done(self, mark: Any) -> bool:
        return bool(mark.query())

    def hold(self, stream: Stream, mark: Any) -> None:
        with self._on(stream):
            self._cuda.current_stream(self._device).wait_event(mark)

    def synchronize(self) -> None:
        self._side.synchronize()


class Transfers:
    """Copies of blocks on a side stream.  They are done in order, so each block remembers only its last one.

    An exception may come anywhere: a block remembers its copy before that begins, and a copy that has no mark yet gets
    one when somebody has to wait for it.
    """

    def __init__(self, side: SideStream, num_blocks: int) -> None:
        self._side = side
        self._last = np.zeros(num_blocks, np.int64)  # numbers count from 1; 0: none
        self._count = 0
        self._done = 0  # all copies up to this number
        self._marks: deque[tuple[int, Any]] = deque()  # numbers and what is behind all copies up to them

    def run(self, copy: Callable[[int], None], blocks: npt.NDArray[Any], stream: Stream) -> None:
        """Call ``copy`` with the side stream, behind all work so far on ``stream``; it touches these blocks."""
        self._side.follow(stream)
        self._count += 1
        self._last[blocks] = self._count
        try:
            copy(self._side.pointer)
        finally:  # where it fails, some of its work may be under way
            self._mark()

    def order(self, stream: Stream, blocks: npt.NDArray[Any]) -> None:
        """Let ``stream`` wait for the copies that touch these blocks, as far as they are not done."""
        while self._marks and self._side.is_done(self._marks[0][1]):
            self._done = self._marks[0][0]
            self._marks.popleft()
        wanted = int(self._last[blocks].max(initial=0))
        if wanted > self._done:
            if not self._marks or self._marks[-1][0] < wanted:
                self._mark()
            self._side.hold(stream, next(mark for number, mark in self._marks if number >= wanted))

    def synchronize(self) -> None:
        self._side.synchronize()

    def _mark(self) -> None:
        self._marks.append((self._count, self._side.mark()))
