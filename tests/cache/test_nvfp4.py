"""nvfp4 caches written by reshape_and_cache_flash."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cache import inputs, reference_nvfp4
from cache.inputs import DTYPES, SLOTS, TOKENS, Sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Library

import pykv

LAYOUTS = [
    "NHD",
    "HND",
    "NHD, blocks of K and V in turn",
    "HND, blocks of K and V in turn",
    "K NHD, V HND",
    "pages not aligned",
]


def stored_sizes(s: Sizes) -> Sizes:
    return replace(s, head_size=s.head_size * 9 // 16, v_head_size=s.v_size * 9 // 16)


class Pair:
    """Memories of key and value caches, in a library and in NumPy."""

    def __init__(self, array: Library, name: str, s: Sizes, rng: np.random.Generator) -> None:
        self.array = array
        self.layout = inputs.layout(name, stored_sizes(s), 1)
        shapes = [self.layout.key_shape] if self.layout.one_memory else [self.layout.key_shape, self.layout.value_shape]
        self.expected = [rng.integers(0, 256, shape, np.uint8) for shape in shapes]
        self.actual = [array.output(m) for m in self.expected]

    def in_numpy(self) -> tuple[np.ndarray, np.ndarray]:
        return self.layout.key(self.expected[0]), self.layout.value(self.expected[-1])

    def in_library(self) -> tuple[Any, Any]:
        return inputs.view(self.actual[0], self.layout.key), inputs.view(self.actual[-1], self.layout.value)

    def assert_same(self) -> None:
        for actual, expected in zip(self.actual, self.expected, strict=True):
            np.testing.assert_array_equal(self.array.numpy(actual), expected)


def prepare(
    array: Library,
    name: str,
    s: Sizes,
    *,
    dtype: str = "bfloat16",
    slots: np.ndarray | None = None,
    num_tokens: int = 33,
    extra_rows: int = 2,
    arrangement: str = "compact",
    k_scale: Any = np.float32(0.37),  # noqa: B008
    v_scale: Any = np.float32(2.0),  # noqa: B008
    as_scale: Any = float,
    seed: int = 0,
) -> tuple[Callable[[], None], Pair]:
    rng = np.random.default_rng(seed)
    pair = Pair(array, name, s, rng)
    if slots is None:
        slots = inputs.slot_mapping(rng, "sequences", min(num_tokens, s.slots), s)
    rows = len(slots) + extra_rows
    key = inputs.nvfp4_tokens(rng, DTYPES[dtype], rows, s.heads, s.head_size, arrangement)
    value = inputs.nvfp4_tokens(rng, DTYPES[dtype], rows, s.heads, s.v_size, arrangement)
    for i, (cache, data, scale) in enumerate(zip(pair.in_numpy(), (key, value), (k_scale, v_scale), strict=True)):
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < s.slots:
                reference_nvfp4.store(cache, slot, data[token], scale, values=i == 1)
    given = array.input(key), array.input(value), *pair.in_library(), array.input(slots)
    return lambda: pykv.reshape_and_cache_flash(*given, "nvfp4", as_scale(k_scale), as_scale(v_scale)), pair


def check(array: Library, name: str, s: Sizes, **options: Any) -> None:
    call, pair = prepare(array, name, s, **options)
    call()
    pair.assert_same()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(array: Library, name: str, dtype: str) -> None:
    check(array, name, Sizes(), dtype=dtype)
    check(array, name, Sizes(head_size=128, heads=2), dtype=dtype, num_tokens=90)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("name", ["NHD", "HND"])
def test_slot_mappings(array: Library, name: str, ids: type, slots: str) -> None:
    s = Sizes(blocks=9)
    for n in (1, 2, 4, 31, 32, 33, 70, 144):
        check(array, name, s, slots=inputs.slot_mapping(np.random.default_rng(n), slots, n, s, ids))


@pytest.mark.parametrize("arrangement", TOKENS)
@pytest.mark.parametrize("name", ["NHD", "HND"])
def test_strides_of_the_tokens(array: Library, name: str, arrangement: str) -> None:
    for dtype in DTYPES:
        check(array, name, Sizes(), arrangement=arrangement, dtype=dtype)


@pytest.mark.parametrize("block_size", [4, 8, 12, 20, 64])
@pytest.mark.parametrize("name", ["NHD", "HND"])
def test_block_sizes(array: Library, name: str, block_size: int) -> None:
    check(array, name, Sizes(blocks=200 // block_size, block_size=block_size), num_tokens=70)


@pytest.mark.parametrize(("head_size", "v_head_size"), [(64, 128), (128, 64), (192, 128), (256, 256), (576, 512)])
@pytest.mark.parametrize("name", ["NHD", "HND", "K NHD, V HND"])
def test_head_sizes(array: Library, name: str, head_size: int, v_head_size: int) -> None:
    check(array, name, Sizes(head_size=head_size, v_head_size=v_head_size))


@pytest.mark.parametrize("heads", [1, 2, 17, 40, 128])
@pytest.mark.parametrize("name", ["NHD", "HND"])
def test_numbers_of_heads(array: Library, name: str, heads: int) -> None:
    check(array, name, Sizes(heads=heads, head_size=128, blocks=3), dtype="float16", num_tokens=20)


@pytest.mark.parametrize("where", ["number", "host", "with the arrays"])
def test_global_scales(array: Library, where: str) -> None:
    per_head = np.exp2(np.linspace(-3, 4, 5)).astype(np.float32) * np.float32(1.1)
    as_scale = {"number": float, "host": np.atleast_1d, "with the arrays": lambda x: array.input(np.atleast_1d(x))}
    for k_scale, v_scale in ((np.float32(0.3), np.float32(7)), (per_head, per_head[::-1].copy())):
        if where != "number" or np.ndim(k_scale) == 0:
            check(array, "NHD", Sizes(heads=5), k_scale=k_scale, v_scale=v_scale, as_scale=as_scale[where])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1 / 3, 1e-3, 1e4, 1e-30, 1e-42, 3e38, 0.0, -0.7])
def test_global_scales_of_any_size(array: Library, dtype: str, scale: float) -> None:
    """Where block scales or their reciprocals underflow, overflow or are negative."""
    check(array, "NHD", Sizes(), dtype=dtype, k_scale=np.float32(scale), v_scale=np.float32(scale), num_tokens=60)


@pytest.mark.parametrize("arrangement", ["compact", "part of qkv"])
def test_many_tokens(array: Library, arrangement: str) -> None:
    s = Sizes(blocks=40, heads=8, head_size=128)
    check(array, "NHD", s, num_tokens=600, arrangement=arrangement)
    check(array, "HND", s, slots=np.arange(600), arrangement=arrangement)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [2.0**-70, 3e-5, 0.011, 0.75, 700.0, -0.5])
def test_many_tokens_by_scale(array: Library, dtype: str, scale: float) -> None:
    """Enough for the tables of the CPU; in float16 some scales lead to subnormal numbers or past the largest one."""
    s = Sizes(blocks=8, heads=5, head_size=192)
    check(array, "NHD", s, dtype=dtype, k_scale=np.float32(scale), v_scale=np.float32(3 * scale), num_tokens=110)
    per_head = (np.float32(scale) * np.array([1, 0.3, 2, 5, 0.01], np.float32)).astype(np.float32)
    check(
        array, "NHD", s, dtype=dtype, k_scale=per_head, v_scale=per_head[::-1].copy(), num_tokens=110,
        as_scale=array.input,
    )  # fmt: skip


def test_no_tokens(array: Library) -> None:
    check(array, "NHD", Sizes(), slots=np.zeros(0, np.int64), extra_rows=0)
    check(array, "HND", Sizes(), slots=np.zeros(0, np.int64), extra_rows=3)
    check(array, "NHD", Sizes(), slots=np.full(40, -1))
    check(array, "NHD", Sizes(heads=0), num_tokens=4)


slots_of_any_kind = st.one_of(
    st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1), st.sampled_from([31, 32, 2**31, 2**32, 2**62, -(2**63)])
)


@pytest.mark.parametrize("name", ["NHD", "HND, blocks of K and V in turn"])
@given(data=st.data())
@settings(max_examples=25)
def test_slots_beyond_the_cache(array: Library, name: str, data: st.DataObject) -> None:
    s = Sizes(blocks=4, block_size=8, heads=2)
    slots = np.array(data.draw(st.lists(slots_of_any_kind, min_size=1, max_size=40, unique=True)), np.int64)
    call, pair = prepare(array, name, s, slots=slots)
    if (slots < s.slots).all():
        call()
    else:
        with array.reports(r"^reshape_and_cache_flash: slot_mapping: \d+ is out of range \[0, 32\); it was not used$"):
            call()
    pair.assert_same()


@given(data=st.data())
@settings(max_examples=100)
def test_anything(array: Library, data: st.DataObject) -> None:
    draw = data.draw
    name = draw(st.sampled_from(LAYOUTS))
    s = Sizes(
        blocks=draw(st.integers(1, 8)),
        block_size=4 * draw(st.integers(1, 8)),
        heads=draw(st.integers(1, 5)),
        head_size=64 * draw(st.integers(1, 4)),
        v_head_size=None if "in turn" in name else 64 * draw(st.integers(1, 4)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(0, s.slots))
    slots = inputs.slot_mapping(rng, draw(st.sampled_from(SLOTS)), n, s, draw(st.sampled_from([np.int32, np.int64])))
    scale = draw(st.floats(2**-10, 2**10, width=32))
    check(
        array, name, s, dtype=draw(st.sampled_from(sorted(DTYPES))), slots=slots,
        arrangement=draw(st.sampled_from(TOKENS)), k_scale=np.float32(scale), v_scale=np.float32(1 / scale),
        extra_rows=draw(st.integers(0, 3)), seed=draw(st.integers(0, 2**32)),
    )  # fmt: skip


def zeros(*shape: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"key_cache": zeros(3, 8, 2, 64)}, ValueError, r"key_cache: dimension 3 must equal head_size \* 9 / 16 = 36"),
        ({"value_cache": zeros(4, 8, 2, 36)}, ValueError, "value_cache: dimension 0 must equal num_blocks = 3"),
        ({"key_cache": zeros(3, 8, 2, 36, dtype=np.float16)}, TypeError, "key_cache: dtype must be uint8 for"),
        (
            {"key_cache": zeros(3, 8, 2, 72)[..., ::2]},
            ValueError,
            r"key_cache: nvfp4 needs blocks \[block_size, num_heads, 36\] of bytes without gaps, NHD or .* got shape",
        ),
        ({"key_cache": zeros(3, 8, 3, 36)[:, :, 1:]}, ValueError, "key_cache: nvfp4 needs blocks .* without gaps"),
        (
            {"key_cache": zeros(3, 6, 2, 36), "value_cache": zeros(3, 6, 2, 36)},
            ValueError,
            "key_cache: nvfp4 needs blocks of a multiple of 4 tokens, got shape",
        ),
        (
            {"key": zeros(4, 2, 80, dtype=np.float16), "key_cache": zeros(3, 8, 2, 45)},
            ValueError,
            r"key_cache: nvfp4 needs a head size \(MLA: an entry\) that is a multiple of 64, got 80",
        ),
        ({"k_scale": np.ones(3, np.float32)}, ValueError, "k_scale: must have 1 element, or one for each of the 2"),
    ],
)  # fmt: skip
def test_errors(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    half, cache = zeros(4, 2, 64, dtype=np.float16), zeros(3, 8, 2, 36)
    given = {"key": half, "value": half, "key_cache": cache, "value_cache": cache.copy(), "k_scale": 1.0, **changed}
    with pytest.raises(error, match=f"^reshape_and_cache_flash: {message}"):
        pykv.reshape_and_cache_flash(**given, slot_mapping=np.arange(4), kv_cache_dtype="nvfp4")


def test_packed_caches_do_not_hold_it() -> None:
    half, cache = zeros(4, 2, 64, dtype=np.float16), zeros(3, 8, 2, 36)
    with pytest.raises(ValueError, match=r"^reshape_and_cache: kv_cache_dtype: 'nvfp4' is for flash caches .* MLA"):
        pykv.reshape_and_cache(half, half, cache, cache, np.arange(4), "nvfp4")
