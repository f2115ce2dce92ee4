"""The key cache of a sparse-attention indexer (DeepSeek V3.2): fp8 values in groups, each with a scale.

A block of ``BS`` tokens holds first all values (float8_e4m3fn), then all scales (of four bytes), so the shape
``[NB, BS, head_dim + 4 * head_dim / quant_block_size]`` is its size alone: a token is no row of it.
"""

from __future__ import annotations

from pykv._schema import operation
from pykv._types import Array, Stream


@operation()
def indexer_k_quant_and_cache(
    k: Array,
    kv_cache: Array,
    slot_mapping: Array,
    quant_block_size: int,
    kv_cache_dtype: str = "auto",
    *,
    stream: Stream = None,
) -> None:
    """Quantise the key of each token in groups and write it into its slot.

    The scale of a group is ``max(amax, 1e-4) / 448``, NaN not counted; its values are divided by it and rounded to
    nearest even; NaN stays NaN.

    Args:
        k: ``[num_rows, head_dim]`` float32, float16 or bfloat16.
        kv_cache: ``[NB, BS, >= head_dim + 4 * head_dim / quant_block_size]`` of bytes; blocks are contiguous, with any
            distance between them; written.
        slot_mapping: ``[num_tokens]`` int32 or int64: the slot of each token; negative: padding, the token is skipped.
            Its length decides: ``k`` may have more rows.  Of tokens with one slot, any may win.
        quant_block_size: size of a group; any divisor of ``head_dim``.
        kv_cache_dtype: ``"ue8m0"``: scales are rounded up to powers of two, and stored as float32 all the same;
            ``"mxfp8"``: the same powers, each stored as its biased exponent in all four bytes of its place (in groups
            of 128 a byte for each 32 values, as MX formats want it); ``"auto"``, ``"fp8"``, ``"fp8_e4m3"``: they are
            not rounded.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or an option is wrong; or a slot lies beyond the cache: it was skipped (CPU: at once;
            CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation()
def cp_gather_indexer_k_quant_cache(
    kv_cache: Array,
    dst_k: Array,
    dst_scale: Array,
    block_table: Array,
    cu_seq_lens: Array,
    seq_starts: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Gather values and scales of requests into the rows of ``dst_k`` and ``dst_scale``, one request after another.

    Request ``r`` has the rows from ``cu_seq_lens[r]`` to ``cu_seq_lens[r + 1]``; row ``i`` is its token
    ``i - cu_seq_lens[r] + seq_starts[r]``.  All other rows stay as they are.

    Args:
        kv_cache: as :func:`indexer_k_quant_and_cache` writes it.
        dst_k: ``[num_rows, head_dim]`` of bytes; any strides, as for all arrays here; written.
        dst_scale: ``[num_rows, head_dim / quant_block_size]`` float32, or four times as many bytes; written.
        block_table: ``[>= num_requests, width]`` int32 or int64, as all ids here.
        cu_seq_lens: ``[num_requests + 1]``, ascending.
        seq_starts: ``[>= num_requests]``; ``None``: 0.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape is wrong; or a position lies beyond the block table, or a block beyond the cache: its row
            was not written (CPU: at once; CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """
