"""Products of 8-bit matrices with scales: matrices of large models.

torch's own products are timed beside, where torch has CUDA and is what makes arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from timing import Call, Case, Device, has_torch, main, on_cupys_stream

SHAPES = [(4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192)]  # n, k
ROWS = [1, 16, 64, 256, 1024, 8192]
# name -> dtype of the codes, what scales are of
FORMS = {
    "fp8 rows": ("float8_e4m3fn", "rows"),
    "fp8 tensors": ("float8_e4m3fn", "tensors"),
    "fp8 blocks": ("float8_e4m3fn", "blocks"),
    "int8": ("int8", "rows"),
    "int8 azp": ("int8", "rows"),
}


@cache
def codes(dtype: str, rows: int, columns: int) -> npt.NDArray[Any]:
    rng = np.random.default_rng(0)
    some = rng.integers(0, 256, 1 << 22, np.uint8)
    if dtype == "float8_e4m3fn":
        some = np.where((some & 0x7F) >= 0x60, some & 0x9F, some)  # none of the largest, and no NaN
    return np.resize(some, (rows, columns)).view(np.int8 if dtype == "int8" else np.uint8)


@cache
def fp4_scales(rows: int, k: int) -> npt.NDArray[np.uint8]:
    some = np.random.default_rng(0).integers(0x20, 0x40, 1 << 16, np.uint8)
    return np.resize(some, -(-rows // 128) * 128 * (-(-k // 64) * 4))


@cache
def on_device(device: Device, dtype: str, rows: int, columns: int) -> Any:
    """They go there once: each call has a copy."""
    return device.array(codes(dtype, rows, columns))


def arrays(form: str, n: int, k: int, rows: int, device: Device) -> tuple[Any, Any, Any, Any]:
    dtype, scales = FORMS[form]
    a, w = (on_device(device, dtype, size, k).copy() for size in (rows, n))
    if scales == "blocks":  # neighbours of rows, and of k, side by side: as DeepGEMM and vLLM have them
        return a, w.T, device.random((k // 128, rows), "float32").T, device.random((n // 128, k // 128), "float32").T
    of_a, of_b = ((rows, 1), (1, n)) if scales == "rows" else ((1, 1), (1, 1))
    return a, w.T, device.random(of_a, "float32"), device.random(of_b, "float32")


def product(form: str, n: int, k: int, rows: int, dtype: str, device: Device) -> Call:
    operands, out = arrays(form, n, k, rows, device), device.random((rows, n), dtype)
    if form != "int8 azp":
        return lambda: pykv.cutlass_scaled_mm(out, *operands)
    sums, azp = (device.array(np.arange(size, dtype=np.int32)) for size in (n, rows))
    return lambda: pykv.cutlass_scaled_mm_azp(out, *operands, sums, azp)


def fp4_product(n: int, k: int, rows: int, dtype: str, device: Device) -> Call:
    a, w = (on_device(device, "uint8", size, k // 2).copy() for size in (rows, n))
    of_a, of_w = (device.array(fp4_scales(size, k)) for size in (rows, n))
    out = device.random((rows, n), dtype)
    return lambda: pykv.cutlass_scaled_fp4_mm(out, a, w, of_a, of_w, 1.0)


def of_torch(form: str, n: int, k: int, rows: int, dtype: str, device: Device) -> Call:
    import torch

    a, b, of_a, of_b = (torch.as_tensor(x) for x in arrays(form, n, k, rows, device))
    if form == "int8":  # sums alone
        sums = torch.empty((rows, n), dtype=torch.int32, device=a.device)
        return on_cupys_stream(lambda: torch._int_mm(a, b, out=sums))
    a, b = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn)
    out = torch.empty((rows, n), dtype=getattr(torch, dtype), device=a.device)
    return on_cupys_stream(lambda: torch._scaled_mm(a, b, of_a, of_b, out_dtype=out.dtype, out=out))


def torch_has(form: str, rows: int) -> bool:
    if form == "int8 azp":
        return False
    return rows > 16 if form == "int8" else rows >= 16 or form != "fp8 blocks"


def cases(dtypes: list[str]) -> Iterator[Case]:
    for dtype in dtypes:
        for n, k in SHAPES:
            for rows in ROWS:
                written = 2 * rows * n * (2 if dtype == "float32" else 1)
                size = {"n": n, "k": k, "tokens": rows}
                moved = k * (n + rows) + written
                for form in FORMS:
                    make = partial(product, form, n, k, rows, dtype)
                    yield Case(f"cutlass_scaled_mm {form}", size, dtype, moved, make, written)
                    if dtype == "bfloat16" and torch_has(form, rows) and has_torch():
                        name = "torch._int_mm" if form == "int8" else f"torch._scaled_mm {form}"
                        yield Case(name, size, dtype, moved, partial(of_torch, form, n, k, rows, dtype), written)
        for n, k in (SHAPES[0], SHAPES[1], SHAPES[3]):
            for rows in ROWS:
                written = 2 * rows * n * (2 if dtype == "float32" else 1)
                moved = k * (n + rows) * 9 // 16 + written
                make = partial(fp4_product, n, k, rows, dtype)
                yield Case("cutlass_scaled_fp4_mm", {"n": n, "k": k, "tokens": rows}, dtype, moved, make, written)


if __name__ == "__main__":
    main(cases)
