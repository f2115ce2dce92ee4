"""Each operation is captured in a CUDA graph, from CuPy and from torch, and replayed over other contents; and each runs
from eight threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import pykv
from pykv._schema import all_ops
from pykv._tools.samples import ADDRESSED, Sample, sample

# raw addresses are those of the host in the samples
NAMES = sorted(set(all_ops()) - ADDRESSED)


class CupyGraphs:
    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def array(self, x: np.ndarray) -> Any:
        return self.cupy.asarray(x)

    def numpy(self, a: Any) -> np.ndarray:
        return self.cupy.asnumpy(a)

    def fill(self, a: Any, x: np.ndarray) -> None:
        a[...] = self.cupy.asarray(x)
        self.cupy.cuda.Device().synchronize()

    def capture(self, body: Any) -> Any:
        self.cupy.cuda.Device().synchronize()
        with self.stream:
            self.stream.begin_capture()
            body()
            graph = self.stream.end_capture()

        def replay() -> None:
            graph.launch(self.stream)
            self.stream.synchronize()

        return replay


class TorchGraphs:
    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def array(self, x: np.ndarray) -> Any:
        return self.torch.from_numpy(x.copy()).cuda()

    def numpy(self, a: Any) -> np.ndarray:
        return a.cpu().numpy()

    def fill(self, a: Any, x: np.ndarray) -> None:
        a.copy_(self.torch.from_numpy(x.copy()))

    def capture(self, body: Any) -> Any:
        graph = self.torch.cuda.CUDAGraph()
        self.torch.cuda.synchronize()
        with self.torch.cuda.graph(graph):
            body()

        def replay() -> None:
            graph.replay()
            self.torch.cuda.synchronize()

        return replay


@pytest.fixture(params=["cupy", "torch"])
def graphs(request):
    if request.config.getoption("--device") == "cpu":
        pytest.skip("--device cpu")
    if not pykv.has_cuda() or pykv._C.cuda_device_count() == 0:
        pytest.skip("no CUDA device")
    module = pytest.importorskip(request.param)
    return (CupyGraphs if request.param == "cupy" else TorchGraphs)(module)


IN_ORDER = {"merge_top_k"}  # their numbers descend
DRAWS = {"seeds", "steps"}


def other(name: str) -> Sample:
    """The same call with other numbers, and for other draws; ids stay as they are."""
    sign = -1 if name in IN_ORDER else 1

    def change(v: Any) -> Any:
        if isinstance(v, list):
            return [change(x) for x in v]
        if isinstance(v, np.ndarray) and v.dtype.kind == "f":
            return sign * v[..., ::-1]
        return v

    return {k: v + 1 if k in DRAWS else change(v) for k, v in sample(name).items()}


def over_arrays(function: Any, *all_values: Sample) -> Sample:
    """Calls ``function`` for each array of a call, also those in lists; everything else stays."""
    first = all_values[0]
    result: Sample = {}
    for k in first:
        column = [values[k] for values in all_values]
        if isinstance(first[k], list):
            result[k] = [function(*xs) for xs in zip(*column, strict=True)]
        elif isinstance(column[-1], np.ndarray) and k != "block_mapping":
            result[k] = function(*column)
        else:
            result[k] = first[k]
    return result


@pytest.mark.parametrize("name", NAMES)
def test_replay_over_other_contents(name, graphs):
    op, first, second = getattr(pykv, name), sample(name), other(name)
    eager = over_arrays(graphs.array, second)
    op(**eager)

    arrays = over_arrays(graphs.array, first)
    replay = graphs.capture(lambda: op(**arrays))
    over_arrays(graphs.fill, arrays, second)
    replay()
    over_arrays(
        lambda got, wanted, _: np.testing.assert_array_equal(graphs.numpy(got), graphs.numpy(wanted)),
        arrays,
        eager,
        second,
    )


@pytest.mark.parametrize("name", NAMES)
def test_eight_threads(name, array):
    if array.name in ("jax", "interface"):
        pytest.skip("no arrays that can be written by this library")
    op, values = getattr(pykv, name), sample(name)

    def run(_: int) -> Sample:
        arrays = over_arrays(array.output, values)
        with stream_of_its_own(array.name, array.device):
            for _ in range(5):
                op(**arrays)
        return arrays

    def twice_the_same(x: Any, y: Any, _: Any) -> None:
        assert array.numpy(x).tobytes() == array.numpy(y).tobytes()

    alone = run(0)
    with ThreadPoolExecutor(8) as threads:
        for arrays in threads.map(run, range(8)):
            over_arrays(twice_the_same, arrays, alone, values)


class stream_of_its_own:
    """A stream that only this thread uses; waits for it at the end."""

    def __init__(self, library: str, device: str) -> None:
        self.stream: Any = None
        if device == "cuda" and library == "cupy":
            import cupy

            self.stream = self.context = cupy.cuda.Stream(non_blocking=True)
            cupy.cuda.Device().synchronize()
        elif device == "cuda":
            import torch

            torch.cuda.synchronize()
            self.stream = torch.cuda.Stream()
            self.context = torch.cuda.stream(self.stream)

    def __enter__(self) -> None:
        if self.stream:
            self.context.__enter__()

    def __exit__(self, *error: object) -> None:
        if self.stream:
            self.context.__exit__(*error)
            self.stream.synchronize()
