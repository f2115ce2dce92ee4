"""Llama and Qwen3 from a Hugging Face folder, one ragged batch at a time over a paged KV cache.

pykv does all but the matrix products and the embedding lookup, which the array library does (see arrays.py).
JAX, whose arrays are immutable, has the same in llama_jax.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from arrays import Array, Host, JaxArrays, NumpyArrays
from checkpoint import Checkpoint, Keys
from rope import rope_table

import pykv
from pykv.rope import parameters_of_config


@dataclass(frozen=True)
class Config:
    """The part of config.json that the computation needs."""

    hidden_size: int
    intermediate_size: int
    vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    epsilon: float
    qk_norm: bool
    windows: tuple[int | None, ...]  # of each layer; None: attention to everything before
    max_length: int
    end_ids: frozenset[int]

    @classmethod
    def from_hugging_face(cls, keys: Keys) -> Config:
        family = keys.get("model_type")
        if family not in ("llama", "qwen3"):
            keys.refuse("model_type", f"llama and qwen3 are served, got {family!r}")
        if (activation := keys.get("hidden_act", "silu")) != "silu":
            keys.refuse("hidden_act", f"silu is served, got {activation!r}")
        for key in ("attention_bias", "mlp_bias"):
            if keys.get(key):
                keys.refuse(key, "layers without bias are served")
        layers, heads = keys.size("num_hidden_layers"), keys.size("num_attention_heads")
        full = keys.size("max_window_layers", layers) if keys.get("use_sliding_window") else layers
        kinds = keys.get("layer_types", ["full_attention"] * full + ["sliding_attention"] * (layers - full))
        rope = read_rope(keys)
        end = keys.get("eos_token_id", [])
        return cls(
            hidden_size=keys.size("hidden_size"),
            intermediate_size=keys.size("intermediate_size"),
            vocab_size=keys.size("vocab_size"),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=keys.size("num_key_value_heads", heads),
            head_size=keys.size("head_dim", keys.size("hidden_size") // heads),
            epsilon=keys.number("rms_norm_eps"),
            qk_norm=family == "qwen3",
            windows=tuple(keys.size("sliding_window") if kind == "sliding_attention" else None for kind in kinds),
            max_length=int(keys.size("max_position_embeddings") * rope.get("stretch", 1)),
            end_ids=frozenset(end if isinstance(end, list) else [end]),
        )


def read_rope(keys: Keys) -> dict[str, Any]:
    """What `pykv.rope` understands of the keys; "stretch" is how much longer than its config says a sequence may be."""
    for key in ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_window_layers",
                "original_max_position_embeddings", "sliding_window"):  # fmt: skip
        keys.get(key)
    try:
        rope = parameters_of_config(keys.raw)
    except ValueError as error:
        raise ValueError(f"{keys.file}: {str(error).removeprefix('config: ')}") from None
    return rope | ({"stretch": rope.get("factor", 1)} if rope["rope_type"] == "dynamic" else {})


@dataclass
class Layer:
    input_norm: Array  # [hidden]
    qkv: Array  # [(heads + 2 * kv heads) * head size, hidden]
    q_norm: Array | None  # [head size]
    k_norm: Array | None
    out: Array  # [hidden, heads * head size]
    mlp_norm: Array
    gate_up: Array  # [2 * intermediate, hidden]
    down: Array  # [hidden, intermediate]
    window: int | None


@dataclass
class Batch:
    """New tokens of several sequences, one sequence after the other, and where the cache keeps these sequences."""

    tokens: Array  # int64 [T]
    positions: Array  # int64 [T]
    slots: Array  # int64 [T]: where the keys and values of the new tokens go
    cu_query_lens: Array  # int32 [S + 1]: where the new tokens of each sequence begin
    seq_lens: Array  # int32 [S]: lengths with the new tokens
    block_tables: Array  # int32 [S, W]
    wanted: Array  # int64 [N]: the tokens whose logits are asked for


class Llama:
    def __init__(self, folder: Path, arrays: NumpyArrays):
        checkpoint = Checkpoint(folder)
        self.config = c = Config.from_hugging_face(checkpoint.keys)
        self.arrays = arrays
        embedding, head = "model.embed_tokens.weight", "lm_head.weight"
        tied = checkpoint.is_tied(embedding, head)
        self.embedding = arrays.matrix(checkpoint.tensor(embedding, c.vocab_size, c.hidden_size))
        self.head = self.embedding if tied else arrays.matrix(checkpoint.tensor(head, c.vocab_size, c.hidden_size))
        self.norm = arrays.vector(checkpoint.tensor("model.norm.weight", c.hidden_size))
        self.layers = [self._load_layer(i, checkpoint) for i in range(c.num_layers)]
        self.cos_sin = arrays.put(rope_table(checkpoint.keys.raw, c.head_size, c.max_length))
        checkpoint.refuse_the_rest()

    def _load_layer(self, index: int, checkpoint: Checkpoint) -> Layer:
        def weight(name: str, *shape: int) -> Host:
            return checkpoint.tensor(f"model.layers.{index}.{name}.weight", *shape)

        a, c = self.arrays, self.config
        hidden, inner, size = c.hidden_size, c.intermediate_size, c.head_size
        heads = {"q": c.num_heads, "k": c.num_kv_heads, "v": c.num_kv_heads}
        qkv = [weight(f"self_attn.{part}_proj", count * size, hidden) for part, count in heads.items()]
        return Layer(
            input_norm=a.vector(weight("input_layernorm", hidden)),
            qkv=a.matrix(np.concatenate(qkv)),
            q_norm=a.vector(weight("self_attn.q_norm", size)) if c.qk_norm else None,
            k_norm=a.vector(weight("self_attn.k_norm", size)) if c.qk_norm else None,
            out=a.matrix(weight("self_attn.o_proj", hidden, c.num_heads * size)),
            mlp_norm=a.vector(weight("post_attention_layernorm", hidden)),
            gate_up=a.matrix(np.concatenate([weight(f"mlp.{part}_proj", inner, hidden) for part in ("gate", "up")])),
            down=a.matrix(weight("mlp.down_proj", hidden, inner)),
            window=c.windows[index],
        )

    def make_cache(self, num_blocks: int, block_size: int = 16, kv_dtype: str = "auto") -> pykv.PagedKVCache:
        c, a = self.config, self.arrays
        dtype = a.dtype if kv_dtype == "auto" else kv_dtype
        return pykv.PagedKVCache(
            c.num_layers, num_blocks, block_size, c.num_kv_heads, c.head_size, dtype, like=self.norm
        )

    def forward(self, batch: Batch, cache: pykv.PagedKVCache) -> Array:
        """Puts the batch's keys and values into the cache; returns the logits [N, vocabulary] of the wanted tokens."""
        a, c, ops = self.arrays, self.config, self.arrays.ops
        residual = a.rows(self.embedding, batch.tokens)  # [T, hidden]
        x = a.empty(*residual.shape)
        ops.rms_norm(x, residual, self.layers[0].input_norm, c.epsilon)
        for i, layer in enumerate(self.layers):
            x = a.matmul(self._attention(x, i, batch, cache), layer.out)
            ops.fused_add_rms_norm(x, residual, layer.mlp_norm, c.epsilon)  # residual += x; x = norm(residual)
            gated = a.empty(len(x), c.intermediate_size)
            ops.silu_and_mul(gated, a.matmul(x, layer.gate_up))
            x = a.matmul(gated, layer.down)
            next_norm = self.layers[i + 1].input_norm if i + 1 < c.num_layers else self.norm
            ops.fused_add_rms_norm(x, residual, next_norm, c.epsilon)
        return a.matmul(a.rows(x, batch.wanted), self.head)

    def _attention(self, x: Array, index: int, batch: Batch, cache: pykv.PagedKVCache) -> Array:
        a, c, ops, layer = self.arrays, self.config, self.arrays.ops, self.layers[index]
        key_cache, value_cache = cache.key_caches[index], cache.value_caches[index]
        qkv = a.matmul(x, layer.qkv).reshape(len(x), -1, c.head_size)
        query, key, value = (  # views; pykv takes them with their strides
            qkv[:, : c.num_heads],
            qkv[:, c.num_heads : c.num_heads + c.num_kv_heads],
            qkv[:, c.num_heads + c.num_kv_heads :],
        )
        if c.qk_norm:
            ops.rms_norm(query, query, layer.q_norm, c.epsilon)
            ops.rms_norm(key, key, layer.k_norm, c.epsilon)
        ops.rotary_embedding(batch.positions, query, key, c.head_size, self.cos_sin, True)
        ops.reshape_and_cache_flash(key, value, key_cache, value_cache, batch.slots, cache.kv_cache_dtype)
        attended = a.empty(*query.shape)
        ops.paged_attention(
            attended, query, key_cache, value_cache, batch.block_tables, batch.seq_lens,
            cu_query_lens=batch.cu_query_lens, window=layer.window, kv_cache_dtype=cache.kv_cache_dtype,
        )  # fmt: skip
        return attended.reshape(len(x), -1)


def open_model(folder: Path, arrays: NumpyArrays) -> Llama:
    """The model in the form that suits the array library."""
    if isinstance(arrays, JaxArrays):
        from llama_jax import JaxLlama

        return JaxLlama(folder, arrays)
    return Llama(folder, arrays)
