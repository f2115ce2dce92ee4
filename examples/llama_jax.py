"""The model of llama.py for JAX: a step is one function of weights, batch and caches, compiled by `jax.jit`.

JAX arrays are immutable, so the caches go into the step and come out of it; donated, they are the same memory, and
`PagedKVCache.replace_caches` takes them back.  A new shape is compiled anew: batches are padded up to powers of two, so
that there are few.
"""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from arrays import Array, JaxArrays
from families import Config, LayerConfig
from llama import Layer, Llama, Weights, forward
from steps import FUSED_ADD, Batch, Linear, Norm, Steps

import pykv.jax

LEAST = 8  # no padded size is smaller
ops: Any = pykv.jax  # its functions are made when it is imported

for kind in (Batch, Layer, Weights):
    jax.tree_util.register_dataclass(kind, [f.name for f in fields(kind)], [])


class JaxLlama(Llama):
    def __init__(self, config: Config, weights: Weights, arrays: JaxArrays):
        tables = {kind: jax.device_put(table, arrays.device) for kind, table in weights.rope.items()}
        super().__init__(config, replace(weights, rope=tables), arrays)

    def forward(self, batch: Batch, cache: pykv.PagedKVCache) -> Array:
        logits, keys, values = _step(
            self.config, cache.kv_cache_dtype, self.weights, _padded(batch), cache.key_caches, cache.value_caches
        )
        cache.replace_caches(keys, values)
        return logits[: len(batch.wanted)]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=(4, 5))
def _step(
    config: Config, kv_cache_dtype: str, weights: Weights, batch: Batch, keys: list[Array], values: list[Array]
) -> tuple[Array, list[Array], list[Array]]:
    return forward(config, PureSteps(config, kv_cache_dtype), weights, batch, keys, values)


class PureSteps(Steps):
    def __init__(self, config: Config, kv_cache_dtype: str):
        self._c, self._kv_cache_dtype = config, kv_cache_dtype

    def rows(self, table: Array, ids: Array) -> Array:
        return table[ids]

    def scale(self, x: Array, factor: float) -> Array:
        return x * factor

    def softcap(self, x: Array, cap: float) -> Array:
        return jnp.tanh(x / cap) * cap

    def linear(self, x: Array, weights: Linear) -> Array:
        matrix, bias = weights
        product = jnp.matmul(x, matrix.T, precision="highest")  # fp32 as such
        return product if bias is None else product + bias

    def norm(self, x: Array, weights: Norm) -> Array:
        return getattr(ops, self._c.norm)(x, *weights, self._c.epsilon)

    def add_norm(self, x: Array, residual: Array, weights: Norm) -> tuple[Array, Array]:
        if self._c.norm == "layer_norm":
            x, residual = ops.layer_norm(x, *weights, self._c.epsilon, residual)
        else:
            x, residual = getattr(ops, FUSED_ADD[self._c.norm])(x, residual, *weights, self._c.epsilon)
        return x, residual

    def activate(self, x: Array) -> Array:
        return getattr(ops, self._c.activation)(x)

    def rotate_and_cache(
        self, batch: Batch, query: Array, key: Array, value: Array, table: Array | None, caches: tuple[Array, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        kind = self._kv_cache_dtype
        if table is None:
            return query, ops.reshape_and_cache_flash(key, value, *caches, batch.slots, kind)
        query, _, *caches = ops.rotary_and_cache(
            batch.positions, query, key, value, table, self._c.is_neox, *caches, batch.slots, kind
        )
        return query, tuple(caches)

    def attend(self, batch: Batch, query: Array, caches: tuple[Array, Array], layer: LayerConfig) -> Array:
        return ops.paged_attention(query, *caches, batch.block_tables, batch.seq_lens, **self._options(batch, layer))


def _padded(batch: Batch) -> Batch:
    """Tokens without a slot that belong to no sequence, sequences without tokens, rows of logits that nobody wants."""
    tokens, sequences, blocks = (_power_of_two(n) for n in (len(batch.tokens), *batch.block_tables.shape))
    wanted = _power_of_two(len(batch.wanted))

    def pad(x: Array, size: int, value: int = 0) -> Array:
        pad = np.pad if isinstance(x, np.ndarray) else jnp.pad  # tokens may be on the device, not computed yet
        return pad(x, (0, size - len(x)), constant_values=value).astype(np.int32)

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
