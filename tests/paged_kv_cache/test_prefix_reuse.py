"""Prefix reuse by plain examples."""

from __future__ import annotations

import numpy as np
import pytest
from paged_kv_cache.tokens import read_tokens, write_tokens

import pykv


def new_cache(num_blocks: int = 8, block_size: int = 4) -> pykv.PagedKVCache:
    return pykv.PagedKVCache(2, num_blocks, block_size, 3, 8, "float32", prefix_caching=True)


def fill(kv: pykv.PagedKVCache, seq: int, tokens: list[int]) -> None:
    """A sequence of these tokens, computed from where the cache does not hold it yet."""
    have = kv.reuse_prefix(seq, tokens)
    write_tokens(kv, kv.append([seq], len(tokens) - have), tokens[have:])
    kv.commit_prefix(seq, tokens)


def test_a_prefix_is_shared_with_a_living_sequence():
    kv = new_cache()
    fill(kv, 1, list(range(10)))
    assert kv.match_prefix([0, 1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8  # the third block is not full
    assert kv.match_prefix([0, 1, 2, 3, 4, 5, 99, 7]) == 4
    assert kv.match_prefix([4, 5, 6, 7]) == 0  # the same tokens after nothing are another prefix
    assert kv.match_prefix([0, 1, 2]) == kv.match_prefix([]) == 0
    assert kv.reuse_prefix(2, [0, 1, 2, 3, 4, 5, 6, 7, 50]) == 8
    assert kv.seq_lens([2]).tolist() == [8]
    assert kv.block_tables([1])[0, :2].tolist() == kv.block_tables([2])[0].tolist()
    assert kv.num_free_blocks == 5
    write_tokens(kv, kv.append([2], 1), [50])
    assert read_tokens(kv, 2) == [0, 1, 2, 3, 4, 5, 6, 7, 50]
    assert read_tokens(kv, 1) == list(range(10))


def test_a_prefix_outlives_its_sequence():
    kv = new_cache()
    fill(kv, 1, list(range(8)))
    kv.free([1])
    assert kv.num_free_blocks == 8
    assert kv.num_cached_blocks == 2
    assert kv.reuse_prefix(2, list(range(9))) == 8
    assert kv.num_free_blocks == 6
    assert read_tokens(kv, 2) == list(range(8))


def test_what_is_not_known_begins_empty():
    kv = new_cache()
    assert kv.reuse_prefix(1, [7] * 9) == 0
    assert 1 in kv
    assert kv.seq_lens([1]).tolist() == [0]


def test_the_least_recently_used_goes_first_and_from_its_end():
    kv = new_cache(num_blocks=6)
    fill(kv, 1, list(range(8)))
    fill(kv, 2, list(range(100, 108)))
    kv.free([1])
    kv.free([2])
    assert kv.reuse_prefix(3, list(range(8))) == 8  # used again: now 2 is older
    kv.free([3])
    kv.append([4], 9)  # two nameless blocks, and one of 2
    assert kv.match_prefix(list(range(100, 108))) == 4
    assert kv.match_prefix(list(range(8))) == 8
    kv.append([4], 8)  # the other one of 2, and one of 1
    assert kv.match_prefix(list(range(100, 108))) == 0
    assert kv.match_prefix(list(range(8))) == 4
    assert kv.prefix_stats.evicted_blocks == 3
    assert kv.num_cached_blocks == kv.num_free_blocks == 1


def test_cached_blocks_are_free_blocks():
    kv = new_cache()
    fill(kv, 1, list(range(32)))
    kv.free([1])
    with pytest.raises(pykv.OutOfBlocks):
        kv.append([2], 33)
    assert kv.match_prefix(list(range(32))) == 32
    assert sorted(kv.append([2], 32).tolist()) == list(range(32))
    assert kv.num_cached_blocks == 0


def test_writing_into_a_block_takes_its_name_away():
    kv = new_cache()
    fill(kv, 1, list(range(8)))
    kv.truncate(1, 6)
    assert kv.match_prefix(list(range(8))) == 8  # nobody has written there yet
    write_tokens(kv, kv.append([1], 2), [60, 70])
    assert kv.match_prefix(list(range(8))) == 4
    kv.commit_prefix(1, [0, 1, 2, 3, 4, 5, 60, 70])
    assert kv.match_prefix([0, 1, 2, 3, 4, 5, 60, 70]) == 8


def test_a_copy_on_write_leaves_the_name_with_the_original():
    kv = new_cache()
    fill(kv, 1, list(range(8)))
    kv.fork(1, 2)
    kv.truncate(2, 6)
    write_tokens(kv, kv.append([2], 2), [60, 70])
    kv.commit_prefix(2, [0, 1, 2, 3, 4, 5, 60, 70])
    assert kv.reuse_prefix(3, list(range(8))) == 8
    assert kv.reuse_prefix(4, [0, 1, 2, 3, 4, 5, 60, 70]) == 8
    assert read_tokens(kv, 3) == list(range(8))
    assert read_tokens(kv, 4) == [0, 1, 2, 3, 4, 5, 60, 70]


def test_a_sequence_may_say_more_each_time_it_has_grown():
    kv = new_cache()
    tokens = np.arange(20)
    for length in range(1, 14):
        kv.append([1], 1)
        kv.commit_prefix(1, tokens)  # more than the sequence holds: the rest is ignored
        assert kv.match_prefix(tokens) == length // 4 * 4
    kv.fork(1, 2)
    kv.append([2], 3)
    kv.commit_prefix(2, tokens)
    assert kv.match_prefix(tokens) == 16


def test_of_two_blocks_with_the_same_content_one_is_found():
    kv = new_cache()
    kv.append([1, 2], 4)
    for seq in (1, 2):
        kv.commit_prefix(seq, [5, 6, 7, 8])
    kv.reuse_prefix(3, [5, 6, 7, 8])
    assert kv.block_tables([3]).tolist() == kv.block_tables([1]).tolist()
    kv.free([1, 2, 3])
    assert kv.num_free_blocks == 8
    assert kv.num_cached_blocks == 1


def test_of_two_blocks_with_the_same_content_the_other_is_found_when_one_goes():
    kv = new_cache(num_blocks=6)
    tokens = list(range(8))
    for seq in (0, 1):  # both came at once: neither could begin with the other's blocks
        write_tokens(kv, kv.append([seq], 8), tokens)
    for seq in (0, 1):
        kv.commit_prefix(seq, tokens)
    kv.free([0])
    kv.append([2], 16)
    assert kv.prefix_stats.evicted_blocks == 2
    assert kv.match_prefix(tokens) == 8
    kv.free([1])
    assert kv.num_cached_blocks == 2
    assert kv.reuse_prefix(3, tokens) == 8
    assert read_tokens(kv, 3) == tokens
    kv.truncate(3, 7)
    kv.append([3], 1)
    assert kv.match_prefix(tokens) == 4


def test_of_two_blocks_with_the_same_content_the_one_with_readers_is_shared():
    kv = new_cache()
    kv.append([1, 2], 4)
    for seq in (1, 2):
        kv.commit_prefix(seq, [5, 6, 7, 8])
    table = kv.block_tables([2]).tolist()
    kv.free([1])
    kv.reuse_prefix(3, [5, 6, 7, 8])
    assert kv.block_tables([3]).tolist() == table
    assert kv.num_free_blocks == 7


SALTS = [None, "", "a", b"", b"a", 0, 1, -1, 97, 2**70, "1", b"1", "\udc80"]


def test_a_salt_is_part_of_the_name():
    kv = new_cache(num_blocks=4 * len(SALTS))
    tokens = list(range(8))
    for i, salt in enumerate(SALTS):
        assert kv.match_prefix(tokens, salt=salt) == 0
        assert kv.reuse_prefix(i, tokens, salt=salt) == 0
        write_tokens(kv, kv.append([i], 8), [100 * i] * 8)
        kv.commit_prefix(i, tokens[:4], salt=salt)
        kv.commit_prefix(i, tokens, salt=salt)
    for i, salt in enumerate(SALTS):
        assert kv.reuse_prefix(1000 + i, [*tokens, 8], salt=salt) == 8
        assert read_tokens(kv, 1000 + i) == [100 * i] * 8
    assert kv.reuse_prefix(2000, tokens, salt=np.int64(97)) == 8
    assert read_tokens(kv, 2000) == read_tokens(kv, SALTS.index(97))


def test_a_sequence_has_one_salt():
    kv = new_cache()
    kv.reuse_prefix(1, list(range(8)), salt="a")  # nothing is found, and yet
    kv.append([1], 8)
    for salt in (None, "b", b"a"):
        with pytest.raises(ValueError, match=r"^commit_prefix: salt: sequence 1 began with another one$"):
            kv.commit_prefix(1, list(range(8)), salt=salt)
    assert kv.num_cached_blocks == 0
    kv.commit_prefix(1, list(range(8)), salt="a")
    kv.fork(1, 2)
    kv.truncate(2, 3)
    with pytest.raises(ValueError, match=r"sequence 2 began with another one$"):
        kv.commit_prefix(2, list(range(8)))
    for salt, got in ((1.5, "float"), (True, "True"), (["a"], "list")):
        with pytest.raises(TypeError, match=f"^match_prefix: salt: must be an integer, str or bytes, got {got}$"):
            kv.match_prefix([], salt=salt)


def test_statistics():
    kv = new_cache()
    assert kv.prefix_stats.hit_rate == 0
    fill(kv, 1, list(range(8)))
    kv.reuse_prefix(2, list(range(12)))
    kv.match_prefix(list(range(8)))  # only a question
    assert kv.prefix_stats == pykv.PrefixStats(queries=2, queried_tokens=20, hit_tokens=8, evicted_blocks=0)
    assert kv.prefix_stats.hit_rate == 0.4


def test_clear():
    kv = new_cache()
    fill(kv, 1, list(range(8)))
    with pytest.raises(ValueError, match=r"^clear_prefixes: 1 sequences would be found again; free them first$"):
        kv.clear_prefixes()
    kv.free([1])
    kv.clear_prefixes()
    assert kv.match_prefix(list(range(8))) == kv.num_cached_blocks == 0
    assert sorted(kv.append([2], 32).tolist()) == list(range(32))
    assert kv.prefix_stats.evicted_blocks == 0


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda kv: kv.reuse_prefix(1, [1] * 4), ValueError, "reuse_prefix: seq_id: sequence 1 exists already"),
        (lambda kv: kv.reuse_prefix(7, [1.5] * 4), TypeError, "reuse_prefix: tokens: must be integers, got float64"),
        (lambda kv: kv.reuse_prefix("7", [1] * 4), TypeError, "reuse_prefix: seq_id: must be an integer, got str"),
        (lambda kv: kv.match_prefix(np.zeros((4, 4), int)), ValueError, "match_prefix: tokens: .* got shape"),
        (lambda kv: kv.match_prefix(np.int64(5)), TypeError, "match_prefix: tokens: must be a list, got int64"),
        (lambda kv: kv.commit_prefix(7, [1] * 4), ValueError, "commit_prefix: seq_id: unknown sequence 7"),
        (lambda kv: kv.commit_prefix(1, ["a"] * 4), TypeError, "commit_prefix: tokens: must be integers"),
        (lambda kv: kv.commit_prefix(1, 5), TypeError, "commit_prefix: tokens: must be a list, got int"),
    ],
)
def test_errors_change_nothing(call, error, text):
    kv = new_cache()
    kv.append([1], 4)
    with pytest.raises(error, match=f"^{text}"):
        call(kv)
    assert 7 not in kv
    assert kv.num_free_blocks == 7
    assert kv.num_cached_blocks == 0
    assert kv.prefix_stats == pykv.PrefixStats()


@pytest.mark.parametrize("name", ["match_prefix", "reuse_prefix", "commit_prefix", "clear_prefixes", "prefix_stats"])
def test_it_has_to_be_asked_for(name):
    kv = pykv.PagedKVCache(1, 4, 4, 1, 4, "float32")
    arguments = {"match_prefix": ([1],), "clear_prefixes": ()}.get(name, (1, [1]))
    with pytest.raises(ValueError, match=f"^{name}: the cache was made without prefix_caching=True$"):
        getattr(kv, name)(*arguments)
    assert kv.num_cached_blocks == 0
