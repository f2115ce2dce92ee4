"""Bookkeeping of a paged KV cache on the host: which block belongs to whom.  Only NumPy, no device work.

``BlockPool`` counts references to blocks; ``Sequences`` maps ids to lengths and block tables on top of it.  Every
method handles all its sequences at once with array operations, because it stands in the path of each decode step.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

MAX_LENGTH = 2**31 - 1  # lengths and block ids leave as int32
NO_BLOCK = -1  # fills block tables behind a sequence's last block


class OutOfBlocks(RuntimeError):
    """The free blocks do not suffice.  Raised before anything changes."""


class BlockPool:
    """Reference counts of blocks and a stack of the free ones."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.ref_counts = np.zeros(num_blocks, np.int32)
        self._stack = np.arange(num_blocks, dtype=np.int32)[::-1].copy()  # free ids below height, the next one last
        self._height = num_blocks

    @property
    def num_free(self) -> int:
        """How many blocks ``take`` could take."""
        return self._height

    def peek(self, count: int) -> Int32s:
        """The blocks that ``take(count)`` would take, in order."""
        top: Int32s = self._stack[self._height - count : self._height]
        return top[::-1]

    def take(self, count: int) -> None:
        """Move ``count`` free blocks to one owner each."""
        self.ref_counts[self.peek(count)] = 1
        self._height -= count

    def share(self, blocks: Int32s) -> None:
        """Add one owner to each of these distinct blocks."""
        self.ref_counts[blocks] += 1

    def release(self, blocks: Int32s, *, last: bool = False) -> None:
        """Drop one owner per mention; blocks without an owner become free, the next or the last to be taken."""
        np.subtract.at(self.ref_counts, blocks, 1)
        self._push(np.unique(blocks[self.ref_counts[blocks] == 0]), last)

    def _push(self, idle: Int32s, last: bool) -> None:
        place = self._height
        if last:
            self._stack[idle.size : idle.size + self._height] = self._stack[: self._height].copy()
            place = 0
        self._stack[place : place + idle.size] = idle[::-1]
        self._height += idle.size


@dataclass(slots=True)
class Append:
    """An append that was checked and laid out but not yet done.  Good until the next change of its ``Sequences``."""

    slots: Int64s  # [sum of num_tokens]  where the new tokens go
    copies: Int64s  # [n, 2]  (source, destination) of the blocks to copy before the tokens are written
    ids: list[int]  # [S]
    rows: Int64s  # [S]
    lengths: Int64s  # [S]  after the append
    blocks: Int32s  # [B]  written blocks: for each sequence those that receive new tokens
    block_rows: Int64s  # [B]  their places in the table
    block_columns: Int64s  # [B]
    num_taken: int  # how many of them come from the pool
    num_new_rows: int


@dataclass(slots=True)
class Residents:
    """Some of the sequences in a pool."""

    ids: list[int]  # [S]
    lengths: Int64s  # [S]
    table: Int32s  # [S, W]  block ids, NO_BLOCK behind the last


class Sequences:
    """Lengths and block tables of sequences that live in one pool of blocks."""

    def __init__(self, num_blocks: int, block_size: int, pool: BlockPool | None = None) -> None:
        self.block_size = block_size
        self.pool = pool or BlockPool(num_blocks)
        self._row_of: dict[int, int] = {}
        self._table = np.full((16, min(16, num_blocks)), NO_BLOCK, np.int32)  # [rows, blocks]
        self._lengths = np.zeros(16, np.int64)  # [rows]; 0 in free rows
        self._free_rows = list(range(15, -1, -1))
        self._asked: list[int] = []  # the last ids looked up, and their rows
        self._found = np.empty(0, np.int64)

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
        rows, num_new_rows = self._with_new_rows(rows)
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
        blocks = np.full(int(spans.sum()), NO_BLOCK, np.int32)
        blocks[starts[resumed]] = np.where(copied, NO_BLOCK, tails)
        blocks[blocks == NO_BLOCK] = self.pool.peek(num_taken)
        copies = np.empty((0, 2), np.int64)
        if copied.any():
            copies = np.stack([tails[copied], blocks[starts[resumed[copied]]]], axis=1).astype(np.int64)
        columns = np.arange(blocks.size) + np.repeat(first - starts, spans)
        self._reserve_columns(int(columns.max(initial=-1)) + 1)

        # Number the places in the written blocks from 0 on: place p lies in blocks[p // size].
        num_slots = int(counts.sum())
        token_starts = np.cumsum(counts) - counts
        places = np.arange(num_slots) + np.repeat(starts * size + filled - token_starts, counts)
        index = places // size
        slots = places + (blocks[index] - index) * size
        return Append(
            slots, copies, ids, rows, lengths, blocks, np.repeat(rows, spans), columns, num_taken, num_new_rows
        )

    def commit(self, plan: Append) -> None:
        """Do what ``plan_append`` laid out."""
        self.pool.take(plan.num_taken)
        if plan.copies.size:
            self.pool.release(plan.copies[:, 0].astype(np.int32))
        self._table[plan.block_rows, plan.block_columns] = plan.blocks
        self._lengths[plan.rows] = plan.lengths
        if plan.num_new_rows:
            self._row_of.update(zip(plan.ids, plan.rows.tolist(), strict=True))
            del self._free_rows[-plan.num_new_rows :]
            self._forget_lookup()

    def block_tables(self, seq_ids: Any) -> Int32s:
        """Block ids [S, W], each row padded with -1 to the longest."""
        _, rows = self._find_known("block_tables", seq_ids)
        width = self._num_blocks(int(self._lengths[rows].max(initial=0)))
        return np.ascontiguousarray(self._table[rows, :width])

    def seq_lens(self, seq_ids: Any) -> Int32s:
        """Lengths [S]."""
        _, rows = self._find_known("seq_lens", seq_ids)
        return self._lengths[rows].astype(np.int32)

    def residents(self, op: str, seq_ids: Any) -> Residents:
        """All there is to know about these distinct sequences."""
        ids, rows = self._find_known(op, seq_ids)
        _check_distinct(op, ids)
        return Residents(ids, self._lengths[rows], self.block_tables(ids))

    def admit(self, residents: Residents) -> None:
        """Begin these sequences in the blocks that ``take`` gives, in any order; each mention is an owner."""
        blocks, owners = np.unique(residents.table[residents.table != NO_BLOCK], return_counts=True)
        self.pool.take(blocks.size)
        self.pool.ref_counts[blocks] = owners
        for seq_id, length, row in zip(residents.ids, residents.lengths.tolist(), residents.table, strict=True):
            self._begin(seq_id, row[: self._num_blocks(length)], length)

    def free(self, seq_ids: Any, *, last: bool = False) -> None:
        """Forget the sequences and drop their blocks, to be taken again next or last."""
        ids, rows = self._find_known("free", seq_ids)
        _check_distinct("free", ids)
        width = self._num_blocks(int(self._lengths[rows].max(initial=0)))
        blocks = self._table[rows, :width]
        self.pool.release(blocks[blocks != NO_BLOCK], last=last)
        self._table[rows, :width] = NO_BLOCK
        self._lengths[rows] = 0
        self._free_rows.extend(rows[::-1].tolist())
        for seq_id in ids:
            del self._row_of[seq_id]
        self._forget_lookup()

    def fork(self, parent: Any, child: Any) -> None:
        """Begin sequence ``child`` as a reader of all of ``parent``'s blocks."""
        parent_id, child_id = integer("fork", "parent", parent), integer("fork", "child", child)
        source = self._row("fork", "parent", parent_id)
        if child_id in self._row_of:
            raise ValueError(f"fork: child: sequence {child_id} exists already")
        length = int(self._lengths[source])
        blocks = self._table[source, : self._num_blocks(length)]
        self.pool.share(blocks)
        self._begin(child_id, blocks, length)

    def truncate(self, seq_id: Any, length: Any) -> None:
        """Keep the first ``length`` tokens of a sequence and drop the blocks behind them."""
        row = self._row("truncate", "seq_id", integer("truncate", "seq_id", seq_id))
        wanted, current = integer("truncate", "length", length), int(self._lengths[row])
        if not 0 <= wanted <= current:
            raise ValueError(f"truncate: length: must be between 0 and the current length {current}, got {wanted}")
        dropped = self._table[row, self._num_blocks(wanted) : self._num_blocks(current)]
        self.pool.release(dropped)
        dropped[:] = NO_BLOCK
        self._lengths[row] = wanted

    def _begin(self, seq_id: int, blocks: Int32s, length: int) -> None:
        """A new sequence in these blocks, which count it as an owner already."""
        self._reserve_rows(1)
        self._reserve_columns(blocks.size)
        row = self._free_rows.pop()
        self._table[row, : blocks.size] = blocks
        self._lengths[row] = length
        self._row_of[seq_id] = row
        self._forget_lookup()

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
        if not (type(seq_ids) is list and seq_ids == self._asked):
            self._asked = sequence_ids(op, seq_ids)
            self._found = np.fromiter(map(self._row_of.get, self._asked, repeat(-1)), np.int64, len(self._asked))
        return self._asked, self._found

    def _forget_lookup(self) -> None:
        self._asked, self._found = [], np.empty(0, np.int64)

    def _find_known(self, op: str, seq_ids: Any) -> tuple[list[int], Int64s]:
        ids, rows = self._find(op, seq_ids)
        if rows.size and rows.min() < 0:
            raise ValueError(f"{op}: seq_ids: unknown sequence {ids[int(rows.argmin())]}")
        return ids, rows

    def _with_new_rows(self, rows: Int64s) -> tuple[Int64s, int]:
        """Fill in the free rows that unknown ids would take, and count them."""
        unknown = np.flatnonzero(rows < 0)
        if unknown.size:
            self._reserve_rows(unknown.size)
            rows = rows.copy()
            rows[unknown] = self._free_rows[-unknown.size :]
        return rows, unknown.size

    def _reserve_rows(self, count: int) -> None:
        rows, width = self._table.shape
        more = max(rows, count)
        if len(self._free_rows) < count:
            self._table = np.concatenate([self._table, np.full((more, width), NO_BLOCK, np.int32)])
            self._lengths = np.concatenate([self._lengths, np.zeros(more, np.int64)])
            self._free_rows[:0] = range(rows + more - 1, rows - 1, -1)

    def _reserve_columns(self, count: int) -> None:
        rows, width = self._table.shape
        if width < count:
            wider = np.full((rows, min(max(2 * width, count), self.pool.num_blocks)), NO_BLOCK, np.int32)
            wider[:, :width] = self._table
            self._table = wider


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
