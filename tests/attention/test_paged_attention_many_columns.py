"""From 9 to 64 query rows for a KV head, of several tokens or of many heads in a group, over caches of all kinds.

Where sequences are few, kernels have them as columns of their tiles, of which there may be two.
"""

from __future__ import annotations

from dataclasses import replace

from attention.test_paged_attention import check
from attention.test_paged_attention_served import UP_TO, Case, cases, check_many, options_of, parametrized
from libraries import Library

# Query tokens and heads of a group, 15 to 64 rows together: whole tiles of columns, parts of some, and two of them.
COLUMNS = [(8, 4), (16, 4), (1, 24), (3, 5), (1, 32), (2, 17), (5, 6), (1, 64), (3, 12), (4, 16), (1, 33), (9, 7)]
LARGE_TILES = (64, 128, 80, 128)


def of_columns(columns: tuple[int, int], case: Case) -> tuple[int, Case]:
    queries, group = columns
    return queries, replace(case, sizes=replace(case.sizes, heads=group * case.sizes.kv_heads))


@parametrized("columns", COLUMNS, cases(56, groups=(1,), head_sizes=LARGE_TILES, kv_heads=(1, 2), rooms=(0, *UP_TO)))
def test_many_columns(array: Library, columns: tuple[int, int], case: Case) -> None:
    """All sequences have as many tokens, or have them in the mean."""
    queries, case = of_columns(columns, case)
    check(array, case.batch([(queries, n) for n in (queries, 40, 333)], extra_rows=0))
    check(array, case.batch([(queries + 1, 70), (2 * queries, 150), (0, 30), (queries - 1, 500)]))


@parametrized("columns", COLUMNS, cases(28, groups=(1,), head_sizes=LARGE_TILES, kv_heads=(1, 2), rooms=(0, *UP_TO)))
def test_many_columns_with_options(array: Library, columns: tuple[int, int], case: Case) -> None:
    queries, case = of_columns(columns, case)
    options = options_of(case.sizes.heads)
    for i, window in enumerate((None, 1, 17, 100)):
        b = case.batch([(queries, 9), (queries, 260), (queries + 1, 101), (queries - 1, 64)], window)
        option = options[(queries + case.sizes.heads + i) % len(options)]
        check(array, b.changed(options=b.options | option))


@parametrized("columns", COLUMNS, cases(14, groups=(1,), head_sizes=LARGE_TILES, kv_heads=(2, 1), rooms=(0, 2048)))
def test_many_columns_of_many_sequences(array: Library, columns: tuple[int, int], case: Case) -> None:
    queries, case = of_columns(columns, case)
    check_many(array, case.batch([(queries, n) for n in (queries, 17, 300)]), 60)


@parametrized("columns", COLUMNS, cases(14, groups=(1,), head_sizes=LARGE_TILES, kv_heads=(1,), rooms=(0, 20_000)))
def test_many_columns_of_a_long_sequence(array: Library, columns: tuple[int, int], case: Case) -> None:
    queries, case = of_columns(columns, case)
    check(array, case.batch([(queries, 3000 + 7 * queries)]))


@parametrized(
    "columns", ((3, 4), (2, 5), (1, 16), (4, 3), (1, 9), (8, 2)), cases(14, groups=(1,), head_sizes=(256, 192, 136))
)
def test_many_columns_of_large_heads(array: Library, columns: tuple[int, int], case: Case) -> None:
    queries, case = of_columns(columns, case)
    for window in (None, 50):
        check(array, case.batch([(queries, n) for n in (queries, 40, 333)], window))
        check(array, case.batch([(2 * queries, 70), (queries, 500), (0, 40)], window))
