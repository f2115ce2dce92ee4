"""Rows of an embedding table, whole or one shard of a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pykv._schema import NoneIs, Rule, Spec, operation
from pykv._types import Array, Stream
from pykv.dequantization import GGUF_BLOCKS


class VocabShard(NamedTuple):
    """What one rank has of a vocabulary, in the order of :func:`pykv.masked_embedding`'s parameters."""

    org_start: int
    org_end: int
    num_org_pad: int
    added_start: int
    added_end: int
    vocab_size: int

    @property
    def num_org(self) -> int:
        return self.org_end - self.org_start

    @property
    def num_added(self) -> int:
        return self.added_end - self.added_start


def vocab_shard(org_vocab_size: int, num_added: int, num_ranks: int, rank: int, padding: int = 64) -> VocabShard:
    """What ``rank`` has of a vocabulary whose embedding and head are split among ``num_ranks``, as vLLM splits them.

    The base vocabulary is padded to a multiple of ``padding`` and split evenly; so are the tokens added behind it.

    Raises:
        ValueError: sizes or rank are out of range, or a padded size does not divide by ``num_ranks``.
    """
    if min(org_vocab_size, num_added) < 0 or padding < 1 or not 0 <= rank < num_ranks:
        got = f"{org_vocab_size}, {num_added}, {num_ranks}, {rank}, {padding}"
        raise ValueError(f"vocab_shard: sizes must not be negative, and ranks 0 to num_ranks - 1, got {got}")
    org = -(-org_vocab_size // padding) * padding
    added = -(-(org + num_added) // padding) * padding - org
    if org % num_ranks or added % num_ranks:
        raise ValueError(f"vocab_shard: num_ranks: must divide the padded sizes {org} and {added}, got {num_ranks}")
    own, end = org // num_ranks, org_vocab_size + num_added
    org_start, org_end = (min(r * own, org_vocab_size) for r in (rank, rank + 1))
    added_start, added_end = (min(org_vocab_size + r * (added // num_ranks), end) for r in (rank, rank + 1))
    return VocabShard(org_start, org_end, own - (org_end - org_start), added_start, added_end, end)


def _row_for_each_id(arguments: Mapping[str, Any]) -> Spec:
    (_, width), own = arguments["weight"]
    if arguments.get("quant_type") is not None:
        elements, size = GGUF_BLOCKS.get(int(arguments["quant_type"]), (1, 1))  # the call itself refuses other ids
        return Spec((*arguments["ids"].shape, width // size * elements), "float16")
    converted = arguments.get("scale", 1) != 1 or any(
        arguments.get(name) is not None for name in ("weight_scale", "positions")
    )
    if converted and own not in ("float32", "float16", "bfloat16"):
        own = "bfloat16"
    return Spec((*arguments["ids"].shape, width), own)


@operation(
    converters={"org_end": NoneIs(-1), "vocab_size": NoneIs(-1), "quant_type": NoneIs(-1)}, out=Rule(_row_for_each_id)
)
def masked_embedding(
    out: Array,
    ids: Array,
    weight: Array,
    org_start: int = 0,
    org_end: int | None = None,
    num_org_pad: int = 0,
    added_start: int = 0,
    added_end: int = 0,
    vocab_size: int | None = None,
    *,
    scale: float = 1.0,
    weight_scale: Array | None = None,
    positions: Array | None = None,
    position_weight: Array | None = None,
    quant_type: int | None = None,
    stream: Stream = None,
) -> None:
    """Look up rows: ``out = scale * weight_scale * weight[row of id] + position_weight[position]``.

    In fp32, rounded once.  The table may be a shard of a vocabulary: rows of the ids ``org_start`` to ``org_end - 1``,
    then ``num_org_pad`` rows that belong to no id, then rows of the ids ``added_start`` to ``added_end - 1``;
    ``*vocab_shard(...)`` gives these numbers.  Ids of other shards count as rows of zeros, so that the sum over all
    shards is the embedding.

    Args:
        out: ``[..., hidden_size]`` float32, float16 or bfloat16; written.  Also any dtype, that of ``weight``, without
            ``scale``, ``weight_scale``, ``positions`` and ``quant_type``: rows are copied as they are.  The functional
            forms make the dtype of ``weight``, bfloat16 of codes that are scaled, or float16 of blocks.
        ids: ``[...]`` int32 or int64; of several dimensions: contiguous.  Ids of no shard, below 0 or from
            ``vocab_size`` on, count as rows of zeros and are reported.
        weight: ``[num_rows, hidden_size]`` float32, float16 or bfloat16, or codes: int8, float8_e4m3fn (also as uint8),
            float8_e5m2; or uint8 ``[num_rows, bytes]``, blocks of GGUF, whose rows have ``hidden_size`` elements.
        org_start, org_end, num_org_pad, added_start, added_end: what ``weight`` has rows for; by default the ids from
            0 on.
        vocab_size: of all shards; ``None``: where the ids of this one end.
        scale: of all.
        weight_scale: float32 ``[num_rows]`` or ``[num_rows, groups]``: of each row, or of its groups of neighbours.
        positions: ``[...]`` int32 or int64, like ``ids``.  Those out of range add nothing and are reported.
        position_weight: ``[num_positions, hidden_size]`` float32, float16 or bfloat16; with ``positions``.
        quant_type: the block format of ``weight``, as for :func:`ggml_dequantize`; ``None``: it has elements.
        stream: CUDA stream; ``None``: the current one of the arrays' library.

    Raises:
        ValueError: shapes, strides, devices or ranges do not fit, or (CPU) something was reported.
        TypeError: dtypes do not fit.
    """
