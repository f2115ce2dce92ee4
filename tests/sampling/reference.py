"""What the operations on logits must give, in NumPy and float64."""

from __future__ import annotations

import numpy as np


def keys(x: np.ndarray) -> np.ndarray:
    """Numbers that are ordered as logits are: -0 equals 0, NaN comes before everything."""
    x = x.astype(np.float64)
    return np.where(np.isnan(x), np.inf, np.clip(x, -1e300, 1e300))


def in_order(x: np.ndarray) -> np.ndarray:
    """The indices of a row, the first one first; equal logits by their index."""
    return np.argsort(-keys(x), kind="stable")


def top_k_per_row(x: np.ndarray, k: int, starts=None, ends=None, row_k=None, *, ordered=False) -> np.ndarray:
    rows, cols = x.shape
    out = np.full((rows, k), -1, np.int32)
    for row in range(rows):
        start = 0 if starts is None else int(np.clip(starts[row], 0, cols))
        end = cols if ends is None else int(np.clip(ends[row], start, cols))
        found = in_order(x[row, start:end])[: k if row_k is None else int(np.clip(row_k[row], 0, k))]
        out[row, : len(found)] = found if ordered else np.sort(found)
    return out


def decode_ends(seq_lens: np.ndarray, next_n: int) -> np.ndarray:
    rows = np.arange(seq_lens.size * next_n)
    return np.maximum(seq_lens[rows // next_n] - next_n + rows % next_n + 1, 0)


def apply_repetition_penalties(x, prompt_mask, output_mask, penalties):
    p = penalties.astype(np.float64)[:, None]
    value = x.astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        changed = np.where(value > 0, value / p, value * p)
    return np.where((prompt_mask != 0) | (output_mask != 0), changed, value)


def apply_penalties(
    logits, prompt_token_ids=None, output_token_ids=None, presence_penalties=0.0, frequency_penalties=0.0,
    repetition_penalties=1.0, *, prompt_lens=None, output_lens=None,
):  # fmt: skip
    rows, size = logits.shape

    def counts(ids, lens):
        found = np.zeros((rows, size), int)
        for row in range(rows if ids is not None else 0):
            for token in ids[row, : None if lens is None else max(0, int(lens[row]))].tolist():
                if 0 <= token < size:
                    found[row, token] += 1
        return found

    def each(value):
        return np.broadcast_to(np.asarray(value, np.float32), rows).astype(np.float64)[:, None]

    prompt, output = counts(prompt_token_ids, prompt_lens), counts(output_token_ids, output_lens)
    x, p = logits.astype(np.float64), each(repetition_penalties)
    x = np.where((prompt > 0) | (output > 0), np.where(x > 0, x / p, x * p), x)
    return np.where(output > 0, x - each(frequency_penalties) * output - each(presence_penalties), x)


def merge_top_k(shard_indices, shard_values, k, first_tokens=None):
    """Token ids and values of the first ``k``; -1 and -infinity behind them."""
    shards, rows, n = shard_indices.shape
    first = np.zeros(shards, int) if first_tokens is None else first_tokens
    tokens, values = np.full((rows, k), -1), np.full((rows, k), -np.inf)
    for row in range(rows):
        there = [(s, i) for s in range(shards) for i in range(n) if shard_indices[s, row, i] >= 0]
        value = np.array([shard_values[s, row, i] for s, i in there], np.float64)
        token = np.array([shard_indices[s, row, i] + first[s] for s, i in there], int)
        order = np.lexsort((token, -keys(value)))[:k]
        tokens[row, : len(order)], values[row, : len(order)] = token[order], value[order]
    return tokens, values


def finish_logits(logits, num_org=None, num_org_pad=0, num_added=0, *, soft_cap=None, scale=1.0):
    value, column = logits.astype(np.float64), np.arange(logits.shape[1])
    if soft_cap is not None:
        value = soft_cap * np.tanh(value / soft_cap)
    num_org = logits.shape[1] if num_org is None else num_org
    added = (column >= num_org + num_org_pad) & (column < num_org + num_org_pad + num_added)
    return np.where((column < num_org) | added, scale * value, -np.inf)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """Philox4x32-10 of counters ``[..., 4]``."""
    mask = np.uint64(0xFFFFFFFF)
    c = [counter[..., i].astype(np.uint64) for i in range(4)]
    k = [np.uint64(key[0]), np.uint64(key[1])]
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(b >> np.uint64(32)) ^ c[1] ^ k[0], b & mask, (a >> np.uint64(32)) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + np.uint64(0x9E3779B9)) & mask, (k[1] + np.uint64(0xBB67AE85)) & mask]
    return np.stack(c, -1)


def noise(seed: int, step: int, first: int, size: int) -> np.ndarray:
    """Of tokens ``first`` to ``first + size``, in float64: each 16 tokens share the least of their numbers."""
    tokens = np.arange(first, first + size)
    halves = [(v >> shift) & 0xFFFFFFFF for v in (seed, step) for shift in (0, 32)]

    def words(counters: np.ndarray, which: int) -> np.ndarray:
        counter = np.zeros((size, 4), np.uint64)
        counter[:, 0], counter[:, 1], counter[:, 2], counter[:, 3] = counters, which, halves[2], halves[3]
        return philox(counter, (halves[0], halves[1]))

    def exponential(word: np.ndarray) -> np.ndarray:
        return -np.log1p(-np.minimum((word.astype(np.float64) + 0.5) / 2**32, 1 - 2**-24))

    least, own = words(tokens // 16, 2), words(tokens // 4, 0)[np.arange(size), tokens % 4]
    has_least = least[:, 1] >> np.uint64(28) == tokens % 16
    return -np.log(exponential(least[:, 0]) / 16 + np.where(has_least, 0, exponential(own)))


def bits(words: np.ndarray, size: int) -> np.ndarray:
    """[rows, words] of int32 as bool [rows, size]."""
    return np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=1, bitorder="little")[:, :size].astype(bool)


def adjusted(
    logits, *, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0, prompt_bitmap=None,
    output_counts=None, logit_bias=None, allowed_bitmap=None,
):  # fmt: skip
    """In float32, each operation rounded, as what follows looks for ties."""
    x = logits.astype(np.float32)

    def each(value):
        return np.broadcast_to(np.asarray(value, np.float32), len(x))[:, None]

    counts = np.zeros(x.shape, np.int32) if output_counts is None else output_counts
    seen = counts > 0
    if prompt_bitmap is not None:
        seen = seen | bits(prompt_bitmap, x.shape[1])
    if logit_bias is not None:
        x = x + logit_bias
    p = each(repetition_penalty)
    x = np.where(seen, np.where(x > 0, x / p, x * p), x)
    fused = (x.astype(np.float64) - each(frequency_penalty).astype(np.float64) * counts).astype(np.float32)
    x = np.where(counts > 0, fused - each(presence_penalty), x)
    return x if allowed_bitmap is None else np.where(bits(allowed_bitmap, x.shape[1]), x, -np.inf).astype(np.float32)


def kept(x: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> tuple[np.ndarray, float]:
    """The tokens of one row that may be drawn, in order, and how near to a border the nearest share was."""
    order = in_order(x)
    order = order[np.isfinite(x[order]) | (x[order] > 0)]
    value = x[order].astype(np.float64)
    with np.errstate(invalid="ignore"):
        p = np.where(value == value[0], 1, np.exp((value - value[0]) / np.float64(np.float32(temperature))))
    near = np.inf
    if min_p > 0:
        near = min(near, np.abs(p[1:] / np.float32(min_p) - 1).min(initial=np.inf) / 5)
        p = p[p >= np.float32(min_p)] if min_p < 1 else p[p == 1]
    if 0 < top_k < len(p):
        p = p[:top_k]
    if top_p < 1:
        share = np.cumsum(p) / p.sum()
        near = min(near, np.abs(share - np.float32(top_p)).min())
        p = p[: max(1, int((share < np.float32(top_p)).sum()) + 1)]
    return order[: len(p)], near


def softmax(x: np.ndarray, temperature=1.0) -> np.ndarray:
    value = x.astype(np.float64) / np.broadcast_to(np.asarray(temperature, np.float32), len(x))[:, None]
    with np.errstate(invalid="ignore"):
        e = np.where(value == value.max(1, keepdims=True), 1, np.exp(value - value.max(1, keepdims=True)))
    return e / e.sum(1, keepdims=True)


def mask(x: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
    """What is kept, and how near to a border each row's nearest share was."""
    result, near = np.zeros(x.shape, bool), np.zeros(len(x))
    for row in range(len(x)):
        tokens, near[row] = kept(x[row], **{k: v if np.ndim(v) == 0 else v[row] for k, v in options.items()})
        result[row, tokens] = True
    return result, near


def renorm(p: np.ndarray, **options) -> tuple[np.ndarray, np.ndarray]:
    with np.errstate(divide="ignore"):
        found, near = mask(np.log(p.astype(np.float64)), **options)
    q = np.where(found, p.astype(np.float64), 0)
    return q / q.sum(1, keepdims=True), near


def sample(x: np.ndarray, seed: int, step: int, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, first=0):
    """Of one adjusted row: the token, its log-probability, and how clear both the choice and the set were."""
    if not temperature >= 1e-5:
        return int(in_order(x)[0]) + first, 0.0, np.inf
    tokens, near = kept(x, temperature, top_k, top_p, min_p)
    value = x[tokens].astype(np.float64) / np.float64(np.float32(temperature))
    score = value + noise(seed, step, first, len(x))[tokens]
    best = int(np.argmax(score))
    rest = np.delete(score, best)
    lead = score[best] - rest.max(initial=-np.inf)
    logprob = value[best] - value[0] - np.log(np.exp(value - value[0]).sum())
    return int(tokens[best]) + first, logprob, min(lead / max(1, abs(score[best])), near * 20)


def rejection_sample(ids, target, draft, lens, seeds, steps):
    """Tokens, how many were accepted, and how clear the choices were."""
    requests, n = ids.shape
    out, accepted, clear = np.full((requests, n + 1), -1), np.zeros(requests, int), np.full(requests, np.inf)
    for r in range(requests):
        i = 0
        for i in range(n + 1):
            rejected = i < lens[r]
            if not rejected:
                break
            u = _acceptance(int(seeds[r]), int(steps[r]), i)
            p, q = float(target[r, i, ids[r, i]]), 1.0 if draft is None else float(draft[r, i, ids[r, i]])
            clear[r] = min(clear[r], abs(u * q - p) / max(p, 1e-9))
            if not u * q < p:
                break
            out[r, i] = ids[r, i]
        accepted[r] = i
        weight = target[r, i].astype(np.float64)
        if rejected and draft is None:
            weight = np.where(np.arange(len(weight)) == ids[r, i], 0, weight)
        elif rejected:
            weight = np.maximum((target[r, i] - draft[r, i]).astype(np.float64), 0)
        weight = weight if weight.any() else target[r, i].astype(np.float64)
        with np.errstate(divide="ignore"):
            score = np.log(weight) + noise(int(seeds[r]), int(steps[r]) + i, 0, len(weight))
        out[r, i] = np.argmax(score)
        second = np.sort(score)[-2] if len(score) > 1 else -np.inf
        clear[r] = min(clear[r], score.max() - second)
    return out, accepted, clear


def verify_tree(ids, next_token, next_sibling, probs, greedy, index=None, seeds=None, steps=None, num_out=None):
    """Tokens, nodes on the path, how many were accepted, and how clear the choices were; of right trees."""
    requests, n = ids.shape
    num_out = n if num_out is None else num_out
    out, nodes = np.full((requests, num_out), -1), np.full((requests, num_out), -1)
    accepted, clear = np.zeros(requests, int), np.full(requests, np.inf)
    zeros = np.zeros(requests, int)
    seeds, steps = zeros if seeds is None else seeds, zeros if steps is None else steps
    for r in range(requests):
        node, i, rejected = 0, 0, []
        while True:
            nodes[r, i] = node if index is None else index[r, node]
            children, child = [], int(next_token[r, node])
            while child >= 0:
                children.append(child)
                child = int(next_sibling[r, child])
            found, rejected = None, []
            if i + 1 < num_out:
                u, total = _acceptance(int(seeds[r]), int(steps[r]), i), 0.0
                for child in children:
                    token = int(ids[r, child])
                    if found is not None or token in rejected:
                        continue
                    if greedy is not None:
                        found = child if token == greedy[r, node] else None
                        continue
                    total += float(probs[r, node, token])
                    clear[r] = min(clear[r], abs(u - total))
                    found = child if u < total else None
                    rejected += [token] if found is None else []
            if found is None:
                break
            out[r, i] = ids[r, found]
            node, i = found, i + 1
        accepted[r] = i
        if greedy is not None:
            out[r, i] = greedy[r, node]
            continue
        weight = probs[r, node].astype(np.float64)
        rest = np.where(np.isin(np.arange(len(weight)), rejected), 0, weight)
        with np.errstate(divide="ignore"):
            score = np.log(rest if rest.any() else weight) + noise(int(seeds[r]), int(steps[r]) + i, 0, len(weight))
        out[r, i] = np.argmax(score)
        clear[r] = min(clear[r], score.max() - np.sort(score)[-2] if len(score) > 1 else np.inf)
    return out, nodes, accepted, clear


def _acceptance(seed: int, step: int, i: int) -> float:
    halves = [(v >> shift) & 0xFFFFFFFF for v in (seed, step) for shift in (0, 32)]
    word = philox(np.array([i, 1, halves[2], halves[3]], np.uint64), (halves[0], halves[1]))[0]
    return (float(word) + 0.5) / 2**32
