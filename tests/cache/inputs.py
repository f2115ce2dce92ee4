"""Caches in every layout, tokens in every arrangement, slot mappings of every kind.  Tests and benchmarks share them.

A cache is a view of a larger memory, with guard blocks around it, so that comparing whole memories shows both that the
right elements were written and that nothing else was.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
GUARD = 1  # blocks on either side of a cache

# An indexing of memory that NumPy, torch and CuPy understand alike.
View = Callable[[Any], Any]


def view(memory: Any, take: View) -> Any:
    """A view of a library's array, also of one that hides behind an interface."""
    return type(memory)(take(memory.array)) if hasattr(memory, "array") else take(memory)


@dataclass(frozen=True)
class Sizes:
    blocks: int = 6
    block_size: int = 16
    heads: int = 3
    head_size: int = 64
    v_head_size: int | None = None

    @property
    def slots(self) -> int:
        return self.blocks * self.block_size

    @property
    def v_size(self) -> int:
        return self.head_size if self.v_head_size is None else self.v_head_size


@dataclass(frozen=True)
class Layout:
    """Shapes of the memories of keys and values, and where in them the caches lie.  ``one_memory``: they share it."""

    packed: bool
    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]
    key: View
    value: View
    one_memory: bool = False


def _inner(m: Any) -> Any:
    return m[GUARD:-GUARD]


def layout(name: str, s: Sizes, itemsize: int) -> Layout:
    nb, bs, h, d, v = s.blocks + 2 * GUARD, s.block_size, s.heads, s.head_size, s.v_size
    x = 16 // itemsize
    packed_key, packed_value = (nb, h, d // x, bs, x), (nb, h, v, bs)
    match name:
        case "NHD":
            return Layout(False, (nb, bs, h, d), (nb, bs, h, v), _inner, _inner)
        case "HND":
            heads_first: View = lambda m: _inner(m).swapaxes(1, 2)  # noqa: E731
            return Layout(False, (nb, h, bs, d), (nb, h, bs, v), heads_first, heads_first)
        case "NHD, blocks of K and V in turn":
            both = (nb, 2, bs, h, d)
            return Layout(False, both, both, lambda m: _inner(m)[:, 0], lambda m: _inner(m)[:, 1], True)
        case "HND, blocks of K and V in turn":
            both = (nb, 2, h, bs, d)
            return Layout(
                False,
                both,
                both,
                lambda m: _inner(m)[:, 0].swapaxes(1, 2),
                lambda m: _inner(m)[:, 1].swapaxes(1, 2),
                True,
            )
        case "K NHD, V HND":  # strides of their own
            return Layout(False, (nb, bs, h, d), (nb, h, bs, v), _inner, lambda m: _inner(m).swapaxes(1, 2))
        case "rows not aligned":
            skip_one: View = lambda m: _inner(m)[:, :, :, 1:]  # noqa: E731
            return Layout(False, (nb, bs, h, d + 1), (nb, bs, h, v + 1), skip_one, skip_one)
        case "rows aligned to 4 bytes":
            skip_two: View = lambda m: _inner(m)[:, :, :, 2:]  # noqa: E731
            return Layout(False, (nb, bs, h, d + 2), (nb, bs, h, v + 2), skip_two, skip_two)
        case "elements apart":
            every_other: View = lambda m: _inner(m)[:, :, :, ::2]  # noqa: E731
            return Layout(False, (nb, bs, h, 2 * d), (nb, bs, h, 2 * v), every_other, every_other)
        case "tokens adjacent":  # the flash shape over memory that looks like packed values
            tokens_last: View = lambda m: _inner(m).swapaxes(1, 3)  # noqa: E731
            return Layout(False, (nb, d, h, bs), (nb, v, h, bs), tokens_last, tokens_last)
        case "pages not aligned":
            return Layout(
                False,
                (nb, bs * h * d + 1),
                (nb, bs * h * v + 1),
                lambda m: _inner(m)[:, 1:].reshape(nb - 2 * GUARD, bs, h, d),
                lambda m: _inner(m)[:, 1:].reshape(nb - 2 * GUARD, bs, h, v),
            )
        case "packed":
            return Layout(True, packed_key, packed_value, _inner, _inner)
        case "packed, halves of one memory":
            half = (2, nb, h * d * bs)
            return Layout(
                True,
                half,
                half,
                lambda m: _inner(m[0]).reshape((nb - 2 * GUARD, *packed_key[1:])),
                lambda m: _inner(m[1]).reshape((nb - 2 * GUARD, *packed_value[1:])),
                True,
            )
        case "packed, values not aligned":
            return Layout(True, packed_key, (nb, h, v, bs + 1), _inner, lambda m: _inner(m)[:, :, :, 1:])
        case "packed, values interleaved":
            return Layout(True, packed_key, (nb, h, bs // x, v, x), _inner, _inner)
        case "packed, values interleaved, groups first":
            groups_first: View = lambda m: _inner(m)[:, :, :, 1:].swapaxes(1, 2)  # noqa: E731
            return Layout(True, packed_key, (nb, bs // x, h, v + 1, x), _inner, groups_first)
        case "packed, values interleaved, not aligned":
            return Layout(True, packed_key, (nb, h, bs // x, v, x + 1), _inner, lambda m: _inner(m)[..., 1:])
        case "packed, dimensions of values adjacent":
            return Layout(True, packed_key, (nb, h, bs, v), _inner, lambda m: _inner(m).swapaxes(2, 3))
    raise ValueError(name)


FLASH = [
    "NHD",
    "HND",
    "NHD, blocks of K and V in turn",
    "HND, blocks of K and V in turn",
    "K NHD, V HND",
    "rows not aligned",
    "rows aligned to 4 bytes",
    "elements apart",
    "tokens adjacent",
]
PACKED = [
    "packed",
    "packed, halves of one memory",
    "packed, values not aligned",
    "packed, dimensions of values adjacent",
]
INTERLEAVED = [
    "packed, values interleaved",
    "packed, values interleaved, groups first",
    "packed, values interleaved, not aligned",
]


def bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Any bit pattern, NaN and infinities included: what is copied must come out bit by bit."""
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Magnitudes from subnormal to beyond the largest fp8, zeros of both signs, infinities and NaN."""
    with np.errstate(all="ignore"):
        x = (rng.standard_normal(shape) * np.exp2(rng.uniform(-20, 18, shape))).astype(dtype)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 448, -464, 57344, 2**-10, 2**-9]).astype(dtype)
    where = rng.random(shape) < 0.05
    x[where] = rng.choice(special, np.count_nonzero(where))
    return x


TOKENS = ["compact", "part of qkv", "heads first", "padded", "elements apart"]


def tokens(make: Callable[..., np.ndarray], rows: int, heads: int, size: int, arrangement: str) -> np.ndarray:
    """``[rows, heads, size]`` with the strides of that arrangement; ``make(shape)`` gives the elements."""
    match arrangement:
        case "compact":
            return make((rows, heads, size))
        case "part of qkv":
            return make((rows, heads + 4, size))[:, 3:-1]
        case "heads first":
            return make((heads, rows, size)).swapaxes(0, 1)
        case "padded":  # every head starts at a multiple of 32 elements, whatever its size
            return make((rows, heads, size // 32 * 32 + 32))[..., :size]
        case "elements apart":
            return make((rows, heads, size, 2))[..., 1]
    raise ValueError(arrangement)


def slot_mapping(rng: np.random.Generator, kind: str, n: int, s: Sizes, dtype: Any = np.int64) -> np.ndarray:
    """Distinct slots: "scattered" ones; "consecutive" ones from an odd place; "sequences" of both, with padding."""
    assert n <= s.slots
    match kind:
        case "scattered":
            slots = rng.permutation(s.slots)[:n]
        case "consecutive":
            slots = np.arange(n) + min(5, s.slots - n)
        case "sequences":  # pages in any order, as a block table gives them, with holes
            pages = rng.permutation(s.blocks)
            slots = (pages[:, None] * s.block_size + np.arange(s.block_size)).reshape(-1)[:n]
            slots = np.where(rng.random(n) < 0.1, rng.choice([-1, -7, -(2**31)], n), slots)
        case _:
            raise ValueError(kind)
    return slots.astype(dtype)


SLOTS = ["scattered", "consecutive", "sequences"]


def blocks_of_floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Blocks of every magnitude, some of zeros, some with infinities and NaN, many elements on or near a tie."""
    blocks = (int(np.prod(shape)) // 16, 16)
    size = np.exp2(np.round(rng.uniform(-16, 12, blocks[0])))[:, None]
    x = rng.standard_normal(blocks) * size
    exact = rng.choice(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 0, -0.25, -5]), blocks) * size
    kind = rng.random((blocks[0], 1))
    x = np.where(kind < 0.3, exact, x)
    x = np.where(kind > 0.97, 0.0, x)
    special = rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan]), blocks)
    x = np.where((kind > 0.9) & (kind < 0.94) & (rng.random(blocks) < 0.2), special, x)
    x = np.where((kind > 0.94) & (kind < 0.95), np.nan, x)
    with np.errstate(all="ignore"):
        return x.astype(dtype).reshape(shape)


def nvfp4_tokens(
    rng: np.random.Generator, dtype: np.dtype[Any], rows: int, heads: int, size: int, arrangement: str
) -> np.ndarray:
    def make(shape: tuple[int, ...]) -> np.ndarray:
        total = int(np.prod(shape))
        return blocks_of_floats(rng, (-(-total // 16) * 16,), dtype)[:total].reshape(shape)

    return tokens(make, rows, heads, size, arrangement)
