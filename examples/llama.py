"""Llama and its relatives (families.py) from a checkpoint, one ragged batch at a time over a paged KV cache.

pykv does all but the matrix products and the embedding lookup, which the array library does (see arrays.py).
JAX, whose arrays are immutable, compiles the same `forward` (llama_jax.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from arrays import Array, Host, JaxArrays, NumpyArrays
from checkpoint import Checkpoint, open_folder
from families import Config, Family, read_config, rope_tables
from steps import Batch, Linear, Norm, Steps

import pykv


@dataclass
class Layer:
    attention_norm: Norm | None
    qkv: Linear  # [(heads + 2 * kv heads) * head size, hidden]
    q_norm: Norm | None
    k_norm: Norm | None
    out: Linear  # [hidden, heads * head size]
    attention_out_norm: Norm | None
    mlp_norm: Norm | None
    gate_up: Linear  # [2 * intermediate, hidden], or [intermediate, hidden] where there is no gate
    down: Linear  # [hidden, intermediate]
    mlp_out_norm: Norm | None


@dataclass
class Weights:
    embedding: Array  # [vocabulary, hidden]
    layers: list[Layer]
    norm: Norm
    head: Array  # [vocabulary, hidden]
    rope: dict[str, Array]  # float32 [positions, rotated elements], by kind of attention


def forward(
    c: Config, steps: Steps, weights: Weights, batch: Batch, keys: list[Array], values: list[Array]
) -> tuple[Array, list[Array], list[Array]]:
    """The logits [N, vocabulary] of the wanted tokens, and the caches of all layers with what the batch adds."""

    def enter(x: Array | None, residual: Array, norm: Norm | None) -> tuple[Array, Array]:
        """What comes next computes with x; what comes of it is added to the residual."""
        if norm is None:
            residual = residual if x is None else residual + x
            return residual, residual
        return (steps.norm(residual, norm), residual) if x is None else steps.add_norm(x, residual, norm)

    keys, values = list(keys), list(values)
    x, residual = None, steps.rows(weights.embedding, batch.tokens)  # [T, hidden]
    if c.embedding_scale != 1:
        residual = steps.scale(residual, c.embedding_scale)
    for i, (layer, about) in enumerate(zip(weights.layers, c.layers, strict=True)):
        x, residual = enter(x, residual, layer.attention_norm)
        query, key, value = _heads(c, steps, layer, x)
        table = weights.rope[about.rope] if about.rope else None
        caches = keys[i], values[i]
        query, caches = steps.rotate_and_cache(batch, query, key, value, table, caches)
        attended = steps.attend(batch, query, caches, about)
        keys[i], values[i] = caches
        x = steps.linear(attended.reshape(len(x), -1), layer.out)
        if layer.attention_out_norm is not None:
            x = steps.norm(x, layer.attention_out_norm)

        x, residual = enter(x, residual, layer.mlp_norm)
        x = steps.linear(steps.activate(steps.linear(x, layer.gate_up)), layer.down)
        if layer.mlp_out_norm is not None:
            x = steps.norm(x, layer.mlp_out_norm)
    x, _ = enter(x, residual, weights.norm)
    logits = steps.linear(steps.rows(x, batch.wanted), (weights.head, None))
    return (logits if c.logit_softcap is None else steps.softcap(logits, c.logit_softcap)), keys, values


def _heads(c: Config, steps: Steps, layer: Layer, x: Array) -> tuple[Array, Array, Array]:
    """Queries, keys and values, [T, heads, head size] each: views, for pykv takes them with their strides."""
    qkv = steps.linear(x, layer.qkv).reshape(len(x), -1, c.head_size)
    query, key = qkv[:, : c.num_heads], qkv[:, c.num_heads : c.num_heads + c.num_kv_heads]
    if layer.q_norm is not None and layer.k_norm is not None:
        flat = (len(x), -1) if c.qk_norm == "row" else (len(x), -1, c.head_size)
        query = steps.norm(query.reshape(flat), layer.q_norm).reshape(query.shape)
        key = steps.norm(key.reshape(flat), layer.k_norm).reshape(key.shape)
    return query, key, qkv[:, c.num_heads + c.num_kv_heads :]


class Llama:
    def __init__(self, config: Config, weights: Weights, arrays: NumpyArrays):
        self.config, self.weights, self.arrays = config, weights, arrays

    def make_cache(self, num_blocks: int, block_size: int = 16, kv_dtype: str = "auto") -> pykv.PagedKVCache:
        c, a = self.config, self.arrays
        dtype = a.dtype if kv_dtype == "auto" else kv_dtype
        return pykv.PagedKVCache(
            len(c.layers), num_blocks, block_size, c.num_kv_heads, c.head_size, dtype, like=self.weights.embedding
        )

    def forward(self, batch: Batch, cache: pykv.PagedKVCache) -> Array:
        """Puts the batch's keys and values into the cache; returns the logits of the wanted tokens."""
        steps = Steps(self.arrays, self.config, cache.kv_cache_dtype)
        return forward(self.config, steps, self.weights, batch, cache.key_caches, cache.value_caches)[0]


def open_model(folder: Path, arrays: NumpyArrays, longest: int | None = None) -> Llama:
    """The model of a folder, see `make_model`."""
    return make_model(open_folder(folder), arrays, longest)


def make_model(checkpoint: Checkpoint, arrays: NumpyArrays, longest: int | None = None) -> Llama:
    """The model in the form that suits the array library, for sequences of at most ``longest`` tokens."""
    family, config = read_config(checkpoint.keys, longest)
    tables = rope_tables(checkpoint.keys, family, config)
    weights = _Loader(checkpoint, arrays, family, config).weights(tables)
    checkpoint.refuse_the_rest()
    if isinstance(arrays, JaxArrays):
        from llama_jax import JaxLlama

        return JaxLlama(config, weights, arrays)
    return Llama(config, weights, arrays)


class _Loader:
    def __init__(self, checkpoint: Checkpoint, arrays: NumpyArrays, family: Family, config: Config):
        self._checkpoint, self._a, self._family, self._c = checkpoint, arrays, family, config

    def weights(self, tables: dict[str, Host]) -> Weights:
        c, a = self._c, self._a
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        tied, shape = self._checkpoint.is_tied(embedding, head), (c.vocab_size, c.hidden_size)
        table = a.matrix(self._checkpoint.tensor(embedding, *shape))
        return Weights(
            embedding=table,
            layers=[self._layer(f"model.layers.{i}") for i in range(len(c.layers))],
            norm=self._norm("model.norm", c.hidden_size, c.logit_scale),
            head=table if tied else a.matrix(self._checkpoint.tensor(head, *shape)),
            rope={kind: a.put(table) for kind, table in tables.items()},
        )

    def _layer(self, name: str) -> Layer:
        c, f = self._c, self._family
        hidden, inner, size = c.hidden_size, c.intermediate_size, c.head_size
        queries, keys = c.num_heads * size, c.num_kv_heads * size

        def norm(name_of_norm: str | None, width: int = hidden) -> Norm | None:
            return self._norm(f"{name}.{name_of_norm}", width) if name_of_norm else None

        q_norm, k_norm = ("self_attn.q_norm", "self_attn.k_norm") if c.qk_norm else (None, None)
        return Layer(
            attention_norm=norm(f.attention_norm),
            qkv=self._linear(name, f.qkv, hidden, [queries, keys, keys]),
            q_norm=norm(q_norm, queries if c.qk_norm == "row" else size),
            k_norm=norm(k_norm, keys if c.qk_norm == "row" else size),
            out=self._linear(name, ("self_attn.o_proj",), queries, [hidden], c.residual_scale),
            attention_out_norm=norm(f.attention_out_norm),
            mlp_norm=norm(f.mlp_norm),
            gate_up=self._linear(name, f.gate_up, hidden, [inner] * (1 + c.has_gate)),
            down=self._linear(name, (f.down,), inner, [hidden], c.residual_scale),
            mlp_out_norm=norm(f.mlp_out_norm),
        )

    def _linear(self, layer: str, names: tuple[str, ...], width: int, rows: list[int], scale: float = 1) -> Linear:
        """Several maps, or one that they are in the file already, as one; with the biases that are there."""
        rows = rows if len(rows) == len(names) else [sum(rows)]
        parts = [(f"{layer}.{name}", count) for name, count in zip(names, rows, strict=True)]
        matrix = [self._scaled(f"{part}.weight", scale, count, width) for part, count in parts]
        if not any(f"{part}.bias" in self._checkpoint for part, _ in parts):
            return self._a.matrix(*matrix), None
        biases = [self._scaled(f"{part}.bias", scale, count) for part, count in parts]
        return self._a.matrix(*matrix), self._a.vector(np.concatenate(biases))

    def _norm(self, name: str, width: int, scale: float = 1) -> Norm:
        parts = ("weight", "bias") if self._c.norm == "layer_norm" else ("weight",)
        return tuple(self._a.vector(self._scaled(f"{name}.{part}", scale, width)) for part in parts)

    def _scaled(self, name: str, scale: float, *shape: int) -> Host:
        """A tensor of the file, with the factor that its product would be multiplied by."""
        tensor = self._checkpoint.tensor(name, *shape)
        return tensor if scale == 1 else tensor.astype(np.float32) * scale
