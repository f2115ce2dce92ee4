"""Swapping on a GPU: nobody waits on the host, and everybody on the device who has to."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from paged_kv_cache.gpu import held, new_stream, on, pointer_of, to_host

import pykv

LAYERS = 2


def synchronize(module):
    (module.cuda.synchronize if module.__name__ == "torch" else module.cuda.Device().synchronize)()


def new_cache(module, num_blocks=8, num_host_blocks=8, layout="NHD"):
    return pykv.PagedKVCache(
        LAYERS,
        num_blocks,
        256,
        8,
        128,
        "float16",
        layout,
        like=module,
        device="cuda:0",
        num_host_blocks=num_host_blocks,
    )


def caches(kv):
    return [*kv.key_caches, *kv.value_caches]


def fill(kv, seq, value):
    """Blocks of a sequence get numbers: value, value + 1, ..., and each cache an offset."""
    for place, block in enumerate(to_host(kv.block_tables([seq]))[0].tolist()):
        for layer, cache in enumerate(caches(kv)):
            cache[block] = value + place + 100 * layer


def values(kv, seq):
    blocks = to_host(kv.block_tables([seq]))[0].tolist()
    found = [[to_host(cache[block]) for block in blocks] for cache in caches(kv)]
    for layer, cache in enumerate(found):
        for first, other in zip(found[0], cache, strict=True):
            assert (first == first.flat[0]).all()
            # flat: packed keys and packed values are of different shapes
            np.testing.assert_array_equal(other.reshape(-1), first.reshape(-1) + np.float16(100 * layer))
    return [block.flat[0] for block in found[0]]


def load_kernels(kv):
    """A kernel is loaded, or compiled, when it is first used: that takes long, and may wait for the device."""
    fill(kv, 1, 5)
    for cache in caches(kv):
        cache[...] = -2
    kv.swap_out([1])
    kv.swap_in([1])


@pytest.mark.parametrize("layout", ["NHD", "HND", "packed"])
def test_there_and_back(module, layout):
    kv = new_cache(module, layout=layout)
    kv.append([1, 2], [700, 300])
    fill(kv, 1, 1)
    fill(kv, 2, 20)
    kv.fork(1, 3)
    kv.swap_out([3, 1])
    kv.append([4], 6 * 256)  # all that is free, taken at once
    fill(kv, 4, 50)
    kv.free([4])
    kv.swap_in([1, 3])
    assert values(kv, 1) == values(kv, 3) == [1, 2, 3]
    assert values(kv, 2) == [20, 21]
    assert kv.num_free_blocks == 3
    assert kv.num_free_host_blocks == 8


@pytest.mark.parametrize("how", ["current", "object", "pointer"])
def test_copies_wait_for_the_stream_and_the_host_for_nobody(module, how):
    """What is written before swap_out arrives, and whoever takes the blocks does not come too early."""
    kv = new_cache(module)
    kv.append([1], 8 * 256)
    load_kernels(kv)
    synchronize(module)
    stream = new_stream(module)
    argument = {"object": stream, "pointer": pointer_of(stream)}
    with held(stream):
        with on(module, stream):
            for block in range(8):
                for layer, cache in enumerate(caches(kv)):
                    cache[block] = block + 1 + 100 * layer
            table = kv.block_tables([1])
        if how == "current":
            with on(module, stream):
                kv.swap_out([1])
                kv.append([2], 8 * 256)
        else:
            kv.swap_out([1], stream=argument[how])
            kv.append([2], 8 * 256, stream=argument[how])
        with on(module, stream):
            for cache in caches(kv):
                cache[...] = -1  # by the new owner of the blocks
    kv.free([2])
    if how == "current":
        kv.swap_in([1])
    else:
        kv.swap_in([1], stream=argument[how])
    expected = [1 + block for block in to_host(table)[0].tolist()]
    assert values(kv, 1) == expected


def test_a_sequence_that_comes_back_is_waited_for(module):
    """A large sequence: its copies take far longer than the host takes to ask for it."""
    kv = new_cache(module, num_blocks=512, num_host_blocks=512)
    kv.append([1], 400 * 256)
    fill(kv, 1, 1)
    kv.swap_out([1])
    synchronize(module)
    for cache in caches(kv):
        cache[...] = -1
    kv.swap_in([1])
    copies = [cache[to_host(kv.block_tables([1]))[0].tolist()] for cache in caches(kv)]  # on the current stream
    for layer, copy in enumerate(copies):
        found = to_host(copy).reshape(400, -1)
        expected = np.arange(1, 401, dtype=np.float16)[:, None] + np.float16(100 * layer)
        np.testing.assert_array_equal(found, np.broadcast_to(expected, found.shape))


def test_other_sequences_need_not_wait(module):
    """Work of another sequence goes on while copies are held up: those blocks are not touched by them."""
    kv = new_cache(module, num_blocks=16)
    kv.append([1, 2], 256)
    load_kernels(kv)
    stream, other = new_stream(module), new_stream(module)
    synchronize(module)
    with held(stream):
        kv.swap_out([1], stream=stream)
        kv.append([2], 256, stream=other)
        kv.block_tables([2], stream=other)
        other.synchronize()


def test_blocks_go_around(module):
    """Both pools are too small for all sequences; whoever swaps is asked to give back what it got."""
    rng = np.random.default_rng(0)
    kv = new_cache(module, num_blocks=9, num_host_blocks=12)
    expected = {}
    for turn in range(200):
        seq = int(rng.integers(8))
        try:
            if seq not in kv:
                kv.append([seq], int(rng.integers(1, 4)) * 256)
                fill(kv, seq, turn)
                expected[seq] = [turn + i for i in range(len(to_host(kv.block_tables([seq]))[0]))]
            elif kv.is_swapped_out(seq):
                kv.swap_in([seq])
                if rng.random() < 0.3:
                    kv.swap_out([seq])  # at once
            elif rng.random() < 0.2:
                kv.free([seq])
            else:
                kv.swap_out([seq])
        except pykv.OutOfBlocks:
            continue
        for known in range(8):
            if known in kv and not kv.is_swapped_out(known) and rng.random() < 0.3:
                assert values(kv, known) == expected[known]


def test_a_cache_may_go_while_copies_are_under_way(module):
    for _ in range(3):
        kv = new_cache(module, num_blocks=256, num_host_blocks=256)
        kv.append([1], 256 * 256)
        kv.swap_out([1])
        del kv
        gc.collect()
    synchronize(module)
