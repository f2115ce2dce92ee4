"""What every sample (pykv/_samples.py) must give, by the references in NumPy: ``python -m pykv check`` compares.

    python tests/expected.py        writes pykv/_expected.npz; tests/test_cli.py fails where that file is out of date

An entry of the file is called "<operation>/<parameter>", one of a list "<operation>/<parameter>/<number>".
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import NormalDist
from types import SimpleNamespace
from typing import Any

import numpy as np
from activation import reference as act
from activation.quantised import E4M3, codes
from attention import reference as attention
from cache import reference as cache
from cache import reference_indexer as indexer
from cache import reference_mla as mla
from dequantization import hadamard
from dequantization import reference as packed
from moe import reference as moe
from norm import reference as norm
from rotary.reference import rotary_embedding
from rotary.test_dual_chunk_rotary_embedding import positions_of_copies
from rotary.test_mrope import mixed_cache
from sampling import reference as sampling

from pykv._samples import MEMORY, sample

FILE = Path(__file__).parent.parent / "pykv" / "_expected.npz"
Results = dict[str, Any]
EPSILON = 1e-6


def halves(a: Any) -> list[np.ndarray]:
    return np.split(a.input.astype(np.float64), 2, axis=-1)


def gated(activation: Callable[[np.ndarray], np.ndarray], output: str = "out") -> Callable[[Any], Results]:
    def expected(a: Any) -> Results:
        gate, up = halves(a)
        return {output: activation(gate) * up}

    return expected


def elementwise(activation: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Results]:
    return lambda a: {"out": activation(a.input.astype(np.float64))}


def silu_and_mul_with_clamp(a: Any) -> Results:
    gate, up = halves(a)
    gate = np.minimum(gate, a.limit)
    return {"result": gate / (1 + np.exp(-a.alpha * gate)) * (np.clip(up, -a.limit, a.limit) + a.beta)}


def masked_moe_activation(a: Any) -> Results:
    gate, up = halves(a)
    valid = np.arange(a.input.shape[1]) < a.valid_token_counts[:, None]
    return {"out": np.where(valid[..., None], act.silu(gate) * up, a.out)}


def gelu_and_mul_sparse(a: Any) -> Results:
    gate, up = halves(a)
    deviations = NormalDist().inv_cdf(a.activation_sparsity)
    cut = gate.mean(-1, keepdims=True) + gate.std(-1, keepdims=True) * deviations
    return {"out": act.gelu(np.maximum(gate - cut, 0)) * up}


def swigluoai_and_mul(a: Any) -> Results:
    x = a.input.astype(np.float64)
    gate, up = np.minimum(x[:, ::2], 7), np.clip(x[:, 1::2], -7, 7)
    return {"out": (up + 1) * gate / (1 + np.exp(-1.702 * gate))}


def swiglustep_and_mul(a: Any) -> Results:
    gate, up = halves(a)
    return {"out": np.minimum(act.silu(gate), 7) * np.clip(up, -7, 7)}


def in_groups(y: np.ndarray, size: int, largest: float = np.inf) -> tuple[np.ndarray, np.ndarray]:
    """e4m3 codes and the scales of groups of ``size``."""
    groups = y.reshape(len(y), -1, size)
    scales = np.minimum(np.abs(groups).max(-1), largest) / 448
    return codes(groups / scales[..., None], E4M3).reshape(y.shape), scales


def silu_and_mul_per_block_quant(a: Any) -> Results:
    gate, up = halves(a)
    return dict(zip(("out", "scales"), in_groups(act.silu(gate) * up, a.group_size), strict=True))


def fused_add(weight: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any], Results]:
    def expected(a: Any) -> Results:
        total = norm.add(a.input, a.residual)
        return {"input": norm.rms_norm(total, weight(a.weight), EPSILON), "residual": total}

    return expected


def fused_add_rms_norm_static_fp8_quant(a: Any) -> Results:
    total = norm.add(a.input, a.residual)
    return {"result": norm.e4m3(norm.rms_norm(total, a.weight, EPSILON) / a.scale), "residual": total}


def rms_norm_in_groups(a: Any) -> Results:
    y = norm.rms_norm(a.input, a.weight, EPSILON)
    size = getattr(a, "group_size", y.shape[1])
    largest = np.inf if a.scale_ub is None else a.scale_ub
    return dict(zip(("result", "scale"), in_groups(y, size, largest), strict=True))


def fused_qk_norm_rope(a: Any) -> Results:
    heads = a.qkv.reshape(3, 4, a.head_dim).astype(np.float64)
    heads[:, :2] = norm.rms_norm(heads[:, :2], a.q_weight, a.eps)
    heads[:, 2:3] = norm.rms_norm(heads[:, 2:3], a.k_weight, a.eps)
    heads[:, :3] = rotary_embedding(a.position_ids, heads[:, :3], a.cos_sin_cache, a.is_neox)
    return {"qkv": heads}


def rotated(x: np.ndarray, positions: np.ndarray, a: Any, table: np.ndarray | None = None) -> np.ndarray:
    heads = x.reshape(len(x), -1, a.cos_sin_cache.shape[1])  # the samples rotate whole heads
    return rotary_embedding(positions, heads, a.cos_sin_cache if table is None else table, a.is_neox).reshape(x.shape)


def rotary(a: Any, positions: np.ndarray, table: np.ndarray | None = None) -> Results:
    return {name: rotated(getattr(a, name), positions, a, table) for name in ("query", "key")}


def mrope(a: Any) -> Results:
    table = mixed_cache(a.positions, a.cos_sin_cache, a.mrope_section.tolist(), False)
    return rotary(a, np.arange(len(table)), table)


def dual_chunk_rotary_embedding(a: Any) -> Results:
    where = positions_of_copies(a.positions, a.chunk_size, a.local_size)
    copies = [rotated(a.query, at, a) for at in where]
    return {"query_out": np.concatenate(copies, axis=1), "key": rotated(a.key, where[0], a)}


def paged_attention(a: Any) -> Results:
    given = a.query, a.key_cache, a.value_cache, a.block_tables, a.seq_lens
    return dict(zip(("out", "lse"), attention.paged_attention(*given, cu_query_lens=a.cu_query_lens), strict=True))


def paged_attention_of_vllm(a: Any) -> Results:
    given = a.query, a.key_cache, a.value_cache, a.block_tables, a.seq_lens
    return {"out": attention.paged_attention(*given, scale=a.scale, epsilon=1e-6)[0]}


def merge_attn_states(a: Any) -> Results:
    merged = attention.merge_attn_states(a.prefix_output, a.prefix_lse, a.suffix_output, a.suffix_lse)
    return dict(zip(("output", "output_lse"), merged, strict=True))


def into_caches(store: Callable[..., None]) -> Callable[[Any], Results]:
    def expected(a: Any) -> Results:
        store(a.key, a.value, a.key_cache, a.value_cache, a.slot_mapping)
        return {"key_cache": a.key_cache, "value_cache": a.value_cache}

    return expected


def rotary_and_cache(a: Any) -> Results:
    a.key[...] = rotated(a.key, a.positions, a)
    return {"query": rotated(a.query, a.positions, a), "key": a.key} | into_caches(cache.reshape_and_cache_flash)(a)


def fused_qknorm_rope_cache(a: Any) -> Results:
    q, k, v = np.split(a.qkv.reshape(3, -1, a.head_dim).astype(np.float64), [4, 6], axis=1)
    table = np.concatenate([a.cos, a.sin], axis=1)
    q = rotary_embedding(a.positions, norm.rms_norm(q, a.q_weight, a.epsilon), table, True)
    k = rotary_embedding(a.positions, norm.rms_norm(k, a.k_weight, a.epsilon), table, True)
    cache.reshape_and_cache_flash(k, v, a.k_cache, a.v_cache, a.slot_mapping)
    return {"q_out": q, "k_out": k, "v_out": v, "k_cache": a.k_cache, "v_cache": a.v_cache}


def copied(*names: str) -> Callable[[Any], Results]:
    def expected(a: Any) -> Results:
        for name in names:
            cache.copy_blocks(getattr(a, name), a.block_mapping)
        return {name: getattr(a, name) for name in names}

    return expected


def swap(a: Any, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    cache.swap_blocks(
        src.reshape(-1).view(np.uint8), dst.reshape(-1).view(np.uint8), a.block_size_in_bytes, a.block_mapping
    )
    return dst


def swap_blocks_batch(a: Any) -> Results:
    memory = MEMORY.copy().view(np.uint8)
    addresses = (a.src_ptrs - MEMORY.ctypes.data, a.dst_ptrs - MEMORY.ctypes.data, a.sizes)
    for src, dst, size in np.stack(addresses, axis=1).tolist():
        memory[dst : dst + size] = memory[src : src + size]
    return {"memory": memory.view(np.float32)}


def concat_and_cache_mla(a: Any) -> Results:
    mla.concat_and_cache_mla(a.kv_c, a.k_pe, a.kv_cache, a.slot_mapping)
    return {"kv_cache": a.kv_cache}


def concat_and_cache_mla_layers(a: Any) -> Results:
    for layer, own in enumerate(a.kv_caches):
        mla.concat_and_cache_mla(a.kv_c[layer], a.k_pe[layer], own, a.slot_mapping[layer])
    return {"kv_caches": a.kv_caches}


def concat_and_cache_mla_grouped(a: Any) -> Results:
    memory = MEMORY.copy()
    for layer, own in enumerate(memory.reshape(2, 2, 2, 4)):
        mla.concat_and_cache_mla(a.kv_c[layer], a.k_pe[layer], own, a.slot_mapping[layer])
    return {"memory": memory}


def concat_and_cache_mla_rope_fused(a: Any) -> Results:
    cached = a.slot_mapping >= 0  # the other rows stay as they are
    for x in (a.q_pe, a.k_pe):
        x[cached] = rotated(x, a.positions, a)[cached]
    return {"q_pe": a.q_pe, "k_pe": a.k_pe} | concat_and_cache_mla(a)


def gather(a: Any) -> Results:
    mla.gather(a.src_cache, a.dst, a.block_table, a.cu_seq_lens[:-1], np.diff(a.cu_seq_lens))
    return {"dst": a.dst}


def cp_gather_and_upconvert_fp8_kv_cache(a: Any) -> Results:
    def decode(record: np.ndarray) -> np.ndarray:
        return mla.unpack_record(record, 512, a.dst.dtype)

    lengths = np.diff(a.workspace_starts, append=len(a.dst))
    mla.gather(a.src_cache, a.dst, a.block_table, a.workspace_starts, lengths, decode=decode)
    return {"dst": a.dst}


def cp_gather_and_upconvert_nvfp4_kv_cache(a: Any) -> Results:
    def decode(record: np.ndarray) -> np.ndarray:
        return mla.unpack_nvfp4_record(record, 64, a.dst.dtype)

    lengths = np.diff(a.workspace_starts, append=len(a.dst))
    mla.gather(a.src_cache, a.dst, a.block_table, a.workspace_starts, lengths, decode=decode)
    return {"dst": a.dst}


def indexer_k_quant_and_cache(a: Any) -> Results:
    indexer.indexer_k_quant_and_cache(a.k, a.kv_cache, a.slot_mapping, a.quant_block_size, a.kv_cache_dtype)
    return {"kv_cache": a.kv_cache}


def cp_gather_indexer_k_quant_cache(a: Any) -> Results:
    indexer.cp_gather_indexer_k_quant_cache(a.kv_cache, a.dst_k, a.dst_scale, a.block_table, a.cu_seq_lens)
    return {"dst_k": a.dst_k, "dst_scale": a.dst_scale}


def topk(scoring: str) -> Callable[[Any], Results]:
    def expected(a: Any) -> Results:
        tokens, k = a.topk_ids.shape
        ids, s = moe.topk(a.gating_output, k, scoring, getattr(a, "e_score_correction_bias", None))
        weights = moe.weights_of(s, getattr(a, "renormalize", False), getattr(a, "routed_scaling_factor", 1.0))
        padding = getattr(a, "is_padding", np.zeros(tokens, bool))[:, None]
        rows = np.arange(k) * tokens + np.arange(tokens)[:, None]
        outputs = np.where(padding, 0, weights), np.where(padding, -1, ids), rows
        return dict(zip(("topk_weights", "topk_ids", "token_expert_indices"), outputs, strict=True))

    return expected


def topk_softplus_sqrt(a: Any) -> Results:
    ids = a.hash_indices_table[a.input_ids]
    s = np.take_along_axis(moe.scores_of(a.gating_output, "softplus_sqrt"), ids, -1)
    return {"topk_weights": moe.weights_of(s, a.renormalize), "topk_ids": ids}


def grouped_topk(a: Any) -> Results:
    ids, s = moe.grouped_topk(a.scores, a.topk, "sigmoid", a.bias, a.n_group, a.topk_group, "top2_sum")
    return {"topk_weights": moe.weights_of(s, a.renormalize, a.routed_scaling_factor), "topk_ids": ids}


def in_blocks(a: Any, *lists: list[np.ndarray]) -> Results:
    """The rows of each bin, for each list."""
    places, blocks = len(a.sorted_token_ids) // len(lists), len(a.experts_ids) // len(lists)
    sentinel = a.topk_ids.size if hasattr(a, "topk_ids") else a.expert_num_tokens.size * a.max_tokens_per_batch
    made = [moe.align(rows, a.block_size, places, blocks, sentinel) for rows in lists]
    names = ("sorted_token_ids", "experts_ids", "num_tokens_post_pad")
    return {
        name: np.concatenate([np.reshape(m, -1) for m in made_of])
        for name, made_of in zip(names, zip(*made, strict=True), strict=True)
    }


def moe_align_block_size(a: Any) -> Results:
    bins = moe.bins_of(a.topk_ids, a.num_experts, a.expert_map)
    rows = moe.rows_of(bins, a.num_experts)
    order = np.concatenate(rows)
    results = in_blocks(a, rows)
    where = {pair: place for place, pair in enumerate(results["sorted_token_ids"].tolist())}
    return results | {"scatter_idx": np.array([where[p] if p in order else -1 for p in range(bins.size)])}


def batched_moe_align_block_size(a: Any) -> Results:
    return in_blocks(a, [b * a.max_tokens_per_batch + np.arange(n) for b, n in enumerate(a.expert_num_tokens)])


def moe_lora_align_block_size(a: Any) -> Results:
    bins = moe.bins_of(a.topk_ids, a.num_experts)
    of_pair = np.repeat(a.token_lora_mapping, a.topk_ids.shape[1])
    return in_blocks(a, *(moe.rows_of(bins, a.num_experts, of_pair == lora) for lora in range(a.max_loras)))


def get_cutlass_moe_mm_data(a: Any) -> Results:
    results = moe.cutlass(a.topk_ids, a.num_experts, a.n, a.k, True, False)
    rows = results["input_permutation"]
    return results | {"input_permutation": np.append(rows, a.input_permutation[len(rows) :])}


def problem_sizes(a: Any) -> Results:
    batched = hasattr(a, "padded_m")
    counts = a.expert_num_tokens if batched else np.diff(a.expert_first_token_offset)
    made = moe.problems(counts, 2 * a.n, a.n, a.k, not batched)
    results = dict(zip(("problem_sizes1", "problem_sizes2"), made, strict=True))
    return results | ({"expert_offsets": np.arange(3) * a.padded_m} if batched else {})


def moe_permute(a: Any) -> Results:
    order = np.argsort(a.topk_ids.reshape(-1), kind="stable")
    first = np.searchsorted(np.sort(a.topk_ids.reshape(-1)), np.arange(a.n_expert + 1))
    return {
        "permuted_input": a.input[order // a.topk],
        "expert_first_token_offset": first,
        "inv_permuted_idx": np.argsort(order),
        "permuted_idx": order,
    }


def moe_unpermute(a: Any) -> Results:
    there = a.inv_permuted_idx < a.expert_first_token_offset[-1]
    terms = a.permuted_hidden_states[a.inv_permuted_idx] * a.topk_weights[..., None].astype(np.float64)
    return {"hidden_states": np.where(there[..., None], terms, 0).sum(1)}


def moe_sum(a: Any) -> Results:
    there = (a.topk_ids >= 0) & (a.expert_map[a.topk_ids] >= 0)
    return {"output": np.where(there[..., None], a.input.astype(np.float64), 0).sum(1)}


def times_scales(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    return values * packed.spread(scales, values.shape, 1, values.shape[1] // scales.shape[1])


def top_k_per_row(a: Any) -> Results:
    indices = sampling.top_k_per_row(a.logits, a.k, a.row_starts, a.row_ends)
    columns = np.maximum(indices, 0) + a.row_starts[:, None]
    return {"indices": indices, "values": np.where(indices < 0, -np.inf, np.take_along_axis(a.logits, columns, 1))}


def sample_tokens(a: Any) -> Results:
    names = (
        "repetition_penalty frequency_penalty presence_penalty prompt_bitmap output_counts logit_bias allowed_bitmap"
    )
    x = sampling.adjusted(a.logits, **{name: getattr(a, name) for name in names.split()})
    rows = [
        sampling.sample(x[i], int(a.seeds[i]), int(a.steps[i]), a.temperature[i], a.top_k[i], a.top_p)
        for i in range(len(x))
    ]
    return {"out": np.array([token for token, *_ in rows]), "logprobs": np.array([p for _, p, _ in rows])}


EXPECTED: dict[str, Callable[[Any], Results]] = {
    "silu_and_mul": gated(act.silu, "result"),
    "silu_and_mul_quant": lambda a: {
        "result": codes(np.multiply(act.silu(halves(a)[0]), halves(a)[1]) / a.scale, E4M3)
    },
    "silu_and_mul_per_block_quant": silu_and_mul_per_block_quant,
    "silu_and_mul_with_clamp": silu_and_mul_with_clamp,
    "mul_and_silu": lambda a: {"out": halves(a)[0] * act.silu(halves(a)[1])},
    "gelu_and_mul": gated(act.gelu),
    "gelu_tanh_and_mul": gated(act.gelu_tanh),
    "gelu_and_mul_sparse": gelu_and_mul_sparse,
    "fatrelu_and_mul": lambda a: gated(lambda x: np.where(x > a.threshold, x, 0))(a),
    "swigluoai_and_mul": swigluoai_and_mul,
    "swiglustep_and_mul": swiglustep_and_mul,
    "situ_and_mul": lambda a: {"out": act.situ(*halves(a), a.beta, a.linear_beta)},
    "masked_moe_activation": masked_moe_activation,
    "gelu_new": elementwise(act.gelu_tanh),
    "gelu_fast": elementwise(act.gelu_tanh),
    "gelu_quick": elementwise(act.gelu_quick),
    "relu2": elementwise(act.relu2),
    "relu_squared": elementwise(act.relu2),
    "xielu": lambda a: {"out": act.xielu(a.input.astype(np.float64), a.alpha_p, a.alpha_n)},
    "ggml_dequantize": lambda a: {"out": packed.DECODE["Q4_0"](a.W.reshape(-1, 18))},
    "awq_dequantize": lambda a: {"out": packed.awq(a.qweight, a.scales, a.zeros)},
    "gptq_dequantize": lambda a: {"out": packed.gptq(a.qweight, a.qzeros, a.scales, a.g_idx, a.bits)},
    "fp8_dequantize": lambda a: {
        "out": a.input.view(E4M3).astype(np.float32)
        * packed.spread(a.scale, a.input.shape, a.group_rows, a.group_columns)
    },
    "mxfp8_dequantize": lambda a: {
        "out": times_scales(a.input.view(E4M3).astype(np.float32), packed.e8m0_values(a.scale))
    },
    "mxfp4_dequantize": lambda a: {"out": times_scales(packed.e2m1_values(a.input), packed.e8m0_values(a.scale))},
    "nvfp4_dequantize": lambda a: {
        "out": times_scales(packed.e2m1_values(a.input), a.scale.view(E4M3).astype(np.float32) / a.global_scale)
    },
    "permute_cols": lambda a: {"out": a.A[:, a.perm]},
    "hadacore_transform": lambda a: {"out": hadamard.transform(a.x)},
    "rms_norm": lambda a: {"out": norm.rms_norm(a.input, a.weight, EPSILON)},
    "fused_add_rms_norm": fused_add(lambda weight: weight),
    "gemma_rms_norm": lambda a: {"out": norm.rms_norm(a.input, a.weight + 1, EPSILON)},
    "gemma_fused_add_rms_norm": fused_add(lambda weight: weight + 1),
    "layer_norm": lambda a: {"out": norm.layer_norm(a.input, a.weight, a.bias, 1e-5)},
    "rms_norm_gated": lambda a: {
        "out": norm.rms_norm_gated(a.input, a.weight, a.z, 1e-5, a.group_size, False, "swish")
    },
    "rms_norm_static_fp8_quant": lambda a: {"result": norm.e4m3(norm.rms_norm(a.input, a.weight, EPSILON) / a.scale)},
    "fused_add_rms_norm_static_fp8_quant": fused_add_rms_norm_static_fp8_quant,
    "rms_norm_dynamic_per_token_quant": rms_norm_in_groups,
    "rms_norm_per_block_quant": rms_norm_in_groups,
    "fused_qk_norm_rope": fused_qk_norm_rope,
    "rotary_embedding": lambda a: rotary(a, a.positions),
    "batched_rotary_embedding": lambda a: rotary(a, a.positions + a.cos_sin_cache_offsets),
    "mrope": mrope,
    "dual_chunk_rotary_embedding": dual_chunk_rotary_embedding,
    "apply_repetition_penalties_": lambda a: {
        "logits": sampling.apply_repetition_penalties(a.logits, a.prompt_mask, a.output_mask, a.repetition_penalties)
    },
    "sample": sample_tokens,
    "rejection_sample": lambda a: dict(
        zip(
            ("out", "num_accepted"),
            sampling.rejection_sample(a.draft_token_ids, a.target_probs, a.draft_probs, a.draft_lens, a.seeds, a.steps)[
                :2
            ],
            strict=True,
        )
    ),
    "softmax": lambda a: {"out": sampling.softmax(a.logits, a.temperature)},
    "top_k_top_p_mask": lambda a: {
        "out": np.where(
            sampling.mask(a.logits, top_k=a.top_k, top_p=a.top_p, min_p=a.min_p, temperature=a.temperature)[0],
            a.logits,
            -np.inf,
        )
    },
    "top_k_top_p_renorm": lambda a: {"out": sampling.renorm(a.probs, top_k=a.top_k, top_p=a.top_p)[0]},
    "token_logprobs": lambda a: {
        "logprobs": np.take_along_axis(np.log(sampling.softmax(a.logits)), a.token_ids, 1),
        "ranks": (a.logits[:, None] > np.take_along_axis(a.logits, a.token_ids, 1)[..., None]).sum(-1),
    },
    "top_k_per_row": top_k_per_row,
    "paged_attention": paged_attention,
    "paged_attention_v1": paged_attention_of_vllm,
    "paged_attention_v2": paged_attention_of_vllm,
    "merge_attn_states": merge_attn_states,
    "merge_attn_states_n": lambda a: {"output": attention.merge_attn_states_n(a.partial_outputs, a.partial_lses)[0]},
    "reshape_and_cache": into_caches(cache.reshape_and_cache),
    "reshape_and_cache_flash": into_caches(cache.reshape_and_cache_flash),
    "rotary_and_cache": rotary_and_cache,
    "fused_qknorm_rope_cache": fused_qknorm_rope_cache,
    "copy_blocks": copied("key_caches", "value_caches"),
    "copy_blocks_mla": copied("kv_caches"),
    "swap_blocks": lambda a: {"dst": swap(a, a.src, a.dst)},
    "swap_blocks_layers": lambda a: {
        "src_caches": a.src_caches,  # a list is one of arrays that may be written
        "dst_caches": [swap(a, *layer) for layer in zip(a.src_caches, a.dst_caches, strict=True)],
    },
    "swap_blocks_batch": swap_blocks_batch,
    "concat_and_cache_mla": concat_and_cache_mla,
    "concat_and_cache_mla_layers": concat_and_cache_mla_layers,
    "concat_and_cache_mla_grouped": concat_and_cache_mla_grouped,
    "concat_and_cache_mla_rope_fused": concat_and_cache_mla_rope_fused,
    "cp_gather_cache": gather,
    "gather_and_maybe_dequant_cache": gather,
    "cp_gather_and_upconvert_fp8_kv_cache": cp_gather_and_upconvert_fp8_kv_cache,
    "cp_gather_and_upconvert_nvfp4_kv_cache": cp_gather_and_upconvert_nvfp4_kv_cache,
    "indexer_k_quant_and_cache": indexer_k_quant_and_cache,
    "cp_gather_indexer_k_quant_cache": cp_gather_indexer_k_quant_cache,
    "topk_softmax": topk("softmax"),
    "topk_sigmoid": topk("sigmoid"),
    "topk_softplus_sqrt": topk_softplus_sqrt,
    "grouped_topk": grouped_topk,
    "moe_align_block_size": moe_align_block_size,
    "batched_moe_align_block_size": batched_moe_align_block_size,
    "moe_lora_align_block_size": moe_lora_align_block_size,
    "get_cutlass_moe_mm_data": get_cutlass_moe_mm_data,
    "get_cutlass_moe_mm_problem_sizes_from_expert_offsets": problem_sizes,
    "get_cutlass_batched_moe_mm_data": problem_sizes,
    "moe_permute": moe_permute,
    "moe_unpermute": moe_unpermute,
    "moe_sum": moe_sum,
    "shuffle_rows": lambda a: {
        "output_tensor": np.where(a.dst2src_map[:, None] >= 0, a.input_tensor[a.dst2src_map], 0)
    },
    "convert_fp8": lambda a: {"output": cache.quantise(a.input, a.scale, "fp8")},
    "concat_mla_q": lambda a: {"q_out": np.concatenate([a.ql_nope, a.q_pe], axis=-1)},
}


def expected(name: str) -> Results:
    """By parameter, of the shape and the dtype that the sample's array has."""
    before = sample(name) | {"memory": MEMORY}

    def fit(value: Any, array: Any) -> Any:
        if isinstance(value, list):
            return [fit(*pair) for pair in zip(value, array, strict=True)]
        value = value.view(np.uint8) if value.dtype == E4M3 else value
        return value.reshape(array.shape).astype(array.dtype)

    return {k: fit(v, before[k]) for k, v in EXPECTED[name](SimpleNamespace(**sample(name))).items()}


def entries(name: str) -> dict[str, np.ndarray]:
    """As they are called in the file."""
    found = {}
    for k, v in expected(name).items():
        found |= {f"{name}/{k}/{i}": x for i, x in enumerate(v)} if isinstance(v, list) else {f"{name}/{k}": v}
    return found


if __name__ == "__main__":
    everything: dict[str, Any] = {}
    for name in sorted(EXPECTED):
        everything |= entries(name)
    np.savez_compressed(FILE, **everything)
    print(f"{FILE}: {len(everything)} arrays, {FILE.stat().st_size} bytes")
