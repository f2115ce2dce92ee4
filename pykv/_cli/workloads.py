"""Calls of a size that means something, for ``python -m pykv bench``: those of a decoder layer with so many tokens.

Operations on rows need nothing here: their samples are widened.  What is neither there nor here is timed on its sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv._libraries import numpy_dtype
from pykv._schema import Spec

HEADS, KV_HEADS, HEAD, BLOCK = 32, 8, 128, 16
LATENT, ROPE, LATENT_HEADS = 512, 64, 16  # of MLA
EXPERTS, TOP_K, HIDDEN = 128, 8, 2048  # of mixtures of experts
POSITIONS, CONTEXT, LAYERS = 4096, 1024, 4

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Workload:
    arguments: Mapping[str, Any]  # without outputs; a Spec is an array of random numbers, an array is taken as it is
    touched: Mapping[str, int] = field(default_factory=dict)  # bytes of an array, where a call does not touch all of it


@dataclass(frozen=True)
class Tokens:
    """So many tokens of a dtype, and what operations say of them."""

    count: int
    dtype: str

    def rows(self, *shape: int) -> Spec:
        return Spec((self.count, *shape), self.dtype)

    def bytes(self, elements: int) -> int:
        """Of so many elements for each token."""
        return self.count * elements * numpy_dtype(self.dtype).itemsize

    @property
    def blocks(self) -> int:
        return math.ceil(self.count / BLOCK)

    def cache(self, *shape: int) -> Spec:
        return Spec((self.blocks, *shape), self.dtype)

    @property
    def slots(self) -> Ids:
        """Of whole sequences, as a prefill writes them: block after block, each anywhere in the cache."""
        return (_shuffled(self.blocks)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1)[: self.count]

    @property
    def positions(self) -> Ids:
        return np.arange(self.count, dtype=np.int64) % POSITIONS

    @property
    def lengths(self) -> Ids:
        """Of sequences that have all tokens together."""
        return np.array([len(part) for part in np.array_split(np.arange(self.count), max(1, self.count // CONTEXT))])

    @property
    def tables(self) -> Ids:
        """Blocks of these sequences, anywhere in a cache of ``blocks_of_sequences``."""
        width = math.ceil(self.lengths.max() / BLOCK)
        return _shuffled(len(self.lengths) * width).reshape(-1, width)

    @property
    def starts(self) -> Ids:
        return np.concatenate([[0], np.cumsum(self.lengths)])

    def angles(self, width: int) -> dict[str, Any]:
        """Of rotations: calls turn the same numbers again and again, which others would make infinite or subnormal."""
        angles = np.arange(POSITIONS)[:, None] * 10000.0 ** (-np.arange(0, width, 2) / width)
        table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return {"cos_sin_cache": table.astype(numpy_dtype(self.dtype)), "is_neox": True}


def _shuffled(n: int) -> Ids:
    return np.random.default_rng(0).permutation(n)


def _new_tokens(t: Tokens, packed: bool = False) -> Workload:
    inner = (KV_HEADS, HEAD)
    new = t.bytes(KV_HEADS * HEAD)
    return Workload(
        {"key": t.rows(*inner), "value": t.rows(*inner), **_caches(t, t.blocks, packed), "slot_mapping": t.slots},
        {"key_cache": new, "value_cache": new},
    )


def _caches(t: Tokens, blocks: int, packed: bool) -> dict[str, Any]:
    key: tuple[int, ...] = (blocks, BLOCK, KV_HEADS, HEAD)
    value = key
    if packed:
        x = 16 // numpy_dtype(t.dtype).itemsize
        key, value = (blocks, KV_HEADS, HEAD // x, BLOCK, x), (blocks, KV_HEADS, HEAD, BLOCK)
    return {"key_cache": Spec(key, t.dtype), "value_cache": Spec(value, t.dtype)}


def _rotated(t: Tokens, **more: Any) -> Workload:
    heads = {"query": t.rows(HEADS * HEAD), "key": t.rows(KV_HEADS * HEAD), "head_size": HEAD}
    return Workload({"positions": t.positions, **heads, **t.angles(HEAD), **more}, {"cos_sin_cache": t.bytes(HEAD)})


def _rotary_and_cache(t: Tokens) -> Workload:
    new, turned = _new_tokens(t), _rotated(t)
    arguments = {"positions": t.positions, "query": t.rows(HEADS, HEAD), **t.angles(HEAD)}
    return Workload(arguments | dict(new.arguments), {**new.touched, **turned.touched})


def _decode(t: Tokens, packed: bool = False) -> dict[str, Any]:
    tables = t.tables
    query = Spec((len(tables), HEADS, HEAD), t.dtype)
    return {"query": query, **_caches(t, tables.size, packed), "block_tables": tables, "seq_lens": t.lengths}


def _paged_attention(t: Tokens) -> Workload:
    seen = t.bytes(KV_HEADS * HEAD)
    return Workload(_decode(t), {"key_cache": seen, "value_cache": seen})


def _vllm_attention(t: Tokens) -> Workload:
    seen = t.bytes(KV_HEADS * HEAD)
    rest = {"num_kv_heads": KV_HEADS, "scale": HEAD**-0.5, "block_size": BLOCK, "max_seq_len": int(t.lengths.max())}
    options = {"alibi_slopes": None, "kv_cache_dtype": "auto", "k_scale": 1.0, "v_scale": 1.0}
    scratch = dict.fromkeys(("exp_sum", "max_logits", "tmp_out"), 0)
    return Workload(_decode(t, packed=True) | rest | options, {"key_cache": seen, "value_cache": seen, **scratch})


def _merge(t: Tokens) -> Workload:
    part, lse = t.rows(HEADS, HEAD), Spec((HEADS, t.count), "float32")
    return Workload({"prefix_output": part, "prefix_lse": lse, "suffix_output": part, "suffix_lse": lse})


def _merge_n(t: Tokens) -> Workload:
    parts, lses = Spec((4, t.count, HEADS, HEAD), t.dtype), Spec((4, HEADS, t.count), "float32")
    return Workload({"partial_outputs": parts, "partial_lses": lses})


def _pairs(t: Tokens, offset: int = 0) -> Ids:
    return np.stack([np.arange(t.blocks), _shuffled(t.blocks) + offset], axis=1)


def _copied(t: Tokens, *names: str) -> Workload:
    """The first half of the blocks of each cache to the second one."""
    caches = [Spec((2 * t.blocks, BLOCK, KV_HEADS, HEAD), t.dtype)] * LAYERS
    moved = 2 * LAYERS * t.blocks * BLOCK * t.bytes(KV_HEADS * HEAD) // t.count
    return Workload(dict.fromkeys(names, caches) | {"block_mapping": _pairs(t, t.blocks)}, dict.fromkeys(names, moved))


def _swapped(t: Tokens, source: str, target: str, layers: int | None = None) -> Workload:
    """Blocks from one array to another on the same device."""
    cache = t.cache(BLOCK, KV_HEADS, HEAD)
    block = BLOCK * t.bytes(KV_HEADS * HEAD) // t.count
    arrays: Any = cache if layers is None else [cache] * layers
    moved = (layers or 1) * t.blocks * block
    return Workload(
        {source: arrays, target: arrays, "block_size_in_bytes": block, "block_mapping": _pairs(t)},
        {source: moved, target: moved},
    )


def _mla_write(t: Tokens) -> Workload:
    latent = {"kv_c": t.rows(LATENT), "k_pe": t.rows(ROPE), "kv_cache": t.cache(BLOCK, LATENT + ROPE)}
    return Workload(latent | {"slot_mapping": t.slots}, {"kv_cache": t.bytes(LATENT + ROPE)})


def _mla_write_layers(t: Tokens) -> Workload:
    latent = {"kv_c": Spec((LAYERS, t.count, LATENT), t.dtype), "k_pe": Spec((LAYERS, t.count, ROPE), t.dtype)}
    caches = {"kv_caches": [t.cache(BLOCK, LATENT + ROPE)] * LAYERS, "slot_mapping": np.stack([t.slots] * LAYERS)}
    return Workload(latent | caches, {"kv_caches": LAYERS * t.bytes(LATENT + ROPE)})


def _mla_rotate_and_write(t: Tokens) -> Workload:
    plain = _mla_write(t)
    turned = {"positions": t.positions, "q_pe": t.rows(LATENT_HEADS, ROPE), **t.angles(ROPE)}
    return Workload({**plain.arguments, **turned}, {**plain.touched, "cos_sin_cache": t.bytes(ROPE)})


def _gathered(t: Tokens, of_cache: Spec, source: str, touched: int, **rest: Any) -> Workload:
    cache = Spec((t.tables.size, *of_cache.shape), of_cache.dtype)
    written = {k: size_of(v) for k, v in rest.items() if isinstance(v, Spec)}
    return Workload({source: cache, "block_table": t.tables, **rest}, {source: touched, **written})


def size_of(spec: Spec) -> int:
    """Bytes."""
    return math.prod(spec.shape) * numpy_dtype(spec.dtype).itemsize


def _mla_gather(t: Tokens) -> Workload:
    row = Spec((BLOCK, LATENT + ROPE), t.dtype)
    rest = {"dst": t.rows(LATENT + ROPE), "cu_seq_lens": t.starts, "batch_size": len(t.lengths)}
    return _gathered(t, row, "src_cache", t.bytes(LATENT + ROPE), **rest)


def _mla_dequantise(t: Tokens) -> Workload:
    row = Spec((BLOCK, LATENT + ROPE), "uint8")
    requests = np.repeat(np.arange(len(t.lengths)), t.lengths)
    ids = {"cu_seq_lens": t.starts, "token_to_seq": requests, "num_tokens": t.count}
    options = {"kv_cache_dtype": "fp8_e4m3", "scale": 1.0}
    return _gathered(t, row, "src_cache", t.count * (LATENT + ROPE), dst=t.rows(LATENT + ROPE), **ids, **options)


def _mla_upconvert(t: Tokens) -> Workload:
    record = LATENT + 4 * LATENT // 128 + 2 * ROPE
    dst = Spec((t.count, LATENT + ROPE), "float16" if t.dtype == "float32" else t.dtype)
    ids = {"workspace_starts": t.starts[:-1], "batch_size": len(t.lengths)}
    return _gathered(t, Spec((BLOCK, record), "uint8"), "src_cache", t.count * record, dst=dst, **ids)


def _mla_upconvert_nvfp4(t: Tokens) -> Workload:
    record = LATENT * 9 // 16 + ROPE
    dst = Spec((t.count, LATENT + ROPE), "float16" if t.dtype == "float32" else t.dtype)
    ids = {"workspace_starts": t.starts[:-1], "batch_size": len(t.lengths)}
    return _gathered(t, Spec((BLOCK, record), "uint8"), "src_cache", t.count * record, dst=dst, **ids)


def _indexer_write(t: Tokens) -> Workload:
    cache = Spec((t.blocks, BLOCK, HEAD + 4), "uint8")
    arguments = {"k": t.rows(HEAD), "kv_cache": cache, "slot_mapping": t.slots}
    options = {"quant_block_size": HEAD, "kv_cache_dtype": "ue8m0"}
    return Workload(arguments | options, {"kv_cache": t.count * (HEAD + 4)})


def _indexer_gather(t: Tokens) -> Workload:
    dst = {"dst_k": Spec((t.count, HEAD), "uint8"), "dst_scale": Spec((t.count, 1), "float32")}
    row = Spec((BLOCK, HEAD + 4), "uint8")
    return _gathered(t, row, "kv_cache", t.count * (HEAD + 4), **dst, cu_seq_lens=t.starts)


def _concat_mla_q(t: Tokens) -> Workload:
    return Workload({"ql_nope": t.rows(LATENT_HEADS, LATENT), "q_pe": t.rows(LATENT_HEADS, ROPE)})


def _qk_norm_rope(t: Tokens) -> Workload:
    heads = {"num_heads_q": HEADS, "num_heads_k": KV_HEADS, "num_heads_v": KV_HEADS, "head_dim": HEAD, "eps": 1e-6}
    weights = {"q_weight": Spec((HEAD,), t.dtype), "k_weight": Spec((HEAD,), t.dtype)}
    qkv = {"qkv": t.rows((HEADS + 2 * KV_HEADS) * HEAD), "position_ids": t.positions}
    # heads of v are not touched
    return Workload(
        {**qkv, **heads, **weights, **t.angles(HEAD)},
        {"qkv": 2 * t.bytes((HEADS + KV_HEADS) * HEAD), "cos_sin_cache": t.bytes(HEAD)},
    )


def _mrope(t: Tokens) -> Workload:
    plain = _rotated(t, mrope_section=np.array([16, 24, 24]))
    return Workload({**plain.arguments, "positions": np.stack([t.positions] * 3)}, plain.touched)


def _dual_chunk(t: Tokens) -> Workload:
    # its angles are those of five rows for each token
    plain = _rotated(t, chunk_size=POSITIONS // 4, local_size=POSITIONS // 16)
    return Workload(plain.arguments, {"query": t.bytes(HEADS * HEAD), "cos_sin_cache": 5 * t.bytes(HEAD)})


def _routed(t: Tokens) -> Workload:
    outputs = {"topk_weights": Spec((t.count, TOP_K), "float32"), "topk_ids": Spec((t.count, TOP_K), "int32")}
    arguments = outputs | {"token_expert_indices": None, "gating_output": t.rows(EXPERTS), "renormalize": True}
    return Workload(arguments, {name: size_of(spec) for name, spec in outputs.items()})


def _grouped(t: Tokens) -> Workload:
    options = {"n_group": 8, "topk_group": 4, "topk": TOP_K, "renormalize": True, "routed_scaling_factor": 2.5}
    return Workload({"scores": t.rows(EXPERTS), "scoring_func": 1, **options})


def _experts(t: Tokens) -> npt.NDArray[np.int32]:
    """Different ones for each token."""
    order = np.argsort(np.random.default_rng(0).random((t.count, EXPERTS), np.float32), axis=1)
    return order[:, :TOP_K].astype(np.int32)


def _aligned(t: Tokens) -> Workload:
    pairs, block = t.count * TOP_K, 16
    capacity = pairs + min(pairs, EXPERTS) * (block - 1)
    made = {"sorted_token_ids": capacity, "experts_ids": capacity // block + 1, "num_tokens_post_pad": 1}
    outputs = {name: Spec((n,), "int32") for name, n in made.items()}
    arguments = {"topk_ids": _experts(t), "num_experts": EXPERTS, "block_size": block}
    return Workload(arguments | outputs, {name: size_of(spec) for name, spec in outputs.items()})


def _permuted(t: Tokens) -> Workload:
    outputs = {
        "permuted_input": Spec((t.count * TOP_K, HIDDEN), t.dtype),
        "expert_first_token_offset": Spec((EXPERTS + 1,), "int64"),
        "inv_permuted_idx": Spec((t.count, TOP_K), "int32"),
        "permuted_idx": Spec((t.count * TOP_K,), "int32"),
    }
    given = {"input": t.rows(HIDDEN), "topk_ids": _experts(t), "token_expert_indices": None, "expert_map": None}
    sizes = {"n_expert": EXPERTS, "n_local_expert": EXPERTS, "topk": TOP_K}
    return Workload(given | sizes | outputs, {name: size_of(spec) for name, spec in outputs.items()})


def _places(t: Tokens) -> npt.NDArray[np.int32]:
    """Where the pairs of tokens are when they are sorted by expert."""
    order = np.argsort(_experts(t).reshape(-1), kind="stable")
    return np.argsort(order).astype(np.int32).reshape(t.count, TOP_K)


def _unpermuted(t: Tokens) -> Workload:
    rows, weights = Spec((t.count * TOP_K, HIDDEN), t.dtype), Spec((t.count, TOP_K), "float32")
    given = {"permuted_hidden_states": rows, "topk_weights": weights, "inv_permuted_idx": _places(t)}
    return Workload(given | {"expert_first_token_offset": None, "topk": TOP_K})


def _shuffled_rows(t: Tokens) -> Workload:
    where = np.argsort(_experts(t).reshape(-1), kind="stable") // TOP_K
    return Workload({"input_tensor": t.rows(HIDDEN), "dst2src_map": where.astype(np.int32)})


WEIGHT, WEIGHT_GROUP = 4096, 128  # columns of a weight with as many rows as there are tokens, and what shares a scale


def _gguf(t: Tokens) -> Workload:
    return Workload({"W": Spec((t.count, WEIGHT // 256 * 144), "uint8"), "quant_type": 12})  # Q4_K


def _groups(t: Tokens) -> int:
    """Of rows, which are some groups and nothing else."""
    return max(1, t.count // WEIGHT_GROUP)


def _awq(t: Tokens) -> Workload:
    groups, scales = _groups(t), Spec((_groups(t), WEIGHT), t.dtype)
    rows = groups * WEIGHT_GROUP
    codes, zeros = Spec((rows, WEIGHT // 8), "int32"), Spec((groups, WEIGHT // 8), "int32")
    return Workload({"qweight": codes, "scales": scales, "zeros": zeros})


def _gptq(t: Tokens) -> Workload:
    groups, scales = _groups(t), Spec((_groups(t), WEIGHT), t.dtype)
    codes = Spec((groups * WEIGHT_GROUP // 8, WEIGHT), "int32")
    return Workload({"qweight": codes, "qzeros": Spec((groups, WEIGHT // 8), "int32"), "scales": scales, "bits": 4})


def _scaled(t: Tokens, codes_per_byte: int, block: int, **more: Any) -> Workload:
    codes, scales = Spec((t.count, WEIGHT // codes_per_byte), "uint8"), Spec((t.count, WEIGHT // block), "uint8")
    return Workload({"input": codes, "scale": scales, **more})


def _fp8(t: Tokens) -> Workload:
    groups = math.ceil(t.count / WEIGHT_GROUP), WEIGHT // WEIGHT_GROUP
    sizes = {"group_rows": WEIGHT_GROUP, "group_columns": WEIGHT_GROUP}
    return Workload({"input": Spec((t.count, WEIGHT), "uint8"), "scale": Spec(groups, "float32"), **sizes})


WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {
    "reshape_and_cache": lambda t: _new_tokens(t, packed=True),
    "reshape_and_cache_flash": _new_tokens,
    "rotary_and_cache": _rotary_and_cache,
    "copy_blocks": lambda t: _copied(t, "key_caches", "value_caches"),
    "copy_blocks_mla": lambda t: _copied(t, "kv_caches"),
    "swap_blocks": lambda t: _swapped(t, "src", "dst"),
    "swap_blocks_layers": lambda t: _swapped(t, "src_caches", "dst_caches", LAYERS),
    "concat_and_cache_mla": _mla_write,
    "concat_and_cache_mla_layers": _mla_write_layers,
    "concat_and_cache_mla_rope_fused": _mla_rotate_and_write,
    "cp_gather_cache": _mla_gather,
    "gather_and_maybe_dequant_cache": _mla_dequantise,
    "cp_gather_and_upconvert_fp8_kv_cache": _mla_upconvert,
    "cp_gather_and_upconvert_nvfp4_kv_cache": _mla_upconvert_nvfp4,
    "indexer_k_quant_and_cache": _indexer_write,
    "cp_gather_indexer_k_quant_cache": _indexer_gather,
    "concat_mla_q": _concat_mla_q,
    "paged_attention": _paged_attention,
    "paged_attention_v1": _vllm_attention,
    "paged_attention_v2": _vllm_attention,
    "merge_attn_states": _merge,
    "merge_attn_states_n": _merge_n,
    "ggml_dequantize": _gguf,
    "awq_dequantize": _awq,
    "gptq_dequantize": _gptq,
    "fp8_dequantize": _fp8,
    "mxfp8_dequantize": lambda t: _scaled(t, 1, 32),
    "mxfp4_dequantize": lambda t: _scaled(t, 2, 32),
    "nvfp4_dequantize": lambda t: _scaled(t, 2, 16, global_scale=1.0, is_sf_swizzled_layout=False),
    "permute_cols": lambda t: Workload({"A": t.rows(WEIGHT), "perm": _shuffled(WEIGHT)}),
    "hadacore_transform": lambda t: Workload({"x": t.rows(WEIGHT)}),
    "fused_qk_norm_rope": _qk_norm_rope,
    "rotary_embedding": _rotated,
    "batched_rotary_embedding": lambda t: _rotated(t, rot_dim=HEAD, cos_sin_cache_offsets=np.zeros(t.count, np.int64)),
    "mrope": _mrope,
    "dual_chunk_rotary_embedding": _dual_chunk,
    "topk_softmax": _routed,
    "topk_sigmoid": _routed,
    "topk_softplus_sqrt": _routed,
    "grouped_topk": _grouped,
    "moe_align_block_size": _aligned,
    "moe_permute": _permuted,
    "moe_unpermute": _unpermuted,
    "moe_sum": lambda t: Workload({"input": t.rows(TOP_K, HIDDEN)}),
    "shuffle_rows": _shuffled_rows,
}
