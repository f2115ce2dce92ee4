from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libraries import Library

import pykv

WHERE = ["library", "host", "pinned"]
SIDES = [(a, b) for a in WHERE for b in WHERE]


class Memory:
    """Bytes with the library, on the host, or in pinned memory of the host."""

    def __init__(self, array: Library, where: str, x: np.ndarray) -> None:
        self.library, self.where = array, where
        if where == "pinned":
            if array.device == "cpu":
                pytest.skip("pinned memory needs a device")
            cupy = pytest.importorskip("cupy")
            self.owner = np.frombuffer(cupy.cuda.alloc_pinned_memory(x.size), np.uint8, x.size)
            self.owner[...] = x
        else:
            self.owner = array.output(x) if where == "library" else x.copy()

    @property
    def address(self) -> int:
        a = getattr(self.owner, "array", self.owner)  # behind an interface
        if hasattr(a, "data_ptr"):
            return int(a.data_ptr())
        return int(a.ctypes.data if isinstance(a, np.ndarray) else a.data.ptr)

    def contents(self) -> np.ndarray:
        if self.where == "library":
            return self.library.numpy(self.owner)
        if self.library.device == "cuda":  # what is pinned is copied asynchronously
            pytest.importorskip("cupy").cuda.Device().synchronize()
        return self.owner


def bytes_of(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, n, np.uint8)


def check(
    array: Library,
    src: str,
    dst: str,
    size: int,
    ranges: list[tuple[int, int, int]],
    ids: Any = np.array,
    **options: Any,
) -> None:
    """``ranges``: (from, to, bytes)."""
    a, expected = bytes_of(size, 0), bytes_of(size, 1)
    source, target = Memory(array, src, a), Memory(array, dst, expected)
    for begin, to, n in ranges:
        expected[to : to + n] = a[begin : begin + n]
    columns = [np.array(c, np.int64) for c in zip(*ranges, strict=True)] if ranges else [np.zeros(0, np.int64)] * 3
    pykv.swap_blocks_batch(
        ids(source.address + columns[0]), ids(target.address + columns[1]), ids(columns[2]), **options
    )
    np.testing.assert_array_equal(target.contents(), expected)
    np.testing.assert_array_equal(source.contents(), a)


def scattered(count: int, size: int, seed: int = 0) -> list[tuple[int, int, int]]:
    """``count`` blocks of ``size`` bytes in any order, half as many as there is room for."""
    rng = np.random.default_rng(seed)
    places = [rng.permutation(2 * count)[:count] * size for _ in range(2)]
    return [(int(a), int(b), size) for a, b in zip(*places, strict=True)]


@pytest.mark.parametrize(("src", "dst"), SIDES)
@pytest.mark.parametrize("size", [1, 6, 24, 100, 384, 4096, 5000])
def test_directions(array: Library, src: str, dst: str, size: int) -> None:
    check(array, src, dst, 40 * size, scattered(20, size))


@pytest.mark.parametrize(("src", "dst"), SIDES)
def test_sizes_of_their_own(array: Library, src: str, dst: str) -> None:
    """Wherever they begin."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(0, 9000, 40)
    places = np.concatenate([[3], 3 + np.cumsum(sizes + rng.integers(0, 20, 40))])
    order = rng.permutation(40)
    ranges = [(int(rng.integers(0, 1000)), int(places[i]), int(sizes[i])) for i in order]
    check(array, src, dst, int(places[-1]) + 20, ranges)


@pytest.mark.parametrize(("src", "dst"), SIDES)
def test_many(array: Library, src: str, dst: str) -> None:
    """More than go into one launch."""
    check(array, src, dst, 2 * 2500 * 272, scattered(2500, 272))


@pytest.mark.parametrize(("src", "dst"), SIDES)
def test_long_ranges(array: Library, src: str, dst: str) -> None:
    """Those that the copy engines get, beside short ones."""
    size = 3 << 20
    check(array, src, dst, 2 * size, [(5, 16, size), (size + 64, size + 32, 4096), (0, size + 8192, 1000)])
    many = [(i * (1 << 20), i * (1 << 20) + (i % 2) * 16, (1 << 20) - 64) for i in range(1, 20)]
    check(array, src, dst, 21 << 20, many)


@pytest.mark.parametrize(("src", "dst"), SIDES)
def test_neighbours_go_together(array: Library, src: str, dst: str) -> None:
    check(array, src, dst, 4000, [(i * 7 + 100, i * 7 + 9, 7) for i in range(300)])
    check(array, src, dst, 4000, [(i * 7 + 100, 2500 - i * 7, 7) for i in range(300)])
    check(array, src, dst, 4000, [(100, 200, 16), (116, 300, 16), (132, 316, 16), (0, 332, 16), (16, 348, 16)])


def test_everything_in_one_call(array: Library) -> None:
    """Memory of all kinds, freely mixed."""
    kinds = [w for w in WHERE if w != "pinned" or array.device == "cuda"]
    sources = [(bytes_of(6000, i), kind) for i, kind in enumerate(kinds)]
    memories = [Memory(array, kind, x) for x, kind in sources]
    targets = [Memory(array, kind, np.zeros(9 * 3000, np.uint8)) for kind in kinds]
    expected = [np.zeros(9 * 3000, np.uint8) for _ in kinds]
    rows = []
    for i in range(9):
        for s, (x, _) in enumerate(sources):
            for t, target in enumerate(targets):
                if i % len(kinds) == s:
                    n, begin = 300 * i + 16, 16 * i
                    rows.append((memories[s].address + begin, target.address + 3000 * i, n))
                    expected[t][3000 * i : 3000 * i + n] = x[begin : begin + n]
    pykv.swap_blocks_batch(*np.array(rows).T)
    for target, x in zip(targets, expected, strict=True):
        np.testing.assert_array_equal(target.contents(), x)


@given(data=st.data())
def test_any_ranges(array: Library, data: st.DataObject) -> None:
    sides = SIDES if array.device == "cuda" else [s for s in SIDES if "pinned" not in s]
    src, dst = data.draw(st.sampled_from(sides))
    cuts = sorted(data.draw(st.lists(st.integers(0, 3000), max_size=12)))
    parts = [(a, data.draw(st.integers(0, b - a))) for a, b in itertools.pairwise(cuts)]
    ranges = [(data.draw(st.integers(0, 3000 - n)), to, n) for to, n in parts]
    check(array, src, dst, 3000, data.draw(st.permutations(ranges)))


@pytest.mark.parametrize(
    "ids",
    [np.ndarray.tolist, lambda x: tuple(x.tolist()), lambda x: np.repeat(x, 2)[::2]],
    ids=["list", "tuple", "strided"],
)
def test_kinds_of_ids(array: Library, ids: Any) -> None:
    check(array, "library", "library", 4000, scattered(20, 100), ids)


def test_tensors_of_torch(array: Library) -> None:
    torch = pytest.importorskip("torch")
    for any_order in (False, True):
        check(array, "library", "host", 4000, scattered(20, 100), torch.from_numpy, is_src_access_order_any=any_order)


def test_nothing_to_do(array: Library) -> None:
    for src, dst in SIDES[:2]:
        check(array, src, dst, 100, [])
        check(array, src, dst, 100, [(0, 10, 0), (5, 5, 0)])
    pykv.swap_blocks_batch([], [], [])
    pykv.swap_blocks_batch([0, -1], [0, 5], [0, 0])


def needs_device(array: Library) -> Any:
    if array.device == "cpu":
        pytest.skip("needs a device")
    return pytest.importorskip("cupy")


def test_ids_are_not_needed_after_the_call(array: Library) -> None:
    needs_device(array)
    ranges = scattered(3000, 128)
    source, target = (
        Memory(array, where, bytes_of(2 * 3000 * 128, i)) for i, where in enumerate(["pinned", "library"])
    )
    expected = bytes_of(2 * 3000 * 128, 1)
    for begin, to, n in ranges:
        expected[to : to + n] = source.owner[begin : begin + n]
    ids = np.array(ranges).T + np.array([[source.address], [target.address], [0]])
    pykv.swap_blocks_batch(*ids)
    ids[...] = 0
    np.testing.assert_array_equal(target.contents(), expected)


@pytest.mark.parametrize("which", ["legacy", "per thread", "another"])
def test_streams(array: Library, which: str) -> None:
    cupy = needs_device(array)
    cupy.cuda.Device().synchronize()
    another = cupy.cuda.Stream(non_blocking=True)
    stream = {"legacy": 1, "per thread": 2, "another": another}[which]
    for src, dst in SIDES:
        source, target = (Memory(array, where, bytes_of(4000, i)) for i, where in enumerate([src, dst]))
        cupy.cuda.Device().synchronize()
        pykv.swap_blocks_batch([source.address + 10], [target.address], [3000], stream=stream)
        cupy.cuda.Device().synchronize()
        expected = np.concatenate([bytes_of(4000, 0)[10:3010], bytes_of(4000, 1)[3000:]])
        np.testing.assert_array_equal(target.contents(), expected)


def test_the_current_stream_of_torch(array: Library) -> None:
    needs_device(array)
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    source, target = (
        torch.zeros(4096, dtype=torch.uint8, device="cuda"),
        torch.zeros(4096, dtype=torch.uint8).pin_memory(),
    )
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    ids = [torch.tensor([x.data_ptr()]) for x in (source, target)]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        source.fill_(7)
        pykv.swap_blocks_batch(*ids, torch.tensor([4096]))
    stream.synchronize()
    assert (target == 7).all()


def test_two_devices() -> None:
    torch = pytest.importorskip("torch")
    if not pykv.has_cuda() or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    source = torch.arange(250, dtype=torch.uint8, device="cuda:0")
    targets = [torch.zeros(250, dtype=torch.uint8, device=f"cuda:{i}") for i in range(2)]
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    for stream in (torch.cuda.current_stream(0), torch.cuda.Stream(1)):
        pykv.swap_blocks_batch([source.data_ptr()] * 2, [t.data_ptr() for t in targets], [250, 200], stream=stream)
        stream.synchronize()
        assert (targets[0] == source).all()
        assert (targets[1][:200].cpu() == source[:200].cpu()).all()
        assert (targets[1][200:] == 0).all()


def int64(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


X = np.zeros(64, np.uint8)
P = X.ctypes.data


@pytest.mark.parametrize(
    ("src_ptrs", "dst_ptrs", "sizes", "error", "message"),
    [
        ([P], [P, P], [1], ValueError, "dst_ptrs: dimension 0 must equal num_copies = 1, got shape"),
        ([P, P], [P, P], [1], ValueError, "sizes: dimension 0 must equal num_copies = 2, got shape"),
        (int64(P)[None], [P], [1], ValueError, r"src_ptrs: must have 1 dimension, got shape \[1, 1\]"),
        (np.array([1], np.int32), [P], [1], TypeError, "src_ptrs: dtype must be int64, got int32"),
        ([P], [P], [1.0], TypeError, "sizes: "),
        ([P], None, [1], TypeError, "dst_ptrs: an array is required"),
        ([P, P], [P + 8, P + 16], [8, -1], ValueError, "sizes: entry 1 must not be negative, got -1"),
        ([P, 0], [P + 8, P + 16], [8, 4], ValueError, "src_ptrs: entry 1 is null, with 4 bytes to copy"),
        ([P, P], [P + 8, 0], [8, 4], ValueError, "dst_ptrs: entry 1 is null, with 4 bytes to copy"),
        ([-5], [P], [8], ValueError, "src_ptrs: entry 0, -5, is no address of 8 bytes"),
        ([P], [P], [2**63 - 1], ValueError, rf"src_ptrs: entry 0, \d+, is no address of {2**63 - 1} bytes"),
        ([2**63], [P], [8], TypeError, "src_ptrs: "),
    ],
)  # fmt: skip
def test_errors(src_ptrs: Any, dst_ptrs: Any, sizes: Any, error: type[Exception], message: str) -> None:
    """Nothing is copied."""
    X[...] = np.arange(64)
    with pytest.raises(error, match=f"^swap_blocks_batch: {message}"):
        pykv.swap_blocks_batch(src_ptrs, dst_ptrs, sizes)
    np.testing.assert_array_equal(X, np.arange(64))


def test_ids_on_the_device(array: Library) -> None:
    needs_device(array)
    ids = array.input(np.arange(3, dtype=np.int64))
    with pytest.raises(ValueError, match=r"^swap_blocks_batch: src_ptrs: must lie on the CPU, got cuda:0$"):
        pykv.swap_blocks_batch(ids, [1, 2, 3], [0, 0, 0])
