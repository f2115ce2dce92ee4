from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache import inputs, reference
from cache.inputs import DTYPES, FLASH, INTERLEAVED, PACKED, SLOTS, TOKENS, Sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Library

import pykv

KINDS = ["auto", "fp8_e4m3", "fp8_e5m2", "int8"]


@dataclass
class Caches:
    """Key and value caches inside guarded memory, in a library and in NumPy."""

    array: Library
    layout: inputs.Layout
    expected: list[np.ndarray]
    actual: list[Any]

    @classmethod
    def make(cls, array: Library, name: str, s: Sizes, dtype: np.dtype[Any], rng: np.random.Generator) -> Caches:
        layout = inputs.layout(name, s, dtype.itemsize)
        shapes = [layout.key_shape] if layout.one_memory else [layout.key_shape, layout.value_shape]
        memories = [inputs.bits(rng, shape, dtype) for shape in shapes]
        return cls(array, layout, memories, [array.output(m) for m in memories])

    def in_numpy(self) -> tuple[np.ndarray, np.ndarray]:
        return self.layout.key(self.expected[0]), self.layout.value(self.expected[-1])

    def in_library(self) -> tuple[Any, Any]:
        return inputs.view(self.actual[0], self.layout.key), inputs.view(self.actual[-1], self.layout.value)

    def assert_same(self) -> None:
        """Every bit of the memories, that of the guards included."""
        for actual, expected in zip(self.actual, self.expected, strict=True):
            got = self.array.numpy(actual).reshape(-1).view(np.uint8)
            np.testing.assert_array_equal(got, expected.reshape(-1).view(np.uint8))


def prepare(
    array: Library,
    name: str,
    s: Sizes,
    *,
    dtype: str = "bfloat16",
    kind: str = "auto",
    slots: np.ndarray | None = None,
    num_tokens: int = 33,
    extra_rows: int = 2,
    arrangement: str = "compact",
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    as_scale: Any = float,
    as_bytes: bool = False,
    seed: int = 0,
) -> tuple[Callable[[], None], Caches]:
    """The call, and what it is to leave behind."""
    rng = np.random.default_rng(seed)
    source = DTYPES[dtype]
    element = source if kind == "auto" else np.dtype(np.uint8 if as_bytes else reference.CODES[kind])
    caches = Caches.make(array, name, s, element, rng)
    if slots is None:
        slots = inputs.slot_mapping(rng, "sequences", min(num_tokens, s.slots), s)

    def make(shape: tuple[int, ...]) -> np.ndarray:
        return (inputs.bits if kind == "auto" else inputs.floats)(rng, shape, source)

    key = inputs.tokens(make, len(slots) + extra_rows, s.heads, s.head_size, arrangement)
    value = inputs.tokens(make, len(slots) + extra_rows, s.heads, s.v_size, arrangement)
    op, plain = pykv.reshape_and_cache_flash, reference.reshape_and_cache_flash
    if caches.layout.packed:
        op, plain = pykv.reshape_and_cache, reference.reshape_and_cache
    plain(key, value, *caches.in_numpy(), slots, kind, k_scale, v_scale)
    given = array.input(key), array.input(value), *caches.in_library(), array.input(slots)
    options = {"interleaved_v": True} if caches.in_numpy()[1].ndim == 5 else {}
    return lambda: op(*given, kind, as_scale(k_scale), as_scale(v_scale), **options), caches


def check(array: Library, name: str, s: Sizes, **options: Any) -> None:
    call, caches = prepare(array, name, s, **options)
    call()
    caches.assert_same()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", FLASH + PACKED + INTERLEAVED)
def test_layouts(array: Library, name: str, kind: str, dtype: str) -> None:
    check(array, name, Sizes(), dtype=dtype, kind=kind, k_scale=0.37, v_scale=2.0)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("name", ["NHD", "packed", "packed, values interleaved"])
def test_slot_mappings(array: Library, name: str, ids: type, slots: str) -> None:
    s = Sizes(blocks=9)
    for n in (1, 2, 31, 32, 33, 70, 144):
        check(array, name, s, slots=inputs.slot_mapping(np.random.default_rng(n), slots, n, s, ids))


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("arrangement", TOKENS)
@pytest.mark.parametrize("name", ["NHD", "HND", "packed"])
def test_strides_of_the_tokens(array: Library, name: str, arrangement: str, kind: str) -> None:
    check(array, name, Sizes(), arrangement=arrangement, kind=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [1, 2, 3, 8, 12, 20, 64])
@pytest.mark.parametrize("name", ["NHD", "HND", "packed"])
def test_block_sizes(array: Library, name: str, block_size: int, kind: str) -> None:
    s = Sizes(blocks=200 // block_size, block_size=block_size)
    for dtype in ("float32", "float16"):
        check(array, name, s, dtype=dtype, kind=kind, num_tokens=70)


@pytest.mark.parametrize("head_size", [1, 2, 6, 7, 46, 80, 96, 120, 130, 256, 576])
def test_head_sizes(array: Library, head_size: int) -> None:
    for dtype in DTYPES:
        check(array, "NHD", Sizes(head_size=head_size), dtype=dtype)
    check(array, "HND", Sizes(head_size=head_size), kind="fp8_e4m3")
    check(array, "tokens adjacent", Sizes(head_size=head_size), dtype="float32")


@pytest.mark.parametrize("head_size", [16, 80, 112, 256, 576])
def test_head_sizes_packed(array: Library, head_size: int) -> None:
    for dtype in DTYPES:
        for kind in KINDS:
            check(array, "packed", Sizes(head_size=head_size), dtype=dtype, kind=kind)


@pytest.mark.parametrize("name", INTERLEAVED)
def test_interleaved_sizes(array: Library, name: str) -> None:
    """Groups of x tokens are all that there is of a block, or few of many; tokens of many of them at once."""
    for dtype in DTYPES:
        for kind in KINDS:
            x = 16 if kind != "auto" else 16 // DTYPES[dtype].itemsize
            for block_size in (x, 3 * x, 64):
                s = Sizes(blocks=320 // block_size, block_size=block_size, heads=2, head_size=32, v_head_size=1)
                check(array, name, s, dtype=dtype, kind=kind, num_tokens=200, k_scale=0.37, v_scale=2.0)
    check(array, name, Sizes(heads=1, head_size=16, v_head_size=1), dtype="float32", slots=np.arange(3, 90))
    check(array, name, Sizes(heads=9, head_size=256, blocks=40), kind="fp8_e4m3", slots=np.arange(600))
    check(array, name, Sizes(heads=8, head_size=128, v_head_size=130, blocks=300), num_tokens=4000)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 2, 16, 8), "value_cache: must have 5 dimensions"),
        ((3, 2, 2, 15, 8), "value_cache: dimension 3 must equal v_head_size = 16"),
        ((3, 2, 4, 16, 4), r"value_cache: must have shape .* 16 / x, v_head_size, x\] with x = 16 bytes = 8 elements"),
        ((3, 2, 1, 16, 8), "value_cache: must have shape"),
    ],
)
def test_interleaved_errors(shape: tuple[int, ...], message: str) -> None:
    half = np.zeros((4, 2, 16), np.float16)
    key_cache = np.zeros((3, 2, 2, 16, 8), np.float16)
    with pytest.raises(ValueError, match=f"^reshape_and_cache: {message}"):
        pykv.reshape_and_cache(half, half, key_cache, np.zeros(shape, np.float16), np.arange(4), interleaved_v=True)


# From 512 vectors of 16 bytes in a token on, a block of threads that takes each once would lose heads.
@pytest.mark.parametrize("heads", [1, 2, 17, 40, 128])
@pytest.mark.parametrize("name", ["NHD", "HND", "packed"])
def test_numbers_of_heads(array: Library, name: str, heads: int) -> None:
    check(array, name, Sizes(heads=heads, head_size=128, blocks=3), dtype="float16", num_tokens=20)
    check(array, name, Sizes(heads=heads, head_size=128, blocks=2), dtype="float32", kind="fp8_e4m3", num_tokens=9)


@pytest.mark.parametrize(("head_size", "v_head_size"), [(192, 128), (64, 80), (16, 512)])
@pytest.mark.parametrize("name", ["NHD", "HND", "packed", "K NHD, V HND"])
def test_values_of_another_head_size(array: Library, name: str, head_size: int, v_head_size: int) -> None:
    check(array, name, Sizes(head_size=head_size, v_head_size=v_head_size))


def test_packed_values_of_any_head_size(array: Library) -> None:
    for dtype in DTYPES:
        check(array, "packed", Sizes(head_size=16, v_head_size=37), dtype=dtype)
        check(array, "packed", Sizes(head_size=16, v_head_size=37), dtype=dtype, arrangement="padded")


@pytest.mark.parametrize("arrangement", ["compact", "part of qkv"])
@pytest.mark.parametrize("name", ["NHD", "rows not aligned", "packed", "packed, values not aligned"])
def test_many_tokens(array: Library, name: str, arrangement: str) -> None:
    """More bytes than CPU caches hold: on the CPU they are written past them."""
    s = Sizes(blocks=150, heads=8, head_size=128)
    check(array, name, s, dtype="float32", num_tokens=2345, arrangement=arrangement)


@pytest.mark.parametrize("slots", ["scattered", "sequences"])
@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "fp8_e4m3"), ("bfloat16", "int8"), ("float16", "fp8_e5m2")])
def test_many_bytes(array: Library, dtype: str, kind: str, slots: str) -> None:
    """So many that on CUDA tiles are converted by wide vectors; tiles that are not whole, either way."""
    s = Sizes(blocks=160, heads=30, head_size=192, v_head_size=112)
    ids = inputs.slot_mapping(np.random.default_rng(0), slots, 1861, s)
    check(array, "packed", s, dtype=dtype, kind=kind, slots=ids, k_scale=0.37, v_scale=2.0)


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("offset", [0, 16, 40])
def test_heads_and_lines(kind: str, offset: int) -> None:
    """What the CPU writes past its caches is whole lines, though heads may begin within one."""

    def cache(*shape: int) -> np.ndarray:
        stored = np.dtype(np.float16 if kind == "auto" else np.uint8)
        size = stored.itemsize * math.prod(shape)
        memory = np.full(size + 128, 7, np.uint8)
        start = -memory.ctypes.data % 64 + offset
        return memory[start : start + size].view(stored).reshape(shape)

    tokens, blocks, block_size, heads, head_size = 2053, 130, 16, 8, 64
    key, value = np.random.default_rng(0).standard_normal((2, tokens, heads, head_size)).astype(np.float16)
    slots = (np.random.default_rng(1).permutation(blocks)[:, None] * block_size + np.arange(block_size)).reshape(-1)
    x = 8 if kind == "auto" else 16
    shapes = (blocks, heads, head_size // x, block_size, x), (blocks, heads, head_size, block_size)
    got, wanted = [cache(*shape) for shape in shapes], [cache(*shape) for shape in shapes]
    pykv.reshape_and_cache(key, value, *got, slots[:tokens], kind, 0.02, 0.3)
    reference.reshape_and_cache(key, value, *wanted, slots[:tokens], kind, np.float32(0.02), np.float32(0.3))
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["NHD", "packed"])
@pytest.mark.parametrize("where", ["number", "host", "with the arrays"])
def test_scales(array: Library, name: str, where: str) -> None:
    s = Sizes(heads=5)
    per_head = np.exp2(np.linspace(-3, 4, 5)).astype(np.float32) * np.float32(1.1)
    for k_scale, v_scale in ((np.float32(0.3), np.float32(7)), (per_head, per_head[::-1].copy())):
        if where == "number" and np.ndim(k_scale):
            continue
        as_scale = {"number": float, "host": np.atleast_1d, "with the arrays": lambda x: array.input(np.atleast_1d(x))}
        check(array, name, s, kind="fp8", k_scale=k_scale, v_scale=v_scale, as_scale=as_scale[where])


def test_caches_as_bytes(array: Library) -> None:
    check(array, "NHD", Sizes(), kind="fp8_e5m2", as_bytes=True)
    check(array, "packed", Sizes(), kind="fp8", as_bytes=True)
    check(array, "packed", Sizes(), kind="int8", as_bytes=True)


@pytest.mark.parametrize("kind", ["fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 0.37, 1 / 3, 300.0, 1e-6, 1e-30, 3e38, 1e-44])
def test_every_rounding(array: Library, dtype: str, kind: str, scale: float) -> None:
    """All 16-bit floats; for float32 the neighbourhood of every boundary between two codes, scaled."""
    scale32 = np.float32(scale)
    if dtype == "float32":
        codes = np.arange(256, dtype=np.uint8).view(reference.CODES[kind]).astype(np.float32)
        codes = np.sort(codes[np.isfinite(codes)])
        with np.errstate(over="ignore"):
            middle = (codes[1:] + codes[:-1]) / 2 * scale32
        around = np.arange(-8, 9, dtype=np.int32)
        x = (middle.view(np.int32)[:, None] + around).view(np.float32).reshape(-1)
        x = np.concatenate([x, np.resize(x, -x.size % 1024)])
    else:
        x = np.arange(65536, dtype=np.uint16).view(DTYPES[dtype])
    key = x.reshape(-1, 8, 128)
    slots = np.arange(len(key))
    cache = np.zeros((len(key) // 8 + 1, 8, 8, 128), np.uint8)
    expected = [cache.copy(), cache.copy()]
    reference.reshape_and_cache_flash(key, key[::-1], *expected, slots, kind, scale32, scale32)
    actual = [array.output(cache), array.output(cache)]
    pykv.reshape_and_cache_flash(
        array.input(key),
        array.input(key[::-1].copy()),
        *actual,
        array.input(slots),
        kind,
        float(scale32),
        float(scale32),
    )
    for got, wanted in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(array.numpy(got), wanted)


@pytest.mark.parametrize("name", ["NHD", "packed"])
def test_no_tokens(array: Library, name: str) -> None:
    check(array, name, Sizes(), slots=np.zeros(0, np.int64), extra_rows=0)
    check(array, name, Sizes(), slots=np.zeros(0, np.int64), extra_rows=3)
    check(array, name, Sizes(heads=0), num_tokens=4)


@pytest.mark.parametrize("name", ["NHD", "packed"])
def test_padding_alone(array: Library, name: str) -> None:
    check(array, name, Sizes(), slots=np.full(40, -1))


def test_one_of_two_tokens_wins(array: Library) -> None:
    """Tokens that share a slot: each head and dimension comes from one of them, whole vectors at least."""
    key = np.repeat(np.arange(64, dtype=np.float32), 2 * 16).reshape(64, 2, 16)
    cache = array.output(np.full((1, 4, 2, 16), -1, np.float32))
    slots = np.zeros(64, np.int64)
    pykv.reshape_and_cache_flash(
        array.input(key), array.input(key), cache, array.output(array.numpy(cache).copy()), array.input(slots)
    )
    got = array.numpy(cache)
    assert np.isin(got[0, 0], np.arange(64)).all()
    assert (got[0, 1:] == -1).all()


slots_of_any_kind = st.one_of(
    st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1), st.sampled_from([31, 32, 2**31, 2**32, 2**62, -(2**63)])
)


@pytest.mark.parametrize("name", ["NHD", "HND, blocks of K and V in turn", "packed"])
@given(data=st.data())
@settings(max_examples=25)
def test_slots_beyond_the_cache(array: Library, name: str, data: st.DataObject) -> None:
    """Nothing outside the cache is touched, all other tokens are written, and the offence is reported."""
    s = Sizes(blocks=4, block_size=8, heads=2, head_size=16)
    drawn = data.draw(st.lists(slots_of_any_kind, min_size=1, max_size=40, unique=True))
    slots = np.array(drawn, np.int64)
    call, caches = prepare(array, name, s, slots=slots)
    if (slots < s.slots).all():
        call()
    else:
        op = "reshape_and_cache" if name == "packed" else "reshape_and_cache_flash"
        with array.reports(rf"^{op}: slot_mapping: \d+ is out of range \[0, 32\); it was not used$"):
            call()
    caches.assert_same()


def test_the_report_names_the_slot(array: Library) -> None:
    s = Sizes(blocks=2)
    call, caches = prepare(array, "NHD", s, slots=np.array([3, 32, -1, 4]))
    with array.reports(r"^reshape_and_cache_flash: slot_mapping: 32 is out of range \[0, 32\); it was not used$"):
        call()
    caches.assert_same()


@given(data=st.data())
@settings(max_examples=150)
def test_anything(array: Library, data: st.DataObject) -> None:
    draw = data.draw
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(sorted(DTYPES)))
    name = draw(st.sampled_from(FLASH + PACKED))
    x = 16 // (DTYPES[dtype].itemsize if kind == "auto" else 1)
    one_size = "halves" in name or "in turn" in name
    head_size = draw(st.integers(1, 8)) * x if name in PACKED else draw(st.integers(1, 140))
    s = Sizes(
        blocks=draw(st.integers(1, 8)),
        block_size=draw(st.integers(1, 40)),
        heads=draw(st.integers(1, 9)),
        head_size=head_size,
        v_head_size=None if one_size else draw(st.none() | st.integers(1, 140)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(0, s.slots))
    slots = inputs.slot_mapping(rng, draw(st.sampled_from(SLOTS)), n, s, draw(st.sampled_from([np.int32, np.int64])))
    arrangement = draw(st.sampled_from(TOKENS))
    scale = draw(st.floats(2**-10, 2**10, width=32))
    check(
        array, name, s, dtype=dtype, kind=kind, slots=slots, arrangement=arrangement,
        k_scale=np.float32(scale), v_scale=np.float32(1 / scale), extra_rows=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 2**32)),
    )  # fmt: skip


def flash_arguments(**changed: Any) -> dict[str, Any]:
    half = np.zeros((4, 2, 16), np.float16)
    cache = np.zeros((3, 8, 2, 16), np.float16)
    given = {
        "key": half,
        "value": half,
        "key_cache": cache,
        "value_cache": cache,
        "slot_mapping": np.zeros(4, np.int64),
    }
    return {**given, **changed}


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"key": zeros(4, 2)}, ValueError, r"key: must have 3 dimensions, got shape \[4, 2\]"),
        ({"key": zeros(4, 2, 16, dtype=np.int32)}, TypeError, "key: dtype must be float32 or .* got int32"),
        ({"key": None}, TypeError, "key: an array is required"),
        ({"value": zeros(4, 3, 16)}, ValueError, r"value: dimension 1 must equal num_kv_heads = 2, got"),
        ({"value": zeros(4, 2, 16, dtype=np.float32)}, TypeError, "value: dtype must be that of key, float16, got"),
        ({"value": zeros(3, 2, 16)}, ValueError, r"value: must have a row for each of the 4 slots .* \[3, 2, 16\]"),
        ({"slot_mapping": np.zeros(5, np.int64)}, ValueError, r"key: must have a row for each of the 5 slots"),
        ({"slot_mapping": np.zeros(4, np.float32)}, TypeError, "slot_mapping: dtype must be int64 or int32, got"),
        ({"slot_mapping": np.zeros((4, 1), np.int64)}, ValueError, "slot_mapping: must have 1 dimension"),
        ({"key_cache": zeros(3, 8, 2, 24)}, ValueError, "key_cache: dimension 3 must equal head_size = 16"),
        ({"value_cache": zeros(3, 9, 2, 16)}, ValueError, "value_cache: dimension 1 must equal block_size = 8"),
        ({"value_cache": zeros(4, 8, 2, 16)}, ValueError, "value_cache: dimension 0 must equal num_blocks = 3"),
        ({"key_cache": zeros(3, 8, 2, 16, dtype=np.float32)}, TypeError, "key_cache: dtype must be that of the data"),
        ({"key_cache": np.broadcast_to(zeros(1, 8, 2, 16), (3, 8, 2, 16))}, (ValueError, TypeError), "key_cache: "),
        ({"kv_cache_dtype": "fp8"}, TypeError, "key_cache: dtype must be float8_e4m3fn or uint8 for"),
        ({"kv_cache_dtype": "int8"}, TypeError, "key_cache: dtype must be int8 or uint8 for kv_cache_dtype 'int8'"),
        ({"kv_cache_dtype": "int4"}, ValueError, "kv_cache_dtype: must be one of 'auto', .* got 'int4'"),
        ({"kv_cache_dtype": "bfloat16"}, TypeError, "kv_cache_dtype: 'bfloat16' needs data of that dtype, got float16"),
    ],
)  # fmt: skip
def test_errors(changed: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=f"^reshape_and_cache_flash: {message}"):
        pykv.reshape_and_cache_flash(**flash_arguments(**changed))


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        (
            {"k_scale": np.ones(3, np.float32)},
            ValueError,
            r"k_scale: must have 1 element, or one for each of the 2 heads",
        ),
        ({"v_scale": np.ones(1, np.float64)}, TypeError, "v_scale: "),
        (
            {"value_cache": zeros(3, 8, 2, 16, dtype=E5M2)},
            TypeError,
            "value_cache: dtype must be float8_e4m3fn or uint8",
        ),
    ],
)
def test_errors_of_fp8_caches(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    cache = zeros(3, 8, 2, 16, dtype=E4M3)
    arguments = flash_arguments(key_cache=cache, value_cache=cache, kv_cache_dtype="fp8", **{})
    with pytest.raises(error, match=f"^reshape_and_cache_flash: {message}"):
        pykv.reshape_and_cache_flash(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("key_cache", "value_cache", "message"),
    [
        (
            zeros(3, 2, 4, 8, 4),
            zeros(3, 2, 16, 8),
            r"key_cache: must have shape .* with x = 16 bytes = 8 elements, got",
        ),
        (zeros(3, 2, 3, 8, 8), zeros(3, 2, 16, 8), "key_cache: must have shape"),
        (zeros(3, 8, 2, 16), zeros(3, 2, 16, 8), "key_cache: must have 5 dimensions"),
        (zeros(3, 2, 2, 8, 8), zeros(3, 8, 2, 16), "value_cache: dimension 1 must equal num_kv_heads = 2"),
        (zeros(3, 2, 2, 8, 16)[..., ::2], zeros(3, 2, 16, 8), "key_cache: the last dimension must be contiguous"),
    ],
)
def test_errors_of_packed_caches(key_cache: np.ndarray, value_cache: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=f"^reshape_and_cache: {message}"):
        pykv.reshape_and_cache(**flash_arguments(key_cache=key_cache, value_cache=value_cache))


def test_nothing_is_written_by_a_call_that_fails() -> None:
    cache = np.zeros((3, 8, 2, 16), np.float16)
    key = np.ones((4, 2, 16), np.float16)
    with pytest.raises(ValueError, match="value_cache"):
        pykv.reshape_and_cache_flash(key, key, cache, cache[:, :, :1], np.arange(4))
    assert not cache.any()
