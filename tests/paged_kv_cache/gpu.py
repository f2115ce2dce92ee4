"""The same of CuPy and of torch: streams, one that is held up, and the way to the host."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading


def to_host(array):
    return array.get() if hasattr(array, "get") else array.cpu().numpy()


def new_stream(module):
    return module.cuda.Stream() if module.__name__ == "torch" else module.cuda.Stream(non_blocking=True)


def pointer_of(stream):
    return stream.cuda_stream if hasattr(stream, "cuda_stream") else stream.ptr


def on(module, stream):
    return module.cuda.stream(stream) if module.__name__ == "torch" else stream


@contextlib.contextmanager
def held(stream, seconds=20.0):
    """Nothing on ``stream`` goes on within it; a call that waits for the stream fails the test, some seconds later."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *args):
        status = getattr(cuda, name)(*args)
        assert status == 0, f"{name}: {status}"

    page = mmap.mmap(-1, mmap.PAGESIZE)
    word, on_device = ctypes.c_uint32.from_buffer(page), ctypes.c_uint64()
    call("cuMemHostRegister_v2", ctypes.byref(word), ctypes.c_size_t(mmap.PAGESIZE), 0)
    call("cuMemHostGetDevicePointer_v2", ctypes.byref(on_device), ctypes.byref(word), 0)
    timer = threading.Timer(seconds, lambda: setattr(word, "value", 1))
    timer.start()
    try:
        at_least = 0
        call("cuStreamWaitValue32_v2", ctypes.c_void_p(pointer_of(stream)), on_device, ctypes.c_uint32(1), at_least)
        yield
        assert word.value == 0, f"it took {seconds} s: somebody waited for the stream"
    finally:
        timer.cancel()
        word.value = 1
        stream.synchronize()
        call("cuMemHostUnregister", ctypes.byref(word))
