"""A cache that is copied or pickled is a whole one, in the same layout."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from paged_kv_cache.late_copies import copy_late
from paged_kv_cache.tokens import LAYOUTS, read_tokens, write_tokens

import pykv

WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda kv: pickle.loads(pickle.dumps(kv))}


def fill(kv, seq, values):
    write_tokens(kv, kv.append([seq], len(values)), values)


def new_cache(layout="NHD", like=None, **more):
    sizes = {"num_kv_heads": 3, "head_size": 16, "dtype": "float32", "prefix_caching": True} | more
    return pykv.PagedKVCache(2, 8, 4, layout=layout, like=like, num_host_blocks=4, **sizes)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("way", WAYS)
def test_there_are_two_caches_then(way, layout, library, tmp_path):
    kv = new_cache(layout, np if library == "numpy" else pytest.importorskip("torch"))
    fill(kv, 1, list(range(6)))
    kv.fork(1, 2)
    fill(kv, 3, list(range(30, 38)))
    kv.commit_prefix(3, list(range(8)), salt="a")
    fill(kv, 4, [40, 41])
    kv.swap_out([4])
    other = WAYS[way](kv)
    assert other.layout == kv.layout == layout
    for a, b in zip([*kv.key_caches, *kv.value_caches], [*other.key_caches, *other.value_caches], strict=True):
        assert type(a) is type(b)
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        strides = [x.stride() if library == "torch" else x.strides for x in (a, b)]
        assert strides[0] == strides[1]
    fill(kv, 1, [-1])  # which the other one does not see
    kv.free([3])
    fill(other, 2, [60])
    other.swap_in([4])
    assert read_tokens(other, 1) == list(range(6))
    assert read_tokens(other, 2) == [0, 1, 2, 3, 4, 5, 60]
    assert read_tokens(other, 4) == [40, 41]
    assert other.reuse_prefix(5, list(range(9)), salt="a") == 8
    assert read_tokens(other, 5) == list(range(30, 38))
    assert read_tokens(kv, 1) == [0, 1, 2, 3, 4, 5, -1]
    assert (other.num_free_blocks, kv.num_free_blocks, kv.is_swapped_out(4)) == (2, 5, True)
    for layer_caches in (other.key_caches, other.value_caches):
        assert len(layer_caches) == 2
    other.save(tmp_path / "a", [2])
    third = new_cache("NHD")
    third.load(tmp_path / "a")
    assert read_tokens(third, 2) == [0, 1, 2, 3, 4, 5, 60]


def test_what_nobody_can_read_is_not_copied():
    kv = new_cache()
    fill(kv, 1, [7] * 32)
    kv.free([1])
    assert not any(cache.any() for cache in copy.copy(kv).key_caches)
    assert len(pickle.dumps(kv)) < 5000


def test_copies_under_way_are_waited_for():
    kv = new_cache()
    side = copy_late(kv)
    fill(kv, 1, list(range(8)))
    kv.swap_out([1])
    del kv._copy  # which cannot be pickled
    other = copy.copy(kv)
    assert not side.waiting
    other.swap_in([1])
    assert read_tokens(other, 1) == list(range(8))


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_bits_stay(layout, dtype):
    kv = new_cache(layout, dtype=dtype, head_size=64)
    rng = np.random.default_rng(0)
    for cache in [*kv.key_caches, *kv.value_caches]:
        bits = cache.view(np.uint8)
        bits[...] = rng.integers(256, size=bits.shape)
    kv.append([1], 32)
    other = pickle.loads(pickle.dumps(kv))
    for a, b in zip([*kv.key_caches, *kv.value_caches], [*other.key_caches, *other.value_caches], strict=True):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))
        assert a.strides == b.strides
