"""Prefix reuse: full blocks are found again by what they hold, also after their sequence was freed.

A block is named by a digest of its tokens and of all tokens before them, so that equal names mean equal keys and
values.  A block keeps its name until somebody writes into it, whether it has readers or is free.  All of this is
bookkeeping on the host; a cache without prefix reuse does not pay for it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from pykv.block_pool import Append, BlockPool, Int32s, Sequences, integer, integers

Digest = bytes


@dataclass
class PrefixStats:
    """What prefix reuse has saved so far."""

    queries: int = 0  # sequences begun by reuse_prefix
    queried_tokens: int = 0  # tokens they asked for
    hit_tokens: int = 0  # tokens that they found
    evicted_blocks: int = 0  # blocks that could be found and were taken for something else

    @property
    def hit_rate(self) -> float:
        """The share of the tokens asked for that was found."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


class PrefixPool(BlockPool):
    """A pool whose free blocks keep their names.  Nameless ones are taken first, then the least recently used."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.num_evicted = 0
        self._block_of: dict[Digest, int] = {}
        self._name_of: dict[int, Digest] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # free blocks with a name, the next to be taken first

    @property
    def num_free(self) -> int:
        return self._height + len(self._idle)

    @property
    def num_named(self) -> int:
        return len(self._name_of)

    def peek(self, count: int) -> Int32s:
        nameless = super().peek(min(count, self._height))
        return np.concatenate([nameless, np.fromiter(islice(self._idle, count - nameless.size), np.int32)])

    def take(self, count: int) -> None:
        taken = self.peek(count)
        self.ref_counts[taken] = 1
        nameless = min(count, self._height)
        self._height -= nameless
        for block in taken[nameless:].tolist():
            del self._idle[block]
            self.forget(block)
            self.num_evicted += 1

    def share(self, blocks: Int32s) -> None:
        for block in blocks[self.ref_counts[blocks] == 0].tolist():
            del self._idle[block]
        super().share(blocks)

    def release(self, blocks: Int32s, *, last: bool = False) -> None:
        np.subtract.at(self.ref_counts, blocks, 1)
        idle = blocks[self.ref_counts[blocks] == 0]
        # Blocks come from the beginning of a sequence to its end.  The end goes first: without the beginning it is
        # never found.
        nameless = []
        for block in dict.fromkeys(idle[::-1].tolist()):
            if block in self._name_of:
                self._idle[block] = None
            else:
                nameless.append(block)
        self._push(np.array(sorted(nameless), np.int32), last)

    def name(self, block: int, digest: Digest) -> None:
        """Let ``block`` be found by ``digest``, unless another one is already."""
        if digest not in self._block_of and block not in self._name_of:
            self._block_of[digest] = block
            self._name_of[block] = digest

    def find(self, digest: Digest) -> int | None:
        return self._block_of.get(digest)

    def forget(self, block: int) -> None:
        """Take the name of a block away, if it has one."""
        digest = self._name_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]

    def forget_all(self) -> None:
        self._block_of.clear()
        self._name_of.clear()
        self._push(np.array(sorted(self._idle), np.int32), last=False)
        self._idle.clear()


class PrefixSequences(Sequences):
    """Sequences that say which tokens they hold, and begin with blocks that hold the right ones."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._prefixes = PrefixPool(num_blocks)
        super().__init__(num_blocks, block_size, self._prefixes)
        self._names: dict[int, list[Digest]] = {}  # of each sequence's first blocks, as far as it has said
        self._stats = PrefixStats()

    @property
    def stats(self) -> PrefixStats:
        """A copy of the figures."""
        s = self._stats
        return PrefixStats(s.queries, s.queried_tokens, s.hit_tokens, self._prefixes.num_evicted)

    @property
    def num_named(self) -> int:
        return self._prefixes.num_named

    def match_prefix(self, op: str, tokens: Sequence[int]) -> tuple[Int32s, list[Digest]]:
        """The blocks of the longest prefix of ``tokens`` that can be found, and their names."""
        blocks, names = [], []
        for digest in self._digests(op, tokens, 0, _length(op, tokens) // self.block_size, b""):
            block = self._prefixes.find(digest)
            if block is None:
                break
            blocks.append(block)
            names.append(digest)
        return np.array(blocks, np.int32), names

    def reuse_prefix(self, seq_id: Any, tokens: Sequence[int]) -> int:
        """Begin a sequence as a reader of those blocks."""
        new_id = integer("reuse_prefix", "seq_id", seq_id)
        if new_id in self:
            raise ValueError(f"reuse_prefix: seq_id: sequence {new_id} exists already")
        blocks, names = self.match_prefix("reuse_prefix", tokens)
        length = blocks.size * self.block_size
        self._prefixes.share(blocks)
        self._begin(new_id, blocks, length)
        self._names[new_id] = names
        self._stats.queries += 1
        self._stats.queried_tokens += len(tokens)
        self._stats.hit_tokens += length
        return length

    def commit_prefix(self, seq_id: Any, tokens: Sequence[int]) -> None:
        """Name the full blocks of a sequence that have none yet."""
        known_id = integer("commit_prefix", "seq_id", seq_id)
        row = self._row("commit_prefix", "seq_id", known_id)
        names = self._names.setdefault(known_id, [])
        begin, end = len(names), min(int(self._lengths[row]), _length("commit_prefix", tokens)) // self.block_size
        if begin >= end:
            return
        more = list(self._digests("commit_prefix", tokens, begin, end, names[-1] if names else b""))
        for block, digest in zip(self._table[row, begin:end].tolist(), more, strict=True):
            self._prefixes.name(block, digest)
        names.extend(more)

    def clear_prefixes(self) -> None:
        """Nothing is found any more."""
        self._prefixes.forget_all()

    def commit(self, plan: Append) -> None:
        super().commit(plan)
        for block in plan.blocks.tolist():  # what is written is no longer what its name says
            self._prefixes.forget(block)

    def free(self, seq_ids: Any, *, last: bool = False) -> None:
        ids, _ = self._find_known("free", seq_ids)
        super().free(seq_ids, last=last)
        for seq_id in ids:
            self._names.pop(seq_id, None)

    def fork(self, parent: Any, child: Any) -> None:
        super().fork(parent, child)
        self._names[int(child)] = list(self._names.get(int(parent), ()))

    def truncate(self, seq_id: Any, length: Any) -> None:
        super().truncate(seq_id, length)
        del self._names.get(int(seq_id), [])[int(length) // self.block_size :]

    def _digests(self, op: str, tokens: Sequence[int], begin: int, end: int, before: Digest) -> Iterator[Digest]:
        """Names of blocks ``begin`` to ``end`` of a sequence of these tokens; ``before``: that of the one before."""
        size = self.block_size
        held = integers(op, "tokens", tokens[begin * size : end * size])
        for block in held.reshape(-1, size):
            before = hashlib.blake2b(before + block.tobytes(), digest_size=32).digest()
            yield before


def _length(op: str, tokens: Sequence[int]) -> int:
    try:
        return len(tokens)
    except TypeError:
        raise TypeError(f"{op}: tokens: must be a list, got {type(tokens).__name__}") from None
