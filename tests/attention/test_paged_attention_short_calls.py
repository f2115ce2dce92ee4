"""17 to 64 query rows for a KV head over short sequences, which Hopper gives to clusters of blocks, or to a block each.

How many blocks a KV head has depends on how many there are: eight of one sequence, two of eight, one of twenty.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention import inputs
from attention.graphs import CapturedCalls
from attention.inputs import KINDS, Batch, Sizes
from attention.test_paged_attention import check, rng
from attention.test_paged_attention_served import begins, check_many, check_reported
from libraries import Library

pytestmark = pytest.mark.of_cuda_kernels

COLUMNS = pytest.mark.parametrize(("queries", "group"), [(8, 4), (5, 4), (1, 17), (16, 4), (11, 3), (1, 64)])
TWO_COLUMNS = pytest.mark.parametrize(("queries", "group"), [(8, 4), (16, 4)])


def batch(lens: list[tuple[int, int]], group: int, kind: str, head_size: int = 128, **kwargs: Any) -> Batch:
    sizes = Sizes(8 * group, 8, head_size, kwargs.pop("page", 16))
    b = inputs.batch(rng(len(lens)), lens, sizes, kind=kind, **kwargs)
    return b.changed(options=inputs.scales(kind, 0.7, 1.3))


@COLUMNS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_size", [128, 64])
def test_one_sequence(array: Library, head_size: int, kind: str, queries: int, group: int) -> None:
    for length in (queries, 65, 900):
        check(array, batch([(queries, length)], group, kind, head_size))


@TWO_COLUMNS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("times", "head_size", "dtype"),
    [
        (1, 112, "float16"),
        (2, 128, "bfloat16"),
        (2, 64, "float16"),
        (5, 128, "float16"),
        (9, 128, "bfloat16"),
        (9, 64, "float16"),
        (16, 112, "bfloat16"),
    ],
)
def test_several_sequences(
    array: Library, times: int, head_size: int, dtype: str, kind: str, queries: int, group: int
) -> None:
    b = batch([(queries, 300), (queries, queries)], group, kind, head_size, dtype=dtype)
    check_many(array, b, times)


@TWO_COLUMNS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("times", [1, 5])
def test_more_tokens_than_others(array: Library, times: int, kind: str, queries: int, group: int) -> None:
    """Of some sequences a cluster has several query tiles, one after another, or none."""
    q = queries
    check_many(array, batch([(3 * q, 500), (0, 30), (q - 1, 90), (1, 200)], group, kind), times)
    check_many(array, batch([(2 * q + 1, 2 * q + 1), (0, 0), (2, 70), (2 * q - 3, 150)], group, kind, page=1), times)


@TWO_COLUMNS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [1, 30, 300])
def test_windows(array: Library, window: int, kind: str, queries: int, group: int) -> None:
    lens = [(queries, n) for n in (queries, 64, 290, 1000)]
    b = batch(lens, group, kind, begins=begins(lens, window))
    check(array, b.changed(options={**b.options, "window": window, "softcap": 20.0}))


@TWO_COLUMNS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [16, 1])
def test_bad_ids(array: Library, page: int, kind: str, queries: int, group: int) -> None:
    for sequence, at, bad in ((0, 0, -3), (1, 250, 2**30)):
        b = batch([(queries, 100), (queries, 400)], group, kind, page=page)
        b.block_tables[sequence, at // page] = bad
        check_reported(array, b, bad)


@TWO_COLUMNS
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequences", [2, 8, 20])
def test_replayed_with_other_lengths(cupy: Any, sequences: int, kind: str, queries: int, group: int) -> None:
    lens = np.resize([700, 64, 900, 333], sequences)
    b = batch([(queries, n) for n in lens], group, kind, dtype="float16")
    captured = CapturedCalls(cupy, b, calls=2)
    captured.check(lens)
    captured.check(lens // 2 + queries)
    captured.check(np.where(np.arange(sequences) == 1, 0, lens), np.where(np.arange(sequences) == 1, 0, queries))
    # The last sequence has all query tokens but one of each other.
    ones = [1] * (sequences - 1)
    captured.check(np.maximum(lens, queries), [*ones, min(sequences * queries - len(ones), max(lens[-1], queries))])
