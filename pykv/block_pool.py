"""Bookkeeping of a paged KV cache on the host: which block belongs to whom.  Only NumPy, no device work.

``BlockPool`` counts references to blocks; ``Sequences`` maps ids to lengths and block tables on top of it.  Every
method handles all its sequences at once with array operations, because it stands in the path of each decode step.
Methods named ``-ing`` change nothing: they return the writes of a change, for a ``Journal``.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from itertools import repeat
from operator import setitem
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv.journal import Journal, Writes, drop

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

MAX_LENGTH = 2**31 - 1  # lengths and block ids leave as int32
_NOTHING_ASKED: tuple[list[int], Int64s] = ([], np.empty(0, np.int64))
NO_BLOCK = -1  # fills block tables behind a sequence's last block


class OutOfBlocks(RuntimeError):
    """The free blocks do not suffice.  Raised before anything changes."""


class BlockPool:
    """Reference counts of blocks and a ring of the free ones.

    The changes of one commit may take blocks or release them into the ring, not both.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self._ring = np.arange(num_blocks, dtype=np.int32)
        self._free = (0, num_blocks)  # where the free ones begin in the ring, the next to be taken first; their number

    @property
    def num_free(self) -> int:
        """How many blocks could be taken."""
        return self._free[1]

    def peek(self, count: int) -> Int32s:
        """The blocks that ``taking(count)`` takes, in order."""
        first = self._free[0]
        blocks: Int32s = self._ring.take(np.arange(first, first + count), mode="wrap")
        return blocks

    def held(self) -> Int64s:
        """The blocks whose content somebody can read or find."""
        return np.flatnonzero(self.ref_counts)

    def taking(self, count: int) -> Writes:
        """``count`` free blocks get one owner each.  They keep their names: see ``forgetting``."""
        if count == 0:
            return []
        first, size = self._free
        return [
            (setitem, (self.ref_counts, self.peek(count), 1)),
            (setattr, (self, "_free", ((first + count) % self.num_blocks, size - count))),
        ]

    def sharing(self, blocks: Int32s) -> Writes:
        """Each of these distinct blocks gets one more owner."""
        return [(setitem, (self.ref_counts, blocks, self.ref_counts[blocks] + 1))]

    def releasing(self, blocks: Int32s, *, last: bool = False) -> Writes:
        """One owner less per mention; blocks without an owner become free, the next or the last to be taken."""
        distinct, counts = self._less_owners(blocks)
        return [(setitem, (self.ref_counts, distinct, counts)), *self._pushing(distinct[counts == 0], last)]

    def evicting(self, count: int) -> Writes:
        """The next ``count`` blocks to be taken lose their names, and stay the next."""
        return []

    def forgetting(self, blocks: Int32s) -> Writes:
        """These blocks lose the names by which they are found, as they must before they are written."""
        return []

    def _less_owners(self, blocks: Int32s) -> tuple[Int32s, Int32s]:
        distinct, mentions = np.unique(blocks, return_counts=True)
        return distinct, (self.ref_counts[distinct] - mentions).astype(np.int32)

    def _pushing(self, idle: Int32s, last: bool) -> Writes:
        if idle.size == 0:
            return []
        first, size = self._free
        place = first + size if last else first - idle.size
        first = first if last else place % self.num_blocks
        return [
            (self._ring.put, (np.arange(place, place + idle.size), idle, "wrap")),
            (setattr, (self, "_free", (first, size + idle.size))),
        ]


@dataclass(slots=True)
class SpareRows:
    """Rows of the table without a sequence: some that are free again, and all from ``unused`` on."""

    again: list[int]
    unused: int


@dataclass(slots=True)
class Append:
    """An append that was checked and laid out but not yet done.  Good until the next change of its ``Sequences``."""

    slots: Int64s  # [sum of num_tokens]  where the new tokens go
    copies: Int64s  # [n, 2]  (source, destination) of the blocks to copy; destinations are the next blocks of the pool
    ids: list[int]  # [S]
    rows: Int64s  # [S]
    lengths: Int64s  # [S]  after the append
    blocks: Int32s  # [B]  written blocks: for each sequence those that receive new tokens
    block_rows: Int64s  # [B]  their places in the table
    block_columns: Int64s  # [B]
    num_taken: int  # how many of them come from the pool
    spare: SpareRows | None  # what is left of the rows, if sequences begin


@dataclass(slots=True)
class Residents:
    """Some of the sequences in a pool."""

    ids: list[int]  # [S]
    lengths: Int64s  # [S]
    table: Int32s  # [S, W]  block ids, NO_BLOCK behind the last


class Sequences:
    """Lengths and block tables of sequences that live in one pool of blocks."""

    def __init__(
        self, num_blocks: int, block_size: int, pool: BlockPool | None = None, journal: Journal | None = None
    ) -> None:
        self.block_size = block_size
        self.pool = pool or BlockPool(num_blocks)
        self.journal = journal or Journal()
        self._row_of: dict[int, int] = {}
        self._table = np.full((16, min(16, num_blocks)), NO_BLOCK, np.int32)  # [rows, blocks]
        self._lengths = np.zeros(16, np.int64)  # [rows]; 0 in free rows
        self._spare = SpareRows([], 0)
        self._lookup = _NOTHING_ASKED  # the last ids looked up, and their rows

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._row_of

    @property
    def count(self) -> int:
        return len(self._row_of)

    def plan_append(self, seq_ids: Any, num_tokens: Any) -> Append:
        """Lay out ``num_tokens`` more tokens for each sequence; unknown ids begin a sequence.  Changes nothing."""
        ids, rows = self._find("append", seq_ids)
        _check_distinct("append", ids)
        counts = _counts(num_tokens, len(ids))
        rows, spare = self._with_new_rows(rows)
        size = self.block_size
        old = self._lengths[rows]
        lengths = old + counts
        if lengths.size and lengths.max() > MAX_LENGTH:
            raise ValueError(f"append: num_tokens: a sequence holds at most {MAX_LENGTH} tokens, got {lengths.max()}")

        # A sequence whose last block has room goes on there, unless others read that block: then it gets a copy.
        first = old // size
        filled = old - first * size
        resumed = np.flatnonzero((filled > 0) & (counts > 0))
        tails = self._table[rows[resumed], first[resumed]]
        copied = self._must_copy(tails)
        spans = np.where(counts > 0, (lengths + (size - 1)) // size - first, 0)  # blocks written, per sequence
        num_taken = int(spans.sum()) - resumed.size + int(np.count_nonzero(copied))
        if num_taken > self.pool.num_free:
            raise OutOfBlocks(
                f"append: {num_taken} more blocks are needed, {self.pool.num_free} of {self.pool.num_blocks} are free"
            )

        starts = np.cumsum(spans) - spans  # where each sequence begins in the list of written blocks
        taken = self.pool.peek(num_taken)
        blocks = np.full(int(spans.sum()), NO_BLOCK, np.int32)
        blocks[starts[resumed]] = tails
        copies = np.empty((0, 2), np.int64)
        if copied.any():
            copies = np.stack([tails[copied], taken[: np.count_nonzero(copied)]], axis=1).astype(np.int64)
            blocks[starts[resumed[copied]]] = copies[:, 1]
        blocks[blocks == NO_BLOCK] = taken[len(copies) :]
        columns = np.arange(blocks.size) + np.repeat(first - starts, spans)
        self._reserve(spare.unused if spare else 0, int(columns.max(initial=-1)) + 1)

        # Number the places in the written blocks from 0 on: place p lies in blocks[p // size].
        num_slots = int(counts.sum())
        token_starts = np.cumsum(counts) - counts
        places = np.arange(num_slots) + np.repeat(starts * size + filled - token_starts, counts)
        index = places // size
        slots = places + (blocks[index] - index) * size
        return Append(slots, copies, ids, rows, lengths, blocks, np.repeat(rows, spans), columns, num_taken, spare)

    def commit(self, plan: Append) -> None:
        """Do what ``plan_append`` laid out."""
        writes: Writes = [
            *self.pool.taking(plan.num_taken),
            *self.pool.forgetting(plan.blocks),
            (setitem, (self._table, (plan.block_rows, plan.block_columns), plan.blocks)),
            (setitem, (self._lengths, plan.rows, plan.lengths)),
        ]
        if plan.copies.size:  # each has readers left, so that none becomes free
            writes += self.pool.releasing(plan.copies[:, 0].astype(np.int32))
        if plan.spare:
            writes += self._beginning(plan.ids, plan.rows, plan.spare)
        self.journal.commit(writes)

    def block_tables(self, seq_ids: Any, width: Any = None) -> Int32s:
        """Block ids [S, W], each row padded with -1 to the longest, or to ``width``."""
        _, rows = self._find_known("block_tables", seq_ids)
        longest = self._num_blocks(int(self._lengths[rows].max(initial=0)))
        if width is None:
            return np.ascontiguousarray(self._table[rows, :longest])
        width = integer("block_tables", "width", width)
        if width < longest:
            raise ValueError(
                f"block_tables: width: must be at least the {longest} blocks of the longest sequence, got {width}"
            )
        tables = np.full((rows.size, width), NO_BLOCK, np.int32)
        tables[:, :longest] = self._table[rows, :longest]
        return tables

    def seq_lens(self, seq_ids: Any) -> Int32s:
        """Lengths [S]."""
        _, rows = self._find_known("seq_lens", seq_ids)
        return self._lengths[rows].astype(np.int32)

    def residents(self, op: str, seq_ids: Any) -> Residents:
        """All there is to know about these distinct sequences."""
        ids, rows = self._find_known(op, seq_ids)
        _check_distinct(op, ids)
        return Residents(ids, self._lengths[rows], self.block_tables(ids))

    def admitting(self, residents: Residents) -> Writes:
        """These sequences begin in the blocks that the pool gives next, in any order; each mention is an owner."""
        blocks, owners = np.unique(residents.table[residents.table != NO_BLOCK], return_counts=True)
        rows, spare = self._take_rows(len(residents.ids))
        self._reserve(spare.unused, residents.table.shape[1])
        return [
            *self.pool.taking(blocks.size),
            *self.pool.forgetting(blocks),
            (setitem, (self.pool.ref_counts, blocks, owners)),
            (setitem, (self._table, (rows, slice(residents.table.shape[1])), residents.table)),
            (setitem, (self._lengths, rows, residents.lengths)),
            *self._beginning(residents.ids, rows, spare),
        ]

    def freeing(self, seq_ids: Any, *, last: bool = False) -> Writes:
        """The sequences are forgotten and their blocks dropped, to be taken again next or last."""
        ids, rows = self._find_known("free", seq_ids)
        _check_distinct("free", ids)
        width = self._num_blocks(int(self._lengths[rows].max(initial=0)))
        blocks = self._table[rows, :width]
        return [
            *self.pool.releasing(blocks[blocks != NO_BLOCK], last=last),
            (setitem, (self._table, (rows, slice(width)), NO_BLOCK)),
            (setitem, (self._lengths, rows, 0)),
            (drop, (self._row_of, ids)),
            (setattr, (self, "_spare", SpareRows([*self._spare.again, *rows[::-1].tolist()], self._spare.unused))),
            (setattr, (self, "_lookup", _NOTHING_ASKED)),
        ]

    def forking(self, parent: Any, child: Any) -> Writes:
        """Sequence ``child`` begins as a reader of all of ``parent``'s blocks."""
        parent_id, child_id = integer("fork", "parent", parent), integer("fork", "child", child)
        source = self._row("fork", "parent", parent_id)
        if child_id in self._row_of:
            raise ValueError(f"fork: child: sequence {child_id} exists already")
        length = int(self._lengths[source])
        return self._sharing(child_id, self._table[source, : self._num_blocks(length)].copy(), length)

    def truncating(self, seq_id: Any, length: Any) -> Writes:
        """A sequence keeps its first ``length`` tokens, and drops the blocks behind them."""
        row = self._row("truncate", "seq_id", integer("truncate", "seq_id", seq_id))
        wanted, current = integer("truncate", "length", length), int(self._lengths[row])
        if not 0 <= wanted <= current:
            raise ValueError(f"truncate: length: must be between 0 and the current length {current}, got {wanted}")
        columns = slice(self._num_blocks(wanted), self._num_blocks(current))
        return [
            *self.pool.releasing(self._table[row, columns]),
            (setitem, (self._table, (row, columns), NO_BLOCK)),
            (setitem, (self._lengths, row, wanted)),
        ]

    def _sharing(self, seq_id: int, blocks: Int32s, length: int) -> Writes:
        """A new sequence reads these blocks."""
        rows, spare = self._take_rows(1)
        self._reserve(spare.unused, blocks.size)
        return [
            *self.pool.sharing(blocks),
            (setitem, (self._table, (int(rows[0]), slice(blocks.size)), blocks)),
            (setitem, (self._lengths, rows, length)),
            *self._beginning([seq_id], rows, spare),
        ]

    def _beginning(self, ids: list[int], rows: Int64s, spare: SpareRows) -> Writes:
        return [
            (self._row_of.update, (dict(zip(ids, rows.tolist(), strict=True)),)),
            (setattr, (self, "_spare", spare)),
            (setattr, (self, "_lookup", _NOTHING_ASKED)),
        ]

    def _num_blocks(self, length: int) -> int:
        return -(-length // self.block_size)

    def _must_copy(self, tails: Int32s) -> npt.NDArray[np.bool_]:
        """Which of these blocks, about to be written by one sequence each, have another reader.

        When all readers of a block write at once, the last of them keeps it: the others have left it by then.
        """
        copied = self.pool.ref_counts[tails] > 1
        if copied.any():
            shared = np.flatnonzero(copied)
            distinct, group, writers = np.unique(tails[shared], return_inverse=True, return_counts=True)
            last = np.empty(distinct.size, np.int64)
            last[group] = shared  # NumPy keeps the last of several values for one index
            copied[last[writers == self.pool.ref_counts[distinct]]] = False
        return copied

    def _row(self, op: str, argument: str, seq_id: int) -> int:
        if seq_id not in self._row_of:
            raise ValueError(f"{op}: {argument}: unknown sequence {seq_id}")
        return self._row_of[seq_id]

    def _find(self, op: str, seq_ids: Any) -> tuple[list[int], Int64s]:
        """Ids and their rows, -1 for unknown ones.  Callers ask for one list several times in a step, so it is kept."""
        if not (type(seq_ids) is list and seq_ids == self._lookup[0]):
            ids = sequence_ids(op, seq_ids)
            self._lookup = ids, np.fromiter(map(self._row_of.get, ids, repeat(-1)), np.int64, len(ids))
        return self._lookup

    def _find_known(self, op: str, seq_ids: Any) -> tuple[list[int], Int64s]:
        ids, rows = self._find(op, seq_ids)
        if rows.size and rows.min() < 0:
            raise ValueError(f"{op}: seq_ids: unknown sequence {ids[int(rows.argmin())]}")
        return ids, rows

    def _with_new_rows(self, rows: Int64s) -> tuple[Int64s, SpareRows | None]:
        """Fill in the free rows that unknown ids would take."""
        unknown = np.flatnonzero(rows < 0)
        if unknown.size == 0:
            return rows, None
        rows = rows.copy()
        rows[unknown], spare = self._take_rows(unknown.size)
        self._reserve(spare.unused, 0)
        return rows, spare

    def _take_rows(self, count: int) -> tuple[Int64s, SpareRows]:
        """``count`` free rows, and what would be left."""
        again, unused = self._spare.again, self._spare.unused
        kept = max(len(again) - count, 0)
        end = unused + count - (len(again) - kept)
        return np.array([*again[kept:], *range(unused, end)], np.int64), SpareRows(again[:kept], end)

    def _reserve(self, rows: int, columns: int) -> None:
        """Room for so many rows and columns; what is there stays as it is."""
        have_rows, have_columns = self._table.shape
        if rows > have_rows:
            have_rows = max(2 * have_rows, rows)
        if columns > have_columns:
            have_columns = min(max(2 * have_columns, columns), self.pool.num_blocks)
        if (have_rows, have_columns) != self._table.shape:
            larger = np.full((have_rows, have_columns), NO_BLOCK, np.int32)
            larger[: self._table.shape[0], : self._table.shape[1]] = self._table
            self._table = larger
        if have_rows > self._lengths.size:
            self._lengths = np.concatenate([self._lengths, np.zeros(have_rows - self._lengths.size, np.int64)])


def integer(op: str, argument: str, value: Any) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{op}: {argument}: must be an integer, got {value}")
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(f"{op}: {argument}: must be an integer, got {type(value).__name__}") from None
    if not -(2**63) <= index < 2**63:
        raise ValueError(f"{op}: {argument}: must fit in int64, got {index}")
    return index


def integers(op: str, argument: str, values: Any) -> Int64s:
    """One integer or a sequence of them as an array of at most one dimension."""
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int64)  # an empty list has no dtype
    if array.dtype.kind not in "iu":
        raise TypeError(f"{op}: {argument}: must be integers, got {array.dtype}")
    if array.ndim > 1:
        raise ValueError(f"{op}: {argument}: must be one integer or a list of them, got shape {list(array.shape)}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise ValueError(f"{op}: {argument}: must fit in int64, got {array.max()}")
    return array.astype(np.int64, copy=False)


def sequence_ids(op: str, seq_ids: Any) -> list[int]:
    ids: list[int] = np.atleast_1d(integers(op, "seq_ids", seq_ids)).tolist()
    return ids


def _check_distinct(op: str, ids: list[int]) -> None:
    if len(set(ids)) != len(ids):
        twice = next(seq_id for seq_id, times in Counter(ids).items() if times > 1)
        raise ValueError(f"{op}: seq_ids: sequence {twice} is named twice")


def _counts(num_tokens: Any, num_seqs: int) -> Int64s:
    counts = integers("append", "num_tokens", num_tokens)
    if counts.ndim == 1 and counts.size != num_seqs:
        raise ValueError(
            f"append: num_tokens: must be one integer or one for each of {num_seqs} seq_ids, got {counts.size}"
        )
    if counts.size and counts.min() < 0:
        raise ValueError(f"append: num_tokens: must not be negative, got {counts.min()}")
    if counts.size and counts.max() > MAX_LENGTH:
        raise ValueError(f"append: num_tokens: a sequence holds at most {MAX_LENGTH} tokens, got {counts.max()}")
    return counts if counts.ndim else np.full(num_seqs, counts)
