"""From logits to tokens.

A row holds the logits of one request, one for each token of the vocabulary; its elements lie side by side, rows at any
stride.  Logits are ordered by value, equal ones by their index, the lower one first; ``-0`` equals ``0``, and NaN comes
before everything.  This order is total: a set of the first k has exactly k members, the same ones on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pykv._schema import Rule, Spec, operation
from pykv._types import Array, Stream


@operation()
def apply_repetition_penalties_(
    logits: Array, prompt_mask: Array, output_mask: Array, repetition_penalties: Array, *, stream: Stream = None
) -> None:
    """Penalise tokens that occur, in place: ``logits = logits / p if logits > 0 else logits * p``.

    ``p`` is the row's penalty; the arithmetic is fp32 and rounded to the dtype.  Logits of other tokens are neither read
    nor written.

    Args:
        logits: ``[num_rows, vocab_size]`` float32, float16 or bfloat16; changed in place.
        prompt_mask, output_mask: ``[num_rows, vocab_size]`` bool or uint8: where one is not 0, the token occurs.
        repetition_penalties: ``[num_rows]``, dtype of ``logits`` or float32.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides or devices do not fit.
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
