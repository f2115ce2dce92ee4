"""Rotary position embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np

from pykv._schema import Rule, Spec, operation
from pykv._types import Array, Stream


@operation()
def rotary_embedding(
    positions: Array,
    query: Array,
    key: Array | None,
    head_size: int,
    cos_sin_cache: Array,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
    *,
    stream: Stream = None,
) -> None:
    """Rotate pairs of elements of each head of ``query`` and ``key``, in place, by the angles of the token's position.

    ``x' = x * cos - y * sin`` and ``y' = y * cos + x * sin`` in fp32, rounded once.  Pair i is the elements ``i`` and
    ``rotary_dim / 2 + i`` of a head in NeoX style, ``2 i`` and ``2 i + 1`` otherwise (GPT-J), both from
    ``rope_dim_offset`` on.  Other elements are left alone.

    Args:
        positions: ``[num_tokens]`` or ``[batch, seq]`` int32 or int64, any strides.
        query: the shape of ``positions``, then ``num_heads * head_size`` or ``num_heads, head_size``; float32, float16
            or bfloat16; written.  All strides but the last are free.
        key: as ``query``, with its own number of heads, strides and form; or ``None``.
        head_size: elements of a head.
        cos_sin_cache: ``[max_position, rotary_dim]`` float32, float16 or bfloat16: in each row all cosines,
            then all sines.
        is_neox: NeoX style pairs, else GPT-J style.
        rope_dim_offset: first element of a head that is rotated.
        inverse: rotate back.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.  Also for a position outside the cache, whose token is left
            as it is: at once on the CPU, on the GPU at the next ``pykv.check_errors()``.
        TypeError: dtypes do not fit.
    """


@operation()
def batched_rotary_embedding(
    positions: Array,
    query: Array,
    key: Array | None,
    head_size: int,
    cos_sin_cache: Array,
    is_neox: bool,
    rot_dim: int,
    cos_sin_cache_offsets: Array,
    *,
    stream: Stream = None,
) -> None:
    """Rotate as :func:`rotary_embedding`, by one of several tables of angles that lie one below the other.

    Token t takes row ``positions[t] + cos_sin_cache_offsets[t]``.

    Args:
        positions: as in :func:`rotary_embedding`; within a table.
        query: as there; written.
        key: as there.
        head_size: elements of a head.
        cos_sin_cache: ``[rows of all tables, rot_dim]``.
        is_neox: NeoX style pairs, else GPT-J style.
        rot_dim: elements of a head that are rotated.
        cos_sin_cache_offsets: ``[num_tokens]`` int32 or int64: first row of each token's table.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: as :func:`rotary_embedding`.
        TypeError: dtypes do not fit.
    """


def _sections(mrope_section: Array | Sequence[int]) -> Any:
    if not isinstance(mrope_section, Sequence):
        return mrope_section
    try:
        return np.array([index(n) for n in mrope_section], np.int64)
    except (TypeError, OverflowError):
        shown = repr(mrope_section)[:60]
        raise TypeError(f"mrope: mrope_section: must be integers that fit int64, got {shown}") from None


@operation(converters={"mrope_section": _sections})
def mrope(
    positions: Array,
    query: Array,
    key: Array | None,
    head_size: int,
    cos_sin_cache: Array,
    is_neox: bool,
    mrope_section: Array | Sequence[int],
    mrope_interleaved: bool = False,
    *,
    stream: Stream = None,
) -> None:
    """Rotate as :func:`rotary_embedding`, by several positions of each token (time, height, width) at once.

    Each frequency belongs to one axis: in a row, the first ``mrope_section[0]`` to axis 0, the next ones to axis 1, and
    so on; or interleaved, frequency i to axis ``i % num_axes`` until that one has its number, and then to axis 0.

    Args:
        positions: ``[num_axes, num_tokens]`` or ``[num_axes, batch, seq]`` int32 or int64; or ``[num_tokens]``, one
            position for all axes (text).
        query: as in :func:`rotary_embedding`; written.
        key: as there.
        head_size: elements of a head.
        cos_sin_cache: ``[max_position, rotary_dim]``.
        is_neox: NeoX style pairs, else GPT-J style.
        mrope_section: how many of the ``rotary_dim / 2`` frequencies each axis has, up to 4 axes: numbers, or an array
            of int32 or int64 on the device of the others, which nobody checks, or on the host, which must add up.
        mrope_interleaved: which of the two ways.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: as :func:`rotary_embedding`.
        TypeError: dtypes do not fit.
    """


def _five_copies(arguments: Mapping[str, Any]) -> Spec:
    (tokens, heads, *head), dtype = arguments["query"]
    return Spec((tokens, 5 * heads, *head), dtype)


@operation(query_out=Rule(_five_copies))
def dual_chunk_rotary_embedding(
    query_out: Array,
    positions: Array,
    query: Array,
    key: Array | None,
    head_size: int,
    cos_sin_cache: Array,
    is_neox: bool,
    chunk_size: int,
    local_size: int,
    offsets: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Rotate ``key`` within its chunk, and ``query`` as dual chunk attention wants it (arXiv:2402.17463), five times.

    With ``c = chunk_size - local_size`` and ``m = position % c``, ``key`` is rotated in place by the angles of ``m``;
    the copies of ``query`` by those of ``m`` (within the chunk), ``min(m + c, chunk_size)`` (the next one),
    ``min(2 * c - 1, chunk_size)`` (others), ``m + c`` and ``m + chunk_size`` (both without the bound).

    Args:
        query_out: ``[num_tokens, 5 * num_heads * head_size]`` or ``[num_tokens, 5 * num_heads, head_size]``, dtype of
            ``query``: one copy behind the other; written.
        positions: ``[num_tokens]`` int32 or int64.
        query: ``[num_tokens, num_heads * head_size]`` or ``[num_tokens, num_heads, head_size]``; read.
        key: as ``query``, with its own number of heads; written.  Or ``None``.
        head_size: elements of a head; those behind ``rotary_dim`` are copied.
        cos_sin_cache: ``[max_position, rotary_dim]``.
        is_neox: NeoX style pairs, else GPT-J style.
        chunk_size: tokens of a chunk.
        local_size: less than ``chunk_size``.
        offsets: ``[num_tokens]``, added to ``positions``.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.  Also where ``m + chunk_size`` is outside the cache; then the
            token is left out.
        TypeError: dtypes do not fit.
    """
