"""Rotary tables of Hugging Face configurations: the rope types default, linear, dynamic, llama3 and yarn."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

Table = np.ndarray[Any, np.dtype[Any]]


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says of rope, under one set of names: newer files nest all of it, older ones only the scaling."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    common = {"rope_theta": config.get("rope_theta", 10000.0), "rope_type": given.get("type", "default"),
              "original_max_position_embeddings": config["max_position_embeddings"]}  # fmt: skip
    return common | given


def rope_table(config: dict[str, Any], head_dim: int, length: int) -> Table:
    """Cosines, then sines, of every position: float32 [length, rotated dimensions], for `pykv.rotary_embedding`."""
    rope = rope_parameters(config)
    width = int(head_dim * rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
    theta, kind = rope["rope_theta"], rope["rope_type"]
    exponent = np.arange(0, width, 2) / width
    inverse = theta**-exponent  # radians per position, for each pair of dimensions
    positions = np.arange(length)[:, None]
    magnitude = 1.0
    if kind == "linear":
        inverse = inverse / rope["factor"]
    elif kind == "dynamic":
        inverse = _dynamic(rope, config["max_position_embeddings"], exponent, positions)
    elif kind == "llama3":
        inverse = _llama3(rope, inverse)
    elif kind == "yarn":
        inverse, magnitude = _yarn(rope, config["max_position_embeddings"], inverse)
    elif kind != "default":
        raise ValueError(f"rope type {kind!r} is not supported; default, linear, dynamic, llama3 and yarn are")
    angles = positions * inverse
    return (np.concatenate((np.cos(angles), np.sin(angles)), axis=1) * magnitude).astype(np.float32)


def _dynamic(rope: dict[str, Any], trained: int, exponent: Table, positions: Table) -> Table:
    """Beyond the trained length the base grows with the length.

    Keys already cached keep the rotation they got, so every position takes the base of the length it ended: what a
    model that decodes token by token does.
    """
    grown = np.maximum(positions + 1, trained) / trained
    width = 2 * len(exponent)
    theta = rope["rope_theta"] * (rope["factor"] * grown - (rope["factor"] - 1)) ** (width / (width - 2))
    return np.asarray(theta**-exponent)


def _llama3(rope: dict[str, Any], inverse: Table) -> Table:
    """Long waves are slowed by the factor, short ones kept, those between blended."""
    turns = rope["original_max_position_embeddings"] * inverse / (2 * math.pi)  # within the trained length
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0, 1)
    return np.asarray(keep * inverse + (1 - keep) * inverse / rope["factor"])


def _yarn(rope: dict[str, Any], length: int, inverse: Table) -> tuple[Table, float]:
    """As llama3, blended over the dimensions rather than the waves; and attention is sharpened by a magnitude."""
    trained, pairs = rope["original_max_position_embeddings"], len(inverse)
    factor = rope.get("factor") or length / trained

    def pair_that_turns(turns: float) -> float:
        return pairs * math.log(trained / (turns * 2 * math.pi)) / math.log(rope["rope_theta"])

    first, last = pair_that_turns(rope.get("beta_fast") or 32), pair_that_turns(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    slow = np.clip((np.arange(pairs) - first) / (last - first or 0.001), 0, 1)

    def sharpness(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    magnitude = rope.get("attention_factor")
    if magnitude is None:
        one, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
        magnitude = sharpness(one) / sharpness(all_dims) if one and all_dims else sharpness(1)
    return np.asarray(slow * inverse / factor + (1 - slow) * inverse), magnitude
