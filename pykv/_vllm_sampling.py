"""From ids to rows and from logits to tokens: what :mod:`pykv.vllm` has of ``vllm._custom_ops`` for that."""

from __future__ import annotations

from typing import Any

import pykv
from pykv._libraries import empty_beside, spec_of
from pykv._types import Array


def vocab_parallel_embedding(
    input_ids: Array,
    weight: Array,
    org_vocab_start_index: int,
    org_vocab_end_index: int,
    num_org_vocab_padding: int,
    added_vocab_start_index: int,
    added_vocab_end_index: int,
) -> Any:
    """:func:`pykv.masked_embedding`; returns ``[num_tokens, width]``, with zeros for ids that are not this shard's.

    How many ids all shards have is not told, so that any from 0 on may be another's.
    """
    (_, width), dtype = spec_of(weight)
    out = empty_beside(weight, (*spec_of(input_ids).shape, width), dtype)
    pykv.masked_embedding(
        out, input_ids, weight, org_vocab_start_index, org_vocab_end_index, num_org_vocab_padding,
        added_vocab_start_index, added_vocab_end_index, vocab_size=2**63 - 1,
    )  # fmt: skip
    return out


def fp32_router_gemm(hidden_states: Array, router_weight: Array) -> Any:
    """:func:`pykv.fp32_router_gemm`; returns ``[num_rows, num_experts]`` float32."""
    shape = (spec_of(hidden_states).shape[0], spec_of(router_weight).shape[0])
    output = empty_beside(hidden_states, shape, "float32")
    pykv.fp32_router_gemm(output, hidden_states, router_weight)
    return output


def apply_repetition_penalties(
    logits: Array, prompt_mask: Array, output_mask: Array, repetition_penalties: Array
) -> None:
    """:func:`pykv.apply_repetition_penalties_`."""
    pykv.apply_repetition_penalties_(logits, prompt_mask, output_mask, repetition_penalties)


def top_k_per_row_prefill(
    logits: Any,
    cu_seqlen_ks: Array,
    cu_seqlen_ke: Array,
    raw_topk_indices: Any,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """:func:`pykv.top_k_per_row`.  Strides are those of ``logits``."""
    pykv.top_k_per_row(raw_topk_indices[:num_rows], logits[:num_rows], topk_tokens, cu_seqlen_ks, cu_seqlen_ke)


def top_k_per_row_decode(
    logits: Any,
    next_n: int,
    seq_lens: Any,
    raw_topk_indices: Any,
    num_rows: int,
    stride0: int,
    stride1: int,
    topk_tokens: int,
) -> None:
    """:func:`pykv.top_k_per_row`.  Strides are those of ``logits``.

    ``seq_lens`` of two dimensions are the ends of the rows themselves.
    """
    per_sequence = next_n if seq_lens.ndim == 1 else 0
    pykv.top_k_per_row(
        raw_topk_indices[:num_rows], logits[:num_rows], topk_tokens, row_ends=seq_lens, next_n=per_sequence
    )


def persistent_topk(logits: Array, lengths: Array, output: Array, workspace: Array, k: int, max_seq_len: int) -> None:
    """:func:`pykv.top_k_per_row` for ``torch.ops._C.persistent_topk``; it needs no workspace, and no longest length."""
    pykv.top_k_per_row(output, logits, k, row_ends=lengths)


def cooperative_topk(logits: Array, lengths: Array, output: Array, workspace: Array, k: int, max_seq_len: int) -> None:
    """The same as :func:`persistent_topk`."""
    pykv.top_k_per_row(output, logits, k, row_ends=lengths)
