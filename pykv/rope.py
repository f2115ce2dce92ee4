"""Tables of cosines and sines for the rotary operations: ``cache = pykv.rope.cache_of_config(config, 128, 8192)``.

A kind of scaling is a function that gives :class:`Frequencies`; :func:`cos_sin_cache` makes the table of any of them.
``rotary_dim`` is the number of elements of a head that are rotated, ``base`` is theta.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pykv import _rope_config
from pykv._libraries import array_like
from pykv._types import Array

Floats = npt.NDArray[np.floating[Any]]
Lengths = int | npt.NDArray[np.integer[Any]]


class Frequencies(NamedTuple):
    """How the pairs of elements of a head turn."""

    inverse: Floats
    """Radians per position of each pair, ``[rotary_dim / 2]``; or for each position its own, ``[positions, ...]``."""
    magnitude: float = 1.0
    """What cosines and sines are multiplied by."""


def default(rotary_dim: int, base: float = 10000.0) -> Frequencies:
    """Pair i turns by ``base ** (-2 * i / rotary_dim)`` a position."""
    if rotary_dim % 2:
        raise ValueError(f"rotary_dim: must be even, got {rotary_dim}")
    return Frequencies(base ** (-np.arange(0, rotary_dim, 2) / rotary_dim))


def linear(rotary_dim: int, base: float, factor: float) -> Frequencies:
    """All positions are divided by ``factor``."""
    return Frequencies(default(rotary_dim, base).inverse / factor)


def dynamic_ntk(rotary_dim: int, base: float, factor: float, trained: int, length: Lengths) -> Frequencies:
    """The base grows with what ``length`` has beyond the ``trained`` one.

    Args:
        rotary_dim: elements of a head that are rotated.
        base: theta up to the trained length.
        factor: how fast it grows.
        trained: positions that the model was trained with.
        length: of the sequence; or one for each position, such as ``np.arange(n) + 1``: the length that a model that
            decodes token by token had when it rotated that one.
    """
    grown = factor * np.maximum(length, trained) / trained - (factor - 1)
    grown_base = np.asarray(_stretched(base, grown, rotary_dim))
    return Frequencies(grown_base[..., None] ** (-np.arange(0, rotary_dim, 2) / rotary_dim))


def ntk_alpha(rotary_dim: int, base: float, alpha: float) -> Frequencies:
    """The base grows by ``alpha``, whatever the length (HunYuan)."""
    return default(rotary_dim, float(_stretched(base, alpha, rotary_dim)))


def _stretched(base: float, times: Any, rotary_dim: int) -> Any:
    """The base that slows the slowest pair so many times."""
    if rotary_dim <= 2:
        raise ValueError(f"rotary_dim: must be more than 2 where the base grows, got {rotary_dim}")
    return base * times ** (rotary_dim / (rotary_dim - 2))


def llama3(
    rotary_dim: int, base: float, factor: float, low_freq_factor: float, high_freq_factor: float, trained: int
) -> Frequencies:
    """Pairs that turn less than ``low_freq_factor`` times in the trained length are slowed by ``factor``.

    Those that turn more than ``high_freq_factor`` times are kept, those between are blended.
    """
    inverse = default(rotary_dim, base).inverse
    turns = trained * inverse / (2 * math.pi)
    between = high_freq_factor - low_freq_factor
    keep = np.clip((turns - low_freq_factor) / between, 0, 1) if between else (turns > low_freq_factor).astype(float)
    return Frequencies(keep * inverse + (1 - keep) * inverse / factor)


def yarn(
    rotary_dim: int,
    base: float,
    factor: float,
    trained: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    extrapolation_factor: float = 1.0,
    truncate: bool = True,
    mscale: float | None = None,
    mscale_all_dim: float | None = None,
    attention_factor: float | None = None,
) -> Frequencies:
    """YaRN (arXiv:2309.00071): slow pairs are slowed by ``factor``, fast ones kept; attention is sharpened.

    Args:
        rotary_dim: elements of a head that are rotated.
        base: theta.
        factor: how much longer sequences get.
        trained: positions that the model was trained with.
        beta_fast: pairs that turn as often in the trained length are kept.
        beta_slow: pairs that turn no more often are slowed.
        extrapolation_factor: how much of the kept ones is kept.
        truncate: blend between whole pairs.
        mscale: with ``mscale_all_dim`` (DeepSeek), the magnitude is ``m(mscale) / m(mscale_all_dim)``.
        mscale_all_dim: without both it is ``m(1)``, where ``m(k) = 0.1 * k * log(factor) + 1``.
        attention_factor: the magnitude itself.
    """
    inverse, pairs = default(rotary_dim, base).inverse, rotary_dim // 2

    def pair_that_turns(times: float) -> float:
        return pairs * math.log(trained / (times * 2 * math.pi)) / math.log(base)

    first, last = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    slow = np.clip((np.arange(pairs) - first) / (last - first or 0.001), 0, 1)
    keep = (1 - slow) * extrapolation_factor

    def sharpness(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if attention_factor is None:
        both = mscale and mscale_all_dim
        attention_factor = sharpness(mscale) / sharpness(mscale_all_dim) if both else sharpness(1)  # type: ignore[arg-type]
    return Frequencies(keep * inverse + (1 - keep) * inverse / factor, attention_factor)


def longrope(
    rotary_dim: int,
    base: float,
    factors: Sequence[float],
    trained: int,
    factor: float,
    *,
    attention_factor: float | None = None,
) -> Frequencies:
    """LongRoPE (arXiv:2402.13753): each pair is slowed by a number of its own.

    Args:
        rotary_dim: elements of a head that are rotated.
        base: theta.
        factors: one for each pair: a model has a list for short and one for long sequences.
        trained: positions that the model was trained with first.
        factor: how much longer sequences got.
        attention_factor: the magnitude; by default ``sqrt(1 + log(factor) / log(trained))``.
    """
    if len(factors) != rotary_dim // 2:
        raise ValueError(f"factors: one for each of {rotary_dim // 2} pairs is needed, got {len(factors)}")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return Frequencies(default(rotary_dim, base).inverse / np.asarray(factors), attention_factor)


def proportional(head_size: int, base: float, share: float, factor: float = 1.0) -> Frequencies:
    """All of a head is rotated, but all pairs beyond a ``share`` of them by 0 (Gemma 4)."""
    inverse = default(head_size, base).inverse / factor
    inverse[int(share * head_size // 2) :] = 0
    return Frequencies(inverse)


def cos_sin_cache(frequencies: Frequencies, num_positions: int, *, dtype: str = "float32", like: Any = None) -> Array:
    """The table of positions 0 to ``num_positions - 1``: all cosines, then all sines, in each row.

    As in training, frequencies and angles are rounded to fp32.

    Args:
        frequencies: of each pair, such as ``default(rotary_dim)``.
        num_positions: rows.
        dtype: of the table: float32, float16 or bfloat16.
        like: an array or a module (NumPy, CuPy, torch, JAX): the library, and the device, of the table.
    """
    if not isinstance(frequencies, Frequencies):
        got = type(frequencies).__name__
        raise TypeError(f"frequencies: must be Frequencies, such as default(rotary_dim), got {got}")
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * np.asarray(frequencies.inverse, np.float32)
    table = np.concatenate((np.cos(angles), np.sin(angles)), axis=1) * np.float32(frequencies.magnitude)
    made: Array = array_like(table, dtype, like)
    return made


class _Keys(dict[str, Any]):
    """What a config has, where it is an error of the caller's that something is not there."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"config: {key} is required, got {', '.join(sorted(self)) or 'an empty one'}")


def parameters_of_config(config: Mapping[str, Any], layer_type: str | None = None) -> dict[str, Any]:
    """What a Hugging Face config says of rope, under the names of transformers 5.

    These are ``rope_type``, ``rope_theta``, ``partial_rotary_factor`` or ``rotary_dim``, the lengths and what the type
    needs; what the config leaves out is as in the model's family.  See :func:`frequencies_of_config`.
    """
    return _rope_config.parameters(config, layer_type)


def frequencies_of_config(
    config: Mapping[str, Any], head_size: int, length: Lengths | None = None, *, layer_type: str | None = None
) -> Frequencies:
    """The frequencies of a Hugging Face config: the contents of a ``config.json``, old or new.

    Newer files nest all of rope under ``rope_parameters``, some for each type of layers; older ones have
    ``rope_theta`` and, with a scaling, ``rope_scaling``; families have names of their own, such as ``rotary_pct``.

    Args:
        config: the types default, mrope, linear, dynamic, llama3, yarn, longrope and proportional are known.
        head_size: elements of a head; with latent attention, of the part that is rotated.
        length: of the sequences that will be served, on which dynamic and longrope depend; by default what the model
            was trained with. Or one for each position, such as ``np.arange(n) + 1``: the length that a model that
            decodes token by token had when it rotated that one.
        layer_type: such as ``"sliding_attention"``; needed where rope differs between layers.

    Raises:
        ValueError: the type is not known or lacks a parameter; a key about rope is not understood, or two contradict
            each other; ``layer_type`` is missing, or the config does not know it.
    """
    rope = _Keys(parameters_of_config(config, layer_type))
    kind, base, width = rope["rope_type"], rope["rope_theta"], _rope_config.rotary_dim(rope, head_size)

    def given(*names: str) -> dict[str, Any]:
        return {name: rope[name] for name in names if name in rope}

    if kind == "linear":
        return linear(width, base, rope["factor"])
    if kind == "dynamic" and "alpha" in rope:
        return ntk_alpha(width, base, rope["alpha"])
    if kind == "dynamic":
        trained = rope["max_position_embeddings"]
        return dynamic_ntk(width, base, rope["factor"], trained, trained if length is None else length)
    if kind == "llama3":
        trained = rope["original_max_position_embeddings"]
        return llama3(width, base, rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], trained)
    if kind == "yarn":
        options = given("beta_fast", "beta_slow", "extrapolation_factor", "truncate", "mscale", "mscale_all_dim")
        options |= given("attention_factor")
        inverse, magnitude = yarn(width, base, _factor(rope), rope["original_max_position_embeddings"], **options)
        return Frequencies(inverse, magnitude * rope.get("attn_factor", 1.0))
    if kind == "longrope":
        return _longrope_of_config(rope, width, length)
    if kind == "proportional":
        return proportional(head_size, base, width / head_size, rope.get("factor", 1.0))
    return default(width, base)


def _factor(rope: _Keys) -> float:
    """How much longer sequences get."""
    if "factor" in rope:
        return float(rope["factor"])
    return float(rope["max_position_embeddings"] / rope["original_max_position_embeddings"])


def _longrope_of_config(rope: _Keys, width: int, length: Lengths | None) -> Frequencies:
    trained, factor = rope["original_max_position_embeddings"], _factor(rope)

    def one(kind: str) -> Frequencies:
        magnitude = rope.get(f"{kind}_mscale", rope.get("attention_factor"))
        return longrope(width, rope["rope_theta"], rope[f"{kind}_factor"], trained, factor, attention_factor=magnitude)

    short, long = one("short"), one("long")
    if length is None or isinstance(length, int):
        return long if (length or trained) > trained else short
    if short.magnitude != long.magnitude:
        raise ValueError("length: must be one number where short_mscale and long_mscale of the config differ")
    is_long = np.asarray(length)[..., None] > trained
    return Frequencies(np.where(is_long, long.inverse, short.inverse), short.magnitude)


def cache_of_config(
    config: Mapping[str, Any],
    head_size: int,
    num_positions: int,
    *,
    layer_type: str | None = None,
    dtype: str = "float32",
    like: Any = None,
) -> Array:
    """The table for a Hugging Face config and sequences of up to ``num_positions`` tokens.

    See :func:`frequencies_of_config` and :func:`cos_sin_cache`.
    """
    frequencies = frequencies_of_config(config, head_size, num_positions, layer_type=layer_type)
    return cos_sin_cache(frequencies, num_positions, dtype=dtype, like=like)
