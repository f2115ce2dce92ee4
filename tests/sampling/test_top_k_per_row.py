from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rows import FLOATS, name_of, padded, random
from sampling import reference

import pykv

dtypes = pytest.mark.parametrize("dtype", FLOATS, ids=name_of)


def top_k(array, x, k, *, offset=0, **options):
    """Indices for NumPy arrays."""
    out = array.output(np.full((len(x), k + 3), -7, np.int32)[:, :k])
    arrays = {name: array.input(v) if isinstance(v, np.ndarray) else v for name, v in options.items()}
    pykv.top_k_per_row(out, array.input(x, offset=offset), k, **arrays)
    return array.numpy(out)


@dtypes
@pytest.mark.parametrize(
    ("rows", "cols", "k"),
    [(1, 1, 1), (3, 100, 7), (2, 128, 128), (2, 100, 200), (5, 4097, 50), (3, 20000, 64), (1, 130001, 2048)]
    + [(2, 40000, 4096), (40, 3001, 300), (300, 1000, 17), (1, 20000, 20), (2, 70000, 4096)]
    # as wide as has room in the shared memory of 16 blocks, or 8, and one more; of 32 bits, and of 16
    + [(1, 261888, 50), (1, 261889, 50), (3, 130944, 2048), (3, 130945, 2048), (1, 261632, 50), (3, 130817, 2048)],
    ids=name_of,
)
@pytest.mark.parametrize("ordered", [False, True])
def test_sizes(array, dtype, rows, cols, k, ordered):
    x = random((rows, cols), dtype, cols)
    np.testing.assert_array_equal(top_k(array, x, k, sorted=ordered), reference.top_k_per_row(x, k, ordered=ordered))


@dtypes
def test_values_come_with_the_indices(array, dtype):
    x = random((6, 900), dtype)
    ends = np.array([900, 3, 0, 20, 899, 41], np.int32)
    indices, values = array.output(np.zeros((6, 20), np.int32)), array.output(np.zeros((6, 20), dtype))
    pykv.top_k_per_row(indices, array.input(x), 20, None, array.input(ends), sorted=True, values=values)
    expected = reference.top_k_per_row(x, 20, ends=ends, ordered=True)
    np.testing.assert_array_equal(array.numpy(indices), expected)
    wanted = np.where(expected < 0, -np.inf, np.take_along_axis(x, np.maximum(expected, 0), 1).astype(np.float32))
    np.testing.assert_array_equal(array.numpy(values).astype(np.float32), wanted)


def hard_rows(cols: int) -> np.ndarray:
    """Orders and ties that a search by bounds has to bear."""
    up = np.arange(cols, dtype=np.float32)
    rows = [up, -up, up % 7, np.zeros(cols), np.full(cols, -np.inf), np.where(up % 3, -np.inf, up), up % 2 - 0.5]
    rows += [np.where(up % 2, 0.0, -0.0), np.where(up > cols - 20, np.inf, -6e4), up * 1e-45, np.minimum(up, 30)]
    clusters = np.repeat(random((cols // 64 + 1,), np.dtype(np.float32), 3), 64)[:cols]  # neighbours are alike
    return np.array([*rows, clusters, -clusters * 1e-3, np.where(up < cols // 8, up, -up)], np.float32)


@dtypes
@pytest.mark.parametrize("k", [1, 50, 1000, 2048])
@pytest.mark.parametrize("cols", [3000, 33333])
def test_hard_rows(array, dtype, k, cols):
    x = hard_rows(cols).astype(dtype)
    np.testing.assert_array_equal(top_k(array, x, k), reference.top_k_per_row(x, k))
    one = x[-1:]  # shared by a cluster
    np.testing.assert_array_equal(top_k(array, one, k), reference.top_k_per_row(one, k))


@dtypes
@pytest.mark.parametrize("cols", [50000, 70001])  # shared by eight blocks, and by sixteen
def test_one_hard_row_alone(array, dtype, cols):
    for x in [*hard_rows(cols), *masked_rows(cols)]:
        with np.errstate(over="ignore"):  # of float16
            row = x[None].astype(dtype)
        for k in (1, 700, 4096):
            np.testing.assert_array_equal(top_k(array, row, k), reference.top_k_per_row(row, k))


def masked_rows(cols: int) -> np.ndarray:
    """All but few logits are equal, as a grammar's mask or a bias leaves them; the few lie here or there."""
    x = random((6, cols), np.dtype(np.float32), 5)
    rows = []
    for row, nothing in zip(x, [-np.inf, -np.inf, 0.0, -6e4, np.inf, 1.5], strict=True):
        for first, count in [(0, 20), (cols - 30, 30), (cols // 3, 1), (cols // 2, 1500), (7, 0)]:
            rows.append(np.full(cols, nothing, np.float32))
            rows[-1][first : first + count] = row[:count]
    scattered = np.where(np.arange(cols) % 61, -np.inf, x[0])
    return np.array([*rows, scattered, np.where(np.arange(cols) < cols // 2, -np.inf, 2.0)], np.float32)


@dtypes
@pytest.mark.parametrize("k", [1, 50, 2048])
@pytest.mark.parametrize("times", [1, 3, 9])
def test_masked_rows(array, dtype, k, times):
    x = masked_rows(20011).astype(dtype)
    expected = reference.top_k_per_row(x, k)
    np.testing.assert_array_equal(top_k(array, np.tile(x, (times, 1)), k), np.tile(expected, (times, 1)))
    for row in x[:12]:  # shared by a cluster
        np.testing.assert_array_equal(top_k(array, row[None], k), reference.top_k_per_row(row[None], k))


def test_a_sample_that_misleads(array):
    """Two blocks share a row. What the first one looks at first has all that is large of its columns."""
    x = random((64, 16390), np.dtype(np.float32))
    x[:, :2048][:, ::3] = 100 + random((64, 683), np.dtype(np.float32), 1) ** 2 % 1
    x[:, 9000:10100] = 100 + random((64, 1100), np.dtype(np.float32), 2) ** 2 % 1
    np.testing.assert_array_equal(top_k(array, x, 2048), reference.top_k_per_row(x, 2048))


@pytest.mark.parametrize("k", [1, 50, 2048])
def test_many_hard_rows(array, k):
    """No row is shared: what some columns tell is wrong where others differ from them."""
    x = hard_rows(40000)
    expected = reference.top_k_per_row(x, k)
    np.testing.assert_array_equal(top_k(array, np.tile(x, (12, 1)), k), np.tile(expected, (12, 1)))


@dtypes
@pytest.mark.parametrize("ints", [np.int32, np.int64])
def test_starts_ends_and_own_k(array, dtype, ints):
    x = random((7, 5000), dtype)
    starts = np.array([0, 1, 4999, 5000, 77, 1234, 3], ints)
    ends = np.array([5000, 2, 5000, 5000, 76, 4001, 4100], ints)
    row_k = np.array([64, 64, 1, 3, 9, 0, 33], ints)
    options = {"row_starts": starts, "row_ends": ends, "row_k": row_k}
    expected = reference.top_k_per_row(x, 64, starts, ends, row_k)
    np.testing.assert_array_equal(top_k(array, x, 64, **options), expected)


@dtypes
@pytest.mark.parametrize("rows", [2, 16])
def test_any_ends_of_wide_rows(array, dtype, rows):
    rng = np.random.default_rng(rows)
    x = (rng.integers(-90, 90, (rows, 99999)) / 7).astype(dtype)
    starts, row_k = rng.integers(0, 99999, rows), rng.integers(0, 3000, rows)
    ends = np.minimum(starts + rng.integers(0, 60000, rows) * rng.integers(0, 2, rows), 99999)
    found = top_k(array, padded(x, 5), 3000, offset=3, row_starts=starts, row_ends=ends, row_k=row_k)
    np.testing.assert_array_equal(found, reference.top_k_per_row(x, 3000, starts, ends, row_k))


@pytest.mark.parametrize("next_n", [1, 2, 3])
def test_lengths_of_sequences(array, next_n):
    lens = np.array([1000, 5, 1, 0, 640], np.int32)
    x = random((5 * next_n, 1000), np.dtype(np.float32))
    expected = reference.top_k_per_row(x, 30, ends=reference.decode_ends(lens, next_n))
    np.testing.assert_array_equal(top_k(array, x, 30, row_ends=lens, next_n=next_n), expected)


def test_lengths_that_are_none(array):
    x, least = random((4, 100), np.dtype(np.float32)), np.iinfo(np.int64).min
    for first in (least, least + 1, -1, 0, 1):
        ends = np.array([first, 60], np.int64)
        expected = reference.top_k_per_row(x, 30, ends=np.array([0, min(max(first, 0), 1), 59, 60]))
        np.testing.assert_array_equal(top_k(array, x, 30, row_ends=ends, next_n=2), expected)


@pytest.mark.parametrize("ordered", [False, True])
def test_results_that_share_memory_lead_nowhere_else(ordered):
    """Values written where indices lie are no indices."""
    x = random((1, 5000), np.dtype(np.float32)) - 1e9
    memory = np.zeros((1, 301), np.int32)
    pykv.top_k_per_row(memory[:, :300], x, 300, sorted=ordered, values=memory.view(np.float32)[:, 1:])
    np.testing.assert_array_equal(memory[:, :300], reference.top_k_per_row(x, 300, ordered=ordered))


def test_ends_may_have_two_dimensions(array):
    x = random((6, 300), np.dtype(np.float32))
    ends = np.array([[300, 20], [7, 0], [200, 299]], np.int32)
    np.testing.assert_array_equal(
        top_k(array, x, 10, row_ends=ends), reference.top_k_per_row(x, 10, ends=ends.reshape(-1))
    )


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"row_starts": np.array([0, -1], np.int32)}, "row_starts: -1"),
        ({"row_starts": np.array([0, 301], np.int32)}, "row_starts: 301"),
        ({"row_ends": np.array([301, 300], np.int64)}, "row_ends: 301"),
        ({"row_k": np.array([5, 11], np.int32)}, "row_k: 11"),
        ({"row_k": np.array([5, -2], np.int64)}, "row_k: -2"),
    ],
)
def test_what_is_out_of_range_is_clamped_and_reported(array, options, name):
    x = random((2, 300), np.dtype(np.float32))
    out = array.output(np.zeros((2, 10), np.int32))
    with array.reports(name):
        pykv.top_k_per_row(out, array.input(x), 10, **{k: array.input(v) for k, v in options.items()})
    names = {"row_starts": "starts", "row_ends": "ends", "row_k": "row_k"}
    expected = reference.top_k_per_row(x, 10, **{names[k]: v for k, v in options.items()})
    np.testing.assert_array_equal(array.numpy(out), expected)


@dtypes
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("cols", [40, 50000, 150000])
def test_nan_comes_first_and_is_reported(array, dtype, ordered, cols):
    x = random((3, cols), dtype)
    x[1, [3, cols - 1]] = np.nan, -np.nan
    out = array.output(np.zeros((3, 30), np.int32))
    with array.reports("logits: row 1 holds NaN"):
        pykv.top_k_per_row(out, array.input(x), 30, sorted=ordered)
    np.testing.assert_array_equal(array.numpy(out), reference.top_k_per_row(x, 30, ordered=ordered))


def test_all_is_nan(array):
    x = np.full((1, 30000), np.nan, np.float32)
    out = array.output(np.zeros((1, 3), np.int32))
    with array.reports("row 0 holds NaN"):
        pykv.top_k_per_row(out, array.input(x), 3)
    assert array.numpy(out).tolist() == [[0, 1, 2]]


@given(
    dtype=st.sampled_from(FLOATS),
    rows=st.integers(0, 5),
    cols=st.integers(1, 400) | st.integers(1, 40000),
    k=st.integers(1, 80) | st.integers(1, 4096),
    padding=st.integers(0, 17),
    offset=st.integers(0, 9),
    levels=st.sampled_from([1, 3, 50, 100000]),
    ordered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_rows(array, dtype, rows, cols, k, padding, offset, levels, ordered, seed):
    rng = np.random.default_rng(seed)
    x = (rng.integers(-levels, levels, (rows, cols)) / 7).astype(dtype)
    starts = rng.integers(0, cols + 1, rows).astype(np.int32)
    ends = rng.integers(0, cols + 1, rows).astype(np.int32)
    for options in ({}, {"row_starts": starts, "row_ends": ends}):
        found = top_k(array, padded(x, padding), k, offset=offset, sorted=ordered, **options)
        expected = reference.top_k_per_row(x, k, *options.values(), ordered=ordered)
        np.testing.assert_array_equal(found, expected)


@dtypes
def test_a_row_does_not_depend_on_the_others(array, dtype):
    x = (random((300, 9000), dtype) * 4).round().astype(dtype)
    together = top_k(array, x, 100, sorted=True)
    for rows in (slice(0, 1), slice(7, 9), slice(40, 140)):
        np.testing.assert_array_equal(top_k(array, x[rows], 100, sorted=True), together[rows])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"k": 0}, ValueError, "k: must lie between 1 and 4096, got 0"),
        ({"k": 5000}, NotImplementedError, "k: must lie between 1 and 4096"),
        ({"k": 9}, ValueError, "indices: .*k = 9"),
        ({"next_n": 2}, ValueError, "next_n: "),
        ({"row_ends": np.zeros(3, np.int32)}, ValueError, "row_ends: must have 4 elements"),
        ({"row_starts": np.zeros(4, np.float32)}, TypeError, "row_starts: "),
        ({"indices": np.zeros((4, 8), np.int64)}, TypeError, "indices: "),
        ({"logits": np.zeros((4, 20))}, TypeError, "logits: "),
        ({"logits": np.zeros((4, 40), np.float32)[:, ::2]}, ValueError, "logits: "),
    ],
)
def test_wrong_arguments(change, error, message):
    right = {"indices": np.zeros((4, 8), np.int32), "logits": np.zeros((4, 20), np.float32), "k": 8}
    with pytest.raises(error, match=message):
        pykv.top_k_per_row(**right | change)
