"""Small right calls of the operations of attention, and calls of a size that means something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pykv._schema import Spec
from pykv._tools.samples import _sizes as sizes
from pykv._tools.samples._arrays import Sample, flash_caches, floats, ids, packed_caches
from pykv._tools.samples._workload import BLOCK, HEAD, HEADS, KV_HEADS, Tokens, Workload, caches


def two_sequences() -> Sample:
    return {"block_tables": ids([1, 4], [3, 0]), "seq_lens": ids(7, 5)}


def decode(*outputs: str) -> Sample:
    scratch = {
        "exp_sum": floats(2, sizes.HEADS, 1),
        "max_logits": floats(2, sizes.HEADS, 1),
        "tmp_out": floats(2, sizes.HEADS, 1, sizes.HEAD_SIZE),
    }
    return (
        {"out": floats(2, sizes.HEADS, sizes.HEAD_SIZE)}
        | {name: scratch[name] for name in outputs}
        | {"query": floats(2, sizes.HEADS, sizes.HEAD_SIZE, seed=5)}
        | packed_caches()
        | {"num_kv_heads": sizes.KV_HEADS, "scale": 0.25}
        | two_sequences()
        | {"block_size": sizes.BLOCK_SIZE, "max_seq_len": 8, "alibi_slopes": None, "kv_cache_dtype": "auto"}
        | {"k_scale": 1.0, "v_scale": 1.0}
    )


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "paged_attention": lambda: (
        {"out": floats(3, sizes.HEADS, sizes.HEAD_SIZE), "query": floats(3, sizes.HEADS, sizes.HEAD_SIZE, seed=5)}
        | flash_caches()
        | two_sequences()
        | {"cu_query_lens": ids(0, 1, 3), "lse": floats(sizes.HEADS, 3)}
    ),
    "paged_attention_v1": lambda: decode(),
    "paged_attention_v2": lambda: decode("exp_sum", "max_logits", "tmp_out"),
    "merge_attn_states": lambda: {
        "output": floats(3, sizes.HEADS, sizes.HEAD_SIZE),
        "prefix_output": floats(3, sizes.HEADS, sizes.HEAD_SIZE, seed=1),
        "prefix_lse": floats(sizes.HEADS, 3, seed=2),
        "suffix_output": floats(3, sizes.HEADS, sizes.HEAD_SIZE, seed=3),
        "suffix_lse": floats(sizes.HEADS, 3, seed=4),
        "output_lse": floats(sizes.HEADS, 3),
    },
    "merge_attn_states_n": lambda: {
        "output": floats(3, sizes.HEADS, sizes.HEAD_SIZE),
        "partial_outputs": floats(2, 3, sizes.HEADS, sizes.HEAD_SIZE, seed=1),
        "partial_lses": floats(2, sizes.HEADS, 3, seed=2),
    },
}


def decode_arguments(t: Tokens, packed: bool = False) -> dict[str, Any]:
    tables = t.tables
    query = Spec((len(tables), HEADS, HEAD), t.dtype)
    return {"query": query, **caches(t, tables.size, packed), "block_tables": tables, "seq_lens": t.lengths}


def paged_attention_workload(t: Tokens) -> Workload:
    seen = t.bytes(KV_HEADS * HEAD)
    return Workload(decode_arguments(t), {"key_cache": seen, "value_cache": seen})


def vllm_attention_workload(t: Tokens) -> Workload:
    seen = t.bytes(KV_HEADS * HEAD)
    rest = {"num_kv_heads": KV_HEADS, "scale": HEAD**-0.5, "block_size": BLOCK, "max_seq_len": int(t.lengths.max())}
    options = {"alibi_slopes": None, "kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0}
    scratch = dict.fromkeys(("exp_sum", "max_logits", "tmp_out"), 0)
    return Workload(
        decode_arguments(t, packed=True) | rest | options, {"key_cache": seen, "value_cache": seen, **scratch}
    )


def merge_workload(t: Tokens) -> Workload:
    part, lse = t.rows(HEADS, HEAD), Spec((HEADS, t.count), "float32")
    return Workload({"prefix_output": part, "prefix_lse": lse, "suffix_output": part, "suffix_lse": lse})


def merge_n_workload(t: Tokens) -> Workload:
    parts, lses = Spec((4, t.count, HEADS, HEAD), t.dtype), Spec((4, HEADS, t.count), "float32")
    return Workload({"partial_outputs": parts, "partial_lses": lses})


WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {
    "paged_attention": paged_attention_workload,
    "paged_attention_v1": vllm_attention_workload,
    "paged_attention_v2": vllm_attention_workload,
    "merge_attn_states": merge_workload,
    "merge_attn_states_n": merge_n_workload,
}
