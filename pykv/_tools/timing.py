"""How long calls take, on CUDA and on the CPU, and how that compares with copying the same bytes.

Each call works on arrays of its own, so many that all of them together are several times the last-level cache: what a
call reads comes from memory.  On CUDA the calls are captured into one graph, which is replayed and timed by events, so
that the figures hold no host time; on the CPU each call is timed by the clock.  Figures are medians.  The yardstick is
a plain copy of as many bytes, timed in the same run in the same way.  It reads and writes half of them each, unless a
case says how many it writes: then on CUDA, where reading is the faster, it reads and writes as many as the case does.
What it moves are numbers like those of the calls, not zeros, on which a chip may spend less power.  On the CPU large
copies are made by the library's own threads and go past the caches, which NumPy's mostly do not.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import importlib
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import pykv
from pykv._libraries import numpy_dtype

Call = Callable[[], object]


class Device(Protocol):
    """Where calls run: makes arrays there and times calls."""

    cache_bytes: int  # of the last-level cache
    most_copies: int  # sets of arrays, at most

    def random(self, shape: tuple[int, ...], dtype: str) -> Any: ...
    def array(self, values: npt.NDArray[Any]) -> Any: ...
    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any: ...
    def copy(self, read: int, written: int, dtype: str) -> Call: ...  # bytes, of such numbers
    def time(self, calls: list[Call]) -> float: ...  # seconds for one of them
    def describe(self) -> dict[str, object]: ...


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    op: str
    size: dict[str, int]
    dtype: str
    num_bytes: int  # that one call must read and write
    make: Callable[[Device], Call]  # a call on fresh arrays
    written: int | None = None  # bytes of these; half of them, if it is not said

    def __str__(self) -> str:
        return " ".join([self.op, *(f"{k}={v}" for k, v in self.size.items())])


@dataclass(frozen=True)
class Figure:
    op: str
    size: dict[str, int]
    dtype: str
    num_bytes: int
    us: float
    copy_us: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.us / 1e3

    @property
    def of_copy(self) -> float:
        return self.copy_us / self.us


@functools.cache
def _normal(dtype: str) -> npt.NDArray[Any]:
    """Some millions of normal numbers; what needs more repeats them."""
    return np.random.default_rng(0).standard_normal(1 << 22, np.float32).astype(numpy_dtype(dtype))


class Sensors:
    """What the driver says of a GPU while calls are timed: runs compare where that is alike.  Empty without NVML."""

    def __init__(self, pci_bus_id: str) -> None:
        self._seen: dict[str, list[float]] = {}
        self._readings: dict[str, tuple[Callable[[Any], int], float]] = {}  # and their units
        gpu = ctypes.c_void_p()
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(pci_bus_id.encode(), ctypes.byref(gpu)):
            return
        self._readings = {
            "sm_mhz": (functools.partial(nvml.nvmlDeviceGetClockInfo, gpu, 1), 1),
            "memory_mhz": (functools.partial(nvml.nvmlDeviceGetClockInfo, gpu, 2), 1),
            "watts": (functools.partial(nvml.nvmlDeviceGetPowerUsage, gpu), 1e-3),  # of the last second
        }

    def ask(self) -> None:
        for name, (read, unit) in self._readings.items():
            value = ctypes.c_uint()
            if read(ctypes.byref(value)) == 0:
                self._seen.setdefault(name, []).append(unit * value.value)

    def seen(self) -> dict[str, dict[str, float]]:
        return {
            name: {"least": min(values), "median": statistics.median(values), "most": max(values)}
            for name, values in self._seen.items()
        }


class Cuda:
    most_copies = 4096

    # Four loads in flight for each thread, nothing else: as fast as a copy kernel gets.  A block of threads reads
    # `some` vectors and writes `others`, up to 1024 of each; where these are fewer, all that was read goes into them.
    _COPY = r"""
    extern "C" __global__ void copy(uint4* to, const uint4* from, long long read, long long written, int some,
                                    int others) {
      uint4 v[4] = {};
      #pragma unroll
      for (int k = 0; k < 4; ++k) {
        int i = threadIdx.x + 256 * k;
        if (i < some && blockIdx.x * (long long)some + i < read) v[k] = from[blockIdx.x * (long long)some + i];
      }
      if (others < some) {
        #pragma unroll
        for (int k = 1; k < 4; ++k) v[0].x ^= v[k].x, v[0].y ^= v[k].y, v[0].z ^= v[k].z, v[0].w ^= v[k].w;
      }
      #pragma unroll
      for (int k = 0; k < 4; ++k) {
        int i = threadIdx.x + 256 * k;
        if (i < others && blockIdx.x * (long long)others + i < written) to[blockIdx.x * (long long)others + i] = v[k];
      }
    }
    """

    def __init__(self, seconds: float = 0.1) -> None:
        """``seconds``: for the replays of one figure."""
        self._seconds = seconds
        self.cupy: Any = importlib.import_module("cupy")
        self.cache_bytes = int(self.cupy.cuda.Device().attributes["L2CacheSize"])
        self._copy = self.cupy.RawKernel(self._COPY, "copy")
        self._sensors = Sensors(self.cupy.cuda.Device().pci_bus_id)
        self._normal = functools.cache(lambda dtype: self.cupy.asarray(self._bits(_normal(dtype))))
        self._slabs: dict[tuple[str, bool], tuple[Any, int]] = {}  # what is left of arrays that small ones are cut from

    @staticmethod
    def _bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values.view(f"u{values.itemsize}")  # CuPy moves small floats as integers alone

    def random(self, shape: tuple[int, ...], dtype: str) -> Any:
        some, size = self._normal(dtype), math.prod(shape)
        if size <= some.size // 4:
            array = self._slice((dtype, False), size, some.copy)
        else:
            array = self.cupy.empty(size, some.dtype)
            for start in range(0, size, some.size):
                array[start : start + some.size] = some[: size - start]
        return array.view(_normal(dtype).dtype).reshape(shape)

    def _slice(self, key: tuple[str, bool], size: int, make: Callable[[], Any]) -> Any:
        """Neighbouring slices of one array: making thousands of small arrays takes longer than timing them."""
        slab, used = self._slabs.get(key, (None, 0))
        if slab is None or used + size > slab.size:
            slab, used = make(), 0
        step = 512 // slab.itemsize  # where arrays of their own would begin
        self._slabs[key] = slab, used + -(-size // step) * step
        return slab[used : used + size]

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Any:
        size, most = math.prod(shape), 1 << 22
        if size > most // 4:
            return self.cupy.zeros(shape, dtype)
        return self._slice((dtype, True), size, lambda: self.cupy.zeros(most, dtype)).reshape(shape)

    def array(self, values: npt.NDArray[Any]) -> Any:
        return self.cupy.asarray(self._bits(values)).view(values.dtype)

    def copy(self, read: int, written: int, dtype: str) -> Call:
        vectors = [max(1, n // 16) for n in (read, written)]
        source = self.random((vectors[0] * 16 // numpy_dtype(dtype).itemsize,), dtype)
        target = self.cupy.empty((vectors[1], 4), np.uint32)
        blocks = math.ceil(max(vectors) / 1024)
        sizes = [np.int64(n) for n in vectors] + [np.int32(math.ceil(n / blocks)) for n in vectors]
        return lambda: self._copy((blocks,), (256,), (target, source.view(np.uint8), *sizes))

    def time(self, calls: list[Call]) -> float:
        cuda = self.cupy.cuda
        calls = calls * math.ceil(8 / len(calls))  # starting a graph takes some microseconds: spread them
        cuda.Device().synchronize()  # the arrays were filled on another stream
        stream = cuda.Stream(non_blocking=True)
        with stream:
            calls[0]()  # loads modules, which a capture would refuse
            stream.synchronize()
            stream.begin_capture()
            for call in calls:
                call()
            graph = stream.end_capture()
            start, end = cuda.Event(), cuda.Event()

            def replay() -> float:
                start.record(stream)
                graph.launch(stream)
                end.record(stream)
                end.synchronize()
                return float(cuda.get_elapsed_time(start, end)) / 1e3

            warm_until = time.perf_counter() + self._seconds / 2
            while time.perf_counter() < warm_until:
                replay()
            times = [replay() for _ in range(10)]
            while sum(times) < self._seconds:
                times.append(replay())
            for _ in range(math.ceil(0.02 / times[-1])):  # busy while the sensors are asked
                graph.launch(stream)
            self._sensors.ask()
            stream.synchronize()
        return statistics.median(times) / len(calls)

    def describe(self) -> dict[str, object]:
        runtime = self.cupy.cuda.runtime
        properties = runtime.getDeviceProperties(self.cupy.cuda.Device().id)
        return {
            "name": properties["name"].decode(),
            "driver_cuda": runtime.driverGetVersion(),
            "cupy": self.cupy.__version__,
        } | self._sensors.seen()


class Cpu:
    most_copies = 64

    def __init__(self, seconds: float = 0.2) -> None:
        """``seconds``: for the calls of one figure, unless 10 of them take longer."""
        self._seconds = seconds
        self.cache_bytes = _last_level_cache()
        self.threads = pykv.get_num_threads()

    def random(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return np.resize(_normal(dtype), shape)

    def array(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return values.copy()

    def zeros(self, shape: tuple[int, ...], dtype: str) -> npt.NDArray[Any]:
        return np.zeros(shape, dtype)

    def copy(self, read: int, written: int, dtype: str) -> Call:
        source = np.resize(_normal(dtype).view(np.uint8), (read + written) // 2)
        target = np.ones_like(source)
        if read + written < 8 << 20:  # calling the threads would cost more
            return lambda: np.copyto(target, source)
        from_there, to_there, size = [source.ctypes.data], [target.ctypes.data], [source.nbytes]

        def copy_all(*_kept: object) -> None:
            pykv.swap_blocks_batch(from_there, to_there, size)

        return functools.partial(copy_all, source, target)  # the arrays live as long as the call

    def time(self, calls: list[Call]) -> float:
        for call in calls:
            call()
        times: list[float] = []
        while len(times) < 10 or (sum(times) < self._seconds and len(times) < 10000):
            for call in calls:
                start = time.perf_counter()
                call()
                times.append(time.perf_counter() - start)
        return statistics.median(times)

    def describe(self) -> dict[str, object]:
        models = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
        return {"name": models[0] if models else platform.processor(), "threads": self.threads}


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _last_level_cache() -> int:
    sizes = [_lines(f"/sys/devices/system/cpu/cpu0/cache/index{i}/size") for i in range(5)]
    found = [int(lines[0].removesuffix("K")) << 10 for lines in sizes if lines]
    return max(found, default=32 << 20)


def measure(device: Device, cases: Iterable[Case]) -> Iterator[Figure]:
    copy_times: dict[tuple[int, int, str], float] = {}
    for case in cases:
        # so many sets of arrays that none is still in the cache when its turn comes again
        copies = min(device.most_copies, math.ceil(3 * device.cache_bytes / case.num_bytes))
        written = case.num_bytes // 2 if case.written is None else case.written
        moved = case.num_bytes - written, written, case.dtype
        if moved not in copy_times:
            copy_times[moved] = device.time([device.copy(*moved) for _ in range(copies)])
        seconds = device.time([case.make(device) for _ in range(copies)])
        yield Figure(case.op, case.size, case.dtype, case.num_bytes, 1e6 * seconds, 1e6 * copy_times[moved])


def about(device: Device) -> dict[str, object]:
    """What figures were measured on."""
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": device.describe(),
        "pykv": pykv.__version__,
        "cuda_architectures": pykv._C.cuda_architectures(),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def lines(figures: Iterable[Figure]) -> list[dict[str, object]]:
    """Figures as they are written to files."""
    return [asdict(f) | {"gb_per_s": f.gb_per_s, "of_copy": f.of_copy} for f in figures]


def table(figures: list[Figure]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows; the first two columns are text."""
    sizes = list(dict.fromkeys(name for f in figures for name in f.size))
    rows = [
        [f.op, f.dtype, *(str(f.size.get(name, "")) for name in sizes)]
        + [f"{f.us:.2f}", f"{f.gb_per_s:.0f}", f"{f.copy_us:.2f}", f"{f.of_copy:.0%}"]
        for f in figures
    ]
    return ["op", "dtype", *sizes, "us", "GB/s", "copy us", "of copy"], rows
