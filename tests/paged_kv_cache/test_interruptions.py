"""An exception at each line of the manager, and at each call that it makes, in turn: nothing has changed, or all has.

What can be seen of a cache is compared with what it is without the call, and after it.  Where blocks are copied, their
targets may have lost their names as well.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest
from paged_kv_cache.late_copies import copy_late
from paged_kv_cache.tokens import read_tokens, write_tokens

import pykv
from pykv import safetensors_files

SOURCE = str(Path(pykv.__file__).parent)
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that nobody closes
TEXTS = [list(range(12)), [90] * 12, [30] * 8, [41, 42, 43, 44]]
WRITTEN = {1: 10, 2: 10, 3: 8, 4: 4, 5: 5, 6: 5, 11: 8, 70: 5, 71: 6}  # tokens of sequences; more may be appended


class Stop(BaseException):
    """A KeyboardInterrupt, or no memory, as far as the code can tell."""


def fill(kv, seq, values):
    write_tokens(kv, kv.append([seq], len(values)), values)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    kv = pykv.PagedKVCache(1, 8, 4, 1, 4, "float32")
    fill(kv, 70, [70, 71, 72, 73, 74])
    kv.fork(70, 71)
    fill(kv, 71, [75])
    path = tmp_path_factory.mktemp("files") / "sequences"
    kv.save(path, [70, 71])
    return path


def build(late):
    """Sequences that share blocks, one on the host, and a free block that has no name; all others are found."""
    kv = pykv.PagedKVCache(1, 14, 4, 1, 4, "float32", prefix_caching=True, num_host_blocks=8)
    if late:
        copy_late(kv)
    fill(kv, 1, TEXTS[0][:10])
    kv.commit_prefix(1, TEXTS[0][:10])
    kv.fork(1, 2)
    fill(kv, 3, TEXTS[2])
    kv.commit_prefix(3, TEXTS[2], salt="a tenant")
    fill(kv, 4, TEXTS[3])
    fill(kv, 5, [50, 51, 52, 53, 54])
    kv.fork(5, 6)
    kv.swap_out([5])
    fill(kv, 9, TEXTS[1])
    kv.commit_prefix(9, TEXTS[1])
    kv.free([9])
    fill(kv, 10, [1] * 12)
    kv.free([10])
    fill(kv, 11, [100] * 8)
    kv.block_tables([1, 2])  # which is looked up already when it is asked for again
    return kv


def looks(kv):
    """All that can be seen of a cache, which is used up."""
    seen = [kv.num_free_blocks, kv.num_free_host_blocks, kv.usage, kv.num_cached_blocks, kv.prefix_stats]
    ids = [seq for seq in range(100) if seq in kv]
    here = [seq for seq in ids if not kv.is_swapped_out(seq)]
    tables = kv.block_tables(here)
    seen += [ids, here, kv.seq_lens(here).tolist()]
    # which blocks are the same, whatever their numbers
    numbers = {block: i for i, block in enumerate(dict.fromkeys(tables.ravel().tolist()))}
    seen.append([[numbers[block] for block in row] for row in tables.tolist()])
    seen.append([read_tokens(kv, seq, WRITTEN.get(seq, 0)) for seq in here])
    for salt in (None, "a tenant"):
        for i, text in enumerate(TEXTS):
            found = kv.match_prefix(text, salt=salt)
            assert kv.reuse_prefix(200 + i, text, salt=salt) == found
            assert read_tokens(kv, 200 + i) == text[:found], "a prefix is found where it is not"
            kv.free([200 + i])
            seen.append(found)
    for seq in (seq for seq in ids if kv.is_swapped_out(seq)):
        kv.free([s for s in here if s in kv and s != 4])
        kv.swap_in([seq])
        seen.append(read_tokens(kv, seq, WRITTEN[seq]))
    kv.free([seq for seq in ids if seq in kv])
    assert kv.num_free_host_blocks == kv.num_host_blocks
    fill(kv, 300, list(range(kv.num_blocks * kv.block_size)))
    assert sorted(kv.block_tables([300])[0].tolist()) == list(range(kv.num_blocks)), (
        "a block is lost, or is there twice"
    )
    return seen


# What is called, and into how many blocks something is copied.
CALLS = {
    "append": (lambda kv, file: kv.append([4, 3, 40], [6, 1, 3]), 0),
    "append to a full cache": (lambda kv, file: kv.append([4, 41], [8, 8]), 0),
    "append to shared blocks": (lambda kv, file: kv.append([2, 6, 42], [1, 1, 1]), 1),
    "fork": (lambda kv, file: kv.fork(3, 43), 0),
    "truncate": (lambda kv, file: kv.truncate(1, 3), 0),
    "free": (lambda kv, file: kv.free([3, 1]), 0),
    "free in both places": (lambda kv, file: kv.free([5, 6, 2]), 0),
    "swap_out": (lambda kv, file: kv.swap_out([3, 2]), 0),
    "swap_in": (lambda kv, file: kv.swap_in([5]), 2),
    "load": (lambda kv, file: kv.load(file), 3),
    "commit_prefix": (lambda kv, file: kv.commit_prefix(4, TEXTS[3]), 0),
    "commit_prefix of what is there": (lambda kv, file: kv.commit_prefix(11, [100] * 8, salt=5), 0),
    "reuse_prefix": (lambda kv, file: kv.reuse_prefix(44, TEXTS[1]), 0),
    "reuse_prefix with salt": (lambda kv, file: kv.reuse_prefix(44, TEXTS[2], salt="a tenant"), 0),
    "block_tables": (lambda kv, file: kv.block_tables([4, 3], width=9), 0),
    "seq_lens": (lambda kv, file: kv.seq_lens([4, 3]), 0),
    "match_prefix": (lambda kv, file: kv.match_prefix(TEXTS[0]), 0),
    "save": (lambda kv, file: kv.save(file.with_name("another"), [1, 2]), 0),
}


def stopped(call, event, turn):
    """Whether ``call`` was stopped, at the event of that number in pykv's own files."""
    count = 0

    def watch(frame, kind, argument):
        nonlocal count
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        if kind == event:
            count += 1
            if count == turn:
                raise Stop
        return watch

    install = sys.settrace if event == "line" else sys.setprofile
    before = sys.gettrace() if event == "line" else sys.getprofile()
    install(watch)
    try:
        call()
        return False
    except Stop:
        return True
    finally:
        install(before)


@pytest.mark.parametrize("event", ["line", "c_call", "c_return"])
@pytest.mark.parametrize(
    ("name", "late"),
    [(name, False) for name in CALLS] + [(name, True) for name in ("append to shared blocks", "swap_out", "swap_in")],
)
def test_an_exception_anywhere(name, event, late, file):
    call, copied = CALLS[name]
    without, evicted, done = build(late), build(late), build(late)
    evicted._forget_names(copied)
    call(done, file)
    allowed = [looks(without), looks(evicted), looks(done)]
    turn = 1
    while stopped(lambda: call(kv, file), event, turn) if (kv := build(late)) else False:
        assert looks(kv) in allowed, turn
        turn += 1
    assert turn > 3
    assert looks(kv) == allowed[2]


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("append")])
def test_a_call_after_one_that_was_stopped(name, file):
    """The same call once more, or another one first, finds nothing half done."""
    call, turn, done = CALLS[name][0], 1, build(False)
    call(done, file)
    done = looks(done)
    while stopped(lambda: call(kv, file), "line", turn) if (kv := build(False)) else False:
        kv.fork(11, 60)
        kv.free([60])
        with contextlib.suppress(ValueError, pykv.OutOfBlocks):  # it may have been done the first time
            call(kv, file)
        turn += 1
        seen = looks(kv)
        assert seen[5:9] == done[5:9]


@pytest.mark.parametrize("late", [False, True], ids=["", "copies are late"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("target", ["from_host", "copy", "copy_blocks"])
@pytest.mark.parametrize("name", CALLS)
def test_a_transfer_that_fails(name, target, when, late, file, monkeypatch):
    """No memory on a device, say: on the way there, or when the copy has been made."""
    call, copied = CALLS[name]
    kv, without, evicted, done = (build(late) for _ in range(4))
    evicted._forget_names(copied)
    call(done, file)
    owner, attribute = {
        "from_host": (kv._library, "from_host"),
        "copy": (kv, "_copy"),
        "copy_blocks": (sys.modules["pykv.paged_kv_cache"], "copy_blocks"),
    }[target]
    original, failed = getattr(owner, attribute), False

    def fail(*arguments, **more):
        nonlocal failed
        failed = True
        if when == "after":
            original(*arguments, **more)
        raise MemoryError(target)

    with monkeypatch.context() as patch:
        patch.setattr(owner, attribute, fail)
        try:
            call(kv, file)
        except MemoryError:
            assert failed
    assert looks(kv) in ([looks(without), looks(evicted)] if failed else [looks(done)])


def test_names_go_before_anything_is_copied(monkeypatch):
    """Whoever looks while the copy is made finds no block that it is made into."""
    kv = pykv.PagedKVCache(1, 4, 4, 1, 1, "float32", prefix_caching=True)
    write_tokens(kv, kv.append([1], 2), [10, 11])
    kv.fork(1, 2)
    write_tokens(kv, kv.append([9], 12), [90] * 12)
    kv.commit_prefix(9, [90] * 12)
    kv.free([9])
    copy_blocks, found = pykv.copy_blocks, []

    def look(*arguments, **more):
        found.append(kv.match_prefix([90] * 12))
        copy_blocks(*arguments, **more)

    monkeypatch.setattr("pykv.paged_kv_cache.copy_blocks", look)
    kv.append([1], 1)
    assert found == [8]
    assert kv.match_prefix([90] * 12) == 8
    assert kv.prefix_stats.evicted_blocks == 1


def test_memory_that_fails_while_a_change_is_written():
    """The change has happened: what is left of it is written when somebody looks."""
    kv = pykv.PagedKVCache(1, 8, 4, 1, 1, "float32")
    write_tokens(kv, kv.append([1], 6), range(6))
    kv.fork(1, 2)

    class Failing(dict):
        fails = True

        def pop(self, *arguments):
            if self.fails:
                raise MemoryError
            return super().pop(*arguments)

    rows = kv._sequences._row_of = Failing(kv._sequences._row_of)
    for _ in range(2):
        with pytest.raises(MemoryError):
            kv.free([1])
    rows.fails = False
    assert 1 not in kv
    assert read_tokens(kv, 2) == list(range(6))
    assert kv.num_free_blocks == 6


@pytest.mark.parametrize("event", ["line", "c_call", "c_return"])
@pytest.mark.parametrize("nameless", [True, False])
def test_a_save_that_is_stopped_leaves_the_old_file_or_the_new_one(tmp_path, event, nameless, monkeypatch):
    if not nameless:
        monkeypatch.delattr(safetensors_files.os, "O_TMPFILE")
    path, turn = tmp_path / "a", 1
    kv = pykv.PagedKVCache(1, 8, 4, 1, 4, "float32")
    fill(kv, 1, [1, 2, 3])
    kv.save(path, [1])
    old = path.read_bytes()
    kv.append([2], 1)
    kv.save(path, [1, 2])
    new = path.read_bytes()
    assert old != new
    path.write_bytes(old)
    while stopped(lambda: kv.save(path, [1, 2]), event, turn):
        assert path.read_bytes() in (old, new)
        path.write_bytes(old)
        turn += 1
    assert path.read_bytes() == new
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_an_exception_anywhere_with_jax():
    """The line that gives an array away is the one that takes the new one."""
    jax = pytest.importorskip("jax")

    def build():
        kv = pykv.PagedKVCache(2, 6, 4, 1, 4, "float32", like=jax, num_host_blocks=4)
        slots = kv.append([1], 6)
        ones = [jax.numpy.asarray(cache).reshape(24, 4).at[slots].set(7).reshape(6, 4, 1, 4) for cache in kv.key_caches]
        kv.replace_caches(ones, kv.value_caches)
        kv.fork(1, 2)
        kv.fork(1, 3)
        kv.swap_out([3])
        return kv

    def looks(kv):
        tables, lens = kv.block_tables([1, 2]), kv.seq_lens([1, 2]).tolist()
        for table, length in zip(tables, lens, strict=True):
            held = np.asarray(kv.key_caches[1])[table].reshape(-1, 4)[: min(length, 6)]
            assert (held == 7).all()
        return lens, kv.num_free_blocks, kv.num_free_host_blocks, kv.is_swapped_out(3)

    def check(call):
        done, turn = build(), 1
        call(done)
        allowed = [looks(build()), looks(done)]
        while stopped(lambda: call(kv), "line", turn) if (kv := build()) else False:
            assert looks(kv) in allowed
            turn += 1
        assert turn > 10

    check(lambda kv: kv.append([1], 2))
    check(lambda kv: kv.swap_in([3]))
