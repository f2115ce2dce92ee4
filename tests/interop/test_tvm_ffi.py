"""Every operation by tvm-ffi, from the library that is made for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import pykv
from pykv._schema import all_ops
from pykv._tools.samples import ADDRESSED, SAMPLES, sample

tvm_ffi = pytest.importorskip("tvm_ffi")


@pytest.fixture(scope="module")
def module() -> Any:
    return tvm_ffi.load_module(Path(pykv.get_library_dir()) / "libpykv_tvm_ffi.so")


def call(function: Callable[..., None], name: str, given: dict[str, Any]) -> None:
    """All arguments by position, as C takes them."""

    def convert(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return tvm_ffi.from_dlpack(value)
        return [convert(v) for v in value] if isinstance(value, list) else value

    wanted = all_ops()[name].c_arguments(given)
    function(*(convert(value) for value in wanted.values()))


@pytest.mark.parametrize("name", sorted(SAMPLES.keys() - ADDRESSED))
def test_every_operation(module, name) -> None:
    ours, wanted = sample(name), sample(name)
    call(module[name], name, ours)
    all_ops()[name].direct(**wanted)
    for key, array in wanted.items():
        np.testing.assert_array_equal(ours[key], array)


def test_addresses(module) -> None:
    source, target = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    names = ("src_ptrs", "dst_ptrs", "sizes")
    addresses = (source.ctypes.data, target.ctypes.data, source.nbytes)
    given = {k: np.array([v], np.int64) for k, v in zip(names, addresses, strict=True)}
    call(module["swap_blocks_batch"], "swap_blocks_batch", given)
    np.testing.assert_array_equal(target, source)


def test_errors_are_those_of_c(module) -> None:
    x, weight = (tvm_ffi.from_dlpack(np.ones(shape, np.float32)) for shape in ((3, 8), (8,)))
    other = tvm_ffi.from_dlpack(np.ones((3, 9), np.float32))
    rms_norm = module["rms_norm"]
    with pytest.raises(ValueError, match=r"rms_norm: out: must have the shape of input, \[3, 8\], got \[3, 9\]"):
        rms_norm(other, x, weight, 1e-6)
    with pytest.raises(TypeError, match="rms_norm: out: dtype must be"):
        rms_norm(tvm_ffi.from_dlpack(np.ones((3, 8), np.float16)), x, weight, 1e-6)
    with pytest.raises(TypeError, match="rms_norm: takes 4 arguments, got 3"):
        rms_norm(x, x, weight)
    with pytest.raises(TypeError, match="rms_norm: argument 4 must be a number"):
        rms_norm(x, x, weight, "small")
    with pytest.raises(TypeError, match="rms_norm: argument 1 must be an array"):
        rms_norm(1.0, x, weight, 1e-6)


def test_on_the_current_stream(module, cupy) -> None:
    x = cupy.ones((64, 4096), cupy.float16)
    out, weight = cupy.zeros_like(x), cupy.ones(4096, cupy.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    arrays = [tvm_ffi.from_dlpack(a) for a in (out, x, weight)]
    cupy.cuda.Device().synchronize()
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream.ptr):
        stream.begin_capture()  # nothing but what is on this stream is captured
        module["rms_norm"](*arrays, 1e-6)
        graph = stream.end_capture()
    assert not out.any()
    graph.launch(stream)
    stream.synchronize()
    assert abs(out - 1).max() < 1e-2
