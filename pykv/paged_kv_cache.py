"""A paged KV cache with its manager: per-layer arrays in the caller's library, block tables kept on the host."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from pykv import sequence_files
from pykv._libraries import choose_library
from pykv._side_stream import Transfers
from pykv._types import Stream
from pykv.block_moves import plan_move
from pykv.block_pool import MAX_LENGTH, NO_BLOCK, OutOfBlocks, Residents, Sequences, integer, sequence_ids
from pykv.cache import copy_blocks, swap_blocks_layers
from pykv.prefix_cache import PrefixSequences, PrefixStats

__all__ = ["OutOfBlocks", "PagedKVCache", "PrefixStats"]

# The dtypes a cache may have, and how their elements are stored.
_STORAGE = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8_e4m3": "uint8",
    "fp8_e5m2": "uint8",
    "int8": "uint8",
    "nvfp4": "uint8",
}
_ALIASES = {"fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_LAYOUTS = ("NHD", "HND", "packed")


class PagedKVCache:
    """Keys and values of many growing sequences, in blocks of ``block_size`` tokens that any sequence can use.

    ``like`` (an array or a module of NumPy, CuPy or torch; default NumPy) and ``device`` say where the arrays live;
    what the methods return lives there too.  ``dtype`` is "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2",
    "int8", "nvfp4" or the library's own dtype; the last four are stored as uint8, nvfp4 in NHD and HND caches alone,
    with head_size * 9 / 16 in the place of head_size (see ``pykv.cache``).  ``layout`` fixes the shapes of each layer's
    caches:

    - "NHD": both [num_blocks, block_size, num_kv_heads, head_size];
    - "HND": the same shape, but the tokens of one head lie together in memory;
    - "packed": keys [num_blocks, num_kv_heads, head_size / x, block_size, x] with x = 16 bytes of elements,
      values [num_blocks, num_kv_heads, head_size, block_size].

    Sequences are named by any integers.  ``append`` makes room for new tokens and says where they go; the cache ops
    write them there.  All work on one cache belongs on one stream, or on streams ordered by the caller: a freed block
    is handed out again at once.  Methods are not thread-safe.

    With ``prefix_caching`` full blocks can be found by the tokens they hold, also after their sequence was freed and
    until they are taken for something else, the least recently used first: ``reuse_prefix`` begins a sequence with
    them, ``commit_prefix`` says what a sequence holds.

    ``swap_out`` moves sequences to ``num_host_blocks`` blocks of host memory, pinned if the cache lives on a GPU, and
    ``swap_in`` moves them back.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        dtype: Any,
        layout: str = "NHD",
        like: Any = None,
        device: Any = None,
        *,
        prefix_caching: bool = False,
        num_host_blocks: int = 0,
    ) -> None:
        self.num_layers = _size("num_layers", num_layers)
        self.num_blocks = _size("num_blocks", num_blocks)
        self.block_size = _size("block_size", block_size)
        self.num_kv_heads = _size("num_kv_heads", num_kv_heads)
        self.head_size = _size("head_size", head_size)
        self.dtype = _dtype_name(dtype)
        if layout not in _LAYOUTS:
            raise ValueError(f"PagedKVCache: layout: must be one of {', '.join(_LAYOUTS)}, got {layout!r}")
        self.layout = layout
        self._library = choose_library(like, device)
        self._key_caches, self._value_caches = self._allocate()
        self._prefixes = PrefixSequences(self.num_blocks, self.block_size) if prefix_caching else None
        self._sequences = self._prefixes or Sequences(self.num_blocks, self.block_size)
        self.num_host_blocks = _size("num_host_blocks", num_host_blocks, least=0)
        self._swapped = Sequences(self.num_host_blocks, self.block_size)
        self._host_caches = self._host_pool(self.num_host_blocks)
        self._transfers = self._begin_transfers()

    @property
    def key_caches(self) -> list[Any]:
        """The key cache of each layer."""
        return self._key_caches

    @property
    def value_caches(self) -> list[Any]:
        """The value cache of each layer."""
        return self._value_caches

    @property
    def kv_cache_dtype(self) -> str:
        """What the ops want to hear as ``kv_cache_dtype`` with these caches."""
        return "auto" if _STORAGE[self.dtype] == self.dtype else self.dtype

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; those that can be found by their tokens are among them."""
        return self._sequences.pool.num_free

    @property
    def num_free_host_blocks(self) -> int:
        """Blocks of host memory that no sequence holds."""
        return self._swapped.pool.num_free

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._sequences or seq_id in self._swapped

    def append(self, seq_ids: Any, num_tokens: Any, *, stream: Stream = None) -> Any:
        """Make room for ``num_tokens`` (one number, or one per sequence) more tokens at the end of each sequence.

        Unknown ids begin a sequence.  Returns the int64 slot of each new token, sequence after sequence; pass it to
        ``reshape_and_cache`` and the like.  A partly filled last block that others read too is copied first, on
        ``stream``.  Raises ``OutOfBlocks``, with everything left as it was, if the pool cannot hold all of them.
        """
        self._check_not_swapped("append", "seq_ids", seq_ids)
        plan = self._sequences.plan_append(seq_ids, num_tokens)
        if self._transfers:
            self._order(stream, np.concatenate([plan.blocks, plan.copies[:, 0]]))
        if plan.copies.size:
            copy_blocks(self._key_caches, self._value_caches, plan.copies, stream=stream)
        slots = self._library.from_host(plan.slots, stream)
        self._sequences.commit(plan)
        return slots

    def block_tables(self, seq_ids: Any, *, stream: Stream = None) -> Any:
        """Block ids of each sequence, int32 [S, W]: W is the longest one's number of blocks, -1 fills the rest."""
        self._check_not_swapped("block_tables", "seq_ids", seq_ids)
        tables = self._sequences.block_tables(seq_ids)
        if self._transfers:
            self._order(stream, tables[tables != NO_BLOCK])
        return self._library.from_host(tables, stream)

    def seq_lens(self, seq_ids: Any, *, stream: Stream = None) -> Any:
        """The number of tokens of each sequence, int32 [S]."""
        self._check_not_swapped("seq_lens", "seq_ids", seq_ids)
        return self._library.from_host(self._sequences.seq_lens(seq_ids), stream)

    def free(self, seq_ids: Any) -> None:
        """Forget these sequences, wherever they are.  Blocks that no other sequence reads return to their pool."""
        if self._swapped.count == 0:
            self._sequences.free(seq_ids)
            return
        swapped: list[int] = []
        others: list[int] = []
        for seq_id in sequence_ids("free", seq_ids):
            (swapped if seq_id in self._swapped else others).append(seq_id)
        for sequences, ids in ((self._sequences, others), (self._swapped, swapped)):
            sequences.residents("free", ids)  # refuses what is unknown or named twice, before anything is freed
        self._sequences.free(others)
        self._swapped.free(swapped)

    def fork(self, parent: int, child: int) -> None:
        """Begin sequence ``child`` with ``parent``'s tokens.  They share blocks until one of them writes there."""
        self._check_not_swapped("fork", "parent", parent)
        self._check_not_swapped("fork", "child", child)
        self._sequences.fork(parent, child)

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a sequence."""
        self._check_not_swapped("truncate", "seq_id", seq_id)
        self._sequences.truncate(seq_id, length)

    def swap_out(self, seq_ids: Any, *, stream: Stream = None) -> None:
        """Move sequences to the host.  Until ``swap_in`` nothing but ``free`` can be done with them.

        On a GPU the copies run on a stream of the cache's own, behind all work so far on ``stream``; the call does not
        wait for them.  The blocks are free at once: whoever gets them waits, on the device, for the copies to be done.
        Blocks that these sequences share stay shared; blocks that others read too stay where they are, as well.
        Raises ``OutOfBlocks``, with everything left as it was, if the host's blocks do not suffice.
        """
        self._check_not_swapped("swap_out", "seq_ids", seq_ids)
        leaving = self._sequences.residents("swap_out", seq_ids)
        blocks = "host blocks" if self.num_host_blocks else "host blocks (num_host_blocks)"
        move = plan_move("swap_out", blocks, leaving, self._swapped)
        self._copy_aside(self._device_caches, self._host_caches, move.pairs, move.sources, stream)
        self._swapped.admit(move.arriving)
        self._sequences.free(leaving.ids, last=True)

    def swap_in(self, seq_ids: Any, *, stream: Stream = None) -> None:
        """Move sequences back.  They can be used at once: ``append`` and ``block_tables`` make their stream wait.

        On a GPU the copies run on the cache's own stream, behind all work so far on ``stream``; the call does not wait
        for them, and neither does work that has nothing to do with these sequences.  Raises ``OutOfBlocks``, with
        everything left as it was, if the free blocks do not suffice.
        """
        for seq_id in sequence_ids("swap_in", seq_ids):
            if seq_id in self._sequences:
                raise ValueError(f"swap_in: seq_ids: sequence {seq_id} is not swapped out")
        leaving = self._swapped.residents("swap_in", seq_ids)
        move = plan_move("swap_in", "more blocks", leaving, self._sequences)
        self._copy_aside(self._host_caches, self._device_caches, move.pairs, move.targets, stream)
        self._sequences.admit(move.arriving)
        self._swapped.free(leaving.ids)

    def is_swapped_out(self, seq_id: int) -> bool:
        """Whether a sequence is on the host."""
        return seq_id in self._swapped

    def save(self, path: Any, seq_ids: Any, *, stream: Stream = None) -> None:
        """Write sequences to a safetensors file, with a checksum; needs the package safetensors.

        Blocks that they share are written once.  The file appears under its name when it is complete, in place of what
        had that name.  Waits for the work on ``stream``.
        """
        self._check_not_swapped("save", "seq_ids", seq_ids)
        residents = self._sequences.residents("save", seq_ids)
        held = residents.table != NO_BLOCK
        blocks, index = np.unique(residents.table[held], return_inverse=True)
        residents.table[held] = index
        self._order(stream, blocks)
        caches = np.empty((2 * self.num_layers, blocks.size, self._block_bytes), np.uint8)
        pairs = np.stack([blocks, np.arange(blocks.size)], axis=1).astype(np.int64)
        self._copy(self._device_caches, list(caches), pairs, stream)  # waits, because this memory is not pinned
        sequence_files.save(path, self._shape, self.layout, residents, caches)

    def load(self, path: Any, seq_ids: Any = None, *, stream: Stream = None) -> list[int]:
        """Begin the sequences of a file, under these ids or those they had; returns the ids.

        The cache must have the layers, heads, sizes and dtype of the one that wrote the file; the layout may differ.
        A file that is truncated, altered or of another kind is a ``ValueError``; no room for all of its blocks is
        ``OutOfBlocks``.  Nothing has changed then.
        """
        arriving, caches = sequence_files.load(path, self._shape, self.layout)
        if seq_ids is not None:
            ids = sequence_ids("load", seq_ids)
            if len(ids) != len(arriving.ids) or len(set(ids)) != len(ids):
                raise ValueError(f"load: seq_ids: must be {len(arriving.ids)} different ids, got {ids}")
            arriving = Residents(ids, arriving.lengths, arriving.table)
        for seq_id in arriving.ids:
            if seq_id in self:
                raise ValueError(f"load: seq_ids: sequence {seq_id} exists already")
        move = plan_move("load", "more blocks", arriving, self._sequences)
        self._order(stream, move.targets)
        self._copy(list(caches), self._device_caches, move.pairs, stream)  # the memory has been read by then, likewise
        self._sequences.admit(move.arriving)
        return arriving.ids

    def match_prefix(self, tokens: Sequence[int]) -> int:
        """With how many of these tokens a sequence could begin, in blocks that are in the cache: whole blocks only."""
        blocks, _ = self._with_prefixes("match_prefix").match_prefix("match_prefix", tokens)
        return blocks.size * self.block_size

    def reuse_prefix(self, seq_id: int, tokens: Sequence[int]) -> int:
        """Begin a sequence with as many of these tokens as ``match_prefix`` finds; returns their number, maybe 0.

        Who needs the model's answer to the last token must compute at least that one: pass ``tokens[:-1]``.
        """
        self._check_not_swapped("reuse_prefix", "seq_id", seq_id)
        return self._with_prefixes("reuse_prefix").reuse_prefix(seq_id, tokens)

    def commit_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Say that a sequence holds these tokens, so that others can begin with its full blocks.

        ``tokens`` (a list or array on the host) are the sequence's from its beginning; what lies beyond its length is
        ignored.  Call it when the keys and values have been written, on the stream, and again when the sequence has
        grown: only blocks that are new since then are looked at.
        """
        self._check_not_swapped("commit_prefix", "seq_id", seq_id)
        self._with_prefixes("commit_prefix").commit_prefix(seq_id, tokens)

    def clear_prefixes(self) -> None:
        """Let no block be found any more, as when the model's weights have changed.  There must be no sequences."""
        prefixes = self._with_prefixes("clear_prefixes")
        if count := self._sequences.count + self._swapped.count:
            raise ValueError(f"clear_prefixes: {count} sequences would be found again; free them first")
        prefixes.clear_prefixes()

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their tokens, in use or free."""
        return self._prefixes.num_named if self._prefixes else 0

    @property
    def prefix_stats(self) -> PrefixStats:
        """What prefix reuse has saved so far, a snapshot."""
        return self._with_prefixes("prefix_stats").stats

    def _with_prefixes(self, op: str) -> PrefixSequences:
        if self._prefixes is None:
            raise ValueError(f"{op}: the cache was made without prefix_caching=True")
        return self._prefixes

    @property
    def _device_caches(self) -> list[Any]:
        return [*self._key_caches, *self._value_caches]

    @property
    def _shape(self) -> sequence_files.CacheShape:
        return sequence_files.CacheShape(
            self.num_layers, self.block_size, self.num_kv_heads, self.head_size, self.dtype
        )

    @property
    def _block_bytes(self) -> int:
        """Of a block of one layer's keys, or values."""
        return math.prod(self._shape.block) * self._shape.element.itemsize

    def _host_pool(self, num_blocks: int) -> list[Any]:
        """As many host arrays as there are caches, each of that many blocks."""
        shape = (2 * self.num_layers, num_blocks, self._block_bytes)
        return list(self._library.host_memory(math.prod(shape)).reshape(shape))

    def _begin_transfers(self) -> Transfers | None:
        side = self._library.side_stream() if self.num_host_blocks else None
        if side is None:
            return None
        # memory must not go while copies are under way
        weakref.finalize(self, side.synchronize).atexit = False
        return Transfers(side, self.num_blocks)

    def _copy(self, sources: list[Any], targets: list[Any], pairs: Any, stream: Stream) -> None:
        """Blocks between the caches and as many arrays on the host."""
        if pairs.size:
            swap_blocks_layers(sources, targets, self._block_bytes, pairs, stream=stream)

    def _copy_aside(self, sources: list[Any], targets: list[Any], pairs: Any, touched: Any, stream: Stream) -> None:
        """The same on the side stream, where there is one; it touches these blocks of the caches."""
        if self._transfers and pairs.size:
            self._transfers.run(lambda side: self._copy(sources, targets, pairs, side), touched, stream)
        else:
            self._copy(sources, targets, pairs, stream)

    def _order(self, stream: Stream, blocks: Any) -> None:
        """Let ``stream`` wait for copies on the side stream that touch these blocks."""
        if self._transfers:
            self._transfers.order(stream, blocks)

    def _check_not_swapped(self, op: str, argument: str, seq_ids: Any) -> None:
        if self._swapped.count:
            for seq_id in sequence_ids(op, seq_ids):
                if seq_id in self._swapped:
                    raise ValueError(f"{op}: {argument}: sequence {seq_id} is swapped out")

    def _allocate(self) -> tuple[list[Any], list[Any]]:
        blocks, size, heads, width = self.num_blocks, self.block_size, self.num_kv_heads, self.head_size
        storage = _STORAGE[self.dtype]
        if self.dtype == "nvfp4":
            self._check_nvfp4()
            width = width * 9 // 16
        if self.layout == "packed":
            itemsize = {"float32": 4, "uint8": 1}.get(storage, 2)
            x = 16 // itemsize
            if width % x:
                raise ValueError(
                    f"PagedKVCache: head_size: must be a multiple of {x} for packed {self.dtype} caches, got {width}"
                )
            return (
                self._zeros((blocks, heads, width // x, size, x), storage),
                self._zeros((blocks, heads, width, size), storage),
            )
        if self.layout == "HND":
            shape = (blocks, heads, size, width)
            keys, values = self._zeros(shape, storage), self._zeros(shape, storage)
            return [cache.swapaxes(1, 2) for cache in keys], [cache.swapaxes(1, 2) for cache in values]
        shape = (blocks, size, heads, width)
        return self._zeros(shape, storage), self._zeros(shape, storage)

    def _check_nvfp4(self) -> None:
        if self.layout == "packed":
            raise ValueError("PagedKVCache: layout: nvfp4 caches are NHD or HND, got 'packed'")
        for argument, size, step in (("head_size", self.head_size, 64), ("block_size", self.block_size, 4)):
            if size % step:
                raise ValueError(f"PagedKVCache: {argument}: must be a multiple of {step} for nvfp4 caches, got {size}")

    def _zeros(self, shape: tuple[int, ...], storage: str) -> list[Any]:
        return [self._library.zeros(shape, storage) for _ in range(self.num_layers)]


def _size(argument: str, value: Any, least: int = 1) -> int:
    size = integer("PagedKVCache", argument, value)
    if not least <= size <= MAX_LENGTH:
        raise ValueError(f"PagedKVCache: {argument}: must be between {least} and {MAX_LENGTH}, got {size}")
    return size


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__.partition(".")[0] == "torch":
        name = str(dtype).removeprefix("torch.")
    else:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = type(dtype).__name__
    name = _ALIASES.get(name, name)
    if name not in _STORAGE:
        raise ValueError(f"PagedKVCache: dtype: must be one of {', '.join(_STORAGE)}, got {name!r}")
    return name
