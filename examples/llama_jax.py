"""The model of llama.py for JAX: a step is one function of weights, batch and caches, compiled by `jax.jit`.

JAX arrays are immutable, so the caches go into the step and come out of it; donated, they are the same memory, and
`PagedKVCache.replace_caches` takes them back.  A new shape is compiled anew: batches are padded up to powers of two, so
that there are few.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import Array, Host, JaxArrays
from llama import Batch, Config, Layer, Llama

import pykv.jax

LEAST = 8  # no padded size is smaller
ops: Any = pykv.jax  # its functions are made when it is imported

jax.tree_util.register_dataclass(Batch, [f.name for f in fields(Batch)], [])
jax.tree_util.register_dataclass(Layer, [f.name for f in fields(Layer) if f.name != "window"], ["window"])


class JaxLlama(Llama):
    def __init__(self, folder: Path, arrays: JaxArrays):
        super().__init__(folder, arrays)
        self.weights = {
            "embedding": self.embedding,
            "head": self.head,
            "norm": self.norm,
            "cos_sin": jax.device_put(self.cos_sin, arrays.device),
        }

    def forward(self, batch: Batch, cache: pykv.PagedKVCache) -> Array:
        logits, keys, values = _step(
            self.config, cache.kv_cache_dtype, self.weights, self.layers, _padded(batch),
            cache.key_caches, cache.value_caches,
        )  # fmt: skip
        cache.replace_caches(keys, values)
        return logits[: len(batch.wanted)]


def _padded(batch: Batch) -> Batch:
    """Tokens without a slot that belong to no sequence, sequences without tokens, rows of logits that nobody wants."""
    tokens, sequences, blocks = (_power_of_two(n) for n in (len(batch.tokens), *batch.block_tables.shape))
    wanted = _power_of_two(len(batch.wanted))

    def pad(x: Host, size: int, value: int = 0) -> Host:
        return np.pad(x, (0, size - len(x)), constant_values=value).astype(np.int32)

    tables = np.full((sequences, blocks), -1, np.int32)
    tables[: len(batch.block_tables), : batch.block_tables.shape[1]] = batch.block_tables
    return Batch(
        tokens=pad(batch.tokens, tokens),
        positions=pad(batch.positions, tokens),
        slots=pad(batch.slots, tokens, -1),
        cu_query_lens=pad(batch.cu_query_lens, sequences + 1, len(batch.tokens)),
        seq_lens=pad(batch.seq_lens, sequences),
        block_tables=tables,
        wanted=pad(batch.wanted, wanted),
    )


def _power_of_two(n: int) -> int:
    return max(LEAST, 1 << (n - 1).bit_length())


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(5, 6))
def _step(
    c: Config,
    kv_cache_dtype: str,
    weights: dict[str, Array],
    layers: list[Layer],
    batch: Batch,
    keys: list[Array],
    values: list[Array],
) -> tuple[Array, list[Array], list[Array]]:
    """Logits of the wanted tokens, and the caches with the batch's keys and values."""
    keys, values = list(keys), list(values)
    residual = weights["embedding"][batch.tokens]
    x = ops.rms_norm(residual, layers[0].input_norm, c.epsilon)
    for i, layer in enumerate(layers):
        qkv = _product(x, layer.qkv).reshape(len(x), -1, c.head_size)
        query, key, value = jnp.split(qkv, [c.num_heads, c.num_heads + c.num_kv_heads], axis=1)
        if c.qk_norm:
            query = ops.rms_norm(query, layer.q_norm, c.epsilon)
            key = ops.rms_norm(key, layer.k_norm, c.epsilon)
        query, key = ops.rotary_embedding(batch.positions, query, key, c.head_size, weights["cos_sin"], True)
        keys[i], values[i] = ops.reshape_and_cache_flash(key, value, keys[i], values[i], batch.slots, kv_cache_dtype)
        attended = ops.paged_attention(
            query, keys[i], values[i], batch.block_tables, batch.seq_lens,
            cu_query_lens=batch.cu_query_lens, window=layer.window, kv_cache_dtype=kv_cache_dtype,
        )  # fmt: skip
        x = _product(attended.reshape(len(x), -1), layer.out)
        x, residual = ops.fused_add_rms_norm(x, residual, layer.mlp_norm, c.epsilon)
        x = _product(ops.silu_and_mul(_product(x, layer.gate_up)), layer.down)
        next_norm = layers[i + 1].input_norm if i + 1 < len(layers) else weights["norm"]
        x, residual = ops.fused_add_rms_norm(x, residual, next_norm, c.epsilon)
    return _product(x[batch.wanted], weights["head"]), keys, values


def _product(x: Array, matrix: Array) -> Array:
    return jnp.matmul(x, matrix.T, precision="highest")  # fp32 as such
