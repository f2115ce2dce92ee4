"""A paged KV cache with its manager: per-layer arrays in the caller's library, block tables kept on the host."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv import cache_arrays, sequence_files
from pykv._libraries import choose_library, spec_of
from pykv._side_stream import Transfers
from pykv._types import Stream
from pykv.block_moves import plan_move
from pykv.block_pool import MAX_LENGTH, NO_BLOCK, OutOfBlocks, Residents, Sequences, integer, sequence_ids
from pykv.cache import copy_blocks, swap_blocks_layers
from pykv.journal import Journal
from pykv.prefix_cache import PrefixSequences, PrefixStats, Salt

__all__ = ["OutOfBlocks", "PagedKVCache", "PrefixStats"]


class PagedKVCache:
    """Keys and values of many growing sequences, in blocks of ``block_size`` tokens that any sequence can use.

    ``like`` (an array or a module of NumPy, CuPy, torch or JAX; default NumPy) and ``device`` say where the arrays
    live; what the methods return lives there too.  ``dtype`` is "float32", "float16", "bfloat16", "fp8_e4m3",
    "fp8_e5m2", "int8", "nvfp4" or the library's own dtype; the last four are stored as uint8, nvfp4 in NHD and HND
    caches alone, with head_size * 9 / 16 in the place of head_size (see ``pykv.cache``).  ``layout`` fixes the shapes
    of each layer's caches:

    - "NHD": both [num_blocks, block_size, num_kv_heads, head_size];
    - "HND": the same shape, but the tokens of one head lie together in memory;
    - "packed": keys [num_blocks, num_kv_heads, head_size / x, block_size, x] with x = 16 bytes of elements,
      values [num_blocks, num_kv_heads, head_size, block_size].

    Sequences are named by any integers.  ``append`` makes room for new tokens and says where they go; the cache ops
    write them there.  All work on one cache belongs on one stream, or on streams ordered by the caller: a freed block
    is handed out again at once.  Methods are not thread-safe.

    A method that raises, KeyboardInterrupt and MemoryError included, has changed either nothing or all that it
    changes.  Only prefixes may be lost: a block can no longer be found once something was copied into it.

    JAX arrays never change: donate ``key_caches`` and ``value_caches`` to a jitted step, and give what it returns to
    ``replace_caches``.  The methods return NumPy arrays then, which a jitted function takes as they are, and which can
    be padded to a few shapes without compiling anything.  There is no HND layout, because JAX has no strides.

    With ``prefix_caching`` full blocks can be found by the tokens they hold, also after their sequence was freed and
    until they are taken for something else, the least recently used first: ``reuse_prefix`` begins a sequence with
    them, ``commit_prefix`` says what a sequence holds.  What else keys and values depend on (a tenant, a LoRA, an
    image) is given as ``salt``, an integer, str or bytes: with another salt nothing is found.

    ``swap_out`` moves sequences to ``num_host_blocks`` blocks of host memory, pinned if the cache lives on a GPU, and
    ``swap_in`` moves them back.

    A pickled or copied cache is a cache of its own, with the same layout, sequences, prefixes and keys and values on
    the same device; blocks that nobody reads and nobody can find come back as zeros.
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
        self.num_host_blocks = _size("num_host_blocks", num_host_blocks, least=0)
        self.dtype = cache_arrays.dtype_name(dtype)
        self._library = choose_library(like, device)
        cache_arrays.check(layout, self.dtype, self.block_size, self.head_size, self._library)
        self._journal = Journal()
        sequences = PrefixSequences if prefix_caching else Sequences
        self._pools = (
            sequences(self.num_blocks, self.block_size, journal=self._journal),
            Sequences(self.num_host_blocks, self.block_size, journal=self._journal),
        )
        self._allocate(layout)

    def _allocate(self, layout: str) -> None:
        """Make the memory, and the stream that copies between device and host."""
        sizes = self.num_blocks, self.block_size, self.num_kv_heads, self.head_size
        self._caches = cache_arrays.make(layout, self.dtype, sizes, self.num_layers, self._library)
        self._host_caches = self._host_pool(self.num_host_blocks)
        self._transfers = self._begin_transfers()

    def __getstate__(self) -> dict[str, Any]:
        device, host = self._sequences, self._swapped
        if self._transfers:
            self._transfers.synchronize()
        blocks, host_blocks = device.pool.held(), host.pool.held()
        state = vars(self) | {
            "_caches": (self.layout, blocks, self._read(blocks, None)),
            "_host_caches": (host_blocks, [cache[host_blocks] for cache in self._host_caches]),
        }
        del state["_transfers"]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        layout, blocks, contents = state["_caches"]
        host_blocks, host_contents = state["_host_caches"]
        self._allocate(layout)
        self._copy(list(contents), self._caches, np.stack([np.arange(blocks.size), blocks], axis=1), None)
        for cache, content in zip(self._host_caches, host_contents, strict=True):
            cache[host_blocks] = content

    def __copy__(self) -> PagedKVCache:
        return copy.deepcopy(self)  # two managers of the same memory would give the same block to two sequences

    @property
    def layout(self) -> str:
        """ "NHD", "HND" or "packed", as the caches' shapes and strides say."""
        return cache_arrays.layout_of(self._caches[0])

    @property
    def key_caches(self) -> list[Any]:
        """The key cache of each layer."""
        return self._caches[: self.num_layers]

    @property
    def value_caches(self) -> list[Any]:
        """The value cache of each layer."""
        return self._caches[self.num_layers :]

    def replace_caches(self, key_caches: Sequence[Any], value_caches: Sequence[Any]) -> None:
        """Take other arrays for the caches of all layers, of the same shapes, dtypes and strides.

        For JAX, whose arrays are immutable: ``out, keys, values = step(kv.key_caches, kv.value_caches, ...)`` with
        these donated, then ``kv.replace_caches(keys, values)`` before anything else is done with the cache.  A step
        that fails after it took donated arrays has lost them, and what the cache held.
        """
        given = {"key_caches": key_caches, "value_caches": value_caches}
        for argument, arrays, present in zip(given, given.values(), (self.key_caches, self.value_caches), strict=True):
            if len(arrays) != self.num_layers:
                raise ValueError(
                    f"replace_caches: {argument}: must be {self.num_layers} arrays, one for a layer, got {len(arrays)}"
                )
            for layer, (array, old) in enumerate(zip(arrays, present, strict=True)):
                if type(array) is not type(old) or _form(array) != _form(old):
                    raise ValueError(
                        f"replace_caches: {argument}: layer {layer} must be like the present cache, "
                        f"{_describe(old)}, got {_describe(array)}"
                    )
        self._caches[:] = [*key_caches, *value_caches]

    @property
    def _sequences(self) -> Sequences:
        """Those on the device.  What an exception left half written is finished before anybody looks."""
        self._journal.settle()
        return self._pools[0]

    @property
    def _swapped(self) -> Sequences:
        """Those on the host, likewise."""
        self._journal.settle()
        return self._pools[1]

    @property
    def _prefixes(self) -> PrefixSequences | None:
        sequences = self._sequences
        return sequences if isinstance(sequences, PrefixSequences) else None

    @property
    def kv_cache_dtype(self) -> str:
        """What the ops want to hear as ``kv_cache_dtype`` with these caches."""
        return "auto" if cache_arrays.STORAGE[self.dtype] == self.dtype else self.dtype

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
        slots = self._library.from_host(plan.slots, stream)
        if self._transfers:
            self._order(stream, np.concatenate([plan.blocks, plan.copies[:, 0]]))
        if plan.copies.size:
            self._forget_names(len(plan.copies))
            self._copy_within(plan.copies, stream)
        self._sequences.commit(plan)
        return slots

    def block_tables(self, seq_ids: Any, *, width: int | None = None, stream: Stream = None) -> Any:
        """Block ids of each sequence, int32 [S, W]; -1 fills each row behind its last block.

        ``width`` is W, for CUDA graphs and ``jax.jit``, which want one shape; ``ValueError`` if a sequence has more
        blocks.  By default W is the longest one's number of blocks.
        """
        self._check_not_swapped("block_tables", "seq_ids", seq_ids)
        tables = self._sequences.block_tables(seq_ids, width)
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
            self._journal.commit(self._sequences.freeing(seq_ids))
            return
        swapped: list[int] = []
        others: list[int] = []
        for seq_id in sequence_ids("free", seq_ids):
            (swapped if seq_id in self._swapped else others).append(seq_id)
        self._journal.commit([*self._sequences.freeing(others), *self._swapped.freeing(swapped)])

    def fork(self, parent: int, child: int) -> None:
        """Begin sequence ``child`` with ``parent``'s tokens.  They share blocks until one of them writes there."""
        self._check_not_swapped("fork", "parent", parent)
        self._check_not_swapped("fork", "child", child)
        self._journal.commit(self._sequences.forking(parent, child))

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a sequence."""
        self._check_not_swapped("truncate", "seq_id", seq_id)
        self._journal.commit(self._sequences.truncating(seq_id, length))

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
        self._copy_aside(self._caches, self._host_caches, move.pairs, move.sources, stream)
        self._journal.commit(
            [*self._swapped.admitting(move.arriving), *self._sequences.freeing(leaving.ids, last=True)]
        )

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
        self._forget_names(len(move.pairs))
        self._copy_aside(self._host_caches, self._caches, move.pairs, move.targets, stream)
        self._journal.commit([*self._sequences.admitting(move.arriving), *self._swapped.freeing(leaving.ids)])

    def is_swapped_out(self, seq_id: int) -> bool:
        """Whether a sequence is on the host."""
        return seq_id in self._swapped

    def save(self, path: Any, seq_ids: Any, *, stream: Stream = None) -> None:
        """Write sequences to a safetensors file, with a checksum.

        Blocks that they share are written once.  The file appears under its name when it is complete and on the disk,
        in place of what had that name.  Waits for the work on ``stream``.
        """
        self._check_not_swapped("save", "seq_ids", seq_ids)
        residents = self._sequences.residents("save", seq_ids)
        held = residents.table != NO_BLOCK
        blocks, index = np.unique(residents.table[held], return_inverse=True)
        residents.table[held] = index
        sequence_files.save(path, self._shape, self.layout, residents, self._read(blocks, stream))

    def load(self, path: Any, seq_ids: Any = None, *, stream: Stream = None) -> list[int]:
        """Begin the sequences of a file, under these ids or those they had; returns the ids.

        The cache must have the layers, heads, sizes and dtype of the one that wrote the file; the layout may differ.
        A file that is truncated, altered, of another kind or that contradicts itself is a ``ValueError``; no room for
        all of its blocks is ``OutOfBlocks``.  Nothing has changed then.  The checksum shows damage, not who wrote the
        file: whoever can write it can make one that fits.
        """
        arriving, caches = sequence_files.load(path, self._shape, self.layout, self._sequences.pool)
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
        self._forget_names(len(move.pairs))
        self._copy(list(caches), self._caches, move.pairs, stream)  # waits, because this memory is not pinned
        self._journal.commit(self._sequences.admitting(move.arriving))
        return arriving.ids

    def match_prefix(self, tokens: Sequence[int], *, salt: Salt = None) -> int:
        """With how many of these tokens a sequence could begin, in blocks that are in the cache: whole blocks only."""
        blocks, _ = self._with_prefixes("match_prefix").match_prefix("match_prefix", tokens, salt)
        return blocks.size * self.block_size

    def reuse_prefix(self, seq_id: int, tokens: Sequence[int], *, salt: Salt = None) -> int:
        """Begin a sequence with as many of these tokens as ``match_prefix`` finds; returns their number, maybe 0.

        Who needs the model's answer to the last token must compute at least that one: pass ``tokens[:-1]``.
        """
        self._check_not_swapped("reuse_prefix", "seq_id", seq_id)
        length, writes = self._with_prefixes("reuse_prefix").reusing(seq_id, tokens, salt)
        self._journal.commit(writes)
        return length

    def commit_prefix(self, seq_id: int, tokens: Sequence[int], *, salt: Salt = None) -> None:
        """Say that a sequence holds these tokens, so that others can begin with its full blocks.

        ``tokens`` (a list or array on the host) are the sequence's from its beginning; what lies beyond its length is
        ignored.  Call it when the keys and values have been written, on the stream, and again when the sequence has
        grown: only blocks that are new since then are looked at.  ``salt`` must stay the one of its earlier calls and
        of ``reuse_prefix``.
        """
        self._check_not_swapped("commit_prefix", "seq_id", seq_id)
        self._journal.commit(self._with_prefixes("commit_prefix").committing(seq_id, tokens, salt))

    def clear_prefixes(self) -> None:
        """Let no block be found any more, as when the model's weights have changed.  There must be no sequences."""
        prefixes = self._with_prefixes("clear_prefixes")
        if count := self._sequences.count + self._swapped.count:
            raise ValueError(f"clear_prefixes: {count} sequences would be found again; free them first")
        self._journal.commit(prefixes.clearing())

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their tokens, in use or free; of those that hold the same, one."""
        prefixes = self._prefixes
        return prefixes.num_names if prefixes else 0

    @property
    def prefix_stats(self) -> PrefixStats:
        """What prefix reuse has saved so far, a snapshot."""
        return self._with_prefixes("prefix_stats").stats

    def _with_prefixes(self, op: str) -> PrefixSequences:
        prefixes = self._prefixes
        if prefixes is None:
            raise ValueError(f"{op}: the cache was made without prefix_caching=True")
        return prefixes

    def _forget_names(self, count: int) -> None:
        """Before anything is copied into them: the next blocks to be taken are not found any more."""
        self._journal.commit(self._sequences.pool.evicting(count))

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

    def _copy_within(self, pairs: Any, stream: Stream) -> None:
        """Blocks to other blocks of the same cache."""
        if self._library.replaces is None:
            copy_blocks(self.key_caches, self.value_caches, pairs, stream=stream)
        else:
            self._library.replaces.copy_blocks(self._caches, pairs)

    def _copy(self, sources: list[Any], targets: list[Any], pairs: Any, stream: Stream) -> None:
        """Blocks between the caches and as many arrays on the host."""
        if pairs.size == 0:
            return
        if self._library.replaces is None:
            swap_blocks_layers(sources, targets, self._block_bytes, pairs, stream=stream)
        elif targets is self._caches:
            self._library.replaces.put_blocks(sources, targets, pairs)
        else:
            self._library.replaces.get_blocks(sources, targets, pairs)

    def _read(self, blocks: Any, stream: Stream) -> npt.NDArray[np.uint8]:
        """Raw blocks of all caches, [2 * num_layers, n, bytes], on the host."""
        self._order(stream, blocks)
        contents = np.empty((2 * self.num_layers, blocks.size, self._block_bytes), np.uint8)
        pairs = np.stack([blocks, np.arange(blocks.size)], axis=1).astype(np.int64)
        self._copy(self._caches, list(contents), pairs, stream)  # waits, because this memory is not pinned
        return contents

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


def _size(argument: str, value: Any, least: int = 1) -> int:
    size = integer("PagedKVCache", argument, value)
    if not least <= size <= MAX_LENGTH:
        raise ValueError(f"PagedKVCache: {argument}: must be between {least} and {MAX_LENGTH}, got {size}")
    return size


def _form(array: Any) -> tuple[Any, ...]:
    return spec_of(array), cache_arrays.strides_of(array)


def _describe(array: Any) -> str:
    if not hasattr(array, "shape"):
        return type(array).__name__
    spec, strides = _form(array)
    return f"{spec.dtype} {list(spec.shape)}" + (f" with strides {list(strides)}" if strides else "")
