"""The steps of a layer by pykv, in place: for NumPy, CuPy and torch.  llama_jax.py has the same as pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from arrays import Array, NumpyArrays
from families import Config, LayerConfig

Norm = tuple[Array, ...]  # weight, or weight and bias
Linear = tuple[Array, Array | None]  # matrix [out, in], bias [out]
FUSED_ADD = {"rms_norm": "fused_add_rms_norm", "gemma_rms_norm": "gemma_fused_add_rms_norm"}


@dataclass
class Batch:
    """New tokens of several sequences, one sequence after the other, and where the cache keeps these sequences."""

    tokens: Array  # int64 [T]; None until they are known
    positions: Array  # int64 [T]
    slots: Array  # int64 [T]: where the keys and values of the new tokens go
    cu_query_lens: Array  # int32 [S + 1]: where the new tokens of each sequence begin
    seq_lens: Array  # int32 [S]: lengths with the new tokens
    block_tables: Array  # int32 [S, W]
    wanted: Array  # int64 [N]: the tokens whose logits are asked for


class Steps:
    """What a step changes it also returns, for the sake of libraries whose arrays are immutable."""

    def __init__(self, arrays: NumpyArrays, config: Config, kv_cache_dtype: str):
        self._a, self._c, self._kv_cache_dtype = arrays, config, kv_cache_dtype

    def rows(self, table: Array, ids: Array) -> Array:
        return self._a.rows(table, ids)

    def scale(self, x: Array, factor: float) -> Array:
        return self._a.scale(x, factor)

    def softcap(self, x: Array, cap: float) -> Array:
        return self._a.softcap(x, cap)

    def linear(self, x: Array, weights: Linear) -> Array:
        return self._a.linear(x, *weights)

    def norm(self, x: Array, weights: Norm) -> Array:
        out = self._a.empty(*x.shape)
        getattr(self._a.ops, self._c.norm)(out, x, *weights, self._c.epsilon)
        return out

    def add_norm(self, x: Array, residual: Array, weights: Norm) -> tuple[Array, Array]:
        """``residual += x; x = norm(residual)``"""
        ops, c = self._a.ops, self._c
        if c.norm == "layer_norm":
            ops.layer_norm(x, x, *weights, c.epsilon, residual)
        else:
            getattr(ops, FUSED_ADD[c.norm])(x, residual, *weights, c.epsilon)
        return x, residual

    def activate(self, x: Array) -> Array:
        width = x.shape[1] // 2 if self._c.has_gate else x.shape[1]
        out = self._a.empty(len(x), width)
        getattr(self._a.ops, self._c.activation)(out, x)
        return out

    def rotate_and_cache(
        self, batch: Batch, query: Array, key: Array, value: Array, table: Array | None, caches: tuple[Array, Array]
    ) -> tuple[Array, tuple[Array, Array]]:
        """The query as its positions turn it, and the caches with keys, turned likewise, and values."""
        ops, c, kind = self._a.ops, self._c, self._kv_cache_dtype
        if table is None:
            ops.reshape_and_cache_flash(key, value, *caches, batch.slots, kind)
        else:
            ops.rotary_and_cache(batch.positions, query, key, value, table, c.is_neox, *caches, batch.slots, kind)
        return query, caches

    def attend(self, batch: Batch, query: Array, caches: tuple[Array, Array], layer: LayerConfig) -> Array:
        out = self._a.empty(*query.shape)
        self._a.ops.paged_attention(
            out, query, *caches, batch.block_tables, batch.seq_lens, **self._options(batch, layer)
        )
        return out

    def _options(self, batch: Batch, layer: LayerConfig) -> dict[str, object]:
        return {
            "cu_query_lens": batch.cu_query_lens,
            "scale": self._c.attention_scale,
            "window": layer.window,
            "softcap": self._c.attention_softcap,
            "kv_cache_dtype": self._kv_cache_dtype,
        }
