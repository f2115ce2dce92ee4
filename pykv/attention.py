"""Attention over a paged KV cache.

Layouts of the caches, NB blocks of BS tokens, x = 16 bytes / element size:

=======  =====================================================  ========================================
flash    ``[NB, BS, num_kv_heads, head_size]``                  the same; NHD, or HND by strides
packed   ``[NB, num_kv_heads, head_size / x, BS, x]``           ``[NB, num_kv_heads, head_size, BS]``
=======  =====================================================  ========================================

told apart by the number of dimensions of ``key_cache``.  All strides but the innermost are free.

Caches of nvfp4 are uint8 ``[NB, BS, num_kv_heads, head_size / 2 + head_size / 16]`` with compact pages, NHD or HND by
strides; ``head_size`` is a multiple of 64, ``BS`` of 4 (``pykv.cache`` says where their scales lie).

A block id outside the cache masks its tokens, a length beyond the row of ``block_tables`` is clamped; both raise
``ValueError``, on the GPU at the next ``pykv.check_errors()``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pykv import _C
from pykv._schema import NoneIs, Rule, Spec, like, operation
from pykv._types import Array, ScalarOrArray, Stream


@Rule
def _lse(arguments: Mapping[str, Any]) -> Spec:
    num_tokens, num_heads, _ = arguments["query"].shape
    return Spec((num_heads, num_tokens), "float32")


def _partitions(arguments: Mapping[str, Any]) -> Spec:
    num_seqs, num_heads, _ = arguments["query"].shape
    return Spec((num_seqs, num_heads, -(-arguments["max_seq_len"] // 512)), "float32")


def _partition_outputs(arguments: Mapping[str, Any]) -> Spec:
    query = arguments["query"]
    return Spec((*_partitions(arguments).shape, query.shape[-1]), query.dtype)


def _merged(parts: str) -> Rule:
    def make(arguments: Mapping[str, Any]) -> Spec:
        shape, dtype = arguments[parts]
        return Spec(shape[-3:], dtype if arguments["output_scale"] is None else "float8_e4m3fn")

    return Rule(make)


@operation(
    converters={
        "scale": NoneIs(math.nan, number=True),
        "window": NoneIs(0, positive=True),
        "softcap": NoneIs(0.0, positive=True),
    },
    out=like("query"),
    lse=_lse,
)
def paged_attention(
    out: Array,
    query: Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    cu_query_lens: Array | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: ScalarOrArray = 1.0,
    v_scale: ScalarOrArray = 1.0,
    batch_invariant: bool = False,
    lse: Array | None = None,
    workspace: Array | None = None,
    stream: Stream = None,
) -> None:
    """Attend from the last tokens of each sequence to all of it: prefill, chunked prefill and decode in one batch.

    Args:
        out: ``[num_tokens, num_heads, head_size]``, dtype of ``query``; written.
        query: ``[num_tokens, num_heads, head_size]`` float32, float16 or bfloat16.
        key_cache, value_cache: the blocks of all sequences, NB of BS tokens.  Flash: both ``[NB, BS, num_kv_heads,
            head_size]``, NHD or, by strides, HND.  Packed: ``[NB, num_kv_heads, head_size / x, BS, x]`` with x = 16
            bytes of elements, and ``[NB, num_kv_heads, head_size, BS]``.
        block_tables: ``[num_seqs, max_blocks_per_seq]`` int32 or int64, the blocks of each sequence in order.
            Their width says how long sequences may be.  With ``batch_invariant``, or several queries for each, a view
            of the first columns lets a few short ones go a quicker way.
        seq_lens: ``[num_seqs]`` int32 or int64: tokens of each sequence that the cache holds, those of this call's
            queries included.  Write their keys and values first.
        cu_query_lens: ``[num_seqs + 1]`` int32 or int64, cumulative: the queries of sequence s are rows ``cu[s]`` to
            ``cu[s + 1] - 1``, its last tokens.  ``None``: one query for each sequence (decoding).
        scale: factor of q.k; ``None``: ``1 / sqrt(head_size)``.
        causal: a query at position p sees keys ``j <= p``.
        window: it sees keys with ``|p - j| < window``.
        softcap: logits become ``softcap * tanh(logit / softcap)``; infinity: as ``None``, no change.
        alibi_slopes: ``[num_heads]`` float32; adds ``slope * (j - p)``.
        sinks: ``[num_heads]`` float32; one more logit in each softmax, without a value.
        kv_cache_dtype: ``"auto"``: caches have the dtype of ``query``; ``"fp8_e4m3"``, ``"fp8_e5m2"``: one-byte floats;
            ``"int8"``; ``"nvfp4"``: pages of four-bit floats and their scales.
        k_scale, v_scale: value = element * scale for all but ``"auto"``; one, or one for each KV head.
        batch_invariant: the result of a query depends, to the last bit, on itself, on the keys that it sees and on the
            options alone: not on the rest of the batch, nor on how its prompt was cut into calls.  On CUDA
            decoding then takes 1 to 40 % longer, up to twice as long if all is short, and prefill two or three times.
        lse: ``[num_heads, num_tokens]`` float32; written with the natural log of the softmax denominator.
        workspace: bytes on the device (see ``paged_attention_workspace_size``); ``None``: from the stream-ordered pool.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    A row that sees nothing gives 0 and an lse of -inf.  NaN or +inf among the logits that a row sees, or in its sink,
    gives NaN in its output and lse; NaN in a value that it sees gives NaN in that dimension of the output.  What no row
    sees may hold anything: slots beyond a length or before a window, other blocks.  A key that only other rows of the
    sequence see may hold NaN, too.  So may its value on the CPU, and on CUDA if ``query`` is float32; tensor cores add
    zero times the values of a tile to all of its rows, which NaN and infinity do not leave as they are.

    Raises:
        ValueError: a shape, layout or option is wrong, or (CPU) an id was out of range.
        TypeError: a dtype is wrong.
    """


def paged_attention_workspace_size(
    num_tokens: int,
    num_seqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    device: int = 0,
    *,
    batch_invariant: bool = False,
) -> int:
    """Bytes of ``workspace`` that :func:`paged_attention` wants on a CUDA device for batches of up to these sizes."""
    sizes = num_tokens, num_seqs, num_heads, num_kv_heads, head_size
    return _C.paged_attention_workspace_size(*sizes, batch_invariant, device)


@operation(out=like("query"))
def paged_attention_v1(
    out: Array,
    query: Array,
    key_cache: Array,
    value_cache: Array,
    num_kv_heads: int,
    scale: float,
    block_tables: Array,
    seq_lens: Array,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Array | None,
    kv_cache_dtype: str,
    k_scale: ScalarOrArray,
    v_scale: ScalarOrArray,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    stream: Stream = None,
) -> None:
    """Decode attention by vLLM's signature: one query for each sequence.  The softmax denominator is ``sum + 1e-6``.

    Args:
        out: ``[num_seqs, num_heads, head_size]``; written.
        query: ``[num_seqs, num_heads, head_size]`` float32, float16 or bfloat16.
        key_cache, value_cache: paged caches, packed or flash, as for :func:`paged_attention`.
        num_kv_heads, block_size: as in the caches.
        block_tables, seq_lens: ``[num_seqs, max_blocks_per_seq]``, ``[num_seqs]``, int32 or int64.
        max_seq_len: an upper bound of ``seq_lens``; a longer length is clamped to it and reported.
        alibi_slopes, kv_cache_dtype, k_scale, v_scale: as for :func:`paged_attention`.
        tp_rank, blocksparse_*: block-sparse attention, on if ``blocksparse_vert_stride > 1``: a cache block in sparsity
            block ``kb`` is seen if ``(kb + offset(head)) % vert_stride == 0`` or ``kb > qb - local_blocks``; the header
            ``pykv/attention.h`` has the offset, which must fit into 64 bits.

    Raises:
        ValueError, TypeError: as for :func:`paged_attention`.
    """


@operation(
    out=like("query"),
    exp_sum=Rule(_partitions, is_scratch=True),
    max_logits=Rule(_partitions, is_scratch=True),
    tmp_out=Rule(_partition_outputs, is_scratch=True),
)
def paged_attention_v2(
    out: Array,
    exp_sum: Array,
    max_logits: Array,
    tmp_out: Array,
    query: Array,
    key_cache: Array,
    value_cache: Array,
    num_kv_heads: int,
    scale: float,
    block_tables: Array,
    seq_lens: Array,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Array | None,
    kv_cache_dtype: str,
    k_scale: ScalarOrArray,
    v_scale: ScalarOrArray,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    stream: Stream = None,
) -> None:
    """:func:`paged_attention_v1` with the scratch arrays of vLLM's signature, ``P = ceil(max_seq_len / 512)``.

    Args:
        exp_sum, max_logits: ``[num_seqs, num_heads, P]`` float32; scratch.
        tmp_out: ``[num_seqs, num_heads, P, head_size]``, dtype of ``query``; scratch.

    What the scratch arrays hold after the call is not specified.
    """


@operation(
    converters={"prefill_tokens_with_context": NoneIs(-1)},
    output=_merged("prefix_output"),
    output_lse=like("prefix_lse"),
)
def merge_attn_states(
    output: Array,
    prefix_output: Array,
    prefix_lse: Array,
    suffix_output: Array,
    suffix_lse: Array,
    output_lse: Array | None = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: ScalarOrArray | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Merge two partial attentions over disjoint sets of keys (arXiv:2501.01005, section 2.2).

    Args:
        output: ``[num_tokens, num_heads, head_size]``; written.  May be ``prefix_output`` or ``suffix_output``.
        prefix_output, suffix_output: ``[num_tokens, num_heads, head_size]`` float32, float16 or bfloat16.
        prefix_lse, suffix_lse: ``[num_heads, num_tokens]`` float32, natural log, any strides; infinite where nothing
            was seen.  NaN makes output and lse NaN.
        output_lse: the same; written.
        prefill_tokens_with_context: tokens from here on copy the suffix; ``None``: none does.
        output_scale: with it ``output`` is float8_e4m3fn (or uint8) and holds value / scale.

    Where both sides are empty the prefix is copied, and the lse is -inf.
    """


@operation(
    output=_merged("partial_outputs"),
    output_lse=Rule(lambda arguments: Spec(arguments["partial_lses"].shape[1:], "float32")),
)
def merge_attn_states_n(
    output: Array,
    partial_outputs: Array,
    partial_lses: Array,
    output_lse: Array | None = None,
    output_scale: ScalarOrArray | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Merge any number of partial attentions over disjoint sets of keys, stacked in one array.

    Args:
        output: ``[num_tokens, num_heads, head_size]``, dtype of ``partial_outputs`` or, if that is float32, any of the
            three; written.  May be one of the parts.
        partial_outputs: ``[num_parts, num_tokens, num_heads, head_size]`` float32, float16 or bfloat16.
        partial_lses: ``[num_parts, num_heads, num_tokens]`` float32, natural log; infinite where nothing was seen.
        output_lse: ``[num_heads, num_tokens]`` float32; written.  May be one of ``partial_lses``.
        output_scale: with it ``output`` is float8_e4m3fn (or uint8) and holds value / scale.

    A part that saw nothing may hold anything.  Where no part saw anything the output is 0, and the lse is -inf.
    """
