"""A side stream that puts its copies off as long as it may: until somebody waits for them.

Copies read their sources and write their targets only then.  A cache that forgets to let somebody wait shows wrong
tokens, on a machine without a GPU, too.
"""

from __future__ import annotations

from collections import deque

import pykv
from pykv._side_stream import Transfers


class LateStream:
    def __init__(self):
        self.waiting = deque()
        self.started = self.finished = 0

    @property
    def pointer(self):
        return self

    def follow(self, stream):
        """The caller's own work is done at once."""

    def add(self, work):
        self.waiting.append(work)
        self.started += 1

    def mark(self):
        return self.started

    def is_done(self, mark):
        return self.finished >= mark

    def hold(self, stream, mark):
        self.finish(mark)

    def synchronize(self):
        self.finish(self.started)

    def finish(self, mark):
        while self.finished < mark:
            self.waiting[0]()  # again, if an exception stops it: on a GPU none can
            self.waiting.popleft()
            self.finished += 1


def copy_late(kv: pykv.PagedKVCache) -> LateStream:
    """Let a cache of NumPy arrays swap through such a stream."""
    side, copy = LateStream(), kv._copy

    def copy_or_wait(sources, targets, pairs, stream):
        if stream is side:
            side.add(lambda: copy(sources, targets, pairs, None))
        else:
            copy(sources, targets, pairs, stream)

    kv._copy = copy_or_wait
    kv._transfers = Transfers(side, kv.num_blocks)
    return side
