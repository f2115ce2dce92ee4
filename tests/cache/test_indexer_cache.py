"""indexer_k_quant_and_cache and cp_gather_indexer_k_quant_cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache import inputs, reference_indexer
from cache.inputs import DTYPES, SLOTS, Sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Library

import pykv

KINDS = ["auto", "ue8m0", "mxfp8"]
# (head_dim, quant_block_size): groups that lie in vectors of one warp, and all others
SIZES = [(128, 128), (128, 32), (256, 128), (512, 256), (64, 64), (64, 8), (32, 4), (1024, 512), (96, 96), (96, 48),
         (132, 4), (132, 132), (7, 7), (9, 3), (5, 1), (1, 1), (1000, 500)]  # fmt: skip


# name -> (shape of the memory, where in it the cache lies); all of the memory is compared
LAYOUTS: dict[str, tuple[Callable[[int, int, int], tuple[int, ...]], Callable[[Any], Any]]] = {
    "compact": (lambda nb, bs, c: (nb, bs, c), lambda m: m[1:-1]),
    "one of two layers": (lambda nb, bs, c: (nb, 2, bs, c), lambda m: m[1:-1, 1]),
    "blocks of another size": (lambda nb, bs, c: (nb, bs + 1, c), lambda m: m[1:-1, 1:]),
}


def keys(rng: np.random.Generator, rows: int, size: int, dtype: str, arrangement: str = "compact") -> np.ndarray:
    """Without infinities: the codes of their groups have no sign to compare."""
    x = inputs.floats(rng, (rows, size, 2), DTYPES[dtype])
    x = np.where(np.isinf(x), x.dtype.type(1), x)
    return {
        "compact": lambda: np.ascontiguousarray(x[..., 0]),
        "padded": lambda: np.concatenate([x[..., 0], x[..., 1]], axis=1)[:, :size],
        "not aligned": lambda: np.concatenate([x[..., 0], x[:, :1, 1]], axis=1)[:, 1:],
        "elements apart": lambda: x[..., 1],
    }[arrangement]()


def entry_bytes(size: int, group: int, extra: int = 0) -> int:
    return size + 4 * (size // group) + extra


def check_writing(
    array: Library,
    *,
    size: int = 128,
    group: int = 128,
    kind: str = "ue8m0",
    dtype: str = "bfloat16",
    blocks: int = 5,
    block_size: int = 16,
    layout: str = "compact",
    arrangement: str = "compact",
    extra_bytes: int = 0,
    extra_rows: int = 2,
    slots: np.ndarray | None = None,
    k: np.ndarray | None = None,
    offset: int = 0,
    report: str | None = None,
    seed: int = 0,
) -> None:
    rng = np.random.default_rng(seed)
    shape, take = LAYOUTS[layout]
    expected = inputs.bits(
        rng, shape(blocks + 2, block_size, entry_bytes(size, group, extra_bytes)), np.dtype(np.uint8)
    )
    actual = array.output(expected, offset=offset)
    if slots is None:
        slots = inputs.slot_mapping(rng, "sequences", min(40, blocks * block_size), Sizes(blocks, block_size))
    if k is None:
        k = keys(rng, len(slots) + extra_rows, size, dtype, arrangement)
    reference_indexer.indexer_k_quant_and_cache(k, take(expected), slots, group, kind)
    given = array.input(k), inputs.view(actual, take), array.input(slots), group, kind
    if report is None:
        pykv.indexer_k_quant_and_cache(*given)
    else:
        with array.reports(f"^indexer_k_quant_and_cache: {report}"):
            pykv.indexer_k_quant_and_cache(*given)
    np.testing.assert_array_equal(array.numpy(actual), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("size", "group"), SIZES)
def test_sizes(array: Library, size: int, group: int, kind: str, dtype: str) -> None:
    check_writing(array, size=size, group=group, kind=kind, dtype=dtype)
    check_writing(array, size=size, group=group, kind=kind, dtype=dtype, block_size=3, blocks=9)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("arrangement", ["compact", "padded", "not aligned", "elements apart"])
def test_strides(array: Library, arrangement: str, layout: str) -> None:
    for dtype in DTYPES:
        for size, group, extra_bytes in [(128, 64, 0), (128, 128, 3), (128, 128, 12), (40, 20, 0)]:
            options = {"size": size, "group": group, "extra_bytes": extra_bytes, "dtype": dtype}
            check_writing(array, layout=layout, arrangement=arrangement, **options)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_alignments(array: Library, offset: int) -> None:
    for dtype in DTYPES:
        check_writing(array, offset=offset, dtype=dtype)


@pytest.mark.parametrize("kind", SLOTS)
@pytest.mark.parametrize("ids", [np.int32, np.int64])
def test_slot_mappings(array: Library, ids: type, kind: str) -> None:
    for n in (1, 2, 3, 4, 5, 64, 700):
        for block_size in (1, 3, 64):
            s = Sizes(-(-n // block_size) + 1, block_size)
            slots = inputs.slot_mapping(np.random.default_rng(n), kind, n, s, ids)
            check_writing(array, slots=slots, blocks=s.blocks, block_size=block_size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens(array: Library, dtype: str) -> None:
    """More than one token a thread."""
    slots = inputs.slot_mapping(np.random.default_rng(0), "sequences", 9000, Sizes(150, 64))
    check_writing(array, slots=slots, blocks=150, block_size=64, dtype=dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_every_quotient_of_bfloat16(array: Library, kind: str) -> None:
    """All fractions of the largest magnitude, by all fractions of the others down to what becomes zero."""
    fractions = (1 + np.arange(128) / 128).astype(np.float32)
    powers = np.exp2(-np.arange(21, dtype=np.float32))
    k = fractions[:, None, None] * 0 + fractions * powers[:, None]  # [largest, power, 128]
    k[k > fractions[:, None, None]] /= 2
    k[..., ::3] *= -1
    k[..., 0] = fractions[:, None]
    k = (k.reshape(-1, 128) * np.exp2(np.arange(128 * 21) % 37 - 10)[:, None]).astype(DTYPES["bfloat16"])
    check_writing(array, kind=kind, k=k, slots=np.arange(len(k)), blocks=42, block_size=64)


@pytest.mark.parametrize("kind", KINDS)
def test_scales_next_to_powers_of_two(array: Library, kind: str) -> None:
    """The exponent is exact: neither less than the scale nor twice what it need be."""
    powers = np.float32(2.0) ** np.arange(-10, 20, dtype=np.float32) * np.float32(448)
    amax = np.concatenate([np.nextafter(powers, np.float32(0)), powers, np.nextafter(powers, np.float32(np.inf))])
    amax = np.concatenate([amax, np.float32([0, 1e-30, 1e-4, 3e38])])
    k = np.zeros((len(amax), 8), np.float32)
    k[:, 3] = -amax
    check_writing(array, size=8, group=8, kind=kind, k=k, slots=np.arange(len(amax)), blocks=10)
    check_writing(array, size=8, group=4, kind=kind, k=k, slots=np.arange(len(amax)), blocks=10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_group_with_an_infinity(array: Library, kind: str, dtype: str) -> None:
    """Its scale is infinite, finite values become 0, the infinity NaN; other groups are as ever."""
    for size, group in [(128, 64), (14, 7)]:
        k = np.ones((1, size), DTYPES[dtype])
        k[0, 3], k[0, 4] = np.inf, np.nan
        cache = array.output(np.zeros((1, 1, entry_bytes(size, group)), np.uint8))
        pykv.indexer_k_quant_and_cache(array.input(k), cache, array.input(np.zeros(1, np.int64)), group, kind)
        values, scales = reference_indexer.planes(array.numpy(cache), size, 2)
        assert (values[0, 0, 3:5] & 0x7F == 0x7F).all()
        assert (np.delete(values[0, 0, :group], [3, 4]) == 0).all()
        rounded = kind != "auto"
        if kind == "mxfp8":
            np.testing.assert_array_equal(scales.reshape(2, 4), [[255] * 4, [127 - 8] * 4])
        else:
            wanted = np.float32([np.inf, 2**-8 if rounded else 1 / np.float32(448)])
            np.testing.assert_array_equal(scales.reshape(2, 4).view("<f4")[:, 0], wanted)
        assert (values[0, 0, group:] == (0x78 if rounded else 0x7E)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_is_near_what_was_written(array: Library, kind: str) -> None:
    rng = np.random.default_rng(0)
    k = rng.standard_normal((50, 128)).astype(np.float32)
    cache = array.output(np.zeros((4, 16, 132), np.uint8))
    pykv.indexer_k_quant_and_cache(array.input(k), cache, array.input(np.arange(50) + 7), 128, kind)
    out, scales = array.output(np.zeros((50, 128), np.uint8)), array.output(np.zeros((50, 1), np.float32))
    table, ends = array.input(np.arange(4, dtype=np.int32)[None]), array.input(np.array([0, 50], np.int32))
    pykv.cp_gather_indexer_k_quant_cache(cache, out, scales, table, ends, array.input(np.array([7], np.int32)))
    values = array.numpy(out).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    stored = array.numpy(scales)
    if kind == "mxfp8":
        exponents = stored.view(np.uint8)  # four equal ones
        assert (exponents == exponents[:, :1]).all()
        stored = np.ldexp(np.float32(1), exponents[:, :1].astype(np.int32) - 127)
    error = np.abs(values * stored - k)
    assert (error <= 16 * stored).all()
    assert error.max() > 0


def test_nothing_to_write(array: Library) -> None:
    check_writing(array, slots=np.zeros(0, np.int64), extra_rows=0)
    check_writing(array, slots=np.zeros(0, np.int64), extra_rows=3)
    check_writing(array, slots=np.full(9, -1))
    check_writing(array, size=0, group=4, slots=np.arange(3), extra_bytes=8)


any_slot = st.one_of(
    st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1), st.sampled_from([31, 32, 2**31, 2**32, 2**62, -(2**63)])
)


@pytest.mark.parametrize(("size", "group"), [(128, 128), (24, 12)])
@given(data=st.data())
@settings(max_examples=25)
def test_slots_beyond_the_cache(array: Library, size: int, group: int, data: st.DataObject) -> None:
    slots = np.array(data.draw(st.lists(any_slot, min_size=1, max_size=40, unique=True)), np.int64)
    beyond = r"slot_mapping: \d+ is out of range \[0, 32\); it was not used$" if (slots >= 32).any() else None
    check_writing(array, size=size, group=group, blocks=4, block_size=8, slots=slots, report=beyond)


@given(data=st.data())
@settings(max_examples=80)
def test_anything_written(array: Library, data: st.DataObject) -> None:
    draw = data.draw
    group, blocks, block_size = draw(st.integers(1, 140)), draw(st.integers(1, 7)), draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    n = draw(st.integers(0, blocks * block_size))
    check_writing(
        array,
        size=group * draw(st.integers(1, 4)),
        group=group,
        kind=draw(st.sampled_from(KINDS)),
        dtype=draw(st.sampled_from(list(DTYPES))),
        blocks=blocks,
        block_size=block_size,
        layout=draw(st.sampled_from(list(LAYOUTS))),
        arrangement=draw(st.sampled_from(["compact", "padded", "not aligned", "elements apart"])),
        extra_bytes=draw(st.integers(0, 20)),
        extra_rows=draw(st.integers(0, 3)),
        slots=inputs.slot_mapping(rng, draw(st.sampled_from(SLOTS)), n, Sizes(blocks, block_size)),
        seed=draw(st.integers(0, 2**32)),
    )


LENGTHS = [5, 0, 33, 1, 0, 0, 64, 17, 0]
# how the rows of an output lie in a memory: its shape, and where in it they are
OUTPUTS: dict[str, tuple[Callable[[int, int], tuple[int, ...]], Callable[[Any], Any]]] = {
    "compact": (lambda rows, n: (rows, n), lambda m: m),
    "padded": (lambda rows, n: (rows, n + 16), lambda m: m[:, :-16]),
    "not aligned": (lambda rows, n: (rows, n + 1), lambda m: m[:, 1:]),
    "elements apart": (lambda rows, n: (rows, n, 2), lambda m: m[..., 1]),
}


def check_gathering(
    array: Library,
    lengths: list[int],
    *,
    size: int = 128,
    groups: int = 1,
    blocks: int = 7,
    block_size: int = 16,
    layout: str = "compact",
    outputs: tuple[str, str] = ("compact", "compact"),
    scale_dtype: Any = np.uint8,
    extra_bytes: int = 0,
    extra_rows: int = 3,
    starts: np.ndarray | None = None,
    change: Callable[[np.ndarray], None] = lambda table: None,
    width: int | None = None,
    ids: type = np.int32,
    offset: int = 0,
    report: str | None = None,
    seed: int = 0,
) -> None:
    rng = np.random.default_rng(seed)
    shape, take = LAYOUTS[layout]
    cache = inputs.bits(rng, shape(blocks + 2, block_size, size + 4 * groups + extra_bytes), np.dtype(np.uint8))
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    longest = max((n + (0 if starts is None else int(starts[r])) for r, n in enumerate(lengths)), default=0)
    table = rng.integers(0, blocks, (len(lengths) + 1, -(-longest // block_size) + 1 if width is None else width))
    change(table)
    columns = (size, 4 * groups // np.dtype(scale_dtype).itemsize)
    expected, actual, dst = [], [], []
    for n, name, dtype in zip(columns, outputs, (np.uint8, scale_dtype), strict=True):
        memory, rows = OUTPUTS[name]
        expected.append(inputs.bits(rng, memory(int(ends[-1]) + extra_rows, n), np.dtype(dtype)))
        actual.append(array.output(expected[-1], offset=offset))
        dst.append(inputs.view(actual[-1], rows))
    wanted = [OUTPUTS[name][1](x) for name, x in zip(outputs, expected, strict=True)]
    reference_indexer.cp_gather_indexer_k_quant_cache(take(cache), *wanted, table, ends, starts)
    table_and_ends = [array.input(x.astype(ids)) for x in (table, ends)]
    given = [inputs.view(array.output(cache), take), *dst, *table_and_ends]
    given.append(None if starts is None else array.input(starts.astype(ids)))
    if report is None:
        pykv.cp_gather_indexer_k_quant_cache(*given)
    else:
        with array.reports(f"^cp_gather_indexer_k_quant_cache: {report}"):
            pykv.cp_gather_indexer_k_quant_cache(*given)
    for got, whole in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(array.numpy(got).view(np.uint8), whole.view(np.uint8))


def starts_of(lengths: list[int], block_size: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 3 * block_size, len(lengths))


@pytest.mark.parametrize("scale_dtype", [np.uint8, np.float32])
@pytest.mark.parametrize(("size", "group"), SIZES)
def test_gathered_sizes(array: Library, size: int, group: int, scale_dtype: Any) -> None:
    for block_size in (1, 3, 64):
        for starts in (None, starts_of(LENGTHS, block_size)):
            options = {"block_size": block_size, "starts": starts, "scale_dtype": scale_dtype}
            check_gathering(array, LENGTHS, size=size, groups=size // group, **options)


@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("lengths", [[1], [2, 3], [200], [1] * 300, [0, 0, 7], [0] * 40 + [3] * 70, [3000, 1, 500],
                                     [5, 0, 2] * 800])  # fmt: skip
def test_numbers_of_requests(array: Library, lengths: list[int], ids: type) -> None:
    check_gathering(array, lengths, ids=ids)
    check_gathering(array, lengths, ids=ids, starts=starts_of(lengths, 16), extra_rows=200)


def test_many_rows(array: Library) -> None:
    """More bytes than CPU caches hold: on the CPU copies go past them."""
    check_gathering(array, [70000, 0, 90000], blocks=3000, block_size=64)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("values", OUTPUTS)
@pytest.mark.parametrize("scales", OUTPUTS)
def test_gathered_strides(array: Library, scales: str, values: str, layout: str) -> None:
    for scale_dtype in (np.uint8, np.float32):
        for size, groups, extra_bytes in [(128, 2, 0), (128, 1, 12), (20, 5, 1)]:
            options = {"size": size, "groups": groups, "extra_bytes": extra_bytes, "scale_dtype": scale_dtype}
            check_gathering(array, LENGTHS, layout=layout, outputs=(values, scales), **options)


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_gathered_alignments(array: Library, offset: int) -> None:
    check_gathering(array, LENGTHS, offset=offset)
    check_gathering(array, LENGTHS, offset=offset, scale_dtype=np.float32)


def test_nothing_to_gather(array: Library) -> None:
    check_gathering(array, [])
    check_gathering(array, [], extra_rows=0)
    check_gathering(array, [0, 0])
    check_gathering(array, [0, 0], extra_rows=0)


@pytest.mark.parametrize("block", [-1, 7, 2**31 - 1, -(2**31)])
def test_a_block_out_of_range(array: Library, block: int) -> None:
    def change(table: np.ndarray) -> None:
        table[2, 1] = block

    check_gathering(array, LENGTHS, change=change, report=rf"block_table: {block} is out of range \[0, 7\)")
    check_gathering(array, LENGTHS, change=change, report="block_table: ", size=20, ids=np.int64)


@pytest.mark.parametrize(
    ("starts", "value", "bound"), [([0, 3, 6], 6, 6), ([0, 4, 3], 4, 4), ([-2, 3, 5], -2, 6), ([2**40, 3, 5], 2**40, 6)]
)
def test_starts_that_make_no_sense(array: Library, starts: list[int], value: int, bound: int) -> None:
    """Starts that descend, and outputs that are too small, are reported."""
    cache = array.input(np.zeros((2, 4, 132), np.uint8))
    keys, scales = array.output(np.zeros((5, 128), np.uint8)), array.output(np.zeros((5, 1), np.float32))
    table, ids = array.input(np.zeros((2, 4), np.int32)), array.input(np.array(starts, np.int64))
    with array.reports(rf"cu_seq_lens: {value} is out of range \[0, {bound}\); it was not used"):
        pykv.cp_gather_indexer_k_quant_cache(cache, keys, scales, table, ids)


@pytest.mark.parametrize("position", [1000, -70, 2**31 - 1, -(2**31)])
def test_positions_beyond_the_block_table(array: Library, position: int) -> None:
    starts = starts_of(LENGTHS, 16)
    starts[6] = position
    check_gathering(array, LENGTHS, starts=starts, width=8, report=r"position: -?\d+ is out of range \[0, 128\)")


def zeros(*shape: int, dtype: Any = np.uint8) -> np.ndarray:
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": zeros(4, 2, 64, dtype=np.float16)}, ValueError, r"k: must have 2 dimensions, got shape \[4, 2, 64\]"),
        ({"k": zeros(4, 128, dtype=np.int32)}, TypeError, "k: dtype must be float32 or .* got int32"),
        ({"k": zeros(3, 128, dtype=np.float16)}, ValueError, "k: must have a row for each of the 4 slots"),
        ({"kv_cache": zeros(3, 8, 132, dtype=np.float16)}, TypeError, "kv_cache: dtype must be uint8"),
        ({"kv_cache": zeros(3, 8, 131)}, ValueError,
         r"kv_cache: must have at least 132 bytes for a token, 128 values and 1 scales, got shape \[3, 8, 131\]"),
        ({"kv_cache": zeros(3, 8, 0)}, ValueError, "kv_cache: must have at least 132 bytes for a token"),
        ({"kv_cache": zeros(3, 8, 140)[:, :, :132]}, ValueError, "kv_cache: a block must be contiguous, got strides"),
        ({"kv_cache": zeros(3, 8 * 132)}, ValueError, "kv_cache: must have 3 dimensions"),
        ({"quant_block_size": 0}, ValueError, "quant_block_size: must be positive and divide head_dim = 128, got 0"),
        ({"quant_block_size": 96}, ValueError, "quant_block_size: must be positive and divide head_dim = 128, got 96"),
        ({"kv_cache_dtype": "fp8_e5m2"}, ValueError, "kv_cache_dtype: must be 'ue8m0' .* got 'fp8_e5m2'"),
        ({"slot_mapping": zeros(4)}, TypeError, "slot_mapping: dtype must be int64 or int32"),
    ],
)  # fmt: skip
def test_errors_of_indexer_k_quant_and_cache(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {
        "k": zeros(4, 128, dtype=np.float16), "kv_cache": zeros(3, 8, 132), "slot_mapping": np.arange(4),
        "quant_block_size": 128, "kv_cache_dtype": "ue8m0", **changed,
    }  # fmt: skip
    with pytest.raises(error, match=f"^indexer_k_quant_and_cache: {message}"):
        pykv.indexer_k_quant_and_cache(**given)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"kv_cache": zeros(3, 8, 131)}, ValueError, "kv_cache: must have at least 132 bytes for a token"),
        ({"kv_cache": zeros(3, 8, 0)}, ValueError, "kv_cache: must have at least 132 bytes for a token"),
        ({"kv_cache": zeros(3, 0, 132)}, ValueError, "kv_cache: must have blocks of at least one token"),
        ({"dst_k": zeros(5, 128, dtype=np.float16)}, TypeError, "dst_k: dtype must be uint8"),
        ({"dst_scale": zeros(4, 4)}, ValueError, r"dst_scale: dimension 0 must equal num_rows = 5, got shape \[4, 4\]"),
        ({"dst_scale": zeros(5, 3)}, ValueError, r"dst_scale: must hold a float32 for each .* \[5, 3\] of uint8"),
        ({"dst_scale": zeros(5, 0)}, ValueError, "dst_scale: must hold a float32 for each of the groups"),
        ({"dst_scale": zeros(5, 3, dtype=np.float32)}, ValueError, r"dst_scale: must hold .* head_dim = 128 is cut"),
        ({"dst_scale": zeros(5, 4, dtype=np.float16)}, TypeError, "dst_scale: dtype must be uint8 or int8 or float32"),
        ({"block_table": zeros(1, 2, dtype=np.int32)}, ValueError, "block_table: must have at least 2 rows"),
        ({"cu_seq_lens": zeros(0, dtype=np.int32)}, ValueError, "cu_seq_lens: must have at least 1 rows"),
        ({"seq_starts": zeros(1, dtype=np.int32)}, ValueError, "seq_starts: must have at least 2 rows"),
    ],
)  # fmt: skip
def test_errors_of_cp_gather_indexer_k_quant_cache(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {
        "kv_cache": zeros(3, 8, 132), "dst_k": zeros(5, 128), "dst_scale": zeros(5, 4),
        "block_table": zeros(2, 2, dtype=np.int32), "cu_seq_lens": zeros(3, dtype=np.int32), **changed,
    }  # fmt: skip
    with pytest.raises(error, match=f"^cp_gather_indexer_k_quant_cache: {message}"):
        pykv.cp_gather_indexer_k_quant_cache(**given)
