"""Small right calls of the operations of sampling."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from pykv._tools.samples._arrays import Sample, floats, ids

SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "apply_repetition_penalties_": lambda: {
        "logits": floats(3, 8),
        "prompt_mask": floats(3, 8, seed=1) > 1,
        "output_mask": floats(3, 8, seed=2) > 1,
        "repetition_penalties": 1 + np.abs(floats(3)),
    },
    "apply_penalties_": lambda: {
        "logits": floats(3, 8),
        "prompt_token_ids": np.array([[0, 5, 5], [7, 8, -1], [2, 1, 0]], np.int32),
        "output_token_ids": ids([5, 6, 5, 5], [3, 2, 3, 8], [-1, -1, -1, -1]),
        "presence_penalties": 0.5,
        "frequency_penalties": floats(3, seed=1),
        "repetition_penalties": 1 + np.abs(floats(3)),
        "prompt_lens": ids(3, 1, 2),
        "output_lens": np.array([4, 3, 0], np.int32),
    },
    "merge_top_k": lambda: {
        "indices": np.zeros((3, 4), np.int32),
        "shard_indices": np.array([[[4, 0, 2], [1, 3, -1], [5, 4, 0]], [[1, 2, 0], [0, -1, -1], [3, 2, 1]]], np.int32),
        "shard_values": np.sort(floats(2, 3, 3))[..., ::-1].copy(),
        "k": 4,
        "first_tokens": ids(0, 6),
        "values": floats(3, 4),
    },
    "finish_logits_": lambda: {
        "logits": 30 * floats(3, 12),
        "num_org": 6,
        "num_org_pad": 2,
        "num_added": 3,
        "soft_cap": 20.0,
        "scale": 0.5,
    },
    "sample": lambda: {
        "out": np.zeros(3, np.int32),
        "logits": floats(3, 40),
        "seeds": ids(1, 2, 3),
        "steps": ids(0, 0, 5),
        "temperature": np.array([0.7, 0, 1.2], np.float32),
        "top_k": np.array([0, 5, 12], np.int32),
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "prompt_bitmap": np.array([[5, 0], [0, 1], [-1, -1]], np.int32),
        "output_counts": np.arange(120, dtype=np.int32).reshape(3, 40) % 7 // 5,
        "logit_bias": floats(3, 40, seed=1),
        "allowed_bitmap": np.array([[-1, -1], [-2, -1], [0x0F0F0F0F, -1]], np.int32),
        "logprobs": floats(3),
    },
    "rejection_sample": lambda: {
        "out": np.zeros((3, 3), np.int32),
        "draft_token_ids": ids([0, 5], [7, 1], [2, 3]),
        "target_probs": np.abs(floats(3, 3, 8)),
        "draft_probs": np.abs(floats(3, 2, 8, seed=1)),
        "draft_lens": ids(2, 1, 2),
        "seeds": ids(1, 2, 3),
        "steps": ids(4, 0, 2),
        "num_accepted": np.zeros(3, np.int32),
    },
    "verify_tree": lambda: {
        "out": np.zeros((3, 5), np.int32),
        "draft_token_ids": ids([0, 5, 2, 7, 1], [7, 1, 3, 1, 0], [2, 3, 4, 5, 6]),
        "next_token": np.array([[1, 3, 4, -1, -1]] * 3, np.int32),
        "next_sibling": np.array([[-1, 2, -1, -1, -1]] * 3, np.int32),
        "target_probs": np.abs(floats(3, 5, 8)) / 4,
        "retrieve_index": np.arange(15).reshape(3, 5),
        "seeds": ids(1, 2, 3),
        "steps": ids(4, 0, 2),
        "accepted_index": np.zeros((3, 5), np.int32),
        "num_accepted": np.zeros(3, np.int32),
    },
    "softmax": lambda: {"out": floats(3, 40), "logits": floats(3, 40, seed=1), "temperature": 0.7},
    "top_k_top_p_mask": lambda: {
        "out": floats(3, 40),
        "logits": floats(3, 40, seed=1),
        "top_k": np.array([30, 0, 8], np.int32),
        "top_p": 0.95,
        "min_p": 0.1,
        "temperature": np.array([1, 0.9, 2], np.float32),
    },
    "top_k_top_p_renorm": lambda: {
        "out": floats(3, 40),
        "probs": np.abs(floats(3, 40, seed=1)),
        "top_k": np.array([30, 0, 8], np.int32),
        "top_p": 0.6,
    },
    "token_logprobs": lambda: {
        "logprobs": floats(3, 2),
        "logits": floats(3, 40),
        "token_ids": np.array([[0, 39], [7, 7], [20, 3]], np.int32),
        "ranks": np.zeros((3, 2), np.int32),
    },
    "top_k_per_row": lambda: {
        "indices": np.zeros((3, 4), np.int32),
        "logits": floats(3, 8),
        "k": 4,
        "row_starts": ids(0, 1, 2),
        "row_ends": ids(8, 7, 6),
        "values": floats(3, 4),
    },
}
