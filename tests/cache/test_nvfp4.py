"""nvfp4 caches: written by reshape_and_cache_flash and concat_and_cache_mla, read by gather_and_maybe_dequant_cache."""

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
TABLE = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def stored_sizes(s: Sizes) -> Sizes:
    return replace(s, head_size=s.head_size * 9 // 16, v_head_size=s.v_size * 9 // 16)


def blocks_of_floats(rng: np.random.Generator, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Blocks of every magnitude, some of zeros, some with infinities and NaN, many elements on or near a tie."""
    blocks = (int(np.prod(shape)) // 16, 16)
    size = np.exp2(np.round(rng.uniform(-16, 12, blocks[0])))[:, None]
    x = rng.standard_normal(blocks) * size
    exact = rng.choice(np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, 0, -0.25, -5]), blocks) * size
    kind = rng.random((blocks[0], 1))
    x = np.where(kind < 0.3, exact, x)
    x = np.where(kind > 0.97, 0.0, x)
    special = rng.choice(np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan]), blocks)
    x = np.where((kind > 0.9) & (kind < 0.94) & (rng.random(blocks) < 0.2), special, x)
    x = np.where((kind > 0.94) & (kind < 0.95), np.nan, x)
    with np.errstate(all="ignore"):
        return x.astype(dtype).reshape(shape)


def tokens(
    rng: np.random.Generator, dtype: np.dtype[Any], rows: int, heads: int, size: int, arrangement: str
) -> np.ndarray:
    def make(shape: tuple[int, ...]) -> np.ndarray:
        total = int(np.prod(shape))
        return blocks_of_floats(rng, (-(-total // 16) * 16,), dtype)[:total].reshape(shape)

    return inputs.tokens(make, rows, heads, size, arrangement)


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
    key = tokens(rng, DTYPES[dtype], rows, s.heads, s.head_size, arrangement)
    value = tokens(rng, DTYPES[dtype], rows, s.heads, s.v_size, arrangement)
    for cache, data, scale in zip(pair.in_numpy(), (key, value), (k_scale, v_scale), strict=True):
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < s.slots:
                reference_nvfp4.store(cache, slot, data[token], scale)
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


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (512, 0), (0, 512), (504, 72)])
def test_many_latents(array: Library, latent: int, rope: int) -> None:
    check_mla(array, latent, rope, blocks=8, slots=np.random.default_rng(0).permutation(128))


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


def write_one_block(array: Library, rows: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Codes ``[rows, 16]`` and scales ``[rows]`` of blocks of 16, of keys of 64."""
    n = len(rows)
    padded = np.zeros((n, 1, 64), rows.dtype)
    padded[:, 0, :16] = rows
    blocks = -(-n // 4)
    caches = [array.output(np.full((blocks, 4, 1, 36), 0xEE, np.uint8)) for _ in range(2)]
    given = array.input(padded)
    pykv.reshape_and_cache_flash(given, given, *caches, array.input(np.arange(n)), "nvfp4", scale, scale)
    pages = array.numpy(caches[0]).reshape(blocks, -1)
    codes = pages[:, :128].reshape(blocks * 4, 32)[:n, :8]
    scales = pages[:, 128:].reshape(blocks, 4, 4)[:, 0].reshape(-1)[:n]  # scale 0 of token t: row 0, column t
    return np.stack([codes & 15, codes >> 4], -1).reshape(n, 16), scales


def block(*elements: float, dtype: str = "float32") -> np.ndarray:
    return np.array([*elements, *[0.0] * (16 - len(elements))], np.float32).astype(DTYPES[dtype])[None]


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_even_code(array: Library, dtype: str) -> None:
    x = block(
        6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, -0.25, -0.75, -5, -0.0, 0.26, 0.74, 5.03125, 2.484375, dtype=dtype
    )
    codes, scales = write_one_block(array, x, 1.0)
    assert scales[0] == 0x38  # 1
    assert codes[0].tolist() == [7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 14, 8, 1, 1, 7, 4]


def test_block_scales_are_rounded_to_even(array: Library) -> None:
    # 6 * (1 + 1/16): between 1 and 1.125; 6 * (1 + 3/16): between 1.125 and 1.25
    ties = np.concatenate([block(6 * 17 / 16), block(6 * 19 / 16), block(-6 * 19 / 16)])
    assert write_one_block(array, ties, 1.0)[1].tolist() == [0x38, 0x3A, 0x3A]


def test_small_and_large_blocks(array: Library) -> None:
    tiny = np.float32(6 * 2.0**-10)  # a tie between 0 and the least scale
    rows = np.concatenate([block(tiny, -tiny), block(np.nextafter(tiny, np.float32(1))), block(2688), block(1e30, -1)])
    codes, scales = write_one_block(array, rows, 1.0)
    assert scales.tolist() == [0, 1, 0x7E, 0x7E]
    assert codes[:, :2].tolist() == [[0, 8], [5, 0], [7, 0], [7, 8]]


def test_blocks_of_what_is_no_number(array: Library) -> None:
    nan, inf = float("nan"), float("inf")
    rows = [block(*[nan] * 16), block(0, -0.0), block(nan, 6, -3), block(inf, -inf, 448 * 3, nan), block(-inf)]
    codes, scales = write_one_block(array, np.concatenate(rows), 1.0)
    assert scales.tolist() == [0, 0, 0x38, 0x7E, 0x7E]
    assert (codes[0] & 7 == 0).all()
    assert codes[1:, :4].tolist() == [[0, 8, 0, 0], [0, 7, 13, 0], [7, 15, 5, 0], [15, 0, 0, 0]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("scale", [1.0, 0.37, 3e-4])
def test_every_largest_element(array: Library, dtype: str, scale: float) -> None:
    """All 16-bit floats as the largest of a block, beside random ones."""
    rng = np.random.default_rng(0)
    most = np.arange(65536, dtype=np.uint16).view(DTYPES[dtype]).astype(np.float32)
    with np.errstate(all="ignore"):
        x = (most[:, None] * rng.uniform(-1, 1, (65536, 16))).astype(DTYPES[dtype])
        x[:, 5] = most.astype(DTYPES[dtype])
    codes, scales = write_one_block(array, x, float(np.float32(scale)))
    wanted_codes, wanted_scales = reference_nvfp4.quantise(x, np.float32(scale))
    np.testing.assert_array_equal(codes, np.stack([wanted_codes & 15, wanted_codes >> 4], -1).reshape(65536, 16))
    np.testing.assert_array_equal(scales, wanted_scales[:, 0])


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
        with array.reports(r"^reshape_and_cache_flash: slot_mapping: \d+ is out of range \[0, 32\); it was skipped$"):
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


# --- MLA ----------------------------------------------------------------------------------------

MLA_LAYOUTS: dict[str, tuple[Callable[[int, int, int], tuple[int, ...]], Callable[[Any], Any]]] = {
    "compact": (lambda nb, bs, w: (nb, bs, w), lambda m: m[1:-1]),
    "one of two layers": (lambda nb, bs, w: (nb, 2, bs, w), lambda m: m[1:-1, 1]),
    "not aligned": (lambda nb, bs, w: (nb, bs * w + 3), lambda m: m[1:-1, 3:]),
}


def check_mla(
    array: Library,
    latent: int = 512,
    rope: int = 64,
    *,
    layout: str = "compact",
    arrangement: str = "compact",
    dtype: str = "bfloat16",
    scale: np.float32 = np.float32(0.37),  # noqa: B008
    slots: np.ndarray | None = None,
    blocks: int = 5,
    block_size: int = 16,
    seed: int = 0,
) -> None:
    rng = np.random.default_rng(seed)
    width = (latent + rope) * 9 // 16
    shape, take = MLA_LAYOUTS[layout]
    expected = rng.integers(0, 256, shape(blocks + 2, block_size, width), np.uint8)
    actual = array.output(expected)

    def cache_of(memory: Any) -> Any:
        return take(memory).reshape(blocks, block_size, width) if layout == "not aligned" else take(memory)

    if slots is None:
        slots = inputs.slot_mapping(rng, "sequences", 33, Sizes(blocks, block_size))
    rows = len(slots) + 2
    whole = tokens(rng, DTYPES[dtype], rows, 1, latent + rope, "compact")[:, 0]
    c, pe = whole[:, :latent], whole[:, latent:]
    if arrangement == "compact":
        c, pe = c.copy(), pe.copy()
    elif arrangement == "elements apart":
        c, pe = (np.repeat(x, 2, axis=1)[:, ::2] for x in (c, pe))
    cache = cache_of(expected)
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < blocks * block_size:
            reference_nvfp4.store(cache[:, :, None], slot, whole[token][None], scale)
    pykv.concat_and_cache_mla(
        array.input(c), array.input(pe), inputs.view(actual, cache_of), array.input(slots), "nvfp4", float(scale)
    )
    np.testing.assert_array_equal(array.numpy(actual), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", MLA_LAYOUTS)
@pytest.mark.parametrize("arrangement", ["compact", "parts of one", "elements apart"])
def test_mla(array: Library, arrangement: str, layout: str, dtype: str) -> None:
    check_mla(array, layout=layout, arrangement=arrangement, dtype=dtype)


@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (256, 64), (128, 0), (0, 64), (60, 4), (57, 71), (1000, 24)])
def test_mla_sizes(array: Library, latent: int, rope: int) -> None:
    """Blocks may hold elements of both parts."""
    for dtype in DTYPES:
        check_mla(array, latent, rope, dtype=dtype)


@pytest.mark.parametrize("slots", SLOTS)
def test_mla_slot_mappings(array: Library, slots: str) -> None:
    for n in (0, 1, 4, 31, 80):
        s = Sizes(blocks=5)
        check_mla(array, slots=inputs.slot_mapping(np.random.default_rng(n), slots, n, s), blocks=5)


# --- reading ------------------------------------------------------------------------------------


def gather(
    array: Library,
    cache: np.ndarray,
    *,
    dtype: str = "bfloat16",
    scale: np.float32 = np.float32(0.37),  # noqa: B008
    take: Callable[[Any], Any] = lambda m: m,
    take_dst: Callable[[Any], Any] = lambda m: m,
    memory_dst: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape,
    seed: int = 0,
) -> None:
    """Two requests, the second from within a block, against what the reference reads."""
    rng = np.random.default_rng(seed)
    src = take(cache)
    blocks, block_size = src.shape[:2]
    values = reference_nvfp4.load(src if src.ndim == 4 else src[:, :, None], scale)
    values = values if src.ndim == 4 else values[:, :, 0]
    lengths, starts = np.array([2 * block_size + 3, block_size]), np.array([0, 3])
    table = rng.integers(0, blocks, (2, 4))
    rows = int(lengths.sum())
    expected = inputs.bits(rng, memory_dst((rows + 2, *values.shape[2:])), DTYPES[dtype])
    actual = array.output(expected)
    into = take_dst(expected)
    row = 0
    for r in range(2):
        for position in range(starts[r], starts[r] + lengths[r]):
            column, offset = divmod(int(position), block_size)
            with np.errstate(all="ignore"):
                into[row] = values[table[r, column], offset].astype(DTYPES[dtype])
            row += 1
    ids = [array.input(x.astype(np.int32)) for x in (table, np.concatenate([[0], np.cumsum(lengths)]), starts)]
    pykv.gather_and_maybe_dequant_cache(
        inputs.view(array.output(cache), take), inputs.view(actual, take_dst), ids[0], ids[1], None, rows, "nvfp4",
        float(scale), ids[2],
    )  # fmt: skip
    got = array.numpy(actual)
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    words = {2: np.uint16, 4: np.uint32}[got.itemsize]
    np.testing.assert_array_equal(got[~nan].view(words), expected[~nan].view(words))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_size", [64, 128, 192, 576])
def test_gather(array: Library, head_size: int, dtype: str) -> None:
    rng = np.random.default_rng(head_size)
    row = head_size * 9 // 16
    gather(array, rng.integers(0, 256, (5, 8, row), np.uint8), dtype=dtype)
    gather(array, rng.integers(0, 256, (5, 8, 3, row), np.uint8), dtype=dtype)
    gather(array, rng.integers(0, 256, (5, 3, 8, row), np.uint8), dtype=dtype, take=lambda m: m.swapaxes(1, 2))
    gather(array, rng.integers(0, 256, (5, 2, 8, 3, row), np.uint8), dtype=dtype, take=lambda m: m[:, 1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_strides(array: Library, dtype: str) -> None:
    cache = np.random.default_rng(1).integers(0, 256, (5, 8, 2, 72), np.uint8)
    gather(array, cache, dtype=dtype, memory_dst=lambda s: (s[1], s[0], s[2]), take_dst=lambda m: m.swapaxes(0, 1))
    gather(array, cache, dtype=dtype, memory_dst=lambda s: (*s[:2], s[2] + 1), take_dst=lambda m: m[..., 1:])
    gather(array, cache, dtype=dtype, memory_dst=lambda s: (*s, 2), take_dst=lambda m: m[..., 1])
    odd = np.random.default_rng(2).integers(0, 256, (5, 8 * 2 * 72 + 5), np.uint8)
    gather(array, odd, dtype=dtype, take=lambda m: m[:, 5:].reshape(5, 8, 2, 72))


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30, 3e38])
def test_gather_every_code(array: Library, scale: float) -> None:
    """All codes under all block scales."""
    page = np.zeros((256, 4, 36), np.uint8)
    page.reshape(256, -1)[:, :128] = np.tile(np.arange(128, dtype=np.uint8) * 2 + 1, (256, 1))
    page.reshape(256, -1)[:, 128:] = np.arange(256, dtype=np.uint8)[:, None]
    for dtype in DTYPES:
        gather(array, page, dtype=dtype, scale=np.float32(scale))
    everything = array.output(np.zeros((1024, 64), np.float32))
    table, ends = np.arange(256, dtype=np.int32)[None], np.array([0, 1024], np.int32)
    pykv.gather_and_maybe_dequant_cache(
        array.output(page), everything, array.input(table), array.input(ends), None, 1024, "nvfp4",
        float(np.float32(scale)),
    )  # fmt: skip
    wanted = reference_nvfp4.load(page[:, :, None], np.float32(scale)).reshape(1024, 64)
    np.testing.assert_array_equal(array.numpy(everything), wanted)


def test_what_was_written_is_read(array: Library) -> None:
    """Within half a step of e2m1 between 4 and 6, and the rounding of the block scale."""
    rng = np.random.default_rng(0)
    dtype = DTYPES["bfloat16"]
    key, value = (rng.standard_normal((50, 4, 128)).astype(dtype) for _ in range(2))
    scale = float(np.float32(np.abs(key.astype(np.float32)).max() / (6 * 448)))
    caches = [array.output(np.zeros((4, 4, 16, 72), np.uint8)) for _ in range(2)]
    views = [inputs.view(c, lambda m: m.swapaxes(1, 2)) for c in caches]
    slots = np.arange(50) + 8
    pykv.reshape_and_cache_flash(
        array.input(key), array.input(value), *views, array.input(slots), "nvfp4", scale, scale
    )
    table, ends = array.input(np.arange(4, dtype=np.int32)[None]), array.input(np.array([0, 50], np.int32))
    for data, view in zip((key, value), views, strict=True):
        out = array.output(np.zeros((50, 4, 128), dtype))
        pykv.gather_and_maybe_dequant_cache(
            view, out, table, ends, None, 50, "nvfp4", scale, array.input(np.array([8], np.int32))
        )
        x, y = data.astype(np.float32).reshape(-1, 16), array.numpy(out).astype(np.float32).reshape(-1, 16)
        most = np.abs(x).max(-1, keepdims=True)
        assert (np.abs(x - y) <= most * (1 / 6 + 1 / 16)).all()
        assert np.abs(x - y).mean() < 0.1


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


def test_errors_of_mla_and_gather() -> None:
    c, pe = zeros(4, 512, dtype=np.float16), zeros(4, 64, dtype=np.float16)
    with pytest.raises(ValueError, match=r"kv_cache: dimension 2 must equal .* \* 9 / 16 = 324, got shape"):
        pykv.concat_and_cache_mla(c, pe, zeros(3, 8, 576), np.arange(4), "nvfp4")
    with pytest.raises(ValueError, match=r"kv_cache: nvfp4 needs a head size \(MLA: an entry\)"):
        pykv.concat_and_cache_mla(c, pe[:, :32], zeros(3, 8, 306), np.arange(4), "nvfp4")
    out, ids = zeros(4, 576, dtype=np.float16), [zeros(1, 2, dtype=np.int32), np.array([0, 4], np.int32)]
    for cache, message in (
        (zeros(3, 8, 576), r"dst: must have shape .* with 16 elements in 9 bytes, got \[4, 576\]"),
        (zeros(3, 6, 324), "src_cache: nvfp4 needs blocks of a multiple of 4 tokens"),
        (zeros(3, 8, 325)[:, :, 1:], "src_cache: nvfp4 needs blocks .* without gaps"),
    ):
        with pytest.raises(ValueError, match=f"^gather_and_maybe_dequant_cache: {message}"):
            pykv.gather_and_maybe_dequant_cache(cache, out, *ids, None, 4, "nvfp4", 1.0)
