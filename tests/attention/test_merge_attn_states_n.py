from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from attention import inputs, reference
from attention.inputs import Sizes
from cache import inputs as cache_inputs
from cache.inputs import DTYPES
from hypothesis import given
from hypothesis import strategies as st
from libraries import Library
from tolerance import assert_attention, assert_close

import pykv

Parts = tuple[np.ndarray, np.ndarray]  # partial_outputs, partial_lses


def parts(count: int, tokens: int, heads: int, head_size: int, dtype: str = "bfloat16", seed: int = 0) -> Parts:
    """A fifth of the rows of each part saw nothing, which +inf and -inf both say, and hold NaN."""
    rng = np.random.default_rng(seed)
    outputs = rng.standard_normal((count, tokens, heads, head_size)).astype(DTYPES[dtype])
    lses = (rng.standard_normal((count, heads, tokens)) * 3 + 5).astype(np.float32)
    what = rng.integers(0, 10, lses.shape)
    lses[what == 0], lses[what == 1] = np.inf, -np.inf
    outputs[np.isinf(lses).transpose(0, 2, 1)] = np.nan
    return outputs, lses


def merge(array: Library, p: Parts, output: Any, output_lse: Any = None, **options: Any) -> None:
    pykv.merge_attn_states_n(output, array.input(p[0]), array.input(p[1]), output_lse, **options)


def check(array: Library, p: Parts, dtype: Any = None) -> None:
    output, lse = (
        array.output(np.zeros(p[0].shape[1:], dtype or p[0].dtype)),
        array.output(np.zeros(p[1].shape[1:], "f")),
    )
    merge(array, p, output, lse)
    want, want_lse = reference.merge_attn_states_n(*p)
    assert_close(array.numpy(output), want)
    assert_close(array.numpy(lse), want_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [1, 7, 8, 32, 80, 128, 130, 256, 300, 1000])
def test_head_sizes(array: Library, head_size: int, dtype: str) -> None:
    check(array, parts(5, 33, 5, head_size, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 7, 8, 15, 16, 33, 64, 100, 300])
def test_numbers_of_parts(array: Library, count: int, dtype: str) -> None:
    check(array, parts(count, 9, 3, 24, dtype))
    check(array, parts(count, 3, 2, 520, dtype))


@pytest.mark.parametrize(("tokens", "heads"), [(0, 4), (4, 0), (1, 1), (1, 128), (613, 4), (256, 40)])
def test_numbers_of_rows(array: Library, tokens: int, heads: int) -> None:
    check(array, parts(3, tokens, heads, 32))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_float32_parts_to_16_bits(array: Library, dtype: str) -> None:
    for head_size in (64, 13):
        check(array, parts(6, 21, 4, head_size, "float32"), DTYPES[dtype])


@given(data=st.data())
def test_any_lse(array: Library, data: st.DataObject) -> None:
    """Also far apart, huge, and infinite in some or all parts."""
    count = data.draw(st.integers(1, 20), "parts")
    p = parts(count, 2, 3, 24, data.draw(st.sampled_from(list(DTYPES)), "dtype"), data.draw(st.integers(0, 99), "seed"))
    numbers = st.sampled_from([np.inf, -np.inf, 0.0, -1e30, 1e30, 88.0, -104.0]) | st.floats(-200, 200, width=32)
    lses = data.draw(st.lists(numbers, min_size=p[1].size, max_size=p[1].size), "lse")
    p[1][...] = np.reshape(lses, p[1].shape)
    p[0][...] = np.where(np.isnan(p[0]), p[0].dtype.type(3), p[0])
    check(array, p)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [3, 40])
def test_the_only_part_that_saw_something_is_copied(array: Library, count: int, dtype: str) -> None:
    """Bit by bit, zeros of both signs included."""
    p = parts(count, 20, 4, 72, dtype)
    only = np.random.default_rng(1).integers(0, count, p[1].shape[1:])
    p[1][...] = np.where(np.arange(count)[:, None, None] == only, 3.25, -np.inf)
    p[0][...] = np.random.default_rng(2).standard_normal(p[0].shape)
    p[0][:, :, :, 3] = -0.0
    want = np.take_along_axis(p[0], only.T[None, :, :, None], 0)[0].copy()
    p[0][np.isinf(p[1]).transpose(0, 2, 1)] = np.nan
    output, lse = array.output(np.zeros_like(want)), array.output(np.zeros(p[1].shape[1:], np.float32))
    merge(array, p, output, lse)
    np.testing.assert_array_equal(array.numpy(output).view(np.uint8), want.view(np.uint8))
    assert (array.numpy(lse) == 3.25).all()


@pytest.mark.parametrize("count", [2, 5, 20])
def test_rows_do_not_depend_on_the_batch(array: Library, count: int) -> None:
    """Bit by bit, though many rows are shared out otherwise than few."""
    many = parts(count, 1100, 8, 128)
    few = many[0][:, 500:503].copy(), many[1][:, :, 500:503].copy()
    got = []
    for p in (many, few):
        output = array.output(np.zeros(p[0].shape[1:], p[0].dtype))
        lse = array.output(np.zeros(p[1].shape[1:], np.float32))
        merge(array, p, output, lse)
        got.append((array.numpy(output), array.numpy(lse)))
    np.testing.assert_array_equal(got[0][0][500:503].view(np.uint16), got[1][0].view(np.uint16))
    np.testing.assert_array_equal(got[0][1][:, 500:503], got[1][1])


def test_nothing_seen_at_all_gives_zeros(array: Library) -> None:
    p = parts(4, 9, 4, 64)
    p[1][...], p[0][...] = -np.inf, np.nan
    output, lse = array.output(np.ones(p[0].shape[1:], p[0].dtype)), array.output(np.ones(p[1].shape[1:], np.float32))
    merge(array, p, output, lse)
    assert not array.numpy(output).view(np.uint16).any()
    assert np.isneginf(array.numpy(lse)).all()


def test_nan_comes_out(array: Library) -> None:
    p = parts(3, 6, 2, 32, "float32")
    p[0][...], p[1][...] = 1.0, 2.0
    p[1][1, 1, 3] = p[0][2, 0, 0, 5] = np.nan
    p[1][:, 0, 5] = np.nan, -np.inf, np.inf
    output, lse = array.output(np.zeros(p[0].shape[1:], np.float32)), array.output(np.zeros(p[1].shape[1:], np.float32))
    merge(array, p, output, lse)
    nan = np.isnan(array.numpy(output))
    assert nan[3, 1].all()
    assert nan[5, 0].all()
    assert nan[0, 0, 5]
    assert nan.sum() == 65
    assert np.isnan(array.numpy(lse)).sum() == 2


@pytest.mark.parametrize("count", [2, 3, 7, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_is_not_nothing(array: Library, dtype: str, count: int) -> None:
    """Of an lse beside parts that saw nothing; of an output, however small its weight is."""
    p = parts(count, 40, 6, 72, dtype)
    p[1][:, 2, 7] = -np.inf
    p[1][count - 1, 2, 7] = np.nan
    p[0][:, 9, 3], p[0][0, 9, 3, 5] = 1.0, np.nan
    p[1][:, 3, 9], p[1][0, 3, 9] = 400.0, -400.0
    output, lse = array.output(np.zeros(p[0].shape[1:], p[0].dtype)), array.output(np.zeros(p[1].shape[1:], np.float32))
    merge(array, p, output, lse)
    nan = np.isnan(array.numpy(output).astype(np.float32))
    assert nan[7, 2].all()
    assert nan[9, 3, 5]
    assert nan.sum() == 72 + 1
    assert np.argwhere(np.isnan(array.numpy(lse))).tolist() == [[2, 7]]


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_in_fp8(array: Library, dtype: str, as_bytes: bool) -> None:
    """Also into rows of a larger array."""
    for head_size in (64, 13):
        p = parts(5, 50, 4, head_size, dtype)
        p[0][0, 3, 1], p[1][:, 1, 3] = 1000, (9, 0, 0, 0, 0)  # saturates
        p[0][1:, 3, 1] = 1
        p[0][0, 7, 0, 5], p[1][0, 0, 7] = np.nan, 5.0
        room = array.output(np.full((4, 50, 96), 7, np.uint8 if as_bytes else ml_dtypes.float8_e4m3fn))
        before = array.numpy(room)[0, 0, 0]  # CuPy has fp8 as bytes
        merge(
            array,
            p,
            cache_inputs.view(room, lambda m, n=head_size: m[:, :, 16 : 16 + n].swapaxes(0, 1)),
            output_scale=0.05,
        )
        everything = array.numpy(room)
        beside = np.delete(everything, np.s_[16 : 16 + head_size], axis=2)
        assert (beside == before).all()
        got = everything[:, :, 16 : 16 + head_size].swapaxes(0, 1).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        want = reference.merge_attn_states_n(*p)[0] / 0.05
        nan = np.isnan(want)
        np.testing.assert_array_equal(np.isnan(got), nan)
        assert nan[7, 0, 5]
        exact = np.clip(want[~nan], -448, 448)
        # half a unit in the last place of E4M3, and a little for what float32 lost before
        ulp = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 2**-9))), -6) - 3)
        assert (np.abs(got[~nan] - exact) <= 0.5001 * ulp + 1e-5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [3, 50])
def test_in_place(array: Library, count: int, dtype: str) -> None:
    """The results over one of the parts, lse included."""
    for head_size in (16, 128, 500):
        p = parts(count, 30, 4, head_size, dtype)
        want, want_lse = reference.merge_attn_states_n(*p)
        mine = [array.output(x) for x in p]
        over = [cache_inputs.view(x, lambda m: m[1]) for x in mine]
        pykv.merge_attn_states_n(over[0], *mine, over[1])
        assert_close(array.numpy(mine[0])[1], want, p[0].dtype)
        assert_close(array.numpy(mine[1])[1], want_lse)


@given(data=st.data())
def test_strides(array: Library, data: st.DataObject) -> None:
    """Every order of the leading dimensions in memory, padding between rows, every other lse."""
    dtype = data.draw(st.sampled_from(list(DTYPES)), "dtype")
    count, tokens, heads, head_size = (
        data.draw(st.integers(1, n), name) for n, name in ((9, "n"), (7, "t"), (5, "h"), (70, "d"))
    )
    p = parts(count, tokens, heads, head_size, dtype)
    order = data.draw(st.permutations(range(3)), "order")
    back = tuple(np.argsort(order))
    pad = data.draw(st.integers(0, 9), "padding")
    outputs = np.pad(p[0].transpose(*order, 3), [(0, 0), (0, 0), (0, 1), (pad, 1)], constant_values=np.nan)
    outputs = outputs[:, :, :-1, pad : pad + head_size].transpose(*back, 3)
    lses = np.repeat(p[1].transpose(order), 2, axis=2)[:, :, ::2].transpose(back)
    room = np.full((heads, tokens, head_size + pad + 2), inputs.SENTINEL, p[0].dtype)
    lse_room = np.full((tokens, 2 * heads + 1), inputs.SENTINEL, np.float32)
    output, lse = array.output(room), array.output(lse_room)
    merge(
        array,
        (outputs, lses),
        cache_inputs.view(output, lambda m: m[:, :, pad : pad + head_size].swapaxes(0, 1)),
        cache_inputs.view(lse, lambda m: m[:, ::2][:, 1:].swapaxes(0, 1)),
    )
    want, want_lse = reference.merge_attn_states_n(*p)
    expected, expected_lse = room.astype(np.float64), lse_room.astype(np.float64)
    expected[:, :, pad : pad + head_size], expected_lse[:, 2::2] = want.swapaxes(0, 1), want_lse.T
    assert_close(array.numpy(output), expected, p[0].dtype)
    assert_close(array.numpy(lse), expected_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_make_the_whole(array: Library, dtype: str) -> None:
    """Attention to some pages of each sequence at a time, merged, is attention to all of them."""
    whole = inputs.batch(
        np.random.default_rng(0), [(1, n) for n in (49, 100, 300)], Sizes(4, 2, 64), dtype=dtype, decode=True
    )
    cut = 32 // 16
    outputs, lses = [], []
    for first in range(0, 300 // 16 + 1, cut):
        table = np.ascontiguousarray(whole.block_tables[:, first : first + cut])
        lens = np.clip(whole.seq_lens - first * 16, 0, 16 * table.shape[1]).astype(np.int32)
        made = [array.output(x) for x in inputs.outputs(whole)]
        inputs.run(array, whole.changed(block_tables=table, seq_lens=lens), *made)
        outputs.append(array.numpy(made[0]))
        lses.append(array.numpy(made[1]))
    output, lse = (array.output(x) for x in inputs.outputs(whole))
    merge(array, (np.stack(outputs), np.stack(lses)), output, lse)
    want, want_lse = inputs.expected(whole)
    assert_attention(array.numpy(output), want)
    assert_close(array.numpy(lse), want_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"partial_outputs": (7, 3, 32)},
            ValueError,
            r"partial_outputs: must have 4 dimensions, got shape \[7, 3, 32\]",
        ),
        ({"partial_lses": (2, 7, 3)}, ValueError, "partial_lses: dimension 1 must equal num_heads = 3, got shape"),
        ({"partial_lses": (3, 3, 7)}, ValueError, "partial_lses: dimension 0 must equal num_parts = 2, got shape"),
        ({"output": (8, 3, 32)}, ValueError, "output: dimension 0 must equal num_tokens = 7, got shape"),
        ({"output_lse": (3, 8)}, ValueError, "output_lse: dimension 1 must equal num_tokens = 7, got shape"),
        ({"output_scale": 1.0}, TypeError, "output: dtype must be float8_e4m3fn or uint8, got float32"),
        (
            {"partial_outputs": np.full((2, 7, 3, 32), 7, np.float16)},
            TypeError,
            "output: dtype must be that of partial_outputs, float16, got float32",
        ),
        ({"partial_lses": np.full((2, 3, 7), 7, np.float16)}, TypeError, "partial_lses: dtype must be float32"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    shapes: dict[str, Any] = {
        "output": (7, 3, 32),
        "partial_outputs": (2, 7, 3, 32),
        "partial_lses": (2, 3, 7),
        "output_lse": (3, 7),
        **changes,
    }
    arguments = {k: np.full(v, 7, np.float32) if isinstance(v, tuple) else v for k, v in shapes.items()}
    with pytest.raises(error, match=f"^merge_attn_states_n: {message}"):
        pykv.merge_attn_states_n(**arguments)
    assert (arguments["output"] == 7).all()
