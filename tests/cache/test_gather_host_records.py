"""cp_gather_and_upconvert_fp8_kv_cache of records that lie partly in host memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cache import inputs, reference_mla
from libraries import Library

import pykv

BLOCKS, BLOCK_SIZE, SLOTS, HOST_ROWS = 7, 16, 160, 50
LATENT, ROPE, RECORD = 512, 64, 656


def pinned(array: Library, x: np.ndarray) -> np.ndarray:
    """A copy in host memory that the device can read."""
    if array.device == "cpu":
        return x.copy()
    cupy = pytest.importorskip("cupy")
    memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(max(x.size, 1)), np.uint8, x.size).reshape(x.shape)
    memory[...] = x
    return memory


def records(rng: np.random.Generator, count: int, dtype: np.dtype[Any]) -> np.ndarray:
    latent, rope = rng.standard_normal((count, LATENT)).astype(dtype), inputs.bits(rng, (count, ROPE), dtype)
    packed = [reference_mla.pack_record(c, r) for c, r in zip(latent, rope, strict=True)]
    return np.array(packed, np.uint8).reshape(count, RECORD)


def check(
    array: Library,
    dtype: Any = ml_dtypes.bfloat16,
    *,
    ids: type = np.int32,
    padding: int = 0,
    wrong_host: int | None = None,
    wrong_device: int | None = None,
    report: str = "",
    all_on_device: bool = False,
    pageable: bool = False,
) -> None:
    rng = np.random.default_rng(0)
    dtype = np.dtype(dtype)
    cache = records(rng, BLOCKS * BLOCK_SIZE, dtype).reshape(BLOCKS, BLOCK_SIZE, RECORD)
    host = np.pad(records(rng, 0 if all_on_device else HOST_ROWS, dtype), ((0, 0), (padding, 0)))
    on_device = rng.integers(0, BLOCKS * BLOCK_SIZE, SLOTS)
    in_host = rng.integers(0, HOST_ROWS, SLOTS)
    there = np.full(SLOTS, all_on_device) | (rng.random(SLOTS) < 0.5)
    device_row_ids, host_row_ids = np.where(there, on_device, -1), np.where(there, -(2**31), in_host)
    table, lengths = rng.permutation(SLOTS // BLOCK_SIZE).reshape(2, 5), [70, 37]
    starts, positions = np.array([0, lengths[0]]), np.array([3, 11])

    slots = []
    for request in range(2):
        at = positions[request] + np.arange(lengths[request])
        slots.append(table[request, at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE)
    slots = np.concatenate(slots)
    if wrong_host is not None:
        device_row_ids[slots[5]], host_row_ids[slots[5]] = -7, wrong_host
    if wrong_device is not None:
        device_row_ids[slots[5]] = wrong_device
    expected = inputs.bits(rng, (sum(lengths), LATENT + ROPE), dtype)
    actual = array.output(expected)
    flat = cache.reshape(-1, RECORD)
    for row, slot in enumerate(slots):
        own, other = int(device_row_ids[slot]), int(host_row_ids[slot])
        if own >= len(flat) or (own < 0 and not 0 <= other < HOST_ROWS):
            continue
        record = flat[own] if own >= 0 else host[other, padding:]
        expected[row] = reference_mla.unpack_record(record, LATENT, dtype)

    as_ids = [array.input(x.astype(ids)) for x in (table, starts, positions, host_row_ids, device_row_ids)]
    block_table, starts_in, positions_in, host_ids, device_ids = as_ids
    host_cache = (host if pageable else pinned(array, host))[:, padding:]
    given = array.output(cache), actual, block_table, starts_in, 2, positions_in, host_cache, host_ids, device_ids

    if report:
        with array.reports(f"^cp_gather_and_upconvert_fp8_kv_cache: {report}"):
            pykv.cp_gather_and_upconvert_fp8_kv_cache(*given)
    else:
        pykv.cp_gather_and_upconvert_fp8_kv_cache(*given)
    np.testing.assert_array_equal(array.numpy(actual).view(np.uint16), expected.view(np.uint16))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("ids", [np.int32, np.int64])
@pytest.mark.parametrize("padding", [0, 16, 3])
def test_records_of_both_memories(array: Library, dtype: Any, ids: type, padding: int) -> None:
    check(array, dtype, ids=ids, padding=padding)


def test_no_host_rows(array: Library) -> None:
    check(array, all_on_device=True)


@pytest.mark.parametrize("row", [-1, HOST_ROWS, 2**31 - 1])
def test_host_rows_out_of_range(array: Library, row: int) -> None:
    check(array, wrong_host=row, report=rf"host_row_ids: {row} is out of range \[0, {HOST_ROWS}\)")


@pytest.mark.parametrize("row", [BLOCKS * BLOCK_SIZE, 2**31 - 1])
def test_device_rows_out_of_range(array: Library, row: int) -> None:
    check(array, wrong_device=row, report=rf"device_row_ids: {row} is out of range \[0, {BLOCKS * BLOCK_SIZE}\)")


def test_pageable_memory(array: Library) -> None:
    if array.device == "cpu":
        check(array, pageable=True)
    else:
        with pytest.raises(ValueError, match="host_cache: must lie in pinned host memory"):
            check(array, pageable=True)


CACHE, DST = np.zeros((3, 4, RECORD), np.uint8), np.zeros((5, 576), np.float16)
TABLE, STARTS, MAP = np.zeros((1, 2), np.int32), np.zeros(1, np.int32), np.zeros(12, np.int32)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"host_row_ids": None}, TypeError, "host_cache, host_row_ids, device_row_ids: must be given all or none"),
        ({"host_cache": None}, TypeError, "host_cache, host_row_ids, device_row_ids: must be given all or none"),
        ({"host_cache": np.zeros((2, 655), np.uint8)}, ValueError, "host_cache: dimension 1 must equal record of src"),
        ({"host_cache": np.zeros((2, RECORD), np.float16)}, TypeError, "host_cache: dtype must be uint8 or"),
        ({"host_row_ids": MAP[:11]}, ValueError, r"host_row_ids: must have the shape of device_row_ids, \[12\], got"),
        ({"device_row_ids": MAP.astype(np.float32)}, TypeError, "device_row_ids: dtype must be int64 or int32"),
        ({"device_row_ids": np.zeros(24, np.int32)[::2]}, ValueError, "device_row_ids: must be contiguous"),
        ({"seq_starts": STARTS[:0]}, ValueError, "seq_starts: must have at least 1 rows"),
        ({"workspace_starts": STARTS[:0]}, ValueError, "workspace_starts: must have at least 1 rows"),
    ],
)  # fmt: skip
def test_errors(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {
        "src_cache": CACHE, "dst": DST, "block_table": TABLE, "workspace_starts": STARTS, "batch_size": 1,
        "host_cache": np.zeros((2, RECORD), np.uint8), "host_row_ids": MAP, "device_row_ids": MAP, **changed,
    }  # fmt: skip
    with pytest.raises(error, match=f"^cp_gather_and_upconvert_fp8_kv_cache: {message}"):
        pykv.cp_gather_and_upconvert_fp8_kv_cache(**given)
