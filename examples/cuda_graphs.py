"""Steps of decoding as CUDA graphs, with torch: the host asks for all kernels of a step at once.

A step in which each sequence computes one token has few shapes: as many as there are numbers of sequences and widths of
the block tables, which are both rounded up.  Each is captured when it comes for the first time; steps with parts of
prompts run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from arrays import Array
from steps import Batch

import pykv

Forward = Callable[[Batch, pykv.PagedKVCache], Array]
WIDTHS = 8  # block tables are as wide as a multiple of it
MANY = 8  # from there on, batches are as large as a multiple of it; below, as a power of two


@dataclass
class Step:
    batch: Batch  # what the graph reads
    replay: Callable[[], None]
    logits: Array  # what it writes

    def fill(self, batch: Batch) -> None:
        """Behind the batch's sequences are some that compute nothing, and tokens that are cached nowhere."""
        for field in fields(batch):
            new, all_of_it = getattr(batch, field.name), getattr(self.batch, field.name)
            all_of_it[tuple(slice(size) for size in new.shape)].copy_(new)
        n = len(batch.seq_lens)
        if n < len(self.batch.seq_lens):
            self.batch.slots[n:] = -1
            self.batch.seq_lens[n:] = 0
            self.batch.cu_query_lens[n + 1 :] = n


class Captured:
    """A model's forward function, to be called in its place."""

    def __init__(self, torch: ModuleType, forward: Forward):
        self._torch, self._forward = torch, forward
        self.steps: dict[tuple[int, int], Step] = {}  # by the number of sequences and the width of tables

    def __call__(self, batch: Batch, cache: pykv.PagedKVCache) -> Array:
        sequences, width = batch.block_tables.shape
        if not len(batch.tokens) == len(batch.wanted) == sequences:
            return self._forward(batch, cache)
        shape = _rounded(sequences), -(-width // WIDTHS) * WIDTHS
        if shape not in self.steps:
            self.steps[shape] = self._capture(batch, shape, cache)
        step = self.steps[shape]
        step.fill(batch)
        step.replay()
        return step.logits[:sequences]

    def _capture(self, batch: Batch, shape: tuple[int, int], cache: pykv.PagedKVCache) -> Step:
        sizes = {"cu_query_lens": (shape[0] + 1,), "block_tables": shape}
        arrays = {f.name: getattr(batch, f.name).new_zeros(sizes.get(f.name, shape[:1])) for f in fields(batch)}
        step = Step(Batch(**arrays), lambda: None, None)
        step.fill(batch)
        self._forward(step.batch, cache)  # what libraries do at a first call, such as compile, is not for a graph
        step.replay, step.logits = self._record(lambda: self._forward(step.batch, cache))
        return step

    def _record(self, run: Callable[[], Array]) -> tuple[Callable[[], Any], Array]:
        """What runs it again, and the array that it then writes."""
        graph = self._torch.cuda.CUDAGraph()
        with self._torch.cuda.graph(graph):
            result = run()
        return graph.replay, result


def _rounded(sequences: int) -> int:
    return 1 << (sequences - 1).bit_length() if sequences < MANY else -(-sequences // MANY) * MANY
