"""The cache manager by plain examples, in every layout and on every array library and device at hand."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from paged_kv_cache.tokens import LAYOUTS, read_tokens, token_view, write_tokens

import pykv
from pykv.block_pool import Sequences


def new_cache(num_blocks=8, block_size=4, layout="NHD", dtype="float32", **where):
    return pykv.PagedKVCache(2, num_blocks, block_size, 3, 8, dtype, layout, **where)


def torch_or_skip():
    return pytest.importorskip("torch")


def test_append_lays_tokens_out_in_order():
    kv = new_cache()
    slots = kv.append([10, 20], [5, 2])
    tables = kv.block_tables([10, 20])
    assert tables.dtype == np.int32
    assert tables[1, 1] == -1
    assert slots.dtype == np.int64
    first, second, third = 4 * tables[0, 0], 4 * tables[0, 1], 4 * tables[1, 0]
    assert slots.tolist() == [first, first + 1, first + 2, first + 3, second, third, third + 1]
    assert kv.seq_lens([20, 10]).tolist() == [2, 5]
    assert kv.seq_lens([20, 10]).dtype == np.int32
    assert kv.num_free_blocks == 5
    assert kv.usage == pytest.approx(3 / 8)


def test_append_goes_on_where_the_sequence_ended():
    kv = new_cache()
    kv.append([1, 2], 3)
    slots = kv.append([2, 1], 2)
    tables = kv.block_tables([1, 2])
    assert slots.tolist() == [tables[1, 0] * 4 + 3, tables[1, 1] * 4, tables[0, 0] * 4 + 3, tables[0, 1] * 4]


def test_one_sequence_needs_no_list():
    kv = new_cache()
    assert kv.append(5, 2).tolist() == [0, 1]
    assert 5 in kv
    assert kv.block_tables(5).tolist() == [[0]]
    assert kv.seq_lens(np.int64(5)).tolist() == [2]
    kv.free(5)
    assert 5 not in kv


def test_ids_may_come_as_arrays_and_be_any_integers():
    kv = new_cache()
    ids = np.array([-(2**63), 2**63 - 1, 0])
    kv.append(ids, np.array([1, 2, 3], np.int32))
    assert kv.seq_lens(ids[::-1]).tolist() == [3, 2, 1]
    kv.append(np.array([2**63 - 1], np.uint64), 1)
    assert kv.seq_lens([2**63 - 1]).tolist() == [3]


def test_nothing_to_do():
    kv = new_cache()
    assert kv.append([], []).shape == (0,)
    assert kv.append([], 3).shape == (0,)
    assert kv.block_tables([]).shape == (0, 0)
    assert kv.seq_lens([]).shape == (0,)
    kv.free([])
    assert kv.append([4], 0).shape == (0,)
    assert kv.seq_lens([4]).tolist() == [0]
    assert kv.block_tables([4]).shape == (1, 0)
    kv.fork(4, 5)
    kv.truncate(5, 0)
    assert kv.num_free_blocks == 8


def test_freed_blocks_are_used_again():
    kv = new_cache()
    for turn in range(50):
        kv.append([turn], 20)
        kv.append([-1 - turn], 12)
        kv.free([turn, -1 - turn])
    assert kv.num_free_blocks == 8


def test_reading_may_name_a_sequence_twice():
    kv = new_cache()
    kv.append([1, 2], [1, 5])
    assert kv.seq_lens([2, 2, 1]).tolist() == [5, 5, 1]
    assert kv.block_tables([1, 1]).tolist() == [[0], [0]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_fork_shares_until_somebody_writes(layout):
    kv = new_cache(layout=layout)
    write_tokens(kv, kv.append([1], 6), range(6))
    kv.fork(1, 2)
    assert kv.num_free_blocks == 6
    assert kv.block_tables([1]).tolist() == kv.block_tables([2]).tolist()
    write_tokens(kv, kv.append([2], 1), [100])
    full, tail = kv.block_tables([1, 2]).T.tolist()
    assert full[0] == full[1]
    assert tail[0] != tail[1]
    assert kv.num_free_blocks == 5
    write_tokens(kv, kv.append([1], 1), [200])  # alone in its last block by now: no copy
    assert kv.num_free_blocks == 5
    assert read_tokens(kv, 1) == [0, 1, 2, 3, 4, 5, 200]
    assert read_tokens(kv, 2) == [0, 1, 2, 3, 4, 5, 100]
    kv.free([1])
    assert kv.num_free_blocks == 6
    assert read_tokens(kv, 2) == [0, 1, 2, 3, 4, 5, 100]


def test_fork_of_full_blocks_copies_nothing():
    kv = new_cache(num_blocks=3)
    kv.append([1], 4)
    kv.fork(1, 2)
    kv.append([1, 2], 1)
    assert kv.block_tables([1, 2])[:, 0].tolist() == [0, 0]
    assert kv.num_free_blocks == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_when_all_readers_write_at_once_the_last_keeps_the_block(layout):
    kv = new_cache(num_blocks=3, layout=layout)
    write_tokens(kv, kv.append([1], 2), [7, 8])
    kv.fork(1, 2)
    kv.fork(2, 3)
    write_tokens(
        kv, kv.append([3, 1, 2], 1), [30, 10, 20]
    )  # three blocks in all: a copy for each would be one too many
    assert [read_tokens(kv, seq) for seq in (1, 2, 3)] == [[7, 8, 10], [7, 8, 20], [7, 8, 30]]
    assert kv.num_free_blocks == 0
    assert kv.block_tables([2]).tolist() == [[0]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_truncate_into_a_shared_block(layout):
    kv = new_cache(layout=layout)
    write_tokens(kv, kv.append([1], 12), range(12))
    kv.fork(1, 2)
    kv.truncate(2, 5)
    assert kv.num_free_blocks == 5  # the third block still has its first reader
    write_tokens(kv, kv.append([2], 2), [50, 60])
    assert read_tokens(kv, 1) == list(range(12))
    assert read_tokens(kv, 2) == [0, 1, 2, 3, 4, 50, 60]
    kv.truncate(1, 4)
    assert kv.num_free_blocks == 6
    kv.truncate(1, 0)
    assert kv.seq_lens([1]).tolist() == [0]
    assert kv.num_free_blocks == 6


@pytest.mark.parametrize(
    ("free_tokens", "ids", "counts"),
    [
        (0, [1], [8]),
        (4, [1, 9], [3, 3]),  # fits one by one, not together
        (0, [2], [1]),  # only the copy of a shared block is too much
        (4, [2, 3], [1, 1]),  # two copies
        (4, [2, 8], [1, 1]),  # a copy and a fresh block
    ],
)
def test_out_of_blocks_changes_nothing(free_tokens, ids, counts):
    kv = new_cache(num_blocks=5)
    write_tokens(kv, kv.append([1], 12), range(12))
    write_tokens(kv, kv.append([2], 2), [1, 2])
    kv.fork(2, 3)
    kv.fork(2, 4)
    kv.append([5], 4 - free_tokens)
    known = [1, 2, 3, 4, 5]
    before = kv.block_tables(known).tolist(), kv.seq_lens(known).tolist(), kv.num_free_blocks
    arrays = [cache.copy() for cache in kv.key_caches + kv.value_caches]
    with pytest.raises(pykv.OutOfBlocks, match=r"append: \d more blocks are needed, \d of 5 are free"):
        kv.append(ids, counts)
    assert (kv.block_tables(known).tolist(), kv.seq_lens(known).tolist(), kv.num_free_blocks) == before
    assert not {8, 9} & {seq for seq in ids if seq in kv}
    for array, cache in zip(arrays, kv.key_caches + kv.value_caches, strict=True):
        np.testing.assert_array_equal(array, cache)


def test_out_of_blocks_is_a_runtime_error():
    assert issubclass(pykv.OutOfBlocks, RuntimeError)


def test_a_failed_copy_changes_nothing(monkeypatch):
    kv = new_cache()
    kv.append([1], 2)
    kv.fork(1, 2)

    def fail(*args, **kwargs):
        raise RuntimeError("no such luck")

    with monkeypatch.context() as patch:
        patch.setattr("pykv.paged_kv_cache.copy_blocks", fail)
        with pytest.raises(RuntimeError, match="no such luck"):
            kv.append([2, 3], 1)
    assert 3 not in kv
    assert kv.seq_lens([1, 2]).tolist() == [2, 2]
    assert kv.num_free_blocks == 7
    assert kv.block_tables([1, 2]).tolist() == [[0], [0]]
    kv.append([2, 3], 1)
    assert kv.num_free_blocks == 5


def test_many_sequences_and_long_ones_make_the_tables_grow():
    kv = pykv.PagedKVCache(1, 4000, 1, 1, 1, "float16")
    ids = list(range(900))
    kv.append(ids, 1)
    kv.append(ids, 2)
    kv.append([3], 1000)
    tables, lengths = kv.block_tables(ids), kv.seq_lens(ids)
    assert tables.shape == (900, 1003)
    assert lengths.sum() == (tables >= 0).sum() == 3700
    assert np.unique(tables[tables >= 0]).size == 3700
    for child in range(1000, 2000):
        kv.fork(3, child)
    kv.free(ids)
    assert kv.num_free_blocks == 4000 - 1003


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_shapes_and_dtypes(library, dtype, layout):
    module = np if library == "numpy" else torch_or_skip()
    kv = pykv.PagedKVCache(2, 5, 4, 3, 32, dtype, layout, like=module)
    codes = dtype in ("fp8_e4m3", "fp8_e5m2", "int8")
    itemsize = 1 if codes else {"float32": 4}.get(dtype, 2)
    key_shape, value_shape = (5, 4, 3, 32), (5, 4, 3, 32)
    if layout == "packed":
        key_shape, value_shape = (5, 3, 32 * itemsize // 16, 4, 16 // itemsize), (5, 3, 32, 4)
    for caches, shape in ((kv.key_caches, key_shape), (kv.value_caches, value_shape)):
        assert len(caches) == 2
        for cache in caches:
            assert tuple(cache.shape) == shape
            storage = "uint8" if codes else dtype
            assert str(cache.dtype).removeprefix("torch.") == storage
            strides = cache.stride() if library == "torch" else tuple(step // itemsize for step in cache.strides)
            if layout == "HND":
                assert strides == (384, 32, 128, 1)
            assert strides[0] == 384
            assert not cache.reshape(-1)[0]
    assert kv.kv_cache_dtype == (dtype if codes else "auto")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_nvfp4_is_written_and_read(layout):
    kv = pykv.PagedKVCache(1, 5, 4, 3, 64, "nvfp4", layout)
    assert kv.kv_cache_dtype == "nvfp4"
    assert kv.key_caches[0].shape == (5, 4, 3, 36)
    rng = np.random.default_rng(0)
    key, value = (rng.standard_normal((7, 3, 64)).astype(np.float32) for _ in range(2))
    slots = kv.append([1], 7)
    caches = kv.key_caches[0], kv.value_caches[0]
    pykv.reshape_and_cache_flash(key, value, *caches, slots, kv.kv_cache_dtype, 0.01, 0.01)
    for data, cache, format in zip((key, value), caches, ("nvfp4", "nvfp4_v"), strict=True):
        out = np.zeros_like(data)
        pykv.gather_and_maybe_dequant_cache(
            cache, out, kv.block_tables([1]), np.array([0, 7], np.int32), None, 7, format, 0.01
        )
        assert np.abs(out - data).max() < 0.6
        assert np.abs(out - data).mean() < 0.1


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
        (ml_dtypes.bfloat16, "bfloat16"),
        (ml_dtypes.float8_e4m3fn, "fp8_e4m3"),
        ("fp8", "fp8_e4m3"),
        ("float8_e5m2", "fp8_e5m2"),
        ("torch.bfloat16", "bfloat16"),
        ("torch.float8_e5m2", "fp8_e5m2"),
    ],
)
def test_dtype_may_be_the_library_s_own(dtype, name):
    like = None
    if isinstance(dtype, str) and dtype.startswith("torch."):
        like = torch_or_skip()
        dtype = getattr(like, dtype.removeprefix("torch."))
    assert new_cache(dtype=dtype, like=like).dtype == name


def test_results_come_in_the_caller_s_library():
    torch = torch_or_skip()
    for like in (torch, torch.zeros(1), torch.nn.Parameter(torch.zeros(1))):
        kv = new_cache(like=like)
        write_tokens(kv, kv.append([1], 6), range(6))
        kv.fork(1, 2)
        slots = kv.append([1, 2], 1)
        assert slots.dtype == torch.int64
        assert kv.block_tables([1, 2]).dtype == kv.seq_lens([1]).dtype == torch.int32
        assert kv.key_caches[0].device == slots.device == torch.device("cpu")
        write_tokens(kv, slots, [6, 16])
        assert read_tokens(kv, 2) == [0, 1, 2, 3, 4, 5, 16]
    for like in (np, np.zeros(1), None, np.ma.zeros(1)):
        assert type(new_cache(like=like, device="cpu").append([1], 1)) is np.ndarray


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_the_ops_on_every_library(array, layout):
    """Tokens written by the cache ops come back through the block tables, after a fork and a copy-on-write too."""
    if array.name in ("jax", "interface"):
        pytest.skip("no cache lives in these")
    kv = new_cache(layout=layout, like=array.output(np.zeros(1, np.float32)))
    write = pykv.reshape_and_cache if layout == "packed" else pykv.reshape_and_cache_flash
    written = {}

    def append(seq, count):
        tokens = np.random.default_rng(count).standard_normal((count, 3, 8)).astype(np.float32)
        slots = kv.append([seq], count)
        for layer in range(2):
            key, value = array.input(tokens + layer), array.input(layer - tokens)
            write(key, value, kv.key_caches[layer], kv.value_caches[layer], slots)
        written[seq] = np.concatenate([written[seq], tokens]) if seq in written else tokens

    append(1, 6)
    kv.fork(1, 2)
    written[2] = written[1]
    append(2, 7)
    append(1, 1)
    tables = array.numpy(kv.block_tables([1, 2]))
    for table, length, tokens in zip(tables, array.numpy(kv.seq_lens([1, 2])), written.values(), strict=True):
        blocks, offsets = table[np.arange(length) // 4], np.arange(length) % 4
        for layer in range(2):
            for cache, wanted in ((kv.key_caches[layer], tokens + layer), (kv.value_caches[layer], layer - tokens)):
                found = token_view(array.numpy(cache), layout)[blocks, offsets]
                np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)


def test_no_framework_is_imported(tmp_path):
    code = (
        "import sys, pykv\n"
        "kv = pykv.PagedKVCache(1, 4, 4, 1, 8, 'float16')\n"
        "kv.append([1], 3); kv.fork(1, 2); kv.append([2], 1)\n"
        "print([name for name in ('torch', 'cupy', 'jax') if name in sys.modules])"
    )
    # Elsewhere than in the repository, whose pykv/ would hide the installed one.
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"num_layers": 0}, ValueError, r"PagedKVCache: num_layers: must be between 1 and 2147483647, got 0"),
        ({"num_blocks": -3}, ValueError, r"PagedKVCache: num_blocks: must be between 1 and 2147483647, got -3"),
        ({"num_blocks": 2**31}, ValueError, r"PagedKVCache: num_blocks: .* got 2147483648"),
        ({"block_size": 1.5}, TypeError, r"PagedKVCache: block_size: must be an integer, got float"),
        ({"num_kv_heads": True}, TypeError, r"PagedKVCache: num_kv_heads: must be an integer, got True"),
        ({"head_size": "64"}, TypeError, r"PagedKVCache: head_size: must be an integer, got str"),
        ({"head_size": 12, "layout": "packed"}, ValueError, r"head_size: must be a multiple of 8 for packed float16"),
        (
            {"dtype": "float64"},
            ValueError,
            r"dtype: must be one of float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, int8, nvfp4, got 'float64'",
        ),
        ({"dtype": "nvfp4", "layout": "packed"}, ValueError, r"layout: nvfp4 caches are NHD or HND, got 'packed'"),
        ({"dtype": "nvfp4", "head_size": 48}, ValueError, r"head_size: must be a multiple of 64 for nvfp4 .* got 48"),
        ({"dtype": "nvfp4", "head_size": 64, "block_size": 6}, ValueError, r"block_size: must be a multiple of 4 for"),
        ({"dtype": object()}, ValueError, r"PagedKVCache: dtype: must be one of .*, got 'object'"),
        ({"dtype": 5}, ValueError, r"PagedKVCache: dtype: must be one of .*, got 'int'"),
        ({"layout": "nhd"}, ValueError, r"PagedKVCache: layout: must be one of NHD, HND, packed, got 'nhd'"),
        ({"device": "cuda:0"}, ValueError, r"PagedKVCache: device: NumPy arrays live on 'cpu', got 'cuda:0'"),
        ({"like": [1]}, TypeError, r"like: must be an array or the module of NumPy, CuPy, torch or JAX, got list"),
        (
            {"like": np.dtype("float32")},
            TypeError,
            r"like: must be an array or .* JAX, got numpy\.dtypes\.Float32DType",
        ),
        ({"like": sys}, TypeError, r"like: must be an array or the module of .*, got module sys"),
    ],
)
def test_constructor_errors(changes, error, text):
    arguments = {
        "num_layers": 1,
        "num_blocks": 4,
        "block_size": 4,
        "num_kv_heads": 2,
        "head_size": 16,
        "dtype": "float16",
        **changes,
    }
    with pytest.raises(error, match=text):
        pykv.PagedKVCache(**arguments)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda kv: kv.append([1, 2, 1], 1), ValueError, r"append: seq_ids: sequence 1 is named twice"),
        (lambda kv: kv.append([8, 8], 1), ValueError, r"append: seq_ids: sequence 8 is named twice"),
        (lambda kv: kv.append([1, 2], [1]), ValueError, r"append: num_tokens: .* one for each of 2 seq_ids, got 1"),
        (lambda kv: kv.append([1, 9], [1, -2]), ValueError, r"append: num_tokens: must not be negative, got -2"),
        (lambda kv: kv.append([9], 0.5), TypeError, r"append: num_tokens: must be integers, got float64"),
        (lambda kv: kv.append([9], 2**31), ValueError, r"append: num_tokens: .* at most 2147483647 tokens"),
        (lambda kv: kv.append([9], [2**64]), TypeError, r"append: num_tokens: must be integers, got object"),
        (lambda kv: kv.append([1.0], 1), TypeError, r"append: seq_ids: must be integers, got float64"),
        (lambda kv: kv.append([[9]], 1), ValueError, r"append: seq_ids: .* one integer or a list of them, got shape"),
        (lambda kv: kv.append("9", 1), TypeError, r"append: seq_ids: must be integers, got"),
        (lambda kv: kv.append([True], 1), TypeError, r"append: seq_ids: must be integers, got bool"),
        (lambda kv: kv.append(np.array([2**63], np.uint64), 1), ValueError, r"append: seq_ids: must fit in int64"),
        (lambda kv: kv.block_tables([1, 7]), ValueError, r"block_tables: seq_ids: unknown sequence 7"),
        (lambda kv: kv.seq_lens(7), ValueError, r"seq_lens: seq_ids: unknown sequence 7"),
        (lambda kv: kv.free([1, 7]), ValueError, r"free: seq_ids: unknown sequence 7"),
        (lambda kv: kv.free([1, 2, 1]), ValueError, r"free: seq_ids: sequence 1 is named twice"),
        (lambda kv: kv.fork(7, 9), ValueError, r"fork: parent: unknown sequence 7"),
        (lambda kv: kv.fork(1, 2), ValueError, r"fork: child: sequence 2 exists already"),
        (lambda kv: kv.fork(1, 1), ValueError, r"fork: child: sequence 1 exists already"),
        (lambda kv: kv.fork(1, 2**63), ValueError, r"fork: child: must fit in int64, got 9223372036854775808"),
        (lambda kv: kv.fork(1, None), TypeError, r"fork: child: must be an integer, got NoneType"),
        (lambda kv: kv.truncate(7, 0), ValueError, r"truncate: seq_id: unknown sequence 7"),
        (lambda kv: kv.truncate(1, -1), ValueError, r"truncate: length: .* between 0 and the current length 3, got -1"),
        (lambda kv: kv.truncate(1, 4), ValueError, r"truncate: length: .* between 0 and the current length 3, got 4"),
        (lambda kv: kv.truncate(1, 1.0), TypeError, r"truncate: length: must be an integer, got float"),
    ],
)
def test_call_errors_change_nothing(call, error, text):
    kv = new_cache()
    kv.append([1, 2], [3, 6])
    before = kv.block_tables([1, 2]).tolist()
    with pytest.raises(error, match=text):
        call(kv)
    assert kv.block_tables([1, 2]).tolist() == before
    assert kv.seq_lens([1, 2]).tolist() == [3, 6]
    assert kv.num_free_blocks == 5
    assert not any(seq in kv for seq in (7, 8, 9))


def test_a_sequence_longer_than_int32_is_refused():
    sequences = Sequences(num_blocks=3, block_size=2**30)  # the bookkeeping alone: such a cache would not fit anywhere
    sequences.commit(sequences.plan_append([1], 1))
    sequences._lengths[:] = 2**31 - 2
    with pytest.raises(
        ValueError, match="append: num_tokens: a sequence holds at most 2147483647 tokens, got 2147483648"
    ):
        sequences.plan_append([1], 2)


def test_a_dtype_of_torch_is_no_array():
    torch = torch_or_skip()
    for like in (torch.float32, torch.device("cpu")):
        with pytest.raises(
            TypeError, match=r"like: must be an array or the module of .* JAX, got torch\.(dtype|device)$"
        ):
            new_cache(like=like)


def test_tables_of_one_width():
    kv = new_cache()
    kv.append([1, 2], [9, 1])
    assert kv.block_tables([2, 1], width=5).tolist() == [[3, -1, -1, -1, -1], [0, 1, 2, -1, -1]]
    assert kv.block_tables([2], width=5).dtype == np.int32
    assert kv.block_tables([1], width=3).tolist() == kv.block_tables([1]).tolist()
    assert kv.block_tables([1], width=100).shape == (1, 100)  # more than the cache has blocks
    assert kv.block_tables([], width=4).shape == (0, 4)
    with pytest.raises(
        ValueError, match=r"^block_tables: width: must be at least the 3 blocks of the longest .* got 2$"
    ):
        kv.block_tables([1, 2], width=2)
    with pytest.raises(ValueError, match=r"^block_tables: width: must be at least the 0 blocks of .*, got -1$"):
        kv.block_tables([], width=-1)
    with pytest.raises(TypeError, match=r"^block_tables: width: must be an integer, got float$"):
        kv.block_tables([1], width=4.0)
