"""The fused op against the two that it stands for, bit by bit: those have tests of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from cache import inputs, reference
from cache.inputs import DTYPES, FLASH, PACKED, SLOTS, Sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Library
from rotary import reference as rotary_reference
from rows import assert_rounded_once, padded, random

import pykv

KINDS = ["auto", "fp8_e4m3", "fp8_e5m2", "int8"]
MAX_POSITION = 64
ARRANGEMENTS = ["apart", "flat", "query flat", "padded", "parts of one", "flat parts of one"]


@dataclass
class Case:
    """One call, and memories for it."""

    array: Library
    layout: str = "NHD"
    s: Sizes = field(default_factory=Sizes)
    dtype: str = "bfloat16"
    angles: str = "float32"
    kind: str = "auto"
    is_neox: bool = True
    query_heads: int = 6
    rotary_dim: int = 64
    offset: int = 0
    rows: int = 37
    slots: np.ndarray | None = None  # None: for all rows but two
    positions: np.ndarray | None = None
    arrangement: str = "apart"
    k_scale: Any = 0.375
    v_scale: Any = 2.1
    as_scale: Callable[[Any], Any] = float
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        if self.slots is None:
            self.slots = inputs.slot_mapping(rng, "sequences", max(self.rows - 2, 0), self.s)
        if self.positions is None:
            self.positions = rng.integers(0, MAX_POSITION, self.rows)
        self.rows = len(self.positions)
        stored = DTYPES[self.dtype] if self.kind == "auto" else np.dtype(reference.CODES.get(self.kind, np.uint8))
        places = self.s
        if self.kind == "nvfp4":
            places = replace(places, head_size=places.head_size * 9 // 16, v_head_size=places.v_size * 9 // 16)
        where = inputs.layout(self.layout, places, stored.itemsize)
        shapes = [where.key_shape] if where.one_memory else [where.key_shape, where.value_shape]
        self.where = where
        self.memories = [inputs.bits(rng, shape, stored) for shape in shapes]
        self.cos_sin = random((MAX_POSITION, self.rotary_dim), DTYPES[self.angles], self.seed)
        s, n = self.s, self.rows
        self.shapes = [(n, self.query_heads, s.head_size), (n, s.heads, s.head_size), (n, s.heads, s.v_size)]
        self.values = [random(shape, DTYPES[self.dtype], i + self.seed) for i, shape in enumerate(self.shapes)]

    def tokens(self) -> tuple[list[Any], list[Any]]:
        """query, key and value; and the arrays that hold them."""
        flat = [v.reshape(self.rows, shape[1] * shape[2]) for v, shape in zip(self.values, self.shapes, strict=True)]
        if "parts of one" in self.arrangement:
            buffer = self.array.output(np.concatenate(flat, axis=1))
            parts, first = [], 0
            for shape, rows in zip(self.shapes, flat, strict=True):
                columns, new = slice(first, first + rows.shape[1]), rows.shape if "flat" in self.arrangement else shape
                parts.append(inputs.view(buffer, lambda m, columns=columns, new=new: m[:, columns].reshape(new)))
                first = columns.stop
            return parts, [buffer]
        query, key, value = self.values
        match self.arrangement:
            case "flat":
                query, key, value = flat
            case "query flat":
                query = flat[0]
            case "padded":
                query, key, value = padded(query, 1, 16), padded(key, 2, 0), padded(value, 1, 3)
        made = [self.array.output(x) for x in (query, key, value)]
        return made, made

    def prepare(self) -> tuple[list[Any], list[Any], Callable[[], list[np.ndarray]]]:
        """Arguments: tokens; positions, angles, caches and slots; and all memory that a call could have changed."""
        array = self.array
        caches = [array.output(m) for m in self.memories]
        views = [inputs.view(caches[0], self.where.key), inputs.view(caches[-1], self.where.value)]
        tokens, owners = self.tokens()
        positions, cos_sin, slots = (array.input(x) for x in (self.positions, self.cos_sin, self.slots))
        return tokens, [positions, cos_sin, *views, slots], lambda: [array.numpy(x) for x in (*owners, *caches)]

    def scales(self) -> tuple[Any, Any]:
        return self.as_scale(self.k_scale), self.as_scale(self.v_scale)

    def separately(self, reports: bool) -> list[np.ndarray]:
        (query, key, value), (positions, cos_sin, *views, slots), memory = self.prepare()
        op = pykv.reshape_and_cache if self.where.packed else pykv.reshape_and_cache_flash
        reported = suppress(ValueError) if reports else nullcontext()
        with reported:
            pykv.rotary_embedding(positions, query, key, self.s.head_size, cos_sin, self.is_neox, self.offset)
        if "flat" in self.arrangement:
            key, value = (
                inputs.view(x, lambda m, shape=shape: m.reshape(shape))
                for x, shape in zip((key, value), self.shapes[1:], strict=True)
            )
        with reported:
            op(key, value, *views, slots, self.kind, *self.scales())
            pykv.check_errors()
        return memory()

    def check(self, report: str | None = None) -> None:
        expected = self.separately(report is not None)
        (query, key, value), (positions, cos_sin, *views, slots), memory = self.prepare()
        with self.array.reports(report) if report else nullcontext():
            pykv.rotary_and_cache(
                positions,
                query,
                key,
                value,
                cos_sin,
                self.is_neox,
                *views,
                slots,
                self.kind,
                *self.scales(),
                self.offset,
            )
        for got, wanted in zip(memory(), expected, strict=True):
            np.testing.assert_array_equal(got.reshape(-1).view(np.uint8), wanted.reshape(-1).view(np.uint8))


styles = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])


@styles
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_numpy(array: Library, dtype: str, kind: str, is_neox: bool) -> None:
    """Heads within a rounding of the truth, the cache exactly what the key became."""
    case = Case(array, dtype=dtype, kind=kind, is_neox=is_neox, rotary_dim=32, offset=16)
    tokens, (positions, cos_sin, *views, slots), memory = case.prepare()
    query, key, value = tokens
    pykv.rotary_and_cache(
        positions, query, key, value, cos_sin, is_neox, *views, slots, kind, *case.scales(), case.offset
    )
    rotated_query, rotated_key, same_value, *caches = memory()
    for got, given_heads in ((rotated_query, case.values[0]), (rotated_key, case.values[1])):
        wanted = rotary_reference.rotary_embedding(case.positions, given_heads, case.cos_sin, is_neox, case.offset)
        assert_rounded_once(got, wanted, atol=2e-6)
    np.testing.assert_array_equal(same_value, case.values[2])
    expected = [m.copy() for m in case.memories]
    views = [case.where.key(expected[0]), case.where.value(expected[-1])]
    reference.reshape_and_cache_flash(
        rotated_key, same_value, *views, case.slots, kind, case.k_scale, case.v_scale
    )  # fmt: skip
    for got, wanted in zip(caches, expected, strict=True):
        np.testing.assert_array_equal(got.reshape(-1).view(np.uint8), wanted.reshape(-1).view(np.uint8))


@styles
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", FLASH + PACKED)
def test_layouts(array: Library, layout: str, kind: str, is_neox: bool) -> None:
    for dtype in DTYPES:
        Case(array, layout, dtype=dtype, kind=kind, is_neox=is_neox).check()


# head_size, rotary_dim, offset
@styles
@pytest.mark.parametrize(
    "dims",
    [(64, 32, 0), (64, 32, 16), (64, 16, 48), (128, 128, 0), (80, 80, 0), (80, 32, 0), (96, 64, 8), (192, 64, 128),
     (120, 120, 0), (66, 64, 1), (40, 20, 3), (10, 6, 1), (3, 2, 0), (64, 0, 0), (64, 0, 16), (256, 256, 0),
     (640, 600, 20)],
)  # fmt: skip
def test_dimensions(array: Library, dims: tuple[int, int, int], is_neox: bool) -> None:
    head_size, rotary_dim, offset = dims
    for dtype in DTYPES:
        for kind in ("auto", "fp8_e4m3"):
            case = Case(
                array, s=Sizes(head_size=head_size), dtype=dtype, kind=kind, is_neox=is_neox, rotary_dim=rotary_dim,
                offset=offset,
            )  # fmt: skip
            case.check()


@styles
@pytest.mark.parametrize("layout", ["NHD", "HND", "HND, blocks of K and V in turn", "pages not aligned"])
def test_nvfp4(array: Library, layout: str, is_neox: bool) -> None:
    s = Sizes(head_size=128)
    for dtype in DTYPES:
        Case(array, layout, s=s, dtype=dtype, kind="nvfp4", is_neox=is_neox, k_scale=0.01).check()
        Case(array, layout, s=s, dtype=dtype, kind="nvfp4", is_neox=is_neox, arrangement="flat", offset=16).check()


@styles
@pytest.mark.parametrize("kind", ["auto", "fp8_e5m2"])
@pytest.mark.parametrize(("head_size", "rotary_dim", "offset"), [(64, 32, 8), (80, 32, 0), (96, 96, 0), (16, 6, 2)])
def test_dimensions_packed(
    array: Library, head_size: int, rotary_dim: int, offset: int, kind: str, is_neox: bool
) -> None:
    s = Sizes(head_size=head_size, v_head_size=48)
    for dtype in DTYPES:
        Case(
            array, "packed", s=s, dtype=dtype, kind=kind, is_neox=is_neox, rotary_dim=rotary_dim, offset=offset
        ).check()


@styles
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_arrangements_of_the_tokens(array: Library, layout: str, arrangement: str, is_neox: bool) -> None:
    for dtype in DTYPES:
        Case(array, layout, dtype=dtype, is_neox=is_neox, arrangement=arrangement).check()
        Case(array, layout, dtype=dtype, is_neox=is_neox, arrangement=arrangement, kind="fp8", rotary_dim=32).check()


@pytest.mark.parametrize("angles", DTYPES)
@styles
def test_the_angles_have_a_dtype_of_their_own(array: Library, angles: str, is_neox: bool) -> None:
    for dtype in DTYPES:
        Case(array, dtype=dtype, angles=angles, is_neox=is_neox).check()


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("layout", ["HND", "packed"])
def test_slot_mappings(array: Library, layout: str, ids: type, slots: str) -> None:
    s = Sizes(blocks=9)
    for rows in (1, 2, 31, 33, 70, 144):
        mapping = inputs.slot_mapping(np.random.default_rng(rows), slots, rows, s, ids)
        Case(array, layout, s=s, rows=rows, slots=mapping).check()


@pytest.mark.parametrize("heads", [(1, 1), (7, 1), (32, 8), (40, 40), (3, 5)])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_numbers_of_heads(array: Library, layout: str, heads: tuple[int, int]) -> None:
    query_heads, kv_heads = heads
    s = Sizes(heads=kv_heads, head_size=128, blocks=3)
    Case(array, layout, s=s, query_heads=query_heads, rotary_dim=128).check()
    Case(array, layout, s=s, query_heads=query_heads, rotary_dim=64, kind="fp8").check()


@styles
@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_many_tokens(array: Library, layout: str, kind: str, is_neox: bool) -> None:
    """More than CPU caches hold, and enough to fill a GPU."""
    s = Sizes(blocks=150, heads=8, head_size=128)
    Case(array, layout, s=s, kind=kind, is_neox=is_neox, query_heads=16, rotary_dim=128, rows=2345).check()


@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize("where", ["number", "host", "with the arrays"])
def test_scales(array: Library, layout: str, where: str) -> None:
    per_head = np.exp2(np.linspace(-3, 4, 3)).astype(np.float32) * np.float32(1.1)
    as_scale = {"number": float, "host": np.atleast_1d, "with the arrays": lambda x: array.input(np.atleast_1d(x))}
    k_scale, v_scale = (np.float32(0.3), np.float32(7)) if where == "number" else (per_head, per_head[::-1].copy())
    for kind in KINDS[1:]:
        Case(array, layout, kind=kind, k_scale=k_scale, v_scale=v_scale, as_scale=as_scale[where]).check()


@pytest.mark.parametrize("layout", ["NHD", "packed"])
def test_nothing_to_do(array: Library, layout: str) -> None:
    Case(array, layout, rows=0).check()
    Case(array, layout, slots=np.zeros(0, np.int64)).check()
    Case(array, layout, slots=np.full(37, -1)).check()
    Case(array, layout, s=Sizes(heads=0)).check()
    Case(array, layout, query_heads=0).check()


@pytest.mark.parametrize("layout", ["NHD", "packed"])
@pytest.mark.parametrize("bad", [-1, MAX_POSITION, 2**40, -(2**63)])
def test_a_position_outside_is_reported_and_its_token_cached_as_it_is(array: Library, layout: str, bad: int) -> None:
    positions = np.random.default_rng(0).integers(0, MAX_POSITION, 37)
    positions[11] = bad
    Case(array, layout, positions=positions).check(
        rf"^rotary_and_cache: positions: {bad} is out of range \[0, {MAX_POSITION}\); it was not used$"
    )


slots_of_any_kind = st.one_of(
    st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1), st.sampled_from([31, 32, 2**31, 2**32, 2**62, -(2**63)])
)


@pytest.mark.parametrize("layout", ["NHD", "HND, blocks of K and V in turn", "packed"])
@given(data=st.data())
@settings(max_examples=25)
def test_slots_beyond_the_cache(array: Library, layout: str, data: st.DataObject) -> None:
    slots = np.array(data.draw(st.lists(slots_of_any_kind, min_size=1, max_size=40, unique=True)), np.int64)
    s = Sizes(blocks=4, block_size=8, heads=2, head_size=16)
    report = r"^rotary_and_cache: slot_mapping: \d+ is out of range \[0, 32\); it was not used$"
    case = Case(array, layout, s=s, rotary_dim=16, rows=len(slots) + 1, slots=slots)
    case.check(report if (slots >= 32).any() else None)


@given(data=st.data())
@settings(max_examples=150)
def test_anything(array: Library, data: st.DataObject) -> None:
    draw = data.draw
    kind, dtype = draw(st.sampled_from(KINDS)), draw(st.sampled_from(sorted(DTYPES)))
    layout = draw(st.sampled_from(FLASH + PACKED))
    x = 16 // (DTYPES[dtype].itemsize if kind == "auto" else 1)
    one_size = "halves" in layout or "in turn" in layout
    head_size = draw(st.integers(1, 8)) * x if layout in PACKED else draw(st.integers(1, 140))
    multiple = draw(st.sampled_from([1, 8, 16]))
    half = draw(st.integers(0, head_size // 2)) // multiple * multiple
    offset = draw(st.integers(0, head_size - 2 * half)) // multiple * multiple
    s = Sizes(
        blocks=draw(st.integers(1, 8)),
        block_size=draw(st.integers(1, 40)),
        heads=draw(st.integers(1, 5)),
        head_size=head_size,
        v_head_size=None if one_size else draw(st.none() | st.integers(1, 140)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(0, s.slots))
    slots = inputs.slot_mapping(rng, draw(st.sampled_from(SLOTS)), n, s, draw(st.sampled_from([np.int32, np.int64])))
    rows = n + draw(st.integers(0, 3))
    Case(
        array, layout, s=s, dtype=dtype, angles=draw(st.sampled_from(sorted(DTYPES))), kind=kind,
        is_neox=draw(st.booleans()), query_heads=draw(st.integers(0, 7)), rotary_dim=2 * half, offset=offset, rows=rows,
        positions=rng.integers(0, MAX_POSITION, rows).astype(draw(st.sampled_from([np.int32, np.int64]))), slots=slots,
        arrangement=draw(st.sampled_from(ARRANGEMENTS)), seed=draw(st.integers(0, 2**31)),
    ).check()  # fmt: skip


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"positions": np.zeros((4, 1), np.int64)}, ValueError, "positions: must have 1 dimension"),
        ({"positions": zeros(4)}, TypeError, "positions: dtype must be int64 or int32, got float16"),
        ({"query": zeros(5, 4, 16)}, ValueError, "query: dimension 0 must be that of positions, 4, got"),
        ({"query": zeros(4, 4, 8)}, ValueError, "query: dimension 2 must equal head_size = 16, got"),
        ({"query": zeros(4, 33)}, ValueError, "query: the last dimension must be a multiple of head_size = 16, got"),
        ({"query": zeros(4, 4, 32)[..., ::2]}, ValueError, "query: the last dimension must be contiguous"),
        ({"query": zeros(4, 4, 16, dtype=np.int32)}, TypeError, "query: dtype must be float32 or .* got int32"),
        ({"key": zeros(4, 2, 32)[..., ::2]}, ValueError, "key: the last dimension must be contiguous"),
        ({"key": zeros(5, 2, 16)}, ValueError, "key: dimension 0 must be that of positions, 4, got"),
        ({"key": zeros(4, 33)}, ValueError, "key: the last dimension must be a multiple of head_size = 16, got"),
        ({"key": zeros(4, 48)}, ValueError, "value: dimension 1 must equal num_kv_heads = 3, got"),
        ({"key": zeros(4, 2, 16, dtype=np.float32)}, TypeError, "key: dtype must be that of query, float16, got"),
        ({"key": zeros(4)}, ValueError, "key: must have 2 to 3 dimensions"),
        ({"value": zeros(4, 33)}, ValueError, "value: the last dimension must be a multiple of head_size = 16, got"),
        ({"value": zeros(3, 2, 16)}, ValueError, "value: must have a row for each of the 4 slots"),
        ({"value": None}, TypeError, "value: an array is required"),
        ({"cos_sin_cache": zeros(8, 15)}, ValueError, "cos_sin_cache: the last dimension .* must be even"),
        ({"cos_sin_cache": zeros(8, 18)}, ValueError, "cos_sin_cache: rotary_dim 18 .* must not exceed head_size = 16"),
        ({"rope_dim_offset": 1}, ValueError, r"cos_sin_cache: rotary_dim 16 \+ rope_dim_offset 1 must not exceed"),
        ({"rope_dim_offset": -1}, ValueError, "rope_dim_offset: must not be negative, got -1"),
        ({"slot_mapping": np.zeros(5, np.int64)}, ValueError, "key: must have a row for each of the 5 slots"),
        ({"key_cache": zeros(3, 8, 2)}, ValueError, "key_cache: must have 4 to 5 dimensions"),
        ({"value_cache": zeros(3, 2, 2, 8, 8)}, ValueError, "value_cache: must have 4 dimensions"),
        ({"key_cache": zeros(3, 2, 2, 8, 8)}, ValueError, "value_cache: dimension 1 must equal num_kv_heads = 2"),
        ({"kv_cache_dtype": "fp8"}, TypeError, "key_cache: dtype must be float8_e4m3fn or uint8"),
        ({"kv_cache_dtype": "int4"}, ValueError, "kv_cache_dtype: must be one of 'auto', .* got 'int4'"),
    ],
)  # fmt: skip
def test_errors(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given_arguments = {
        "positions": np.zeros(4, np.int64),
        "query": zeros(4, 4, 16),
        "key": zeros(4, 2, 16),
        "value": zeros(4, 2, 16),
        "cos_sin_cache": zeros(8, 16),
        "is_neox": True,
        "key_cache": zeros(3, 8, 2, 16),
        "value_cache": zeros(3, 8, 2, 16),
        "slot_mapping": np.zeros(4, np.int64),
    }
    with pytest.raises(error, match=f"^rotary_and_cache: {message}"):
        pykv.rotary_and_cache(**{**given_arguments, **changed})


@pytest.mark.parametrize("same", [("query", "key"), ("query", "value"), ("key", "value")])
def test_query_key_and_value_are_three_arrays(same: tuple[str, str]) -> None:
    arrays = {name: zeros(4, 2, 16) for name in ("query", "key", "value")}
    arrays[same[1]] = arrays[same[0]]
    cache = zeros(3, 8, 2, 16)
    with pytest.raises(ValueError, match=f"^rotary_and_cache: {same[1]}: must not share memory with {same[0]}"):
        pykv.rotary_and_cache(
            np.zeros(4, np.int64), *arrays.values(), zeros(8, 16), True, cache, cache.copy(), np.zeros(4, np.int64)
        )
