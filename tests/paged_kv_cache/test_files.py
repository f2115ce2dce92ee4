"""Sequences in files: there and back in every layout and dtype, and every way in which a file can be bad."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from paged_kv_cache.tokens import LAYOUTS, read_tokens, token_view, write_tokens

import pykv
from pykv.safetensors_files import SafetensorsFile


def new_cache(layout="NHD", num_blocks=8, dtype="float32", **more):
    sizes = {"num_layers": 2, "block_size": 4, "num_kv_heads": 3, "head_size": 16} | more
    return pykv.PagedKVCache(num_blocks=num_blocks, dtype=dtype, layout=layout, **sizes)


def fill(kv, seq, values):
    write_tokens(kv, kv.append([seq], len(values)), values)


@pytest.fixture
def saved(tmp_path):
    """A file of two sequences that share a block, and end within one."""
    kv = new_cache()
    fill(kv, 99, [-7] * 32)  # leaves something behind in all blocks
    kv.free([99])
    fill(kv, 10, list(range(6)))
    kv.fork(10, -5)
    fill(kv, -5, [60, 70, 80])
    path = tmp_path / "sequences.safetensors"
    kv.save(path, [10, -5])
    return path


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_from_any_layout_to_any(tmp_path, source, target):
    kv = new_cache(source)
    fill(kv, 3, list(range(9)))
    fill(kv, 4, [40, 41])
    kv.save(tmp_path / "a", [4, 3])
    other = new_cache(target)
    fill(other, 1, [100])
    assert other.load(tmp_path / "a") == [4, 3]
    assert read_tokens(other, 3) == list(range(9))
    assert read_tokens(other, 4) == [40, 41]
    assert read_tokens(other, 1) == [100]
    assert other.num_free_blocks == 3
    fill(other, 3, [9])
    assert read_tokens(other, 3) == list(range(10))


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_stay(tmp_path, layout, dtype, library):
    """Every channel of every head gets bits of its own."""
    module = np if library == "numpy" else pytest.importorskip("torch")
    rng = np.random.default_rng(0)

    def bits(cache):
        if library == "torch":
            return cache.view(module.uint8 if "fp8" in dtype else module.int16).numpy()
        return cache.view(np.uint8 if "fp8" in dtype else np.int16)

    kv, other = (new_cache(layout, dtype=dtype, like=module) for _ in range(2))
    for cache in [*kv.key_caches, *kv.value_caches]:
        bits(cache)[...] = rng.integers(-(2**15), 2**15, cache.shape).astype(bits(cache).dtype)
    kv.append([1], 12)
    other.append([2], 5)  # other blocks than over there
    kv.save(tmp_path / "a", 1)
    other.load(tmp_path / "a")
    ours, theirs = np.asarray(kv.block_tables([1]))[0], np.asarray(other.block_tables([1]))[0]
    assert ours.tolist() != theirs.tolist()
    caches = zip([*kv.key_caches, *kv.value_caches], [*other.key_caches, *other.value_caches], strict=True)
    for a, b in caches:
        np.testing.assert_array_equal(bits(b)[theirs], bits(a)[ours])


@pytest.mark.parametrize("target", ["NHD", "HND"])
@pytest.mark.parametrize("source", ["NHD", "HND"])
def test_nvfp4(tmp_path, source, target):
    """Read with the op that knows where its pages keep codes and scales."""

    def read(kv, seq_id, length):
        out = np.zeros((2, length, 3, 128), np.float32)
        for one, cache, kind in zip(out, (kv.key_caches[1], kv.value_caches[1]), ("nvfp4", "nvfp4_v"), strict=True):
            given = kv.block_tables([seq_id]), np.array([0, length], np.int32), None, length, kind, 0.01
            pykv.gather_and_maybe_dequant_cache(cache, one, *given)
        return out

    kv, other = (new_cache(layout, dtype="nvfp4", head_size=128) for layout in (source, target))
    x = np.random.default_rng(0).standard_normal((10, 3, 128)).astype(np.float32)
    other.append([1], 5)  # other blocks than over there
    pykv.reshape_and_cache_flash(
        x, x[::-1], kv.key_caches[1], kv.value_caches[1], kv.append([7], 10), "nvfp4", 0.01, 0.01
    )
    kv.save(tmp_path / "a", 7)
    other.load(tmp_path / "a")
    assert np.abs(read(kv, 7, 10) - [x, x[::-1]]).max() < 0.6
    np.testing.assert_array_equal(read(other, 7, 10), read(kv, 7, 10))


def test_what_is_shared_stays_shared(saved):
    kv = new_cache()
    assert kv.load(saved) == [10, -5]
    assert kv.num_free_blocks == 4
    assert read_tokens(kv, 10) == list(range(6))
    assert read_tokens(kv, -5) == [0, 1, 2, 3, 4, 5, 60, 70, 80]
    kv.free([10])
    assert read_tokens(kv, -5) == [0, 1, 2, 3, 4, 5, 60, 70, 80]
    kv.free([-5])
    assert kv.num_free_blocks == 8


def test_under_other_ids(saved):
    kv = new_cache(num_blocks=9)
    fill(kv, 10, [1])
    assert kv.load(saved, [8, 9]) == [8, 9]
    assert read_tokens(kv, 8) == list(range(6))
    assert kv.load(saved, np.array([18, 19])) == [18, 19]
    assert read_tokens(kv, 19) == read_tokens(kv, 9) == [0, 1, 2, 3, 4, 5, 60, 70, 80]
    assert kv.num_free_blocks == 0


def test_nothing_of_others_is_in_the_file(saved):
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(saved, framework="np") as file:
        for kind, sign in (("keys", 1), ("values", -1)):
            for layer in range(2):
                tensor = sign * file.get_tensor(f"{kind}.{layer}")
                assert not (tensor == -7 + layer / 4).any()
                assert set(np.unique(tensor - layer / 4).tolist()) == {0, 1, 2, 3, 4, 5, 60, 70, 80, -layer / 4}


def test_no_sequences_and_empty_ones(tmp_path):
    kv, other = new_cache(), new_cache()
    kv.save(tmp_path / "a", [])
    assert other.load(tmp_path / "a") == []
    kv.append([7], 0)
    kv.save(tmp_path / "a", [7])
    assert other.load(tmp_path / "a") == [7]
    assert other.seq_lens([7]).tolist() == [0]
    assert other.num_free_blocks == 8


def test_a_file_is_replaced_at_once_or_not_at_all(saved, monkeypatch):
    before = saved.read_bytes()
    kv = new_cache()
    fill(kv, 1, [1])

    def fail(*args):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            kv.save(saved, [1])
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]
    kv.save(saved, [1])
    assert os.listdir(saved.parent) == [saved.name]
    assert new_cache().load(str(saved)) == [1]


def refuses(path, text, kv=None, error=ValueError, **arguments):
    kv = kv or new_cache()
    before = kv.num_free_blocks
    with pytest.raises(error, match=text):
        kv.load(path, **arguments)
    assert kv.num_free_blocks == before
    assert -5 not in kv


def test_a_truncated_file(saved):
    whole = saved.read_bytes()
    for length in (0, 1, 7, 8, 100, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:length])
        refuses(saved, r"^load: .*sequences.safetensors: the file is damaged or no safetensors file: ")
    saved.write_bytes(whole + b"x")
    refuses(saved, r"^load: .*: the file is damaged")


def test_an_altered_file(saved):
    """Whichever bit of the data it is, and whatever in the header."""
    whole = saved.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    for place in [header, len(whole) - 1, *rng.integers(header, len(whole), 50).tolist()]:
        altered = bytearray(whole)
        altered[place] ^= 1 << int(rng.integers(8))
        saved.write_bytes(altered)
        refuses(saved, r"^load: .*: the checksum is wrong, the file was altered$")
    for old, new in ((b'"keys.0"', b'"keys.1"'), (b'"keys.0"', b'"keys.7"'), (b'"dtype":"F32"', b'"dtype":"I32"')):
        altered = whole.replace(old, new)
        assert altered != whole
        saved.write_bytes(altered)
        refuses(saved, r"^load: .*(the checksum is wrong|the file is damaged)")


def rewritten(path, change):
    """The same file after a change, with a checksum that fits."""
    from pykv import sequence_files

    metadata, tensors = sequence_files._read(path)
    del metadata["sha256"]
    change(metadata, tensors)
    metadata["sha256"] = sequence_files._checksum(metadata, tensors)
    sequence_files._write(path, tensors, metadata)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda m, t: t["tables"].__setitem__((0, 0), 9), "its tensors contradict each other"),
        (lambda m, t: t["tables"].__setitem__((0, 0), -1), "its tensors contradict each other"),
        (lambda m, t: t["tables"].__setitem__((0, 0), -2), "its tensors contradict each other"),
        (lambda m, t: t["lengths"].__setitem__(0, 13), "its tensors contradict each other"),
        (lambda m, t: t["lengths"].__setitem__(0, -1), "its tensors contradict each other"),
        (lambda m, t: t.update(lengths=t["lengths"][:1]), "its tensors contradict each other"),
        (lambda m, t: t.update(seq_ids=np.array([3, 3])), "its tensors contradict each other"),
        (lambda m, t: t.update(tables=t["tables"].astype(np.int64)), "its tensors contradict each other"),
        (lambda m, t: t.update({"keys.1": t["keys.1"][:-1]}), "its tensors contradict each other"),
        (lambda m, t: t.update({"values.0": t["values.0"].astype(np.float16)}), "its tensors contradict each other"),
        (lambda m, t: t.pop("keys.1"), "tensors are missing or unknown"),
        (lambda m, t: t.update(more=np.zeros(1)), "tensors are missing or unknown"),
        (lambda m, t: m.update(format="pykv sequences 2"), "no file of pykv sequences"),
        (lambda m, t: t["tables"].__setitem__((1, 1), t["tables"][1, 0]), "its tensors contradict each other"),
        (lambda m, t: t["tables"].__setitem__(1, t["tables"][1, [1, 0, 2]]), "its tensors contradict each other"),
        (lambda m, t: t["lengths"].__setitem__(0, 2**31), "its tensors contradict each other"),
        (lambda m, t: t["lengths"].__setitem__(0, 2**63 - 1), "its tensors contradict each other"),
        (lambda m, t: t["lengths"].__setitem__(0, -(2**63)), "its tensors contradict each other"),
        (lambda m, t: t.update(tables=np.pad(t["tables"], ((0, 0), (0, 1)), constant_values=-1)), "its .* each other"),
        (lambda m, t: t.update(tables=t["tables"].ravel()), "tables is int32 .* contradict each other"),
        (lambda m, t: t.update(tables=np.int32(0)), r"tables is int32 \[\] where .* contradict each other"),
        (lambda m, t: t.update(seq_ids=np.array([1.5, 2.5])), r"seq_ids is float64 \[2\] where int64 .* each other"),
        (lambda m, t: t.update(seq_ids=np.array([1, 2], np.uint64)), "seq_ids is uint64 .* contradict each other"),
        (lambda m, t: t.update(seq_ids=np.array([[1, 2]])), "its tensors contradict each other"),
        (lambda m, t: t.update(lengths=t["lengths"].astype(np.int32)), "lengths is int32 .* contradict each other"),
        (lambda m, t: t.update({"keys.0": np.float32(1)}), "its tensors contradict each other"),
    ],
)
def test_a_file_that_makes_no_sense(saved, change, text):
    rewritten(saved, change)
    refuses(saved, f"^load: .*: {text}$")


@pytest.mark.parametrize("columns", [1, 2**33, 2**60])
def test_no_sequences_and_a_wide_table(tmp_path, columns):
    new_cache().save(tmp_path / "a", [])

    def widen(metadata, tensors):
        tensors["tables"] = np.lib.stride_tricks.as_strided(np.empty(0, np.int32), (0, columns), (0, 0))

    rewritten(tmp_path / "a", widen)
    refuses(tmp_path / "a", "its tensors contradict each other$")


def test_more_blocks_than_there_is_room_for_are_not_read(saved, monkeypatch):
    monkeypatch.setattr(SafetensorsFile, "tensor", None)
    refuses(saved, r"^load: 4 more blocks are needed, 3 of 3 are free$", new_cache(num_blocks=3), pykv.OutOfBlocks)
    damaged = bytearray(saved.read_bytes())
    damaged[-1] ^= 1
    saved.write_bytes(damaged)
    refuses(saved, "the checksum is wrong, the file was altered$", new_cache(num_blocks=3))


def test_a_file_that_becomes_shorter_while_it_is_read(saved, monkeypatch):
    tensor = SafetensorsFile.tensor

    def shorten(file, entry):
        os.truncate(saved, 2000)
        return tensor(file, entry)

    monkeypatch.setattr(SafetensorsFile, "tensor", shorten)
    refuses(saved, "^load: .*: the file is damaged .*: it became shorter while it was read$")


def with_header(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (with_header(b"[" * 10**6), "the header is no JSON"),
        (with_header(b"\xff\xfe"), "the header is no JSON"),
        (with_header([1]), "the header is none of safetensors"),
        (with_header({"__metadata__": 1}), "the header is none of safetensors"),
        ((2**63).to_bytes(8, "little"), "a header of 9223372036854775808 bytes does not fit"),
        *(
            (with_header({"__metadata__": {"format": "pykv sequences 1"}} | tensors, bytes(8)), text)
            for tensors, text in (
                (
                    {"a": {"dtype": "F64", "shape": [1], "data_offsets": [0, 4]}},
                    "'a' of float64 .* cannot have 4 bytes",
                ),
                ({"a": {"dtype": "F64", "shape": [-1, -1], "data_offsets": [0, 8]}}, "something else than sizes"),
                ({"a": {"dtype": "F64", "shape": [True], "data_offsets": [0, 8]}}, "something else than sizes"),
                ({"a": {"dtype": "F64", "shape": [1.0], "data_offsets": [0, 8]}}, "something else than sizes"),
                ({"a": {"dtype": "F65", "shape": [1], "data_offsets": [0, 8]}}, "the header of 'a' is none"),
                ({"a": {"dtype": "F64", "shape": 1, "data_offsets": [0, 8]}}, "the header of 'a' is none"),
                ({"a": {"dtype": "F64", "shape": [1]}}, "the header of 'a' is none"),
                ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "gaps or overlap"),
                ({"a": {"dtype": "F64", "shape": [2**61], "data_offsets": [0, 2**64]}}, "it should have .* bytes"),
                (
                    {n: {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]} for n in "ab"},
                    "its tensors have gaps or overlap",
                ),
            )
        ),
    ],
)
def test_a_header_that_makes_no_sense(tmp_path, content, text):
    (tmp_path / "a").write_bytes(content)
    refuses(tmp_path / "a", f"^load: .*: the file is damaged or no safetensors file: .*{text}")


def test_what_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        refuses(path, "it is no regular file$")


KILLED = """
import os, signal, sys
import pykv

if sys.argv[2] == "named":
    del os.O_TMPFILE
kv = pykv.PagedKVCache(1, 4, 4, 1, 4, "float32")
kv.append([1], 6)

setattr(os, sys.argv[3], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
kv.save(sys.argv[1], [1])
"""


@pytest.mark.parametrize("how", ["nameless", "named"])
@pytest.mark.parametrize("where", ["fsync", "replace"])
def test_a_save_that_is_killed(tmp_path, how, where):
    """Nothing of it is left: at once where files can be without a name, or after the next save."""
    path = tmp_path / "a"
    path.write_text("old")
    result = subprocess.run([sys.executable, "-c", KILLED, path, how, where], cwd=tmp_path)
    assert result.returncode == -9
    assert path.read_text() == "old"
    left = [name for name in os.listdir(tmp_path) if name != "a"]
    assert left == ([] if (how, where) == ("nameless", "fsync") else [".a.saving"])
    kv = new_cache()
    fill(kv, 1, [1])
    kv.save(path, [1])
    assert os.listdir(tmp_path) == ["a"]
    assert new_cache().load(path) == [1]


@pytest.mark.parametrize("nameless", [True, False])
def test_many_save_under_one_name(tmp_path, nameless, monkeypatch):
    if not nameless:
        monkeypatch.delattr(os, "O_TMPFILE")

    def save(seq):
        kv = new_cache()
        fill(kv, seq, [seq] * 5)
        for _ in range(10):
            kv.save(tmp_path / "a", [seq])
            assert new_cache().load(tmp_path / "a")[0] in range(4)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(4)))
    assert os.listdir(tmp_path) == ["a"]


def test_the_folder_is_on_the_disk_when_save_returns(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (events.append(os.path.isdir(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("replace"), replace(*paths)))
    new_cache().save(tmp_path / "a", [])
    assert events == [False, "replace", True]


def test_the_safetensors_library_reads_and_writes_the_same(saved, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    from safetensors.numpy import save_file

    with safetensors.safe_open(saved, framework="np") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    save_file(tensors, tmp_path / "b", metadata)
    kv = new_cache()
    assert kv.load(tmp_path / "b") == [10, -5]
    assert read_tokens(kv, -5) == [0, 1, 2, 3, 4, 5, 60, 70, 80]


def test_a_file_of_something_else(tmp_path):
    save_file = pytest.importorskip("safetensors.numpy").save_file
    save_file({"a": np.zeros(3)}, tmp_path / "a")
    refuses(tmp_path / "a", "^load: .*: no file of pykv sequences$")
    (tmp_path / "b").write_text(json.dumps({"keys": 1}))
    refuses(tmp_path / "b", "^load: .*: the file is damaged")
    refuses(tmp_path / "c", "c", error=FileNotFoundError)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layers": 3}, "its num_layers is 2, that of the cache 3"),
        ({"block_size": 8}, "its block_size is 4, that of the cache 8"),
        ({"num_kv_heads": 1}, "its num_kv_heads is 3, that of the cache 1"),
        ({"head_size": 8}, "its head_size is 16, that of the cache 8"),
        ({"dtype": "float16"}, "its dtype is float32, that of the cache float16"),
    ],
)
def test_a_cache_of_another_shape(saved, change, text):
    refuses(saved, f"^load: .*: {text}$", new_cache(**change))


def test_no_room_and_no_ids(saved):
    kv = new_cache(num_blocks=3)
    refuses(saved, r"^load: 4 more blocks are needed, 3 of 3 are free$", kv, pykv.OutOfBlocks)
    kv = new_cache(num_host_blocks=2)
    fill(kv, 10, [1])
    refuses(saved, r"^load: seq_ids: sequence 10 exists already$", kv)
    kv.swap_out([10])
    refuses(saved, r"^load: seq_ids: sequence 10 exists already$", kv)
    for ids in ([1], [1, 2, 3], [2, 2]):
        refuses(saved, r"^load: seq_ids: must be 2 different ids, got \[", kv, seq_ids=ids)
    with pytest.raises(ValueError, match=r"^save: seq_ids: sequence 10 is swapped out$"):
        kv.save(saved, [10])
    with pytest.raises(ValueError, match=r"^save: seq_ids: unknown sequence 11$"):
        kv.save(saved, [11])


def test_on_every_library(array, tmp_path):
    if array.name in ("jax", "interface"):
        pytest.skip("no cache lives in these")
    kv, other = (new_cache(layout, like=array.output(np.zeros(1, np.float32))) for layout in ("packed", "HND"))
    tokens = np.random.default_rng(0).standard_normal((9, 3, 16)).astype(np.float32)
    slots = kv.append([1], 9)
    for layer in range(2):
        key, value = array.input(tokens + layer), array.input(layer - tokens)
        pykv.reshape_and_cache(key, value, kv.key_caches[layer], kv.value_caches[layer], slots)
    kv.save(tmp_path / "a", [1])
    other.append([2], 5)
    other.load(tmp_path / "a")
    table = array.numpy(other.block_tables([1]))[0]
    blocks, offsets = table[np.arange(9) // 4], np.arange(9) % 4
    for layer in range(2):
        for cache, wanted in ((other.key_caches[layer], tokens + layer), (other.value_caches[layer], layer - tokens)):
            np.testing.assert_array_equal(token_view(array.numpy(cache), "HND")[blocks, offsets], wanted)
