"""Small right calls of the operations of cache, and calls of a size that means something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv._schema import Spec
from pykv._tools.samples import _sizes as sizes
from pykv._tools.samples._arrays import MEMORY, Sample, flash_caches, floats, ids, packed_caches, some_codes, together
from pykv._tools.samples._workload import (
    BLOCK,
    HEAD,
    HEADS,
    KV_HEADS,
    LAYERS,
    Ids,
    Tokens,
    Workload,
    caches,
    rotated_workload,
    shuffled,
    size_of,
)

_START = MEMORY.ctypes.data
LATENT, ROPE, LATENT_HEADS = 512, 64, 16  # of MLA


def new_tokens() -> Sample:
    return {
        "key": floats(3, sizes.KV_HEADS, sizes.HEAD_SIZE, seed=3),
        "value": floats(3, sizes.KV_HEADS, sizes.HEAD_SIZE, seed=4),
    }


def copies_on_the_host() -> Sample:
    MEMORY[...] = floats(32)
    return {
        "src_ptrs": ids(_START, _START + 16),
        "dst_ptrs": ids(_START + 64, _START + 32),
        "sizes": ids(16, 8),
    }


def caches_at_addresses() -> Sample:
    """Two layers of two blocks of two tokens, four elements each: all of the memory."""
    MEMORY[...] = floats(32)
    return {
        "kv_c": floats(2, 3, 3),
        "k_pe": floats(2, 3, 1),
        "kv_cache_ptrs": ids(_START, _START + 64),
        "slot_mapping": ids([2, -1, 0], [3, 1, 0]),
        "block_size": 2,
        "block_stride": 8,
        "entry_stride": 4,
        "num_blocks": 2,
    }


def fp8_records() -> npt.NDArray[np.uint8]:
    tokens = sizes.NUM_BLOCKS * sizes.BLOCK_SIZE
    scales, rope = np.abs(floats(tokens, 4)), floats(tokens, 64).astype(np.float16)
    return together(some_codes(tokens, 512), scales, rope).reshape(sizes.NUM_BLOCKS, sizes.BLOCK_SIZE, 656)


def indexer_cache() -> npt.NDArray[np.uint8]:
    values, scales = (
        some_codes(sizes.NUM_BLOCKS, sizes.BLOCK_SIZE * 16),
        np.abs(floats(sizes.NUM_BLOCKS, sizes.BLOCK_SIZE * 2)),
    )
    return together(values, scales).reshape(sizes.NUM_BLOCKS, sizes.BLOCK_SIZE, 24)


def latent_cache() -> npt.NDArray[Any]:
    return floats(sizes.NUM_BLOCKS, sizes.BLOCK_SIZE, 24)


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "reshape_and_cache": lambda: new_tokens() | packed_caches() | {"slot_mapping": ids(5, -1, 17)},
    "reshape_and_cache_flash": lambda: new_tokens() | flash_caches() | {"slot_mapping": ids(5, -1, 17)},
    "rotary_and_cache": lambda: (
        {"positions": ids(0, 4, 2), "query": floats(3, sizes.HEADS, sizes.HEAD_SIZE)}
        | new_tokens()
        | {"cos_sin_cache": floats(5, sizes.HEAD_SIZE), "is_neox": True}
        | flash_caches()
        | {"slot_mapping": ids(5, -1, 17)}
    ),
    "fused_qknorm_rope_cache": lambda: (
        {
            "q_out": floats(3, sizes.HEADS * sizes.HEAD_SIZE),
            "k_out": floats(3, sizes.KV_HEADS * sizes.HEAD_SIZE),
            "v_out": floats(3, sizes.KV_HEADS * sizes.HEAD_SIZE, seed=1),
            "qkv": floats(3, (sizes.HEADS + 2 * sizes.KV_HEADS) * sizes.HEAD_SIZE),
            "q_weight": floats(sizes.HEAD_SIZE, seed=1),
            "k_weight": floats(sizes.HEAD_SIZE, seed=2),
            "cos": floats(5, sizes.HEAD_SIZE // 2, seed=3),
            "sin": floats(5, sizes.HEAD_SIZE // 2, seed=4),
            "positions": ids(0, 4, 2),
            "slot_mapping": ids(5, -1, 17),
        }
        | {name[0] + "_cache": cache for name, cache in flash_caches().items()}
        | {
            "head_dim": sizes.HEAD_SIZE,
            "num_q_heads": sizes.HEADS,
            "num_kv_heads": sizes.KV_HEADS,
            "rotary_pairs": sizes.HEAD_SIZE // 2,
        }
        | {"epsilon": 1e-6}
    ),
    "copy_blocks": lambda: {
        "key_caches": [flash_caches()["key_cache"] for _ in range(2)],
        "value_caches": [flash_caches()["value_cache"] for _ in range(2)],
        "block_mapping": ids([1, 2], [0, 5]),
    },
    "copy_blocks_mla": lambda: {"kv_caches": [latent_cache(), latent_cache()], "block_mapping": ids([1, 2], [0, 5])},
    "swap_blocks": lambda: {
        "src": floats(4, 32),
        "dst": floats(4, 32, seed=1),
        "block_size_in_bytes": 128,
        "block_mapping": ids([1, 2], [0, 3]),
    },
    "swap_blocks_layers": lambda: {
        "src_caches": [floats(4, 32), floats(4, 32, seed=1)],
        "dst_caches": [floats(4, 32, seed=2), floats(4, 32, seed=3)],
        "block_size_in_bytes": 128,
        "block_mapping": ids([1, 2], [0, 3]),
    },
    "swap_blocks_batch": copies_on_the_host,
    "concat_and_cache_mla": lambda: {
        "kv_c": floats(3, 16),
        "k_pe": floats(3, 8),
        "kv_cache": latent_cache(),
        "slot_mapping": ids(5, -1, 17),
    },
    "concat_and_cache_mla_layers": lambda: {
        "kv_c": floats(2, 3, 16),
        "k_pe": floats(2, 3, 8),
        "kv_caches": [latent_cache(), latent_cache() + 1],
        "slot_mapping": ids([5, -1, 17], [6, 0, 2]),
    },
    "concat_and_cache_mla_grouped": caches_at_addresses,
    "concat_and_cache_mla_rope_fused": lambda: {
        "positions": ids(0, 4, 2),
        "q_pe": floats(3, sizes.HEADS, 8),
        "k_pe": floats(3, 8),
        "kv_c": floats(3, 16),
        "cos_sin_cache": floats(5, 8),
        "is_neox": True,
        "slot_mapping": ids(5, -1, 17),
        "kv_cache": latent_cache(),
    },
    "cp_gather_cache": lambda: {
        "src_cache": latent_cache(),
        "dst": floats(7, 24, seed=1),
        "block_table": np.array([[1, 4], [3, 0]], np.int32),
        "cu_seq_lens": np.array([0, 2, 7], np.int32),
        "batch_size": 2,
    },
    "gather_and_maybe_dequant_cache": lambda: {
        "src_cache": latent_cache(),
        "dst": floats(7, 24, seed=1),
        "block_table": np.array([[1, 4], [3, 0]], np.int32),
        "cu_seq_lens": np.array([0, 2, 7], np.int32),
        "token_to_seq": np.array([0, 0, 1, 1, 1, 1, 1], np.int32),
        "num_tokens": 7,
        "kv_cache_dtype": "auto",
        "scale": 1.0,
    },
    "cp_gather_and_upconvert_fp8_kv_cache": lambda: {
        "src_cache": fp8_records(),
        "dst": np.ones((7, 576), np.float16),
        "block_table": np.array([[1, 4], [3, 0]], np.int32),
        "workspace_starts": np.array([0, 2], np.int32),
        "batch_size": 2,
    },
    "cp_gather_and_upconvert_nvfp4_kv_cache": lambda: {
        "src_cache": some_codes(sizes.NUM_BLOCKS, sizes.BLOCK_SIZE, 44),
        "dst": np.ones((7, 72), np.float16),
        "block_table": np.array([[1, 4], [3, 0]], np.int32),
        "workspace_starts": np.array([0, 2], np.int32),
        "batch_size": 2,
    },
    "indexer_k_quant_and_cache": lambda: {
        "k": floats(3, 16),
        "kv_cache": np.ones((sizes.NUM_BLOCKS, sizes.BLOCK_SIZE, 24), np.uint8),
        "slot_mapping": ids(5, -1, 17),
        "quant_block_size": 8,
        "kv_cache_dtype": "ue8m0",
    },
    "cp_gather_indexer_k_quant_cache": lambda: {
        "kv_cache": indexer_cache(),
        "dst_k": np.zeros((7, 16), np.uint8),
        "dst_scale": floats(7, 2),
        "block_table": np.array([[1, 4], [3, 0]], np.int32),
        "cu_seq_lens": np.array([0, 2, 7], np.int32),
    },
    "convert_fp8": lambda: {"output": np.zeros((3, 8), np.uint8), "input": floats(3, 8), "scale": 0.5},
    "concat_mla_q": lambda: {
        "ql_nope": floats(3, sizes.HEADS, 16),
        "q_pe": floats(3, sizes.HEADS, 8),
        "q_out": floats(3, sizes.HEADS, 24, seed=1),
    },
}


def new_tokens_workload(t: Tokens, packed: bool = False) -> Workload:
    inner = (KV_HEADS, HEAD)
    new = t.bytes(KV_HEADS * HEAD)
    return Workload(
        {"key": t.rows(*inner), "value": t.rows(*inner), **caches(t, t.blocks, packed), "slot_mapping": t.slots},
        {"key_cache": new, "value_cache": new},
    )


def rotary_and_cache_workload(t: Tokens) -> Workload:
    new, turned = new_tokens_workload(t), rotated_workload(t)
    arguments = {"positions": t.positions, "query": t.rows(HEADS, HEAD), **t.angles(HEAD)}
    return Workload(arguments | dict(new.arguments), {**new.touched, **turned.touched})


def pairs(t: Tokens, offset: int = 0) -> Ids:
    return np.stack([np.arange(t.blocks), shuffled(t.blocks) + offset], axis=1)


def copied_workload(t: Tokens, *names: str) -> Workload:
    """The first half of the blocks of each cache to the second one."""
    caches = [Spec((2 * t.blocks, BLOCK, KV_HEADS, HEAD), t.dtype)] * LAYERS
    moved = 2 * LAYERS * t.blocks * BLOCK * t.bytes(KV_HEADS * HEAD) // t.count
    return Workload(dict.fromkeys(names, caches) | {"block_mapping": pairs(t, t.blocks)}, dict.fromkeys(names, moved))


def swapped_workload(t: Tokens, source: str, target: str, layers: int | None = None) -> Workload:
    """Blocks from one array to another on the same device."""
    cache = t.cache(BLOCK, KV_HEADS, HEAD)
    block = BLOCK * t.bytes(KV_HEADS * HEAD) // t.count
    arrays: Any = cache if layers is None else [cache] * layers
    moved = (layers or 1) * t.blocks * block
    return Workload(
        {source: arrays, target: arrays, "block_size_in_bytes": block, "block_mapping": pairs(t)},
        {source: moved, target: moved},
    )


def mla_write_workload(t: Tokens) -> Workload:
    latent = {"kv_c": t.rows(LATENT), "k_pe": t.rows(ROPE), "kv_cache": t.cache(BLOCK, LATENT + ROPE)}
    return Workload(latent | {"slot_mapping": t.slots}, {"kv_cache": t.bytes(LATENT + ROPE)})


def mla_write_layers_workload(t: Tokens) -> Workload:
    latent = {"kv_c": Spec((LAYERS, t.count, LATENT), t.dtype), "k_pe": Spec((LAYERS, t.count, ROPE), t.dtype)}
    caches = {"kv_caches": [t.cache(BLOCK, LATENT + ROPE)] * LAYERS, "slot_mapping": np.stack([t.slots] * LAYERS)}
    return Workload(latent | caches, {"kv_caches": LAYERS * t.bytes(LATENT + ROPE)})


def mla_rotate_and_write_workload(t: Tokens) -> Workload:
    plain = mla_write_workload(t)
    turned = {"positions": t.positions, "q_pe": t.rows(LATENT_HEADS, ROPE), **t.angles(ROPE)}
    return Workload({**plain.arguments, **turned}, {**plain.touched, "cos_sin_cache": t.bytes(ROPE)})


def gathered_workload(t: Tokens, of_cache: Spec, source: str, touched: int, **rest: Any) -> Workload:
    cache = Spec((t.tables.size, *of_cache.shape), of_cache.dtype)
    written = {k: size_of(v) for k, v in rest.items() if isinstance(v, Spec)}
    return Workload({source: cache, "block_table": t.tables, **rest}, {source: touched, **written})


def mla_gather_workload(t: Tokens) -> Workload:
    row = Spec((BLOCK, LATENT + ROPE), t.dtype)
    rest = {"dst": t.rows(LATENT + ROPE), "cu_seq_lens": t.starts, "batch_size": len(t.lengths)}
    return gathered_workload(t, row, "src_cache", t.bytes(LATENT + ROPE), **rest)


def mla_dequantise_workload(t: Tokens) -> Workload:
    row = Spec((BLOCK, LATENT + ROPE), "uint8")
    requests = np.repeat(np.arange(len(t.lengths)), t.lengths)
    ids = {"cu_seq_lens": t.starts, "token_to_seq": requests, "num_tokens": t.count}
    options = {"kv_cache_dtype": "fp8_e4m3", "scale": 1.0}
    return gathered_workload(
        t, row, "src_cache", t.count * (LATENT + ROPE), dst=t.rows(LATENT + ROPE), **ids, **options
    )


def mla_upconvert_workload(t: Tokens) -> Workload:
    record = LATENT + 4 * LATENT // 128 + 2 * ROPE
    dst = Spec((t.count, LATENT + ROPE), "float16" if t.dtype == "float32" else t.dtype)
    ids = {"workspace_starts": t.starts[:-1], "batch_size": len(t.lengths)}
    return gathered_workload(t, Spec((BLOCK, record), "uint8"), "src_cache", t.count * record, dst=dst, **ids)


def mla_upconvert_nvfp4_workload(t: Tokens) -> Workload:
    record = LATENT * 9 // 16 + ROPE
    dst = Spec((t.count, LATENT + ROPE), "float16" if t.dtype == "float32" else t.dtype)
    ids = {"workspace_starts": t.starts[:-1], "batch_size": len(t.lengths)}
    return gathered_workload(t, Spec((BLOCK, record), "uint8"), "src_cache", t.count * record, dst=dst, **ids)


def indexer_write_workload(t: Tokens) -> Workload:
    cache = Spec((t.blocks, BLOCK, HEAD + 4), "uint8")
    arguments = {"k": t.rows(HEAD), "kv_cache": cache, "slot_mapping": t.slots}
    options = {"quant_block_size": HEAD, "kv_cache_dtype": "ue8m0"}
    return Workload(arguments | options, {"kv_cache": t.count * (HEAD + 4)})


def indexer_gather_workload(t: Tokens) -> Workload:
    dst = {"dst_k": Spec((t.count, HEAD), "uint8"), "dst_scale": Spec((t.count, 1), "float32")}
    row = Spec((BLOCK, HEAD + 4), "uint8")
    return gathered_workload(t, row, "kv_cache", t.count * (HEAD + 4), **dst, cu_seq_lens=t.starts)


def concat_mla_q_workload(t: Tokens) -> Workload:
    return Workload({"ql_nope": t.rows(LATENT_HEADS, LATENT), "q_pe": t.rows(LATENT_HEADS, ROPE)})


WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {
    "reshape_and_cache": lambda t: new_tokens_workload(t, packed=True),
    "reshape_and_cache_flash": new_tokens_workload,
    "rotary_and_cache": rotary_and_cache_workload,
    "copy_blocks": lambda t: copied_workload(t, "key_caches", "value_caches"),
    "copy_blocks_mla": lambda t: copied_workload(t, "kv_caches"),
    "swap_blocks": lambda t: swapped_workload(t, "src", "dst"),
    "swap_blocks_layers": lambda t: swapped_workload(t, "src_caches", "dst_caches", LAYERS),
    "concat_and_cache_mla": mla_write_workload,
    "concat_and_cache_mla_layers": mla_write_layers_workload,
    "concat_and_cache_mla_rope_fused": mla_rotate_and_write_workload,
    "cp_gather_cache": mla_gather_workload,
    "gather_and_maybe_dequant_cache": mla_dequantise_workload,
    "cp_gather_and_upconvert_fp8_kv_cache": mla_upconvert_workload,
    "cp_gather_and_upconvert_nvfp4_kv_cache": mla_upconvert_nvfp4_workload,
    "indexer_k_quant_and_cache": indexer_write_workload,
    "cp_gather_indexer_k_quant_cache": indexer_gather_workload,
    "concat_mla_q": concat_mla_q_workload,
}
