"""Steps of decoding as CUDA graphs, with torch: the host asks for all kernels of a step at once.

A step in which each sequence computes one token has few shapes: as many as there are numbers of sequences and widths of
the block tables, which are rounded up.  Each is captured when it comes for the first time; steps with parts of prompts
run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from types import ModuleType
from typing import Any

from arrays import Array
from steps import Batch

import pykv

Forward = Callable[[Batch, pykv.PagedKVCache], Array]
WIDTHS = 8  # block tables are as wide as a multiple of it


@dataclass
class Step:
    graph: Any
    batch: Batch  # what the graph reads: each replay is preceded by a copy into it
    logits: Array  # what it writes


class Captured:
    """A model's forward function, to be called in its place."""

    def __init__(self, torch: ModuleType, forward: Forward):
        self._torch, self._forward = torch, forward
        self._steps: dict[tuple[int, int], Step] = {}

    def __call__(self, batch: Batch, cache: pykv.PagedKVCache) -> Array:
        if not len(batch.tokens) == len(batch.seq_lens) == len(batch.wanted):
            return self._forward(batch, cache)
        width = batch.block_tables.shape[1]
        more = -width % WIDTHS  # columns that no length reaches
        batch = replace(batch, block_tables=self._torch.nn.functional.pad(batch.block_tables, (0, more)))
        shape = len(batch.tokens), width + more
        if shape not in self._steps:
            self._steps[shape] = self._capture(batch, cache)
        step = self._steps[shape]
        for field in fields(batch):
            getattr(step.batch, field.name).copy_(getattr(batch, field.name))
        step.graph.replay()
        return step.logits

    def _capture(self, batch: Batch, cache: pykv.PagedKVCache) -> Step:
        torch = self._torch
        batch = Batch(**{field.name: getattr(batch, field.name).clone() for field in fields(batch)})
        self._forward(batch, cache)  # what libraries do at a first call, such as compile, is not for a graph
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self._forward(batch, cache)
        return Step(graph, batch, logits)
