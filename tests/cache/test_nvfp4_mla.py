"""nvfp4 caches written by concat_and_cache_mla."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache import inputs, reference_nvfp4
from cache.inputs import DTYPES, SLOTS, Sizes
from libraries import Library

import pykv

MLA_LAYOUTS: dict[str, tuple[Callable[[int, int, int], tuple[int, ...]], Callable[[Any], Any]]] = {
    "compact": (lambda nb, bs, w: (nb, bs, w), lambda m: m[1:-1]),
    "one of two layers": (lambda nb, bs, w: (nb, 2, bs, w), lambda m: m[1:-1, 1]),
    "not aligned": (lambda nb, bs, w: (nb, bs * w + 3), lambda m: m[1:-1, 3:]),
}


def check_mla(
    array: Library,
    latent: int = 512,
    rope: int = 64,
    *,
    layout: str = "compact",
    arrangement: str = "compact",
    dtype: str = "bfloat16",
    scale: np.float32 = np.float32(0.37),  # noqa: B008
    as_scale: Any = float,
    slots: np.ndarray | None = None,
    blocks: int = 5,
    block_size: int = 16,
    seed: int = 0,
) -> None:
    rng = np.random.default_rng(seed)
    width = (latent + rope) * 9 // 16
    shape, take = MLA_LAYOUTS[layout]
    expected = rng.integers(0, 256, shape(blocks + 2, block_size, width), np.uint8)
    actual = array.output(expected)

    def cache_of(memory: Any) -> Any:
        return take(memory).reshape(blocks, block_size, width) if layout == "not aligned" else take(memory)

    if slots is None:
        slots = inputs.slot_mapping(rng, "sequences", 33, Sizes(blocks, block_size))
    rows = len(slots) + 2
    whole = inputs.nvfp4_tokens(rng, DTYPES[dtype], rows, 1, latent + rope, "compact")[:, 0]
    c, pe = whole[:, :latent], whole[:, latent:]
    if arrangement == "compact":
        c, pe = c.copy(), pe.copy()
    elif arrangement == "elements apart":
        c, pe = (np.repeat(x, 2, axis=1)[:, ::2] for x in (c, pe))
    cache = cache_of(expected)
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < blocks * block_size:
            reference_nvfp4.store(cache[:, :, None], slot, whole[token][None], scale)
    pykv.concat_and_cache_mla(
        array.input(c), array.input(pe), inputs.view(actual, cache_of), array.input(slots), "nvfp4", as_scale(scale)
    )
    np.testing.assert_array_equal(array.numpy(actual), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", MLA_LAYOUTS)
@pytest.mark.parametrize("arrangement", ["compact", "parts of one", "elements apart"])
def test_mla(array: Library, arrangement: str, layout: str, dtype: str) -> None:
    check_mla(array, layout=layout, arrangement=arrangement, dtype=dtype)


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (256, 64), (128, 0), (0, 64), (60, 4), (57, 71), (1000, 24)])
def test_mla_sizes(array: Library, latent: int, rope: int) -> None:
    """Blocks may hold elements of both parts."""
    for dtype in DTYPES:
        check_mla(array, latent, rope, dtype=dtype)


@pytest.mark.parametrize("slots", SLOTS)
def test_mla_slot_mappings(array: Library, slots: str) -> None:
    for n in (0, 1, 4, 31, 80):
        s = Sizes(blocks=5)
        check_mla(array, slots=inputs.slot_mapping(np.random.default_rng(n), slots, n, s), blocks=5)


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (512, 0), (0, 512), (504, 72)])
def test_many_latents(array: Library, latent: int, rope: int) -> None:
    check_mla(array, latent, rope, blocks=8, slots=np.random.default_rng(0).permutation(128))


@pytest.mark.parametrize("where", ["number", "host", "with the arrays"])
def test_mla_scales(array: Library, where: str) -> None:
    as_scale = {"number": float, "host": np.atleast_1d, "with the arrays": lambda x: array.input(np.atleast_1d(x))}
    check_mla(array, as_scale=as_scale[where])


@pytest.mark.parametrize("tokens", [160, 250, 350])
def test_mla_many_blocks(array: Library, tokens: int) -> None:
    """On a GPU a thread takes one, two or four tokens, by the blocks of them all."""
    slots = inputs.slot_mapping(np.random.default_rng(tokens), "sequences", tokens, Sizes(blocks=23))
    check_mla(array, 16384 if array.device == "cuda" else 1024, 64, slots=slots, blocks=23)


def test_errors() -> None:
    c, pe = np.zeros((4, 512), np.float16), np.zeros((4, 64), np.float16)
    with pytest.raises(ValueError, match=r"kv_cache: dimension 2 must equal .* \* 9 / 16 = 324, got shape"):
        pykv.concat_and_cache_mla(c, pe, np.zeros((3, 8, 576), np.uint8), np.arange(4), "nvfp4")
    with pytest.raises(ValueError, match=r"kv_cache: nvfp4 needs a head size \(MLA: an entry\)"):
        pykv.concat_and_cache_mla(c, pe[:, :32], np.zeros((3, 8, 306), np.uint8), np.arange(4), "nvfp4")
