"""Products of 8-bit rows in groups, beside one product of as many rows, and beside one call for each group.

The sizes are those that DeepGEMM's own table has: blocks of 128 have scales, and groups have the same number of rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import pykv

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench_scaled_mm import on_device
from timing import Call, Case, Device, main

# Groups, rows of each, n, k.
LONG = [(4, 8192, 4096, 7168), (4, 8192, 7168, 2048), (8, 4096, 4096, 7168), (8, 4096, 7168, 2048)]
SHORT = [(1, 1024, 4096, 7168), (1, 1024, 7168, 2048), (2, 512, 4096, 7168), (2, 512, 7168, 2048)]
SHORT += [(4, 256, 4096, 7168), (4, 256, 7168, 2048), (32, 64, 4096, 7168), (32, 16, 4096, 7168)]


def operands(groups: int, rows: int, n: int, k: int, blocks: bool, device: Device) -> tuple[Any, Any, Any, Any]:
    """Of all groups, one after another: a, b, and their scales, those of blocks as DeepGEMM has them."""
    a = on_device(device, "float8_e4m3fn", groups * rows, k).copy()
    b = on_device(device, "float8_e4m3fn", groups * n, k).copy().reshape(groups, n, k).swapaxes(1, 2)
    if blocks:
        of_a = device.random((k // 128, groups * rows), "float32").T
        return a, b, of_a, device.random((groups, n // 128, k // 128), "float32").swapaxes(1, 2)
    return a, b, device.random((groups * rows,), "float32"), device.random((groups, n), "float32")


def grouped(form: str, groups: int, rows: int, n: int, k: int, blocks: bool, dtype: str, device: Device) -> Call:
    a, b, of_a, of_b = operands(groups, rows, n, k, blocks, device)
    out = device.random((groups * rows, n), dtype)
    each = np.full(groups, rows, np.int32)
    if form == "row_groups":
        told = {form: device.array(np.repeat(np.arange(groups, dtype=np.int32), rows))}
    elif form == "group_begins":
        told = {form: device.array(np.concatenate([[0], each.cumsum()]).astype(np.int32))}
    else:
        told = {form: device.array(each)}
        a, out, of_a = (x.reshape(groups, rows, *x.shape[1:]) for x in (a, out, of_a.copy()))
        if blocks:  # rows side by side within each group
            of_a = device.random((groups, k // 128, rows), "float32").swapaxes(1, 2)
    return lambda: pykv.grouped_scaled_mm(out, a, b, of_a, of_b, **told)


def one_matrix(groups: int, rows: int, n: int, k: int, blocks: bool, dtype: str, device: Device) -> Call:
    a, b, of_a, of_b = operands(groups, rows, n, k, blocks, device)
    out = device.random((groups * rows, n), dtype)
    return lambda: pykv.cutlass_scaled_mm(out, a, b[0], of_a, of_b[0])


def one_by_one(groups: int, rows: int, n: int, k: int, blocks: bool, dtype: str, device: Device) -> Call:
    a, b, of_a, of_b = operands(groups, rows, n, k, blocks, device)
    out = device.random((groups * rows, n), dtype)
    parts = [
        (out[i * rows : (i + 1) * rows], a[i * rows : (i + 1) * rows], b[i], of_a[i * rows : (i + 1) * rows], of_b[i])
        for i in range(groups)
    ]

    def run() -> None:
        for part in parts:
            pykv.cutlass_scaled_mm(*part)

    return run


def cases(dtypes: list[str]) -> Iterator[Case]:
    for dtype in dtypes:
        for blocks in (True, False):
            scales = "blocks" if blocks else "rows"
            for shapes, forms in ((LONG, ("row_groups", "group_begins")), (SHORT, ("group_sizes",))):
                for groups, rows, n, k in shapes:
                    size = {"groups": groups, "tokens": rows, "n": n, "k": k}
                    written = groups * rows * n * (4 if dtype == "float32" else 2)
                    moved = groups * k * (n + rows) + written
                    for form in forms:
                        make = partial(grouped, form, groups, rows, n, k, blocks, dtype)
                        yield Case(f"grouped_scaled_mm {form}, {scales}", size, dtype, moved, make, written)
                    for name, beside in (("one matrix", one_matrix), ("one by one", one_by_one)):
                        make = partial(beside, groups, rows, n, k, blocks, dtype)
                        yield Case(f"cutlass_scaled_mm {name}, {scales}", size, dtype, moved, make, written)


if __name__ == "__main__":
    main(cases)
