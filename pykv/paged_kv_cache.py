"""A paged KV cache with its manager: per-layer arrays in the caller's library, block tables kept on the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from pykv._libraries import choose_library
from pykv._types import Stream
from pykv.block_pool import MAX_LENGTH, OutOfBlocks, Sequences, integer
from pykv.cache import copy_blocks
from pykv.prefix_cache import PrefixSequences, PrefixStats

__all__ = ["OutOfBlocks", "PagedKVCache", "PrefixStats"]

# The dtypes a cache may have, and how their elements are stored.
_STORAGE = {
    "float32": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "fp8_e4m3": "uint8",
    "fp8_e5m2": "uint8",
}
_ALIASES = {"fp8": "fp8_e4m3", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
_LAYOUTS = ("NHD", "HND", "packed")


class PagedKVCache:
    """Keys and values of many growing sequences, in blocks of ``block_size`` tokens that any sequence can use.

    ``like`` (an array or a module of NumPy, CuPy or torch; default NumPy) and ``device`` say where the arrays live;
    what the methods return lives there too.  ``dtype`` is "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2" or
    the library's own dtype; fp8 is stored as uint8.  ``layout`` fixes the shapes of each layer's caches:

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
        return self.dtype if self.dtype.startswith("fp8") else "auto"

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no sequence holds; those that can be found by their tokens are among them."""
        return self._sequences.pool.num_free

    @property
    def usage(self) -> float:
        """The share of blocks in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._sequences

    def append(self, seq_ids: Any, num_tokens: Any, *, stream: Stream = None) -> Any:
        """Make room for ``num_tokens`` (one number, or one per sequence) more tokens at the end of each sequence.

        Unknown ids begin a sequence.  Returns the int64 slot of each new token, sequence after sequence; pass it to
        ``reshape_and_cache`` and the like.  A partly filled last block that others read too is copied first, on
        ``stream``.  Raises ``OutOfBlocks``, with everything left as it was, if the pool cannot hold all of them.
        """
        plan = self._sequences.plan_append(seq_ids, num_tokens)
        if plan.copies.size:
            copy_blocks(self._key_caches, self._value_caches, plan.copies, stream=stream)
        slots = self._library.from_host(plan.slots, stream)
        self._sequences.commit(plan)
        return slots

    def block_tables(self, seq_ids: Any, *, stream: Stream = None) -> Any:
        """Block ids of each sequence, int32 [S, W]: W is the longest one's number of blocks, -1 fills the rest."""
        return self._library.from_host(self._sequences.block_tables(seq_ids), stream)

    def seq_lens(self, seq_ids: Any, *, stream: Stream = None) -> Any:
        """The number of tokens of each sequence, int32 [S]."""
        return self._library.from_host(self._sequences.seq_lens(seq_ids), stream)

    def free(self, seq_ids: Any) -> None:
        """Forget these sequences.  Blocks that no other sequence reads return to the pool."""
        self._sequences.free(seq_ids)

    def fork(self, parent: int, child: int) -> None:
        """Begin sequence ``child`` with ``parent``'s tokens.  They share blocks until one of them writes there."""
        self._sequences.fork(parent, child)

    def truncate(self, seq_id: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a sequence."""
        self._sequences.truncate(seq_id, length)

    def match_prefix(self, tokens: Sequence[int]) -> int:
        """With how many of these tokens a sequence could begin, in blocks that are in the cache: whole blocks only."""
        blocks, _ = self._with_prefixes("match_prefix").match_prefix("match_prefix", tokens)
        return blocks.size * self.block_size

    def reuse_prefix(self, seq_id: int, tokens: Sequence[int]) -> int:
        """Begin a sequence with as many of these tokens as ``match_prefix`` finds; returns their number, maybe 0.

        Who needs the model's answer to the last token must compute at least that one: pass ``tokens[:-1]``.
        """
        return self._with_prefixes("reuse_prefix").reuse_prefix(seq_id, tokens)

    def commit_prefix(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Say that a sequence holds these tokens, so that others can begin with its full blocks.

        ``tokens`` (a list or array on the host) are the sequence's from its beginning; what lies beyond its length is
        ignored.  Call it when the keys and values have been written, on the stream, and again when the sequence has
        grown: only blocks that are new since then are looked at.
        """
        self._with_prefixes("commit_prefix").commit_prefix(seq_id, tokens)

    def clear_prefixes(self) -> None:
        """Let no block be found any more, as when the model's weights have changed.  There must be no sequences."""
        prefixes = self._with_prefixes("clear_prefixes")
        if self._sequences.count:
            raise ValueError(f"clear_prefixes: {self._sequences.count} sequences would be found again; free them first")
        prefixes.clear_prefixes()

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their tokens, in use or free."""
        return self._prefixes.num_named if self._prefixes else 0

    @property
    def prefix_stats(self) -> PrefixStats:
        """What prefix reuse has saved so far: a snapshot."""
        return self._with_prefixes("prefix_stats").stats

    def _with_prefixes(self, op: str) -> PrefixSequences:
        if self._prefixes is None:
            raise ValueError(f"{op}: the cache was made without prefix_caching=True")
        return self._prefixes

    def _allocate(self) -> tuple[list[Any], list[Any]]:
        blocks, size, heads, width = self.num_blocks, self.block_size, self.num_kv_heads, self.head_size
        storage = _STORAGE[self.dtype]
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

    def _zeros(self, shape: tuple[int, ...], storage: str) -> list[Any]:
        return [self._library.zeros(shape, storage) for _ in range(self.num_layers)]


def _size(argument: str, value: Any) -> int:
    size = integer("PagedKVCache", argument, value)
    if not 1 <= size <= MAX_LENGTH:
        raise ValueError(f"PagedKVCache: {argument}: must be between 1 and {MAX_LENGTH}, got {size}")
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
