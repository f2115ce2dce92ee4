"""What the samples of attention must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attention import reference as attention

Results = dict[str, Any]


def paged_attention(a: Any) -> Results:
    given = a.query, a.key_cache, a.value_cache, a.block_tables, a.seq_lens
    return dict(zip(("out", "lse"), attention.paged_attention(*given, cu_query_lens=a.cu_query_lens), strict=True))


def paged_attention_of_vllm(a: Any) -> Results:
    given = a.query, a.key_cache, a.value_cache, a.block_tables, a.seq_lens
    return {"out": attention.paged_attention(*given, scale=a.scale, epsilon=1e-6)[0]}


def merge_attn_states(a: Any) -> Results:
    merged = attention.merge_attn_states(a.prefix_output, a.prefix_lse, a.suffix_output, a.suffix_lse)
    return dict(zip(("output", "output_lse"), merged, strict=True))


EXPECTED: dict[str, Callable[[Any], Results]] = {
    "paged_attention": paged_attention,
    "paged_attention_v1": paged_attention_of_vllm,
    "paged_attention_v2": paged_attention_of_vllm,
    "merge_attn_states": merge_attn_states,
    "merge_attn_states_n": lambda a: {"output": attention.merge_attn_states_n(a.partial_outputs, a.partial_lses)[0]},
}
