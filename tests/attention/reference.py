"""Attention by the textbook, in NumPy and float64: no tiles, no running maximum, one query token at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class BlockSparse:
    """Which cache blocks a head sees in vLLM's block-sparse decode attention."""

    tp_rank: int = 0
    local_blocks: int = 0
    vert_stride: int = 0
    block_size: int = 64
    head_sliding_step: int = 0

    def seen(self, length: int, cache_block: int, head: int, num_heads: int, num_kv_heads: int) -> NDArray[np.bool_]:
        """For each token of a sequence, whether query head ``head`` sees the cache block that holds it."""
        token = np.arange(length)
        if self.vert_stride <= 1:
            return np.ones(length, bool)
        sparse_block = token // cache_block * cache_block // self.block_size
        last = (length - 1) // self.block_size
        step = self.head_sliding_step
        if step >= 0:
            offset = (self.tp_rank * num_heads + head) * step + 1
        else:
            offset = (self.tp_rank * num_kv_heads + head // (num_heads // num_kv_heads)) * -step + 1
        seen: NDArray[np.bool_] = ((sparse_block + offset) % self.vert_stride == 0) | (
            sparse_block > last - self.local_blocks
        )
        return seen


DENSE = BlockSparse()


def block_size_of(key_cache: NDArray[np.generic]) -> int:
    return int(key_cache.shape[3] if key_cache.ndim == 5 else key_cache.shape[1])


def tokens_of(cache: NDArray[np.generic], blocks: NDArray[np.int64], packed: bool) -> Floats:
    """The named blocks of a cache of floats as [token, kv_head, head_size]."""
    pages = np.asarray(cache)[blocks].astype(np.float64)
    if packed and pages.ndim == 5:  # [block, head, dim / x, token, x]
        pages = pages.transpose(0, 3, 1, 2, 4)
    elif packed:  # [block, head, dim, token]
        pages = pages.transpose(0, 3, 1, 2)
    return pages.reshape(pages.shape[0] * pages.shape[1], pages.shape[2], math.prod(pages.shape[3:]))


def nvfp4_values(cache: NDArray[np.uint8], swizzled: bool) -> Floats:
    """What pages of nvfp4, ``[block, token, head, bytes]``, hold, below the global scale; ``swizzled``: of values."""
    blocks, tokens, heads, num_bytes = cache.shape
    num_scales = num_bytes // 9
    in_memory = (0, 1, 2, 3) if cache.strides[1] >= cache.strides[2] else (0, 2, 1, 3)  # NHD or HND
    pages = cache.transpose(in_memory)
    codes, scales = np.split(pages.reshape(blocks, -1), [tokens * heads * num_scales * 8], axis=1)
    codes = codes.reshape(*pages.shape[:3], num_scales * 8).transpose(in_memory)
    scales = scales.reshape(*pages.shape[:3], num_scales).transpose(in_memory).view(ml_dtypes.float8_e4m3fn)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(blocks, tokens, heads, num_scales, 16)
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.concatenate([magnitudes, -magnitudes])[nibbles]
    for t, s in np.ndindex(tokens, num_scales):
        at = (t // 4 * 4 + s // (num_scales // 4), s % (num_scales // 4) * 4 + t % 4) if swizzled else (t, s)
        values[:, t, :, s] *= scales[:, at[0], :, at[1]].astype(np.float64)[..., None]
    return values.reshape(blocks, tokens, heads, num_scales * 16)


def paged_attention(
    query: NDArray[np.generic],
    key_cache: NDArray[np.generic],
    value_cache: NDArray[np.generic],
    block_tables: NDArray[np.integer],
    seq_lens: NDArray[np.integer],
    *,
    cu_query_lens: NDArray[np.integer] | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: NDArray[np.float32] | None = None,
    sinks: NDArray[np.float32] | None = None,
    k_scale: float | NDArray[np.float32] = 1.0,
    v_scale: float | NDArray[np.float32] = 1.0,
    epsilon: float = 0.0,
    sparse: BlockSparse = DENSE,
) -> tuple[Floats, Floats]:
    """Output [token, head, head_size] and log-sum-exp [head, token]; NaN for rows that belong to no sequence."""
    tokens, heads, head_size = query.shape
    packed = key_cache.ndim == 5
    page = block_size_of(key_cache)
    num_blocks = key_cache.shape[0]
    kv_heads = key_cache.shape[1] if packed else key_cache.shape[2]
    group = heads // kv_heads
    scale = head_size**-0.5 if scale is None else scale
    bounds = np.arange(len(seq_lens) + 1) if cu_query_lens is None else np.asarray(cu_query_lens)
    k_scales = np.broadcast_to(np.asarray(k_scale, np.float64), (kv_heads,))
    v_scales = np.broadcast_to(np.asarray(v_scale, np.float64), (kv_heads,))
    out = np.full(query.shape, np.nan)
    lse = np.full((heads, tokens), np.nan)

    sink = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks, np.float64)

    for s, length in enumerate(int(n) for n in seq_lens):
        table = np.asarray(block_tables[s, : -(-length // page)], np.int64)
        valid = np.repeat((table >= 0) & (table < num_blocks), page)[:length]
        blocks = np.where((table >= 0) & (table < num_blocks), table, 0)
        keys = tokens_of(key_cache, blocks, packed)[:length] * k_scales[:, None]
        values = tokens_of(value_cache, blocks, packed)[:length] * v_scales[:, None]
        keys, values = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (keys, values))  # [kv_head, token, head_size]
        by_head = np.stack([sparse.seen(length, page, h, heads, kv_heads) for h in range(heads)])
        j = np.arange(length)
        for row in range(int(bounds[s]), int(bounds[s + 1])):
            position = length - int(bounds[s + 1]) + row
            visible = valid & (j <= position) if causal else valid
            if window:
                visible = visible & (np.abs(position - j) < window)
            seen = j[visible]
            at = _as_slice(seen)
            logits = scale * (query[row].astype(np.float64).reshape(kv_heads, group, -1) @ keys[:, at].swapaxes(1, 2))
            logits = logits.reshape(heads, -1)
            if softcap:
                logits = softcap * np.tanh(logits / softcap)
            if alibi_slopes is not None:
                logits = logits + alibi_slopes.astype(np.float64)[:, None] * (seen - position)
            logits = np.where(by_head[:, at], logits, -np.inf)
            top = np.maximum(logits.max(axis=1, initial=-np.inf), sink)  # NaN, if there is one
            nothing = top == -np.inf
            with np.errstate(invalid="ignore", divide="ignore"):  # infinity - infinity, and where nothing was seen
                shift = np.where(nothing, 0, top)
                weights = np.exp(logits - shift[:, None])
                total = weights.sum(axis=1) + np.exp(sink - shift)
                if by_head.all():
                    sums = (weights.reshape(kv_heads, group, -1) @ values[:, at]).reshape(heads, -1)
                else:  # what a head does not see may be NaN
                    some = enumerate(by_head[:, at])
                    sums = np.stack([weights[h, own] @ values[h // group, at][own] for h, own in some])
                out[row] = np.where(nothing[:, None], 0.0, sums / (total + epsilon)[:, None])
                lse[:, row] = np.where(nothing, -np.inf, top + np.log(total))
    return out, lse


def _as_slice(places: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """The same places: a slice where they are neighbours, of which nothing is copied."""
    if len(places) and places[-1] - places[0] == len(places) - 1:
        return slice(int(places[0]), int(places[-1]) + 1)
    return places


def merge_attn_states(
    prefix_output: NDArray[np.generic],
    prefix_lse: NDArray[np.float32],
    suffix_output: NDArray[np.generic],
    suffix_lse: NDArray[np.float32],
    context_tokens: int | None = None,
) -> tuple[Floats, Floats]:
    """Two partial softmaxes as one.  An lse of +inf or -inf means that its side saw nothing."""
    tokens = prefix_output.shape[0]
    prefix, suffix = prefix_output.astype(np.float64), suffix_output.astype(np.float64)
    p = np.where(np.isinf(prefix_lse), -np.inf, prefix_lse.astype(np.float64)).T  # [token, head]
    s = np.where(np.isinf(suffix_lse), -np.inf, suffix_lse.astype(np.float64)).T
    top = np.fmax(p, s)
    empty = np.isneginf(top)
    with np.errstate(invalid="ignore", divide="ignore"):
        parts = np.exp(p - top), np.exp(s - top)
        prefix_weight = np.where(empty, 1.0, parts[0] / (parts[0] + parts[1]))
        suffix_weight = np.where(empty, 0.0, parts[1] / (parts[0] + parts[1]))
        lse = np.where(empty, -np.inf, top + np.log(parts[0] + parts[1]))
    # A side of weight zero contributes nothing, whatever it holds.
    out = np.where(prefix_weight[..., None] == 0, 0.0, prefix * prefix_weight[..., None]) + np.where(
        suffix_weight[..., None] == 0, 0.0, suffix * suffix_weight[..., None]
    )
    context = tokens if context_tokens is None else context_tokens
    out[context:] = suffix[context:]
    lse[context:] = suffix_lse.astype(np.float64).T[context:]
    return out, lse.T


def merge_attn_states_n(
    partial_outputs: NDArray[np.generic], partial_lses: NDArray[np.float32]
) -> tuple[Floats, Floats]:
    """Stacked partial softmaxes as one.  An lse of +inf or -inf means that its part saw nothing."""
    lses = np.where(np.isinf(partial_lses), -np.inf, partial_lses.astype(np.float64)).transpose(0, 2, 1)
    top = np.fmax.reduce(lses, axis=0, initial=-np.inf)
    weights = np.exp(lses - np.where(np.isneginf(top), 0, top))
    total = weights.sum(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = (weights / total)[..., None]
        lse = np.where(np.isneginf(top), 0, top) + np.log(total)
    # A part of weight zero contributes nothing, whatever it holds.
    out = np.where(weights[..., None] == 0, 0.0, partial_outputs.astype(np.float64) * shares).sum(axis=0)
    return out, lse.T
