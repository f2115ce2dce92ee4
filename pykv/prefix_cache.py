"""Prefix reuse: full blocks are found again by what they hold, also after their sequence was freed.

A block is named by a digest of a salt, its tokens and all tokens before them, so that equal names mean equal keys and
values; several blocks may have one name.  A block keeps its name until somebody writes into it, whether it has readers
or is free.  All of this is bookkeeping on the host; a cache without prefix reuse does not pay for it.
"""

from __future__ import annotations

import hashlib
import operator
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import setitem
from typing import Any

import numpy as np

from pykv.block_pool import BlockPool, Int32s, Int64s, Sequences, integer, integers
from pykv.journal import Journal, Writes, drop

Digest = bytes
Salt = int | str | bytes | None


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
        self._blocks_of: dict[Digest, tuple[int, ...]] = {}
        self._name_of: dict[int, Digest] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # free blocks with a name, the next to be taken first

    @property
    def num_free(self) -> int:
        return super().num_free + len(self._idle)

    @property
    def num_names(self) -> int:
        return len(self._blocks_of)

    def held(self) -> Int64s:
        return np.union1d(super().held(), np.fromiter(self._name_of, np.int64))

    def peek(self, count: int) -> Int32s:
        nameless = super().peek(min(count, super().num_free))
        return np.concatenate([nameless, np.fromiter(islice(self._idle, count - nameless.size), np.int32)])

    def taking(self, count: int) -> Writes:
        nameless = min(count, super().num_free)
        idle = list(islice(self._idle, count - nameless))
        if not idle:
            return super().taking(nameless)
        return [
            *super().taking(nameless),
            (setitem, (self.ref_counts, idle, 1)),
            (drop, (self._idle, idle)),
            (setattr, (self, "num_evicted", self.num_evicted + len(idle))),
        ]

    def sharing(self, blocks: Int32s) -> Writes:
        return [*super().sharing(blocks), (drop, (self._idle, blocks[self.ref_counts[blocks] == 0].tolist()))]

    def releasing(self, blocks: Int32s, *, last: bool = False) -> Writes:
        distinct, counts = self._less_owners(blocks)
        released = set(distinct[counts == 0].tolist())
        nameless = np.array(sorted(released - self._name_of.keys()), np.int32)
        # Blocks come from the beginning of a sequence to its end.  The end goes first: without the beginning it is
        # never found.
        idle = dict.fromkeys(block for block in blocks[::-1].tolist() if block in released and block in self._name_of)
        return [
            (setitem, (self.ref_counts, distinct, counts)),
            *self._pushing(nameless, last),
            (self._idle.update, (idle,)),
        ]

    def evicting(self, count: int) -> Writes:
        idle = np.fromiter(islice(self._idle, max(0, count - super().num_free)), np.int32)
        if idle.size == 0:
            return []
        return [
            *self.forgetting(idle),
            (drop, (self._idle, idle.tolist())),
            *self._pushing(idle, last=True),
            (setattr, (self, "num_evicted", self.num_evicted + idle.size)),
        ]

    def naming(self, block: int, digest: Digest) -> Writes:
        """``block`` can be found by ``digest``, unless it has a name."""
        if block in self._name_of:
            return []
        return [
            (setitem, (self._name_of, block, digest)),
            (setitem, (self._blocks_of, digest, (*self._blocks_of.get(digest, ()), block))),
        ]

    def find(self, digest: Digest) -> int | None:
        """A block of this name, if there is one that has readers: then it costs no free block to share it."""
        blocks = self._blocks_of.get(digest, ())
        return max(blocks, key=self.ref_counts.__getitem__, default=None)

    def forgetting(self, blocks: Int32s) -> Writes:
        names = {block: self._name_of[block] for block in blocks.tolist() if block in self._name_of}
        if not names:
            return []
        left = {name: tuple(b for b in self._blocks_of[name] if b not in names) for name in names.values()}
        return [
            (drop, (self._name_of, names)),
            (self._blocks_of.update, (left,)),
            (drop, (self._blocks_of, [name for name, others in left.items() if not others])),
        ]

    def forgetting_all(self) -> Writes:
        return [
            (self._blocks_of.clear, ()),
            (self._name_of.clear, ()),
            *self._pushing(np.array(sorted(self._idle), np.int32), last=False),
            (self._idle.clear, ()),
        ]


class PrefixSequences(Sequences):
    """Sequences that say which tokens they hold, and begin with blocks that hold the right ones."""

    def __init__(self, num_blocks: int, block_size: int, journal: Journal | None = None) -> None:
        self._prefixes = PrefixPool(num_blocks)
        super().__init__(num_blocks, block_size, self._prefixes, journal)
        # Of each sequence that has said what it holds: what its salt begins the chain with, then the names of its
        # first blocks, as far as it has said.
        self._names: dict[int, tuple[Digest, ...]] = {}
        self._stats = PrefixStats()

    @property
    def stats(self) -> PrefixStats:
        """A copy of the figures."""
        return replace(self._stats, evicted_blocks=self._prefixes.num_evicted)

    @property
    def num_names(self) -> int:
        return self._prefixes.num_names

    def match_prefix(self, op: str, tokens: Sequence[int], salt: Salt) -> tuple[Int32s, tuple[Digest, ...]]:
        """The blocks of the longest prefix of ``tokens`` that can be found; the salt's digest and their names."""
        blocks, names = [], [_root(op, salt)]
        for digest in self._digests(op, tokens, 0, _length(op, tokens) // self.block_size, names[0]):
            block = self._prefixes.find(digest)
            if block is None:
                break
            blocks.append(block)
            names.append(digest)
        return np.array(blocks, np.int32), tuple(names)

    def reusing(self, seq_id: Any, tokens: Sequence[int], salt: Salt) -> tuple[int, Writes]:
        """A sequence begins as a reader of those blocks; how many tokens they hold."""
        new_id = integer("reuse_prefix", "seq_id", seq_id)
        if new_id in self:
            raise ValueError(f"reuse_prefix: seq_id: sequence {new_id} exists already")
        blocks, names = self.match_prefix("reuse_prefix", tokens, salt)
        length, stats = blocks.size * self.block_size, self._stats
        stats = PrefixStats(stats.queries + 1, stats.queried_tokens + len(tokens), stats.hit_tokens + length)
        return length, [
            *self._sharing(new_id, blocks, length),
            (setitem, (self._names, new_id, names)),
            (setattr, (self, "_stats", stats)),
        ]

    def committing(self, seq_id: Any, tokens: Sequence[int], salt: Salt) -> Writes:
        """The full blocks of a sequence that have no names yet get them."""
        known_id, root = integer("commit_prefix", "seq_id", seq_id), _root("commit_prefix", salt)
        row = self._row("commit_prefix", "seq_id", known_id)
        names = self._names.get(known_id, (root,))
        if names[0] != root:
            raise ValueError(f"commit_prefix: salt: sequence {known_id} began with another one")
        begin, end = len(names) - 1, min(int(self._lengths[row]), _length("commit_prefix", tokens)) // self.block_size
        if begin >= end:
            return []
        more = list(self._digests("commit_prefix", tokens, begin, end, names[-1]))
        writes: Writes = [(setitem, (self._names, known_id, (*names, *more)))]
        for block, digest in zip(self._table[row, begin:end].tolist(), more, strict=True):
            writes += self._prefixes.naming(block, digest)
        return writes

    def clearing(self) -> Writes:
        """Nothing is found any more."""
        return self._prefixes.forgetting_all()

    def freeing(self, seq_ids: Any, *, last: bool = False) -> Writes:
        ids, _ = self._find_known("free", seq_ids)
        return [*super().freeing(seq_ids, last=last), (drop, (self._names, ids))]

    def forking(self, parent: Any, child: Any) -> Writes:
        writes = super().forking(parent, child)
        if names := self._names.get(int(parent)):
            writes.append((setitem, (self._names, int(child), names)))
        return writes

    def truncating(self, seq_id: Any, length: Any) -> Writes:
        writes = super().truncating(seq_id, length)
        if names := self._names.get(int(seq_id)):
            writes.append((setitem, (self._names, int(seq_id), names[: 1 + int(length) // self.block_size])))
        return writes

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


def _root(op: str, salt: Salt) -> Digest:
    """What the names of a sequence with this salt begin with."""
    if salt is None:
        return b""
    if isinstance(salt, bytes):
        kind, data = "bytes", salt
    elif isinstance(salt, str):
        kind, data = "str", salt.encode("utf-8", "surrogatepass")
    elif hasattr(salt, "__index__") and not isinstance(salt, bool):
        kind, data = "int", b"%d" % operator.index(salt)
    else:
        got = salt if isinstance(salt, bool) else type(salt).__name__
        raise TypeError(f"{op}: salt: must be an integer, str or bytes, got {got}")
    return hashlib.blake2b(data, digest_size=32, person=f"salt {kind}".encode()).digest()
