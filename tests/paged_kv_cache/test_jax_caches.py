"""Caches in JAX: handed out to a jitted step that takes them over, and taken back."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
from paged_kv_cache.tokens import token_view

import pykv

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402

import pykv.jax  # noqa: E402


@partial(jax.jit, donate_argnums=(1, 2), static_argnums=4)
def step(values, keys, others, slots, packed):
    write = pykv.jax.reshape_and_cache if packed else pykv.jax.reshape_and_cache_flash
    tokens = jnp.broadcast_to(values[:, None, None], (len(values), 2, 8)).astype(keys[0].dtype)
    both = [
        write(tokens + i, -(tokens + i), key, value, slots)
        for i, (key, value) in enumerate(zip(keys, others, strict=True))
    ]
    return [key for key, _ in both], [value for _, value in both]


def new_cache(layout="NHD", dtype="float32", like=jax, num_blocks=8):
    return pykv.PagedKVCache(2, num_blocks, 4, 2, 8, dtype, layout, like, num_host_blocks=4, prefix_caching=True)


def fill(kv, seq, values):
    slots = kv.append([seq], len(values))
    assert type(slots) is np.ndarray
    kv.replace_caches(*step(jnp.array(values), kv.key_caches, kv.value_caches, slots, kv.layout == "packed"))


def read(kv, seq):
    table, length = kv.block_tables([seq])[0], int(kv.seq_lens([seq])[0])
    found = []
    for caches, sign in ((kv.key_caches, 1), (kv.value_caches, -1)):
        for layer, cache in enumerate(caches):
            tokens = token_view(np.asarray(cache).astype(np.float32), kv.layout)[table].reshape(-1, 16)[:length]
            assert (tokens == tokens[:, :1]).all()
            found.append((sign * tokens[:, 0] - layer).tolist())
    assert all(other == found[0] for other in found)
    return found[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_all_that_a_cache_does(layout, dtype, tmp_path):
    kv = new_cache(layout, dtype)
    assert kv.layout == layout
    fill(kv, 1, list(range(6)))
    kv.fork(1, 2)
    kv.fork(1, 3)
    before = kv.key_caches
    fill(kv, 2, [60, 61])  # its last block is copied first
    assert before[0].is_deleted(), "the old memory was not taken over"
    assert read(kv, 1) == list(range(6))
    assert read(kv, 2) == [0, 1, 2, 3, 4, 5, 60, 61]
    kv.commit_prefix(2, list(range(8)))
    kv.swap_out([1, 3])
    fill(kv, 9, [99] * 20)
    kv.free([9])
    kv.swap_in([3])
    assert read(kv, 3) == list(range(6))
    kv.save(tmp_path / "a", [2, 3])
    other = new_cache("packed" if layout == "NHD" else "NHD", dtype)
    other.load(tmp_path / "a", [5, 6])
    assert read(other, 5) == read(kv, 2)
    third = copy.copy(kv)
    assert (third.layout, read(third, 2)) == (layout, read(kv, 2))
    assert isinstance(third.key_caches[0], jax.Array)
    assert third.reuse_prefix(7, list(range(8))) == 8


def test_tables_of_one_shape_are_compiled_once():
    kv = new_cache(num_blocks=32)
    traced = []

    @jax.jit
    def blocks(tables):
        traced.append(tables.shape)
        return (tables >= 0).sum()

    for count in range(1, 5):
        kv.append([1, 2], 5)
        assert blocks(kv.block_tables([1, 2], width=8)) == 2 * -(-5 * count // 4)
    assert traced == [(2, 8)]


def test_where_the_arrays_live():
    for like, device in ((jax, None), (jnp, None), (jnp.zeros(1), None), (jax, "cpu:0"), (jnp, jax.devices("cpu")[0])):
        kv = pykv.PagedKVCache(1, 2, 4, 1, 8, "float16", like=like, device=device)
        assert kv.key_caches[0].dtype == np.float16
        assert device is None or kv.key_caches[0].devices() == {jax.devices("cpu")[0]}


def test_errors():
    with pytest.raises(ValueError, match=r"^PagedKVCache: layout: JAX arrays have no strides, .* got 'HND'$"):
        new_cache("HND")
    kv = new_cache()
    fill(kv, 1, [1, 2])
    keys, values = kv.key_caches, kv.value_caches
    for arguments, text in (
        ((keys[:1], values), r"key_caches: must be 2 arrays, one for a layer, got 1"),
        (
            (keys, [values[0], values[1][:4]]),
            r"value_caches: layer 1 must be like .* float32 \[8, .*, got float32 \[4, ",
        ),
        ((keys, [values[0], values[1].astype("float16")]), r"value_caches: layer 1 must be like .* got float16 \[8, "),
        (([None, keys[1]], values), r"key_caches: layer 0 must be like .* got NoneType"),
        (([np.asarray(key) for key in keys], values), r"key_caches: layer 0 must be like "),
    ):
        with pytest.raises(ValueError, match=f"^replace_caches: {text}"):
            kv.replace_caches(*arguments)
    assert read(kv, 1) == [1, 2]


def test_arrays_of_numpy_can_be_replaced_by_others_with_their_strides():
    kv = pykv.PagedKVCache(1, 2, 4, 2, 8, "float32", "HND")
    mine = [np.zeros((2, 2, 4, 8), np.float32).swapaxes(1, 2) for _ in range(2)]
    kv.replace_caches(mine[:1], mine[1:])
    assert kv.key_caches[0] is mine[0]
    with pytest.raises(ValueError, match=r"with strides \[256, 32, 128, 4\], got .* with strides \[256, 64, 32, 4\]$"):
        kv.replace_caches([np.zeros((2, 4, 2, 8), np.float32)], mine[1:])
