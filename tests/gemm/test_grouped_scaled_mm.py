from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from gemm.scaled import E4M3, product, spread
from gemm.test_scaled_mm import BF16, INT8, compare, matrix, positive, powers, words
from hypothesis import given
from hypothesis import strategies as st
from rows import name_of

import pykv
from pykv import vllm

codes = pytest.mark.parametrize("codes", [E4M3, INT8], ids=name_of)
UNWRITTEN = 77.0


def weights(groups: int, n: int, k: int, codes: np.dtype) -> np.ndarray:
    """``[groups, k, n]``, as layers have them: ``[groups, n, k]``, transposed."""
    return np.stack([matrix((n, k), codes, seed=g) for g in range(groups)]).swapaxes(1, 2)


def scales_of(rows: tuple[int, ...], groups: int, n: int, k: int, form: str) -> tuple[np.ndarray, np.ndarray]:
    if form == "tensors":
        return positive(1), positive(groups)
    if form == "channels":
        return positive(*rows), positive(groups, n)
    make = powers if form == "powers" else positive
    blocks = -(-k // 128)
    return make(*rows, blocks), make(groups, blocks, -(-n // 128))


def multiply(array, a, b, a_scales, b_scales, *, dtype=BF16, row_groups=None, begins=None, sizes=None, expected=0):
    out = array.output(np.full((*a.shape[:-1], b.shape[2]), UNWRITTEN, dtype))
    rows = [None if x is None else array.input(x) for x in (row_groups, begins, sizes)]
    pykv.grouped_scaled_mm(out, *(array.input(x) for x in (a, b, a_scales, b_scales)), *rows, expected)
    return array.numpy(out)


def check_group(out, a, b, a_scales, b_scales) -> None:
    """Of rows of one group: its weight and the scales of both."""
    if b_scales.ndim == 2:
        x, w = spread(a, b, a_scales, b_scales)
        compare(out, x @ w, np.abs(x) @ np.abs(w), False)
    else:
        size = product(*(np.abs(x.astype(np.float64)) for x in (a, b)), a_scales, b_scales)
        compare(out, product(a, b, a_scales, b_scales), size, a.dtype == INT8)


def check(out, a, b, a_scales, b_scales, owners: np.ndarray) -> None:
    """``owners``: the group of each row, -1: none."""
    np.testing.assert_array_equal(out[owners < 0].astype(np.float32), UNWRITTEN)
    for group in range(b.shape[0]):
        rows = owners == group
        if rows.any():
            of_rows = a_scales if a_scales.size == 1 else a_scales[rows]
            check_group(out[rows], a[rows], b[group], of_rows, b_scales[group])


def owners_of(begins, sizes, num_rows: int) -> np.ndarray:
    owners = np.full(num_rows, -1)
    for group, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        owners[begin : begin + size] = group
    return owners


@codes
@pytest.mark.parametrize("form", ["tensors", "channels", "blocks", "powers"])
@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("scale", [1, 30])
def test_groups_one_after_another(array, codes, form, ids, scale):
    sizes = np.array([3, 0, 1, 9, 0, 3]) * scale
    begins = np.concatenate([[0], np.cumsum(sizes)]).astype(ids)
    n, k, m = 264, 272, int(begins[-1])
    a, b, scales = matrix((m, k), codes), weights(6, n, k, codes), scales_of((m,), 6, n, k, form)
    if form == "blocks":
        scales = np.asfortranarray(scales[0]), scales[1]
    out = multiply(array, a, b, *scales, begins=begins)
    check(out, a, b, *scales, owners_of(begins[:-1], sizes, m))


@codes
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16], ids=name_of)
@pytest.mark.parametrize("problems", [False, True])
def test_groups_at_places_of_their_own(array, codes, dtype, problems):
    begins, sizes = np.array([40, 0, 31], np.int32), np.array([20, 30, 0], np.int32)
    n, k, m = 136, 144, 70
    a, b, scales = matrix((m, k), codes), weights(3, n, k, codes), scales_of((m,), 3, n, k, "channels")
    given = np.stack([np.full(3, n), sizes, np.full(3, k)], 1).astype(np.int32) if problems else sizes
    out = multiply(array, a, b, *scales, dtype=np.dtype(dtype), begins=begins, sizes=given)
    check(out, a, b, *scales, owners_of(begins, sizes, m))


@codes
@pytest.mark.parametrize("form", ["tensors", "channels", "blocks"])
@pytest.mark.parametrize("rows", [5, 200])
def test_groups_apart(array, codes, form, rows):
    sizes = np.array([rows, 0, rows // 2, 1], np.int32)
    n, k = 200, 400
    a = np.stack([matrix((rows, k), codes, seed=9 * g) for g in range(4)])
    b, scales = weights(4, n, k, codes), scales_of((4, rows), 4, n, k, form)
    if form == "blocks":
        scales = scales[0].swapaxes(1, 2).copy().swapaxes(1, 2), scales[1]
    out = multiply(array, a, b, *scales, sizes=sizes, expected=rows // 2)
    for group in range(4):
        of_rows = scales[0] if scales[0].size == 1 else scales[0][group]
        check(out[group], a[group], b[group : group + 1], of_rows, scales[1][group : group + 1],
              np.where(np.arange(rows) < sizes[group], 0, -1))  # fmt: skip


@codes
@pytest.mark.parametrize("apart", [False, True])
def test_exponents_in_words_give_the_bits_of_bytes(array, codes, apart):
    n, k, rows = 72, 700, 30
    sizes, b = np.array([rows, 7], np.int32), weights(2, n, k, codes)
    shape = (2, rows) if apart else (rows + 7,)
    a, (of_a, of_b) = matrix((60, k), codes)[: np.prod(shape)].reshape(*shape, k), scales_of(shape, 2, n, k, "powers")
    told = {"sizes": sizes} if apart else {"begins": np.array([0, rows], np.int32), "sizes": sizes}
    some, wanted = (multiply(array, a, b, s, of_b, **told) for s in (words(of_a), of_a))
    np.testing.assert_array_equal(some.view(np.uint16), wanted.view(np.uint16))
    check_group(some[0][:rows] if apart else some[:rows], a[0] if apart else a[:rows], b[0],
                of_a[0] if apart else of_a[:rows], of_b[0])  # fmt: skip


@codes
@pytest.mark.parametrize("form", ["channels", "blocks"])
@pytest.mark.parametrize("expected", [0, 16, 200])
def test_rows_say_their_group(array, codes, form, expected):
    owners = np.repeat([2, 0, 0, -1, 3], 128)[:600].astype(np.int32)
    owners[[100, 127, 300]] = -1
    n, k, m = 72, 160, len(owners)
    a, b, scales = matrix((m, k), codes), weights(4, n, k, codes), scales_of((m,), 4, n, k, form)
    check(multiply(array, a, b, *scales, row_groups=owners, expected=expected), a, b, *scales, owners)


@pytest.mark.parametrize("form", ["channels", "blocks"])
@pytest.mark.parametrize("told", ["row_groups", "begins", "sizes"])
@pytest.mark.parametrize(("rows", "k", "expected"), [(3000, 4240, 0), (3000, 272, 0), (400, 400, 30)])
def test_rows_of_groups_have_the_bits_of_float32(array, form, told, rows, k, expected):
    """On an H200 tiles of 64, 128 and 256 rows; the copy engine writes those that are whole, but not of float32."""
    if array.device != "cuda":
        rows, k = rows // 10, k // 10
    elif array.module == "jax":
        pytest.skip("once is enough")
    groups, n = 3, 1000 if array.device == "cuda" else 72
    each = np.array([rows // 2 - rows // 9, 0, rows // 2 - 1], np.int32)
    options = {"expected": expected}
    if told == "row_groups":
        options[told] = np.repeat([2, 0, 0, -1, 1, 1, 2], 128)[np.arange(rows) // 128 % 7 * 128 + np.arange(rows) % 128]
        options[told][[5, rows - 1]] = -1
    elif told == "begins":
        options[told] = np.concatenate([[0], each.cumsum()]).astype(np.int32)
    else:
        options[told] = each
    shape = (groups, rows // 2) if told == "sizes" else (rows,)
    a = matrix((int(np.prod(shape)), k), E4M3).reshape(*shape, k)
    b, (of_a, of_b) = weights(groups, n, k, E4M3), scales_of((*shape[:-1], -(-shape[-1] // 4) * 4), groups, n, k, form)
    if form == "blocks":
        of_a = of_a.swapaxes(-1, -2).copy().swapaxes(-1, -2)
    of_a = of_a[..., : shape[-1], :] if form == "blocks" else of_a[..., : shape[-1]]
    some = multiply(array, a, b, of_a, of_b, **options)
    wanted = multiply(array, a, b, of_a, of_b, dtype=np.dtype(np.float32), **options)
    np.testing.assert_array_equal(some.view(np.uint16), wanted.astype(BF16).view(np.uint16))


@codes
@pytest.mark.parametrize("apart", [False, True])
def test_columns_of_a_one_after_another(array, codes, apart):
    n, k, rows = 72, 160, 30
    sizes, b = np.array([rows, 7], np.int32), weights(2, n, k, codes)
    if not apart:
        a, scales = np.asfortranarray(matrix((rows + 7, k), codes)), scales_of((rows + 7,), 2, n, k, "channels")
        owners = owners_of(np.array([0, rows]), sizes, rows + 7)
        out = multiply(array, a, b, *scales, begins=np.array([0, rows], np.int32), sizes=sizes)
        return check(out, a, b, *scales, owners)
    a = np.stack([matrix((rows, k), codes, seed=9 * g) for g in range(2)]).transpose(0, 2, 1).copy().transpose(0, 2, 1)
    scales = scales_of((2, rows), 2, n, k, "channels")
    out = multiply(array, a, b, *scales, sizes=sizes)
    for g in range(2):
        check(out[g], a[g], b[g : g + 1], scales[0][g], scales[1][g : g + 1],
              np.where(np.arange(rows) < sizes[g], 0, -1))  # fmt: skip


@codes
@pytest.mark.parametrize("blocks", [False, True])
def test_a_row_has_the_same_bits_in_any_group_of_rows(array, codes, blocks):
    n, k, m = 264, 640, 150
    a, b = matrix((m, k), codes), weights(2, n, k, codes)
    scales = scales_of((m,), 2, n, k, "blocks" if blocks else "channels")
    single = np.full((m, n), UNWRITTEN, BF16)
    plain = [array.input(x) for x in (a, b[1], scales[0], scales[1][1])]
    made = array.output(single)
    pykv.cutlass_scaled_mm(made, *plain)
    single = array.numpy(made).view(np.uint16)
    for first, expected in ((0, 0), (10, 8), (149, 300)):
        begins = np.array([0, first, m], np.int32)
        out = multiply(array, a, b, *scales, begins=begins, expected=expected)
        np.testing.assert_array_equal(out[first:].view(np.uint16), single[first:])


@given(
    codes=st.sampled_from([E4M3, INT8]),
    sizes=st.lists(st.integers(0, 5) | st.integers(0, 90), min_size=1, max_size=6),
    n=st.integers(1, 150),
    k=st.integers(0, 300),
    form=st.sampled_from(["tensors", "channels", "blocks"]),
    expected=st.sampled_from([0, 1, 100]),
    row_major=st.booleans(),
)
def test_any_sizes(array, codes, sizes, n, k, form, expected, row_major):
    begins, groups = np.concatenate([[0], np.cumsum(sizes)]), len(sizes)
    m = int(begins[-1])
    a, b, scales = matrix((m, k), codes), weights(groups, n, k, codes), scales_of((m,), groups, n, k, form)
    if row_major:
        b = np.ascontiguousarray(b)
    out = multiply(array, a, b, *scales, begins=begins, expected=expected)
    check(out, a, b, *scales, owners_of(begins[:-1], sizes, m))


@pytest.mark.parametrize("groups", [1, 33, 512])
def test_many_groups(array, groups):
    sizes = np.arange(groups) * 7 % 3
    begins = np.concatenate([[0], np.cumsum(sizes)])
    n, k, m = 16, 32, int(begins[-1])
    a, b, scales = matrix((m, k), INT8), weights(groups, n, k, INT8), scales_of((m,), groups, n, k, "channels")
    check(multiply(array, a, b, *scales, begins=begins), a, b, *scales, owners_of(begins[:-1], sizes, m))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"begins": [0, 4, 13]}, r"group_begins: 13 is out of range \[0, 13\)"),
        ({"begins": [-1, 4], "sizes": [2, 2]}, r"group_begins: -1 is out of range \[0, 13\)"),
        ({"begins": [0, 4], "sizes": [2, -3]}, r"group_begins: -3 is out of range \[0, 13\)"),
        ({"row_groups": [0] * 11 + [2]}, r"row_groups: 2 is out of range \[0, 2\)"),
        ({"row_groups": [0] * 11 + [1]}, r"row_groups: 1 is out of range \[0, 2\)"),
    ],
)
def test_what_is_out_of_range_is_skipped_and_reported(array, rows, message):
    a, b = matrix((12, 48), INT8), weights(2, 24, 48, INT8)
    scales = scales_of((12,), 2, 24, 48, "channels")
    with array.reports(message):
        multiply(array, a, b, *scales, **{k: np.array(v, np.int32) for k, v in rows.items()})


def test_functions_of_vllm(array):
    if array.name in ("jax", "interface"):
        pytest.skip("the functions of vLLM allocate what they return, like what they are given")
    n, k, m = 136, 256, 256
    a, b, groups = matrix((m, k), E4M3), weights(2, n, k, E4M3), np.repeat(np.array([1, 0], np.int32), 128)
    sa, sb = scales_of((m,), 2, n, k, "blocks")
    w, sw = np.ascontiguousarray(b.swapaxes(1, 2)), np.ascontiguousarray(sb.swapaxes(1, 2))
    pairs = [tuple(array.input(x) for x in pair) for pair in ((a, sa), (w, sw))]
    out = array.output(np.zeros((m, n), BF16))
    vllm.m_grouped_fp8_gemm_nt_contiguous(*pairs, out, array.input(groups))
    check(array.numpy(out), a, b, sa, sb, groups)

    apart = [tuple(array.input(x.reshape(2, 128, -1)) for x in (a, sa)), pairs[1]]
    out = array.output(np.full((2, 128, n), UNWRITTEN, BF16))
    vllm.fp8_m_grouped_gemm_nt_masked(*apart, out, array.input(np.array([3, 100], np.int32)), 60)
    owners = np.where(np.arange(128) < np.array([[3], [100]]), [[0], [1]], -1).reshape(-1)
    check(array.numpy(out).reshape(m, n), a, b, sa, sb, owners)

    out = array.output(np.zeros((m, n), BF16))
    vllm.fp8_gemm_nt(pairs[0], tuple(array.input(x[0]) for x in (w, sw)), out)
    check_group(array.numpy(out), a, b[0], sa, sb[0])

    sa, sb = scales_of((m,), 2, n, k, "channels")
    out = array.output(np.zeros((m, n), BF16))
    offsets, sizes = np.array([0, 100], np.int32), np.array([[100, n, k], [156, n, k]], np.int32)
    strides = array.input(np.zeros(2, np.int64))
    given = [array.input(x) for x in (a, b, sa[:, None], sb[:, :, None], offsets, sizes)]
    vllm.cutlass_moe_mm(out, *given, strides, strides, strides, True, True)
    check(array.numpy(out), a, b, sa, sb, owners_of(offsets, sizes[:, 0], m))
    assert vllm.cutlass_group_gemm_supported(90)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "row_groups: must be given, or group_begins or group_sizes"),
        ({"row_groups": (4,), "group_sizes": (2,)}, "row_groups: must be given, or group_begins or group_sizes"),
        ({"group_begins": (2,)}, r"group_begins: must have groups \+ 1 = 3 elements, got shape \[2\]"),
        ({"group_sizes": (2,)}, r"a: must have 3 dimensions|a: .*rank"),
        ({"group_begins": (2,), "group_sizes": (2, 2)}, "group_sizes: dimension 1 must equal 3: m, n and k = 3"),
        ({"row_groups": (5,)}, "row_groups: dimension 0 must equal num_rows = 4"),
        ({"row_groups": (4,), "b": (513, 48, 24), "b_scales": (513,)}, "b: must be of at most 512 groups, got 513"),
        ({"row_groups": (4,), "b_scales": (3,)}, "b_scales: dimension 0 must equal groups = 2"),
        ({"row_groups": (4,), "b_scales": (2, 23)}, "b_scales: dimension 1 must equal n = 24"),
        ({"row_groups": (4,), "a_scales": (3,)}, "a_scales: dimension 0 must equal num_rows = 4"),
    ],
)
def test_what_does_not_fit_is_named(array, change, message):
    shapes = {"out": (4, 24), "a": (4, 48), "b": (2, 48, 24), "a_scales": (4,), "b_scales": (2, 24)} | change
    types = {"out": np.dtype(ml_dtypes.bfloat16), "a": INT8, "b": INT8}
    ids = ("row_groups", "group_begins", "group_sizes")
    made = {
        name: array.output(np.zeros(shape, np.int32 if name in ids else types.get(name, np.float32)))
        for name, shape in shapes.items()
    }
    with pytest.raises(ValueError, match=message):
        pykv.grouped_scaled_mm(**made)


@codes
def test_the_scale_of_all_rows_may_be_a_number_on_the_host(array, codes):
    n, k, m = 72, 160, 30
    a, b, (_, of_b) = matrix((m, k), codes), weights(2, n, k, codes), scales_of((m,), 2, n, k, "channels")
    begins = np.array([0, 12, m], np.int32)
    made = array.output(np.zeros((m, n), BF16))
    rest = array.input(a), array.input(b), 0.01234, array.input(of_b)
    pykv.grouped_scaled_mm(made, *rest, group_begins=array.input(begins))
    wanted = multiply(array, a, b, np.full(1, 0.01234, np.float32), of_b, begins=begins)
    np.testing.assert_array_equal(array.numpy(made).view(np.uint16), wanted.view(np.uint16))
