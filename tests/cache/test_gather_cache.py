"""cp_gather_cache, gather_and_maybe_dequant_cache and cp_gather_and_upconvert_fp8_kv_cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cache import inputs, reference, reference_mla
from cache.inputs import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from libraries import Library

import pykv

LATENT, ROPE = 256, 64
OPS = ["copy", "auto", "fp8_e4m3", "fp8_e5m2", "int8", "fp8_ds_mla", "upconvert", "upconvert nvfp4"]
RECORDS = {"fp8_ds_mla", "upconvert", "upconvert nvfp4"}
TO_THE_END = {"upconvert", "upconvert nvfp4"}  # the last request ends where dst does
NAMES = {
    "copy": "cp_gather_cache",
    "upconvert": "cp_gather_and_upconvert_fp8_kv_cache",
    "upconvert nvfp4": "cp_gather_and_upconvert_nvfp4_kv_cache",
}


@dataclass
class Requests:
    """Rows of requests, one after another, and where their tokens are."""

    lengths: np.ndarray
    positions: np.ndarray | None
    table: np.ndarray
    ids: type = np.int32

    @property
    def ends(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum(self.lengths)])

    @property
    def rows(self) -> int:
        return int(self.ends[-1])


def requests(
    lengths: list[int],
    *,
    blocks: int,
    block_size: int,
    with_positions: bool = False,
    seed: int = 0,
    ids: type = np.int32,
) -> Requests:
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, 3 * block_size, len(lengths)) if with_positions else None
    longest = max((n + (0 if positions is None else int(positions[r])) for r, n in enumerate(lengths)), default=0)
    width = -(-longest // block_size) + 1
    table = rng.integers(0, blocks, (len(lengths), width))
    return Requests(np.array(lengths, np.int64), positions, table, ids)


def same_bits(got: np.ndarray, expected: np.ndarray) -> None:
    """Bit by bit, but any NaN for a NaN."""
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), np.isnan(expected.astype(np.float32)))
    where = ~np.isnan(expected.astype(np.float32))
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32}[got.itemsize]
    np.testing.assert_array_equal(got[where].view(kind), expected[where].view(kind))


def cache_of(op: str, dtype: np.dtype, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    if op in RECORDS:
        rows = np.prod(shape[:2])
        latent, rope = inputs.floats(rng, (rows, LATENT), dtype), inputs.bits(rng, (rows, ROPE), dtype)
        with np.errstate(all="ignore"):
            latent = np.where(np.abs(latent.astype(np.float32)) < 1e30, latent, dtype.type(1))
        if op == "upconvert nvfp4":
            return rng.integers(
                0, 256, (*shape[:2], reference_mla.record_bytes(LATENT, ROPE, "nvfp4_ds_mla")), np.uint8
            )
        records = [reference_mla.pack_record(c, r) for c, r in zip(latent, rope, strict=True)]
        return np.array(records).reshape(*shape[:2], -1)
    return inputs.bits(rng, shape, np.dtype(reference.CODES.get(op, dtype)))


def decoder(op: str, dtype: np.dtype, scale: np.float32) -> Callable[[np.ndarray], np.ndarray]:
    if op == "upconvert nvfp4":
        return lambda entry: reference_mla.unpack_nvfp4_record(entry, LATENT, dtype)
    if op in RECORDS:
        return lambda entry: reference_mla.unpack_record(entry, LATENT, dtype)
    if op in reference.CODES:

        def scaled(entry: np.ndarray) -> np.ndarray:
            with np.errstate(all="ignore"):
                return (entry.astype(np.float32) * scale).astype(dtype)

        return scaled
    return lambda entry: entry


def check(
    array: Library,
    op: str,
    r: Requests,
    *,
    dtype: str = "bfloat16",
    blocks: int = 7,
    block_size: int = 16,
    entry: tuple[int, ...] = (96,),
    with_token_to_seq: bool = True,
    extra_rows: int = 3,
    take: Callable[[Any], Any] = lambda m: m,
    take_dst: Callable[[Any], Any] = lambda m: m,
    memory: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape,
    memory_dst: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda shape: shape,
    scale: np.float32 = np.float32(0.37),  # noqa: B008
    seed: int = 0,
    report: str | None = None,
    token_to_seq: np.ndarray | None = None,
) -> None:
    """``memory`` and ``memory_dst`` shape what ``take`` and ``take_dst`` take the arrays from."""
    rng = np.random.default_rng(seed)
    element = DTYPES[dtype]
    width = (LATENT + ROPE,) if op in RECORDS else entry
    source = cache_of(op, element, memory((blocks, block_size, *entry)), rng)
    expected = inputs.bits(rng, memory_dst((r.rows + extra_rows, *width)), element)
    actual = array.output(expected)
    lengths = r.lengths.copy()
    positions = None if op == "upconvert nvfp4" else r.positions  # it takes none
    if op in TO_THE_END and len(lengths):
        lengths[-1] += extra_rows
    reference_mla.gather(
        take(source), take_dst(expected), r.table, r.ends[:-1], lengths, positions, decoder(op, element, scale)
    )
    src, dst = inputs.view(array.output(source), take), inputs.view(actual, take_dst)
    starts = r.ends[:-1] if op in TO_THE_END else r.ends
    table, starts, positions = (
        None if x is None else array.input(x.astype(r.ids)) for x in (r.table, starts, positions)
    )
    batch = len(r.lengths)

    def call() -> None:
        if op == "copy":
            pykv.cp_gather_cache(src, dst, table, starts, batch, positions)
        elif op == "upconvert nvfp4":
            pykv.cp_gather_and_upconvert_nvfp4_kv_cache(src, dst, table, starts, batch)
        elif op == "upconvert":
            pykv.cp_gather_and_upconvert_fp8_kv_cache(src, dst, table, starts, batch, positions)
        else:
            of_row = np.repeat(np.arange(batch), r.lengths) if token_to_seq is None else token_to_seq
            given = array.input(of_row.astype(r.ids)) if with_token_to_seq else None
            pykv.gather_and_maybe_dequant_cache(src, dst, table, starts, given, r.rows, op, float(scale), positions)

    if report is None:
        call()
    else:
        with array.reports(f"^{NAMES.get(op, 'gather_and_maybe_dequant_cache')}: {report}"):
            call()
    same_bits(array.numpy(actual), expected)


def dtypes_of(op: str) -> list[str]:
    return [d for d in DTYPES if op not in RECORDS or d != "float32"]


LENGTHS = [5, 0, 33, 1, 0, 0, 64, 17, 0]
ALL = [(op, dtype) for op in OPS for dtype in dtypes_of(op)]


@pytest.mark.parametrize(("op", "dtype"), ALL)
def test_requests(array: Library, op: str, dtype: str) -> None:
    for block_size in (1, 3, 16, 64):
        for with_positions in (False, True):
            r = requests(LENGTHS, blocks=7, block_size=block_size, with_positions=with_positions)
            check(array, op, r, dtype=dtype, block_size=block_size)
            check(array, op, r, dtype=dtype, block_size=block_size, with_token_to_seq=False)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("lengths", [[1], [2, 3], [200], [1] * 300, [0, 0, 7], [3000, 1, 500]])
def test_numbers_of_requests(array: Library, op: str, lengths: list[int]) -> None:
    r = requests(lengths, blocks=7, block_size=16)
    check(array, op, r, with_token_to_seq=False)
    check(array, op, r, with_token_to_seq=True)


@pytest.mark.parametrize("op", OPS)
def test_more_than_caches_hold(array: Library, op: str) -> None:
    """On the CPU results go past them, in lines that rows may share."""
    r = requests([3000, 0, 2111], blocks=7, block_size=16)
    check(array, op, r, entry=(577,))


@pytest.mark.parametrize("op", ["copy", "fp8_e4m3", "fp8_ds_mla"])
def test_many_rows(array: Library, op: str) -> None:
    """More than a GPU takes at once by few rows a block, and by any number."""
    lengths = [(8000, 888), (8000, 8999)] if array.device == "cuda" else [(700, 88)]
    for first, last in lengths:
        check(array, op, requests([first, 0, 1, last], blocks=7, block_size=16), entry=(576,))


@pytest.mark.parametrize("width", [1, 2, 3, 7, 8, 46, 64, 320, 512, 576, 577, 4096, 40000])
@pytest.mark.parametrize("op", ["copy", "auto", "fp8_e4m3", "fp8_e5m2", "int8"])
def test_widths(array: Library, op: str, width: int) -> None:
    for dtype in DTYPES:
        r = requests([5, 20], blocks=3, block_size=8)
        check(array, op, r, dtype=dtype, entry=(width,), blocks=3, block_size=8)


@pytest.mark.parametrize("op", ["copy", "auto", "fp8_e4m3", "int8"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads(array: Library, op: str, dtype: str) -> None:
    """K or V of NHD and HND caches, halves of one allocation."""
    r = requests(LENGTHS, blocks=5, block_size=8)

    def run(entry: tuple[int, ...], **options: Any) -> None:
        check(array, op, r, dtype=dtype, entry=entry, blocks=5, block_size=8, **options)

    run((3, 32))
    run((3, 32), memory=lambda s: (s[0], 2, *s[1:]), take=lambda m: m[:, 1])
    run((3, 32), memory=lambda s: (s[0], s[2], s[1], s[3]), take=lambda m: m.swapaxes(1, 2))
    run((3, 33), memory=lambda s: (s[0], s[2], s[1], s[3]), take=lambda m: m.swapaxes(1, 2))
    run((3, 32), memory_dst=lambda s: (s[1], s[0], s[2]), take_dst=lambda m: m.swapaxes(0, 1))


@pytest.mark.parametrize("op", OPS)
def test_strides(array: Library, op: str) -> None:
    r = requests(LENGTHS, blocks=7, block_size=16)
    for dtype in dtypes_of(op):
        check(array, op, r, dtype=dtype, memory_dst=lambda s: (s[0], s[1] + 16), take_dst=lambda m: m[:, :-16])
        check(array, op, r, dtype=dtype, memory_dst=lambda s: (s[0], s[1] + 3), take_dst=lambda m: m[:, 3:])
        check(array, op, r, dtype=dtype, memory_dst=lambda s: (s[0], s[1], 2), take_dst=lambda m: m[..., 1])
        check(array, op, r, dtype=dtype, memory=lambda s: (s[1], s[0], *s[2:]), take=lambda m: m.swapaxes(0, 1))
        if op not in RECORDS:
            check(array, op, r, dtype=dtype, memory=lambda s: (*s[:2], s[2] + 1), take=lambda m: m[..., 1:])
            check(array, op, r, dtype=dtype, memory=lambda s: (*s, 2), take=lambda m: m[..., 1])


@pytest.mark.parametrize("op", OPS)
def test_64_bit_ids_with_strides(array: Library, op: str) -> None:
    r = requests(LENGTHS, blocks=7, block_size=16, ids=np.int64)
    check(array, op, r)
    wide = np.zeros((len(LENGTHS), 2 * r.table.shape[1]), np.int64)
    wide[:, ::2] = r.table
    r.table = wide[:, ::2]
    check(array, op, r)


@pytest.mark.parametrize("op", OPS)
def test_nothing_to_do(array: Library, op: str) -> None:
    check(array, op, requests([], blocks=7, block_size=16))
    check(array, op, requests([0, 0], blocks=7, block_size=16))
    check(array, op, requests([0, 0], blocks=7, block_size=16), extra_rows=0)
    check(array, op, requests([], blocks=7, block_size=16), extra_rows=0)


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 1e-30, 1e30, 3e38])
@pytest.mark.parametrize("op", ["fp8_e4m3", "fp8_e5m2", "int8"])
def test_every_code(array: Library, op: str, scale: float) -> None:
    codes = np.arange(256, dtype=np.uint8).view(reference.CODES[op]).reshape(2, 1, 128)
    for dtype in DTYPES.values():
        out = array.output(np.zeros((2, 128), dtype))
        arguments = [np.array([[0, 1]], np.int32), np.array([0, 2], np.int32), np.zeros(2, np.int32)]
        pykv.gather_and_maybe_dequant_cache(
            array.output(codes.reshape(2, 1, 128)), out, *map(array.input, arguments), 2, op, float(np.float32(scale))
        )
        with np.errstate(all="ignore"):
            wanted = (codes.astype(np.float32) * np.float32(scale)).astype(dtype)
        same_bits(array.numpy(out), wanted[:, 0])


def test_what_was_written_is_read(array: Library) -> None:
    """Records of 656 bytes through both ops that know them."""
    rng = np.random.default_rng(0)
    dtype = DTYPES["bfloat16"]
    kv_c, k_pe = rng.standard_normal((40, 512)).astype(dtype), rng.standard_normal((40, 64)).astype(dtype)
    cache = array.output(np.zeros((4, 16, 656), np.uint8))
    pykv.concat_and_cache_mla(
        array.input(kv_c), array.input(k_pe), cache, array.input(np.arange(40) + 8), "fp8_ds_mla", 1.0
    )
    out = [array.output(np.zeros((40, 576), dtype)) for _ in range(2)]
    table, ends = array.input(np.arange(4, dtype=np.int32)[None]), array.input(np.array([0, 40], np.int32))
    pykv.gather_and_maybe_dequant_cache(
        cache, out[0], table, ends, None, 40, "fp8_ds_mla", 1.0, array.input(np.array([8], np.int32))
    )
    pykv.cp_gather_and_upconvert_fp8_kv_cache(cache, out[1], table, ends, 1, array.input(np.array([8], np.int32)))
    for rows in map(array.numpy, out):
        np.testing.assert_array_equal(rows[:, 512:].view(np.uint16), k_pe.view(np.uint16))
        error = np.abs(rows[:, :512].astype(np.float32) - kv_c.astype(np.float32)).reshape(40, 4, 128)
        largest = np.abs(kv_c.astype(np.float32)).reshape(40, 4, 128).max(axis=2, keepdims=True)
        assert (error <= 2 * largest / 448 * 16 + 2**-8 * largest).all()
        assert error.max() > 0


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("block", [-1, 7, 2**31 - 1, -(2**31)])
def test_a_block_out_of_range(array: Library, op: str, block: int) -> None:
    r = requests(LENGTHS, blocks=7, block_size=16)
    r.table[2, 1] = block
    check(array, op, r, report=rf"block_table: {block} is out of range \[0, 7\)")
    r.ids, r.table[2, 1] = np.int64, 2**40 + 3
    check(array, op, r, report=rf"block_table: {2**40 + 3} is out of range \[0, 7\)")


@pytest.mark.parametrize("op", [op for op in OPS if op != "upconvert nvfp4"])
@pytest.mark.parametrize("position", [1000, -70, 2**31 - 1, -(2**31)])
def test_positions_beyond_the_block_table(array: Library, op: str, position: int) -> None:
    r = requests(LENGTHS, blocks=7, block_size=16, with_positions=True)
    assert r.positions is not None
    r.positions[6] = position
    check(array, op, r, report=rf"position: -?\d+ is out of range \[0, {r.table.shape[1] * 16}\)")


def test_a_sequence_beyond_the_block_table(array: Library) -> None:
    for op in OPS:
        r = requests(LENGTHS, blocks=7, block_size=16)
        r.table = r.table[:, :3]
        check(array, op, r, report=r"position: \d+ is out of range \[0, 48\)")


@pytest.mark.parametrize("request_id", [-1, 9, 2**31 - 1])
def test_a_request_out_of_range(array: Library, request_id: int) -> None:
    r = requests(LENGTHS, blocks=7, block_size=16)
    of_row = np.repeat(np.arange(9), r.lengths)
    r.lengths[-2] -= 1  # the last row is nobody's
    r.table = r.table.copy()
    of_row[-1] = request_id
    padded = Requests(r.lengths, None, r.table)
    check(
        array, "auto", Tail(padded), token_to_seq=of_row, report=rf"token_to_seq: {request_id} is out of range \[0, 9\)"
    )


@dataclass(init=False)
class Tail(Requests):
    """One more row than the requests have."""

    def __init__(self, r: Requests) -> None:
        super().__init__(r.lengths, r.positions, r.table, r.ids)

    @property
    def rows(self) -> int:
        return int(self.ends[-1]) + 1


def test_rows_of_nobody_stay(array: Library) -> None:
    """token_to_seq is longer than the requests, its tail filled with any of them."""
    for of_tail in (0, 1, 6, 8):
        r = Tail(requests(LENGTHS, blocks=7, block_size=16))
        of_row = np.append(np.repeat(np.arange(9), r.lengths), of_tail)
        check(array, "auto", r, token_to_seq=of_row)
        check(array, "fp8_e4m3", r, with_token_to_seq=False)


@pytest.mark.parametrize("op", ["copy", "auto", "upconvert"])
@pytest.mark.parametrize(
    ("starts", "value", "bound"),
    [
        ([0, 4, 9, 21], 21, 21),  # more rows than there are
        ([0, 9, 4, 20], 9, 5),
        ([-1, 4, 9, 20], -1, 21),
        ([0, 2**40, 9, 20], 2**40, 21),
        ([9, 9, 9, 3], 9, 4),
        ([0, 4, -2, 20], -2, 21),
    ],
)
def test_starts_that_make_no_sense(array: Library, op: str, starts: list[int], value: int, bound: int) -> None:
    """Starts that descend, and outputs that are too small, are reported, and nothing outside is touched."""
    if op == "upconvert":  # the last request ends with the output
        starts, table = [*starts[:3], min(starts[3], 20)], np.zeros((4, 8), np.int64)
        if starts == [0, 4, 9, 20]:
            pytest.skip("its starts say nothing of the end")
        if starts == [9, 9, 9, 3]:
            starts = [9, 9, 9, 3]
        src, memory = array.input(np.zeros((2, 4, 656), np.uint8)), np.full((22, 576), -1, np.float16)
    else:
        table = np.zeros((3, 8), np.int64)
        src, memory = array.input(np.zeros((2, 4, 8), np.float32)), np.full((22, 8), -1, np.float32)
    actual = array.output(memory)
    dst = inputs.view(actual, lambda m: m[1:-1])
    ids = array.input(np.array(starts, np.int64))
    name = "workspace_starts" if op == "upconvert" else "cu_seq_lens"
    message = rf"{name}: {value} is out of range \[0, {bound}\); it was not used"
    with array.reports(message):
        if op == "copy":
            pykv.cp_gather_cache(src, dst, array.input(table), ids, 3)
        elif op == "auto":
            pykv.gather_and_maybe_dequant_cache(src, dst, array.input(table), ids, None, 20, "auto", 1.0)
        else:
            pykv.cp_gather_and_upconvert_fp8_kv_cache(src, dst, array.input(table), ids, 4)
    got = array.numpy(actual)
    assert (got[[0, -1]] == -1).all()


@given(data=st.data())
@settings(max_examples=60)
def test_any_ids(array: Library, data: st.DataObject) -> None:
    """Whatever lies in the arrays of ids: rows are right or untouched, nothing else is touched."""
    number = st.one_of(st.integers(-3, 40), st.integers(-(2**63), 2**63 - 1))
    ids = lambda n: array.input(np.array(data.draw(st.lists(number, min_size=n, max_size=n)), np.int64))  # noqa: E731
    cache = np.arange(1, 5 * 4 * 8 + 1, dtype=np.float32).reshape(5, 4, 8)
    memory = np.full((22, 8), -1, np.float32)
    actual = array.output(memory)
    dst = inputs.view(actual, lambda m: m[1:-1])
    table = inputs.view(ids(12), lambda m: m.reshape(3, 4))
    src = array.input(cache)
    try:
        if data.draw(st.booleans()):
            pykv.cp_gather_cache(src, dst, table, ids(4), 3, ids(3))
        else:
            pykv.gather_and_maybe_dequant_cache(src, dst, table, ids(4), ids(20), 20, "auto", 1.0, ids(3))
        pykv.check_errors()
    except ValueError as error:
        assert "is out of range" in str(error)  # noqa: PT017 - whether there is an error depends on the ids
    got = array.numpy(actual)
    known = {row.tobytes() for row in cache.reshape(-1, 8)} | {memory[0].tobytes()}
    assert all(row.tobytes() in known for row in got)
    assert (got[[0, -1]] == -1).all()


CACHE, ROWS = np.zeros((3, 8, 64), np.float16), np.zeros((5, 64), np.float16)
TABLE, ENDS = np.zeros((2, 2), np.int32), np.zeros(3, np.int32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"src_cache": CACHE[0]}, ValueError, "src_cache: must have 3 to 8 dimensions, got"),
        ({"dst": ROWS[:, :63]}, ValueError, "dst: must have shape .* with entries like those of src_cache"),
        ({"dst": ROWS.astype(np.float32)}, TypeError, "dst: dtype must be that of src_cache, float16, got float32"),
        ({"dst": CACHE}, ValueError, "dst: must have 2 dimensions"),
        ({"block_table": TABLE[:1]}, ValueError, "block_table: must have at least 2 rows, one for each request"),
        ({"block_table": TABLE.astype(np.float32)}, TypeError, "block_table: dtype must be int64 or int32"),
        ({"cu_seq_lens": ENDS[:2]}, ValueError, r"cu_seq_lens: must have at least 3 rows, batch_size \+ 1, got"),
        ({"batch_size": -1}, ValueError, "batch_size: must not be negative, got -1"),
        ({"seq_starts": ENDS[:1]}, ValueError, "seq_starts: must have at least 2 rows"),
        ({"src_cache": np.zeros((3, 0, 64), np.float16)}, ValueError, "src_cache: must have blocks"),
    ],
)  # fmt: skip
def test_errors_of_cp_gather_cache(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"src_cache": CACHE, "dst": ROWS, "block_table": TABLE, "cu_seq_lens": ENDS, "batch_size": 2, **changed}
    with pytest.raises(error, match=f"^cp_gather_cache: {message}"):
        pykv.cp_gather_cache(**given)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"num_tokens": 6}, ValueError, "dst: must have at least 6 rows, num_tokens, got"),
        ({"num_tokens": -2}, ValueError, "num_tokens: must not be negative, got -2"),
        ({"token_to_seq": np.zeros(4, np.int32)}, ValueError, "token_to_seq: must have at least 5 rows, num_tokens"),
        ({"kv_cache_dtype": "fp8"}, TypeError, "src_cache: dtype must be float8_e4m3fn or uint8"),
        ({"dst": ROWS.astype(np.float32)}, TypeError, "src_cache: dtype must be that of the data, float32"),
        ({"dst": ROWS.astype(np.int32)}, TypeError, "dst: dtype must be float32 or float16 or bfloat16"),
        ({"kv_cache_dtype": "fp8_ds_mla", "src_cache": np.zeros((3, 8, 655), np.uint8)}, ValueError,
         r"dst: no fp8_ds_mla record of 655 bytes holds rows of 64 elements"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, TypeError, "src_cache: dtype must be uint8 or"),
        ({"kv_cache_dtype": "fp7"}, ValueError, "kv_cache_dtype: must be one of 'auto'"),
        ({"cu_seq_lens": ENDS[:0]}, ValueError, "cu_seq_lens: must have at least 1 rows"),
    ],
)  # fmt: skip
def test_errors_of_gather_and_maybe_dequant_cache(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {
        "src_cache": CACHE, "dst": ROWS, "block_table": TABLE, "cu_seq_lens": ENDS, "token_to_seq": None,
        "num_tokens": 5, "kv_cache_dtype": "auto", "scale": 1.0, **changed,
    }  # fmt: skip
    with pytest.raises(error, match=f"^gather_and_maybe_dequant_cache: {message}"):
        pykv.gather_and_maybe_dequant_cache(**given)
