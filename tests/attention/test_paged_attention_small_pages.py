"""Pages of one token, or of any number that is no multiple of eight, whose tokens kernels look up one by one."""

from __future__ import annotations

import numpy as np
import pytest
from attention.inputs import KINDS
from attention.test_paged_attention import check
from attention.test_paged_attention_served import (
    OPTIONS,
    UP_TO,
    WINDOWS,
    Case,
    begins,
    cases,
    check_many,
    check_reported,
    options_of,
    parametrized,
)
from libraries import Library

PAGES = (1, 4, 2, 3, 12, 1, 20)
ROWS = [(kind, layout) for layout in ("NHD", "HND") for kind in KINDS]
HEAD_SIZES = (128, 64, 80, 128, 256, 120)
LENS = (1, 7, 16, 33, 64, 130, 517)


@parametrized(
    "queries",
    (1, 1, 2, 4, 8, 16),
    cases(56, groups=(4, 1, 8, 3, 16), head_sizes=HEAD_SIZES, pages=PAGES, places=ROWS, rooms=(0, *UP_TO)),
)
def test_small_pages(array: Library, queries: int, case: Case) -> None:
    queries = max(1, min(queries, 64 // case.sizes.heads))
    check(array, case.batch([(queries, max(n, queries)) for n in LENS], decode=queries == 1))
    check(array, case.batch([(queries, n) for n in (0, 300)], decode=queries == 1))


@parametrized("window", WINDOWS, cases(26, groups=(4, 8, 1), head_sizes=HEAD_SIZES, pages=PAGES, places=ROWS))
def test_windows(array: Library, window: int, case: Case) -> None:
    for queries in (1, 3):
        lens = [(queries, n) for n in (3, window, window + 9, window + 70, 700)]
        check(array, case.batch(lens, window, decode=queries == 1))


@parametrized("option", OPTIONS, cases(12, groups=(4, 8), head_sizes=HEAD_SIZES, pages=PAGES, places=ROWS))
def test_options(array: Library, option: int, case: Case) -> None:
    for queries in (1, 2):
        b = case.batch([(queries, n) for n in (2, 40, 333)])
        check(array, b.changed(options=b.options | options_of(case.sizes.heads)[option]))


@parametrized("queries", (1, 4), cases(14, groups=(4, 2), head_sizes=HEAD_SIZES, pages=PAGES, places=ROWS, rooms=UP_TO))
def test_many_sequences(array: Library, queries: int, case: Case) -> None:
    check_many(array, case.batch([(queries, n) for n in (queries, 17, 130, 555)]), 50)


@parametrized("queries", (1, 3), cases(7, groups=(4, 2), head_sizes=HEAD_SIZES, pages=PAGES, places=ROWS))
def test_a_long_sequence(array: Library, queries: int, case: Case) -> None:
    check(array, case.batch([(queries, 6001)]))


@pytest.mark.parametrize("at", [0, 37, 399])
@parametrized("queries", (1, 3), cases(14, groups=(4, 8), head_sizes=HEAD_SIZES, pages=PAGES, places=ROWS))
def test_bad_ids(array: Library, queries: int, case: Case, at: int) -> None:
    """Of the page of one token, of one sequence."""
    for i, bad in enumerate((-1, 2**30, 2**32)):
        b = case.batch([(queries, 400)] * 3, decode=queries == 1)
        if bad > 2**31 > np.iinfo(case.ids).max:
            continue
        b.block_tables[i, at // case.sizes.block_size] = bad
        check_reported(array, b, bad)


@parametrized("window", (5, 33, 100), cases(7, groups=(4, 8), head_sizes=HEAD_SIZES, pages=PAGES, places=ROWS))
def test_bad_ids_in_front_of_a_window(array: Library, window: int, case: Case) -> None:
    """They are not looked at."""
    lens = [(1, 400), (1, 90)]
    b = case.batch(lens, window, decode=True)
    for s, first in enumerate(begins(lens, window)):
        b.block_tables[s, : first // case.sizes.block_size] = 2**30
    check(array, b)
