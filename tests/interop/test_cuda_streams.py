"""Streams, graphs and reports on a GPU."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import pykv


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") == "cpu":
        pytest.skip("--device cpu")
    if not pykv.has_cuda() or pykv._C.cuda_device_count() == 0:
        pytest.skip("no CUDA device")


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


class Exporter:
    """A CuPy array by ``__dlpack__`` alone, which notes the stream that it was asked to be ordered before."""

    def __init__(self, array: Any) -> None:
        self.array, self.asked = array, []  # type: ignore[var-annotated]

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()  # type: ignore[no-any-return]

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        self.asked.append(stream)
        return self.array.__dlpack__(stream=stream, **options)


def test_kinds_of_streams(cupy: Any, torch: Any) -> None:
    x = cupy.random.standard_normal((4, 64), dtype=cupy.float32)
    ones = cupy.ones(64, cupy.float32)
    own = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    expected = cupy.asnumpy(x / cupy.sqrt((x**2).mean(-1, keepdims=True) + 1e-6))
    for stream in (own, own.ptr, torch.cuda.ExternalStream(own.ptr), None, 0):
        out = cupy.zeros_like(x)
        cupy.cuda.Device().synchronize()
        pykv.rms_norm(out, x, ones, stream=stream)
        cupy.cuda.Device().synchronize()
        np.testing.assert_allclose(cupy.asnumpy(out), expected, rtol=1e-5)


def test_cuda_core_stream(cupy: Any) -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device() if hasattr(core, "Device") else core.experimental.Device()
    device.set_current()
    stream = device.create_stream()
    x = cupy.ones((4, 64), cupy.float32)
    cupy.cuda.Device().synchronize()
    pykv.rms_norm(x, x, cupy.full(64, 2, cupy.float32), stream=stream)
    stream.sync()
    np.testing.assert_allclose(cupy.asnumpy(x), 2, rtol=1e-5)


def test_the_producers_current_stream_is_taken(cupy: Any, torch: Any) -> None:
    """A long chain on a side stream: a call on another stream would read too early."""
    for _ in range(5):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            x = cupy.zeros((1024, 4096), cupy.float32)
            for _ in range(50):
                x += 1
            out = cupy.zeros_like(x)
            pykv.rms_norm(out, x, cupy.ones(4096, cupy.float32))
            total = float(out.sum())
            stream.synchronize()
        assert total == pytest.approx(x.size, rel=1e-4)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            y = torch.zeros(1024, 4096, device="cuda")
            for _ in range(50):
                y += 1
            out = torch.zeros_like(y)
            pykv.rms_norm(out, y, torch.ones(4096, device="cuda"))
            total = out.sum().item()
        assert total == pytest.approx(y.numel(), rel=1e-4)


def test_two_producers_are_ordered(cupy: Any, torch: Any) -> None:
    """Input from torch's side stream, output of CuPy's: the call waits for both."""
    side, own = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    for _ in range(5):
        with torch.cuda.stream(side):
            y = torch.zeros(1024, 4096, device="cuda")
            for _ in range(50):
                y += 1
            with own:
                out = cupy.zeros((1024, 4096), cupy.float32)
                pykv.rms_norm(out, y, cupy.ones(4096, cupy.float32))
                total = float(out.sum())
        assert total == pytest.approx(out.size, rel=1e-4)


def test_plain_dlpack_is_told_the_stream(cupy: Any) -> None:
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = Exporter(cupy.ones((4, 64), cupy.float32))
        out = cupy.zeros((4, 64), cupy.float32)
        pykv.rms_norm(out, x, cupy.ones(64, cupy.float32))
        assert x.asked == [stream.ptr]
    pykv.rms_norm(out, x, cupy.ones(64, cupy.float32), stream=0)
    assert x.asked[-1] == 1, "the legacy default stream is number 1 in DLPack"


@contextmanager
def held_up(cupy: Any) -> Iterator[None]:
    """Whatever is enqueued on CuPy's current stream begins at the end."""
    go_on = threading.Event()
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.launch_host_func(lambda _: go_on.wait(5), None)
        try:
            yield
        finally:
            go_on.set()
            stream.synchronize()


def test_plain_dlpack_is_kept_until_the_work_is_done(cupy: Any) -> None:
    x, ones, out = Exporter(cupy.ones((4, 64), "f")), cupy.ones(64, "f"), cupy.zeros((4, 64), "f")
    pykv.rms_norm(out, x.array, ones)  # loads the kernel, which may wait for the device
    counts = [sys.getrefcount(x.array)]
    with held_up(cupy):
        pykv.rms_norm(out, x, ones)
        counts.append(sys.getrefcount(x.array))
        pykv.rms_norm(out, Exporter(out), ones)
        counts.append(sys.getrefcount(x.array))
    pykv.rms_norm(out, Exporter(out), ones)
    counts.append(sys.getrefcount(x.array))
    before, held, still_held, after = counts
    assert held == still_held > before == after


def test_memory_of_a_dead_jax_array_is_not_used_again_too_early(cupy: Any) -> None:
    jax = pytest.importorskip("jax")
    if not [device for device in jax.devices() if device.platform == "gpu"]:
        pytest.skip("JAX has no GPU")
    shape = (1024, 4096)
    other, x = (jax.numpy.full(shape, number).block_until_ready() for number in (3.0, 2.0))
    out = cupy.zeros(shape, "f")
    pykv.relu2(out, other)  # loads the kernel, which may wait for the device
    del other
    with held_up(cupy):
        pykv.relu2(out, x)
        del x
        others = [jax.numpy.full(shape, 3.0).block_until_ready() for _ in range(4)]
    np.testing.assert_array_equal(cupy.asnumpy(out), 4.0)
    del others


@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_graph_capture(cupy: Any, torch: Any, library: str) -> None:
    if library == "torch":
        x, out, ones = (
            torch.ones(8, 64, device="cuda"),
            torch.zeros(8, 64, device="cuda"),
            torch.ones(64, device="cuda"),
        )
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            pykv.rms_norm(out, x, ones)
        x.copy_(torch.arange(64, device="cuda").float().expand(8, 64))
        graph.replay()
        got, source = out.cpu().numpy(), x.cpu().numpy()
    else:
        x, out, ones = cupy.ones((8, 64), "f"), cupy.zeros((8, 64), "f"), cupy.ones(64, "f")
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        with stream:
            stream.begin_capture()
            pykv.rms_norm(out, x, ones)
            graph = stream.end_capture()
            x[:] = cupy.arange(64, dtype="f")
            graph.launch(stream)
            stream.synchronize()
        got, source = cupy.asnumpy(out), cupy.asnumpy(x)
    np.testing.assert_allclose(got, source / np.sqrt((source**2).mean(-1, keepdims=True) + 1e-6), rtol=1e-5)


def test_two_streams_inside_a_capture_are_an_error(cupy: Any, torch: Any) -> None:
    y, ones = torch.ones(8, 64, device="cuda"), cupy.ones(64, "f")
    out = cupy.zeros((8, 64), "f")
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            with pytest.raises(RuntimeError, match=r"arrays of two streams cannot be ordered inside a graph capture"):
                pykv.rms_norm(out, y, ones)
        finally:
            stream.end_capture()


def test_reports_are_sticky_and_cleared(cupy: Any) -> None:
    key = cupy.zeros((3, 1, 16), cupy.float16)
    cache = cupy.zeros((2, 4, 1, 16), cupy.float16)
    for slots in ([0, 8, 1], [10**15, 2, 3], [0, 1, 2]):
        pykv.reshape_and_cache_flash(key, key, cache, cache.copy(), cupy.array(slots))
    with pytest.raises(ValueError, match=r"^reshape_and_cache_flash: slot_mapping: 8 is out of range \[0, 8\)"):
        pykv.check_errors("cuda:0")
    pykv.check_errors(0)
    pykv.check_errors()


def test_a_host_array_beside_device_arrays(cupy: Any) -> None:
    out = cupy.zeros((4, 64), "f")
    with pytest.raises(ValueError, match=r"rms_norm: weight: must lie on cuda:0 like the arguments before it, got cpu"):
        pykv.rms_norm(out, out, np.ones(64, np.float32))


def test_check_sync_raises_at_once(cupy: Any) -> None:
    import os
    import subprocess
    import sys

    program = """
import cupy, pykv
key, cache = cupy.zeros((1, 1, 16), "f"), cupy.zeros((2, 4, 1, 16), "f")
try:
    pykv.reshape_and_cache_flash(key, key, cache, cache.copy(), cupy.array([9]))
except ValueError as error:
    print(error)
"""
    env = {**os.environ, "PYKV_CHECK": "sync"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, cwd="/")
    assert done.stdout.startswith("reshape_and_cache_flash: slot_mapping: 9 is out of range [0, 8)"), done.stderr


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Numba's own, with NumPy 2.5
def test_numba_arrays() -> None:
    pytest.importorskip("numba")
    from numba import cuda

    x = np.random.default_rng(0).standard_normal((5, 96)).astype(np.float32)
    source, out = cuda.to_device(x), cuda.device_array((5, 96), np.float32)
    pykv.rms_norm(out, source, cuda.to_device(np.ones(96, np.float32)))
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6)
    np.testing.assert_allclose(out.copy_to_host(), expected, rtol=1e-5, atol=1e-6)
    pykv.rms_norm(out[::2], source[::2], cuda.to_device(np.full(96, 2, np.float32)))
    expected[::2] *= 2
    np.testing.assert_allclose(out.copy_to_host(), expected, rtol=1e-5, atol=1e-6)
