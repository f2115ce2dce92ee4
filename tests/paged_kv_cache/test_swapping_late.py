"""Who has to wait for copies under way does, and nobody else: plain examples on a stream as late as can be."""

from __future__ import annotations

import pytest
from paged_kv_cache.late_copies import copy_late
from paged_kv_cache.tokens import read_tokens, write_tokens

import pykv


@pytest.fixture
def kv():
    return pykv.PagedKVCache(2, 8, 4, 3, 8, "float32", num_host_blocks=8)


def fill(kv, seq, values):
    write_tokens(kv, kv.append([seq], len(values)), values)


def test_blocks_under_way_are_taken_last(kv):
    side = copy_late(kv)
    fill(kv, 1, list(range(8)))
    kv.swap_out([1])
    fill(kv, 2, [-1] * 24)  # the other six
    assert len(side.waiting) == 1
    fill(kv, 3, [-1])  # one of those that are being read
    assert len(side.waiting) == 0
    kv.free([2])
    kv.swap_in([1])
    assert read_tokens(kv, 1) == list(range(8))


def test_others_do_not_wait(kv):
    side = copy_late(kv)
    fill(kv, 1, list(range(8)))
    fill(kv, 2, [1, 2])
    kv.swap_out([1])
    fill(kv, 2, [3, 4, 5])
    assert read_tokens(kv, 2) == [1, 2, 3, 4, 5]
    kv.swap_in([1])
    fill(kv, 2, [6])
    kv.fork(1, 3)
    kv.truncate(1, 5)
    assert len(side.waiting) == 2
    assert read_tokens(kv, 3) == list(range(8))
    assert len(side.waiting) == 0


def test_a_copy_on_write_waits_for_what_it_reads(kv):
    side = copy_late(kv)
    fill(kv, 1, list(range(6)))
    kv.fork(1, 2)
    kv.swap_out([1, 2])
    kv.swap_in([1, 2])
    fill(kv, 2, [60])
    assert len(side.waiting) == 0
    assert read_tokens(kv, 1) == list(range(6))
    assert read_tokens(kv, 2) == [0, 1, 2, 3, 4, 5, 60]


def test_a_last_block_that_is_under_way_is_not_written(kv):
    copy_late(kv)
    fill(kv, 1, list(range(6)))
    kv.swap_out([1])
    kv.swap_in([1])
    fill(kv, 1, [60])
    assert read_tokens(kv, 1) == [0, 1, 2, 3, 4, 5, 60]


def test_blocks_of_a_sequence_that_went_before_it_had_come(kv):
    copy_late(kv)
    fill(kv, 1, list(range(8)))
    kv.swap_out([1])
    kv.swap_in([1])
    kv.free([1])
    fill(kv, 2, list(range(100, 132)))  # the copies must not come after this
    assert read_tokens(kv, 2) == list(range(100, 132))


def test_out_again_before_it_had_come(kv):
    side = copy_late(kv)
    fill(kv, 1, list(range(8)))
    for _ in range(3):
        kv.swap_out([1])
        kv.swap_in([1])
    assert len(side.waiting) == 6
    assert read_tokens(kv, 1) == list(range(8))


def test_files_wait_too(kv, tmp_path):
    copy_late(kv)
    fill(kv, 1, list(range(8)))
    kv.swap_out([1])
    kv.swap_in([1])
    kv.save(tmp_path / "a", [1])
    kv.swap_out([1])
    fill(kv, 2, [-1] * 24)
    kv.load(tmp_path / "a", [3])  # into the blocks that are being read
    assert read_tokens(kv, 3) == list(range(8))
    kv.free([2])
    kv.swap_in([1])
    assert read_tokens(kv, 1) == list(range(8))


def test_a_copy_that_fails_half_way_is_waited_for(kv):
    side = copy_late(kv)
    fill(kv, 1, list(range(8)))
    copy = kv._copy

    def fail(*arguments):
        copy(*arguments)
        raise RuntimeError("no such luck")

    kv._copy = fail
    with pytest.raises(RuntimeError, match="no such luck"):
        kv.swap_out([1])
    kv._copy = copy
    assert not kv.is_swapped_out(1)
    assert read_tokens(kv, 1) == list(range(8))
    assert len(side.waiting) == 0
