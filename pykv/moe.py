"""Mixture of experts: which experts each token goes to, and the maps between tokens and experts.

``T`` tokens go to ``k`` of ``E`` experts each; pair ``t * k + j`` is token ``t`` at its ``j``-th expert.  An id of an
expert that is negative stands for none: its pair is dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pykv._schema import Rule, Spec, operation
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
    """Take for each token the ``k`` experts with the largest ``p + bias``, ``p = softmax(gating_output)`` in fp32.

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
    *,
    stream: Stream = None,
) -> None:
    """Do as :func:`topk_softmax` with ``p = sqrt(log(1 + exp(x)))``, ``sqrt(x)`` above 20; or look the experts up.

    With the last two arrays the experts of token ``t`` are ``hash_indices_table[input_ids[t]]``, whatever their ``p``,
    and ``token_expert_indices`` is not written.

    Args:
        topk_weights, topk_ids, token_expert_indices, gating_output, renormalize: as there.
        routed_scaling_factor: what the weights are multiplied by at last.
        e_score_correction_bias: as there.
        input_ids: ``[T]`` int32 or int64.
        hash_indices_table: ``[vocab_size, k]``, dtype of ``topk_ids``.
        is_padding: as there.
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
