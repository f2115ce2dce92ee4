"""Written by tests/derived.py."""

from typing import Any, Literal, TypeVar, overload

from pykv._types import Array, ScalarOrArray, Stream

_Array = TypeVar("_Array", bound=Array)

def awq_dequantize(
    qweight: Array, scales: Array, zeros: Array, *, out: Array | None = None, stream: Stream = None
) -> Any: ...
def concat_mla_q(ql_nope: _Array, q_pe: Array, *, q_out: Array | None = None, stream: Stream = None) -> _Array: ...
def convert_fp8(
    input: Array,
    scale: ScalarOrArray = 1.0,
    kv_dtype: str = "fp8",
    *,
    output: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def cutlass_scaled_fp4_mm(
    a: Array,
    b: Array,
    block_scale_a: Array,
    block_scale_b: Array,
    alpha: ScalarOrArray,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def cutlass_scaled_mm(
    a: Array,
    b: Array,
    a_scales: ScalarOrArray,
    b_scales: ScalarOrArray,
    bias: Array | None = None,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def cutlass_scaled_mm_azp(
    a: Array,
    b: Array,
    a_scales: ScalarOrArray,
    b_scales: ScalarOrArray,
    azp_adj: Array,
    azp: Array | None = None,
    bias: Array | None = None,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def dsv3_fused_a_gemm(mat_a: _Array, mat_b: Array, *, output: Array | None = None, stream: Stream = None) -> _Array: ...
def dsv3_router_gemm(
    hidden_states: Array, router_weight: Array, *, output: Array | None = None, stream: Stream = None
) -> Any: ...
def dual_chunk_rotary_embedding(
    positions: Array,
    query: Array,
    key: Array | None,
    head_size: int,
    cos_sin_cache: Array,
    is_neox: bool,
    chunk_size: int,
    local_size: int,
    offsets: Array | None = None,
    *,
    query_out: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def dynamic_per_token_scaled_fp8_quant(
    input: Array,
    scale_ub: ScalarOrArray | None = None,
    *,
    result: Array | None = None,
    scale: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def dynamic_scaled_fp8_quant(
    input: Array, *, result: Array | None = None, scale: Array | None = None, stream: Stream = None
) -> tuple[Any, Any]: ...
def dynamic_scaled_int8_quant(
    input: Array,
    azp: Array | None = None,
    *,
    result: Array | None = None,
    scale: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def fatrelu_and_mul(
    input: _Array, threshold: float = 0.0, *, out: Array | None = None, stream: Stream = None
) -> _Array: ...
def fp32_router_gemm(a: Array, b: Array, *, output: Array | None = None, stream: Stream = None) -> Any: ...
def fp8_dequantize(
    input: Array,
    scale: ScalarOrArray,
    group_rows: int = 0,
    group_columns: int = 0,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def fused_add_rms_norm_static_fp8_quant(
    input: Array,
    residual: Array,
    weight: Array | None,
    scale: ScalarOrArray,
    epsilon: float = 1e-06,
    *,
    result: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def fused_moe(
    x: _Array,
    w1: Array,
    w2: Array,
    topk_weights: Array,
    topk_ids: Array,
    activation: str = "silu",
    w1_bias: Array | None = None,
    w2_bias: Array | None = None,
    expert_map: Array | None = None,
    w1_format: str = "",
    w2_format: str = "",
    apply_router_weight_on_input: bool = False,
    clamp_limit: float = 0.0,
    alpha: float = 1.0,
    beta: float = 0.0,
    situ_beta: float = 1.0,
    situ_linear_beta: float = -1.0,
    w1_scale: Array | None = None,
    w2_scale: Array | None = None,
    a1_scale: Array | None = None,
    a2_scale: Array | None = None,
    workspace: Array | None = None,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
def fused_qknorm_rope_cache(
    qkv: _Array,
    q_weight: Array,
    k_weight: Array,
    cos: Array,
    sin: Array,
    positions: Array,
    slot_mapping: Array,
    k_cache: Array,
    v_cache: Array,
    head_dim: int,
    num_q_heads: int,
    num_kv_heads: int,
    rotary_pairs: int,
    epsilon: float,
    norm_weight_bias: float = 0.0,
    kv_cache_dtype: str = "auto",
    k_scale: ScalarOrArray | None = None,
    v_scale: ScalarOrArray | None = None,
    *,
    q_out: Array | None = None,
    k_out: Array | None = None,
    v_out: Array | None = None,
    stream: Stream = None,
) -> tuple[_Array, _Array, _Array]: ...
def gelu_and_mul(input: _Array, *, out: Array | None = None, stream: Stream = None) -> _Array: ...
def gelu_and_mul_sparse(
    input: _Array,
    activation_sparsity: float,
    approximate: str = "none",
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
def gelu_fast(input: _Array, *, out: Array | None = None, stream: Stream = None) -> _Array: ...
def gelu_new(input: _Array, *, out: Array | None = None, stream: Stream = None) -> _Array: ...
def gelu_quick(input: _Array, *, out: Array | None = None, stream: Stream = None) -> _Array: ...
def gelu_tanh_and_mul(input: _Array, *, out: Array | None = None, stream: Stream = None) -> _Array: ...
def gemma_rms_norm(
    input: _Array, weight: Array, epsilon: float = 1e-06, *, out: Array | None = None, stream: Stream = None
) -> _Array: ...
def ggml_dequantize(W: Array, quant_type: int, *, out: Array | None = None, stream: Stream = None) -> Any: ...
def gptq_dequantize(
    qweight: Array,
    qzeros: Array,
    scales: Array,
    g_idx: Array | None = None,
    bits: int = 4,
    use_v2_format: bool = False,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def grouped_scaled_mm(
    a: Array,
    b: Array,
    a_scales: ScalarOrArray,
    b_scales: Array,
    row_groups: Array | None = None,
    group_begins: Array | None = None,
    group_sizes: Array | None = None,
    expected_rows: int = 0,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def grouped_topk(
    scores: Array,
    n_group: int,
    topk_group: int,
    topk: int,
    renormalize: bool,
    routed_scaling_factor: float,
    bias: Array | None = None,
    scoring_func: int = 0,
    group_score: str = "top2_sum",
    is_padding: Array | None = None,
    *,
    topk_weights: Array | None = None,
    topk_ids: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def hadacore_transform(x: _Array, *, out: Array | None = None, stream: Stream = None) -> _Array: ...
def layer_norm(
    input: _Array,
    weight: Array | None,
    bias: Array | None,
    epsilon: float = 1e-05,
    residual: Array | None = None,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
def masked_embedding(
    ids: Array,
    weight: Array,
    org_start: int = 0,
    org_end: int | None = None,
    num_org_pad: int = 0,
    added_start: int = 0,
    added_end: int = 0,
    vocab_size: int | None = None,
    *,
    out: Array | None = None,
    scale: float = 1.0,
    weight_scale: Array | None = None,
    positions: Array | None = None,
    position_weight: Array | None = None,
    quant_type: int | None = None,
    stream: Stream = None,
) -> Any: ...
@overload
def merge_attn_states(
    prefix_output: _Array,
    prefix_lse: Array,
    suffix_output: Array,
    suffix_lse: Array,
    prefill_tokens_with_context: int | None = None,
    output_scale: ScalarOrArray | None = None,
    *,
    output_lse: Literal[False] | None = None,
    output: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
@overload
def merge_attn_states(
    prefix_output: _Array,
    prefix_lse: Array,
    suffix_output: Array,
    suffix_lse: Array,
    prefill_tokens_with_context: int | None = None,
    output_scale: ScalarOrArray | None = None,
    *,
    output_lse: Array | Literal[True],
    output: Array | None = None,
    stream: Stream = None,
) -> tuple[_Array, Any]: ...
@overload
def merge_attn_states_n(
    partial_outputs: Array,
    partial_lses: Array,
    output_scale: ScalarOrArray | None = None,
    *,
    output_lse: Literal[False] | None = None,
    output: Array | None = None,
    stream: Stream = None,
) -> Any: ...
@overload
def merge_attn_states_n(
    partial_outputs: Array,
    partial_lses: Array,
    output_scale: ScalarOrArray | None = None,
    *,
    output_lse: Array | Literal[True],
    output: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
@overload
def merge_top_k(
    shard_indices: Array,
    shard_values: Array,
    k: int,
    first_tokens: Array | None = None,
    *,
    values: Literal[False] | None = None,
    indices: Array | None = None,
    stream: Stream = None,
) -> Any: ...
@overload
def merge_top_k(
    shard_indices: Array,
    shard_values: Array,
    k: int,
    first_tokens: Array | None = None,
    *,
    values: Array | Literal[True],
    indices: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def moe_sum(
    input: Array,
    topk_ids: Array | None = None,
    expert_map: Array | None = None,
    *,
    output: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def moe_unpermute(
    permuted_hidden_states: _Array,
    topk_weights: Array,
    inv_permuted_idx: Array,
    expert_first_token_offset: Array | None,
    topk: int,
    *,
    hidden_states: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
def mul_and_silu(input: _Array, *, out: Array | None = None, stream: Stream = None) -> _Array: ...
def mxfp4_dequantize(
    input: Array, scale: Array, is_sf_swizzled_layout: bool = False, *, out: Array | None = None, stream: Stream = None
) -> Any: ...
def mxfp4_quantize(
    input: Array,
    is_sf_swizzled_layout: bool = False,
    scale_mode: str = "ocp",
    *,
    output: Array | None = None,
    output_scale: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def mxfp8_dequantize(
    input: Array, scale: Array, is_sf_swizzled_layout: bool = False, *, out: Array | None = None, stream: Stream = None
) -> Any: ...
def mxfp8_quantize(
    input: Array,
    is_sf_swizzled_layout: bool = False,
    scale_mode: str = "ceil",
    *,
    output: Array | None = None,
    output_scale: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def nvfp4_dequantize(
    input: Array,
    scale: Array,
    global_scale: ScalarOrArray,
    is_sf_swizzled_layout: bool = True,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def packed_gemm(
    x: _Array,
    weight: Array,
    format: str,
    bias: Array | None = None,
    token_scales: Array | None = None,
    channel_scales: Array | None = None,
    activation: str = "",
    residual: Array | None = None,
    out_scale: ScalarOrArray | None = None,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
@overload
def paged_attention(
    query: _Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    lse: Literal[False] | None = None,
    out: Array | None = None,
    cu_query_lens: Array | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: ScalarOrArray = 1.0,
    v_scale: ScalarOrArray = 1.0,
    batch_invariant: bool = False,
    workspace: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
@overload
def paged_attention(
    query: _Array,
    key_cache: Array,
    value_cache: Array,
    block_tables: Array,
    seq_lens: Array,
    *,
    lse: Array | Literal[True],
    out: Array | None = None,
    cu_query_lens: Array | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Array | None = None,
    sinks: Array | None = None,
    kv_cache_dtype: str = "auto",
    k_scale: ScalarOrArray = 1.0,
    v_scale: ScalarOrArray = 1.0,
    batch_invariant: bool = False,
    workspace: Array | None = None,
    stream: Stream = None,
) -> tuple[_Array, Any]: ...
def paged_attention_v1(
    query: _Array,
    key_cache: Array,
    value_cache: Array,
    num_kv_heads: int,
    scale: float,
    block_tables: Array,
    seq_lens: Array,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Array | None,
    kv_cache_dtype: str,
    k_scale: ScalarOrArray,
    v_scale: ScalarOrArray,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
def paged_attention_v2(
    query: _Array,
    key_cache: Array,
    value_cache: Array,
    num_kv_heads: int,
    scale: float,
    block_tables: Array,
    seq_lens: Array,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Array | None,
    kv_cache_dtype: str,
    k_scale: ScalarOrArray,
    v_scale: ScalarOrArray,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    out: Array | None = None,
    exp_sum: Array | None = None,
    max_logits: Array | None = None,
    tmp_out: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
def per_token_group_fp8_quant(
    input: Array,
    group_size: int,
    eps: float = 1e-10,
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    scale_ue8m0: bool = False,
    *,
    output_q: Array | None = None,
    output_s: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def per_token_group_fp8_quant_packed(
    input: Array,
    group_size: int = 128,
    eps: float = 1e-10,
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    *,
    output_q: Array | None = None,
    output_s_packed: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def per_token_group_quant_int8(
    input: Array,
    group_size: int,
    eps: float = 1e-10,
    int8_min: float | None = None,
    int8_max: float | None = None,
    truncates: bool = False,
    *,
    output_q: Array | None = None,
    output_s: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def per_token_quant_int8(
    input: Array, *, result: Array | None = None, scale: Array | None = None, stream: Stream = None
) -> tuple[Any, Any]: ...
def permute_cols(A: _Array, perm: Array, *, out: Array | None = None, stream: Stream = None) -> _Array: ...
@overload
def rejection_sample(
    draft_token_ids: Array,
    target_probs: Array,
    draft_probs: Array | None = None,
    draft_lens: Array | None = None,
    seeds: Array | None = None,
    steps: Array | None = None,
    *,
    num_accepted: Literal[False] | None = None,
    out: Array | None = None,
    stream: Stream = None,
) -> Any: ...
@overload
def rejection_sample(
    draft_token_ids: Array,
    target_probs: Array,
    draft_probs: Array | None = None,
    draft_lens: Array | None = None,
    seeds: Array | None = None,
    steps: Array | None = None,
    *,
    num_accepted: Array | Literal[True],
    out: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def relu2(input: _Array, *, out: Array | None = None, stream: Stream = None) -> _Array: ...
def relu_squared(input: _Array, *, out: Array | None = None, stream: Stream = None) -> _Array: ...
def rms_norm(
    input: _Array, weight: Array | None, epsilon: float = 1e-06, *, out: Array | None = None, stream: Stream = None
) -> _Array: ...
def rms_norm_dynamic_per_token_quant(
    input: Array,
    weight: Array | None,
    epsilon: float = 1e-06,
    scale_ub: ScalarOrArray | None = None,
    residual: Array | None = None,
    *,
    result: Array | None = None,
    scale: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def rms_norm_gated(
    input: _Array,
    weight: Array | None,
    z: Array | None = None,
    epsilon: float = 1e-05,
    group_size: int = 0,
    norm_before_gate: bool = False,
    activation: str = "swish",
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
def rms_norm_per_block_quant(
    input: Array,
    weight: Array | None,
    epsilon: float = 1e-06,
    scale_ub: ScalarOrArray | None = None,
    residual: Array | None = None,
    group_size: int = 128,
    is_scale_transposed: bool = False,
    *,
    result: Array | None = None,
    scale: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def rms_norm_static_fp8_quant(
    input: Array,
    weight: Array | None,
    scale: ScalarOrArray,
    epsilon: float = 1e-06,
    *,
    result: Array | None = None,
    stream: Stream = None,
) -> Any: ...
@overload
def sample(
    logits: Array,
    seeds: Array | None = None,
    steps: Array | None = None,
    temperature: ScalarOrArray | None = None,
    top_k: ScalarOrArray | None = None,
    top_p: ScalarOrArray | None = None,
    min_p: ScalarOrArray | None = None,
    *,
    logprobs: Literal[False] | None = None,
    scores: Literal[False] | None = None,
    out: Array | None = None,
    repetition_penalty: ScalarOrArray | None = None,
    frequency_penalty: ScalarOrArray | None = None,
    presence_penalty: ScalarOrArray | None = None,
    prompt_bitmap: Array | None = None,
    output_counts: Array | None = None,
    logit_bias: Array | None = None,
    allowed_bitmap: Array | None = None,
    first_token: int = 0,
    stream: Stream = None,
) -> Any: ...
@overload
def sample(
    logits: Array,
    seeds: Array | None = None,
    steps: Array | None = None,
    temperature: ScalarOrArray | None = None,
    top_k: ScalarOrArray | None = None,
    top_p: ScalarOrArray | None = None,
    min_p: ScalarOrArray | None = None,
    *,
    logprobs: Literal[False] | None = None,
    scores: Array | Literal[True],
    out: Array | None = None,
    repetition_penalty: ScalarOrArray | None = None,
    frequency_penalty: ScalarOrArray | None = None,
    presence_penalty: ScalarOrArray | None = None,
    prompt_bitmap: Array | None = None,
    output_counts: Array | None = None,
    logit_bias: Array | None = None,
    allowed_bitmap: Array | None = None,
    first_token: int = 0,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
@overload
def sample(
    logits: Array,
    seeds: Array | None = None,
    steps: Array | None = None,
    temperature: ScalarOrArray | None = None,
    top_k: ScalarOrArray | None = None,
    top_p: ScalarOrArray | None = None,
    min_p: ScalarOrArray | None = None,
    *,
    logprobs: Array | Literal[True],
    scores: Literal[False] | None = None,
    out: Array | None = None,
    repetition_penalty: ScalarOrArray | None = None,
    frequency_penalty: ScalarOrArray | None = None,
    presence_penalty: ScalarOrArray | None = None,
    prompt_bitmap: Array | None = None,
    output_counts: Array | None = None,
    logit_bias: Array | None = None,
    allowed_bitmap: Array | None = None,
    first_token: int = 0,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
@overload
def sample(
    logits: Array,
    seeds: Array | None = None,
    steps: Array | None = None,
    temperature: ScalarOrArray | None = None,
    top_k: ScalarOrArray | None = None,
    top_p: ScalarOrArray | None = None,
    min_p: ScalarOrArray | None = None,
    *,
    logprobs: Array | Literal[True],
    scores: Array | Literal[True],
    out: Array | None = None,
    repetition_penalty: ScalarOrArray | None = None,
    frequency_penalty: ScalarOrArray | None = None,
    presence_penalty: ScalarOrArray | None = None,
    prompt_bitmap: Array | None = None,
    output_counts: Array | None = None,
    logit_bias: Array | None = None,
    allowed_bitmap: Array | None = None,
    first_token: int = 0,
    stream: Stream = None,
) -> tuple[Any, Any, Any]: ...
def scaled_fp4_quant(
    input: Array,
    input_scale: ScalarOrArray,
    is_sf_swizzled_layout: bool = True,
    four_over_six: bool = False,
    tile_rows: int = 128,
    *,
    output: Array | None = None,
    output_scale: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def shuffle_rows(
    input_tensor: _Array, dst2src_map: Array, *, output_tensor: Array | None = None, stream: Stream = None
) -> _Array: ...
def silu_and_mul(input: _Array, *, result: Array | None = None, stream: Stream = None) -> _Array: ...
def silu_and_mul_nvfp4_quant(
    input: Array,
    input_global_scale: ScalarOrArray,
    *,
    result: Array | None = None,
    result_block_scale: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def silu_and_mul_per_block_quant(
    input: Array,
    group_size: int,
    scale_ub: ScalarOrArray | None = None,
    is_scale_transposed: bool = False,
    *,
    out: Array | None = None,
    scales: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
def silu_and_mul_quant(
    input: Array, scale: ScalarOrArray, *, result: Array | None = None, stream: Stream = None
) -> Any: ...
def silu_and_mul_with_clamp(
    input: _Array,
    limit: float,
    alpha: float = 1.0,
    beta: float = 0.0,
    *,
    result: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
def situ_and_mul(
    input: _Array, beta: float = 1.0, linear_beta: float = -1.0, *, out: Array | None = None, stream: Stream = None
) -> _Array: ...
def situ_and_mul_quant(
    scale: Array,
    input: Array,
    beta: float = 1.0,
    linear_beta: float = -1.0,
    group_size: int = 128,
    num_valid_tokens: Array | None = None,
    topk: int = 1,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def softmax(
    logits: Array, temperature: ScalarOrArray | None = None, *, out: Array | None = None, stream: Stream = None
) -> Any: ...
def static_scaled_fp8_quant(
    input: Array,
    scale: ScalarOrArray,
    group_rows: int = 0,
    group_columns: int = 0,
    *,
    result: Array | None = None,
    stream: Stream = None,
) -> Any: ...
def static_scaled_int8_quant(
    input: Array, scale: ScalarOrArray, azp: Array | None = None, *, result: Array | None = None, stream: Stream = None
) -> Any: ...
def swigluoai_and_mul(
    input: _Array, alpha: float = 1.702, limit: float = 7.0, *, out: Array | None = None, stream: Stream = None
) -> _Array: ...
def swiglustep_and_mul(
    input: _Array, limit: float = 7.0, *, out: Array | None = None, stream: Stream = None
) -> _Array: ...
@overload
def token_logprobs(
    logits: Array,
    token_ids: Array,
    temperature: ScalarOrArray | None = None,
    *,
    ranks: Literal[False] | None = None,
    logprobs: Array | None = None,
    stream: Stream = None,
) -> Any: ...
@overload
def token_logprobs(
    logits: Array,
    token_ids: Array,
    temperature: ScalarOrArray | None = None,
    *,
    ranks: Array | Literal[True],
    logprobs: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
@overload
def top_k_per_row(
    logits: _Array,
    k: int,
    row_starts: Array | None = None,
    row_ends: Array | None = None,
    row_k: Array | None = None,
    *,
    values: Literal[False] | None = None,
    indices: Array | None = None,
    next_n: int = 0,
    sorted: bool = False,
    stream: Stream = None,
) -> Any: ...
@overload
def top_k_per_row(
    logits: _Array,
    k: int,
    row_starts: Array | None = None,
    row_ends: Array | None = None,
    row_k: Array | None = None,
    *,
    values: Array | Literal[True],
    indices: Array | None = None,
    next_n: int = 0,
    sorted: bool = False,
    stream: Stream = None,
) -> tuple[Any, _Array]: ...
def top_k_top_p_mask(
    logits: _Array,
    top_k: ScalarOrArray | None = None,
    top_p: ScalarOrArray | None = None,
    min_p: ScalarOrArray | None = None,
    temperature: ScalarOrArray | None = None,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
def top_k_top_p_renorm(
    probs: _Array,
    top_k: ScalarOrArray | None = None,
    top_p: ScalarOrArray | None = None,
    min_p: ScalarOrArray | None = None,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
@overload
def verify_tree(
    draft_token_ids: Array,
    next_token: Array,
    next_sibling: Array,
    target_probs: Array | None = None,
    target_token_ids: Array | None = None,
    retrieve_index: Array | None = None,
    seeds: Array | None = None,
    steps: Array | None = None,
    *,
    accepted_index: Literal[False] | None = None,
    num_accepted: Literal[False] | None = None,
    out: Array | None = None,
    stream: Stream = None,
) -> Any: ...
@overload
def verify_tree(
    draft_token_ids: Array,
    next_token: Array,
    next_sibling: Array,
    target_probs: Array | None = None,
    target_token_ids: Array | None = None,
    retrieve_index: Array | None = None,
    seeds: Array | None = None,
    steps: Array | None = None,
    *,
    accepted_index: Literal[False] | None = None,
    num_accepted: Array | Literal[True],
    out: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
@overload
def verify_tree(
    draft_token_ids: Array,
    next_token: Array,
    next_sibling: Array,
    target_probs: Array | None = None,
    target_token_ids: Array | None = None,
    retrieve_index: Array | None = None,
    seeds: Array | None = None,
    steps: Array | None = None,
    *,
    accepted_index: Array | Literal[True],
    num_accepted: Literal[False] | None = None,
    out: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any]: ...
@overload
def verify_tree(
    draft_token_ids: Array,
    next_token: Array,
    next_sibling: Array,
    target_probs: Array | None = None,
    target_token_ids: Array | None = None,
    retrieve_index: Array | None = None,
    seeds: Array | None = None,
    steps: Array | None = None,
    *,
    accepted_index: Array | Literal[True],
    num_accepted: Array | Literal[True],
    out: Array | None = None,
    stream: Stream = None,
) -> tuple[Any, Any, Any]: ...
def xielu(
    input: _Array,
    alpha_p: ScalarOrArray,
    alpha_n: ScalarOrArray,
    beta: float = 0.5,
    eps: float = -1e-06,
    *,
    out: Array | None = None,
    stream: Stream = None,
) -> _Array: ...
