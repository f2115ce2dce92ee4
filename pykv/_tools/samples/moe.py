"""Small right calls of the operations of moe, and calls of a size that means something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from pykv._schema import Spec
from pykv._tools.samples._arrays import Sample, floats, ids
from pykv._tools.samples._workload import Tokens, Workload, size_of

NUM_EXPERTS = 12
EXPERTS, TOP_K, HIDDEN = 128, 8, 2048  # of mixtures of experts


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


def layer() -> Sample:
    """Of packed weights and plain ones, with biases, on one of several ranks."""
    from pykv.gemm import pack_mxfp4, stack_packed

    codes, scales = (np.random.default_rng(seed) for seed in (5, 6))
    w1 = stack_packed(
        [
            pack_mxfp4(codes.integers(0, 256, (48, 32), np.uint8), scales.integers(121, 126, (48, 2), np.uint8))
            for _ in range(NUM_EXPERTS - 1)
        ]
    )
    return {
        "out": np.zeros((3, 64), np.float16),
        "x": (floats(3, 64) / 4).astype(np.float16),
        "w1": w1.data,
        "w2": (floats(NUM_EXPERTS - 1, 64, 24, seed=1) / 5).astype(np.float16),
        "topk_weights": np.abs(floats(3, 2, seed=2)),
        "topk_ids": chosen_experts(),
        "activation": "swigluoai",
        "w1_bias": floats(NUM_EXPERTS - 1, 48, seed=3).astype(np.float16),
        "w2_bias": floats(NUM_EXPERTS - 1, 64, seed=4).astype(np.float16),
        "expert_map": local_experts(),
        "w1_format": w1.format,
        "clamp_limit": 7.0,
        "alpha": 1.702,
    }


def layer_of_bytes() -> Sample:
    """Of int8, with scales of rows.  All is exact: a number between the products that came out otherwise would become
    another code.
    """
    random, experts = np.random.default_rng(7), NUM_EXPERTS - 1
    return {
        "out": np.zeros((3, 64), np.float16),
        "x": (np.rint(floats(3, 64) * 16) / 16).astype(np.float16),
        "w1": random.integers(-8, 9, (experts, 32, 64), np.int8),
        "w2": random.integers(-8, 9, (experts, 64, 32), np.int8),
        "topk_weights": np.abs(floats(3, 2, seed=2)),
        "topk_ids": chosen_experts(),
        "activation": "relu2_no_mul",
        "expert_map": local_experts(),
        "w1_scale": np.ldexp(np.float32(1), random.integers(-6, -4, (experts, 32))),
        "w2_scale": np.ldexp(np.float32(1), random.integers(-5, -3, (experts, 64))),
        "a1_scale": np.array([1 / 16], np.float32),
        "a2_scale": np.array([1 / 32], np.float32),
    }


def product_by_map() -> Sample:
    """Of pairs 0, 3 and 5 with expert 0, and of pair 2 with expert 2."""
    places = np.full(24, 6, np.int32)
    places[[0, 1, 2, 8]] = 0, 3, 5, 2
    return {
        "out": np.zeros((6, 24), np.float16),
        "x": floats(3, 16).astype(np.float16),
        "w": floats(3, 24, 16, seed=1).astype(np.float16),
        "topk_weights": np.abs(floats(3, 2, seed=2)),
        "sorted_token_ids": places,
        "experts_ids": ids(0, 2, -1).astype(np.int32),
        "num_tokens_post_pad": ids(16).astype(np.int32),
        "top_k": 2,
        "block_size": 8,
        "bias": floats(3, 24, seed=3).astype(np.float16),
    }


SAMPLES: Mapping[str, Callable[[], Sample]] = {
    "topk_softmax": lambda: routed(e_score_correction_bias=floats(NUM_EXPERTS, seed=1), renormalize=True),
    "topk_sigmoid": lambda: routed(routed_scaling_factor=2.5, is_padding=np.array([False, True, False])),
    "topk_softplus_sqrt": lambda: routed(
        token_expert_indices=None,
        renormalize=True,
        input_ids=ids(4, 0, 2),
        hash_indices_table=np.array([[0, 5], [1, 2], [9, 0], [3, 4], [7, 2]], np.int32),
        bias_vl=floats(NUM_EXPERTS, seed=1),
        image_sentinel_lo=4,
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
    "fused_moe": layer,
    "fused_moe_gemm": product_by_map,
}

FURTHER: Mapping[str, Callable[[], Sample]] = {"fused_moe (w8a8)": layer_of_bytes}


def routed_workload(t: Tokens) -> Workload:
    outputs = {"topk_weights": Spec((t.count, TOP_K), "float32"), "topk_ids": Spec((t.count, TOP_K), "int32")}
    arguments = outputs | {"token_expert_indices": None, "gating_output": t.rows(EXPERTS), "renormalize": True}
    return Workload(arguments, {name: size_of(spec) for name, spec in outputs.items()})


def grouped_workload(t: Tokens) -> Workload:
    options = {"n_group": 8, "topk_group": 4, "topk": TOP_K, "renormalize": True, "routed_scaling_factor": 2.5}
    return Workload({"scores": t.rows(EXPERTS), "scoring_func": 1, **options})


def experts(t: Tokens) -> npt.NDArray[np.int32]:
    """Different ones for each token."""
    order = np.argsort(np.random.default_rng(0).random((t.count, EXPERTS), np.float32), axis=1)
    return order[:, :TOP_K].astype(np.int32)


def aligned_workload(t: Tokens) -> Workload:
    pairs, block = t.count * TOP_K, 16
    capacity = pairs + min(pairs, EXPERTS) * (block - 1)
    made = {"sorted_token_ids": capacity, "experts_ids": capacity // block + 1, "num_tokens_post_pad": 1}
    outputs = {name: Spec((n,), "int32") for name, n in made.items()}
    arguments = {"topk_ids": experts(t), "num_experts": EXPERTS, "block_size": block}
    return Workload(arguments | outputs, {name: size_of(spec) for name, spec in outputs.items()})


def permuted_workload(t: Tokens) -> Workload:
    outputs = {
        "permuted_input": Spec((t.count * TOP_K, HIDDEN), t.dtype),
        "expert_first_token_offset": Spec((EXPERTS + 1,), "int64"),
        "inv_permuted_idx": Spec((t.count, TOP_K), "int32"),
        "permuted_idx": Spec((t.count * TOP_K,), "int32"),
    }
    given = {"input": t.rows(HIDDEN), "topk_ids": experts(t), "token_expert_indices": None, "expert_map": None}
    sizes = {"n_expert": EXPERTS, "n_local_expert": EXPERTS, "topk": TOP_K}
    return Workload(given | sizes | outputs, {name: size_of(spec) for name, spec in outputs.items()})


def places(t: Tokens) -> npt.NDArray[np.int32]:
    """Where the pairs of tokens are when they are sorted by expert."""
    order = np.argsort(experts(t).reshape(-1), kind="stable")
    return np.argsort(order).astype(np.int32).reshape(t.count, TOP_K)


def unpermuted_workload(t: Tokens) -> Workload:
    rows, weights = Spec((t.count * TOP_K, HIDDEN), t.dtype), Spec((t.count, TOP_K), "float32")
    given = {"permuted_hidden_states": rows, "topk_weights": weights, "inv_permuted_idx": places(t)}
    return Workload(given | {"expert_first_token_offset": None, "topk": TOP_K})


def shuffled_rows_workload(t: Tokens) -> Workload:
    where = np.argsort(experts(t).reshape(-1), kind="stable") // TOP_K
    return Workload({"input_tensor": t.rows(HIDDEN), "dst2src_map": where.astype(np.int32)})


def layer_workload(t: Tokens) -> Workload:
    """Qwen3 30B's; what is counted of the weights are those of experts that have tokens."""
    dtype = "bfloat16" if t.dtype == "float32" else t.dtype
    ids, inner = experts(t), 768
    weights = {"w1": Spec((EXPERTS, 2 * inner, HIDDEN), dtype), "w2": Spec((EXPERTS, HIDDEN, inner), dtype)}
    given = {"x": Spec((t.count, HIDDEN), dtype), "topk_weights": Spec((t.count, TOP_K), "float32"), "topk_ids": ids}
    read = len(np.unique(ids))
    return Workload(given | weights, {name: size_of(spec) // EXPERTS * read for name, spec in weights.items()})


WORKLOADS: Mapping[str, Callable[[Tokens], Workload]] = {
    "topk_softmax": routed_workload,
    "topk_sigmoid": routed_workload,
    "topk_softplus_sqrt": routed_workload,
    "grouped_topk": grouped_workload,
    "moe_align_block_size": aligned_workload,
    "moe_permute": permuted_workload,
    "moe_unpermute": unpermuted_workload,
    "moe_sum": lambda t: Workload({"input": t.rows(TOP_K, HIDDEN)}),
    "shuffle_rows": shuffled_rows_workload,
    "fused_moe": layer_workload,
}
