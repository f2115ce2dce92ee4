from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cache import inputs, reference, reference_mla
from cache.inputs import DTYPES, SLOTS, Sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Library

import pykv

KINDS = ["auto", "fp8_e4m3", "fp8_e5m2", "int8", "fp8_ds_mla", "nvfp4_ds_mla"]
RECORDS = {"fp8_ds_mla", "nvfp4_ds_mla"}
# name -> (shape of the memory, where in it the cache lies); all of the memory is compared
LAYOUTS: dict[str, tuple[Callable[[int, int, int], tuple[int, ...]], Callable[[Any], Any]]] = {
    "compact": (lambda nb, bs, w: (nb, bs, w), lambda m: m[1:-1]),
    "one of two layers": (lambda nb, bs, w: (nb, 2, bs, w), lambda m: m[1:-1, 1]),
    "padded entries": (lambda nb, bs, w: (nb, bs, w + 64), lambda m: m[1:-1, :, :-64]),
    "not aligned": (lambda nb, bs, w: (nb, bs, w + 3), lambda m: m[1:-1, :, 3:]),
    "tokens first": (lambda nb, bs, w: (bs, nb, w), lambda m: m.swapaxes(0, 1)[1:-1]),
    "elements apart": (lambda nb, bs, w: (nb, bs, 2 * w), lambda m: m[1:-1, :, ::2]),
}
ARRANGEMENTS = ["compact", "parts of one", "padded", "elements apart"]


def parts(make: Callable[..., np.ndarray], rows: int, latent: int, rope: int, arrangement: str) -> list[np.ndarray]:
    match arrangement:
        case "compact":
            return [make((rows, latent)), make((rows, rope))]
        case "parts of one":
            return np.split(make((rows, latent + rope)), [latent], axis=1)
        case "padded":
            return [make((rows, latent + 5))[:, :latent], make((rows, rope + 3))[:, 3:]]
        case "elements apart":
            return [make((rows, latent, 2))[..., 1], make((rows, rope, 2))[..., 0]]
    raise ValueError(arrangement)


def prepare(
    array: Library,
    *,
    latent: int = 128,
    rope: int = 64,
    blocks: int = 6,
    block_size: int = 16,
    dtype: str = "bfloat16",
    kind: str = "auto",
    slots: np.ndarray | None = None,
    num_tokens: int = 33,
    extra_rows: int = 2,
    layout: str = "compact",
    arrangement: str = "compact",
    scale: Any = 1.0,
    as_scale: Any = float,
    seed: int = 0,
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The call, and the comparison of the whole memory with what it is to leave behind."""
    rng = np.random.default_rng(seed)
    source = DTYPES[dtype]
    stored = source if kind == "auto" else np.dtype(reference.CODES.get(kind, np.uint8))
    width = reference_mla.record_bytes(latent, rope, kind) if kind in RECORDS else latent + rope
    shape, take = LAYOUTS[layout]
    expected = inputs.bits(rng, shape(blocks + 2, block_size, width), stored)
    actual = array.output(expected)
    if slots is None:
        slots = inputs.slot_mapping(rng, "sequences", num_tokens, Sizes(blocks, block_size))

    def make(shape: tuple[int, ...]) -> np.ndarray:
        if kind == "auto":
            return inputs.bits(rng, shape, source)
        x = inputs.floats(rng, shape, source)
        # the codes of a tile with an infinity have no sign to compare
        return np.where(np.isinf(x), source.type(1), x) if kind == "fp8_ds_mla" else x

    kv_c, k_pe = parts(make, len(slots) + extra_rows, latent, rope, arrangement)
    reference_mla.concat_and_cache_mla(kv_c, k_pe, take(expected), slots, kind, scale)
    given = array.input(kv_c), array.input(k_pe), inputs.view(actual, take), array.input(slots)

    def compare() -> None:
        got = array.numpy(actual).reshape(-1).view(np.uint8)
        np.testing.assert_array_equal(got, expected.reshape(-1).view(np.uint8))

    return lambda: pykv.concat_and_cache_mla(*given, kind, as_scale(scale)), compare


def check(array: Library, **options: Any) -> None:
    call, compare = prepare(array, **options)
    call()
    compare()


def dtypes_of(kind: str) -> list[str]:
    return [d for d in DTYPES if kind not in RECORDS or d != "float32"]


@pytest.mark.parametrize(("kind", "dtype"), [(k, d) for k in KINDS for d in dtypes_of(k)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(array: Library, layout: str, kind: str, dtype: str) -> None:
    if kind in RECORDS and layout == "elements apart":
        pytest.skip("a record is bytes side by side")
    check(array, layout=layout, kind=kind, dtype=dtype, scale=np.float32(0.37))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_strides_of_the_inputs(array: Library, arrangement: str, kind: str) -> None:
    for dtype in dtypes_of(kind):
        check(array, arrangement=arrangement, kind=kind, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("latent", "rope"), [(512, 64), (256, 64), (128, 0), (0, 64), (1024, 128), (384, 7), (640, 72)]
)
def test_sizes(array: Library, latent: int, rope: int, kind: str) -> None:
    if kind == "nvfp4_ds_mla":
        rope = -(-rope // 8) * 8
    for dtype in dtypes_of(kind):
        check(array, latent=latent, rope=rope, kind=kind, dtype=dtype, num_tokens=21)


@pytest.mark.parametrize(("latent", "rope"), [(1, 1), (3, 2), (100, 8), (512, 63), (0, 1)])
def test_odd_sizes(array: Library, latent: int, rope: int) -> None:
    for kind in ("auto", "fp8_e4m3"):
        for dtype in DTYPES:
            check(array, latent=latent, rope=rope, kind=kind, dtype=dtype)


@pytest.mark.parametrize("slots", SLOTS)
@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("kind", ["auto", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_slot_mappings(array: Library, kind: str, ids: type, slots: str) -> None:
    for n in (1, 2, 3, 4, 5, 63, 64, 144):
        for block_size in (1, 3, 16, 64):
            s = Sizes(-(-n // block_size) + 1, block_size)
            mapping = inputs.slot_mapping(np.random.default_rng(n), slots, n, s, ids)
            check(array, kind=kind, slots=mapping, blocks=s.blocks, block_size=block_size)


@pytest.mark.parametrize("kind", KINDS)
def test_many_tokens(array: Library, kind: str) -> None:
    """More bytes than CPU caches hold: on the CPU copies go past them."""
    check(array, kind=kind, latent=512, blocks=1000, num_tokens=15000, layout="one of two layers", dtype="float16")
    check(array, kind=kind, latent=512, blocks=40, num_tokens=600)  # enough for tables


@pytest.mark.parametrize("where", ["number", "host", "with the arrays"])
def test_scales(array: Library, where: str) -> None:
    as_scale = {"number": float, "host": np.atleast_1d, "with the arrays": lambda x: array.input(np.atleast_1d(x))}
    check(array, kind="fp8", scale=np.float32(0.3), as_scale=as_scale[where])


def test_a_record_of_352_bytes(array: Library) -> None:
    """Codes, rope and the places of the scales, one by one."""
    kv_c = np.zeros((1, 512), DTYPES["bfloat16"])
    kv_c[0, ::16] = 6 * 2.0 ** (np.arange(32) % 8 - 4)
    kv_c[0, 1::16] = -kv_c[0, ::16] / 4
    kv_c[0, 16 * 9 : 16 * 10] = 2.0**-12  # below what the least scale can hold
    k_pe = np.linspace(-500, 500, 64, dtype=np.float32).astype(kv_c.dtype)[None]
    cache = array.output(np.full((1, 1, 352), 0xAA, np.uint8))
    slots = array.input(np.zeros(1, np.int64))
    pykv.concat_and_cache_mla(array.input(kv_c), array.input(k_pe), cache, slots, "nvfp4_ds_mla")
    record = array.numpy(cache)[0, 0]
    e4m3 = reference.FP8["fp8"]
    wanted = 2.0 ** (np.arange(32) % 8 - 4)
    wanted[9] = 2.0**-9
    got = record[320:].view(e4m3).astype(np.float64)
    np.testing.assert_array_equal([got[s % 4 * 8 + s // 4] for s in range(32)], wanted)
    codes = np.zeros(256, np.uint8)
    codes[::8] = 7 | 11 << 4  # 6 and -1.5
    codes[72:80] = 0  # an eighth
    np.testing.assert_array_equal(record[:256], codes)
    np.testing.assert_array_equal(record[256:320], reference.quantise(k_pe[0], 1.0, "fp8"))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 3e38, np.nan])
def test_tiles_of_one_value(array: Library, value: float) -> None:
    """The scale of a record is never 0 and never NaN."""
    kv_c = np.full((2, 128), value, DTYPES["bfloat16"])
    k_pe = np.zeros((2, 64), DTYPES["bfloat16"])
    expected = np.zeros((1, 2, reference_mla.record_bytes(128, 64)), np.uint8)
    cache = array.output(expected)
    reference_mla.concat_and_cache_mla(kv_c, k_pe, expected, np.arange(2), "fp8_ds_mla")
    pykv.concat_and_cache_mla(array.input(kv_c), array.input(k_pe), cache, array.input(np.arange(2)), "fp8_ds_mla")
    np.testing.assert_array_equal(array.numpy(cache), expected)
    scales = np.ascontiguousarray(array.numpy(cache)[..., 128:132]).view("<f4")
    assert (scales > 0).all()


def test_a_tile_with_an_infinity(array: Library) -> None:
    """Its scale is infinite, finite values become 0, the infinity NaN."""
    kv_c = np.ones((1, 256), DTYPES["float16"])
    kv_c[0, 3] = np.inf
    cache = array.output(np.zeros((1, 1, reference_mla.record_bytes(256, 0)), np.uint8))
    k_pe = array.input(np.zeros((1, 0), DTYPES["float16"]))
    pykv.concat_and_cache_mla(array.input(kv_c), k_pe, cache, array.input(np.zeros(1, np.int64)), "fp8_ds_mla")
    record = array.numpy(cache)[0, 0]
    np.testing.assert_array_equal(np.ascontiguousarray(record[256:]).view("<f4"), np.float32([np.inf, 2**-8]))
    codes = record[:256].view(reference.FP8["fp8"]).astype(np.float32)
    assert np.isnan(codes[3])
    assert (np.delete(codes[:128], 3) == 0).all()
    assert (codes[128:] == 256).all()


@pytest.mark.parametrize("dtype", dtypes_of("fp8_ds_mla"))
@pytest.mark.parametrize("arrangement", ["compact", "elements apart"])
def test_scales_of_records_are_powers_of_two(array: Library, dtype: str, arrangement: str) -> None:
    """Those that just hold the largest magnitude: of each binade its ends, and below 1e-4 always 2**-13."""
    largest = [448 * s * (1 + e) for s in 2.0 ** np.arange(-16, 7) for e in (-(2.0**-8), 0, 2.0**-7)]
    rng = np.random.default_rng(0)
    kv_c = rng.uniform(-0.5, 0.5, (len(largest), 128)) * np.array(largest)[:, None]
    kv_c[:, 77] = largest
    kv_c = kv_c.astype(DTYPES[dtype])
    exact = np.exp2(np.ceil(np.log2(np.maximum(np.abs(kv_c.astype(np.float64)).max(axis=1) / 448, 1e-4))))
    k_pe = inputs.bits(rng, (len(largest), 64), DTYPES[dtype])
    cache = array.output(np.zeros((1, len(largest), 260), np.uint8))
    given = kv_c if arrangement == "compact" else np.stack([kv_c, kv_c], 2)[..., 0]
    slots = array.input(np.arange(len(largest)))
    pykv.concat_and_cache_mla(array.input(given), array.input(k_pe), cache, slots, "fp8_ds_mla")
    got = array.numpy(cache)[0]
    np.testing.assert_array_equal(np.ascontiguousarray(got[:, 128:132]).view("<f4")[:, 0], exact)
    values = got[:, :128].copy().view(reference.FP8["fp8"]).astype(np.float64) * exact[:, None]
    assert (np.abs(values - kv_c.astype(np.float64)) <= np.maximum(np.abs(values) / 16, exact[:, None] / 512)).all()


@pytest.mark.parametrize("layout", ["compact", "padded entries", "not aligned"])
@pytest.mark.parametrize("dtype", dtypes_of("fp8_ds_mla"))
def test_records_without_rope(array: Library, dtype: str, layout: str) -> None:
    """What would be rope is zeros up to the end of the record."""
    shape, take = LAYOUTS[layout]
    for width in (656, 528, 530, 544):
        rng = np.random.default_rng(width)
        expected = inputs.bits(rng, shape(5, 4, width), np.dtype(np.uint8))
        actual = array.output(expected)
        kv_c, k_pe = rng.standard_normal((9, 512)).astype(DTYPES[dtype]), np.zeros((9, 0), DTYPES[dtype])
        slots = np.array([3, 0, -1, 11, 7, 8, 9, -5, 2])
        reference_mla.concat_and_cache_mla(kv_c, k_pe, take(expected), slots, "fp8_ds_mla")
        given = array.input(kv_c), array.input(k_pe), inputs.view(actual, take), array.input(slots)
        pykv.concat_and_cache_mla(*given, "fp8_ds_mla")
        np.testing.assert_array_equal(array.numpy(actual), expected)


@pytest.mark.parametrize("kind", ["auto", "fp8", "fp8_e5m2", "int8"])
def test_skipped_scale(array: Library, kind: str) -> None:
    """It is 1, whatever is given."""
    rng = np.random.default_rng(0)
    kv_c, k_pe = (inputs.floats(rng, (9, size), DTYPES["float16"]) for size in (128, 64))
    expected = np.zeros((3, 4, 192), reference.CODES.get(kind, kv_c.dtype))
    actual = array.output(expected)
    reference_mla.concat_and_cache_mla(kv_c, k_pe, expected, np.arange(9), kind, 1.0)
    given = array.input(kv_c), array.input(k_pe), actual, array.input(np.arange(9)), kind
    pykv.concat_and_cache_mla(*given, array.input(np.array([0.25], np.float32)), skip_scale=True)
    np.testing.assert_array_equal(array.numpy(actual).view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("kind", ["auto", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_nothing_to_do(array: Library, kind: str) -> None:
    check(array, kind=kind, slots=np.zeros(0, np.int64), extra_rows=0)
    check(array, kind=kind, slots=np.zeros(0, np.int64), extra_rows=3)
    check(array, kind=kind, slots=np.full(9, -1))
    check(array, kind=kind, latent=0, rope=0, slots=np.arange(4))


slots_of_any_kind = st.one_of(
    st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1), st.sampled_from([31, 32, 2**31, 2**32, 2**62, -(2**63)])
)


@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla"])
@given(data=st.data())
@settings(max_examples=25)
def test_slots_beyond_the_cache(array: Library, kind: str, data: st.DataObject) -> None:
    slots = np.array(data.draw(st.lists(slots_of_any_kind, min_size=1, max_size=40, unique=True)), np.int64)
    call, compare = prepare(array, kind=kind, blocks=4, block_size=8, slots=slots)
    if (slots < 32).all():
        call()
    else:
        with array.reports(r"^concat_and_cache_mla: slot_mapping: \d+ is out of range \[0, 32\); it was not used$"):
            call()
    compare()


@given(data=st.data())
@settings(max_examples=120)
def test_anything(array: Library, data: st.DataObject) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(KINDS))
    records = kind in RECORDS
    blocks, block_size = draw(st.integers(1, 7)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(0, blocks * block_size))
    slots = inputs.slot_mapping(rng, draw(st.sampled_from(SLOTS)), n, Sizes(blocks, block_size))
    check(
        array,
        latent=(128 if kind == "fp8_ds_mla" else 64) * draw(st.integers(0, 5))
        if records
        else draw(st.integers(0, 140)),
        rope=8 * draw(st.integers(0, 9)) if kind == "nvfp4_ds_mla" else draw(st.integers(0, 70)),
        blocks=blocks,
        block_size=block_size,
        dtype=draw(st.sampled_from(dtypes_of(kind))),
        kind=kind,
        slots=slots,
        extra_rows=draw(st.integers(0, 3)),
        layout=draw(st.sampled_from(sorted(set(LAYOUTS) - ({"elements apart"} if records else set())))),
        arrangement=draw(st.sampled_from(ARRANGEMENTS)),
        scale=np.float32(draw(st.floats(2**-10, 2**10, width=32))),
        seed=draw(st.integers(0, 2**32)),
    )


def zeros(*shape: int, dtype: Any = np.float16) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"kv_c": zeros(4, 2, 64)}, ValueError, r"kv_c: must have 2 dimensions, got shape \[4, 2, 64\]"),
        ({"kv_c": zeros(4, 128, dtype=np.int32)}, TypeError, "kv_c: dtype must be float32 or .* got int32"),
        ({"kv_c": None}, TypeError, "kv_c: an array is required"),
        ({"k_pe": zeros(4, 64, dtype=np.float32)}, TypeError, "k_pe: dtype must be that of kv_c, float16, got float32"),
        ({"k_pe": zeros(3, 64)}, ValueError, r"k_pe: must have a row for each of the 4 slots .* \[3, 64\]"),
        ({"slot_mapping": zeros(4)}, TypeError, "slot_mapping: dtype must be int64 or int32, got float16"),
        ({"slot_mapping": np.zeros(5, np.int64)}, ValueError, "kv_c: must have a row for each of the 5 slots"),
        ({"kv_cache": zeros(3, 8, 190)}, ValueError, r"kv_cache: dimension 2 must equal kv_lora_rank \+ rope_size"),
        ({"kv_cache": zeros(3, 8, 192, dtype=np.uint8)}, TypeError, "kv_cache: dtype must be that of the data"),
        ({"kv_cache_dtype": "fp8"}, TypeError, "kv_cache: dtype must be float8_e4m3fn or uint8 .* got float16"),
        ({"kv_cache_dtype": "fp9"}, ValueError, "kv_cache_dtype: must be one of 'auto'.* got 'fp9'"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, TypeError, "kv_cache: dtype must be uint8 or int8 or float8_e4m3fn, got"),
        ({"kv_cache_dtype": "nvfp4_ds_mla", "kv_cache": zeros(3, 8, 137, dtype=np.uint8)}, ValueError,
         "kv_cache: must have records of 136 bytes for kv_cache_dtype 'nvfp4_ds_mla', got"),
        ({"kv_cache_dtype": "nvfp4_ds_mla", "k_pe": zeros(4, 63), "kv_cache": zeros(1, 1, 9, dtype=np.uint8)},
         ValueError,
         "kv_c: must have a multiple of 64 columns, and k_pe of 8, for .* got 128 and 63"),
        ({"kv_cache_dtype": "fp8_ds_mla", "kv_cache": zeros(3, 8, 192, dtype=np.uint8)}, ValueError,
         "kv_cache: must have records of 260 bytes for kv_cache_dtype 'fp8_ds_mla', got"),
        ({"kv_cache_dtype": "fp8_ds_mla", "kv_c": zeros(4, 100), "kv_cache": zeros(3, 8, 192, dtype=np.uint8)},
         ValueError, "kv_c: must have a multiple of 128 columns"),
        ({"kv_cache_dtype": "fp8_ds_mla", "kv_c": zeros(4, 128, dtype=np.float32)}, TypeError,
         "kv_c: dtype must be float16 or bfloat16, got float32"),
        ({"kv_cache_dtype": "fp8", "kv_cache": zeros(3, 8, 192, dtype=np.uint8), "scale": np.ones(2, np.float32)},
         ValueError, r"scale: must have 1 element, got shape \[2\]"),
    ],
)  # fmt: skip
def test_errors(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {
        "kv_c": zeros(4, 128),
        "k_pe": zeros(4, 64),
        "kv_cache": zeros(3, 8, 192),
        "slot_mapping": np.zeros(4, np.int64),
    }
    with pytest.raises(error, match=f"^concat_and_cache_mla: {message}"):
        pykv.concat_and_cache_mla(**{**given, **changed})
