"""What a call costs before its kernel starts: eight arrays, every check, keyword arguments, and no token to work on.

    python benchmarks/interop/bench_call_cost.py [--json FILE]

The operations return after their checks because there are no tokens.  Beside them, in the same process: an empty Python
function and, as a yardstick, tvm-ffi's `testing.nop`, which converts as many torch tensors and checks nothing.  Each
figure is the least of many short rounds, in which all callers take turns, so that a noisy moment meets all of them.
Arrays belong to Python alone, and libraries that are not installed are left out.

With a GPU also what the host spends on a call that does launch: `rms_norm` of one row, three arrays, beside the same
call from C (`bare_launch.c`, which the C compiler of the machine builds).  The calls come in bursts that the launch
queue holds, and the wait for their end is not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.metadata
import importlib.util
import os
import shlex
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))
from timing import Cpu, Cuda, Device, write_json

ROUNDS, CALLS = 400, 500
BURST, HIDDEN = 200, 1024  # calls of rms_norm that wait in the queue of a stream, and their rows

# eight arrays each, named as the parameters; what is called is `op`
STATEMENTS = {
    "concat_and_cache_mla_rope_fused": "op(positions, query, key, latent, cos_sin, True, slots, cache, 'auto', scale)",
    "paged_attention": "op(out, query, keys, values, tables, lens, cu_query_lens=starts, sinks=sinks)",
}
NO_TOKENS: dict[str, dict[str, tuple[tuple[int, ...], str]]] = {
    "concat_and_cache_mla_rope_fused": {
        "positions": ((0,), "int64"),
        "query": ((0, 16, 64), "float32"),
        "key": ((0, 64), "float32"),
        "latent": ((0, 512), "float32"),
        "cos_sin": ((128, 64), "float32"),
        "slots": ((0,), "int64"),
        "cache": ((4, 16, 576), "float32"),
        "scale": ((1,), "float32"),
    },
    "paged_attention": {
        "out": ((0, 8, 64), "float32"),
        "query": ((0, 8, 64), "float32"),
        "keys": ((4, 16, 2, 64), "float32"),
        "values": ((4, 16, 2, 64), "float32"),
        "tables": ((2, 4), "int32"),
        "lens": ((2,), "int32"),
        "starts": ((3,), "int32"),
        "sinks": ((8,), "float32"),
    },
}


@dataclass(frozen=True)
class Caller:
    arrays: str  # whose, and where
    through: str
    op: str
    timer: timeit.Timer


@dataclass(frozen=True)
class Figure:
    arrays: str
    through: str
    op: str
    ns: float


def _timer(statement: str, op: Any, arrays: dict[str, Any]) -> timeit.Timer:
    """Times the statement with everything it names in local variables, as in a function of the caller's."""
    setup = "; ".join(f"{name} = given[{name!r}]" for name in arrays)
    return timeit.Timer(statement, f"op = given_op; {setup}", globals={"given": arrays, "given_op": op})


def _pykv(arrays: str, through: str, functions: Any, make: Callable[..., Any]) -> Iterator[Caller]:
    for op, statement in STATEMENTS.items():
        own = {name: make(shape, dtype=dtype) for name, (shape, dtype) in NO_TOKENS[op].items()}
        yield Caller(arrays, through, op, _timer(statement, getattr(functions, op), own))


def _torch(device: str) -> Iterator[Caller]:
    import torch

    import pykv.torch

    def make(shape: tuple[int, ...], dtype: str) -> Any:
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device)

    for through, functions in (("pykv", pykv), ("pykv.torch", pykv.torch), ("torch.ops.pykv", torch.ops.pykv)):
        yield from _pykv(f"torch, {device}", through, functions, make)
    if importlib.util.find_spec("tvm_ffi"):
        import tvm_ffi

        eight = {f"t{i}": make((4, 8, 64), dtype="float32") for i in range(8)}
        call = f"op({', '.join(eight)})"
        yield Caller(
            f"torch, {device}", "tvm-ffi", "testing.nop", _timer(call, tvm_ffi.get_global_func("testing.nop"), eight)
        )


def callers(has_gpu: bool) -> Iterator[Caller]:
    def empty(positions, query, key, latent, cos_sin, is_neox, slots, cache, dtype, scale):  # type: ignore[no-untyped-def]
        pass

    op = "concat_and_cache_mla_rope_fused"
    yield Caller("none", "Python", "an empty function", _timer(STATEMENTS[op], empty, dict.fromkeys(NO_TOKENS[op])))
    yield from _pykv("NumPy", "pykv", pykv, np.zeros)
    for device in ["cpu", "cuda"][: 1 + has_gpu]:
        if importlib.util.find_spec("torch"):
            yield from _torch(device)
    if has_gpu and importlib.util.find_spec("cupy"):
        import cupy

        yield from _pykv("CuPy", "pykv", pykv, cupy.zeros)


def measure(chosen: list[Caller]) -> list[Figure]:
    best = [float("inf")] * len(chosen)
    for _ in range(ROUNDS):
        for i, caller in enumerate(chosen):
            best[i] = min(best[i], caller.timer.timeit(CALLS))
    return [Figure(c.arrays, c.through, c.op, round(1e9 * t / CALLS, 1)) for c, t in zip(chosen, best, strict=True)]


def _bare_launch(folder: str) -> Any:
    """The loop in C, linked with the library that this process has loaded."""
    source, built = Path(__file__).with_name("bare_launch.c"), Path(folder) / "bare_launch.so"
    flags = [f"-I{pykv.get_include()}", f"-L{pykv.get_library_dir()}", "-l:libkernels.so.0"]
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-O2", "-shared", "-fPIC", source, "-o", built, *flags], check=True)
    function = ctypes.CDLL(str(built)).bare_launch
    function.restype = ctypes.c_double
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, pointer, pointer, ctypes.c_int64, ctypes.c_int, pointer]
    return function


def launches() -> Iterator[Figure]:
    """What the host spends on rms_norm and its launch."""
    import cupy

    made = [cupy.zeros(shape, "float32") for shape in ((1, HIDDEN), (1, HIDDEN), (HIDDEN,))]
    ways: list[tuple[str, str, Any, list[Any]]] = [("CuPy", "pykv", pykv.rms_norm, made)]
    if importlib.util.find_spec("torch"):
        import torch

        importlib.import_module("pykv.torch")
        tensors = [torch.zeros(a.shape, device="cuda") for a in made]
        ways += [
            ("torch, cuda", "pykv", pykv.rms_norm, tensors),
            ("torch, cuda", "torch.ops.pykv", torch.ops.pykv.rms_norm, tensors),
        ]
    with tempfile.TemporaryDirectory() as folder:
        bare = _bare_launch(folder)
        pointers = [a.data.ptr for a in made]
        timers = [
            _timer("op(out, x, w, 1e-6)", op, dict(zip(("out", "x", "w"), arrays, strict=True)))
            for _, _, op, arrays in ways
        ]
        best = [float("inf")] * (1 + len(ways))
        for _ in range(ROUNDS):
            for i in range(len(best)):
                cupy.cuda.Device().synchronize()
                ns = bare(*pointers, HIDDEN, BURST, None) if i == 0 else 1e9 * timers[i - 1].timeit(BURST) / BURST
                best[i] = min(best[i], ns)
        cupy.cuda.Device().synchronize()
    if best[0] < 0:
        raise RuntimeError("pykv_rms_norm failed in bare_launch.c")
    yield Figure("none", "C", "rms_norm, launched", round(best[0], 1))
    for (arrays, through, _, _), ns in zip(ways, best[1:], strict=True):
        yield Figure(arrays, through, "rms_norm, launched", round(ns, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Times calls up to the start of the kernel")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()

    has_gpu = pykv._C.cuda_device_count() > 0
    before = os.getloadavg()[0]
    figures = measure(list(callers(has_gpu)))
    if has_gpu and importlib.util.find_spec("cupy"):
        figures += launches()
    table = Table("arrays", "through", "operation", title="eight arrays, before launch; and rms_norm with its launch")
    table.add_column("ns", justify="right")
    for f in figures:
        table.add_row(f.arrays, f.through, f.op, f"{f.ns:.0f}")
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    if arguments.json:
        device: Device = Cuda() if has_gpu else Cpu()
        names = ("torch", "cupy-cuda13x", "apache-tvm-ffi")
        versions = {n: importlib.metadata.version(n) for n in names if _installed(n)}
        load = {"before": round(before, 2), "after": round(os.getloadavg()[0], 2), "cpus": os.cpu_count()}
        write_json(arguments.json, device, [asdict(f) for f in figures], libraries=versions, load=load)


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    main()
