from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cache import inputs, reference, reference_mla
from cache.inputs import DTYPES, SLOTS, Sizes
from cache.test_concat_and_cache_mla import KINDS, LAYOUTS, RECORDS, dtypes_of
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Library
from rotary import reference as rotary_reference
from rows import assert_rounded_once, padded, random

import pykv

MAX_POSITION = 64
ARRANGEMENTS = ["compact", "flat", "padded", "latent apart", "parts of one"]


def rotated_in_dtype(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, is_neox: bool) -> np.ndarray:
    """Heads ``[rows, heads, rope]`` in the arithmetic of their dtype: NumPy's own, rounded after every operation."""
    half = x.shape[-1] // 2
    first, second = (slice(0, half), slice(half, None)) if is_neox else (slice(0, None, 2), slice(1, None, 2))
    cos, sin = (a.astype(x.dtype)[:, None] for a in (cos, sin))
    result = np.empty_like(x)
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


@dataclass
class Case:
    array: Library
    latent: int = 128
    rope: int = 64
    heads: int = 5
    blocks: int = 6
    block_size: int = 16
    dtype: str = "bfloat16"
    angles: str = "float32"
    kind: str = "auto"
    is_neox: bool = True
    rows: int = 35
    slots: np.ndarray | None = None  # None: for all rows but two
    positions: np.ndarray | None = None
    layout: str = "compact"
    arrangement: str = "compact"
    scale: Any = 0.375
    as_scale: Callable[[Any], Any] = float
    rotate_in_fp32: bool = False
    rotate_padded: bool = False
    seed: int = 0

    def check(self, report: str | None = None) -> None:
        array, rng = self.array, np.random.default_rng(self.seed)
        source = DTYPES[self.dtype]
        if self.slots is None:
            sizes = Sizes(self.blocks, self.block_size)
            self.slots = inputs.slot_mapping(rng, "sequences", max(self.rows - 2, 0), sizes)
        if self.positions is None:
            self.positions = rng.integers(0, MAX_POSITION, self.rows)
        n, rope = len(self.positions), self.rope
        stored = source if self.kind == "auto" else np.dtype(reference.CODES.get(self.kind, np.uint8))
        records = self.kind in RECORDS
        width = reference_mla.record_bytes(self.latent, rope, self.kind) if records else self.latent + rope
        shape, take = LAYOUTS[self.layout]
        expected = inputs.bits(rng, shape(self.blocks + 2, self.block_size, width), stored)
        actual = array.output(expected)
        cos_sin = random((MAX_POSITION, rope), DTYPES[self.angles], self.seed)
        q_pe = random((n, self.heads, rope), source, self.seed + 1)
        k_pe, kv_c = random((n, rope), source, self.seed + 2), random((n, self.latent), source, self.seed + 3)

        given_q, given_k, given_c = q_pe, k_pe, kv_c
        match self.arrangement:
            case "flat":
                given_q = q_pe.reshape(n, self.heads * rope)
            case "padded":
                given_q, given_k, given_c = padded(q_pe, 1, 8), padded(k_pe, 16), padded(kv_c, 3)
            case "latent apart":
                given_c = np.repeat(kv_c, 2, axis=1)[:, ::2]
        if self.arrangement == "parts of one":
            owner = array.output(np.concatenate([kv_c, k_pe], axis=1))
            made_c = inputs.view(owner, lambda m: m[:, : self.latent])
            made_k = inputs.view(owner, lambda m: m[:, self.latent :])
        else:
            made_c, made_k = array.input(given_c), array.output(given_k)
        made_q = array.output(given_q)
        arguments = [array.input(self.positions), made_q, made_k, made_c, array.input(cos_sin), self.is_neox]
        arguments += [array.input(self.slots), inputs.view(actual, take), self.kind, self.as_scale(self.scale)]
        with array.reports(report) if report else nullcontext():
            pykv.concat_and_cache_mla_rope_fused(*arguments, self.rotate_in_fp32, self.rotate_padded)
        got_q = array.numpy(made_q).reshape(n, self.heads, rope)
        got_k = array.numpy(made_k).reshape(n, rope)

        cached = np.zeros(n, bool)
        cached[: len(self.slots)] = (self.slots >= 0) & (self.slots < self.blocks * self.block_size)
        turns = (cached | self.rotate_padded) & (self.positions >= 0) & (self.positions < MAX_POSITION)
        self.check_rotation(got_q, q_pe, cos_sin, turns)
        self.check_rotation(got_k[:, None], k_pe[:, None], cos_sin, turns)
        reference_mla.concat_and_cache_mla(kv_c, got_k, take(expected), self.slots, self.kind, np.float32(self.scale))
        got = array.numpy(actual)
        np.testing.assert_array_equal(got.reshape(-1).view(np.uint8), expected.reshape(-1).view(np.uint8))

    def check_rotation(self, got: np.ndarray, given: np.ndarray, cos_sin: np.ndarray, turns: np.ndarray) -> None:
        np.testing.assert_array_equal(got[~turns], given[~turns])
        positions, half = self.positions[turns], self.rope // 2
        if self.rotate_in_fp32 or got.dtype == np.float32:  # the arithmetic of float32 may be contracted
            wanted = rotary_reference.rotary_embedding(positions, given[turns], cos_sin, self.is_neox)
            assert_rounded_once(got[turns], wanted, atol=2e-6)
        else:
            cos, sin = cos_sin[positions, :half], cos_sin[positions, half:]
            wanted = rotated_in_dtype(given[turns], cos, sin, self.is_neox)
            np.testing.assert_array_equal(got[turns], wanted)


@pytest.mark.parametrize("least", [-140, -91, -88, 0])
@pytest.mark.parametrize("least_angle", [-40, -29, -27])
def test_small_elements_and_angles(least: int, least_angle: int) -> None:
    """On a CPU, where the quick way of bf16 has none for what subnormal numbers come of."""
    rng, rows, heads, rope = np.random.default_rng(-least), 40, 3, 64
    bf16 = DTYPES["bfloat16"]

    def some(shape: tuple[int, ...], least: int) -> np.ndarray:
        signs = rng.choice([-1.0, 0.0, 1.0], shape, p=[0.45, 0.1, 0.45])
        return np.ldexp(signs * rng.uniform(1, 2, shape), rng.integers(least, least + 4, shape)).astype(bf16)

    q, k, cos_sin = some((rows, heads, rope), least), some((rows, rope), least), some((rows, rope), least_angle)
    q[5, 1, 7], q[6, 2, 40], q[7, 0, 3] = np.nan, np.inf, 1.0
    positions, cache = np.arange(rows), np.zeros((1, rows, rope), bf16)
    cos, sin = cos_sin[:, : rope // 2], cos_sin[:, rope // 2 :]
    with np.errstate(invalid="ignore"):
        wanted = [rotated_in_dtype(x, cos, sin, True) for x in (q, k[:, None])]
    latent = np.zeros((rows, 0), bf16)
    pykv.concat_and_cache_mla_rope_fused(positions, q, k, latent, cos_sin, True, positions, cache, "auto", 1.0)
    for got, expected in [(q, wanted[0]), (k, wanted[1][:, 0]), (cache[0], k)]:
        np.testing.assert_array_equal(got.astype(np.float32), expected.astype(np.float32))


styles = pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])


@styles
@pytest.mark.parametrize("rotate_in_fp32", [False, True])
@pytest.mark.parametrize(("kind", "dtype"), [(k, d) for k in KINDS for d in dtypes_of(k)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(array: Library, layout: str, kind: str, dtype: str, rotate_in_fp32: bool, is_neox: bool) -> None:
    if kind in RECORDS and layout == "elements apart":
        pytest.skip("a record is bytes side by side")
    Case(array, layout=layout, kind=kind, dtype=dtype, rotate_in_fp32=rotate_in_fp32, is_neox=is_neox).check()


@styles
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_arrangements_of_the_inputs(array: Library, arrangement: str, kind: str, is_neox: bool) -> None:
    for dtype in dtypes_of(kind):
        Case(array, arrangement=arrangement, kind=kind, dtype=dtype, is_neox=is_neox).check()


@styles
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("latent", "rope"), [(512, 64), (256, 128), (128, 0), (0, 64), (384, 10), (640, 72)])
def test_sizes(array: Library, latent: int, rope: int, kind: str, is_neox: bool) -> None:
    if kind == "nvfp4_ds_mla":
        rope = -(-rope // 8) * 8
    for dtype in dtypes_of(kind):
        for heads in (1, 16):
            Case(array, latent=latent, rope=rope, kind=kind, dtype=dtype, heads=heads, is_neox=is_neox).check()


@pytest.mark.parametrize(("latent", "rope"), [(1, 2), (3, 2), (100, 8), (512, 62), (0, 2)])
def test_odd_sizes(array: Library, latent: int, rope: int) -> None:
    for kind in ("auto", "fp8_e4m3"):
        for dtype in DTYPES:
            Case(array, latent=latent, rope=rope, kind=kind, dtype=dtype).check()


@styles
@pytest.mark.parametrize("angles", DTYPES)
def test_the_angles_have_a_dtype_of_their_own(array: Library, angles: str, is_neox: bool) -> None:
    for dtype in DTYPES:
        Case(array, dtype=dtype, angles=angles, is_neox=is_neox).check()


@pytest.mark.parametrize("rotate_padded", [False, True])
@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("kind", ["auto", "fp8_ds_mla"])
def test_slot_mappings(array: Library, kind: str, ids: type, slots: str, rotate_padded: bool) -> None:
    for n in (1, 2, 5, 64, 144):
        for block_size in (1, 3, 64):
            s = Sizes(-(-n // block_size) + 1, block_size)
            mapping = inputs.slot_mapping(np.random.default_rng(n), slots, n, s, ids)
            positions = np.random.default_rng(n).integers(0, MAX_POSITION, n + 2).astype(ids)
            Case(
                array, kind=kind, slots=mapping, positions=positions, blocks=s.blocks, block_size=block_size,
                rotate_padded=rotate_padded,
            ).check()  # fmt: skip


@styles
@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens(array: Library, kind: str, is_neox: bool) -> None:
    Case(
        array, kind=kind, latent=512, heads=16, blocks=300, rows=4500, layout="one of two layers", is_neox=is_neox
    ).check()


@pytest.mark.parametrize("where", ["number", "host", "with the arrays"])
def test_scales(array: Library, where: str) -> None:
    as_scale = {"number": float, "host": np.atleast_1d, "with the arrays": lambda x: array.input(np.atleast_1d(x))}
    Case(array, kind="fp8_e5m2", scale=np.float32(0.3), as_scale=as_scale[where]).check()


@styles
def test_nvfp4(array: Library, is_neox: bool) -> None:
    """What concat_and_cache_mla makes of the rotated keys."""
    for dtype in DTYPES.values():
        q_pe, k_pe = random((37, 5, 64), dtype), random((37, 64), dtype, 1)
        positions, slots = np.arange(37), np.random.default_rng(0).permutation(48)[:37]
        kv_c, cos_sin = array.input(random((37, 512), dtype, 2)), random((64, 64), dtype, 3)
        query, key = array.output(q_pe), array.output(k_pe)
        caches = [array.output(np.full((6, 8, 324), 7, np.uint8)) for _ in range(2)]
        pykv.concat_and_cache_mla_rope_fused(
            array.input(positions), query, key, kv_c, array.input(cos_sin), is_neox, array.input(slots), caches[0],
            "nvfp4", 0.01, True,
        )  # fmt: skip
        for got, given_heads in ((query, q_pe), (key, k_pe)):
            wanted = rotary_reference.rotary_embedding(positions, given_heads.reshape(37, -1, 64), cos_sin, is_neox)
            assert_rounded_once(array.numpy(got).reshape(wanted.shape), wanted, atol=2e-6)
        pykv.concat_and_cache_mla(kv_c, key, caches[1], array.input(slots), "nvfp4", 0.01)
        np.testing.assert_array_equal(array.numpy(caches[0]), array.numpy(caches[1]))


@pytest.mark.parametrize("rotate_padded", [False, True])
@pytest.mark.parametrize("kind", ["auto", "fp8_ds_mla"])
def test_nothing_to_cache(array: Library, kind: str, rotate_padded: bool) -> None:
    for slots in (np.zeros(0, np.int64), np.full(9, -1)):
        Case(array, kind=kind, slots=slots, rotate_padded=rotate_padded).check()
    Case(array, kind=kind, rows=0, rotate_padded=rotate_padded).check()
    Case(array, kind=kind, heads=0, rotate_padded=rotate_padded).check()


@pytest.mark.parametrize("kind", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("bad", [-1, MAX_POSITION, 2**40, -(2**63)])
def test_a_position_outside_is_reported_and_its_token_cached_as_it_is(array: Library, kind: str, bad: int) -> None:
    positions = np.random.default_rng(0).integers(0, MAX_POSITION, 35)
    positions[11] = bad
    case = Case(array, kind=kind, positions=positions, slots=np.arange(35)[::-1].copy())
    message = rf"concat_and_cache_mla_rope_fused: positions: {bad} is out of range \[0, {MAX_POSITION}\)"
    case.check(f"^{message}; it was not used$")


slots_of_any_kind = st.one_of(
    st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1), st.sampled_from([31, 32, 2**31, 2**32, 2**62, -(2**63)])
)


@pytest.mark.parametrize("rotate_padded", [False, True])
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "fp8_ds_mla"])
@given(data=st.data())
@settings(max_examples=25)
def test_slots_beyond_the_cache(array: Library, kind: str, rotate_padded: bool, data: st.DataObject) -> None:
    slots = np.array(data.draw(st.lists(slots_of_any_kind, min_size=1, max_size=40, unique=True)), np.int64)
    report = r"^concat_and_cache_mla_rope_fused: slot_mapping: \d+ is out of range \[0, 32\); it was not used$"
    case = Case(array, kind=kind, blocks=4, block_size=8, slots=slots, rows=len(slots) + 1, rotate_padded=rotate_padded)
    case.check(report if (slots >= 32).any() else None)


@given(data=st.data())
@settings(max_examples=120)
def test_anything(array: Library, data: st.DataObject) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(KINDS))
    records = kind in RECORDS
    blocks, block_size = draw(st.integers(1, 7)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(0, blocks * block_size))
    Case(
        array,
        latent=128 * draw(st.integers(0, 3)) if records else draw(st.integers(0, 140)),
        rope=(8 if kind == "nvfp4_ds_mla" else 2) * draw(st.integers(0, 10 if kind == "nvfp4_ds_mla" else 40)),
        heads=draw(st.integers(0, 6)),
        blocks=blocks,
        block_size=block_size,
        dtype=draw(st.sampled_from(dtypes_of(kind))),
        angles=draw(st.sampled_from(sorted(DTYPES))),
        kind=kind,
        is_neox=draw(st.booleans()),
        slots=inputs.slot_mapping(rng, draw(st.sampled_from(SLOTS)), n, Sizes(blocks, block_size)),
        rows=n + draw(st.integers(0, 3)),
        layout=draw(st.sampled_from(sorted(set(LAYOUTS) - ({"elements apart"} if records else set())))),
        arrangement=draw(st.sampled_from(ARRANGEMENTS)),
        rotate_in_fp32=draw(st.booleans()),
        rotate_padded=draw(st.booleans()),
        seed=draw(st.integers(0, 2**31)),
    ).check()


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"positions": np.zeros((4, 1), np.int64)}, ValueError, "positions: must have 1 dimension"),
        ({"positions": zeros(4)}, TypeError, "positions: dtype must be int64 or int32, got float16"),
        ({"q_pe": zeros(5, 3, 64)}, ValueError, "q_pe: dimension 0 must be that of positions, 4, got"),
        ({"q_pe": zeros(4, 3, 32)}, ValueError, "q_pe: dimension 2 must equal rope_size = 64, got"),
        ({"q_pe": zeros(4, 100)}, ValueError, "q_pe: the last dimension must be a multiple of rope_size = 64"),
        ({"q_pe": zeros(4, 3, 128)[..., ::2]}, ValueError, "q_pe: the last dimension must be contiguous"),
        ({"q_pe": zeros(4, 3, 64, dtype=np.float32)}, TypeError, "q_pe: dtype must be that of k_pe, float16, got"),
        ({"k_pe": zeros(5, 64)}, ValueError, "k_pe: dimension 0 must equal num_rows = 4, got"),
        ({"k_pe": zeros(4, 1, 64)}, ValueError, "k_pe: must have 2 dimensions"),
        ({"k_pe": zeros(4, 128)[:, ::2]}, ValueError, "k_pe: the last dimension must be contiguous"),
        ({"k_pe": zeros(4, 64, dtype=np.int32)}, TypeError, "k_pe: dtype must be float32 or .* got int32"),
        ({"kv_c": zeros(3, 128)}, ValueError, "kv_c: must have a row for each of the 4 slots"),
        ({"kv_c": zeros(4, 128, dtype=np.float32)}, TypeError, "kv_c: dtype must be that of k_pe, float16, got"),
        ({"kv_c": None}, TypeError, "kv_c: an array is required"),
        ({"cos_sin_cache": zeros(8, 32)}, ValueError, "cos_sin_cache: dimension 1 must equal rope_size = 64"),
        ({"cos_sin_cache": zeros(64)}, ValueError, "cos_sin_cache: must have 2 dimensions"),
        ({"slot_mapping": np.zeros(5, np.int64)}, ValueError, "kv_c: must have a row for each of the 5 slots"),
        ({"kv_cache": zeros(3, 8, 190)}, ValueError, r"kv_cache: dimension 2 must equal kv_lora_rank \+ rope_size"),
        ({"kv_cache_dtype": "fp9"}, ValueError, "kv_cache_dtype: must be one of 'auto'.* got 'fp9'"),
        ({"kv_cache_dtype": "fp8", "kv_cache": zeros(3, 8, 192, dtype=np.uint8),
          "kv_cache_scale": np.ones(2, np.float32)}, ValueError, "kv_cache_scale: must have 1 element, got shape"),
    ],
)  # fmt: skip
def test_errors(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given_arguments = {
        "positions": np.zeros(4, np.int64),
        "q_pe": zeros(4, 3, 64),
        "k_pe": zeros(4, 64),
        "kv_c": zeros(4, 128),
        "cos_sin_cache": zeros(8, 64),
        "is_neox": True,
        "slot_mapping": np.zeros(4, np.int64),
        "kv_cache": zeros(3, 8, 192),
    }
    with pytest.raises(error, match=f"^concat_and_cache_mla_rope_fused: {message}"):
        pykv.concat_and_cache_mla_rope_fused(**{**given_arguments, **changed})
