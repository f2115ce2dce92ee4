"""Mixture of experts: which experts each token goes to, and the maps between tokens and experts.

``T`` tokens go to ``k`` of ``E`` experts each; pair ``t * k + j`` is token ``t`` at its ``j``-th expert.  An id of an
expert that is negative stands for none: its pair is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pykv._schema import Rule, Spec, like, operation
from pykv._types import Array, Stream


@operation()
def topk_softmax(
    topk_weights: Array,
    topk_ids: Array,
    token_expert_indices: Array | None,
    gating_output: Array,
    renormalize: bool = False,
    e_score_correction_bias: Array | None = None,
    is_padding: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Choose for each token the ``k`` experts with the largest ``p + bias``, ``p = softmax(gating_output)`` in fp32.

    Of equal sums the lower id comes first.  ``p`` that is not finite counts as 0: a row with a NaN gets the experts
    ``0 ... k - 1`` and weights of 0 (without a bias).

    Args:
        topk_weights: ``[T, k]`` float32; written: ``p``, divided by the sum of the ``k`` if ``renormalize`` (and that
            is not 0).
        topk_ids: ``[T, k]`` int32, uint32 or int64; written.
        token_expert_indices: ``[T, k]`` int32; written: ``j * T + t``.  ``None``: not wanted.
        gating_output: ``[T, E]`` float32, float16 or bfloat16; at most 1024 experts.
        renormalize: whether the weights of a token have the sum 1.
        e_score_correction_bias: ``[E]`` float32, float16 or bfloat16; ``None``: 0.
        is_padding: ``[T]`` bool or uint8: a token for which it is not 0 gets ids of -1 and weights of 0.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape is wrong.
        TypeError: a dtype is wrong.
    """


@operation()
def topk_sigmoid(
    topk_weights: Array,
    topk_ids: Array,
    token_expert_indices: Array | None,
    gating_output: Array,
    renormalize: bool = False,
    e_score_correction_bias: Array | None = None,
    routed_scaling_factor: float = 1.0,
    is_padding: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Do as :func:`topk_softmax` with ``p = 1 / (1 + exp(-x))``, a NaN counting as 0.

    The weights are multiplied by ``routed_scaling_factor`` at last.
    """


@operation()
def topk_softplus_sqrt(
    topk_weights: Array,
    topk_ids: Array,
    token_expert_indices: Array | None,
    gating_output: Array,
    renormalize: bool = False,
    routed_scaling_factor: float = 1.0,
    e_score_correction_bias: Array | None = None,
    input_ids: Array | None = None,
    hash_indices_table: Array | None = None,
    is_padding: Array | None = None,
    bias_vl: Array | None = None,
    image_sentinel_lo: int = 0,
    *,
    stream: Stream = None,
) -> None:
    """Do as :func:`topk_softmax` with ``p = sqrt(log(1 + exp(x)))``, ``sqrt(x)`` above 20; or by a table of experts.

    With ``hash_indices_table`` the experts of token ``t`` are ``hash_indices_table[input_ids[t]]``, whatever their
    ``p``, and ``token_expert_indices`` is not written.

    With ``bias_vl`` tokens whose ids are ``image_sentinel_lo ... image_sentinel_lo + 4`` are tokens of images: they are
    not looked up in the table, and this bias, no other one, chooses their experts.

    Args:
        topk_weights, topk_ids, token_expert_indices, gating_output, renormalize: as there.
        routed_scaling_factor: what the weights are multiplied by at last.
        e_score_correction_bias: as there.
        input_ids: ``[T]`` int32 or int64, required beside ``hash_indices_table`` or ``bias_vl``, else ``None``.
        hash_indices_table: ``[vocab_size, k]`` int32 or int64.
        is_padding: as there.
        bias_vl: ``[E]`` float32, float16 or bfloat16.
        image_sentinel_lo: the first of five ids; 0: no token is one of an image.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape is wrong; or an id of ``input_ids`` lies outside the table, or one in the table is that of
            no expert: -1 and weight 0 take their place (CPU: at once; CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


def _chosen(dtype: str) -> Rule:
    def make(arguments: Mapping[str, Any]) -> Spec:
        return Spec((arguments["scores"].shape[0], arguments["topk"]), dtype)

    return Rule(make)


@operation(topk_weights=_chosen("float32"), topk_ids=_chosen("int32"))
def grouped_topk(
    topk_weights: Array,
    topk_ids: Array,
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
    stream: Stream = None,
) -> None:
    """Take the experts with the largest ``s + bias`` among those of the best groups, in fp32.

    Of equal sums the lower group and the lower id come first.  An expert whose score is NaN or infinite comes after all
    others (softmax: as in :func:`topk_softmax`).  Where the groups that are kept have too few others, the lowest ids
    of the rest are taken, with weight 0.

    Args:
        topk_weights: ``[T, topk]`` float32; written: ``s``, divided by their sum + 1e-20 if ``renormalize``, times
            ``routed_scaling_factor``.
        topk_ids: ``[T, topk]`` int32, uint32 or int64; written.
        scores: ``[T, E]`` float32, float16 or bfloat16; at most 1024 experts.
        n_group: groups of ``E / n_group`` neighbouring experts, at most 32.
        topk_group: how many groups are kept.
        topk: experts of a token, at most those of ``topk_group`` groups.
        renormalize: whether the weights of a token have the sum ``routed_scaling_factor``.
        routed_scaling_factor: what the weights are multiplied by at last.
        bias: ``[E]`` float32, float16 or bfloat16; ``None``: 0.
        scoring_func: what ``s`` is: 0: ``scores``; 1: ``1 / (1 + exp(-scores))``; 2: ``softmax(scores)``.
        group_score: what a group is kept for: ``"top2_sum"``: the sum of its two largest ``s + bias``; ``"max"``: the
            largest, as models without a bias have it.
        is_padding: as for :func:`topk_softmax`.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape, a number or an option is wrong.
        TypeError: a dtype is wrong.
    """


@operation()
def moe_align_block_size(
    topk_ids: Array,
    num_experts: int,
    block_size: int,
    sorted_token_ids: Array,
    experts_ids: Array,
    num_tokens_post_pad: Array,
    expert_map: Array | None = None,
    scatter_idx: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Group pairs by expert, each group padded to a multiple of ``block_size``: a tile of a GEMM has one expert.

    In a group pairs ascend: the result is the same in every run.

    Args:
        topk_ids: ``[T, k]`` int32, uint32 or int64; pairs of ids that are negative, or ``num_experts`` and more, are
            dropped.
        num_experts: at most 65536 (CUDA: some 4900).
        block_size: places of a block.
        sorted_token_ids: ``[capacity]`` int32, contiguous; written: pairs, and ``T * k`` in all other places.
            ``capacity`` is at least ``T * k + min(T * k, num_experts) * (block_size - 1)``.
        experts_ids: int32, contiguous; written: the expert of each block of places, -1 behind the last.
            At least that least ``capacity // block_size`` of them.
        num_tokens_post_pad: ``[1]`` int32; written: places that are taken, padding included.
        expert_map: ``[num_experts]`` int32 or int64: from ids to ids of this rank; negative: the expert lies elsewhere,
            and its pairs are dropped.
        scatter_idx: ``T * k`` elements, int32, contiguous; written: the place of each pair, -1 if it is dropped.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or a number is wrong; or an id lies beyond the experts, or one in ``expert_map`` does: its
            pairs were dropped (CPU: at once; CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation()
def batched_moe_align_block_size(
    max_tokens_per_batch: int,
    block_size: int,
    expert_num_tokens: Array,
    sorted_token_ids: Array,
    experts_ids: Array,
    num_tokens_post_pad: Array,
    *,
    stream: Stream = None,
) -> None:
    """Do as :func:`moe_align_block_size` with rows that are grouped by expert already.

    Expert ``b`` has the rows ``b * max_tokens_per_batch + i``, ``i = 0 ... expert_num_tokens[b] - 1``.

    Args:
        max_tokens_per_batch: rows of each expert, at most.
        block_size: places of a block.
        expert_num_tokens: ``[num_experts]`` int32 or int64, clamped to ``0 ... max_tokens_per_batch``.
        sorted_token_ids: ``[capacity]`` int32, contiguous; written: rows, and ``num_experts * max_tokens_per_batch`` in
            all other places.  ``capacity`` is at least ``num_experts`` times ``max_tokens_per_batch`` rounded up to a
            multiple of ``block_size``.
        experts_ids, num_tokens_post_pad: as there.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or a number is wrong; or an expert has more than ``max_tokens_per_batch`` rows: the others
            were dropped (CPU: at once; CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation()
def moe_lora_align_block_size(
    topk_ids: Array,
    token_lora_mapping: Array,
    num_experts: int,
    block_size: int,
    max_loras: int,
    max_num_tokens_padded: int,
    max_num_m_blocks: int,
    sorted_token_ids: Array,
    experts_ids: Array,
    num_tokens_post_pad: Array,
    adapter_enabled: Array,
    lora_ids: Array,
    expert_map: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Do :func:`moe_align_block_size` for each LoRA adapter that is listed and enabled, with the pairs of its tokens.

    The outputs have a row for each adapter; those of others are not written.

    Args:
        topk_ids, num_experts, block_size, expert_map: as there.
        token_lora_mapping: ``[T]`` int32 or int64: the adapter of each token.
        max_loras: number of adapters.
        max_num_tokens_padded: places of a row of ``sorted_token_ids``, at least the ``capacity`` there.
        max_num_m_blocks: blocks of a row of ``experts_ids``.
        sorted_token_ids: ``[max_loras, max_num_tokens_padded]`` int32, or as many elements in another shape,
            contiguous; written.
        experts_ids: ``[max_loras, max_num_m_blocks]``, the same.
        num_tokens_post_pad: ``[max_loras]`` int32; written.
        adapter_enabled: at least ``max_loras`` of int32 or int64; 0: not.
        lora_ids: int32 or int64: adapters; negative: none.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: as there; or an adapter of ``lora_ids`` lies beyond ``max_loras``.
        TypeError: a dtype is wrong.
    """


@operation()
def get_cutlass_moe_mm_data(
    topk_ids: Array,
    expert_offsets: Array,
    problem_sizes1: Array,
    problem_sizes2: Array,
    input_permutation: Array,
    output_permutation: Array,
    num_experts: int,
    n: int,
    k: int,
    blockscale_offsets: Array | None = None,
    is_gated: bool = True,
    *,
    stream: Stream = None,
) -> None:
    """List what two grouped GEMMs need: where the rows of each expert begin, their number ``m``, and the problem sizes.

    These are ``(m, 2 * n, k)``, or ``(m, n, k)`` unless ``is_gated``, and ``(m, k, n)``.  In an expert pairs ascend.
    All outputs are int32 and contiguous.

    Args:
        topk_ids: ``[T, topk]``, as for :func:`moe_align_block_size`.
        expert_offsets: ``[num_experts + 1]``; written: where the rows of each expert begin.
        problem_sizes1, problem_sizes2: ``[num_experts, 3]``; written.  Without ``blockscale_offsets`` and with
            ``T * topk <= 64`` the first two numbers change places.
        input_permutation: ``[T * topk]``; written: the token of each row.  Behind the rows it is not written.
        output_permutation: ``[T * topk]``; written: the row of each pair, ``T`` if it is dropped.
        num_experts: number of experts.
        n: inner width.
        k: hidden width.
        blockscale_offsets: ``[num_experts + 1]``; written: as ``expert_offsets``, had experts multiples of 128 rows.
        is_gated: whether the first GEMM has two results for each inner element.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or a number is wrong; or an id lies beyond the experts: its pairs were dropped (CPU: at
            once; CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation()
def get_cutlass_moe_mm_problem_sizes_from_expert_offsets(
    expert_first_token_offset: Array,
    problem_sizes1: Array,
    problem_sizes2: Array,
    n: int,
    k: int,
    swap_ab: bool,
    *,
    stream: Stream = None,
) -> None:
    """List the problem sizes ``(m, 2 * n, k)`` and ``(m, k, n)`` of each expert, from where its rows begin.

    Args:
        expert_first_token_offset: ``[num_experts + 1]`` int32 or int64, ascending.
        problem_sizes1, problem_sizes2: ``[num_experts, 3]`` int32, contiguous; written.
        n: inner width.
        k: hidden width.
        swap_ab: the first two numbers change places.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or a number is wrong.
        TypeError: a dtype is wrong.
    """


@operation()
def get_cutlass_batched_moe_mm_data(
    expert_offsets: Array,
    problem_sizes1: Array,
    problem_sizes2: Array,
    expert_num_tokens: Array,
    num_local_experts: int,
    padded_m: int,
    n: int,
    k: int,
    *,
    stream: Stream = None,
) -> None:
    """List the same problem sizes for experts of ``padded_m`` rows each, of which ``expert_num_tokens`` count.

    Args:
        expert_offsets: ``[num_local_experts]`` or one more, int32, contiguous; written: ``e * padded_m``.
        problem_sizes1, problem_sizes2: ``[num_local_experts, 3]`` int32, contiguous; written.
        expert_num_tokens: ``[num_local_experts]`` int32 or int64.
        num_local_experts: number of experts.
        padded_m: rows of each.
        n: inner width.
        k: hidden width.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or a number is wrong.
        TypeError: a dtype is wrong.
    """


@operation()
def moe_permute(
    input: Array,
    topk_ids: Array,
    token_expert_indices: Array | None,
    expert_map: Array | None,
    n_expert: int,
    n_local_expert: int,
    topk: int,
    permuted_input: Array,
    expert_first_token_offset: Array,
    inv_permuted_idx: Array,
    permuted_idx: Array,
    *,
    stream: Stream = None,
) -> None:
    """Sort the rows of tokens by expert: one for each pair, those of local expert 0 first; in an expert pairs ascend.

    Rows of pairs that are dropped, and of those whose expert lies elsewhere, are not written.

    Args:
        input: ``[T, D]`` of any dtype; rows may be apart.
        topk_ids: ``[T, topk]``, as for :func:`moe_align_block_size`.
        token_expert_indices: not looked at.
        expert_map: ``[n_expert]`` int32 or int64: from ids to ids of this rank; negative: the expert lies elsewhere.
            ``None``: all are here.
        n_expert: number of experts, at most 65536.
        n_local_expert: those of this rank; without ``expert_map`` all.
        topk: experts of a token.
        permuted_input: ``[T * topk, D]``, dtype of ``input``; written.
        expert_first_token_offset: ``[n_local_expert + 1]`` int64 or int32, contiguous; written: where the rows of each
            expert begin.
        inv_permuted_idx: ``[T, topk]`` int32, contiguous; written: the place of each pair.  Behind the rows of this
            rank are first the pairs of other experts, by id, and then those that are dropped.
        permuted_idx: ``[T * topk]`` int32, contiguous; written: the pair of each row, ``T * topk`` behind the rows.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape or a number is wrong; or an id lies beyond the experts, or one in ``expert_map`` beyond
            those of this rank: its pairs were dropped (CPU: at once; CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


def _rows_of(rows: str, values: str, values_axis: int) -> Rule:
    """As many rows as one array has, of the width and dtype of another."""

    def make(arguments: Mapping[str, Any]) -> Spec:
        shape, dtype = arguments[values]
        return Spec((arguments[rows].shape[0], shape[values_axis]), dtype)

    return Rule(make)


@operation(hidden_states=_rows_of("topk_weights", "permuted_hidden_states", 1))
def moe_unpermute(
    permuted_hidden_states: Array,
    topk_weights: Array,
    inv_permuted_idx: Array,
    expert_first_token_offset: Array | None,
    topk: int,
    hidden_states: Array,
    *,
    stream: Stream = None,
) -> None:
    """Sum the rows of each token, times its weights, in fp32 and in the order of its experts, rounded once.

    Args:
        permuted_hidden_states: ``[num_rows, D]`` float32, float16 or bfloat16; rows may be apart.
        topk_weights: ``[T, topk]`` float32.
        inv_permuted_idx: ``[T, topk]`` or ``[T * topk]`` int32 or int64: the row of each pair; negative: none.
        expert_first_token_offset: int64 or int32: there is no row from its last number on.  ``None``: all are there.
        topk: experts of a token.
        hidden_states: ``[T, D]``, dtype of the rows; written.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape is wrong; or a row lies beyond ``num_rows``: it was left out (CPU: at once; CUDA: by
            ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation(output=_rows_of("input", "input", 2))
def moe_sum(
    input: Array,
    output: Array,
    topk_ids: Array | None = None,
    expert_map: Array | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Sum the rows of each token, in fp32 and in the order of its experts, rounded once.

    Args:
        input: ``[T, k, D]`` float32, float16 or bfloat16; all strides but the last are free.
        output: ``[T, D]``, dtype of ``input``; written.
        topk_ids: ``[T, k]`` int32, uint32 or int64: rows of negative ids are not read.
        expert_map: ``[E]`` int32 or int64: nor those of ids for which it is negative.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape is wrong; or an id lies beyond ``expert_map``: its row was left out (CPU: at once; CUDA: by
            ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation(output_tensor=_rows_of("dst2src_map", "input_tensor", 1))
def shuffle_rows(input_tensor: Array, dst2src_map: Array, output_tensor: Array, *, stream: Stream = None) -> None:
    """Copy rows, byte by byte: ``output_tensor[i] = input_tensor[dst2src_map[i]]``.

    Args:
        input_tensor: ``[num_sources, D]`` of any dtype; rows may be apart.
        dst2src_map: ``[num_rows]`` int32 or int64; where it is negative the row becomes zeros.
        output_tensor: ``[num_rows, D]``, dtype of ``input_tensor``; written.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape is wrong; or a source lies beyond the input: its row became zeros (CPU: at once; CUDA: by
            ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


@operation(out=like("x"))
def fused_moe(
    out: Array,
    x: Array,
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
    stream: Stream = None,
) -> None:
    """Compute a layer of experts: both products and the activation, for tokens that are routed already.

    ``out[t]`` is the sum over ``j``, with ``e = topk_ids[t, j]``, of ``topk_weights[t, j]`` times
    ``activation(x[t] @ w1[e].T + w1_bias[e]) @ w2[e].T + w2_bias[e]``.  Products are summed in fp32 and rounded to the
    dtype of ``x``; so is the activation.  The rows of a token are summed in fp32, in the order of its experts, and
    rounded once.  A row of ``out`` has the same bits whatever the other tokens are.  Experts without tokens cost
    nothing.

    A shared expert is one more of ``w1`` and ``w2`` that each token has: behind the columns of ``topk_weights`` and
    ``topk_ids`` that a router writes there is one of its weight (1, say) and one of its number, which are written once.
    It costs no kernel, and what it adds is summed in fp32.  One that is ``s`` times as wide as the others is ``s`` of
    them.

    With ``w1_scale`` and ``w2_scale`` weights and activations have 8 bits (w8a8): ``w1`` and ``w2`` are float8_e4m3fn,
    uint8 (its bytes) or int8, and rows of ``x`` and of the activation (rounded to the dtype of ``x``) become codes.
    The shape of ``w1_scale`` says how: with scales of blocks of 128 x 128, groups of 128 neighbours have a scale each;
    with others a row has one, or all have ``a1_scale``.  ``w1_bias`` is not supported beside
    ``apply_router_weight_on_input`` there, nor are more than 512 experts.

    Args:
        out: ``[T, D]``, dtype of ``x``; written.  Rows may be strided.
        x: ``[T, D]`` float16 or bfloat16; rows may be strided.
        w1: ``[E, N, D]``, dtype of ``x``, with ``N = 2 * I`` where the activation is a product of two halves, else
            ``I``; rows may be strided.  With ``w1_format``: ``[E, bytes]`` uint8, packed weights ``[N, D]`` of this
            format (:func:`pykv.gemm.stack_packed`).
        w2: ``[E, D, I]``, the same with ``w2_format``.
        topk_weights: ``[T, k]`` float32.
        topk_ids: ``[T, k]`` int32, uint32 or int64; negative: none.
        activation: one of :func:`masked_moe_activation`.
        w1_bias: ``[E, N]``, dtype of ``x``.  ``None``: none.
        w2_bias: ``[E, D]``, the same.
        expert_map: int32 or int64: from ids to experts of ``w1`` and ``w2``; negative: it lies elsewhere, and its pairs
            are left out.  ``None``: ids are those of ``w1``.
        w1_format, w2_format: :attr:`PackedWeight.format <pykv.packed_weight.PackedWeight.format>`; ``""``: these
            are numbers.
        apply_router_weight_on_input: the results of the first product (with its bias) are multiplied by
            ``topk_weights``, and not those of the second.
        clamp_limit, alpha, beta, situ_beta, situ_linear_beta: of the activation, as there.
        w1_scale: float32, ``[E, ceil(N / 128), D / 128]`` of blocks, ``[E, N]`` or ``[E, N, 1]`` of rows, ``[E]`` or
            ``[E, 1]`` of experts.  ``None``: products are those of numbers, or of packed weights.
        w2_scale: the same of ``w2``, ``[E, ceil(D / 128), I / 128]`` and so on.
        a1_scale, a2_scale: float32, one number: the scale of all rows of ``x``, and of the activation.  ``None``: each
            row, or group, has its own.
        workspace: bytes (:func:`fused_moe_workspace_size`), aligned to 16.  ``None``: on CUDA from the stream-ordered
            pool.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: a shape, a format or a name is wrong; or an id lies beyond the experts, or one in ``expert_map``
            does: its pairs were left out (CPU: at once; CUDA: by ``pykv.check_errors()``).
        TypeError: a dtype is wrong.
    """


def fused_moe_workspace_size(
    num_tokens: int, top_k: int, num_experts: int, n: int, inner: int, hidden: int, *, w8a8: bool = False
) -> int:
    """Bytes of ``workspace`` for :func:`fused_moe` with up to so many tokens; ``n`` is the number of rows of ``w1``.

    ``w8a8``: with ``w1_scale`` and ``w2_scale``.
    """
    pairs = num_tokens * top_k

    def record(width: int) -> int:
        return -(-width // 16) * 16 + -(-max(1, -(-width // 128)) // 4) * 16

    if w8a8:
        maps = [4 * (num_experts + 1), 4 * pairs, 4 * pairs, 4]
        rows = [num_tokens * record(hidden), pairs * record(hidden), pairs * record(inner)]
    else:
        experts = min(pairs, num_experts)
        maps, rows = [4 * (pairs + 143 * experts), 4 * (pairs + experts), 4, 4 * pairs], []
    pieces = [*maps, *rows, 2 * pairs * max(n, hidden), 2 * pairs * inner]
    return sum(-(-size // 256) * 256 for size in pieces)


@operation()
def fused_moe_gemm(
    out: Array,
    x: Array,
    w: Array,
    topk_weights: Array | None,
    sorted_token_ids: Array,
    experts_ids: Array,
    num_tokens_post_pad: Array,
    top_k: int,
    block_size: int,
    bias: Array | None = None,
    format: str = "",
    *,
    stream: Stream = None,
) -> None:
    """Multiply rows by the weights of experts, by a map of :func:`moe_align_block_size`: one product of a layer.

    For the pairs ``p`` of each block and its expert ``e``, ``out[p]`` is ``x[p // top_k] @ w[e].T + bias[e]`` times
    ``topk_weights[p]``, in fp32 and rounded once.  Other rows of ``out`` stay as they are.

    Args:
        out: ``[T * top_k, N]``, dtype of ``x``; written.  Rows may be strided.
        x: ``[T, K]`` float16 or bfloat16; rows may be strided.
        w: ``[E, N, K]``, dtype of ``x``; rows may be strided.  With ``format``: ``[E, bytes]`` uint8, packed weights.
        topk_weights: ``T * top_k`` elements, float32, contiguous.  ``None``: 1.
        sorted_token_ids: ``[capacity]`` int32, contiguous: pairs; those beyond ``T * top_k`` are none.
        experts_ids: ``[blocks]`` int32, contiguous; those that are no expert of ``w`` have no rows.
        num_tokens_post_pad: ``[1]`` int32: places that count.
        top_k: experts of a row of ``x``; 1 where rows are those of pairs already.
        block_size: places of a block, a multiple of 8.
        bias: ``[E, N]``, dtype of ``x``.  ``None``: none.
        format: :attr:`PackedWeight.format <pykv.packed_weight.PackedWeight.format>`; ``""``: ``w`` holds numbers.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or the format do not fit.
        TypeError: dtypes do not fit.
    """
