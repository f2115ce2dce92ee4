"""Swapping sequences out and in by plain examples, on the CPU, where everything is done at once."""

from __future__ import annotations

import numpy as np
import pytest
from paged_kv_cache.tokens import LAYOUTS, read_tokens, write_tokens

import pykv


def new_cache(num_blocks: int = 8, num_host_blocks: int = 6, layout: str = "NHD", **more) -> pykv.PagedKVCache:
    return pykv.PagedKVCache(2, num_blocks, 4, 3, 8, "float32", layout, num_host_blocks=num_host_blocks, **more)


def fill(kv: pykv.PagedKVCache, seq: int, values: list[int]) -> None:
    write_tokens(kv, kv.append([seq], len(values)), values)


def overwrite(kv: pykv.PagedKVCache) -> None:
    """Fill all blocks that are free."""
    fill(kv, 999, [-1] * 4 * kv.num_free_blocks)
    kv.free([999])


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_there_and_back(layout, library):
    kv = new_cache(layout=layout, like=np if library == "numpy" else pytest.importorskip("torch"))
    fill(kv, 1, list(range(10)))
    fill(kv, 2, [50, 51])
    kv.swap_out([1])
    assert 1 in kv
    assert kv.is_swapped_out(1)
    assert not kv.is_swapped_out(2)
    assert (kv.num_free_blocks, kv.num_free_host_blocks) == (7, 3)
    overwrite(kv)
    kv.swap_in([1])
    assert not kv.is_swapped_out(1)
    assert (kv.num_free_blocks, kv.num_free_host_blocks) == (4, 6)
    assert read_tokens(kv, 1) == list(range(10))
    assert read_tokens(kv, 2) == [50, 51]
    write_tokens(kv, kv.append([1], 3), [10, 11, 12])
    assert read_tokens(kv, 1) == list(range(13))


def test_what_moves_together_stays_shared():
    kv = new_cache()
    fill(kv, 1, list(range(8)))
    kv.fork(1, 2)
    fill(kv, 2, [80, 81])
    kv.swap_out([2, 1])
    assert (kv.num_free_blocks, kv.num_free_host_blocks) == (8, 3)
    overwrite(kv)
    kv.swap_in([1, 2])
    assert (kv.num_free_blocks, kv.num_free_host_blocks) == (5, 6)
    assert read_tokens(kv, 1) == list(range(8))
    assert read_tokens(kv, 2) == [*range(8), 80, 81]
    kv.free([1])
    assert kv.num_free_blocks == 5
    kv.truncate(2, 6)
    fill(kv, 2, [66])
    assert read_tokens(kv, 2) == [0, 1, 2, 3, 4, 5, 66]


def test_blocks_that_others_read_stay_where_they_are():
    kv = new_cache()
    fill(kv, 1, list(range(6)))
    kv.fork(1, 2)
    kv.swap_out([2])
    assert (kv.num_free_blocks, kv.num_free_host_blocks) == (6, 4)
    fill(kv, 1, [60])  # alone in its last block by now
    assert kv.num_free_blocks == 6
    kv.swap_in([2])
    assert (kv.num_free_blocks, kv.num_free_host_blocks) == (4, 6)
    assert read_tokens(kv, 1) == [0, 1, 2, 3, 4, 5, 60]
    assert read_tokens(kv, 2) == [0, 1, 2, 3, 4, 5]


def test_a_full_host_changes_nothing():
    kv = new_cache()
    fill(kv, 1, list(range(12)))
    fill(kv, 2, list(range(100, 116)))
    kv.swap_out([1])
    with pytest.raises(pykv.OutOfBlocks, match=r"^swap_out: 4 host blocks are needed, 3 of 6 are free$"):
        kv.swap_out([2])
    assert not kv.is_swapped_out(2)
    assert (kv.num_free_blocks, kv.num_free_host_blocks) == (4, 3)
    assert read_tokens(kv, 2) == list(range(100, 116))


def test_without_host_blocks_the_option_is_named():
    kv = new_cache(num_host_blocks=0)
    fill(kv, 1, [0])
    with pytest.raises(
        pykv.OutOfBlocks, match=r"^swap_out: 1 host blocks \(num_host_blocks\) are needed, 0 of 0 are free$"
    ):
        kv.swap_out([1])


def test_a_full_device_changes_nothing():
    kv = new_cache()
    fill(kv, 1, list(range(12)))
    kv.swap_out([1])
    fill(kv, 2, [0] * 24)
    with pytest.raises(pykv.OutOfBlocks, match=r"^swap_in: 3 more blocks are needed, 2 of 8 are free$"):
        kv.swap_in([1])
    assert kv.is_swapped_out(1)
    assert (kv.num_free_blocks, kv.num_free_host_blocks) == (2, 3)
    kv.free([2])
    kv.swap_in([1])
    assert read_tokens(kv, 1) == list(range(12))


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_failed_copy_changes_nothing(monkeypatch, direction):
    kv = new_cache()
    fill(kv, 1, list(range(12)))
    if direction == "in":
        kv.swap_out([1])

    def fail(*args, **kwargs):
        raise RuntimeError("no such luck")

    before = kv.num_free_blocks, kv.num_free_host_blocks, kv.is_swapped_out(1)
    swap = kv.swap_out if direction == "out" else kv.swap_in
    with monkeypatch.context() as patch:
        patch.setattr("pykv.paged_kv_cache.swap_blocks_layers", fail)
        with pytest.raises(RuntimeError, match="no such luck"):
            swap([1])
    assert (kv.num_free_blocks, kv.num_free_host_blocks, kv.is_swapped_out(1)) == before
    swap([1])
    if direction == "out":
        kv.swap_in([1])
    assert read_tokens(kv, 1) == list(range(12))


def test_empty_sequences_move_too():
    kv = new_cache(num_host_blocks=0)
    kv.append([1], 0)
    kv.swap_out([1])
    kv.swap_out([])
    assert kv.is_swapped_out(1)
    kv.swap_in([1])
    assert kv.seq_lens([1]).tolist() == [0]


def test_free_takes_sequences_from_both_places():
    kv = new_cache()
    fill(kv, 1, list(range(5)))
    fill(kv, 2, list(range(5)))
    kv.swap_out([1])
    for wrong, text in (([1, 2, 1], "1 is named twice"), ([2, 1, 2], "2 is named twice"), ([1, 2, 7], "unknown .* 7")):
        with pytest.raises(ValueError, match=rf"^free: seq_ids: .*{text}"):
            kv.free(wrong)
        assert 1 in kv
        assert 2 in kv
    kv.free([2, 1])
    assert 1 not in kv
    assert (kv.num_free_blocks, kv.num_free_host_blocks) == (8, 6)


def test_freed_prefixes_are_still_found_and_those_that_come_back_can_be():
    kv = new_cache(prefix_caching=True)
    fill(kv, 1, list(range(8)))
    kv.commit_prefix(1, list(range(8)))
    kv.swap_out([1])
    assert kv.match_prefix(list(range(8))) == 8
    overwrite(kv)
    assert kv.match_prefix(list(range(8))) == 0
    kv.swap_in([1])
    assert kv.match_prefix(list(range(8))) == 0
    kv.commit_prefix(1, list(range(8)))
    assert kv.reuse_prefix(2, list(range(8))) == 8
    assert read_tokens(kv, 2) == list(range(8))
    kv.free([2])
    kv.swap_out([1])
    with pytest.raises(ValueError, match=r"^clear_prefixes: 1 sequences would be found again; free them first$"):
        kv.clear_prefixes()


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda kv: kv.append([2, 1], 1), "append: seq_ids: sequence 1 is swapped out"),
        (lambda kv: kv.block_tables([1]), "block_tables: seq_ids: sequence 1 is swapped out"),
        (lambda kv: kv.seq_lens(1), "seq_lens: seq_ids: sequence 1 is swapped out"),
        (lambda kv: kv.fork(1, 3), "fork: parent: sequence 1 is swapped out"),
        (lambda kv: kv.fork(2, 1), "fork: child: sequence 1 is swapped out"),
        (lambda kv: kv.truncate(1, 1), "truncate: seq_id: sequence 1 is swapped out"),
        (lambda kv: kv.reuse_prefix(1, [1]), "reuse_prefix: seq_id: sequence 1 is swapped out"),
        (lambda kv: kv.commit_prefix(1, [1]), "commit_prefix: seq_id: sequence 1 is swapped out"),
        (lambda kv: kv.swap_out([2, 1]), "swap_out: seq_ids: sequence 1 is swapped out"),
        (lambda kv: kv.swap_out([2, 2]), "swap_out: seq_ids: sequence 2 is named twice"),
        (lambda kv: kv.swap_out([7]), "swap_out: seq_ids: unknown sequence 7"),
        (lambda kv: kv.swap_in([1, 2]), "swap_in: seq_ids: sequence 2 is not swapped out"),
        (lambda kv: kv.swap_in([1, 1]), "swap_in: seq_ids: sequence 1 is named twice"),
        (lambda kv: kv.swap_in([7]), "swap_in: seq_ids: unknown sequence 7"),
    ],
)
def test_call_errors_change_nothing(call, text):
    kv = new_cache(prefix_caching=True)
    fill(kv, 1, list(range(6)))
    fill(kv, 2, list(range(6)))
    kv.swap_out([1])
    with pytest.raises(ValueError, match=f"^{text}$"):
        call(kv)
    assert kv.is_swapped_out(1)
    assert read_tokens(kv, 2) == list(range(6))
    assert not any(seq in kv for seq in (3, 7))
    assert (kv.num_free_blocks, kv.num_free_host_blocks) == (6, 4)


def test_the_size_of_the_host_pool_is_checked():
    with pytest.raises(ValueError, match=r"^PagedKVCache: num_host_blocks: must be between 0 and 2147483647, got -1$"):
        new_cache(num_host_blocks=-1)
