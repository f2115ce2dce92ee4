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
