"""What the samples of moe must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from moe import reference as moe

Results = dict[str, Any]


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
    chosen, _ = moe.topk(a.gating_output, 2, "softplus_sqrt", a.bias_vl)
    is_of_image = a.input_ids >= a.image_sentinel_lo
    ids = np.where(is_of_image[:, None], chosen, a.hash_indices_table[a.input_ids])
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


def fused_moe(a: Any) -> Results:
    if hasattr(a, "w1_scale"):
        return {"out": fused_moe_of_bytes(a)}
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    random = [np.random.default_rng(seed) for seed in (5, 6)]
    w1 = []
    for _ in range(len(a.w1)):
        pairs, scales = (
            r.integers(*bounds, shape, np.uint8)
            for r, bounds, shape in zip(random, ((0, 256), (121, 126)), ((48, 32), (48, 2)), strict=True)
        )
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(48, 64)
        w1.append(e2m1[codes] * np.repeat(np.ldexp(1.0, scales.astype(int) - 127), 32, axis=1))
    given = (a.x, np.stack(w1), a.w2, a.topk_weights, a.topk_ids, a.activation, a.w1_bias, a.w2_bias, a.expert_map)
    return {"out": moe.experts(*given, clamp_limit=a.clamp_limit, alpha=a.alpha)[0]}


def fused_moe_of_bytes(a: Any) -> np.ndarray:
    """All scales are powers of two."""

    def coded(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return np.clip(np.rint(x.astype(np.float64) / scale), -127, 127) * scale

    def rounded(x: np.ndarray) -> np.ndarray:
        return x.astype(a.x.dtype).astype(np.float64)

    out = np.zeros(a.out.shape)
    for t, j in np.ndindex(*a.topk_ids.shape):
        e = a.expert_map[a.topk_ids[t, j]] if a.topk_ids[t, j] >= 0 else -1
        if e < 0:
            continue
        h = rounded(a.w1[e].astype(np.float64) @ coded(a.x[t], a.a1_scale) * a.w1_scale[e])
        row = coded(rounded(np.maximum(h, 0) ** 2), a.a2_scale)
        out[t] += rounded(a.w2[e].astype(np.float64) @ row * a.w2_scale[e]) * a.topk_weights[t, j]
    return out


def fused_moe_gemm(a: Any) -> Results:
    out = a.out.astype(np.float64)
    for pair, e in ((0, 0), (3, 0), (5, 0), (2, 2)):
        row = a.w[e].astype(np.float64) @ a.x[pair // 2].astype(np.float64) + a.bias[e]
        out[pair] = row * a.topk_weights.reshape(-1)[pair]
    return {"out": out}


EXPECTED: dict[str, Callable[[Any], Results]] = {
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
    "fused_moe": fused_moe,
    "fused_moe_gemm": fused_moe_gemm,
}
