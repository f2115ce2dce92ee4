"""From logits to tokens.

A row holds the logits of one request, one for each token of the vocabulary; its elements lie side by side, rows at any
stride.  Logits are ordered by value, equal ones by their index, the lower one first; ``-0`` equals ``0``, and NaN comes
before everything.  This order is total: a set of the first k has exactly k members, the same ones on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pykv._schema import NoneIs, Rule, Spec, like, operation
from pykv._types import Array, ScalarOrArray, Stream


@operation()
def apply_repetition_penalties_(
    logits: Array, prompt_mask: Array, output_mask: Array, repetition_penalties: Array, *, stream: Stream = None
) -> None:
    """Penalise tokens that occur, in place: ``logits = logits / p if logits > 0 else logits * p``.

    ``p`` is the row's penalty; the arithmetic is fp32 and rounded to the dtype.  Logits of other tokens are neither
    read nor written.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16; changed in place.
        prompt_mask, output_mask: ``[num_rows, vocab_size]`` bool or uint8: where one is not 0, the token occurs.
        repetition_penalties: ``[num_rows]``, dtype of ``logits`` or float32.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
        TypeError: dtypes do not fit.
    """


@operation()
def apply_penalties_(
    logits: Array,
    prompt_token_ids: Array | None,
    output_token_ids: Array | None,
    presence_penalties: ScalarOrArray | None = None,
    frequency_penalties: ScalarOrArray | None = None,
    repetition_penalties: ScalarOrArray | None = None,
    *,
    prompt_lens: Array | None = None,
    output_lens: Array | None = None,
    stream: Stream = None,
) -> None:
    """Penalise tokens in lists, in place.

    Of tokens in either list, ``x = x / repetition if x > 0 else x * repetition``; of those in ``output_token_ids``,
    that are there ``count`` times, ``x = x - frequency * count - presence``.  The arithmetic is fp32 and rounded once
    to the dtype.  Logits of other tokens are neither read nor written.  :func:`sample` does the same by bitmaps and
    counts.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16; changed in place.
        prompt_token_ids, output_token_ids: ``[num_rows, length]`` int32 or int64, each with a length of its own;
            ``None``: none.  Ids below 0, and ``vocab_size``, are padding; those beyond it are reported.
        presence_penalties, frequency_penalties, repetition_penalties: a number, or float32 ``[num_rows]``; ``None``: 0,
            0 and 1, which change nothing.
        prompt_lens, output_lens: ``[num_rows]`` int32 or int64: shorter lists; ``None``: all of them.  Lengths out of
            range are clamped and reported.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit, or (CPU) something was reported.
        TypeError: dtypes do not fit.
    """


def _top_k(dtype: str | None) -> Rule:
    def make(arguments: Mapping[str, Any]) -> Spec:
        (rows, _), own = arguments["logits"]
        return Spec((rows, arguments["k"]), dtype or own)

    return Rule(make)


@operation(indices=_top_k("int32"), values=_top_k(None))
def top_k_per_row(
    indices: Array,
    logits: Array,
    k: int,
    row_starts: Array | None = None,
    row_ends: Array | None = None,
    row_k: Array | None = None,
    *,
    next_n: int = 0,
    sorted: bool = False,
    values: Array | None = None,
    stream: Stream = None,
) -> None:
    """Find the first ``min(k, n)`` of each row's ``n`` logits: exactly so many different indices, then -1.

    They are the same whatever the batch and the device: equal logits are taken by their index, the lower one first.

    Args:
        indices: ``[num_rows, k]`` int32; written, ascending unless ``sorted``.  Counted from the row's start.
        logits: ``[num_rows, num_cols]`` float32, float16 or bfloat16.
        k: 1 to 4096.
        row_starts: ``[num_rows]`` int32 or int64: the row's first column; ``None``: 0.
        row_ends: ``[num_rows]`` int32 or int64: the column behind its last; ``None``: ``num_cols``.  If compact, it may
            have two dimensions.
        row_k: ``[num_rows]`` int32 or int64: fewer than ``k`` for some rows.
        next_n: where positive, ``row_ends`` are ``[num_rows / next_n]`` lengths of sequences with so many rows each:
            row r ends at ``row_ends[r // next_n] - next_n + r % next_n + 1``.
        sorted: by value, the largest first.
        values: ``[num_rows, k]``, dtype of ``logits``; written with the logits, -infinity behind them.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Starts and ends beyond the columns are clamped to them and ``row_k`` to ``k``; both are reported, and so is a row
    with NaN that is not taken whole.

    Raises:
        ValueError: shapes, strides, devices or options do not fit, or (CPU) something was reported.
        TypeError: dtypes do not fit.
    """


def _merged(dtype: str | None) -> Rule:
    def make(arguments: Mapping[str, Any]) -> Spec:
        (_, rows, _), own = arguments["shard_values"]
        return Spec((rows, arguments["k"]), dtype or own)

    return Rule(make)


@operation(indices=_merged("int32"), values=_merged(None))
def merge_top_k(
    indices: Array,
    shard_indices: Array,
    shard_values: Array,
    k: int,
    first_tokens: Array | None = None,
    *,
    values: Array | None = None,
    stream: Stream = None,
) -> None:
    """Find the first ``k`` of what several shards of a vocabulary found: of the whole vocabulary's, so many.

    With the ``scores`` of :func:`sample` as lists of one, it finds the token that all shards together would give.

    Args:
        indices: ``[num_rows, k]`` int32; written, the largest logit first, -1 behind the last.
        shard_indices: ``[num_shards, num_rows, n]`` int32, negative: none.  Each list in order, as
            ``top_k_per_row(sorted=True)`` gives it; an entry that comes before its neighbour is reported, and the
            result is no merge then.
        shard_values: ``[num_shards, num_rows, n]`` float32, float16 or bfloat16: the logits.
        k: 1 or more.
        first_tokens: ``[num_shards]`` int32 or int64: what is added to the indices of a shard; ``None``: 0.  Sums that
            an int32 does not hold, or that are negative, are reported and left out.
        values: ``[num_rows, k]``, dtype of ``shard_values``; written with the logits, -infinity behind them.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit, or (CPU) something was reported.
        TypeError: dtypes do not fit.
    """


@operation(converters={"num_org": NoneIs(-1), "soft_cap": NoneIs(0.0, positive=True)})
def finish_logits_(
    logits: Array,
    num_org: int | None = None,
    num_org_pad: int = 0,
    num_added: int = 0,
    *,
    soft_cap: float | None = None,
    scale: float = 1.0,
    stream: Stream = None,
) -> None:
    """Scale, cap and mask logits in place: ``logits = scale * soft_cap * tanh(logits / soft_cap)``.

    In fp32, rounded once.  Columns that belong to no token become -infinity: of ``num_org`` columns, then
    ``num_org_pad``, then ``num_added`` and the rest, these are the second ones and the rest.  A head that is a shard of
    a vocabulary has its columns where :func:`masked_embedding` has rows: with ``s = vocab_shard(...)``,
    ``finish_logits_(logits, s.num_org, s.num_org_pad, s.num_added)``.

    Args:
        logits: ``[num_rows, num_cols]`` float32, float16 or bfloat16; changed in place.
        num_org, num_org_pad, num_added: numbers of columns; ``None``: all.
        soft_cap: positive; ``None`` or infinity: none.
        scale: of all, after the cap.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or options do not fit.
        TypeError: dtypes do not fit.
    """


def _one_for_each_row(dtype: str) -> Rule:
    return Rule(lambda arguments: Spec(arguments["logits"].shape[:1], dtype))


@operation(out=_one_for_each_row("int32"), logprobs=_one_for_each_row("float32"), scores=_one_for_each_row("float32"))
def sample(
    out: Array,
    logits: Array,
    seeds: Array | None = None,
    steps: Array | None = None,
    temperature: ScalarOrArray | None = None,
    top_k: ScalarOrArray | None = None,
    top_p: ScalarOrArray | None = None,
    min_p: ScalarOrArray | None = None,
    *,
    repetition_penalty: ScalarOrArray | None = None,
    frequency_penalty: ScalarOrArray | None = None,
    presence_penalty: ScalarOrArray | None = None,
    prompt_bitmap: Array | None = None,
    output_counts: Array | None = None,
    logit_bias: Array | None = None,
    allowed_bitmap: Array | None = None,
    first_token: int = 0,
    logprobs: Array | None = None,
    scores: Array | None = None,
    stream: Stream = None,
) -> None:
    """Draw one token for each row, from ``softmax(logits / temperature)`` of those that are kept.

    1. Logits are changed: those that ``allowed_bitmap`` leaves out are -infinity; ``logit_bias`` is added; of tokens in
       ``prompt_bitmap`` or ``output_counts``, ``x = x / repetition if x > 0 else x * repetition``; of those in
       ``output_counts``, ``x = x - frequency * count - presence``.
    2. Kept are those with at least ``min_p`` times the largest probability, of these the first ``top_k``, of these the
       shortest beginning whose share of the probability reaches ``top_p``: at least one.
    3. The largest ``x / temperature + noise`` wins; with a temperature below 1e-5, the largest x (of
       equals the lower token).

    The noise of a token is a function of seed, step and token alone, of Gumbel's distribution, made of words of
    Philox4x32-10 with the seed as key (``pykv/sampling.h`` says how).  So the same logits give the same token whatever
    else is in the batch, on the CPU and on CUDA.  Seeds and steps are arrays, so that a captured graph draws anew.
    -infinity is never drawn.

    Args:
        out: ``[num_rows]`` int32 or int64; written.  -1, reported: the row holds NaN, or nothing but -infinity.
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16; up to 2**23 tokens.
        seeds, steps: ``[num_rows]`` int32 or int64; ``None``: 0.
        temperature, top_p, min_p: a number, or float32 ``[num_rows]``; ``None``: 1, 1 and 0, which change nothing.
        top_k: a number, or ``[num_rows]`` int32 or int64; ``None``, 0 or less: all.
        repetition_penalty, frequency_penalty, presence_penalty: a number, or float32 ``[num_rows]``.
        prompt_bitmap: ``[num_rows, (vocab_size + 31) // 32]`` int32, a bit for each token, the lowest first.
        output_counts: ``[num_rows, vocab_size]`` int32: how often a token was put out.
        logit_bias: ``[num_rows, vocab_size]`` float32; rows may have the stride 0.
        allowed_bitmap: like ``prompt_bitmap``; ``None``: all are allowed.
        first_token: where ``logits`` are a shard of the vocabulary, its first token, from which ``out`` counts.
        logprobs: ``[num_rows]`` float32; written with the token's log-probability among those that are kept (0 with a
            temperature below 1e-5).
        scores: ``[num_rows]`` float32; written with what won.  Of several shards of a vocabulary, the token with the
            largest is the one that all together would give, the lower one of equals: not with ``top_k``, ``top_p`` and
            ``min_p``, which look at all.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or options do not fit, or (CPU) a row was reported.
        TypeError: dtypes do not fit.
    """


@operation(out=Rule(lambda arguments: Spec(arguments["logits"].shape, "float32")))
def softmax(out: Array, logits: Array, temperature: ScalarOrArray | None = None, *, stream: Stream = None) -> None:
    """Write ``softmax(logits / temperature)`` of each row, in fp32.

    Args:
        out: ``[num_rows, vocab_size]`` float32, or the dtype of ``logits``, whose memory it then may be; written.
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16; up to 2**23 of a row.
        temperature: a number, or float32 ``[num_rows]``; at least 1e-5.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    A row with NaN, or with nothing but -infinity, becomes NaN and is reported.

    Raises:
        ValueError: shapes, strides or devices do not fit, or (CPU) a row was reported.
        TypeError: dtypes do not fit.
    """


@operation(out=like("logits"))
def top_k_top_p_mask(
    out: Array,
    logits: Array,
    top_k: ScalarOrArray | None = None,
    top_p: ScalarOrArray | None = None,
    min_p: ScalarOrArray | None = None,
    temperature: ScalarOrArray | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Keep the logits that :func:`sample` would draw from; the others become -infinity.

    Args:
        out: ``[num_rows, vocab_size]``, dtype of ``logits``; written.  May be the memory of ``logits``.
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16.
        top_k: a number, or ``[num_rows]`` int32 or int64; ``None``, 0 or less: all.
        top_p, min_p: a number, or float32 ``[num_rows]``; ``None``: 1 and 0, which keep all.
        temperature: a number, or float32 ``[num_rows]``; at least 1e-5.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    A row with NaN, or with nothing but -infinity, stays as it is and is reported.

    Raises:
        ValueError: shapes, strides or devices do not fit, or (CPU) a row was reported.
        TypeError: dtypes do not fit.
    """


@operation(out=like("probs"))
def top_k_top_p_renorm(
    out: Array,
    probs: Array,
    top_k: ScalarOrArray | None = None,
    top_p: ScalarOrArray | None = None,
    min_p: ScalarOrArray | None = None,
    *,
    stream: Stream = None,
) -> None:
    """Keep probabilities as :func:`top_k_top_p_mask` keeps logits, and divide them by their sum; the others become 0.

    Args:
        out: ``[num_rows, vocab_size]``, dtype of ``probs``; written.  May be the memory of ``probs``.
        probs: ``[num_rows, vocab_size]`` float32, float16 or bfloat16; their sum need not be 1.
        top_k, top_p, min_p: as there.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    A row with NaN or +infinity, or with nothing above 0, becomes NaN and is reported.

    Raises:
        ValueError: shapes, strides or devices do not fit, or (CPU) a row was reported.
        TypeError: dtypes do not fit.
    """


@operation(
    logprobs=Rule(lambda arguments: Spec(arguments["token_ids"].shape, "float32")),
    ranks=Rule(lambda arguments: Spec(arguments["token_ids"].shape, "int32")),
)
def token_logprobs(
    logprobs: Array,
    logits: Array,
    token_ids: Array,
    temperature: ScalarOrArray | None = None,
    *,
    ranks: Array | None = None,
    stream: Stream = None,
) -> None:
    """Gather ``log_softmax(logits / temperature)`` of given tokens, and count the tokens that come before each.

    Args:
        logprobs: ``[num_rows, n]`` float32; written.
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16.
        token_ids: ``[num_rows, n]`` int32 or int64.  Ids out of range are reported: NaN, and rank -1.
        temperature: a number, or float32 ``[num_rows]``; at least 1e-5.
        ranks: ``[num_rows, n]`` int32; written: 0 for the first token in the order of its row.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    A row with NaN, or with nothing but -infinity, gives NaN and is reported.

    Raises:
        ValueError: shapes, strides or devices do not fit, or (CPU) something was reported.
        TypeError: dtypes do not fit.
    """


def _positions(arguments: Mapping[str, Any]) -> Spec:
    requests, draft = arguments["draft_token_ids"].shape
    return Spec((requests, draft + 1), "int32")


@operation(
    out=Rule(_positions),
    num_accepted=Rule(lambda arguments: Spec(arguments["draft_token_ids"].shape[:1], "int32")),
)
def rejection_sample(
    out: Array,
    draft_token_ids: Array,
    target_probs: Array,
    draft_probs: Array | None = None,
    draft_lens: Array | None = None,
    seeds: Array | None = None,
    steps: Array | None = None,
    *,
    num_accepted: Array | None = None,
    stream: Stream = None,
) -> None:
    """Verify drafts of speculative decoding: the tokens that the target model accepts, and one more.

    Token x at position i is accepted if ``u * draft_probs[i, x] < target_probs[i, x]``.  The first that is not is
    replaced by one drawn by ``max(target_probs[i] - draft_probs[i], 0)``, or by ``target_probs[i]`` where that is 0
    everywhere; after a draft that is accepted whole, one is drawn by the target's next row.  So tokens have the
    distribution of the target model alone.  ``u`` is ``(w + 0.5) / 2**32``, w being the first word of Philox4x32-10
    with the seed as key and the counter ``(i, 1, step)``; what is drawn at position i has the noise of :func:`sample`
    for ``step + i``.

    Args:
        out: ``[num_requests, num_draft + 1]`` int32 or int64; written, -1 behind the last token.  -1 in its place,
            reported: the row holds NaN or infinity, or nothing above 0.
        draft_token_ids: ``[num_requests, num_draft]`` int32 or int64.  Ids out of range are reported, and rejected.
        target_probs: ``[num_requests, num_draft + 1, vocab_size]`` float32; a row of one 1 is greedy.
        draft_probs: ``[num_requests, num_draft, vocab_size]`` float32; ``None``: draft tokens have the probability 1.
        draft_lens: ``[num_requests]`` int32 or int64: shorter drafts; others than 0 to ``num_draft`` are clamped and
            reported.
        seeds, steps: ``[num_requests]`` int32 or int64; ``None``: 0.
        num_accepted: ``[num_requests]`` int32; written.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit, or (CPU) something was reported.
        TypeError: dtypes do not fit.
    """


def _of_nodes(arguments: Mapping[str, Any]) -> Spec:
    return Spec(arguments["draft_token_ids"].shape, "int32")


@operation(
    out=Rule(_of_nodes),
    accepted_index=Rule(_of_nodes),
    num_accepted=Rule(lambda arguments: Spec(arguments["draft_token_ids"].shape[:1], "int32")),
)
def verify_tree(
    out: Array,
    draft_token_ids: Array,
    next_token: Array,
    next_sibling: Array,
    target_probs: Array | None = None,
    target_token_ids: Array | None = None,
    retrieve_index: Array | None = None,
    seeds: Array | None = None,
    steps: Array | None = None,
    *,
    accepted_index: Array | None = None,
    num_accepted: Array | None = None,
    stream: Stream = None,
) -> None:
    """Verify a tree of drafts: the tokens on a path from the root that the target model accepts, and one more.

    Node 0 is the root, the last token that is known; from each node links lead to its first child, from a child to the
    next one.  With ``target_token_ids``, a child is accepted if its token is the target's after its parent, and the one
    more is the target's token after the last accepted node.  With ``target_probs``, the first child is accepted for
    which ``u``, that of :func:`rejection_sample` for the number of tokens accepted so far, lies below the sum of the
    probabilities of its token and of those of the children before it (a token that is there twice counts once).  If
    there is none, a token that none of them has is drawn by the target's probabilities, with the noise that
    :func:`rejection_sample` has, too.  So tokens have the distribution of the target model alone, and a tree without
    branches gives what :func:`rejection_sample` does without ``draft_probs``.

    Args:
        out: ``[num_requests, num_out]`` int32 or int64; written, -1 behind the last token.  ``num_out`` is 1 to
            ``num_nodes``, which the functional forms make: a path ends with the last column.  -1 in place of the last
            token, reported: the row of ``target_probs`` holds NaN or infinity, or nothing above 0.
        draft_token_ids: ``[num_requests, num_nodes]`` int32 or int64; up to 2048 nodes.  With ``target_probs``, ids out
            of range are reported where the path comes by, and rejected.
        next_token: ``[num_requests, num_nodes]`` int32 or int64: a node's first child; negative: none.
        next_sibling: ``[num_requests, num_nodes]`` int32 or int64: the next child of the same parent; negative: none.
            Links out of range are none, and reported.  A path ends where links lead to a node a second
            time, which is reported.
        target_probs: ``[num_requests, num_nodes, vocab_size]`` float32: after each node; or
        target_token_ids: ``[num_requests, num_nodes]`` int32 or int64: greedy.
        retrieve_index: ``[num_requests, num_nodes]`` int32 or int64: what ``accepted_index`` calls the nodes; ``None``:
            their numbers.
        seeds, steps: ``[num_requests]`` int32 or int64; ``None``: 0.
        accepted_index: ``[num_requests, num_out]`` int32 or int64; written with the nodes on the path, the root first,
            -1 behind them.
        num_accepted: ``[num_requests]`` int32; written, without the root.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit, or (CPU) something was reported.
        TypeError: dtypes do not fit.
    """
