"""This library's paged attention against another build of it, in one run on one card: no headline may be 3 % slower.

    python benchmarks/attention/gate.py OTHER/libkernels.so.0 [--bar 3] [--json FILE]

Both libraries are called through the C interface on the same arrays, in turns, each in CUDA graphs with a cold L2 (see
../timing.py).  A case that is slower than the bar, or gives other results, fails the run.  Cases of the last group are
timed without a verdict: they are what was given up for less code.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_paged_attention import Arrays, Case, arrays, uniform
from timing import Cuda, write_json

from pykv._tools import output

HEADLINE, OTHER, GIVEN_UP = "headline", "other", "given up"
_E4M3 = "fp8_e4m3"


def cases() -> Iterator[tuple[str, Case, float]]:
    """Each with its group, and with by how much its bar is higher."""
    random = tuple(int(n) for n in np.random.default_rng(0).integers(128, 32769, 64))
    for batch, length in (
        (1, 1024), (1, 8192), (1, 32768), (1, 131072), (8, 1024), (8, 8192), (64, 1024), (64, 8192),
    ):  # fmt: skip
        yield HEADLINE, Case(f"{batch} x {length}", **uniform(batch, length)), 1
    yield HEADLINE, Case("64 x random", random, (1,) * 64), 1
    yield HEADLINE, Case("1 x 128k + 63 x 1k", (131072,) + (1024,) * 63, (1,) * 64), 1
    for batch, length in ((1, 8192), (1, 131072), (8, 8192), (64, 8192)):
        bar = 5 / 3 if (batch, length) == (1, 131072) else 1
        yield HEADLINE, Case(f"{batch} x {length}", **uniform(batch, length), kind=_E4M3), bar
    yield HEADLINE, Case("32 x 8192, 8 queries", **uniform(32, 8192, 8)), 1
    yield HEADLINE, Case("8 x 2048, 4 queries", **uniform(8, 2048, 4)), 1
    yield HEADLINE, Case("prefill 1 x 8k", (8192,), (8192,)), 1
    yield HEADLINE, Case("prefill 1 x 32k", (32768,), (32768,)), 1
    for batch in (1, 64):
        yield HEADLINE, Case(f"{batch} x 8192, batch_invariant", **uniform(batch, 8192), batch_invariant=True), 1

    many = uniform(64, 8192)
    yield OTHER, Case("64 x 8192", **many, kind="int8"), 1
    yield OTHER, Case("64 x 8192", **many, kind="nvfp4"), 1
    yield OTHER, Case("64 x 8192", **many, layout="packed"), 1
    yield OTHER, Case("64 x 8192", **many, layout="HND"), 1
    yield OTHER, Case("32 x 8192, heads of 64", **uniform(32, 8192), head_size=64), 1
    yield OTHER, Case("8 x 8192, heads of 256", **uniform(8, 8192), head_size=256), 1
    yield OTHER, Case("32 x 8192, 16 heads in a group", **uniform(32, 8192), kv_heads=2), 1
    yield OTHER, Case("8 x 32768, window of 4096", **uniform(8, 32768), window=4096), 1
    yield OTHER, Case("32 x 8192, pages of 1", **uniform(32, 8192), page=1), 1
    yield OTHER, Case("64 x 8192 + 2048 on 8192", (8192,) * 64 + (10240,), (1,) * 64 + (2048,)), 1
    yield OTHER, Case("8 x 32768 + 512 on 32768", (32768,) * 8 + (33280,), (1,) * 8 + (512,)), 1
    yield OTHER, Case("1 x 32768, one KV head", **uniform(1, 32768), heads=8, kv_heads=1), 1

    yield GIVEN_UP, Case("1 x 1024, batch_invariant", **uniform(1, 1024), batch_invariant=True), 1
    yield GIVEN_UP, Case("64 x 1024, batch_invariant", **uniform(64, 1024), batch_invariant=True), 1
    yield GIVEN_UP, Case("1 x 131072, batch_invariant", **uniform(1, 131072), batch_invariant=True), 1
    yield GIVEN_UP, Case("8 x 2048", **uniform(8, 2048), layout="packed"), 1
    yield GIVEN_UP, Case("8 x 2048, 4 queries", **uniform(8, 2048, 4), layout="packed"), 1
    yield GIVEN_UP, Case("8 x 2048, 4 queries", **uniform(8, 2048, 4), kind="int8"), 1
    yield GIVEN_UP, Case("8 x 2048, 8 queries", **uniform(8, 2048, 8), kind="fp8_e5m2"), 1
    yield GIVEN_UP, Case("32 x 8192, heads of 80", **uniform(32, 8192), head_size=80), 1
    yield GIVEN_UP, Case("32 x 8192, 4 queries, heads of 256", **uniform(32, 8192, 4), head_size=256), 1
    yield GIVEN_UP, Case("32 x 8192, 4 queries", **uniform(32, 8192, 4), kind="nvfp4"), 1
    for kind in ("int8", "nvfp4"):
        for batch, length in ((1, 1024), (8, 1024), (1, 32768), (64, 1024)):
            yield GIVEN_UP, Case(f"{batch} x {length}", **uniform(batch, length), kind=kind), 1
        yield GIVEN_UP, Case("64 x 8192, 4 queries", **uniform(64, 8192, 4), kind=kind), 1
        yield GIVEN_UP, Case("8 x 32768, window of 4096", **uniform(8, 32768), kind=kind, window=4096), 1
        yield GIVEN_UP, Case("prefill 1 x 8k", (8192,), (8192,), kind=kind), 1
    yield GIVEN_UP, Case("8 x 2048, 4 queries, heads of 64", **uniform(8, 2048, 4), kind="int8", head_size=64), 1
    yield GIVEN_UP, Case("64 x 8192, batch_invariant", **uniform(64, 8192), kind="int8", batch_invariant=True), 1
    yield GIVEN_UP, Case("prefill 1 x 8k", (8192,), (8192,), layout="packed"), 1
    yield GIVEN_UP, Case("64 x 8192, 16 heads in a group", **uniform(64, 8192), layout="packed", kv_heads=2), 1
    yield GIVEN_UP, Case("64 x 8192, batch_invariant", **uniform(64, 8192), layout="packed", batch_invariant=True), 1
    yield (
        GIVEN_UP,
        Case("64 x 8192, 16 heads in a group, batch_invariant", **uniform(64, 8192), kv_heads=2, batch_invariant=True),
        1,
    )
    for kind in ("auto", _E4M3):
        yield GIVEN_UP, Case("1 x 8192, 16 queries", **uniform(1, 8192, 16), kind=kind), 1
        yield GIVEN_UP, Case("1 x 131072, 8 queries", **uniform(1, 131072, 8), kind=kind), 1
        yield (
            GIVEN_UP,
            Case("8 x 1024, 4 queries, 1/16 heads", **uniform(8, 1024, 4), kind=kind, heads=16, kv_heads=1),
            1,
        )
        yield GIVEN_UP, Case("8 x 1024, 4 queries, heads of 256", **uniform(8, 1024, 4), kind=kind, head_size=256), 1
        yield GIVEN_UP, Case("1 x 131072, one KV head", **uniform(1, 131072), kind=kind, heads=8, kv_heads=1), 1
    yield GIVEN_UP, Case("1 x 32768, one KV head, pages of 1", **uniform(1, 32768), heads=8, kv_heads=1, page=1), 1
    yield GIVEN_UP, Case("8 x 8192, 16 heads in a group, window", **uniform(8, 8192), kv_heads=2, window=1024), 1


class _Tensor(ctypes.Structure):
    """A DLTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


def tensor(array: Any) -> Any:
    """A pointer to the DLTensor of a CuPy array."""
    if array is None:
        return None
    code = 4 if array.dtype.name == "bfloat16" else {"i": 0, "u": 1, "f": 2}[array.dtype.kind]
    sizes = (ctypes.c_int64 * array.ndim)(*array.shape)
    steps = (ctypes.c_int64 * array.ndim)(*(n // array.itemsize for n in array.strides))
    it = _Tensor(array.data.ptr, 2, array.device.id, array.ndim, code, 8 * array.itemsize, 1, sizes, steps, 0)
    it.kept = array
    return ctypes.pointer(it)


class Library:
    """libkernels by its C interface."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path.resolve()))
        self._call = self._library.pykv_paged_attention
        some, number, yes = ctypes.c_void_p, ctypes.c_double, ctypes.c_bool
        types = [some, number, yes, ctypes.c_int64, number, some, some, ctypes.c_char_p, some, some, yes, some, some]
        fields = [("struct_size", ctypes.c_size_t), *((f"field_{i}", t) for i, t in enumerate(types))]
        self._options = type("Options", (ctypes.Structure,), {"_fields_": fields})
        # A library from before there was this struct takes its fields as arguments; it has no message about the size.
        self._has_options = b"struct_size" in path.read_bytes()
        self._call.argtypes = [some] * 8 if self._has_options else [*[some] * 6, *types, some]
        self._library.pykv_last_error.restype = ctypes.c_char_p

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(self._library.pykv_last_error().decode())

    def call(self, case: Case, on: Arrays, device: Cuda) -> Any:
        size = ctypes.c_int64()
        sizes = (sum(case.queries), len(case.lens), case.heads, case.kv_heads, case.head_size)
        self._check(
            self._library.pykv_paged_attention_workspace_size(
                *map(ctypes.c_int64, sizes), case.batch_invariant, device.cupy.cuda.Device().id, ctypes.byref(size)
            )
        )
        workspace = device.cupy.empty(size.value, np.uint8)
        given = [tensor(x) for x in (on.out, on.query, *on.caches, on.tables, on.lens)]
        cu_query_lens, kept = tensor(on.cu_query_lens), tensor(workspace)
        options = [
            cu_query_lens, math.nan, True, case.window or 0, 0, None, None, case.kind.encode(), None, None,
            case.batch_invariant, None, kept,
        ]  # fmt: skip
        if self._has_options:
            values = [ctypes.cast(x, ctypes.c_void_p) if isinstance(x, ctypes._Pointer) else x for x in options]
            struct = self._options(ctypes.sizeof(self._options), *values)
            struct.kept = cu_query_lens, kept
            options = [ctypes.pointer(struct)]

        def call() -> None:
            stream = device.cupy.cuda.get_current_stream().ptr
            self._check(self._call(*given, *options, stream))

        return call


@dataclass(frozen=True)
class Figure:
    group: str
    name: str
    kind: str
    layout: str
    us: float
    other_us: float
    error: float  # the greatest difference of results, against the greatest result
    most: float  # that us / other_us may be

    @property
    def is_right(self) -> bool:
        return self.error <= 0.02 and (self.group == GIVEN_UP or self.us <= self.most * self.other_us)


def measure(group: str, case: Case, most: float, libraries: list[Library], device: Cuda) -> Figure:
    copies = min(64, math.ceil(3 * device.cache_bytes / case.kv_bytes))
    made = [arrays(case, device) for _ in range(copies)]
    calls = [[library.call(case, on, device) for on in made] for library in libraries]
    outs = []
    for own in calls:
        made[0].out.fill(0)
        own[0]()
        outs.append(made[0].out.astype(np.float32))
    error = float(abs(outs[0] - outs[1]).max() / abs(outs[1]).max())
    times: list[list[float]] = [[], []]
    for i in range(6):  # a b b a a b ...
        which = (i + 1) // 2 % 2
        times[which].append(1e6 * device.time(calls[which]))
    us, other_us = (statistics.median(t) for t in times)
    return Figure(group, case.name, case.kind, case.layout, us, other_us, error, most)


def own_library() -> Path:
    """The one that pykv has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libkernels" in line:
            return Path(line.split(maxsplit=5)[5])
    raise RuntimeError("pykv has loaded no libkernels")


def main() -> None:
    parser = argparse.ArgumentParser(description="Times paged attention against another build of the library")
    parser.add_argument("other", type=Path, help="the other libkernels.so")
    parser.add_argument("--own", type=Path, help="this one, if not the one that pykv has loaded")
    parser.add_argument("--bar", type=float, default=3, help="percent that a case may be slower (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    device = Cuda()
    libraries = [Library(arguments.own or own_library()), Library(arguments.other)]
    figures = []
    for group, case, higher in output.progress(list(cases()), "measuring", lambda item: item[1].name):
        figures.append(measure(group, case, 1 + higher * arguments.bar / 100, libraries, device))
        device.cupy.get_default_memory_pool().free_all_blocks()
    rows = [
        [f.group, f.name, f.kind, f.layout, f"{f.us:.2f}", f"{f.other_us:.2f}", f"{f.us / f.other_us - 1:+.1%}"]
        + [f"{f.error:.1e}", "" if f.is_right else "FAILS"]
        for f in figures
    ]
    headings = ["group", "case", "cache", "layout", "us", "other us", "slower", "error", ""]
    output.show(f"{device.describe()['name']}, against {arguments.other}", headings, rows, right=4)
    if arguments.json:
        lines = [asdict(f) | {"is_right": f.is_right} for f in figures]
        write_json(arguments.json, device, lines, other=str(arguments.other), bar=arguments.bar)
    sys.exit(0 if all(f.is_right for f in figures) else 1)


if __name__ == "__main__":
    main()
