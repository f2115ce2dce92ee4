"""Llama and Qwen3 from a Hugging Face folder, one ragged batch at a time over a paged KV cache.

pykv does all but the matrix products and the embedding lookup, which the array library does (see arrays.py).
JAX, whose arrays are immutable, has the same in llama_jax.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from arrays import Array, Host, JaxArrays, NumpyArrays
from rope import rope_table
from safetensors import safe_open

import pykv
from pykv.rope import parameters_of_config


@dataclass(frozen=True)
class Config:
    """The part of config.json that the computation needs."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    epsilon: float
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...]  # of each layer; None: attention to everything before
    max_length: int
    end_ids: frozenset[int]

    @classmethod
    def from_hugging_face(cls, raw: dict[str, Any]) -> Config:
        family = raw.get("model_type")
        if family not in ("llama", "qwen3"):
            raise ValueError(f"model_type: llama and qwen3 are supported, got {family!r}")
        if raw.get("hidden_act", "silu") != "silu" or raw.get("attention_bias") or raw.get("mlp_bias"):
            raise ValueError("config.json: only silu activation and layers without bias are supported")
        layers, heads, rope = raw["num_hidden_layers"], raw["num_attention_heads"], parameters_of_config(raw)
        full = raw.get("max_window_layers", layers) if raw.get("use_sliding_window") else layers
        kinds = raw.get("layer_types") or ["full_attention"] * full + ["sliding_attention"] * (layers - full)
        end = raw.get("eos_token_id")
        stretch = rope.get("factor", 1) if rope["rope_type"] == "dynamic" else 1
        return cls(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_size=raw.get("head_dim") or raw["hidden_size"] // heads,
            epsilon=raw["rms_norm_eps"],
            qk_norm=family == "qwen3",
            tied=raw.get("tie_word_embeddings", False),
            windows=tuple(raw["sliding_window"] if kind == "sliding_attention" else None for kind in kinds),
            max_length=int(raw["max_position_embeddings"] * stretch),
            end_ids=frozenset([] if end is None else end if isinstance(end, list) else [end]),
        )


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
        raw = json.loads((folder / "config.json").read_text())
        generation = folder / "generation_config.json"  # may name more end tokens
        if generation.exists():
            raw |= {k: v for k, v in json.loads(generation.read_text()).items() if k == "eos_token_id"}
        self.config = c = Config.from_hugging_face(raw)
        self.arrays = arrays
        tensor = _tensors(folder)
        self.embedding = arrays.matrix(tensor("model.embed_tokens.weight"))
        self.head = self.embedding if c.tied else arrays.matrix(tensor("lm_head.weight"))
        self.norm = arrays.vector(tensor("model.norm.weight"))
        self.layers = [self._load_layer(i, tensor) for i in range(c.num_layers)]
        self.cos_sin = arrays.put(rope_table(raw, c.head_size, c.max_length))

    def _load_layer(self, index: int, tensor: Callable[[str], Host]) -> Layer:
        def weight(name: str) -> Host:
            return tensor(f"model.layers.{index}.{name}.weight")

        a, c = self.arrays, self.config
        return Layer(
            input_norm=a.vector(weight("input_layernorm")),
            qkv=a.matrix(np.concatenate([weight(f"self_attn.{part}_proj") for part in "qkv"])),
            q_norm=a.vector(weight("self_attn.q_norm")) if c.qk_norm else None,
            k_norm=a.vector(weight("self_attn.k_norm")) if c.qk_norm else None,
            out=a.matrix(weight("self_attn.o_proj")),
            mlp_norm=a.vector(weight("post_attention_layernorm")),
            gate_up=a.matrix(np.concatenate([weight("mlp.gate_proj"), weight("mlp.up_proj")])),
            down=a.matrix(weight("mlp.down_proj")),
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


def _tensors(folder: Path) -> Callable[[str], Host]:
    """A function from a tensor's name to its data, over one safetensors file or the parts that an index names."""
    index = folder / "model.safetensors.index.json"
    parts = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    files = [safe_open(folder / part, framework="numpy") for part in sorted(parts)]
    home = {name: file for file in files for name in list(file.keys())}
    return lambda name: home[name].get_tensor(name)
