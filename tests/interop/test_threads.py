"""What threads share when they call at the same time: caches that fill, ways of calls that change, lists, messages.

With a GIL much of this is given.  A free-threaded CPython (``python3.13t``) has none, and must not get one with pykv.
"""

from __future__ import annotations

import sysconfig
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fresh import fresh

import pykv

THREADS = 8


@pytest.fixture(autouse=True)
def _on_the_cpu(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--device") == "cuda":
        pytest.skip("NumPy's arrays alone")


def at_once(work: Callable[[int], Any]) -> None:
    """Runs work(0), ..., work(7) in threads that begin together; raises what the first of them raised."""
    barrier, failures = threading.Barrier(THREADS), []

    def run(i: int) -> None:
        barrier.wait()
        try:
            work(i)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise failures[0]


def test_the_gil_stays_off() -> None:
    if not sysconfig.get_config_var("Py_GIL_DISABLED"):
        pytest.skip("this CPython has a GIL: only a free-threaded one can show it")
    program = """
        import os, sys
        os.environ.pop("PYTHON_GIL", None)
        import numpy as np
        before = sys._is_gil_enabled()
        import pykv, pykv.functional, pykv.native
        pykv.functional.rms_norm(np.ones((2, 8), np.float32), None)
        print(before, sys._is_gil_enabled())
    """
    assert fresh(program, "-W", "error") == "False False"


def test_first_calls_come_together() -> None:
    """More types of arrays than their cache holds, each new to all threads, and dtypes that have to be looked up."""
    program = """
        import sys, threading
        import ml_dtypes, numpy as np
        import pykv
        sys.setswitchinterval(1e-6)
        types = [type(f"Array{i}", (np.ndarray,), {}) for i in range(400)]
        dtypes = [ml_dtypes.bfloat16, np.float16, np.float32]
        barrier, wrong = threading.Barrier(8), []

        def work(first):
            barrier.wait()
            for i in range(len(types)):
                kind = types[(i + first % 2 * 200) % 400]
                x = np.full((3, 16), 2, dtypes[i % 3]).view(kind)
                out = np.zeros_like(x)
                pykv.relu2(out, pykv.from_pointer(x.ctypes.data, x.shape, x.dtype, "cpu", owner=x))
                if not (np.asarray(out, np.float32) == 4).all():
                    wrong.append(kind)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        [t.start() for t in threads], [t.join() for t in threads]
        print(len(wrong), "wrong")
    """
    assert fresh(program, "-W", "error") == "0 wrong"


def test_calls_while_their_way_changes() -> None:
    x = np.full((4, 16), 3, np.float32)

    def mine(out: np.ndarray, *_: object, **__: object) -> None:
        out[:] = 7

    def work(i: int) -> None:
        if i == 0:
            for _ in range(200):
                pykv.dispatch.register("relu2", "of_threads", platforms=["cpu"])(mine)
                pykv.dispatch.unregister("relu2", "of_threads")
            return
        for _ in range(300):
            out = np.zeros_like(x)
            pykv.relu2(out, x)
            assert out[0, 0] in (7, 9)
            assert (out == out[0, 0]).all()

    at_once(work)
    out = np.zeros_like(x)
    pykv.relu2(out, x)
    np.testing.assert_array_equal(out, 9)


def test_lists_that_others_change() -> None:
    """A call keeps the arrays that it found in its lists."""
    keys, values = ([np.zeros((4, 2, 8), np.float32) for _ in range(3)] for _ in range(2))
    mapping = np.array([[0, 1]], np.int64)

    def work(i: int) -> None:
        for _ in range(300):
            if i < 2:
                (keys, values)[i][:] = [np.zeros((4, 2, 8), np.float32) for _ in range(3)]
            else:
                pykv.copy_blocks(keys, values, mapping)

    at_once(work)


def test_each_thread_has_its_own_error() -> None:
    x = np.ones((4, 16), np.float32)

    def work(i: int) -> None:
        for _ in range(100):
            with pytest.raises(ValueError, match=rf"rms_norm: weight: .* got shape \[{i + 1}\]"):
                pykv.rms_norm(np.zeros_like(x), x, np.ones(i + 1, np.float32))
            with pytest.raises(TypeError, match=r"rms_norm: input: an array .* is required, got object"):
                pykv.rms_norm(np.zeros_like(x), object(), None)

    at_once(work)
