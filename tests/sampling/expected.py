"""What the samples of sampling must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from sampling import reference as sampling

Results = dict[str, Any]


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


def verify_tree(a: Any) -> Results:
    links, draws = (a.next_token, a.next_sibling), (a.target_probs, None, a.retrieve_index, a.seeds, a.steps)
    out, nodes, accepted, _ = sampling.verify_tree(a.draft_token_ids, *links, *draws)
    return {"out": out, "accepted_index": nodes, "num_accepted": accepted}


EXPECTED: dict[str, Callable[[Any], Results]] = {
    "apply_repetition_penalties_": lambda a: {
        "logits": sampling.apply_repetition_penalties(a.logits, a.prompt_mask, a.output_mask, a.repetition_penalties)
    },
    "apply_penalties_": lambda a: {"logits": sampling.apply_penalties(**vars(a))},
    "merge_top_k": lambda a: dict(
        zip(
            ("indices", "values"),
            sampling.merge_top_k(a.shard_indices, a.shard_values, a.k, a.first_tokens),
            strict=True,
        )
    ),
    "finish_logits_": lambda a: {"logits": sampling.finish_logits(**vars(a))},
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
    "verify_tree": verify_tree,
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
}
