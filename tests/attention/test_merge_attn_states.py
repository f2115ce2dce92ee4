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
from libraries import Library, Numpy
from tolerance import assert_attention, assert_close

import pykv

Parts = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # prefix_output, prefix_lse, suffix_output, suffix_lse


def parts(tokens: int, heads: int, head_size: int, dtype: str = "bfloat16", seed: int = 0) -> Parts:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(2):
        made.append(rng.standard_normal((tokens, heads, head_size)).astype(DTYPES[dtype]))
        made.append((rng.standard_normal((heads, tokens)) * 3 + 5).astype(np.float32))
    return tuple(made)  # type: ignore[return-value]


def with_empty_sides(p: Parts, fill: float = 0.0) -> Parts:
    """A tenth of the rows sees nothing in the prefix, another nothing in the suffix; +inf and -inf both say so."""
    rng = np.random.default_rng(1)
    what = rng.integers(0, 20, p[1].shape)
    for side, numbers in ((0, (0, 1)), (2, (2, 3))):
        for number, infinity in zip(numbers, (np.inf, -np.inf), strict=True):
            p[side + 1][what == number] = infinity
            p[side][(what == number).T] = fill
    return p


def merge(array: Library, p: Parts, output: Any, output_lse: Any = None, **options: Any) -> None:
    pykv.merge_attn_states(output, *(array.input(x) for x in p), output_lse, **options)


def check(array: Library, p: Parts, context: int | None = None) -> None:
    output, lse = array.output(np.zeros_like(p[0])), array.output(np.zeros_like(p[1]))
    merge(array, p, output, lse, prefill_tokens_with_context=context)
    want, want_lse = reference.merge_attn_states(*p, context)
    assert_close(array.numpy(output), want, p[0].dtype)
    assert_close(array.numpy(lse), want_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [1, 7, 8, 32, 48, 64, 96, 128, 130, 256, 300, 1000])
def test_head_sizes(array: Library, head_size: int, dtype: str) -> None:
    check(array, with_empty_sides(parts(33, 5, head_size, dtype)))


@pytest.mark.parametrize(("tokens", "heads"), [(0, 4), (4, 0), (1, 1), (1, 128), (613, 4), (256, 40)])
def test_numbers_of_rows(array: Library, tokens: int, heads: int) -> None:
    check(array, with_empty_sides(parts(tokens, heads, 32)))


@pytest.mark.parametrize(("head_size", "dtype"), [(128, "bfloat16"), (300, "float16"), (130, "float32")])
def test_more_than_caches_hold(array: Library, head_size: int, dtype: str) -> None:
    """On the CPU results go past them, in lines that rows may share."""
    p = with_empty_sides(parts(2100, 9, head_size, dtype), np.nan)
    check(array, p)
    memory = array.output(np.full((2100, 10, head_size + 3), 7, p[0].dtype))
    merge(array, p, cache_inputs.view(memory, lambda m: m[:, 1:, 3:]))
    got = array.numpy(memory)
    assert_close(got[:, 1:, 3:], reference.merge_attn_states(*p, None)[0], p[0].dtype)
    assert (got[:, 0] == 7).all()
    assert (got[..., :3] == 7).all()


@pytest.mark.parametrize("context", [0, 1, 20, 32, 33])
def test_tokens_without_context_copy_the_suffix(array: Library, context: int) -> None:
    p = with_empty_sides(parts(33, 4, 64))
    p[0][context:], p[1][:, context:] = np.nan, np.nan  # not looked at
    check(array, p, context)
    output, lse = array.output(np.zeros_like(p[0])), array.output(np.zeros_like(p[1]))
    merge(array, p, output, lse, prefill_tokens_with_context=context)
    np.testing.assert_array_equal(array.numpy(output)[context:], p[2][context:])
    np.testing.assert_array_equal(array.numpy(lse)[:, context:], p[3][:, context:])  # +inf stays +inf


@given(data=st.data())
def test_any_lse(array: Library, data: st.DataObject) -> None:
    """Also far apart, huge, and infinite on either side or both."""
    dtype = data.draw(st.sampled_from(list(DTYPES)), "dtype")
    p = parts(5, 3, 24, dtype, data.draw(st.integers(0, 99), "seed"))
    numbers = st.sampled_from([np.inf, -np.inf, 0.0, -1e30, 1e30, 88.0, -104.0]) | st.floats(-200, 200, width=32)
    for lse in (p[1], p[3]):
        lse[...] = np.reshape(data.draw(st.lists(numbers, min_size=15, max_size=15), "lse"), (3, 5))
    check(array, p)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_other_side_of_an_empty_one_is_copied(array: Library, dtype: str) -> None:
    """Bit by bit, zeros of both signs included, and whatever the empty side holds."""
    p = with_empty_sides(parts(40, 6, 72, dtype), fill=np.nan)
    p[0][:, :, 3], p[2][:, :, 3] = -0.0, -0.0
    output = array.output(np.zeros_like(p[0]))
    merge(array, p, output)
    got = array.numpy(output)
    for empty, full in ((1, 2), (3, 0)):
        rows = np.isinf(p[empty]).T
        assert rows.sum() > 10
        np.testing.assert_array_equal(got[rows].view(np.uint8), p[full][rows].view(np.uint8))
    assert not np.isnan(got.astype(np.float32)).any()


@pytest.mark.parametrize("infinities", [(np.inf, np.inf), (-np.inf, np.inf), (-np.inf, -np.inf)])
def test_both_sides_empty_copies_the_prefix(array: Library, infinities: tuple[float, float]) -> None:
    p = parts(9, 4, 64)
    p[1][...], p[3][...] = infinities
    p[2][...] = np.nan
    output, lse = array.output(np.zeros_like(p[0])), array.output(np.zeros_like(p[1]))
    merge(array, p, output, lse)
    np.testing.assert_array_equal(array.numpy(output), p[0])
    assert np.isneginf(array.numpy(lse)).all()


def test_nan_comes_out(array: Library) -> None:
    p = parts(6, 2, 32, "float32")
    p[1][1, 3] = p[0][0, 0, 5] = np.nan
    output, lse = array.output(np.zeros_like(p[0])), array.output(np.zeros_like(p[1]))
    merge(array, p, output, lse)
    nan = np.isnan(array.numpy(output))
    assert nan[3, 1].all()
    assert nan[0, 0, 5]
    assert nan.sum() == 33
    assert np.isnan(array.numpy(lse)).sum() == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", [np.inf, -np.inf, np.nan, -500.0, 500.0])
@pytest.mark.parametrize("side", [0, 2])
def test_nan_is_not_nothing(array: Library, side: int, other: float, dtype: str) -> None:
    """Of an lse, whatever the other one is; of an output, however small its weight is."""
    p = parts(40, 6, 72, dtype)
    p[side + 1][2, 7], p[3 - side][2, 7] = np.nan, other
    p[side][9, 3, 5] = np.nan
    p[side + 1][3, 9], p[3 - side][3, 9] = -400.0, 400.0
    output, lse = array.output(np.zeros_like(p[0])), array.output(np.zeros_like(p[1]))
    merge(array, p, output, lse)
    nan = np.isnan(array.numpy(output).astype(np.float32))
    assert nan[7, 2].all()
    assert nan[9, 3, 5]
    assert nan.sum() == 72 + 1
    assert np.argwhere(np.isnan(array.numpy(lse))).tolist() == [[2, 7]]


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_in_fp8(array: Library, dtype: str, as_bytes: bool) -> None:
    for head_size in (64, 13):
        p = with_empty_sides(parts(50, 4, head_size, dtype))
        p[2][3, 1], p[0][3, 1] = 1000, 900  # saturates
        p[2][7, 0, 5] = np.nan
        p[3][0, 7] = 5.0
        output = array.output(np.zeros(p[0].shape, np.uint8 if as_bytes else ml_dtypes.float8_e4m3fn))
        merge(array, p, output, output_scale=0.05)
        got = array.numpy(output).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        want = reference.merge_attn_states(*p)[0] / 0.05
        nan = np.isnan(want)
        assert nan.sum() == 1
        np.testing.assert_array_equal(np.isnan(got), nan)
        exact = np.clip(want[~nan], -448, 448)
        # half a unit in the last place of E4M3, and a little for what float32 lost before
        ulp = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(exact), 2**-9))), -6) - 3)
        assert (np.abs(got[~nan] - exact) <= 0.5001 * ulp + 1e-5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("side", [0, 2])
def test_in_place(array: Library, side: int, dtype: str) -> None:
    """The results over one of the inputs, lse included."""
    for head_size in (16, 64, 128, 500):
        p = with_empty_sides(parts(100, 8, head_size, dtype))
        want, want_lse = reference.merge_attn_states(*p)
        mine = [array.output(x) for x in p]
        pykv.merge_attn_states(mine[side], *mine, mine[side + 1])
        assert_close(array.numpy(mine[side]), want, p[0].dtype)
        assert_close(array.numpy(mine[side + 1]), want_lse)


def test_strides(array: Library) -> None:
    for dtype in DTYPES:
        p = with_empty_sides(parts(21, 4, 32, dtype))
        want, want_lse = reference.merge_attn_states(*p)
        room = np.full((4, 21, 43), inputs.SENTINEL, p[0].dtype)
        lse_room = np.full((21, 9), inputs.SENTINEL, np.float32)
        strided = (
            np.pad(p[0], [(0, 0), (3, 1), (0, 0)])[:, 3:-1],
            np.asfortranarray(p[1]),
            np.ascontiguousarray(p[2].swapaxes(0, 1)).swapaxes(0, 1),
            np.repeat(p[3], 2, axis=1)[:, ::2],
        )
        output, lse = array.output(room), array.output(lse_room)
        merge(
            array,
            strided,
            cache_inputs.view(output, lambda m: m[:, :, 3:35].swapaxes(0, 1)),
            cache_inputs.view(lse, lambda m: m[:, ::2][:, 1:].swapaxes(0, 1)),
        )
        expected, expected_lse = room.astype(np.float64), lse_room.astype(np.float64)
        expected[:, :, 3:35], expected_lse[:, 2::2] = want.swapaxes(0, 1), want_lse.T
        assert_close(array.numpy(output), expected, p[0].dtype)
        assert_close(array.numpy(lse), expected_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_in_fp8_into_part_of_a_larger_array(array: Library, dtype: str) -> None:
    """The same codes as in an array of its own, and nothing beside them."""
    for head_size, first in ((64, 16), (64, 3), (13, 0)):
        p = with_empty_sides(parts(21, 4, head_size, dtype))
        alone = array.output(np.zeros(p[0].shape, np.uint8))
        merge(array, p, alone, output_scale=0.05)
        room = array.output(np.full((4, 21, 96), 7, np.uint8))
        part = np.s_[:, :, first : first + head_size]
        merge(array, p, cache_inputs.view(room, lambda m, part=part: m[part].swapaxes(0, 1)), output_scale=0.05)
        expected = np.full((4, 21, 96), 7, np.uint8)
        expected[part] = array.numpy(alone).swapaxes(0, 1)
        np.testing.assert_array_equal(array.numpy(room), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_two_halves_make_the_whole(array: Library, dtype: str) -> None:
    """Attention to the first 48 and to the last tokens of each sequence, merged, is attention to all of them."""
    whole = inputs.batch(
        np.random.default_rng(0), [(1, n) for n in (49, 100, 300)], Sizes(4, 2, 64), dtype=dtype, decode=True
    )
    cut = 48 // 16
    halves = (
        whole.changed(block_tables=whole.block_tables[:, :cut], seq_lens=np.full(3, 48, np.int32)),
        whole.changed(block_tables=whole.block_tables[:, cut:], seq_lens=whole.seq_lens - 48),
    )
    made = []
    for half in halves:
        made += [array.output(x) for x in inputs.outputs(half)]
        inputs.run(array, half, *made[-2:])
    output, lse = (array.output(x) for x in inputs.outputs(whole))
    pykv.merge_attn_states(output, *made, lse)
    want, want_lse = inputs.expected(whole)
    assert_attention(array.numpy(output), want)
    assert_close(array.numpy(lse), want_lse, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prefix_output": (7, 3)}, ValueError, r"prefix_output: must have 3 dimensions, got shape \[7, 3\]"),
        ({"suffix_output": (7, 3, 31)}, ValueError, r"suffix_output: dimension 2 must equal head_size = 32, got shape"),
        ({"output": (8, 3, 32)}, ValueError, "output: dimension 0 must equal num_tokens = 7, got shape"),
        ({"prefix_lse": (7, 3)}, ValueError, "prefix_lse: dimension 0 must equal num_heads = 3, got shape"),
        ({"output_lse": (3, 8)}, ValueError, "output_lse: dimension 1 must equal num_tokens = 7, got shape"),
        ({"prefill_tokens_with_context": 8}, ValueError, "prefill_tokens_with_context: .*0 and num_tokens = 7, got 8"),
        (
            {"prefill_tokens_with_context": -2},
            ValueError,
            "prefill_tokens_with_context: .*0 and num_tokens = 7, got -2",
        ),
        ({"output_scale": 1.0}, TypeError, "output: dtype must be float8_e4m3fn or uint8, got float32"),
    ],
)
def test_wrong_arguments(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    shapes: dict[str, Any] = {
        "output": (7, 3, 32),
        "prefix_output": (7, 3, 32),
        "prefix_lse": (3, 7),
        "suffix_output": (7, 3, 32),
        "suffix_lse": (3, 7),
        "output_lse": (3, 7),
        **changes,
    }
    arguments = {k: np.full(v, 7, np.float32) if isinstance(v, tuple) else v for k, v in shapes.items()}
    with pytest.raises(error, match=f"^merge_attn_states: {message}"):
        pykv.merge_attn_states(**arguments)
    assert (arguments["output"] == 7).all()


def test_wrong_dtypes() -> None:
    p = parts(7, 3, 32, "float16")
    with pytest.raises(TypeError, match="suffix_output: dtype must be that of prefix_output, float16, got float32"):
        merge(Numpy(), (p[0], p[1], p[2].astype(np.float32), p[3]), np.zeros_like(p[0]))
    with pytest.raises(TypeError, match="suffix_lse: "):
        merge(Numpy(), (p[0], p[1], p[2], p[3].astype(np.float16)), np.zeros_like(p[0]))
