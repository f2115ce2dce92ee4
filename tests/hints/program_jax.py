"""What a user of JAX writes, for type checkers; it is never run."""

from __future__ import annotations

import jax
from typing_extensions import assert_type

import pykv
import pykv.jax


def step(query: jax.Array, cache: jax.Array, slots: jax.Array, lens: jax.Array) -> jax.Array:
    keys, values = pykv.jax.reshape_and_cache_flash(query, query, cache, cache, slots)
    out, lse = pykv.jax.paged_attention(query, keys, values, slots, lens, lse=True)
    assert_type(lse, jax.Array)
    assert_type(pykv.jax.paged_attention(query, keys, values, slots, lens), jax.Array)
    assert_type(pykv.jax.copy_blocks([keys], [values], slots), tuple[list[jax.Array], list[jax.Array]])
    assert_type(pykv.jax.layer_norm(out, None, None), jax.Array)
    assert_type(pykv.jax.layer_norm(out, None, None, residual=out), tuple[jax.Array, jax.Array])
    assert_type(pykv.jax.layer_norm(out, None, None, 1e-5, out), tuple[jax.Array, jax.Array])
    assert_type(pykv.jax.rotary_embedding(slots, query, None, 64, cache, True), jax.Array)
    assert_type(pykv.jax.rotary_embedding(slots, query, query, 64, cache, True), tuple[jax.Array, jax.Array])
    pykv.rms_norm(out, out, None)
    pykv.jax.swap_blocks(out)  # wrong
    pykv.jax.rms_norm(out, out, None)  # wrong
    return out
