"""What another kernel left in shared memory is not taken for this one's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.inputs import KINDS, Sizes
from libraries import Cupy
from tolerance import assert_attention

FILL = r"""
extern "C" __global__ void fill(unsigned even, unsigned odd, int words) {
  extern __shared__ volatile unsigned memory[];
  for (int i = threadIdx.x; i < words; i += blockDim.x) memory[i] = i % 2 ? odd : even;
}
"""
LEAST, MOST, NAN = 0x80000000, 0x7FFFFFFF, 0x7FC07FC0


def fill_shared_memory(cupy: Any, even: int, odd: int) -> None:
    """Of all SMs, word by word."""
    limits = cupy.cuda.Device().attributes
    num_bytes = limits["MaxSharedMemoryPerBlockOptin"]
    kernel = cupy.RawKernel(FILL, "fill")
    kernel.max_dynamic_shared_size_bytes = num_bytes
    grid = (8 * limits["MultiProcessorCount"],)
    kernel(grid, (256,), (np.uint32(even), np.uint32(odd), num_bytes // 4), shared_mem=num_bytes)


@pytest.mark.parametrize("words", [(LEAST, MOST), (MOST, LEAST), (NAN, NAN)], ids=["up", "down", "NaN"])
@pytest.mark.parametrize("room", [0, 10_000], ids=["", "long tables"])
@pytest.mark.parametrize(("queries", "group"), [(1, 4), (1, 16), (2, 4), (4, 4), (3, 5), (8, 4), (16, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_memory(cupy: Any, kind: str, queries: int, group: int, room: int, words: tuple[int, int]) -> None:
    lens = [(queries, n) for n in (70, 16, 330, 129)]
    sizes = Sizes(4 * group, 4, 128)
    b = inputs.batch(np.random.default_rng(0), lens, sizes, kind=kind, decode=queries == 1, room=room)
    array = Cupy()
    out = array.output(inputs.outputs(b)[0])
    want, _ = inputs.expected(b)
    fill_shared_memory(cupy, *words)
    inputs.run(array, b, out)
    assert_attention(array.numpy(out), want)
