"""Rotary tables of Hugging Face configurations."""

from __future__ import annotations

from typing import Any

import numpy as np

from pykv import rope

Table = np.ndarray[Any, np.dtype[Any]]


def rope_table(config: dict[str, Any], head_dim: int, length: int) -> Table:
    """Cosines, then sines, of every position: float32 [length, rotated dimensions], for `pykv.rotary_embedding`."""
    given = rope.parameters_of_config(config)
    if given["rope_type"] != "dynamic":
        return np.asarray(rope.cache_of_config(config, head_dim, length))
    # Keys already cached keep the rotation they got, so every position takes the base of the length it ended: what a
    # model that decodes token by token does.
    width, trained = int(head_dim * given["partial_rotary_factor"]), config["max_position_embeddings"]
    grown = rope.dynamic_ntk(width, given["rope_theta"], given["factor"], trained, np.arange(length) + 1)
    return np.asarray(rope.cos_sin_cache(grown, length))
