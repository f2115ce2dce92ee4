"""What copy_blocks_mla adds to copy_blocks: layers of one cache."""

from __future__ import annotations

import numpy as np
import pytest
from cache import inputs, reference
from libraries import Library

import pykv

INDEPENDENT = np.array([[0, 5], [1, 6], [7, 2], [1, 9]])
IN_ORDER = np.array([[0, 1], [1, 2], [2, 2], [2, 0], [4, 1]])


@pytest.mark.parametrize("width", [576, 656, 7])
@pytest.mark.parametrize("dtype", [np.float16, np.uint8])
@pytest.mark.parametrize("on_device", [False, True])
def test_layers(array: Library, on_device: bool, dtype: type, width: int) -> None:
    """Blocks of layers in turn: a block is not as long as the way to the next one."""
    for layers in (1, 3):
        expected = inputs.bits(np.random.default_rng(0), (10, layers, 16, width), np.dtype(dtype))
        memory = array.output(expected)
        caches = [inputs.view(memory, lambda m, i=i: m[:, i]) for i in range(layers)]
        for mapping in [INDEPENDENT] if on_device else [INDEPENDENT, IN_ORDER]:
            reference.copy_blocks([expected[:, i] for i in range(layers)], mapping)
            pykv.copy_blocks_mla(caches, array.input(mapping) if on_device else mapping)
        np.testing.assert_array_equal(array.numpy(memory).view(np.uint8), expected.view(np.uint8))


def test_nothing_to_do(array: Library) -> None:
    pykv.copy_blocks_mla([], INDEPENDENT)
    cache = np.ones((10, 4), np.float16)
    actual = array.output(cache)
    pykv.copy_blocks_mla([actual], np.zeros((0, 2), np.int64))
    np.testing.assert_array_equal(array.numpy(actual), cache)


def test_a_block_out_of_range(array: Library) -> None:
    actual = array.output(np.ones((10, 4), np.float16))
    with pytest.raises(
        ValueError, match=r"^copy_blocks_mla: block_mapping: row 1: destination block 10 is out of range"
    ):
        pykv.copy_blocks_mla([actual], np.array([[0, 1], [2, 10]]))
    if array.device == "cuda":
        with array.reports(r"^copy_blocks_mla: block_mapping: 10 is out of range \[0, 10\); it was not used$"):
            pykv.copy_blocks_mla([actual], array.input(np.array([[0, 1], [2, 10]])))


def test_errors() -> None:
    cache = np.zeros((10, 4), np.float32)
    with pytest.raises(ValueError, match=r"^copy_blocks_mla: kv_caches: dimension 0 must equal num_blocks = 10"):
        pykv.copy_blocks_mla([cache, cache[:9]], INDEPENDENT)
    with pytest.raises(TypeError, match=r"^copy_blocks_mla: kv_caches: a list or tuple of arrays is required"):
        pykv.copy_blocks_mla(cache, INDEPENDENT)  # type: ignore[arg-type]
