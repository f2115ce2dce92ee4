"""A small right call of every operation, for what goes over all of them: ``sample("rms_norm")``.

The values are NumPy arrays and plain Python values by parameter name.  An operation without a sample fails the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Sample = dict[str, Any]

NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEADS, HEAD_SIZE = 6, 4, 2, 4, 16


MEMORY = np.zeros(32, np.float32)  # what addresses point to
_START = MEMORY.ctypes.data
# operations that write where addresses among their arguments point to
ADDRESSED = {"swap_blocks_batch", "concat_and_cache_mla_grouped"}
# arguments that lie on the host whatever the device of the others
ON_HOST = {"block_mapping", "src_ptrs", "dst_ptrs", "sizes"}


def floats(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed + sum(shape)).standard_normal(shape, np.float32)


def some_codes(*shape: int) -> npt.NDArray[np.uint8]:
    """Those of finite e4m3 numbers."""
    return (np.arange(np.prod(shape)) % 97).astype(np.uint8).reshape(shape)


def together(*parts: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """The bytes of each row of several arrays, one after another."""
    return np.concatenate([p.view(np.uint8) for p in parts], axis=1)


def ids(*values: Any) -> npt.NDArray[Any]:
    return np.array(values, np.int64)


def flash_caches() -> Sample:
    shape = (NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_SIZE)
    return {"key_cache": floats(*shape, seed=1), "value_cache": floats(*shape, seed=2)}


def packed_caches() -> Sample:
    key = floats(NUM_BLOCKS, KV_HEADS, HEAD_SIZE // 4, BLOCK_SIZE, 4)
    return {"key_cache": key, "value_cache": floats(NUM_BLOCKS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE)}


def new_tokens() -> Sample:
    return {"key": floats(3, KV_HEADS, HEAD_SIZE, seed=3), "value": floats(3, KV_HEADS, HEAD_SIZE, seed=4)}


def two_sequences() -> Sample:
    return {"block_tables": ids([1, 4], [3, 0]), "seq_lens": ids(7, 5)}


def decode(*outputs: str) -> Sample:
    scratch = {"exp_sum": floats(2, HEADS, 1), "max_logits": floats(2, HEADS, 1), "tmp_out": floats(2, HEADS, 1, 16)}
    return (
        {"out": floats(2, HEADS, HEAD_SIZE)}
        | {name: scratch[name] for name in outputs}
        | {"query": floats(2, HEADS, HEAD_SIZE, seed=5)}
        | packed_caches()
        | {"num_kv_heads": KV_HEADS, "scale": 0.25}
        | two_sequences()
        | {"block_size": BLOCK_SIZE, "max_seq_len": 8, "alibi_slopes": None, "kv_cache_dtype": "auto"}
        | {"k_scale": 1.0, "v_scale": 1.0}
    )


def gated(output: str, **options: float) -> Sample:
    return {output: floats(3, 8), "input": floats(3, 16), **options}


def ungated(**options: Any) -> Sample:
    return {"out": floats(3, 8), "input": floats(3, 8), **options}


def added(**options: Any) -> Sample:
    return {"input": floats(3, 8), "residual": floats(3, 8, seed=1), **options}


def rotated(positions: npt.NDArray[Any], **options: Any) -> Sample:
    return {
        "positions": positions,
        "query": floats(3, HEADS * HEAD_SIZE),
        "key": floats(3, KV_HEADS * HEAD_SIZE),
        "head_size": HEAD_SIZE,
        "cos_sin_cache": floats(5, HEAD_SIZE),
        "is_neox": True,
        **options,
    }


def codes(**options: Any) -> Sample:
    return {"result": np.zeros((3, 8), np.uint8), **options}


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


def gguf_blocks(rows: int, blocks: int) -> npt.NDArray[np.uint8]:
    """Of Q4_0: a scale in float16, and 16 bytes of codes."""
    scales = floats(rows * blocks, 1).astype(np.float16)
    return together(scales, some_codes(rows * blocks, 16)).reshape(rows, blocks * 18)


def codes_of_8_bits() -> Sample:
    return {"out": floats(3, 64).astype(np.float16), "input": some_codes(3, 64)}


def codes_of_4_bits() -> Sample:
    return {"out": floats(3, 64).astype(np.float16), "input": some_codes(3, 32)}


def packed_words(*shape: int) -> npt.NDArray[np.int32]:
    return some_codes(*shape[:-1], 4 * shape[-1]).view(np.int32)


def fp8_records() -> npt.NDArray[np.uint8]:
    tokens = NUM_BLOCKS * BLOCK_SIZE
    scales, rope = np.abs(floats(tokens, 4)), floats(tokens, 64).astype(np.float16)
    return together(some_codes(tokens, 512), scales, rope).reshape(NUM_BLOCKS, BLOCK_SIZE, 656)


def indexer_cache() -> npt.NDArray[np.uint8]:
    values, scales = some_codes(NUM_BLOCKS, BLOCK_SIZE * 16), np.abs(floats(NUM_BLOCKS, BLOCK_SIZE * 2))
    return together(values, scales).reshape(NUM_BLOCKS, BLOCK_SIZE, 24)


def latent_cache() -> npt.NDArray[Any]:
    return floats(NUM_BLOCKS, BLOCK_SIZE, 24)


NUM_EXPERTS = 12


def routed(**options: Any) -> Sample:
    return {
        "topk_weights": floats(3, 2, seed=2),
        "topk_ids": np.zeros((3, 2), np.int32),
        "token_expert_indices": np.zeros((3, 2), np.int32),
        "gating_output": floats(3, NUM_EXPERTS),
        **options,
    }


def unwritten(*shape: int) -> npt.NDArray[np.int32]:
    return np.full(shape, 99, np.int32)


def chosen_experts() -> npt.NDArray[np.int32]:
    return np.array([[5, 0], [3, 5], [-1, 9]], np.int32)


def local_experts() -> npt.NDArray[np.int32]:
    """All but expert 3."""
    here = np.arange(NUM_EXPERTS)
    return np.where(here == 3, -1, here - (here > 3)).astype(np.int32)


def block_map(places: int, lists: int = 1) -> Sample:
    """In blocks of four."""
    return {
        "sorted_token_ids": unwritten(lists * places),
        "experts_ids": unwritten(lists * places // 4),
        "num_tokens_post_pad": unwritten(lists),
    }


SAMPLES: dict[str, Callable[[], Sample]] = {
    "silu_and_mul": lambda: gated("result"),
    "silu_and_mul_quant": lambda: {"result": np.zeros((3, 8), np.uint8), "input": floats(3, 16), "scale": 0.5},
    "silu_and_mul_per_block_quant": lambda: {
        "out": np.zeros((3, 8), np.uint8),
        "input": floats(3, 16),
        "scales": floats(3, 2, seed=1),
        "group_size": 4,
    },
    "silu_and_mul_with_clamp": lambda: gated("result", limit=0.7, alpha=1.702, beta=1.0),
    "mul_and_silu": lambda: gated("out"),
    "gelu_and_mul": lambda: gated("out"),
    "gelu_tanh_and_mul": lambda: gated("out"),
    "gelu_and_mul_sparse": lambda: gated("out", activation_sparsity=0.5),
    "fatrelu_and_mul": lambda: gated("out", threshold=0.1),
    "swigluoai_and_mul": lambda: gated("out"),
    "swiglustep_and_mul": lambda: gated("out"),
    "situ_and_mul": lambda: gated("out", beta=2.0, linear_beta=1.5),
    "masked_moe_activation": lambda: {
        "out": floats(2, 3, 8, seed=1),
        "input": floats(2, 3, 16),
        "valid_token_counts": np.array([2, 5], np.int32),
        "activation": "silu",
    },
    "gelu_new": ungated,
    "gelu_fast": ungated,
    "gelu_quick": ungated,
    "relu2": ungated,
    "relu_squared": ungated,
    "xielu": lambda: ungated(alpha_p=floats(1), alpha_n=floats(1)),
    "ggml_dequantize": lambda: {"out": floats(2, 64).astype(np.float16), "W": gguf_blocks(2, 2), "quant_type": 2},
    "awq_dequantize": lambda: {
        "out": floats(8, 32),
        "qweight": packed_words(8, 4),
        "scales": floats(2, 32, seed=1),
        "zeros": packed_words(2, 4),
    },
    "gptq_dequantize": lambda: {
        "out": floats(32, 32),
        "qweight": packed_words(3, 32),
        "qzeros": packed_words(2, 3),
        "scales": floats(2, 32, seed=1),
        "g_idx": (ids(*range(32)) * 3 % 2).astype(np.int32),
        "bits": 3,
    },
    "fp8_dequantize": lambda: codes_of_8_bits() | {"scale": np.abs(floats(2, 3)), "group_rows": 2, "group_columns": 24},
    "mxfp8_dequantize": lambda: codes_of_8_bits() | {"scale": some_codes(3, 2) + np.uint8(100)},
    "mxfp4_dequantize": lambda: codes_of_4_bits() | {"scale": some_codes(3, 2) + np.uint8(100)},
    "nvfp4_dequantize": lambda: (
        codes_of_4_bits() | {"scale": some_codes(3, 4), "global_scale": 100.0, "is_sf_swizzled_layout": False}
    ),
    "permute_cols": lambda: {"out": floats(3, 8), "A": floats(3, 8, seed=1), "perm": ids(7, 0, 3, 3, 1, 5, 6, 2)},
    "hadacore_transform": lambda: {"out": floats(3, 24), "x": floats(3, 24, seed=1)},
    "rms_norm": lambda: ungated(weight=floats(8)),
    "fused_add_rms_norm": lambda: added(weight=floats(8)),
    "gemma_rms_norm": lambda: ungated(weight=floats(8)),
    "gemma_fused_add_rms_norm": lambda: added(weight=floats(8)),
    "layer_norm": lambda: ungated(weight=floats(8), bias=floats(8, seed=1)),
    "rms_norm_gated": lambda: ungated(weight=floats(8), z=floats(3, 8, seed=1), group_size=4),
    "rms_norm_static_fp8_quant": lambda: codes(input=floats(3, 8), weight=floats(8), scale=0.5),
    "fused_add_rms_norm_static_fp8_quant": lambda: codes(**added(weight=floats(8), scale=0.5)),
    "rms_norm_dynamic_per_token_quant": lambda: codes(
        input=floats(3, 8), weight=floats(8), scale=floats(3, 1), scale_ub=2.0
    ),
    "rms_norm_per_block_quant": lambda: codes(
        input=floats(3, 8), weight=floats(8), scale=floats(3, 2), scale_ub=None, group_size=4
    ),
    "fused_qk_norm_rope": lambda: {
        "qkv": floats(3, 4 * HEAD_SIZE),
        "num_heads_q": 2,
        "num_heads_k": 1,
        "num_heads_v": 1,
        "head_dim": HEAD_SIZE,
        "eps": 1e-6,
        "q_weight": floats(HEAD_SIZE, seed=1),
        "k_weight": floats(HEAD_SIZE, seed=2),
        "cos_sin_cache": floats(5, HEAD_SIZE, seed=3),
        "is_neox": True,
        "position_ids": ids(0, 4, 2),
    },
    "rotary_embedding": lambda: rotated(ids(0, 4, 2)),
    "batched_rotary_embedding": lambda: rotated(ids(0, 1, 2), rot_dim=HEAD_SIZE, cos_sin_cache_offsets=ids(0, 3, 2)),
    "mrope": lambda: rotated(ids([0, 1, 2], [4, 3, 2], [0, 0, 1]), mrope_section=ids(4, 2, 2)),
    "dual_chunk_rotary_embedding": lambda: {
        "query_out": floats(3, 5 * HEADS * HEAD_SIZE),
        "positions": ids(0, 7, 30),
        "query": floats(3, HEADS * HEAD_SIZE, seed=1),
        "key": floats(3, KV_HEADS * HEAD_SIZE),
        "head_size": HEAD_SIZE,
        "cos_sin_cache": floats(14, HEAD_SIZE),
        "is_neox": True,
        "chunk_size": 8,
        "local_size": 3,
    },
    "apply_repetition_penalties_": lambda: {
        "logits": floats(3, 8),
        "prompt_mask": floats(3, 8, seed=1) > 1,
        "output_mask": floats(3, 8, seed=2) > 1,
        "repetition_penalties": 1 + np.abs(floats(3)),
    },
    "sample": lambda: {
        "out": np.zeros(3, np.int32),
        "logits": floats(3, 40),
        "seeds": ids(1, 2, 3),
        "steps": ids(0, 0, 5),
        "temperature": np.array([0.7, 0, 1.2], np.float32),
        "top_k": np.array([0, 5, 12], np.int32),
        "top_p": 0.9,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "prompt_bitmap": np.array([[5, 0], [0, 1], [-1, -1]], np.int32),
        "output_counts": np.arange(120, dtype=np.int32).reshape(3, 40) % 7 // 5,
        "logit_bias": floats(3, 40, seed=1),
        "allowed_bitmap": np.array([[-1, -1], [-2, -1], [0x0F0F0F0F, -1]], np.int32),
        "logprobs": floats(3),
    },
    "rejection_sample": lambda: {
        "out": np.zeros((3, 3), np.int32),
        "draft_token_ids": ids([0, 5], [7, 1], [2, 3]),
        "target_probs": np.abs(floats(3, 3, 8)),
        "draft_probs": np.abs(floats(3, 2, 8, seed=1)),
        "draft_lens": ids(2, 1, 2),
        "seeds": ids(1, 2, 3),
        "steps": ids(4, 0, 2),
        "num_accepted": np.zeros(3, np.int32),
    },
    "softmax": lambda: {"out": floats(3, 40), "logits": floats(3, 40, seed=1), "temperature": 0.7},
    "top_k_top_p_mask": lambda: {
        "out": floats(3, 40),
        "logits": floats(3, 40, seed=1),
        "top_k": np.array([30, 0, 8], np.int32),
        "top_p": 0.95,
        "min_p": 0.1,
        "temperature": np.array([1, 0.9, 2], np.float32),
    },
    "top_k_top_p_renorm": lambda: {
        "out": floats(3, 40),
        "probs": np.abs(floats(3, 40, seed=1)),
        "top_k": np.array([30, 0, 8], np.int32),
        "top_p": 0.6,
    },
    "token_logprobs": lambda: {
        "logprobs": floats(3, 2),
        "logits": floats(3, 40),
        "token_ids": np.array([[0, 39], [7, 7], [20, 3]], np.int32),
        "ranks": np.zeros((3, 2), np.int32),
    },
    "top_k_per_row": lambda: {
        "indices": np.zeros((3, 4), np.int32),
        "logits": floats(3, 8),
        "k": 4,
        "row_starts": ids(0, 1, 2),
        "row_ends": ids(8, 7, 6),
        "values": floats(3, 4),
    },
    "paged_attention": lambda: (
        {"out": floats(3, HEADS, HEAD_SIZE), "query": floats(3, HEADS, HEAD_SIZE, seed=5)}
        | flash_caches()
        | two_sequences()
        | {"cu_query_lens": ids(0, 1, 3), "lse": floats(HEADS, 3)}
    ),
    "paged_attention_v1": lambda: decode(),
    "paged_attention_v2": lambda: decode("exp_sum", "max_logits", "tmp_out"),
    "merge_attn_states": lambda: {
        "output": floats(3, HEADS, HEAD_SIZE),
        "prefix_output": floats(3, HEADS, HEAD_SIZE, seed=1),
        "prefix_lse": floats(HEADS, 3, seed=2),
        "suffix_output": floats(3, HEADS, HEAD_SIZE, seed=3),
        "suffix_lse": floats(HEADS, 3, seed=4),
        "output_lse": floats(HEADS, 3),
    },
    "merge_attn_states_n": lambda: {
        "output": floats(3, HEADS, HEAD_SIZE),
        "partial_outputs": floats(2, 3, HEADS, HEAD_SIZE, seed=1),
        "partial_lses": floats(2, HEADS, 3, seed=2),
    },
    "reshape_and_cache": lambda: new_tokens() | packed_caches() | {"slot_mapping": ids(5, -1, 17)},
    "reshape_and_cache_flash": lambda: new_tokens() | flash_caches() | {"slot_mapping": ids(5, -1, 17)},
    "rotary_and_cache": lambda: (
        {"positions": ids(0, 4, 2), "query": floats(3, HEADS, HEAD_SIZE)}
        | new_tokens()
        | {"cos_sin_cache": floats(5, HEAD_SIZE), "is_neox": True}
        | flash_caches()
        | {"slot_mapping": ids(5, -1, 17)}
    ),
    "fused_qknorm_rope_cache": lambda: (
        {
            "q_out": floats(3, HEADS * HEAD_SIZE),
            "k_out": floats(3, KV_HEADS * HEAD_SIZE),
            "v_out": floats(3, KV_HEADS * HEAD_SIZE, seed=1),
            "qkv": floats(3, (HEADS + 2 * KV_HEADS) * HEAD_SIZE),
            "q_weight": floats(HEAD_SIZE, seed=1),
            "k_weight": floats(HEAD_SIZE, seed=2),
            "cos": floats(5, HEAD_SIZE // 2, seed=3),
            "sin": floats(5, HEAD_SIZE // 2, seed=4),
            "positions": ids(0, 4, 2),
            "slot_mapping": ids(5, -1, 17),
        }
        | {name[0] + "_cache": cache for name, cache in flash_caches().items()}
        | {"head_dim": HEAD_SIZE, "num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "rotary_pairs": HEAD_SIZE // 2}
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
        "q_pe": floats(3, HEADS, 8),
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
        "src_cache": some_codes(NUM_BLOCKS, BLOCK_SIZE, 44),
        "dst": np.ones((7, 72), np.float16),
        "block_table": np.array([[1, 4], [3, 0]], np.int32),
        "workspace_starts": np.array([0, 2], np.int32),
        "batch_size": 2,
    },
    "indexer_k_quant_and_cache": lambda: {
        "k": floats(3, 16),
        "kv_cache": np.ones((NUM_BLOCKS, BLOCK_SIZE, 24), np.uint8),
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
    "topk_softmax": lambda: routed(e_score_correction_bias=floats(NUM_EXPERTS, seed=1), renormalize=True),
    "topk_sigmoid": lambda: routed(routed_scaling_factor=2.5, is_padding=np.array([False, True, False])),
    "topk_softplus_sqrt": lambda: routed(
        token_expert_indices=None,
        renormalize=True,
        input_ids=ids(4, 0, 2),
        hash_indices_table=np.array([[0, 5], [1, 2], [9, 0], [3, 4], [7, 2]], np.int32),
    ),
    "grouped_topk": lambda: (
        {name: value for name, value in routed().items() if name in ("topk_weights", "topk_ids")}
        | {
            "scores": floats(3, NUM_EXPERTS),
            "n_group": 3,
            "topk_group": 2,
            "topk": 2,
            "renormalize": True,
            "routed_scaling_factor": 2.5,
            "bias": floats(NUM_EXPERTS, seed=1),
            "scoring_func": 1,
        }
    ),
    "moe_align_block_size": lambda: {
        "topk_ids": chosen_experts(),
        "num_experts": NUM_EXPERTS,
        "block_size": 4,
        **block_map(24),
        "expert_map": local_experts(),
        "scatter_idx": unwritten(6),
    },
    "batched_moe_align_block_size": lambda: {
        "max_tokens_per_batch": 6,
        "block_size": 4,
        "expert_num_tokens": np.array([2, 0, 5], np.int32),
        **block_map(24),
    },
    "moe_lora_align_block_size": lambda: {
        "topk_ids": chosen_experts(),
        "token_lora_mapping": np.array([1, 0, 1], np.int32),
        "num_experts": NUM_EXPERTS,
        "block_size": 4,
        "max_loras": 2,
        "max_num_tokens_padded": 24,
        "max_num_m_blocks": 6,
        **block_map(24, lists=2),
        "adapter_enabled": np.array([1, 1, 0], np.int32),
        "lora_ids": np.array([1, 0, -1], np.int32),
    },
    "get_cutlass_moe_mm_data": lambda: {
        "topk_ids": chosen_experts(),
        "expert_offsets": unwritten(NUM_EXPERTS + 1),
        "problem_sizes1": unwritten(NUM_EXPERTS, 3),
        "problem_sizes2": unwritten(NUM_EXPERTS, 3),
        "input_permutation": unwritten(6),
        "output_permutation": unwritten(6),
        "num_experts": NUM_EXPERTS,
        "n": 24,
        "k": 16,
        "blockscale_offsets": unwritten(NUM_EXPERTS + 1),
    },
    "get_cutlass_moe_mm_problem_sizes_from_expert_offsets": lambda: {
        "expert_first_token_offset": ids(0, 2, 2, 7),
        "problem_sizes1": unwritten(3, 3),
        "problem_sizes2": unwritten(3, 3),
        "n": 24,
        "k": 16,
        "swap_ab": True,
    },
    "get_cutlass_batched_moe_mm_data": lambda: {
        "expert_offsets": unwritten(3),
        "problem_sizes1": unwritten(3, 3),
        "problem_sizes2": unwritten(3, 3),
        "expert_num_tokens": np.array([2, 0, 5], np.int32),
        "num_local_experts": 3,
        "padded_m": 8,
        "n": 24,
        "k": 16,
    },
    "moe_permute": lambda: {
        "input": floats(3, 8),
        "topk_ids": np.array([[5, 0], [3, 5], [2, 9]], np.int32),
        "token_expert_indices": None,
        "expert_map": None,
        "n_expert": NUM_EXPERTS,
        "n_local_expert": NUM_EXPERTS,
        "topk": 2,
        "permuted_input": floats(6, 8, seed=1),
        "expert_first_token_offset": np.full(NUM_EXPERTS + 1, 99, np.int64),
        "inv_permuted_idx": unwritten(3, 2),
        "permuted_idx": unwritten(6),
    },
    "moe_unpermute": lambda: {
        "permuted_hidden_states": floats(6, 8),
        "topk_weights": floats(3, 2),
        "inv_permuted_idx": np.array([[5, 0], [3, 4], [2, 1]], np.int32),
        "expert_first_token_offset": ids(0, 2, 4),
        "topk": 2,
        "hidden_states": floats(3, 8, seed=1),
    },
    "moe_sum": lambda: {
        "input": floats(3, 2, 8),
        "output": floats(3, 8, seed=1),
        "topk_ids": chosen_experts(),
        "expert_map": local_experts(),
    },
    "shuffle_rows": lambda: {
        "input_tensor": floats(5, 8),
        "dst2src_map": ids(4, 0, -1, 0),
        "output_tensor": floats(4, 8, seed=1),
    },
    "convert_fp8": lambda: {"output": np.zeros((3, 8), np.uint8), "input": floats(3, 8), "scale": 0.5},
    "concat_mla_q": lambda: {
        "ql_nope": floats(3, HEADS, 16),
        "q_pe": floats(3, HEADS, 8),
        "q_out": floats(3, HEADS, 24, seed=1),
    },
}


def sample(name: str) -> Sample:
    return SAMPLES[name]()
