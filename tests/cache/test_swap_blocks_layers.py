from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from cache import inputs, reference
from hypothesis import given
from hypothesis import strategies as st
from libraries import Library

import pykv

# scattered blocks, one of them written twice, and some that follow each other
MAPPING = np.array([[0, 3], [1, 4], [2, 5], [9, 0], [8, 1], [5, 9], [5, 8], [0, 9]])
WHERE = ["library", "host", "pinned"]


def memory(array: Library, where: str, x: np.ndarray) -> Any:
    """A copy of x: with the library, on the host, or in pinned memory of the host."""
    if where == "library":
        return array.output(x)
    if where == "host":
        return x.copy()
    if array.device == "cpu":
        pytest.skip("pinned memory needs a device")
    cupy = pytest.importorskip("cupy")
    pinned = np.frombuffer(cupy.cuda.alloc_pinned_memory(max(x.nbytes, 1)), x.dtype, x.size).reshape(x.shape)
    pinned[...] = x
    return pinned


def contents(array: Library, where: str, a: Any) -> np.ndarray:
    if where == "library":
        a = array.numpy(a)
    elif array.device == "cuda":  # also what was pinned is copied asynchronously
        pytest.importorskip("cupy").cuda.Device().synchronize()
    return np.ascontiguousarray(a).reshape(-1).view(np.uint8)


def check(
    array: Library, src: str, dst: str, layers: int, shape: tuple[int, ...], size: int, mapping: np.ndarray
) -> None:
    rng = np.random.default_rng(layers)
    a, b = (list(rng.integers(0, 256, (layers, *shape), np.uint8)) for _ in range(2))
    sources, targets = [memory(array, src, x) for x in a], [memory(array, dst, x) for x in b]
    pykv.swap_blocks_layers(sources, targets, size, mapping)
    for x, y, source, target in zip(a, b, sources, targets, strict=True):
        expected = y.reshape(-1).copy()
        reference.swap_blocks(x.reshape(-1), expected, size, mapping)
        np.testing.assert_array_equal(contents(array, dst, target), expected)
        np.testing.assert_array_equal(contents(array, src, source), x.reshape(-1))


SIDES = [
    ("library", "library"),
    ("library", "host"),
    ("host", "library"),
    ("host", "host"),
    ("library", "pinned"),
    ("pinned", "library"),
]


@pytest.mark.parametrize(("src", "dst"), SIDES)
@pytest.mark.parametrize("size", [1, 6, 24, 100, 384])
@pytest.mark.parametrize("layers", [1, 3, 70])
def test_directions(array: Library, src: str, dst: str, layers: int, size: int) -> None:
    """Blocks of any size; more layers than go into one launch."""
    check(array, src, dst, layers, (10, 16, 24), size, MAPPING)


@given(data=st.data())
def test_any_mapping(array: Library, data: st.DataObject) -> None:
    src, dst = data.draw(st.sampled_from(SIDES if array.device == "cuda" else SIDES[:4]))
    block = st.integers(0, 9)
    mapping = np.array(data.draw(st.lists(st.tuples(block, block), max_size=20)), np.int64).reshape(-1, 2)
    check(array, src, dst, data.draw(st.integers(1, 4)), (10, 48), 48, mapping)


@pytest.mark.parametrize(("src", "dst"), SIDES)
@pytest.mark.parametrize("kind", ["scattered", "runs", "one run"])
def test_many_blocks(array: Library, src: str, dst: str, kind: str) -> None:
    """More rows than go into one launch, and runs so long that the copy engines get them."""
    rng = np.random.default_rng(1)
    rows = {
        "scattered": lambda: np.stack([rng.permutation(600), rng.permutation(600)], 1),
        "runs": lambda: (rng.permutation(60)[:, None, None] * 10 + np.arange(10)[:, None] + [0, 0]).reshape(-1, 2),
        "one run": lambda: np.arange(590)[:, None] + [3, 7],
    }[kind]()
    check(array, src, dst, 2, (600, 4096), 4096, rows)


@pytest.mark.parametrize(("src", "dst"), SIDES)
def test_views_start_at_their_first_element(array: Library, src: str, dst: str) -> None:
    """Also where that is not aligned."""
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (2, 500), np.uint8)
    source, target = memory(array, src, a), memory(array, dst, b)
    tails: list[inputs.View] = [lambda m: m[20:100], lambda m: m[101:301], lambda m: m[302:]]
    sources = [inputs.view(source, tail) for tail in tails]
    targets = [inputs.view(target, tail) for tail in tails]
    pykv.swap_blocks_layers(sources, targets, 10, MAPPING[:2])
    expected = b.copy()
    for tail in tails:
        reference.swap_blocks(tail(a), tail(expected), 10, MAPPING[:2])
    np.testing.assert_array_equal(contents(array, dst, target), expected)


@pytest.mark.parametrize(("src", "dst"), SIDES)
@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [0, 2, 4, 1, 3], [4, 3, 2, 1, 0], [0, 0, 0, 0, 0]])
def test_long_runs_of_layers(array: Library, src: str, dst: str, order: list[int]) -> None:
    """Arrays at equal distances, for which one copy serves all, and at others."""
    size, blocks, gap = 1 << 16, 12, 64
    step = size * blocks + gap
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, 256, 5 * step, np.uint8) for _ in range(2))
    source, target = memory(array, src, a), memory(array, dst, b)
    layers: list[inputs.View] = [lambda m, i=i: m[i * step : (i + 1) * step - gap] for i in range(5)]
    rows = np.array([[0, 4], [1, 5], [2, 6], [3, 7], [4, 8], [8, 0], [9, 1], [10, 2], [11, 3]])
    pykv.swap_blocks_layers(
        [inputs.view(source, layers[i]) for i in order], [inputs.view(target, layer) for layer in layers], size, rows
    )
    expected = b.copy()
    for i, layer in zip(order, layers, strict=True):
        reference.swap_blocks(layers[i](a), layer(expected), size, rows)
    np.testing.assert_array_equal(contents(array, dst, target), expected)


def test_layers_of_one_memory(array: Library) -> None:
    """Arrays that overlap are copied one after the other, row by row."""
    x = np.random.default_rng(0).integers(0, 256, 200, np.uint8)
    actual = array.output(x)
    views: list[inputs.View] = [lambda m: m[:160], lambda m: m[16:176], lambda m: m[32:192], lambda m: m[:160]]
    order = [(0, 1), (1, 2), (2, 0), (0, 3), (3, 1)]
    rows = np.array([[0, 4], [4, 5], [5, 4], [1, 2]])
    for s, d in order:
        reference.swap_blocks(views[s](x), views[d](x), 16, rows)
    pykv.swap_blocks_layers(
        [inputs.view(actual, views[s]) for s, _ in order], [inputs.view(actual, views[d]) for _, d in order], 16, rows
    )
    np.testing.assert_array_equal(array.numpy(actual), x)


def test_nothing_to_do(array: Library) -> None:
    pykv.swap_blocks_layers([], [], 16, MAPPING)
    for src, dst in SIDES[:4]:
        check(array, src, dst, 2, (10, 16), 16, np.zeros((0, 2), np.int64))


def x(array: Library, blocks: int = 10) -> Any:
    return array.output(np.zeros((blocks, 16), np.uint8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda a: ([x(a)], [], 16, MAPPING), "dst_caches: must be as many as src_caches, 1, got 0"),
        (lambda a: ([x(a)], [x(a)], 0, MAPPING), "block_size_in_bytes: must be positive, got 0"),
        (lambda a: ([x(a), x(a, 9)], [x(a), x(a)], 16, MAPPING), r"row 3: source block 9 is out of range \[0, 9\)"),
        (lambda a: ([x(a), x(a)], [x(a, 5), x(a)], 16, MAPPING), r"row 2: destination block 5 is out .* \[0, 5\)"),
        (lambda a: ([x(a)], [x(a)], 16, MAPPING[:, 0]), "block_mapping: must have 2 dimensions"),
    ],
)
def test_errors(array: Library, arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^swap_blocks_layers: .*{message}"):
        pykv.swap_blocks_layers(*arguments(array))


def test_each_side_lies_on_one_device(array: Library) -> None:
    if array.device == "cpu":
        pytest.skip("needs a device")
    with pytest.raises(ValueError, match=r"^swap_blocks_layers: src_caches: must all lie on cuda:0 .*, got cpu$"):
        pykv.swap_blocks_layers([x(array), np.zeros((10, 16), np.uint8)], [x(array), x(array)], 16, MAPPING)


def test_two_devices() -> None:
    torch = pytest.importorskip("torch")
    if not pykv.has_cuda() or torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    sources = [torch.arange(160, dtype=torch.uint8, device="cuda:0") + layer for layer in range(3)]
    targets = [torch.zeros(160, dtype=torch.uint8, device="cuda:1") for _ in sources]
    torch.cuda.synchronize(0)
    pykv.swap_blocks_layers(sources, targets, 16, MAPPING, stream=torch.cuda.current_stream(1))
    for source, target in zip(sources, targets, strict=True):
        expected = np.zeros(160, np.uint8)
        reference.swap_blocks(source.cpu().numpy(), expected, 16, MAPPING)
        np.testing.assert_array_equal(target.cpu().numpy(), expected)


@pytest.mark.parametrize("direction", ["out", "in"])
def test_pinned_memory_is_copied_asynchronously(request: pytest.FixtureRequest, direction: str) -> None:
    """The call returns while its copies are still held back by what the stream does before them."""
    if request.config.getoption("--device") == "cpu" or not pykv.has_cuda() or pykv._C.cuda_device_count() == 0:
        pytest.skip("needs a CUDA device")
    cupy = pytest.importorskip("cupy")
    on_device = [cupy.zeros((100, 64), np.uint8) for _ in range(4)]
    pinned = [np.frombuffer(cupy.cuda.alloc_pinned_memory(6400), np.uint8, 6400).reshape(100, 64) for _ in on_device]
    rows = np.stack([np.random.default_rng(0).permutation(100)] * 2, 1)
    sources, targets = (on_device, pinned) if direction == "out" else (pinned, on_device)
    spin = cupy.RawKernel(
        'extern "C" __global__ void spin(long long ns) { long long t, s; asm volatile("mov.u64 %0, %%globaltimer;" : '
        '"=l"(s)); do asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)); while (t - s < ns); }',
        "spin",
    )
    spin((1,), (1,), (0,))
    stream = cupy.cuda.Stream(non_blocking=True)
    pykv.swap_blocks_layers(sources, targets, 64, rows, stream=stream)  # CUDA loads kernels when they are first used
    cupy.cuda.Device().synchronize()
    for layer, (array, host) in enumerate(zip(on_device, pinned, strict=True)):
        array.fill(layer + 1)
        host.fill(layer + 101)
    cupy.cuda.Device().synchronize()
    with stream:
        spin((1,), (1,), (300_000_000,))
    start = time.perf_counter()
    pykv.swap_blocks_layers(sources, targets, 64, rows, stream=stream)
    assert time.perf_counter() - start < 0.2
    assert not stream.done
    stream.synchronize()
    for layer, target in enumerate(targets):
        assert (cupy.asnumpy(target) == layer + (1 if direction == "out" else 101)).all()
