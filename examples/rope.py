"""Rotary tables of Hugging Face configurations."""

from __future__ import annotations

from typing import Any

import numpy as np

from pykv import rope

Table = np.ndarray[Any, np.dtype[Any]]


def rope_table(config: dict[str, Any], head_dim: int, length: int, layer_type: str | None = None) -> Table:
    """Cosines, then sines, of every position: float32 [length, rotated dimensions], for `pykv.rotary_embedding`.

    Keys that are cached keep the rotation they got.  So where frequencies depend on the length of the sequence
    (dynamic, longrope), every position has those of the length that it ended: what a model that decodes token by token
    does.
    """
    frequencies = rope.frequencies_of_config(config, head_dim, np.arange(length) + 1, layer_type=layer_type)
    return np.asarray(rope.cos_sin_cache(frequencies, length))
