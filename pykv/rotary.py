"""Rotary position embedding."""

from __future__ import annotations

from pykv import _C
from pykv._types import Array, Stream


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
        stream: see the package.

    Raises:
        ValueError: shapes, strides or devices do not fit.  Also for a position outside the cache, whose token is left
            as it is: at once on the CPU, on the GPU at the next ``pykv.check_errors()``.
        TypeError: dtypes do not fit.
    """
    _C.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox, rope_dim_offset, inverse, stream)
