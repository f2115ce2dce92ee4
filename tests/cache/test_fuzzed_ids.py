"""Every cache op with ids as they must not be: more than a million slots, blocks, positions and requests in all, most
of them negative, out of range or huge.

Everything that an op writes lies between guard zones.  These must stay as they are, ids in range must have the effect
that they have alone, and the report must name the op, its argument and one of the ids that were out of range.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from cache import reference, reference_indexer, reference_mla
from cache.inputs import DTYPES
from libraries import Library

import pykv

COUNT = 1 << 15  # ids in each array of them
BLOCKS, BLOCK_SIZE = 128, 16
SLOTS = BLOCKS * BLOCK_SIZE
PAGES, PAGE_SIZE = 1024, 2  # of caches that are read, so that each block id of a table is asked for
GUARD, PATTERN = 1 << 16, 0xA5  # bytes on either side
F16 = DTYPES["float16"]
Ids = type[np.int32] | type[np.int64]


@pytest.fixture
def library(array: Library) -> Library:
    if array.name not in ("numpy", "cupy"):
        pytest.skip("one library for each device is enough")
    return array


ids_of_both_kinds = pytest.mark.parametrize("ids", [np.int64, np.int32])


class Guarded:
    """An array in the middle of a larger memory, and what that memory should hold after the call."""

    def __init__(self, array: Library, body: np.ndarray) -> None:
        guard = GUARD // body.itemsize
        self.array = array
        self.wanted_memory = np.full(2 * GUARD + body.nbytes, PATTERN, np.uint8).view(body.dtype)
        self.wanted = self.wanted_memory[guard : guard + body.size].reshape(body.shape)
        self.wanted[...] = body
        self.memory = array.output(self.wanted_memory)
        self.view = self.memory[guard : guard + body.size].reshape(body.shape)

    def bytes_now(self) -> np.ndarray:
        """Of the array itself; the guard zones are as they were."""
        got = self.array.numpy(self.memory).view(np.uint8)
        assert (got[:GUARD] == PATTERN).all(), "bytes before the array were written"
        assert (got[-GUARD:] == PATTERN).all(), "bytes behind the array were written"
        return got[GUARD:-GUARD]

    def check(self) -> None:
        np.testing.assert_array_equal(self.bytes_now(), self.wanted.reshape(-1).view(np.uint8))


def wild(rng: np.random.Generator, n: int, bound: int, ids: Ids) -> np.ndarray:
    """Ids outside [0, bound): near its ends, at those of the integers' own range, anywhere."""
    info = np.iinfo(ids)
    edges = [info.min, info.min + 1, info.max, info.max - 1, bound, 2**31 - 1, -(2**31)]
    edges += [2**31, 2**32, 2**32 + 1, 2**40 + 3, 2**62, -(2**32)] if ids is np.int64 else []
    kinds = [
        rng.integers(-4, 0, n),
        bound + rng.integers(0, 5, n),
        rng.choice(np.array(edges, np.int64), n),
        rng.integers(info.min, info.max, n, np.int64, endpoint=True),
    ]
    values = np.choose(rng.integers(0, len(kinds), n), kinds)
    values[(values >= 0) & (values < bound)] = -1
    return values.astype(ids)


def among_wild(rng: np.random.Generator, valid: np.ndarray, bound: int, ids: Ids, n: int = COUNT) -> np.ndarray:
    values = wild(rng, n, bound, ids)
    values[rng.permutation(n)[: len(valid)]] = valid
    return values


def all_slots(rng: np.random.Generator, ids: Ids) -> np.ndarray:
    """Each slot once: of tokens with one slot any may win."""
    return among_wild(rng, rng.permutation(SLOTS), SLOTS, ids)


def expect_report(call: Callable[[], None], op: str, **out_of_range: tuple[np.ndarray, int]) -> None:
    """By argument: its ids that must be reported, and their bound."""
    with pytest.raises(ValueError, match="is out of range") as info:  # noqa: PT012 - on a GPU the second one raises
        call()
        pykv.check_errors()
    found = re.fullmatch(rf"{op}: (\w+): (-?\d+) is out of range \[0, (\d+)\); it was not used", str(info.value))
    assert found, str(info.value)
    values, bound = out_of_range[found[1]]
    assert (int(found[3]), int(found[2]) in set(values.tolist())) == (bound, True), str(info.value)


def beyond(slots: np.ndarray, bound: int = SLOTS) -> tuple[np.ndarray, int]:
    """What is reported of a slot mapping: negative ones are padding."""
    return slots[slots >= bound].astype(np.int64), bound


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32).astype(F16)


@ids_of_both_kinds
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("op", ["reshape_and_cache", "reshape_and_cache_flash"])
def test_keys_and_values(library: Library, op: str, kind: str, ids: Ids) -> None:
    rng = np.random.default_rng(0)
    x = 8 if kind == "auto" else 16
    shapes = [(BLOCKS, BLOCK_SIZE, 2, 16)] * 2
    if op == "reshape_and_cache":
        shapes = [(BLOCKS, 2, 16 // x, BLOCK_SIZE, x), (BLOCKS, 2, 16, BLOCK_SIZE)]
    caches = [Guarded(library, np.zeros(shape, F16 if kind == "auto" else np.uint8)) for shape in shapes]
    key, value, slots = normal(rng, COUNT, 2, 16), normal(rng, COUNT, 2, 16), all_slots(rng, ids)
    getattr(reference, op)(key, value, *(c.wanted for c in caches), slots, kind)
    given = library.input(key), library.input(value), *(c.view for c in caches), library.input(slots)
    expect_report(lambda: getattr(pykv, op)(*given, kind), op, slot_mapping=beyond(slots))
    for cache in caches:
        cache.check()


@ids_of_both_kinds
@pytest.mark.parametrize("is_neox", [False, True])
def test_rotated_keys(library: Library, is_neox: bool, ids: Ids) -> None:
    """Rotations by nothing that double some rows: exact in any order of arithmetic."""
    rng = np.random.default_rng(1)
    tokens = [Guarded(library, normal(rng, COUNT, heads, 16)) for heads in (3, 2, 2)]
    caches = [Guarded(library, np.zeros((BLOCKS, BLOCK_SIZE, 2, 16), F16)) for _ in range(2)]
    slots, positions = all_slots(rng, ids), among_wild(rng, rng.integers(0, 64, COUNT // 2), 64, ids)
    cos_sin = np.repeat([1, 0], 8) * np.exp2(np.arange(64) % 3)[:, None]
    rotated = (positions >= 0) & (positions < 64)
    for x in tokens[:2]:
        x.wanted[rotated] *= cos_sin[positions[rotated], :1, None].astype(F16)
    key, value = (x.wanted for x in tokens[1:])
    reference.reshape_and_cache_flash(key, value, *(c.wanted for c in caches), slots)
    expect_report(
        lambda: pykv.rotary_and_cache(
            library.input(positions), *(x.view for x in tokens), library.input(cos_sin.astype(F16)), is_neox,
            *(c.view for c in caches), library.input(slots),
        ),
        "rotary_and_cache",
        slot_mapping=beyond(slots),
        positions=(positions[~rotated], 64),
    )  # fmt: skip
    for x in tokens + caches:
        x.check()


@ids_of_both_kinds
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "fp8_ds_mla"])
def test_latents(library: Library, kind: str, ids: Ids) -> None:
    rng = np.random.default_rng(2)
    width = reference_mla.record_bytes(128, 8) if kind == "fp8_ds_mla" else 136
    cache = Guarded(library, np.zeros((BLOCKS, BLOCK_SIZE, width), F16 if kind == "auto" else np.uint8))
    kv_c, k_pe, slots = normal(rng, COUNT, 128), normal(rng, COUNT, 8), all_slots(rng, ids)
    reference_mla.concat_and_cache_mla(kv_c, k_pe, cache.wanted, slots, kind)
    given = library.input(kv_c), library.input(k_pe), cache.view, library.input(slots), kind
    expect_report(lambda: pykv.concat_and_cache_mla(*given), "concat_and_cache_mla", slot_mapping=beyond(slots))
    cache.check()


@ids_of_both_kinds
@pytest.mark.parametrize("rotate_padded", [False, True])
@pytest.mark.parametrize("kind", ["auto", "fp8_e4m3", "fp8_ds_mla"])
def test_rotated_keys_and_latents(library: Library, kind: str, rotate_padded: bool, ids: Ids) -> None:
    """Rotations as above; a token without a place in the cache is not rotated, unless that is asked for."""
    rng = np.random.default_rng(4)
    width = reference_mla.record_bytes(128, 16) if kind == "fp8_ds_mla" else 144
    cache = Guarded(library, np.zeros((BLOCKS, BLOCK_SIZE, width), F16 if kind == "auto" else np.uint8))
    q_pe, k_pe = (Guarded(library, normal(rng, COUNT, heads, 16)) for heads in (3, 1))
    kv_c, slots = normal(rng, COUNT, 128), all_slots(rng, ids)
    positions = among_wild(rng, rng.integers(0, 64, COUNT // 2), 64, ids)
    cos_sin = np.repeat([1, 0], 8) * np.exp2(np.arange(64) % 3)[:, None]
    known = (positions >= 0) & (positions < 64)
    cached = (slots >= 0) & (slots < SLOTS)
    rotated = known & (cached | rotate_padded)
    for x in (q_pe, k_pe):
        x.wanted[rotated] *= cos_sin[positions[rotated], :1, None].astype(F16)
    reference_mla.concat_and_cache_mla(kv_c, k_pe.wanted[:, 0], cache.wanted, slots, kind)
    expect_report(
        lambda: pykv.concat_and_cache_mla_rope_fused(
            library.input(positions), q_pe.view, k_pe.view[:, 0], library.input(kv_c),
            library.input(cos_sin.astype(F16)), True, library.input(slots), cache.view, kind, 1.0, False, rotate_padded,
        ),
        "concat_and_cache_mla_rope_fused",
        slot_mapping=beyond(slots),
        positions=(positions[~known], 64),
    )  # fmt: skip
    for array in (q_pe, k_pe, cache):
        array.check()


@ids_of_both_kinds
@pytest.mark.parametrize("group", [32, 20])
def test_keys_of_the_indexer(library: Library, group: int, ids: Ids) -> None:
    rng = np.random.default_rng(3)
    cache = Guarded(library, np.zeros((BLOCKS, BLOCK_SIZE, 2 * group + 8), np.uint8))
    k, slots = normal(rng, COUNT, 2 * group), all_slots(rng, ids)
    reference_indexer.indexer_k_quant_and_cache(k, cache.wanted, slots, group, "ue8m0")
    given = library.input(k), cache.view, library.input(slots), group, "ue8m0"
    name = "indexer_k_quant_and_cache"
    expect_report(lambda: pykv.indexer_k_quant_and_cache(*given), name, slot_mapping=beyond(slots))
    cache.check()


@dataclass
class Requests:
    """Rows of requests, one after another; their block table, with blocks among wild ids."""

    starts: np.ndarray  # [num_requests + 1]
    table: np.ndarray
    positions: np.ndarray | None = None

    @property
    def rows(self) -> int:
        return int(self.starts[-1])

    def places(self, request: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Rows that get something, their blocks and offsets; and by argument the ids that are to be reported."""
        count, width = self.table.shape
        row = np.arange(self.rows)
        if request is None:
            request = np.repeat(np.arange(count), np.diff(self.starts))
        known = (request >= 0) & (request < count)
        wrong = {"token_to_seq": (request[~known], count)}
        row, request = row[known], request[known]
        own = (row >= self.starts[request]) & (row < self.starts[request + 1])
        row, request = row[own], request[own]
        position = row - self.starts[request]
        if self.positions is not None:
            position += self.positions[request]  # it may wrap, as it does there
        inside = (position >= 0) & (position < width * PAGE_SIZE)
        wrong["position"] = position[~inside], width * PAGE_SIZE
        row, request, position = row[inside], request[inside], position[inside]
        block = self.table[request, position // PAGE_SIZE].astype(np.int64)
        there = (block >= 0) & (block < PAGES)
        wrong["block_table"] = block[~there], PAGES
        return row[there], block[there], position[there] % PAGE_SIZE, wrong


def long_requests(rng: np.random.Generator, ids: Ids) -> Requests:
    """All tokens of all blocks, one request empty."""
    table = among_wild(rng, rng.integers(0, PAGES, 2000), PAGES, ids).reshape(-1, 512)
    lengths = np.full(len(table), 512 * PAGE_SIZE)
    lengths[5] = 0
    return Requests(np.concatenate([[0], np.cumsum(lengths)]).astype(ids), table)


def short_requests(rng: np.random.Generator, ids: Ids) -> Requests:
    """Of one row each, at any position."""
    table = among_wild(rng, rng.integers(0, PAGES, COUNT), PAGES, ids, 2 * COUNT).reshape(COUNT, 2)
    positions = among_wild(rng, rng.integers(0, 2 * PAGE_SIZE, COUNT // 4), 2 * PAGE_SIZE, ids)
    return Requests(np.arange(COUNT + 1).astype(ids), table, positions)


KINDS = ["copy", "auto", "fp8_e4m3", "fp8_ds_mla", "upconvert", "indexer"]
NAMES = {
    "copy": "cp_gather_cache",
    "upconvert": "cp_gather_and_upconvert_fp8_kv_cache",
    "indexer": "cp_gather_indexer_k_quant_cache",
}


class Gather:
    """A cache without any two tokens alike, outputs for so many rows, and the call."""

    def __init__(self, library: Library, kind: str, rows: int) -> None:
        rng = np.random.default_rng(5)
        self.library, self.kind, self.name = library, kind, NAMES.get(kind, "gather_and_maybe_dequant_cache")
        width = 136 if kind in ("fp8_ds_mla", "upconvert") else 32
        tokens = normal(rng, PAGES, PAGE_SIZE, width)
        if width == 136:
            records = [reference_mla.pack_record(x[:128], x[128:]) for x in tokens.reshape(-1, width)]
            self.cache = np.array(records).reshape(PAGES, PAGE_SIZE, -1)
            unpacked = [reference_mla.unpack_record(x, 128, F16) for x in records]
            self.entries = [np.array(unpacked).reshape(PAGES, PAGE_SIZE, -1)]
        elif kind == "indexer":
            self.cache = rng.integers(0, 256, (PAGES, PAGE_SIZE, 40), np.uint8)
            values, scales = reference_indexer.planes(self.cache, 32, 2)
            self.entries = [values, scales.reshape(PAGES, PAGE_SIZE, 8)]
        elif kind == "fp8_e4m3":
            self.cache = reference.quantise(tokens, 1.0, kind)
            self.entries = [self.cache.view(reference.FP8[kind]).astype(F16)]
        else:
            self.cache, self.entries = tokens, [tokens]
        self.out = [Guarded(library, np.full((rows, e.shape[-1]), 99, e.dtype)) for e in self.entries]

    def call(self, r: Requests, token_to_seq: np.ndarray | None = None) -> None:
        given = [None if x is None else self.library.input(x) for x in (r.table, r.starts, token_to_seq, r.positions)]
        table, starts, of_row, positions = given
        cache, out, count = self.library.input(self.cache), [x.view for x in self.out], len(r.table)
        match self.kind:
            case "copy":
                pykv.cp_gather_cache(cache, *out, table, starts, count, positions)
            case "upconvert":
                pykv.cp_gather_and_upconvert_fp8_kv_cache(cache, *out, table, starts, count, positions)
            case "indexer":
                pykv.cp_gather_indexer_k_quant_cache(cache, *out, table, starts, positions)
            case _:
                pykv.gather_and_maybe_dequant_cache(
                    cache, *out, table, starts, of_row, out[0].shape[0], self.kind, 1.0, positions
                )

    def check(self, r: Requests, token_to_seq: np.ndarray | None = None) -> None:
        row, block, offset, wrong = r.places(token_to_seq)
        assert len(row) > 500
        for out, entries in zip(self.out, self.entries, strict=True):
            out.wanted[row] = entries[block, offset]
        expect_report(lambda: self.call(r, token_to_seq), self.name, **wrong)
        for out in self.out:
            out.check()

    def check_rows_are_known(self) -> None:
        """Each row is as it was, or that of some token."""
        for out, entries in zip(self.out, self.entries, strict=True):
            size = entries.shape[-1] * entries.itemsize
            rows = np.unique(out.bytes_now().view(f"V{size}"))
            known = {x.tobytes() for x in entries.reshape(-1, entries.shape[-1])} | {out.wanted[0].tobytes()}
            assert all(row.tobytes() in known for row in rows)


@ids_of_both_kinds
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_to_read(library: Library, kind: str, ids: Ids) -> None:
    r = long_requests(np.random.default_rng(6), ids)
    Gather(library, kind, r.rows).check(r)


@ids_of_both_kinds
@pytest.mark.parametrize("kind", KINDS)
def test_positions_to_read(library: Library, kind: str, ids: Ids) -> None:
    r = short_requests(np.random.default_rng(7), ids)
    Gather(library, kind, r.rows).check(r)


@ids_of_both_kinds
@pytest.mark.parametrize("kind", ["auto", "fp8_ds_mla"])
def test_requests_of_rows(library: Library, kind: str, ids: Ids) -> None:
    rng = np.random.default_rng(8)
    r = long_requests(rng, ids)
    own = np.repeat(np.arange(len(r.table)), np.diff(r.starts))
    of_row = np.where(rng.random(r.rows) < 0.3, own, wild(rng, r.rows, len(r.table), ids)).astype(ids)
    others = rng.random(r.rows) < 0.1
    of_row[others] = rng.integers(0, len(r.table), r.rows)[others]
    Gather(library, kind, r.rows).check(r, of_row)


@ids_of_both_kinds
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_wild_ids(library: Library, kind: str, ids: Ids) -> None:
    """Where requests begin and end is wild too: whatever comes out, it comes from the cache, and the guards hold."""
    for seed, count in enumerate((1, 1000, COUNT)):
        rng = np.random.default_rng(seed)
        starts = among_wild(rng, rng.integers(0, 3000, count // 2), 3000, ids, count + 1)
        table = among_wild(rng, rng.integers(0, PAGES, count), PAGES, ids, 2 * count).reshape(count, 2)
        positions = among_wild(rng, rng.integers(0, 9, count // 2), 4, ids, count)
        gather = Gather(library, kind, 3000)
        try:
            gather.call(Requests(starts, table, positions))
            pykv.check_errors()
        except ValueError as error:
            assert re.search(rf"^{gather.name}: \w+: -?\d+ is out of range", str(error))  # noqa: PT017 - or there is none
        gather.check_rows_are_known()


def block_pairs(rng: np.random.Generator, blocks: int, ids: Ids) -> tuple[np.ndarray, np.ndarray]:
    """Rows (from, to) of which few are in range, none of these touching another; and which they are."""
    half = blocks // 2
    pairs = np.stack([wild(rng, COUNT, blocks, ids) for _ in range(2)], 1)
    valid = rng.permutation(COUNT)[: 2 * half]
    order = rng.permutation(blocks)
    pairs[valid[:half]] = order[: 2 * half].reshape(half, 2)
    pairs[valid[half:], rng.integers(0, 2, half)] = rng.integers(0, blocks, half)  # one of the two
    return pairs, valid[:half]


def expect_refusal(call: Callable[[], None], op: str, pairs: np.ndarray, blocks: int) -> None:
    """A mapping on the host: its first row out of range is named, and nothing is done."""
    row, column = np.argwhere((pairs < 0) | (pairs >= blocks))[0]
    side, block = ("source", "destination")[column], pairs[row, column]
    message = rf"^{op}: block_mapping: row {row}: {side} block {block} is out of range \[0, {blocks}\)$"
    with pytest.raises(ValueError, match=message):
        call()


@ids_of_both_kinds
@pytest.mark.parametrize("op", ["copy_blocks", "copy_blocks_mla"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_blocks_to_copy(library: Library, where: str, op: str, ids: Ids) -> None:
    if where == "device" and library.device == "cpu":
        pytest.skip("needs a device")
    rng = np.random.default_rng(9)
    caches = [Guarded(library, normal(rng, BLOCKS, BLOCK_SIZE, 24)) for _ in range(2)]
    pairs, valid = block_pairs(rng, BLOCKS, ids)
    lists = [[c.view] for c in caches] if op == "copy_blocks" else [[c.view for c in caches]]
    call = lambda mapping: getattr(pykv, op)(*lists, mapping)  # noqa: E731
    if where == "host":
        expect_refusal(lambda: call(pairs), op, pairs, BLOCKS)
        for cache in caches:
            cache.check()
        call(pairs[valid])
    else:
        wrong = pairs[(pairs < 0) | (pairs >= BLOCKS)]
        expect_report(lambda: call(library.input(pairs)), op, block_mapping=(wrong, BLOCKS))
    reference.copy_blocks([c.wanted for c in caches], pairs[valid])
    for cache in caches:
        cache.check()


@ids_of_both_kinds
@pytest.mark.parametrize("sides", [("library", "library"), ("library", "host"), ("host", "library")], ids="-".join)
def test_blocks_to_swap(library: Library, sides: tuple[str, str], ids: Ids) -> None:
    from libraries import Numpy

    rng = np.random.default_rng(10)
    kinds = {"library": library, "host": Numpy()}
    src, dst = (Guarded(kinds[side], rng.integers(0, 256, (SLOTS, 48), np.uint8)) for side in sides)
    pairs, valid = block_pairs(rng, SLOTS, ids)
    for op, given in (
        ("swap_blocks", (src.view, dst.view)),
        ("swap_blocks_layers", ([src.view], [dst.view])),
    ):
        call = lambda mapping, op=op, given=given: getattr(pykv, op)(*given, 48, mapping)  # noqa: E731
        expect_refusal(lambda call=call: call(pairs), op, pairs, SLOTS)
        dst.check()
        call(pairs[valid])
        reference.swap_blocks(src.wanted.reshape(-1), dst.wanted.reshape(-1), 48, pairs[valid])
        dst.check()
        src.check()
