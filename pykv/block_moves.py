"""Sequences that go from one pool of blocks to another, with whatever blocks they share among each other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pykv.block_pool import NO_BLOCK, BlockPool, Int32s, Int64s, OutOfBlocks, Residents, Sequences


@dataclass(slots=True)
class Move:
    """A move that was checked and laid out but not yet done.  Good until the next change of either side."""

    pairs: Int64s  # [n, 2]  (source, destination): the blocks to copy
    arriving: Residents

    @property
    def sources(self) -> Int64s:
        return self.pairs[:, 0]

    @property
    def targets(self) -> Int64s:
        return self.pairs[:, 1]


def plan_move(op: str, what: str, leaving: Residents, target: Sequences) -> Move:
    """Where these residents of another pool would live in ``target``, whose blocks a message calls ``what``."""
    held = leaving.table != NO_BLOCK
    sources, index = np.unique(leaving.table[held], return_inverse=True)
    check_room(op, what, sources.size, target.pool)
    targets = target.pool.peek(sources.size)
    table: Int32s = leaving.table.copy()
    table[held] = targets[index]
    pairs = np.stack([sources, targets], axis=1).astype(np.int64)
    return Move(pairs, Residents(leaving.ids, leaving.lengths, table))


def check_room(op: str, what: str, count: int, pool: BlockPool) -> None:
    if count > pool.num_free:
        raise OutOfBlocks(f"{op}: {count} {what} are needed, {pool.num_free} of {pool.num_blocks} are free")
