"""Routing and maps of experts in NumPy, float64, written from what the operations promise."""

from __future__ import annotations

import numpy as np
from activation import reference as act

Array = np.ndarray


def scores_of(logits: Array, scoring: str) -> Array:
    x = logits.astype(np.float64)
    with np.errstate(all="ignore"):
        if scoring == "softmax":
            e = np.exp(x - x.max(-1, keepdims=True))
            s = e / e.sum(-1, keepdims=True)
        elif scoring == "sigmoid":
            s = 1 / (1 + np.exp(-x))
        elif scoring == "softplus_sqrt":
            s = np.sqrt(np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20)))))
        else:
            s = x
    return np.where(np.isfinite(s), s, 0)


def best(keys: Array, k: int) -> Array:
    """Of equal keys the lower id."""
    return np.argsort(-keys, axis=-1, kind="stable")[:, :k]


def keys_of(logits: Array, scoring: str, bias: Array | None = None, finite_only: bool = False) -> Array:
    keys = scores_of(logits, scoring) + (0 if bias is None else bias.astype(np.float64))
    keys = np.where(np.isnan(keys), -np.inf, keys)
    return np.where(np.isfinite(logits.astype(np.float64)), keys, -np.inf) if finite_only else keys


def kept(keys: Array, n_group: int, topk_group: int, group_score: str) -> Array:
    """The keys, -inf in groups that are not among the best."""
    groups = keys.reshape(len(keys), n_group, -1)
    ordered = np.sort(groups, axis=-1)
    score = ordered[..., -2:].sum(-1) if group_score == "top2_sum" else ordered[..., -1]
    chosen = np.zeros(score.shape, bool)
    np.put_along_axis(chosen, best(score, topk_group), True, axis=-1)
    return np.where(chosen[..., None], groups, -np.inf).reshape(keys.shape)


def weights_of(s: Array, renormalize: bool, factor: float = 1.0, epsilon: float = 0.0) -> Array:
    total = s.sum(-1, keepdims=True) + epsilon
    return s / np.where((total != 0) & renormalize, total, 1) * factor


def topk(logits: Array, k: int, scoring: str, bias: Array | None = None) -> tuple[Array, Array]:
    """ids, and the scores of these."""
    ids = best(keys_of(logits, scoring, bias), k)
    return ids, np.take_along_axis(scores_of(logits, scoring), ids, -1)


def grouped_topk(
    logits: Array, k: int, scoring: str, bias: Array | None, n_group: int, topk_group: int, group_score: str
) -> tuple[Array, Array]:
    keys = kept(keys_of(logits, scoring, bias, scoring != "softmax"), n_group, topk_group, group_score)
    ids = best(keys, k)
    lost = np.isneginf(np.take_along_axis(keys, ids, -1))
    return ids, np.where(lost, 0, np.take_along_axis(scores_of(logits, scoring), ids, -1))


def bins_of(topk_ids: Array, num_experts: int, expert_map: Array | None = None) -> Array:
    """The bin of each pair, -1: dropped."""
    flat = topk_ids.reshape(-1).astype(np.int64)
    bins = np.where((flat >= 0) & (flat < num_experts), flat, -1)
    if expert_map is not None:
        bins = np.where(bins >= 0, expert_map[bins], -1)
    return np.where((bins >= 0) & (bins < num_experts), bins, -1)


def align(
    rows_of_bins: list[Array], block_size: int, capacity: int, num_blocks: int, sentinel: int
) -> tuple[Array, Array, int]:
    """Places, blocks and how many places are taken, for the rows of each bin."""
    places, blocks = np.full(capacity, sentinel, np.int32), np.full(num_blocks, -1, np.int32)
    taken = 0
    for b, rows in enumerate(rows_of_bins):
        places[taken : taken + len(rows)] = rows
        count = -(-len(rows) // block_size)
        blocks[taken // block_size :][:count] = b
        taken += count * block_size
    return places, blocks, taken


def rows_of(bins: Array, num_bins: int, wanted: Array | None = None) -> list[Array]:
    """The pairs of each bin, ascending; of those that are wanted."""
    order = np.argsort(bins, kind="stable")
    order = order[(bins[order] >= 0) & (True if wanted is None else wanted[order])]
    return np.split(order, np.searchsorted(bins[order], np.arange(1, num_bins)))


def cutlass(topk_ids: Array, num_experts: int, n: int, k: int, is_gated: bool, swap: bool) -> dict[str, Array]:
    tokens, topk = topk_ids.shape
    rows = rows_of(bins_of(topk_ids, num_experts), num_experts)
    counts = np.array([len(r) for r in rows])
    order = np.concatenate(rows)
    where = np.full(tokens * topk, tokens)
    where[order] = np.arange(len(order))
    first, second = problems(counts, (2 if is_gated else 1) * n, n, k, swap)
    return {
        "expert_offsets": np.append(0, np.cumsum(counts)),
        "problem_sizes1": first,
        "problem_sizes2": second,
        "input_permutation": order // topk,
        "output_permutation": where,
        "blockscale_offsets": np.append(0, np.cumsum(-(-counts // 128) * 128)),
    }


def problems(counts: Array, columns: int, n: int, k: int, swap: bool) -> tuple[Array, Array]:
    first = np.stack([counts, np.full_like(counts, columns), np.full_like(counts, k)], axis=1)
    second = np.stack([counts, np.full_like(counts, k), np.full_like(counts, n)], axis=1)
    order = [1, 0, 2] if swap else [0, 1, 2]
    return first[:, order], second[:, order]


def activated(h: Array, name: str, clamp_limit: float = 0.0, alpha: float = 1.0, beta: float = 0.0) -> Array:
    """An activation of float64 (``"situ"`` with its numbers as they are by default)."""
    alone = {"silu": act.silu, "gelu": act.gelu, "gelu_tanh": act.gelu_tanh, "relu2": act.relu2}
    if name.endswith("_no_mul"):
        return alone[name.removesuffix("_no_mul")](h)
    half = h.shape[-1] // 2
    gate, up = (h[..., ::2], h[..., 1::2]) if name == "swigluoai" else (h[..., :half], h[..., half:])
    limit = clamp_limit
    if name == "swiglustep":
        return np.minimum(act.silu(gate), limit) * np.clip(up, -limit, limit)
    if name == "situ":
        return act.situ(gate, up)
    if name in alone:
        return alone[name](gate) * up
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return gate / (1 + np.exp(-alpha * gate)) * (up + (1 if name == "swigluoai" else beta))


def experts(
    x: Array,
    w1: Array,
    w2: Array,
    weights: Array,
    ids: Array,
    activation: str = "silu",
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
    expert_map: Array | None = None,
    on_input: bool = False,
    **numbers: float,
) -> tuple[Array, Array]:
    """A layer in float64, with rows of pairs rounded to the dtype of ``x``, and the size of what is summed."""

    def rounded(v: Array) -> Array:
        return v.astype(x.dtype).astype(np.float64)

    out = np.zeros((len(x), w2.shape[1]))
    size = np.zeros_like(out)
    for t, j in np.ndindex(*ids.shape):
        known = 0 <= ids[t, j] < (len(w1) if expert_map is None else len(expert_map))
        e = -1 if not known else ids[t, j] if expert_map is None else expert_map[ids[t, j]]
        if e < 0:
            continue
        h = w1[e].astype(np.float64) @ x[t].astype(np.float64) + (0 if w1_bias is None else w1_bias[e])
        a = activated(rounded(h * (weights[t, j] if on_input else 1)), activation, **numbers)
        y = w2[e].astype(np.float64) @ rounded(a) + (0 if w2_bias is None else w2_bias[e])
        last = 1 if on_input else weights[t, j]
        out[t] += rounded(y) * last
        size[t] += (np.abs(w2[e].astype(np.float64)) @ np.abs(a) + np.abs(y)) * abs(last)
    return out, size
