"""What the samples of cache must give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cache import reference as cache
from cache import reference_indexer as indexer
from cache import reference_mla as mla
from norm import reference as norm
from rotary.expected import rotated
from rotary.reference import rotary_embedding

from pykv._tools.samples import MEMORY

Results = dict[str, Any]


def into_caches(store: Callable[..., None]) -> Callable[[Any], Results]:
    def expected(a: Any) -> Results:
        store(a.key, a.value, a.key_cache, a.value_cache, a.slot_mapping)
        return {"key_cache": a.key_cache, "value_cache": a.value_cache}

    return expected


def rotary_and_cache(a: Any) -> Results:
    a.key[...] = rotated(a.key, a.positions, a)
    return {"query": rotated(a.query, a.positions, a), "key": a.key} | into_caches(cache.reshape_and_cache_flash)(a)


def fused_qknorm_rope_cache(a: Any) -> Results:
    q, k, v = np.split(
        a.qkv.reshape(3, -1, a.head_dim).astype(np.float64), [a.num_q_heads, a.num_q_heads + a.num_kv_heads], axis=1
    )
    table = np.concatenate([a.cos, a.sin], axis=1)
    q = rotary_embedding(a.positions, norm.rms_norm(q, a.q_weight, a.epsilon), table, True)
    k = rotary_embedding(a.positions, norm.rms_norm(k, a.k_weight, a.epsilon), table, True)
    cache.reshape_and_cache_flash(k, v, a.k_cache, a.v_cache, a.slot_mapping)
    return {"q_out": q, "k_out": k, "v_out": v, "k_cache": a.k_cache, "v_cache": a.v_cache}


def copied(*names: str) -> Callable[[Any], Results]:
    def expected(a: Any) -> Results:
        for name in names:
            cache.copy_blocks(getattr(a, name), a.block_mapping)
        return {name: getattr(a, name) for name in names}

    return expected


def swap(a: Any, src: np.ndarray, dst: np.ndarray) -> np.ndarray:
    cache.swap_blocks(
        src.reshape(-1).view(np.uint8), dst.reshape(-1).view(np.uint8), a.block_size_in_bytes, a.block_mapping
    )
    return dst


def swap_blocks_batch(a: Any) -> Results:
    memory = MEMORY.copy().view(np.uint8)
    addresses = (a.src_ptrs - MEMORY.ctypes.data, a.dst_ptrs - MEMORY.ctypes.data, a.sizes)
    for src, dst, size in np.stack(addresses, axis=1).tolist():
        memory[dst : dst + size] = memory[src : src + size]
    return {"memory": memory.view(np.float32)}


def concat_and_cache_mla(a: Any) -> Results:
    mla.concat_and_cache_mla(a.kv_c, a.k_pe, a.kv_cache, a.slot_mapping)
    return {"kv_cache": a.kv_cache}


def concat_and_cache_mla_layers(a: Any) -> Results:
    for layer, own in enumerate(a.kv_caches):
        mla.concat_and_cache_mla(a.kv_c[layer], a.k_pe[layer], own, a.slot_mapping[layer])
    return {"kv_caches": a.kv_caches}


def concat_and_cache_mla_grouped(a: Any) -> Results:
    memory = MEMORY.copy()
    for layer, own in enumerate(memory.reshape(2, 2, 2, 4)):
        mla.concat_and_cache_mla(a.kv_c[layer], a.k_pe[layer], own, a.slot_mapping[layer])
    return {"memory": memory}


def concat_and_cache_mla_rope_fused(a: Any) -> Results:
    cached = a.slot_mapping >= 0  # the other rows stay as they are
    for x in (a.q_pe, a.k_pe):
        x[cached] = rotated(x, a.positions, a)[cached]
    return {"q_pe": a.q_pe, "k_pe": a.k_pe} | concat_and_cache_mla(a)


def gather(a: Any) -> Results:
    mla.gather(a.src_cache, a.dst, a.block_table, a.cu_seq_lens[:-1], np.diff(a.cu_seq_lens))
    return {"dst": a.dst}


def cp_gather_and_upconvert_fp8_kv_cache(a: Any) -> Results:
    def decode(record: np.ndarray) -> np.ndarray:
        return mla.unpack_record(record, 512, a.dst.dtype)

    lengths = np.diff(a.workspace_starts, append=len(a.dst))
    mla.gather(a.src_cache, a.dst, a.block_table, a.workspace_starts, lengths, decode=decode)
    return {"dst": a.dst}


def cp_gather_and_upconvert_nvfp4_kv_cache(a: Any) -> Results:
    def decode(record: np.ndarray) -> np.ndarray:
        return mla.unpack_nvfp4_record(record, 64, a.dst.dtype)

    lengths = np.diff(a.workspace_starts, append=len(a.dst))
    mla.gather(a.src_cache, a.dst, a.block_table, a.workspace_starts, lengths, decode=decode)
    return {"dst": a.dst}


def indexer_k_quant_and_cache(a: Any) -> Results:
    indexer.indexer_k_quant_and_cache(a.k, a.kv_cache, a.slot_mapping, a.quant_block_size, a.kv_cache_dtype)
    return {"kv_cache": a.kv_cache}


def cp_gather_indexer_k_quant_cache(a: Any) -> Results:
    indexer.cp_gather_indexer_k_quant_cache(a.kv_cache, a.dst_k, a.dst_scale, a.block_table, a.cu_seq_lens)
    return {"dst_k": a.dst_k, "dst_scale": a.dst_scale}


EXPECTED: dict[str, Callable[[Any], Results]] = {
    "reshape_and_cache": into_caches(cache.reshape_and_cache),
    "reshape_and_cache_flash": into_caches(cache.reshape_and_cache_flash),
    "rotary_and_cache": rotary_and_cache,
    "fused_qknorm_rope_cache": fused_qknorm_rope_cache,
    "copy_blocks": copied("key_caches", "value_caches"),
    "copy_blocks_mla": copied("kv_caches"),
    "swap_blocks": lambda a: {"dst": swap(a, a.src, a.dst)},
    "swap_blocks_layers": lambda a: {
        "src_caches": a.src_caches,  # a list is one of arrays that may be written
        "dst_caches": [swap(a, *layer) for layer in zip(a.src_caches, a.dst_caches, strict=True)],
    },
    "swap_blocks_batch": swap_blocks_batch,
    "concat_and_cache_mla": concat_and_cache_mla,
    "concat_and_cache_mla_layers": concat_and_cache_mla_layers,
    "concat_and_cache_mla_grouped": concat_and_cache_mla_grouped,
    "concat_and_cache_mla_rope_fused": concat_and_cache_mla_rope_fused,
    "cp_gather_cache": gather,
    "gather_and_maybe_dequant_cache": gather,
    "cp_gather_and_upconvert_fp8_kv_cache": cp_gather_and_upconvert_fp8_kv_cache,
    "cp_gather_and_upconvert_nvfp4_kv_cache": cp_gather_and_upconvert_nvfp4_kv_cache,
    "indexer_k_quant_and_cache": indexer_k_quant_and_cache,
    "cp_gather_indexer_k_quant_cache": cp_gather_indexer_k_quant_cache,
    "convert_fp8": lambda a: {"output": cache.quantise(a.input, a.scale, "fp8")},
    "concat_mla_q": lambda a: {"q_out": np.concatenate([a.ql_nope, a.q_pe], axis=-1)},
}
