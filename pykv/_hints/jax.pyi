"""Written by tests/derived.py."""

from collections.abc import Sequence
from typing import Literal, overload

from jax import Array
from jax.typing import ArrayLike

def apply_penalties_(
    logits: ArrayLike,
    prompt_token_ids: ArrayLike | None,
    output_token_ids: ArrayLike | None,
    presence_penalties: float | ArrayLike | None = None,
    frequency_penalties: float | ArrayLike | None = None,
    repetition_penalties: float | ArrayLike | None = None,
    *,
    prompt_lens: ArrayLike | None = None,
    output_lens: ArrayLike | None = None,
) -> Array: ...
def apply_repetition_penalties_(
    logits: ArrayLike, prompt_mask: ArrayLike, output_mask: ArrayLike, repetition_penalties: ArrayLike
) -> Array: ...
def awq_dequantize(
    qweight: ArrayLike, scales: ArrayLike, zeros: ArrayLike, *, out: ArrayLike | None = None
) -> Array: ...
def batched_moe_align_block_size(
    max_tokens_per_batch: int,
    block_size: int,
    expert_num_tokens: ArrayLike,
    sorted_token_ids: ArrayLike,
    experts_ids: ArrayLike,
    num_tokens_post_pad: ArrayLike,
) -> tuple[Array, Array, Array]: ...
@overload
def batched_rotary_embedding(
    positions: ArrayLike,
    query: ArrayLike,
    key: None,
    head_size: int,
    cos_sin_cache: ArrayLike,
    is_neox: bool,
    rot_dim: int,
    cos_sin_cache_offsets: ArrayLike,
) -> Array: ...
@overload
def batched_rotary_embedding(
    positions: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    head_size: int,
    cos_sin_cache: ArrayLike,
    is_neox: bool,
    rot_dim: int,
    cos_sin_cache_offsets: ArrayLike,
) -> tuple[Array, Array]: ...
def concat_and_cache_mla(
    kv_c: ArrayLike,
    k_pe: ArrayLike,
    kv_cache: ArrayLike,
    slot_mapping: ArrayLike,
    kv_cache_dtype: str = "auto",
    scale: float | ArrayLike = 1.0,
    skip_scale: bool = False,
) -> Array: ...
def concat_and_cache_mla_layers(
    kv_c: ArrayLike,
    k_pe: ArrayLike,
    kv_caches: Sequence[ArrayLike],
    slot_mapping: ArrayLike,
    kv_cache_dtype: str = "auto",
    kv_scales: float | ArrayLike = 1.0,
) -> list[Array]: ...
def concat_and_cache_mla_rope_fused(
    positions: ArrayLike,
    q_pe: ArrayLike,
    k_pe: ArrayLike,
    kv_c: ArrayLike,
    cos_sin_cache: ArrayLike,
    is_neox: bool,
    slot_mapping: ArrayLike,
    kv_cache: ArrayLike,
    kv_cache_dtype: str = "auto",
    kv_cache_scale: float | ArrayLike = 1.0,
    rotate_in_fp32: bool = False,
    rotate_padded: bool = False,
) -> tuple[Array, Array, Array]: ...
def concat_mla_q(ql_nope: ArrayLike, q_pe: ArrayLike, *, q_out: ArrayLike | None = None) -> Array: ...
def convert_fp8(
    input: ArrayLike, scale: float | ArrayLike = 1.0, kv_dtype: str = "fp8", *, output: ArrayLike | None = None
) -> Array: ...
def copy_blocks(
    key_caches: Sequence[ArrayLike], value_caches: Sequence[ArrayLike], block_mapping: ArrayLike
) -> tuple[list[Array], list[Array]]: ...
def copy_blocks_mla(kv_caches: Sequence[ArrayLike], block_mapping: ArrayLike) -> list[Array]: ...
def cp_gather_and_upconvert_fp8_kv_cache(
    src_cache: ArrayLike,
    dst: ArrayLike,
    block_table: ArrayLike,
    workspace_starts: ArrayLike,
    batch_size: int,
    seq_starts: ArrayLike | None = None,
    host_cache: ArrayLike | None = None,
    host_row_ids: ArrayLike | None = None,
    device_row_ids: ArrayLike | None = None,
) -> Array: ...
def cp_gather_and_upconvert_nvfp4_kv_cache(
    src_cache: ArrayLike, dst: ArrayLike, block_table: ArrayLike, workspace_starts: ArrayLike, batch_size: int
) -> Array: ...
def cp_gather_cache(
    src_cache: ArrayLike,
    dst: ArrayLike,
    block_table: ArrayLike,
    cu_seq_lens: ArrayLike,
    batch_size: int,
    seq_starts: ArrayLike | None = None,
) -> Array: ...
def cp_gather_indexer_k_quant_cache(
    kv_cache: ArrayLike,
    dst_k: ArrayLike,
    dst_scale: ArrayLike,
    block_table: ArrayLike,
    cu_seq_lens: ArrayLike,
    seq_starts: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def cutlass_scaled_fp4_mm(
    a: ArrayLike,
    b: ArrayLike,
    block_scale_a: ArrayLike,
    block_scale_b: ArrayLike,
    alpha: float | ArrayLike,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
def cutlass_scaled_mm(
    a: ArrayLike,
    b: ArrayLike,
    a_scales: float | ArrayLike,
    b_scales: float | ArrayLike,
    bias: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
def cutlass_scaled_mm_azp(
    a: ArrayLike,
    b: ArrayLike,
    a_scales: float | ArrayLike,
    b_scales: float | ArrayLike,
    azp_adj: ArrayLike,
    azp: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
def dsv3_fused_a_gemm(mat_a: ArrayLike, mat_b: ArrayLike, *, output: ArrayLike | None = None) -> Array: ...
def dsv3_router_gemm(
    hidden_states: ArrayLike, router_weight: ArrayLike, *, output: ArrayLike | None = None
) -> Array: ...
@overload
def dual_chunk_rotary_embedding(
    positions: ArrayLike,
    query: ArrayLike,
    key: None,
    head_size: int,
    cos_sin_cache: ArrayLike,
    is_neox: bool,
    chunk_size: int,
    local_size: int,
    offsets: ArrayLike | None = None,
    *,
    query_out: ArrayLike | None = None,
) -> Array: ...
@overload
def dual_chunk_rotary_embedding(
    positions: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    head_size: int,
    cos_sin_cache: ArrayLike,
    is_neox: bool,
    chunk_size: int,
    local_size: int,
    offsets: ArrayLike | None = None,
    *,
    query_out: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def dynamic_per_token_scaled_fp8_quant(
    input: ArrayLike,
    scale_ub: float | ArrayLike | None = None,
    *,
    result: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def dynamic_scaled_fp8_quant(
    input: ArrayLike, *, result: ArrayLike | None = None, scale: ArrayLike | None = None
) -> tuple[Array, Array]: ...
@overload
def dynamic_scaled_int8_quant(
    input: ArrayLike, azp: None = None, *, result: ArrayLike | None = None, scale: ArrayLike | None = None
) -> tuple[Array, Array]: ...
@overload
def dynamic_scaled_int8_quant(
    input: ArrayLike, *, azp: ArrayLike, result: ArrayLike | None = None, scale: ArrayLike | None = None
) -> tuple[Array, Array, Array]: ...
@overload
def dynamic_scaled_int8_quant(
    input: ArrayLike, azp: ArrayLike, *, result: ArrayLike | None = None, scale: ArrayLike | None = None
) -> tuple[Array, Array, Array]: ...
def fatrelu_and_mul(input: ArrayLike, threshold: float = 0.0, *, out: ArrayLike | None = None) -> Array: ...
def finish_logits_(
    logits: ArrayLike,
    num_org: int | None = None,
    num_org_pad: int = 0,
    num_added: int = 0,
    *,
    soft_cap: float | None = None,
    scale: float = 1.0,
) -> Array: ...
def fp32_router_gemm(a: ArrayLike, b: ArrayLike, *, output: ArrayLike | None = None) -> Array: ...
def fp8_dequantize(
    input: ArrayLike,
    scale: float | ArrayLike,
    group_rows: int = 0,
    group_columns: int = 0,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
def fused_add_rms_norm(
    input: ArrayLike, residual: ArrayLike, weight: ArrayLike | None, epsilon: float = 1e-06
) -> tuple[Array, Array]: ...
def fused_add_rms_norm_static_fp8_quant(
    input: ArrayLike,
    residual: ArrayLike,
    weight: ArrayLike | None,
    scale: float | ArrayLike,
    epsilon: float = 1e-06,
    *,
    result: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
@overload
def fused_moe(
    x: ArrayLike,
    w1: ArrayLike,
    w2: ArrayLike,
    topk_weights: ArrayLike,
    topk_ids: ArrayLike,
    activation: str = "silu",
    w1_bias: ArrayLike | None = None,
    w2_bias: ArrayLike | None = None,
    expert_map: ArrayLike | None = None,
    w1_format: str = "",
    w2_format: str = "",
    apply_router_weight_on_input: bool = False,
    clamp_limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    situ_beta: float = 1.0,
    situ_linear_beta: float = -1.0,
    w1_scale: ArrayLike | None = None,
    w2_scale: ArrayLike | None = None,
    a1_scale: ArrayLike | None = None,
    a2_scale: ArrayLike | None = None,
    workspace: None = None,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
@overload
def fused_moe(
    x: ArrayLike,
    w1: ArrayLike,
    w2: ArrayLike,
    topk_weights: ArrayLike,
    topk_ids: ArrayLike,
    activation: str = "silu",
    w1_bias: ArrayLike | None = None,
    w2_bias: ArrayLike | None = None,
    expert_map: ArrayLike | None = None,
    w1_format: str = "",
    w2_format: str = "",
    apply_router_weight_on_input: bool = False,
    clamp_limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    situ_beta: float = 1.0,
    situ_linear_beta: float = -1.0,
    w1_scale: ArrayLike | None = None,
    w2_scale: ArrayLike | None = None,
    a1_scale: ArrayLike | None = None,
    a2_scale: ArrayLike | None = None,
    *,
    workspace: ArrayLike,
    out: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
@overload
def fused_moe(
    x: ArrayLike,
    w1: ArrayLike,
    w2: ArrayLike,
    topk_weights: ArrayLike,
    topk_ids: ArrayLike,
    activation: str,
    w1_bias: ArrayLike | None,
    w2_bias: ArrayLike | None,
    expert_map: ArrayLike | None,
    w1_format: str,
    w2_format: str,
    apply_router_weight_on_input: bool,
    clamp_limit: float,
    alpha: float,
    beta: float,
    situ_beta: float,
    situ_linear_beta: float,
    w1_scale: ArrayLike | None,
    w2_scale: ArrayLike | None,
    a1_scale: ArrayLike | None,
    a2_scale: ArrayLike | None,
    workspace: ArrayLike,
    *,
    out: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def fused_moe_gemm(
    out: ArrayLike,
    x: ArrayLike,
    w: ArrayLike,
    topk_weights: ArrayLike | None,
    sorted_token_ids: ArrayLike,
    experts_ids: ArrayLike,
    num_tokens_post_pad: ArrayLike,
    top_k: int,
    block_size: int,
    bias: ArrayLike | None = None,
    format: str = "",
) -> Array: ...
def fused_qk_norm_rope(
    qkv: ArrayLike,
    num_heads_q: int,
    num_heads_k: int,
    num_heads_v: int,
    head_dim: int,
    eps: float,
    q_weight: ArrayLike | None,
    k_weight: ArrayLike | None,
    cos_sin_cache: ArrayLike,
    is_neox: bool,
    position_ids: ArrayLike,
) -> Array: ...
def fused_qknorm_rope_cache(
    qkv: ArrayLike,
    q_weight: ArrayLike,
    k_weight: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    positions: ArrayLike,
    slot_mapping: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    head_dim: int,
    num_q_heads: int,
    num_kv_heads: int,
    rotary_pairs: int,
    epsilon: float,
    norm_weight_bias: float = 0.0,
    kv_cache_dtype: str = "auto",
    k_scale: float | ArrayLike | None = None,
    v_scale: float | ArrayLike | None = None,
    *,
    q_out: ArrayLike | None = None,
    k_out: ArrayLike | None = None,
    v_out: ArrayLike | None = None,
) -> tuple[Array, Array, Array, Array, Array]: ...
def gather_and_maybe_dequant_cache(
    src_cache: ArrayLike,
    dst: ArrayLike,
    block_table: ArrayLike,
    cu_seq_lens: ArrayLike,
    token_to_seq: ArrayLike | None,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: float | ArrayLike,
    seq_starts: ArrayLike | None = None,
) -> Array: ...
def gelu_and_mul(input: ArrayLike, *, out: ArrayLike | None = None) -> Array: ...
def gelu_and_mul_sparse(
    input: ArrayLike, activation_sparsity: float, approximate: str = "none", *, out: ArrayLike | None = None
) -> Array: ...
def gelu_fast(input: ArrayLike, *, out: ArrayLike | None = None) -> Array: ...
def gelu_new(input: ArrayLike, *, out: ArrayLike | None = None) -> Array: ...
def gelu_quick(input: ArrayLike, *, out: ArrayLike | None = None) -> Array: ...
def gelu_tanh_and_mul(input: ArrayLike, *, out: ArrayLike | None = None) -> Array: ...
def gemma_fused_add_rms_norm(
    input: ArrayLike, residual: ArrayLike, weight: ArrayLike, epsilon: float = 1e-06
) -> tuple[Array, Array]: ...
def gemma_rms_norm(
    input: ArrayLike, weight: ArrayLike, epsilon: float = 1e-06, *, out: ArrayLike | None = None
) -> Array: ...
def get_cutlass_batched_moe_mm_data(
    expert_offsets: ArrayLike,
    problem_sizes1: ArrayLike,
    problem_sizes2: ArrayLike,
    expert_num_tokens: ArrayLike,
    num_local_experts: int,
    padded_m: int,
    n: int,
    k: int,
) -> tuple[Array, Array, Array]: ...
@overload
def get_cutlass_moe_mm_data(
    topk_ids: ArrayLike,
    expert_offsets: ArrayLike,
    problem_sizes1: ArrayLike,
    problem_sizes2: ArrayLike,
    input_permutation: ArrayLike,
    output_permutation: ArrayLike,
    num_experts: int,
    n: int,
    k: int,
    blockscale_offsets: None = None,
    is_gated: bool = True,
) -> tuple[Array, Array, Array, Array, Array]: ...
@overload
def get_cutlass_moe_mm_data(
    topk_ids: ArrayLike,
    expert_offsets: ArrayLike,
    problem_sizes1: ArrayLike,
    problem_sizes2: ArrayLike,
    input_permutation: ArrayLike,
    output_permutation: ArrayLike,
    num_experts: int,
    n: int,
    k: int,
    is_gated: bool = True,
    *,
    blockscale_offsets: ArrayLike,
) -> tuple[Array, Array, Array, Array, Array, Array]: ...
@overload
def get_cutlass_moe_mm_data(
    topk_ids: ArrayLike,
    expert_offsets: ArrayLike,
    problem_sizes1: ArrayLike,
    problem_sizes2: ArrayLike,
    input_permutation: ArrayLike,
    output_permutation: ArrayLike,
    num_experts: int,
    n: int,
    k: int,
    blockscale_offsets: ArrayLike,
    is_gated: bool = True,
) -> tuple[Array, Array, Array, Array, Array, Array]: ...
def get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
    expert_first_token_offset: ArrayLike,
    problem_sizes1: ArrayLike,
    problem_sizes2: ArrayLike,
    n: int,
    k: int,
    swap_ab: bool,
) -> tuple[Array, Array]: ...
def ggml_dequantize(W: ArrayLike, quant_type: int, *, out: ArrayLike | None = None) -> Array: ...
def gptq_dequantize(
    qweight: ArrayLike,
    qzeros: ArrayLike,
    scales: ArrayLike,
    g_idx: ArrayLike | None = None,
    bits: int = 4,
    use_v2_format: bool = False,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
def grouped_scaled_mm(
    a: ArrayLike,
    b: ArrayLike,
    a_scales: float | ArrayLike,
    b_scales: ArrayLike,
    row_groups: ArrayLike | None = None,
    group_begins: ArrayLike | None = None,
    group_sizes: ArrayLike | None = None,
    expected_rows: int = 0,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
def grouped_topk(
    scores: ArrayLike,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: ArrayLike | None = None,
    scoring_func: int = 0,
    group_score: str = "top2_sum",
    is_padding: ArrayLike | None = None,
    *,
    topk_weights: ArrayLike | None = None,
    topk_ids: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def hadacore_transform(x: ArrayLike, *, out: ArrayLike | None = None) -> Array: ...
def indexer_k_quant_and_cache(
    k: ArrayLike, kv_cache: ArrayLike, slot_mapping: ArrayLike, quant_block_size: int, kv_cache_dtype: str = "auto"
) -> Array: ...
@overload
def layer_norm(
    input: ArrayLike,
    weight: ArrayLike | None,
    bias: ArrayLike | None,
    epsilon: float = 1e-05,
    residual: None = None,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
@overload
def layer_norm(
    input: ArrayLike,
    weight: ArrayLike | None,
    bias: ArrayLike | None,
    epsilon: float = 1e-05,
    *,
    residual: ArrayLike,
    out: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
@overload
def layer_norm(
    input: ArrayLike,
    weight: ArrayLike | None,
    bias: ArrayLike | None,
    epsilon: float,
    residual: ArrayLike,
    *,
    out: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def masked_embedding(
    ids: ArrayLike,
    weight: ArrayLike,
    org_start: int = 0,
    org_end: int | None = None,
    num_org_pad: int = 0,
    added_start: int = 0,
    added_end: int = 0,
    vocab_size: int | None = None,
    *,
    scale: float = 1.0,
    weight_scale: ArrayLike | None = None,
    positions: ArrayLike | None = None,
    position_weight: ArrayLike | None = None,
    quant_type: int | None = None,
    out: ArrayLike | None = None,
) -> Array: ...
def masked_moe_activation(
    out: ArrayLike,
    input: ArrayLike,
    valid_token_counts: ArrayLike,
    activation: str,
    clamp_limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    situ_beta: float = 1.0,
    situ_linear_beta: float = -1.0,
) -> Array: ...
@overload
def merge_attn_states(
    prefix_output: ArrayLike,
    prefix_lse: ArrayLike,
    suffix_output: ArrayLike,
    suffix_lse: ArrayLike,
    prefill_tokens_with_context: int | None = None,
    output_scale: float | ArrayLike | None = None,
    *,
    output: ArrayLike | None = None,
    output_lse: None = None,
) -> Array: ...
@overload
def merge_attn_states(
    prefix_output: ArrayLike,
    prefix_lse: ArrayLike,
    suffix_output: ArrayLike,
    suffix_lse: ArrayLike,
    prefill_tokens_with_context: int | None = None,
    output_scale: float | ArrayLike | None = None,
    *,
    output: ArrayLike | None = None,
    output_lse: ArrayLike | Literal[True],
) -> tuple[Array, Array]: ...
@overload
def merge_attn_states_n(
    partial_outputs: ArrayLike,
    partial_lses: ArrayLike,
    output_scale: float | ArrayLike | None = None,
    *,
    output: ArrayLike | None = None,
    output_lse: None = None,
) -> Array: ...
@overload
def merge_attn_states_n(
    partial_outputs: ArrayLike,
    partial_lses: ArrayLike,
    output_scale: float | ArrayLike | None = None,
    *,
    output: ArrayLike | None = None,
    output_lse: ArrayLike | Literal[True],
) -> tuple[Array, Array]: ...
@overload
def merge_top_k(
    shard_indices: ArrayLike,
    shard_values: ArrayLike,
    k: int,
    first_tokens: ArrayLike | None = None,
    *,
    indices: ArrayLike | None = None,
    values: None = None,
) -> Array: ...
@overload
def merge_top_k(
    shard_indices: ArrayLike,
    shard_values: ArrayLike,
    k: int,
    first_tokens: ArrayLike | None = None,
    *,
    indices: ArrayLike | None = None,
    values: ArrayLike | Literal[True],
) -> tuple[Array, Array]: ...
@overload
def moe_align_block_size(
    topk_ids: ArrayLike,
    num_experts: int,
    block_size: int,
    sorted_token_ids: ArrayLike,
    experts_ids: ArrayLike,
    num_tokens_post_pad: ArrayLike,
    expert_map: ArrayLike | None = None,
    scatter_idx: None = None,
) -> tuple[Array, Array, Array]: ...
@overload
def moe_align_block_size(
    topk_ids: ArrayLike,
    num_experts: int,
    block_size: int,
    sorted_token_ids: ArrayLike,
    experts_ids: ArrayLike,
    num_tokens_post_pad: ArrayLike,
    expert_map: ArrayLike | None = None,
    *,
    scatter_idx: ArrayLike,
) -> tuple[Array, Array, Array, Array]: ...
@overload
def moe_align_block_size(
    topk_ids: ArrayLike,
    num_experts: int,
    block_size: int,
    sorted_token_ids: ArrayLike,
    experts_ids: ArrayLike,
    num_tokens_post_pad: ArrayLike,
    expert_map: ArrayLike | None,
    scatter_idx: ArrayLike,
) -> tuple[Array, Array, Array, Array]: ...
def moe_lora_align_block_size(
    topk_ids: ArrayLike,
    token_lora_mapping: ArrayLike,
    num_experts: int,
    block_size: int,
    max_loras: int,
    max_num_tokens_padded: int,
    max_num_m_blocks: int,
    sorted_token_ids: ArrayLike,
    experts_ids: ArrayLike,
    num_tokens_post_pad: ArrayLike,
    adapter_enabled: ArrayLike,
    lora_ids: ArrayLike,
    expert_map: ArrayLike | None = None,
) -> tuple[Array, Array, Array]: ...
def moe_permute(
    input: ArrayLike,
    topk_ids: ArrayLike,
    token_expert_indices: ArrayLike | None,
    expert_map: ArrayLike | None,
    n_expert: int,
    n_local_expert: int,
    topk: int,
    permuted_input: ArrayLike,
    expert_first_token_offset: ArrayLike,
    inv_permuted_idx: ArrayLike,
    permuted_idx: ArrayLike,
) -> tuple[Array, Array, Array, Array]: ...
def moe_sum(
    input: ArrayLike,
    topk_ids: ArrayLike | None = None,
    expert_map: ArrayLike | None = None,
    *,
    output: ArrayLike | None = None,
) -> Array: ...
def moe_unpermute(
    permuted_hidden_states: ArrayLike,
    topk_weights: ArrayLike,
    inv_permuted_idx: ArrayLike,
    expert_first_token_offset: ArrayLike | None,
    topk: int,
    *,
    hidden_states: ArrayLike | None = None,
) -> Array: ...
@overload
def mrope(
    positions: ArrayLike,
    query: ArrayLike,
    key: None,
    head_size: int,
    cos_sin_cache: ArrayLike,
    is_neox: bool,
    mrope_section: Array | Sequence[int],
    mrope_interleaved: bool = False,
) -> Array: ...
@overload
def mrope(
    positions: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    head_size: int,
    cos_sin_cache: ArrayLike,
    is_neox: bool,
    mrope_section: Array | Sequence[int],
    mrope_interleaved: bool = False,
) -> tuple[Array, Array]: ...
def mul_and_silu(input: ArrayLike, *, out: ArrayLike | None = None) -> Array: ...
def mxfp4_dequantize(
    input: ArrayLike, scale: ArrayLike, is_sf_swizzled_layout: bool = False, *, out: ArrayLike | None = None
) -> Array: ...
def mxfp4_experts_quant(
    output: ArrayLike,
    output_scale: ArrayLike,
    input: ArrayLike,
    input_offset_by_experts: ArrayLike,
    output_scale_offset_by_experts: ArrayLike,
    n_experts: int = 0,
    scale_mode: str = "ocp",
) -> tuple[Array, Array]: ...
def mxfp4_quantize(
    input: ArrayLike,
    is_sf_swizzled_layout: bool = False,
    scale_mode: str = "ocp",
    *,
    output: ArrayLike | None = None,
    output_scale: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def mxfp8_dequantize(
    input: ArrayLike, scale: ArrayLike, is_sf_swizzled_layout: bool = False, *, out: ArrayLike | None = None
) -> Array: ...
def mxfp8_experts_quant(
    input: ArrayLike,
    problem_sizes: ArrayLike,
    expert_offsets: ArrayLike,
    blockscale_offsets: ArrayLike,
    quant_output: ArrayLike,
    scale_factor: ArrayLike,
    scale_mode: str = "ceil",
) -> tuple[Array, Array]: ...
def mxfp8_quantize(
    input: ArrayLike,
    is_sf_swizzled_layout: bool = False,
    scale_mode: str = "ceil",
    *,
    output: ArrayLike | None = None,
    output_scale: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def nvfp4_dequantize(
    input: ArrayLike,
    scale: ArrayLike,
    global_scale: float | ArrayLike,
    is_sf_swizzled_layout: bool = True,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
def packed_gemm(
    x: ArrayLike,
    weight: ArrayLike,
    format: str,
    bias: ArrayLike | None = None,
    token_scales: ArrayLike | None = None,
    channel_scales: ArrayLike | None = None,
    activation: str = "",
    residual: ArrayLike | None = None,
    out_scale: float | ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
@overload
def paged_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    cu_query_lens: ArrayLike | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float | ArrayLike = 1.0,
    v_scale: float | ArrayLike = 1.0,
    batch_invariant: bool = False,
    workspace: None = None,
    out: ArrayLike | None = None,
    lse: None = None,
) -> Array: ...
@overload
def paged_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    cu_query_lens: ArrayLike | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float | ArrayLike = 1.0,
    v_scale: float | ArrayLike = 1.0,
    batch_invariant: bool = False,
    workspace: ArrayLike,
    out: ArrayLike | None = None,
    lse: None = None,
) -> tuple[Array, Array]: ...
@overload
def paged_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    cu_query_lens: ArrayLike | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float | ArrayLike = 1.0,
    v_scale: float | ArrayLike = 1.0,
    batch_invariant: bool = False,
    workspace: None = None,
    out: ArrayLike | None = None,
    lse: ArrayLike | Literal[True],
) -> tuple[Array, Array]: ...
@overload
def paged_attention(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    *,
    cu_query_lens: ArrayLike | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: ArrayLike | None = None,
    sinks: ArrayLike | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: float | ArrayLike = 1.0,
    v_scale: float | ArrayLike = 1.0,
    batch_invariant: bool = False,
    workspace: ArrayLike,
    out: ArrayLike | None = None,
    lse: ArrayLike | Literal[True],
) -> tuple[Array, Array, Array]: ...
def paged_attention_v1(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    num_kv_heads: int,
    scale: float,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: ArrayLike | None,
    kv_cache_dtype: str,
    k_scale: float | ArrayLike,
    v_scale: float | ArrayLike,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
def paged_attention_v2(
    query: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    num_kv_heads: int,
    scale: float,
    block_tables: ArrayLike,
    seq_lens: ArrayLike,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: ArrayLike | None,
    kv_cache_dtype: str,
    k_scale: float | ArrayLike,
    v_scale: float | ArrayLike,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    out: ArrayLike | None = None,
    exp_sum: ArrayLike | None = None,
    max_logits: ArrayLike | None = None,
    tmp_out: ArrayLike | None = None,
) -> Array: ...
def per_token_group_fp8_quant(
    input: ArrayLike,
    group_size: int,
    eps: float = 1e-10,
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    scale_ue8m0: bool = False,
    *,
    output_q: ArrayLike | None = None,
    output_s: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def per_token_group_fp8_quant_packed(
    input: ArrayLike,
    group_size: int = 128,
    eps: float = 1e-10,
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    *,
    output_q: ArrayLike | None = None,
    output_s_packed: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def per_token_group_quant_int8(
    input: ArrayLike,
    group_size: int,
    eps: float = 1e-10,
    int8_min: float | None = None,
    int8_max: float | None = None,
    truncates: bool = False,
    *,
    output_q: ArrayLike | None = None,
    output_s: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def per_token_quant_int8(
    input: ArrayLike, *, result: ArrayLike | None = None, scale: ArrayLike | None = None
) -> tuple[Array, Array]: ...
def permute_cols(A: ArrayLike, perm: ArrayLike, *, out: ArrayLike | None = None) -> Array: ...
def persistent_masked_m_silu_mul_quant(
    input: ArrayLike, counts: ArrayLike, y_q: ArrayLike, y_s: ArrayLike, use_ue8m0: bool = False, group_size: int = 128
) -> tuple[Array, Array]: ...
@overload
def rejection_sample(
    draft_token_ids: ArrayLike,
    target_probs: ArrayLike,
    draft_probs: ArrayLike | None = None,
    draft_lens: ArrayLike | None = None,
    seeds: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
    num_accepted: None = None,
) -> Array: ...
@overload
def rejection_sample(
    draft_token_ids: ArrayLike,
    target_probs: ArrayLike,
    draft_probs: ArrayLike | None = None,
    draft_lens: ArrayLike | None = None,
    seeds: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
    num_accepted: ArrayLike | Literal[True],
) -> tuple[Array, Array]: ...
def relu2(input: ArrayLike, *, out: ArrayLike | None = None) -> Array: ...
def relu_squared(input: ArrayLike, *, out: ArrayLike | None = None) -> Array: ...
def reshape_and_cache(
    key: ArrayLike,
    value: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    slot_mapping: ArrayLike,
    kv_cache_dtype: str = "auto",
    k_scale: float | ArrayLike = 1.0,
    v_scale: float | ArrayLike = 1.0,
    interleaved_v: bool = False,
) -> tuple[Array, Array]: ...
def reshape_and_cache_flash(
    key: ArrayLike,
    value: ArrayLike,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    slot_mapping: ArrayLike,
    kv_cache_dtype: str = "auto",
    k_scale: float | ArrayLike = 1.0,
    v_scale: float | ArrayLike = 1.0,
) -> tuple[Array, Array]: ...
def rms_norm(
    input: ArrayLike, weight: ArrayLike | None, epsilon: float = 1e-06, *, out: ArrayLike | None = None
) -> Array: ...
@overload
def rms_norm_dynamic_per_token_quant(
    input: ArrayLike,
    weight: ArrayLike | None,
    epsilon: float = 1e-06,
    scale_ub: float | ArrayLike | None = None,
    residual: None = None,
    *,
    result: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
@overload
def rms_norm_dynamic_per_token_quant(
    input: ArrayLike,
    weight: ArrayLike | None,
    epsilon: float = 1e-06,
    scale_ub: float | ArrayLike | None = None,
    *,
    residual: ArrayLike,
    result: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> tuple[Array, Array, Array]: ...
@overload
def rms_norm_dynamic_per_token_quant(
    input: ArrayLike,
    weight: ArrayLike | None,
    epsilon: float,
    scale_ub: float | ArrayLike | None,
    residual: ArrayLike,
    *,
    result: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> tuple[Array, Array, Array]: ...
def rms_norm_gated(
    input: ArrayLike,
    weight: ArrayLike | None,
    z: ArrayLike | None = None,
    epsilon: float = 1e-05,
    group_size: int = 0,
    norm_before_gate: bool = False,
    activation: str = "swish",
    *,
    out: ArrayLike | None = None,
) -> Array: ...
@overload
def rms_norm_per_block_quant(
    input: ArrayLike,
    weight: ArrayLike | None,
    epsilon: float = 1e-06,
    scale_ub: float | ArrayLike | None = None,
    residual: None = None,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    *,
    result: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
@overload
def rms_norm_per_block_quant(
    input: ArrayLike,
    weight: ArrayLike | None,
    epsilon: float = 1e-06,
    scale_ub: float | ArrayLike | None = None,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    *,
    residual: ArrayLike,
    result: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> tuple[Array, Array, Array]: ...
@overload
def rms_norm_per_block_quant(
    input: ArrayLike,
    weight: ArrayLike | None,
    epsilon: float,
    scale_ub: float | ArrayLike | None,
    residual: ArrayLike,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    *,
    result: ArrayLike | None = None,
    scale: ArrayLike | None = None,
) -> tuple[Array, Array, Array]: ...
def rms_norm_static_fp8_quant(
    input: ArrayLike,
    weight: ArrayLike | None,
    scale: float | ArrayLike,
    epsilon: float = 1e-06,
    *,
    result: ArrayLike | None = None,
) -> Array: ...
def rotary_and_cache(
    positions: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    cos_sin_cache: ArrayLike,
    is_neox: bool,
    key_cache: ArrayLike,
    value_cache: ArrayLike,
    slot_mapping: ArrayLike,
    kv_cache_dtype: str = "auto",
    k_scale: float | ArrayLike = 1.0,
    v_scale: float | ArrayLike = 1.0,
    rope_dim_offset: int = 0,
) -> tuple[Array, Array, Array, Array]: ...
@overload
def rotary_embedding(
    positions: ArrayLike,
    query: ArrayLike,
    key: None,
    head_size: int,
    cos_sin_cache: ArrayLike,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> Array: ...
@overload
def rotary_embedding(
    positions: ArrayLike,
    query: ArrayLike,
    key: ArrayLike,
    head_size: int,
    cos_sin_cache: ArrayLike,
    is_neox: bool,
    rope_dim_offset: int = 0,
    inverse: bool = False,
) -> tuple[Array, Array]: ...
@overload
def sample(
    logits: ArrayLike,
    seeds: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    temperature: float | ArrayLike | None = None,
    top_k: float | ArrayLike | None = None,
    top_p: float | ArrayLike | None = None,
    min_p: float | ArrayLike | None = None,
    *,
    repetition_penalty: float | ArrayLike | None = None,
    frequency_penalty: float | ArrayLike | None = None,
    presence_penalty: float | ArrayLike | None = None,
    prompt_bitmap: ArrayLike | None = None,
    output_counts: ArrayLike | None = None,
    logit_bias: ArrayLike | None = None,
    allowed_bitmap: ArrayLike | None = None,
    first_token: int = 0,
    out: ArrayLike | None = None,
    logprobs: None = None,
    scores: None = None,
) -> Array: ...
@overload
def sample(
    logits: ArrayLike,
    seeds: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    temperature: float | ArrayLike | None = None,
    top_k: float | ArrayLike | None = None,
    top_p: float | ArrayLike | None = None,
    min_p: float | ArrayLike | None = None,
    *,
    repetition_penalty: float | ArrayLike | None = None,
    frequency_penalty: float | ArrayLike | None = None,
    presence_penalty: float | ArrayLike | None = None,
    prompt_bitmap: ArrayLike | None = None,
    output_counts: ArrayLike | None = None,
    logit_bias: ArrayLike | None = None,
    allowed_bitmap: ArrayLike | None = None,
    first_token: int = 0,
    out: ArrayLike | None = None,
    logprobs: None = None,
    scores: ArrayLike | Literal[True],
) -> tuple[Array, Array]: ...
@overload
def sample(
    logits: ArrayLike,
    seeds: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    temperature: float | ArrayLike | None = None,
    top_k: float | ArrayLike | None = None,
    top_p: float | ArrayLike | None = None,
    min_p: float | ArrayLike | None = None,
    *,
    repetition_penalty: float | ArrayLike | None = None,
    frequency_penalty: float | ArrayLike | None = None,
    presence_penalty: float | ArrayLike | None = None,
    prompt_bitmap: ArrayLike | None = None,
    output_counts: ArrayLike | None = None,
    logit_bias: ArrayLike | None = None,
    allowed_bitmap: ArrayLike | None = None,
    first_token: int = 0,
    out: ArrayLike | None = None,
    logprobs: ArrayLike | Literal[True],
    scores: None = None,
) -> tuple[Array, Array]: ...
@overload
def sample(
    logits: ArrayLike,
    seeds: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    temperature: float | ArrayLike | None = None,
    top_k: float | ArrayLike | None = None,
    top_p: float | ArrayLike | None = None,
    min_p: float | ArrayLike | None = None,
    *,
    repetition_penalty: float | ArrayLike | None = None,
    frequency_penalty: float | ArrayLike | None = None,
    presence_penalty: float | ArrayLike | None = None,
    prompt_bitmap: ArrayLike | None = None,
    output_counts: ArrayLike | None = None,
    logit_bias: ArrayLike | None = None,
    allowed_bitmap: ArrayLike | None = None,
    first_token: int = 0,
    out: ArrayLike | None = None,
    logprobs: ArrayLike | Literal[True],
    scores: ArrayLike | Literal[True],
) -> tuple[Array, Array, Array]: ...
def scaled_fp4_experts_quant(
    output: ArrayLike,
    output_scale: ArrayLike,
    input: ArrayLike,
    input_global_scale: ArrayLike,
    input_offset_by_experts: ArrayLike,
    output_scale_offset_by_experts: ArrayLike,
) -> tuple[Array, Array]: ...
def scaled_fp4_quant(
    input: ArrayLike,
    input_scale: float | ArrayLike,
    is_sf_swizzled_layout: bool = True,
    four_over_six: bool = False,
    tile_rows: int = 128,
    *,
    output: ArrayLike | None = None,
    output_scale: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def shuffle_rows(
    input_tensor: ArrayLike, dst2src_map: ArrayLike, *, output_tensor: ArrayLike | None = None
) -> Array: ...
def silu_and_mul(input: ArrayLike, *, result: ArrayLike | None = None) -> Array: ...
def silu_and_mul_mxfp4_experts_quant(
    output: ArrayLike,
    output_scale: ArrayLike,
    input: ArrayLike,
    input_offset_by_experts: ArrayLike,
    output_scale_offset_by_experts: ArrayLike,
    n_experts: int = 0,
    scale_mode: str = "ocp",
) -> tuple[Array, Array]: ...
def silu_and_mul_nvfp4_quant(
    input: ArrayLike,
    input_global_scale: float | ArrayLike,
    *,
    result: ArrayLike | None = None,
    result_block_scale: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def silu_and_mul_per_block_quant(
    input: ArrayLike,
    group_size: int,
    scale_ub: float | ArrayLike | None = None,
    is_scale_transposed: bool = False,
    *,
    out: ArrayLike | None = None,
    scales: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def silu_and_mul_quant(input: ArrayLike, scale: float | ArrayLike, *, result: ArrayLike | None = None) -> Array: ...
def silu_and_mul_scaled_fp4_experts_quant(
    output: ArrayLike,
    output_scale: ArrayLike,
    input: ArrayLike,
    input_global_scale: ArrayLike,
    input_offset_by_experts: ArrayLike,
    output_scale_offset_by_experts: ArrayLike,
) -> tuple[Array, Array]: ...
def silu_and_mul_with_clamp(
    input: ArrayLike, limit: float, alpha: float = 1.0, beta: float = 0.0, *, result: ArrayLike | None = None
) -> Array: ...
def situ_and_mul(
    input: ArrayLike, beta: float = 1.0, linear_beta: float = -1.0, *, out: ArrayLike | None = None
) -> Array: ...
def situ_and_mul_quant(
    scale: ArrayLike,
    input: ArrayLike,
    beta: float = 1.0,
    linear_beta: float = -1.0,
    group_size: int = 128,
    num_valid_tokens: ArrayLike | None = None,
    topk: int = 1,
    *,
    out: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
def softmax(
    logits: ArrayLike, temperature: float | ArrayLike | None = None, *, out: ArrayLike | None = None
) -> Array: ...
def static_scaled_fp8_quant(
    input: ArrayLike,
    scale: float | ArrayLike,
    group_rows: int = 0,
    group_columns: int = 0,
    *,
    result: ArrayLike | None = None,
) -> Array: ...
def static_scaled_int8_quant(
    input: ArrayLike, scale: float | ArrayLike, azp: ArrayLike | None = None, *, result: ArrayLike | None = None
) -> Array: ...
def swigluoai_and_mul(
    input: ArrayLike, alpha: float = 1.702, limit: float = 7.0, *, out: ArrayLike | None = None
) -> Array: ...
def swiglustep_and_mul(input: ArrayLike, limit: float = 7.0, *, out: ArrayLike | None = None) -> Array: ...
@overload
def token_logprobs(
    logits: ArrayLike,
    token_ids: ArrayLike,
    temperature: float | ArrayLike | None = None,
    *,
    logprobs: ArrayLike | None = None,
    ranks: None = None,
) -> Array: ...
@overload
def token_logprobs(
    logits: ArrayLike,
    token_ids: ArrayLike,
    temperature: float | ArrayLike | None = None,
    *,
    logprobs: ArrayLike | None = None,
    ranks: ArrayLike | Literal[True],
) -> tuple[Array, Array]: ...
@overload
def top_k_per_row(
    logits: ArrayLike,
    k: int,
    row_starts: ArrayLike | None = None,
    row_ends: ArrayLike | None = None,
    row_k: ArrayLike | None = None,
    *,
    next_n: int = 0,
    sorted: bool = False,
    indices: ArrayLike | None = None,
    values: None = None,
) -> Array: ...
@overload
def top_k_per_row(
    logits: ArrayLike,
    k: int,
    row_starts: ArrayLike | None = None,
    row_ends: ArrayLike | None = None,
    row_k: ArrayLike | None = None,
    *,
    next_n: int = 0,
    sorted: bool = False,
    indices: ArrayLike | None = None,
    values: ArrayLike | Literal[True],
) -> tuple[Array, Array]: ...
def top_k_top_p_mask(
    logits: ArrayLike,
    top_k: float | ArrayLike | None = None,
    top_p: float | ArrayLike | None = None,
    min_p: float | ArrayLike | None = None,
    temperature: float | ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
def top_k_top_p_renorm(
    probs: ArrayLike,
    top_k: float | ArrayLike | None = None,
    top_p: float | ArrayLike | None = None,
    min_p: float | ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
@overload
def topk_sigmoid(
    topk_weights: ArrayLike,
    topk_ids: ArrayLike,
    token_expert_indices: None,
    gating_output: ArrayLike,
    renormalize: bool = False,
    e_score_correction_bias: ArrayLike | None = None,
    routed_scaling_factor: float = 1.0,
    is_padding: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
@overload
def topk_sigmoid(
    topk_weights: ArrayLike,
    topk_ids: ArrayLike,
    token_expert_indices: ArrayLike,
    gating_output: ArrayLike,
    renormalize: bool = False,
    e_score_correction_bias: ArrayLike | None = None,
    routed_scaling_factor: float = 1.0,
    is_padding: ArrayLike | None = None,
) -> tuple[Array, Array, Array]: ...
@overload
def topk_softmax(
    topk_weights: ArrayLike,
    topk_ids: ArrayLike,
    token_expert_indices: None,
    gating_output: ArrayLike,
    renormalize: bool = False,
    e_score_correction_bias: ArrayLike | None = None,
    is_padding: ArrayLike | None = None,
) -> tuple[Array, Array]: ...
@overload
def topk_softmax(
    topk_weights: ArrayLike,
    topk_ids: ArrayLike,
    token_expert_indices: ArrayLike,
    gating_output: ArrayLike,
    renormalize: bool = False,
    e_score_correction_bias: ArrayLike | None = None,
    is_padding: ArrayLike | None = None,
) -> tuple[Array, Array, Array]: ...
@overload
def topk_softplus_sqrt(
    topk_weights: ArrayLike,
    topk_ids: ArrayLike,
    token_expert_indices: None,
    gating_output: ArrayLike,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: ArrayLike | None = None,
    input_ids: ArrayLike | None = None,
    hash_indices_table: ArrayLike | None = None,
    is_padding: ArrayLike | None = None,
    bias_vl: ArrayLike | None = None,
    image_sentinel_lo: int = 0,
) -> tuple[Array, Array]: ...
@overload
def topk_softplus_sqrt(
    topk_weights: ArrayLike,
    topk_ids: ArrayLike,
    token_expert_indices: ArrayLike,
    gating_output: ArrayLike,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: ArrayLike | None = None,
    input_ids: ArrayLike | None = None,
    hash_indices_table: ArrayLike | None = None,
    is_padding: ArrayLike | None = None,
    bias_vl: ArrayLike | None = None,
    image_sentinel_lo: int = 0,
) -> tuple[Array, Array, Array]: ...
@overload
def verify_tree(
    draft_token_ids: ArrayLike,
    next_token: ArrayLike,
    next_sibling: ArrayLike,
    target_probs: ArrayLike | None = None,
    target_token_ids: ArrayLike | None = None,
    retrieve_index: ArrayLike | None = None,
    seeds: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
    accepted_index: None = None,
    num_accepted: None = None,
) -> Array: ...
@overload
def verify_tree(
    draft_token_ids: ArrayLike,
    next_token: ArrayLike,
    next_sibling: ArrayLike,
    target_probs: ArrayLike | None = None,
    target_token_ids: ArrayLike | None = None,
    retrieve_index: ArrayLike | None = None,
    seeds: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
    accepted_index: None = None,
    num_accepted: ArrayLike | Literal[True],
) -> tuple[Array, Array]: ...
@overload
def verify_tree(
    draft_token_ids: ArrayLike,
    next_token: ArrayLike,
    next_sibling: ArrayLike,
    target_probs: ArrayLike | None = None,
    target_token_ids: ArrayLike | None = None,
    retrieve_index: ArrayLike | None = None,
    seeds: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
    accepted_index: ArrayLike | Literal[True],
    num_accepted: None = None,
) -> tuple[Array, Array]: ...
@overload
def verify_tree(
    draft_token_ids: ArrayLike,
    next_token: ArrayLike,
    next_sibling: ArrayLike,
    target_probs: ArrayLike | None = None,
    target_token_ids: ArrayLike | None = None,
    retrieve_index: ArrayLike | None = None,
    seeds: ArrayLike | None = None,
    steps: ArrayLike | None = None,
    *,
    out: ArrayLike | None = None,
    accepted_index: ArrayLike | Literal[True],
    num_accepted: ArrayLike | Literal[True],
) -> tuple[Array, Array, Array]: ...
def xielu(
    input: ArrayLike,
    alpha_p: float | ArrayLike,
    alpha_n: float | ArrayLike,
    beta: float = 0.5,
    eps: float = -1e-06,
    *,
    out: ArrayLike | None = None,
) -> Array: ...
